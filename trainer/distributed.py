"""The process groups of a run and the few collective operations that the loop needs."""

import contextlib
import dataclasses
import fcntl
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer import contract
from trainer.config import TrainConfig
from trainer.errors import UserError
from trainer.topology import Topology

_SIOCGIFADDR = 0x8915  # netdevice(7)


@dataclasses.dataclass(frozen=True)
class World:
    """All ranks of a run, seen from one of them. `control` is a CPU group beside the one that carries gradients."""

    topology: Topology
    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints and writes."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add each value over all ranks, in double precision; every rank gets the same bits."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return [float(value) for value in total]

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.control)

    def broadcast(self, data: bytes | None) -> bytes | None:
        """Bytes (or None) of rank 0, on every rank."""
        size = torch.tensor([-1 if data is None else len(data)])
        dist.broadcast(size, src=0, group=self.control)
        if int(size) < 0:
            return None
        buffer = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(size), dtype=torch.uint8)
        )
        dist.broadcast(buffer, src=0, group=self.control)
        return buffer.numpy().tobytes()


class Agreement:
    """All ranks learn, at the same step, that one of them was asked to stop.

    The question of one step is answered during the next, so it costs no waiting.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._flag = torch.zeros(1)
        self._pending: dist.Work | None = None

    def reached(self, requested: bool) -> bool:
        """True on every rank alike, one step after any rank has called with True."""
        if self._world.size == 1:
            return requested
        agreed = False
        if self._pending is not None:
            self._pending.wait()
            agreed = bool(self._flag)
        self._flag.fill_(float(requested))
        self._pending = dist.all_reduce(self._flag, group=self._world.control, async_op=True)
        return agreed

    def close(self) -> None:
        """Finish the question that is still open."""
        if self._pending is not None:
            self._pending.wait()


@contextlib.contextmanager
def join_world(config: TrainConfig, topology: Topology, store: dist.Store) -> Iterator[World]:
    """Open the process groups, and leave through destroy_process_group whatever happens."""
    assert topology.rank is not None
    device = pick_device(config, topology.local_rank)
    _name_gloo_interface(topology)
    timeout = timedelta(seconds=config.timeout_s)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("ranks", store),
        rank=topology.rank,
        world_size=topology.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        control = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(control, dist.ProcessGroup)
        yield World(topology, topology.rank, topology.world_size, device, control)
    finally:
        dist.destroy_process_group()


def count_devices(config: TrainConfig) -> int:
    """GPUs of this node that the configuration allows.

    A child counts, because without NVML counting opens CUDA, and a process that did cannot fork ranks.
    """
    if config.device == "cpu" or not torch.backends.cuda.is_built():
        return 0
    child = os.fork()
    if not child:
        os._exit(torch.cuda.device_count())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        raise UserError(f"Counting the GPUs of this node crashed ({signal.Signals(-code).name}).", "--device cpu")
    return code


def check_devices(config: TrainConfig, topology: Topology) -> None:
    """Raises UserError if this node has GPUs, or is asked for them, but has fewer than processes.

    A scheduler that starts the ranks itself may show each its own GPU alone (srun --gpus-per-task).
    """
    count, nproc = count_devices(config), topology.nproc_per_node or 1
    if config.device == "cuda" and count == 0:
        raise UserError("--device cuda but this node has no GPU that torch can use.", "--device cpu")
    if count and nproc > count and not (topology.rank is not None and count == 1):
        raise UserError(
            f"{nproc} processes on a node with {count} GPU(s): two processes never share one.",
            f"--nproc-per-node {count}, or --device cpu",
        )


def pick_device(config: TrainConfig, local_rank: int) -> torch.device:
    """The CPU, or this rank's own GPU, which may be the only one it sees."""
    count = 0 if config.device == "cpu" else torch.cuda.device_count()
    if count == 0:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank if count > 1 else 0)
    torch.cuda.set_device(device)
    return device


def _name_gloo_interface(topology: Topology) -> None:
    """Gloo listens where the host's own name points, or on loopback; make it the way to the head instead."""
    if "GLOO_SOCKET_IFNAME" in os.environ or sys.platform != "linux":
        return
    name_interface(topology, topology.master_addr)


def name_interface(topology: Topology, peer: str) -> None:
    """Let gloo use the interface that leads to `peer`. Not loopback if there are other hosts: the head's own name may
    be 127.0.1.1 (Debian's default).
    """
    name = interface_towards(peer, topology.master_port or contract.DEFAULT_PORT)
    lonely = name == "lo" and topology.nnodes > 1 and not topology.shared_host
    if name and not lonely and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_towards(address: str, port: int) -> str | None:
    """Name of the IPv4 interface whose address this host uses to reach `address`; None if there is none."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port))
            own = probe.getsockname()[0]
            names = [name for _, name in socket.if_nameindex() if _address_of(probe, name) == own]
    except OSError:
        return None
    return names[0] if names else None


def _address_of(probe: socket.socket, interface: str) -> str | None:
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])
