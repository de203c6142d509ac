"""The real thing: a Docker engine must be there, a missing one is a failure and not a skip."""

import os
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
def image(engine: Any) -> Iterator[str]:
    """The training image on the CPU base, built the way a user builds it."""
    done = invoke("build", "--base", "cpu", "--os-image", OS_IMAGE, "--tag", IMAGE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return IMAGE


@pytest.fixture(autouse=True)
def _nothing_is_left(engine: Any) -> Iterator[None]:
    """No launcher, container, network or process of a run outlives its test; one that does is removed and told."""
    yield
    for process in _STARTED:
        process.kill()
    _STARTED.clear()
    label = {"label": RUN_LABEL}
    containers, networks = engine.containers.list(all=True, filters=label), engine.networks.list(filters=label)
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
