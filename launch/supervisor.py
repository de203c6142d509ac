"""Watches over the nodes of one run: shows and keeps their lines, ends them together, leaves nothing behind.

In the foreground this is the user's own process; with --detach it is a process of its own. `invoke cancel` and a
detached run meet through launch.json and a signal, so there is no daemon.
"""

import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Protocol

from launch.plan import Plan
from launch.state import LaunchState
from trainer import contract
from trainer.errors import UserError

PEERS_GRACE_S = 12.0  # after the first node failed, the others end by themselves
STOP_GRACE_S = 30.0  # for saving, after a request to stop
KILL_GRACE_S = 10.0


class Node(Protocol):
    """A started node of any runtime."""

    def chunks(self) -> Iterator[bytes]:
        """Its output until it ends."""

    def wait(self) -> int:
        """Its exit code, 128 + n for a signal n."""

    def why(self) -> str:
        """What the runtime knows of its end beyond the exit code; may be empty."""

    def stop(self) -> None:
        """Ask it to save and end; does nothing if it has ended."""

    def kill(self) -> None:
        """End it at once; does nothing if it has ended."""

    def remove(self) -> None:
        """Leave nothing of it behind."""


class Screen:
    """Prints whole lines and keeps them in the log. A line that ends in a carriage return is drawn over by the next
    on a terminal, and left out elsewhere.
    """

    def __init__(self, log: Path, *, show: bool) -> None:
        self._log = log
        self._show = show
        self._drawn = False
        self._lock = threading.Lock()

    def line(self, text: str, *, passing: bool) -> None:
        with self._lock:
            if not passing:
                with self._log.open("a", encoding="utf-8") as log:
                    log.write(text + "\n")
            if self._show and (not passing or sys.stdout.isatty()):
                clear = "\r\x1b[K" if self._drawn else ""
                self._drawn = passing
                sys.stdout.write(clear + text + ("" if passing else "\n"))
                sys.stdout.flush()


def supervise(
    plan: Plan, start: Callable[[], list[Node]], clean: Callable[[], None], state: LaunchState, *, show: bool
) -> int:
    """Start the nodes, follow them to the end, and return the run's exit code: that of the first node to fail."""
    watch = _Watch(Screen(state.log, show=show))
    code = contract.EXIT_FAILED
    state.begin(plan.job)
    with _Signals(watch):
        try:
            code = watch.follow(start, plan.job.time_limit_min)
        except UserError as error:
            code, watch.cause = contract.EXIT_BAD_REQUEST, str(error)
            raise
        finally:
            try:
                state.end(code, watch.cause)
            finally:
                clean()
    return code


class _Watch:
    """The nodes of a run and how they end."""

    def __init__(self, screen: Screen) -> None:
        self.cause = ""
        self._screen = screen
        self._nodes: list[Node] = []
        self._codes: list[tuple[int, int]] = []
        self._stop_requests = 0
        self._changed = threading.Event()

    def follow(self, start: Callable[[], list[Node]], time_limit_min: float | None) -> int:
        self._nodes = start()
        threads = [threading.Thread(target=self._pump, args=(index,), daemon=True) for index in range(len(self._nodes))]
        for thread in threads:
            thread.start()
        try:
            self._until_ended(time_limit_min)
        finally:
            for node in self._nodes:
                node.kill()
            for thread in threads:
                thread.join(timeout=KILL_GRACE_S)
            for node in self._nodes:
                node.remove()
        return self._result()

    def request_stop(self) -> None:
        self._stop_requests += 1
        self._changed.set()

    def _until_ended(self, time_limit_min: float | None) -> None:
        """Returns when all nodes have ended, or have had their time to."""
        limit = time.monotonic() + time_limit_min * 60 if time_limit_min else float("inf")
        deadline = float("inf")
        stopping = False
        while len(self._codes) < len(self._nodes) and time.monotonic() < deadline and self._stop_requests < 2:
            if (self._stop_requests or time.monotonic() > limit) and not stopping:
                stopping = True
                deadline = min(deadline, time.monotonic() + STOP_GRACE_S)
                for node in self._nodes:
                    node.stop()
            if self._failed():
                deadline = min(deadline, time.monotonic() + PEERS_GRACE_S)
            self._changed.wait(0.2)
            self._changed.clear()

    def _failed(self) -> bool:
        return any(code for _, code in self._codes)

    def _result(self) -> int:
        failed = [(index, code) for index, code in self._codes if code]
        if not failed:
            return contract.EXIT_DONE if len(self._codes) == len(self._nodes) else contract.EXIT_FAILED
        index, code = failed[0]
        self.cause = f"node {index} ended with exit code {code}{self._nodes[index].why()}"
        return code

    def _pump(self, index: int) -> None:
        try:
            for line, passing in split_lines(self._nodes[index].chunks()):
                text = line if re.match(r"\[\d+:(\d+|-)\] ", line) else f"[{index}:-] {line}"
                self._screen.line(text, passing=passing)
        finally:
            self._codes.append((index, self._nodes[index].wait()))
            self._changed.set()


def split_lines(chunks: Iterator[bytes]) -> Iterator[tuple[str, bool]]:
    """Lines of a byte stream, each with whether it ended in a carriage return (to be drawn over)."""
    rest = b""
    for chunk in chunks:
        *lines, rest = re.split(rb"(?<=\n)|(?<=\r)(?=[^\n])", rest + chunk)
        for line in lines:
            yield _text(line), line.endswith(b"\r")
    if rest:
        yield _text(rest), rest.endswith(b"\r")


def _text(line: bytes) -> str:
    return line.rstrip(b"\r\n").decode(errors="replace")


class _Signals:
    """While active, SIGINT and SIGTERM ask the nodes to save and end; a second one ends them at once."""

    def __init__(self, watch: _Watch) -> None:
        self._watch = watch
        self._before: dict[int, object] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._handle)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._watch.request_stop()
