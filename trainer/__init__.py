"""The container side of Intermodal: one training program for every runtime."""

__version__ = "0.1.0"
