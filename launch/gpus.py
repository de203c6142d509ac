"""Which GPUs this host has, and how they are shared out: no GPU belongs to two nodes."""

import itertools
import os
import shutil

from launch import shell
from trainer.errors import UserError


def visible() -> tuple[str, ...]:
    """The GPUs of this host by UUID, or those that CUDA_VISIBLE_DEVICES leaves. Raises UserError if nobody knows."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        names = [name.strip() for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
        return tuple(itertools.takewhile(lambda name: name not in ("", "-1"), names))  # CUDA stops at an invalid one
    if shutil.which("nvidia-smi") is None:
        return ()
    listed = shell.output(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"])
    if listed is None:
        raise UserError(
            "nvidia-smi is installed but fails, so the GPUs of this host are unknown.",
            "--gpus-per-node 0 to compute on CPUs; `nvidia-smi` says what is wrong",
        )
    return tuple(line.strip() for line in listed.splitlines() if line.strip())


def shares(nodes: int, per_node: int | None) -> tuple[tuple[str, ...], ...]:
    """The GPUs of each node on this host, which is not asked if nobody wants any. Raises UserError."""
    return share_out(() if per_node == 0 else visible(), nodes, per_node)


def share_out(available: tuple[str, ...], nodes: int, per_node: int | None) -> tuple[tuple[str, ...], ...]:
    """Consecutive GPUs for each node; `per_node` None means as many as all nodes can have alike.

    Raises UserError if there are too few.
    """
    each = len(available) // nodes if per_node is None else per_node
    if per_node is None and available and not each:
        raise UserError(
            f"{nodes} nodes cannot share out {len(available)} GPU(s): no GPU belongs to two nodes.",
            f"--nodes {len(available)}, or --gpus-per-node 0 to compute on CPUs",
        )
    if nodes * each > len(available):
        raise UserError(
            f"{nodes} nodes with {each} GPUs each, but this host has {len(available)}.",
            f"--gpus-per-node {len(available) // nodes}, or fewer --nodes",
        )
    return tuple(available[node * each : (node + 1) * each] for node in range(nodes))


def check(processes: int, gpus: tuple[tuple[str, ...], ...]) -> None:
    """Raises UserError if processes would have to share a GPU."""
    each = len(gpus[0])
    if each and processes > each:
        raise UserError(
            f"{processes} processes on a node with {each} GPU(s): two processes never share one.",
            f"--nproc-per-node {each}, or --gpus-per-node 0 to compute on CPUs",
        )
