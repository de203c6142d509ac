"""The Slurm cluster of slurm/cluster, in containers on this host: to try and to test the Slurm runtime with."""

import os

from launch import images, shell
from launch.runtimes import docker as engine


def up(nodes: str | None = None) -> int:
    """Start the cluster, with its images built as ours are; returns an exit code. Raises UserError without Docker."""
    engine.connect()
    words = [] if nodes is None else ["--nodes", nodes]
    with images.secrets() as given:
        flags = [os.environ.get("BUILD_FLAGS", ""), *(f"--secret={secret}" for secret in given)]
        return cluster("up", *words, BUILD_FLAGS=" ".join(flags).strip())


def cluster(*words: str, **env: str) -> int:
    """Run slurm/cluster/cluster with this terminal; returns its exit code."""
    program = str(images.ROOT / "slurm" / "cluster" / "cluster")
    return shell.code([program, *words], env={**os.environ, **env})
