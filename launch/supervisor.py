"""Watches over the nodes of one run: shows and keeps their lines, ends them together, leaves nothing behind.

In the foreground this is the user's own process; with --detach it is a process of its own. `invoke cancel` and a
detached run meet through launch.json and a signal, so there is no daemon.
"""

import contextlib
import dataclasses
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


@dataclasses.dataclass(frozen=True)
class End:
    """How a run ended: its exit code, why if it failed, and what went wrong beside it."""

    code: int
    cause: str = ""
    warnings: tuple[str, ...] = ()


class Screen:
    """Prints whole lines and keeps them in the log. A line that ends in a carriage return is drawn over by the next
    on a terminal, and left out elsewhere. Neither a broken screen nor a full disk raises: each is told once.
    """

    def __init__(self, log: Path, *, show: bool) -> None:
        self.warnings: list[str] = []
        self._log = log
        self._show = show
        self._drawn = False
        self._lock = threading.Lock()

    def line(self, text: str, *, passing: bool) -> None:
        with self._lock:
            if not passing:
                self._keep(text)
            if self._show:
                self._draw(text, passing)

    def warn(self, text: str) -> None:
        """Tell on stderr what the run survives, once."""
        if text in self.warnings:
            return
        self.warnings.append(text)
        with contextlib.suppress(OSError, ValueError):
            print(f"warning: {text}", file=sys.stderr, flush=True)

    def _keep(self, text: str) -> None:
        try:
            with self._log.open("a", encoding="utf-8") as log:
                log.write(text + "\n")
        except OSError as error:
            self.warn(f"{self._log} is not whole: {error.strerror}")

    def _draw(self, text: str, passing: bool) -> None:
        try:
            if passing and not sys.stdout.isatty():
                return
            clear = "\r\x1b[K" if self._drawn else ""
            self._drawn = passing
            sys.stdout.write(clear + text + ("" if passing else "\n"))
            sys.stdout.flush()
        except (OSError, ValueError) as error:
            self._show = False
            self.warn(f"the run goes on but is no longer shown ({error}); its lines are in {self._log}")


def supervise(
    plan: Plan, start: Callable[[], list[Node]], clean: Callable[[], None], state: LaunchState, *, show: bool
) -> End:
    """Start the nodes and follow them to the end. The run's exit code is that of the first node to fail."""
    screen = Screen(state.log, show=show)
    watch = _Watch(screen)
    state.begin(plan.job)
    end = End(contract.EXIT_FAILED, "its launcher was interrupted")
    with _Signals(watch):
        try:
            end = watch.follow(start, plan.job.time_limit_min)
        except Exception as error:
            code = contract.EXIT_BAD_REQUEST if isinstance(error, UserError) else contract.EXIT_FAILED
            end = End(code, str(error) or repr(error))
            raise
        finally:
            end = _close(end, state, clean, screen)
    return end


def _close(end: End, state: LaunchState, clean: Callable[[], None], screen: Screen) -> End:
    """Write how the run ended and remove what it left; if one fails, the other is still done."""
    cause = end.cause
    try:
        cause = state.end(end.code, cause, screen.warnings)
    except (OSError, UserError) as error:
        screen.warn(f"{state.path} does not tell the end of the run: {error}")
    try:
        clean()
    except Exception as error:  # noqa: BLE001 the run's own end matters more
        screen.warn(f"what the run left was not removed: {error}")
    return End(end.code, cause, tuple(screen.warnings))


class _Watch:
    """The nodes of a run and how they end."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._nodes: list[Node] = []
        self._ends: list[tuple[int, int, str]] = []  # index, exit code, what the runtime knows; in order of time
        self._stop_requests = 0
        self._changed = threading.Event()

    def follow(self, start: Callable[[], list[Node]], time_limit_min: float | None) -> End:
        self._nodes = start()
        threads = [threading.Thread(target=self._pump, args=(index,), daemon=True) for index in range(len(self._nodes))]
        for thread in threads:
            thread.start()
        overdue: set[int] = set()
        try:
            self._until_ended(time_limit_min)
        finally:
            overdue = set(range(len(self._nodes))) - {index for index, _, _ in self._ends}
            self._each("killed", lambda node: node.kill())
            for thread in threads:
                thread.join(timeout=KILL_GRACE_S)
            self._each("removed", lambda node: node.remove())
        return self._result(overdue)

    def request_stop(self) -> None:
        self._stop_requests += 1
        self._changed.set()

    def _until_ended(self, time_limit_min: float | None) -> None:
        """Returns when all nodes have ended, or have had their time to."""
        limit = time.monotonic() + time_limit_min * 60 if time_limit_min else float("inf")
        deadline = float("inf")
        stopping = False
        while len(self._ends) < len(self._nodes) and time.monotonic() < deadline and self._stop_requests < 2:
            if (self._stop_requests or time.monotonic() > limit) and not stopping:
                stopping = True
                deadline = min(deadline, time.monotonic() + STOP_GRACE_S)
                self._each("stopped", lambda node: node.stop())
            if self._failed():
                deadline = min(deadline, time.monotonic() + PEERS_GRACE_S)
            self._changed.wait(0.2)
            self._changed.clear()

    def _each(self, done: str, ask: Callable[[Node], None]) -> None:
        """Ask every node, also if one cannot be reached."""
        for index, node in enumerate(self._nodes):
            try:
                ask(node)
            except Exception as error:  # noqa: BLE001 the others must be asked too
                self._screen.warn(f"node {index} was not {done}: {error}")

    def _failed(self) -> bool:
        return any(code for _, code, _ in self._ends)

    def _result(self, overdue: set[int]) -> End:
        """The first failure; `overdue` are the nodes that had to be killed."""
        lost = [(index, contract.EXIT_FAILED, "") for index in sorted(overdue - {index for index, _, _ in self._ends})]
        failed = [end for end in (*self._ends, *lost) if end[1]]
        if not failed:
            return End(contract.EXIT_DONE)
        index, code, why = failed[0]
        if index not in overdue:
            return End(code, f"node {index} ended with exit code {code}{why}")
        how = "did not end in time and was killed"
        if self._stop_requests > 1:
            how = "was stopped at once by a second request"
        return End(code, f"node {index} {how}")

    def _pump(self, index: int) -> None:
        """Show a node's lines until it ends, and take down how; a node whose output nobody took would stand still."""
        node = self._nodes[index]
        try:
            for line, passing in split_lines(node.chunks()):
                text = line if re.match(r"\[\d+:(\d+|-)\] ", line) else f"[{index}:-] {line}"
                self._screen.line(text, passing=passing)
        except Exception as error:  # noqa: BLE001 the node's end must be told all the same
            self._screen.warn(f"the output of node {index} broke off: {error}")
        try:
            end = (index, node.wait(), node.why())
        except Exception as error:  # noqa: BLE001 see above
            end = (index, contract.EXIT_FAILED, f" ({error})")
        self._ends.append(end)
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
