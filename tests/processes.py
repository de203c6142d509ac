"""Runs of `trainer` for tests, each node a fork of the test process so that torch is imported only once."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from trainer import cli

LIMIT_S = 90
_STARTED: list["Node"] = []


@dataclasses.dataclass
class Node:
    """One `trainer train` that is running or has ended."""

    pid: int
    log: Path
    is_head: bool = True
    code: int | None = None

    def wait(self) -> int:
        deadline = time.monotonic() + LIMIT_S
        while self.code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"hung; its last lines:\n{self.text()[-2000:]}")
            else:
                time.sleep(0.02)
        return self.code

    def text(self) -> str:
        return self.log.read_text()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def ranks(self) -> list[int]:
        """Process numbers of the ranks, in the order of their local rank."""
        path = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        children = sorted(int(pid) for pid in path.read_text().split())
        return children[1:] if self.is_head else children  # the head's first child serves the store


def start(log: Path, env: dict[str, str], *arguments: str) -> Node:
    """Start `trainer train ARGUMENTS` with nothing but `env` in its environment."""
    pid = os.fork()
    if pid:
        _STARTED.append(Node(pid, log, is_head=env.get("PET_NODE_RANK", "0") == "0"))
        return _STARTED[-1]
    with contextlib.suppress(BaseException):
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
        keep = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "TMPDIR")}
        os.environ.clear()
        os.environ.update({**keep, **env})
        code = cli.main(["train", *arguments])
        sys.stdout.flush()
        os._exit(code)
    os._exit(99)


def end_all() -> None:
    """Kill the nodes that a failing test left running."""
    while _STARTED:
        node = _STARTED.pop()
        if node.code is None and os.waitpid(node.pid, os.WNOHANG) == (0, 0):
            os.kill(node.pid, signal.SIGKILL)
            os.waitpid(node.pid, 0)


def start_run(folder: Path, name: str, layout: str, *arguments: str, **env: str) -> list[Node]:
    """Start the agents of a run on loopback; `layout` is NODESxPROCESSES."""
    nodes, processes = layout.split("x")
    common = {
        "PET_NNODES": nodes,
        "PET_NPROC_PER_NODE": processes,
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
        "TRAINER_SHARED_HOST": "1",
        "TRAINER_RUN_ID": name,
        "TRAINER_RUNS_DIR": str(folder),
        "TRAINER_PROGRESS": "lines",
        **env,
    }
    return [
        start(folder / f"{name}.{index}.log", {**common, "PET_NODE_RANK": str(index)}, *arguments)
        for index in range(int(nodes))
    ]


def node_of(nnodes: int, node_rank: int, folder: Path) -> dict[str, str]:
    """Environment of one agent of a run whose other agents are another test's matter."""
    return {
        "PET_NNODES": str(nnodes),
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": str(node_rank),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
        "TRAINER_SHARED_HOST": "1",
        "TRAINER_RUNS_DIR": str(folder),
    }


def run(folder: Path, name: str, layout: str, *arguments: str, **env: str) -> dict[str, object]:
    """Run to the end, see that every node ended well, and return run.json."""
    nodes = start_run(folder, name, layout, *arguments, **env)
    codes = [node.wait() for node in nodes]
    assert codes == [0] * len(codes), "\n".join(node.text() for node in nodes)
    return record(folder, name)


def record(folder: Path, name: str) -> dict[str, object]:
    content: dict[str, object] = json.loads((folder / name / "run.json").read_text())
    return content


def weights(told: dict[str, object]) -> str:
    result = told["result"]
    assert isinstance(result, dict)
    return str(result["weights_sha256"])


def until(condition: object, what: str) -> None:
    """Wait until the callable `condition` is true."""
    assert callable(condition)
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.02)


def reached(folder: Path, name: str, step: int) -> bool:
    """True once the run has logged this step."""
    path = folder / name / "metrics.jsonl"
    return path.exists() and any(f'"step": {step},' in line for line in path.read_text().splitlines())


def free_port() -> int:
    """A port nobody holds now; the tests run alone on their host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
