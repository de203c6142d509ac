"""One rank: the process around the training loop. Signals, threads, device, process groups, exit code."""

import contextlib
import ctypes
import dataclasses
import os
import sys
from datetime import timedelta

import torch
from torch.distributed import DistError, PrefixStore, Store, TCPStore

from trainer import loop, output, record, stop
from trainer.config import TrainConfig
from trainer.distributed import join_world
from trainer.errors import Unavailable, UserError
from trainer.failures import Board, is_echo, of_exception
from trainer.topology import Topology

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)


def run_forked(config: TrainConfig, node: Topology) -> None:
    """Body of a rank that the agent forked; RANK and its companions are in the environment."""
    stop.die_with_parent()
    assert node.nproc_per_node is not None
    local_rank = int(os.environ["LOCAL_RANK"])
    topology = dataclasses.replace(
        node,
        rank=node.node_rank * node.nproc_per_node + local_rank,
        local_rank=local_rank,
        master_port=int(os.environ["MASTER_PORT"]),
        agent_store=True,
    )
    output.prefix_lines(topology.node_rank, topology.rank)
    store = _open_store(topology, config)
    code = run_rank(config, topology, store, Board(store, node.node_rank, node.nnodes))
    if code:
        sys.exit(code)


def run_alone(config: TrainConfig, topology: Topology) -> int:
    """A rank that a scheduler started itself (srun, mpirun, torchrun): no agent of ours watches over it."""
    if topology.rank == 0:
        record.Record(record.run_folder(config)).start(config, topology)
    try:
        store = _open_store(topology, config)
    except UserError as error:
        return _fail(error, config, topology, None)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's agent keeps its store over restarts
    return run_rank(config, topology, PrefixStore(f"attempt/{attempt}", store), None)


def run_rank(config: TrainConfig, topology: Topology, store: Store, board: Board | None) -> int:
    """Train as one rank and return the exit code. A failure is told before this rank's connections close."""
    configure_torch(config)
    _keep_memory()
    request = stop.StopRequest(agent=board is not None)
    try:
        with join_world(config, topology, store) as world:
            try:
                code = loop.train(config, world, request)
                world.barrier()
            except BaseException as error:  # noqa: BLE001 the agent must hear of every end
                code = _fail(error, config, topology, board)
            return code
    except Exception as error:  # noqa: BLE001 joining failed, or leaving
        return _fail(error, config, topology, board)


def _fail(error: BaseException, config: TrainConfig, topology: Topology, board: Board | None) -> int:
    assert topology.rank is not None
    failure = of_exception(error, topology.rank, topology.node_rank)
    if board:
        with contextlib.suppress(DistError):  # the head's store is gone: the agent tells
            board.report(failure, echo=is_echo(error))
        return failure.exit_code
    echo = f"rank {topology.rank} on {failure.host} ended because a peer was gone: {failure.message}"
    print(echo if is_echo(error) else failure.text(), file=sys.stderr, flush=True)
    if topology.rank == 0:
        record.close_failed(config, failure)
    return failure.exit_code


def _open_store(topology: Topology, config: TrainConfig) -> Store:
    """Raises UserError if the head's port is in use, Unavailable if the head cannot be reached."""
    serve = topology.rank == 0 and not topology.agent_store
    place = f"{topology.master_addr}:{topology.master_port}"
    try:
        return TCPStore(
            topology.master_addr,
            topology.master_port,
            is_master=serve,
            wait_for_workers=False,
            timeout=timedelta(seconds=config.rendezvous_timeout_s),
        )
    except DistError as error:
        if serve:
            reason = str(error).splitlines()[0]
            raise UserError(f"Cannot listen on {place}: {reason}", "another MASTER_PORT") from None
        raise Unavailable(
            f"Rank {topology.rank} could not reach the head {place} within {config.rendezvous_timeout_s} s.",
            "check MASTER_ADDR and that rank 0 has started",
        ) from None


def _keep_memory() -> None:
    """Let glibc keep what a step frees for the next one; else it gives it back and faults it in again at every step.

    Measured: 8,000 page faults and 12 % of the time of a step of the MNIST CNN (python -m benchmarks loop).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        mallopt(_M_MMAP_THRESHOLD, 1 << 25)


def configure_torch(config: TrainConfig) -> None:
    """Everything outside the model that decides the bits of a result."""
    torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = not config.deterministic
    torch.use_deterministic_algorithms(config.deterministic, warn_only=True)
