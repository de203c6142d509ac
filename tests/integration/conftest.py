"""The real thing: a Docker engine must be there, a missing one is a failure and not a skip."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from launch.runtimes.docker import RUN_LABEL, connect

ROOT = Path(__file__).parent.parent.parent
IMAGE = "intermodal:integration"
OS_IMAGE = os.environ.get("OS_IMAGE", "debian:bookworm-slim")
_STARTED: list["subprocess.Popen[str]"] = []


def invoke(*words: str, timeout: float = 900, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run `invoke WORDS` in the checkout."""
    return subprocess.run(
        [sys.executable, "-m", "invoke", *words],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def start_invoke(*words: str) -> "subprocess.Popen[str]":
    """Start `invoke WORDS` as a terminal would, in a process group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "invoke", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    _STARTED.append(process)
    return process


@pytest.fixture(scope="session")
def engine() -> Any:
    return connect()


@pytest.fixture(scope="session")
def image(engine: Any) -> str:
    """The training image on the CPU base, built the way a user builds it."""
    done = invoke("build", "--base", "cpu", "--os-image", OS_IMAGE, "--tag", IMAGE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return IMAGE


class Cluster:
    """The project's own Slurm cluster; /shared on its nodes is a folder of this host."""

    PROGRAM = ROOT / "slurm" / "cluster" / "cluster"
    SHARED = ROOT / "build" / "cluster"

    def up(self) -> None:
        done = invoke("slurm-up")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    def lab(self, *words: str, timeout: float = 120, check: bool = False) -> "subprocess.CompletedProcess[str]":
        """Run a command on the login node as the ordinary user `lab`, in the project's folder."""
        return subprocess.run(
            [self.PROGRAM, "sh", *words],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=check,
            stdin=subprocess.DEVNULL,
        )

    def start(self, *words: str) -> "subprocess.Popen[str]":
        return subprocess.Popen([self.PROGRAM, "sh", *words], stdout=subprocess.DEVNULL, text=True)

    def on(self, node: str, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a command on a node as root."""
        program = os.environ.get("DOCKER", "docker")
        name = os.environ.get("CLUSTER_NAME", "intermodal-cluster")
        return subprocess.run([program, "exec", f"{name}-{node}", *words], capture_output=True, text=True, check=False)

    def power(self, verb: str, node: str) -> None:
        subprocess.run([self.PROGRAM, "node", node, verb], check=True, timeout=120)

    def wake(self) -> None:
        """Every node has power again, whatever a test did."""
        for node in ("c1", "c2"):
            if self.on(node, "true").returncode:
                self.power("start", node)

    def local(self, path: str) -> Path:
        """Where this host sees a path below /shared."""
        return self.SHARED / path.removeprefix("/shared/")

    def jobs(self) -> list[str]:
        return self.lab("squeue", "--noheader", "--format=%i %T").stdout.split("\n")[:-1]

    def processes(self) -> list[str]:
        """What the user runs on any node."""
        found = []
        for node in ("login", "c1", "c2"):
            found += self.on(node, "ps", "-u", "lab", "-o", "args=").stdout.split("\n")[:-1]
        return found


@pytest.fixture(scope="session")
def cluster(image: str) -> Cluster:
    """The cluster with the image as a SIF on its shared file system."""
    found = Cluster()
    found.up()
    done = invoke("singularity-build", "--from", image, "--out", str(found.SHARED / "intermodal.sif"), timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return found


@pytest.fixture(autouse=True)
def _nothing_is_left(engine: Any) -> Iterator[None]:
    """No launcher, container, network or process of a run outlives its test; one that does is removed and told."""
    label = {"label": RUN_LABEL}
    before = {found.id for found in (*engine.containers.list(all=True, filters=label), *engine.networks.list())}
    yield
    for process in _STARTED:
        process.kill()
    _STARTED.clear()
    containers = [found for found in engine.containers.list(all=True, filters=label) if found.id not in before]
    networks = [found for found in engine.networks.list(filters=label) if found.id not in before]
    for leftover in containers:
        leftover.remove(force=True)
    for leftover in networks:
        leftover.remove()
    assert [leftover.name for leftover in (*containers, *networks)] == []
    until(lambda: not trainers(), "the end of all trainer processes")


def trainers() -> list[str]:
    """Command lines of processes of this host that are `trainer`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.endswith(b"/bin/trainer") for word in words[:3]):
            found.append(b" ".join(words).decode())
    return found


def until(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.05)


def interrupt(process: "subprocess.Popen[str]") -> None:
    """Ctrl-C: the terminal tells the whole process group."""
    os.killpg(process.pid, signal.SIGINT)


def docker(*words: str) -> Sequence[str]:
    """Lines that the docker program prints."""
    program = os.environ.get("DOCKER", "docker")
    return subprocess.run([program, *words], capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture
def runs(cluster: Cluster, nobody_stays: None, request: pytest.FixtureRequest) -> str:
    """A folder for results on the shared file system, empty."""
    name = re.sub(r"\W+", "-", request.node.name)
    cluster.lab("rm", "-rf", f"/shared/runs/{name}", check=True)
    return f"/shared/runs/{name}"


@pytest.fixture
def nobody_stays(cluster: Cluster) -> Iterator[None]:
    """No job outlives its test, and no process of the user stays on any node."""
    yield
    cluster.lab("scancel", "--user=lab")
    cluster.wake()
    until(lambda: not cluster.jobs(), "the end of all jobs", 60)
    until(lambda: not cluster.processes(), "the end of all processes", 20)
