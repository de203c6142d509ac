"""The host side of Intermodal: from a command to nodes that run it. Never imports torch."""
