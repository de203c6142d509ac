"""Plain processes on this host: each node is an agent on loopback, in a session of its own."""

import contextlib
import ctypes
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from launch import gpus, shell
from launch.job import Job
from launch.plan import NodePlan, Plan, new_run_id, node_environment
from launch.supervisor import Node
from trainer.errors import UserError
from trainer.topology import port_for

# A plain process is part of this host: these describe it and its network, nothing of the user's Python.
HOST_VARIABLES = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "TERM",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "LD_LIBRARY_PATH",
    "CUDA_DEVICE_ORDER",
)
HEAD = "127.0.0.1"
_PR_SET_PDEATHSIG = 1  # prctl(2)


def prepare(job: Job) -> Job:
    """Name the run, share out the GPUs and choose a free port. Raises UserError."""
    for flag, value in (("--memory-gb", job.memory_gb), ("--shm-gb", job.shm_gb), ("--image", job.image)):
        if value is not None:
            raise UserError(f"{flag} has no meaning for plain processes.", f"leave out {flag}, or invoke docker-run")
    for mount in job.mount:
        if os.path.realpath(mount.source) != os.path.realpath(mount.target):
            raise UserError(
                f"Plain processes see the host's own folders, {mount.source} cannot be at {mount.target}.",
                "leave out --mount, or invoke docker-run",
            )
    cpus_of_node(job, 0)
    shares = gpus.shares(job.nodes, job.gpus_per_node)
    job = dataclasses.replace(job, name=job.name or new_run_id(job.command), gpus=shares)
    gpus.check(job.processes, shares)
    return dataclasses.replace(job, master_port=free_port(job))


def plan(job: Job) -> Plan:
    """One `trainer` a node, with an environment of its own."""
    host = {key: os.environ[key] for key in HOST_VARIABLES if key in os.environ}
    program = str(Path(sys.executable).parent / "trainer")
    nodes = []
    for index in range(job.nodes):
        assert job.master_port is not None
        env = {
            **host,
            "TRAINER_RUNS_DIR": os.path.abspath(job.runs_dir),
            "TRAINER_DATA_DIR": os.path.abspath(job.data_dir),
            "TRAINER_SHARED_HOST": "1",
            "CUDA_VISIBLE_DEVICES": ",".join(job.gpus[index]),
            **node_environment(job, index, HEAD, job.master_port, os.environ),
        }
        argv = (program, *job.command)
        nodes.append(NodePlan(index, argv, env, shell.command_line(argv, env)))
    return Plan(job, tuple(nodes))


def start(plan: Plan) -> list[Node]:
    """Start the agents; they die with this process."""
    progress = {"TRAINER_PROGRESS": "bar" if sys.stdout.isatty() else "lines"}
    return [Process(node, progress, cpus_of_node(plan.job, node.index)) for node in plan.nodes]


def clean(job: Job) -> None:
    """Processes leave nothing behind."""


class Process(Node):
    """A node that is a process of this host."""

    def __init__(self, node: NodePlan, more_env: dict[str, str], cpus: set[int], cwd: str | None = None) -> None:
        def in_child() -> None:
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                os.sched_setaffinity(0, cpus)

        self._silent = False
        try:
            self._process = subprocess.Popen(
                node.argv,
                cwd=cwd,
                env={**more_env, **node.env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=in_child,  # noqa: PLW1509 no threads yet
            )
        except FileNotFoundError:
            raise UserError(f"{node.argv[0]} is not installed.", "make setup") from None

    def chunks(self) -> Iterator[bytes]:
        assert self._process.stdout is not None
        while chunk := os.read(self._process.stdout.fileno(), 65536):
            yield chunk
        self._silent = True

    def wait(self) -> int:
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def why(self) -> str:
        code = self._process.returncode
        return f" ({signal.Signals(-code).name})" if code is not None and code < 0 else ""

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """With what it started and left behind, which holds its output open."""
        if self._process.poll() is None or not self._silent:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def remove(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()


def free_port(job: Job) -> int:
    """The port asked for, or one made from the run's name below the ephemeral range. Raises UserError if taken."""
    if job.master_port is not None:
        if not _is_free(job.master_port):
            raise UserError(f"Port {job.master_port} is in use.", "another --master-port, or leave it out")
        return job.master_port
    first = port_for(job.run_id)
    for candidate in (20000 + (first - 20000 + step) % 10000 for step in range(100)):
        if _is_free(candidate):
            return candidate
    raise UserError("No free port between 20000 and 29999.", "--master-port with a free one")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HEAD, port))
        except OSError:
            return False
    return True


def cpus_of_node(job: Job, index: int) -> set[int]:
    """The CPUs of a node: its share of --cpus, or all. Raises UserError if this host has too few."""
    available = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    if job.cpus is None or not available:
        return set(available)
    each = int(job.cpus)
    if each != job.cpus or each * job.nodes > len(available):
        raise UserError(
            f"{job.nodes} nodes with {job.cpus:g} CPUs each, but this host has {len(available)} whole ones.",
            f"--cpus {max(len(available) // job.nodes, 1)}, or fewer --nodes",
        )
    return set(available[index * each : (index + 1) * each])
