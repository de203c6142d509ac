"""The first failure of a run, told to every node through the head's store before anything is torn down.

A rank that dies takes its peers along: they see "connection closed" and fail too. Such echoes are kept apart from
causes, so that what is printed last is what happened first.
"""

import dataclasses
import json
import signal
import socket
import time
import traceback
from collections.abc import Mapping

from torch.distributed import PrefixStore, Store

from trainer import contract
from trainer.errors import Unavailable, UserError

SETTLE_S = 3.0  # how long an echo waits for its cause
BEAT_S = 0.5
VANISHED_S = 30.0  # a node whose heart has stood still for so long is gone
LEAVE_S = 20.0
PAUSE_S = 5.0
# SIGBUS: the file system of a container vanished below it.
OUTSIDE_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGBUS)

_ECHOES = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection refused",
    "connection was closed",
    "timed out waiting",
    "remote process exited",
    "failed to recv",
    "failed to send",
    "socket closed",
    "communicator was aborted",
    "remote error",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """What ended a run: where, what, and the exit code that the run ends with."""

    node_rank: int
    message: str
    rank: int | None = None
    host: str = dataclasses.field(default_factory=socket.gethostname)
    trace: str = ""
    exit_code: int = contract.EXIT_FAILED
    plain: bool = False  # a UserError: its message says it all
    outside: bool = False  # the run did nothing wrong: another attempt may succeed

    def text(self) -> str:
        """The lines to print last: the traceback if there is one, then one line that names the place."""
        if self.plain:
            return f"error: {self.message}"
        who = f"node {self.node_rank}" if self.rank is None else f"rank {self.rank} (node {self.node_rank})"
        return f"{self.trace}first failure: {who} on {self.host}: {self.message}"


def of_exception(error: BaseException, rank: int | None, node_rank: int) -> Failure:
    """The failure that an exception in a rank stands for; a UserError keeps its one line."""
    if isinstance(error, UserError):
        outside = isinstance(error, Unavailable)
        message, code = str(error), error.exit_code
        return Failure(rank=rank, node_rank=node_rank, message=message, exit_code=code, plain=True, outside=outside)
    trace = "".join(traceback.format_exception(error))
    return Failure(rank=rank, node_rank=node_rank, message=f"{type(error).__name__}: {error}", trace=trace)


def of_exit(exit_code: int, rank: int, node_rank: int) -> Failure:
    """The failure of a rank that died without a word; `exit_code` is negative for a signal."""
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        reason = " (out of memory?)" if name == "SIGKILL" else ""
        return Failure(
            rank=rank,
            node_rank=node_rank,
            message=f"killed by {name}{reason}",
            exit_code=128 - exit_code,
            outside=-exit_code in OUTSIDE_SIGNALS,
        )
    return Failure(rank=rank, node_rank=node_rank, message=f"exit code {exit_code}", exit_code=exit_code)


def vanished(node_rank: int, host: str) -> Failure:
    """The failure of a whole node that shows no sign of life."""
    message = "vanished: its agent was killed or its host is gone"
    return Failure(node_rank=node_rank, host=host, message=message, outside=True)


def is_echo(error: BaseException) -> bool:
    """True if the exception only says that a peer is gone."""
    text = str(error).lower()
    return isinstance(error, (RuntimeError, OSError)) and any(fragment in text for fragment in _ECHOES)


class Board:
    """Where ranks and agents of all nodes write failures and heartbeats. Keys live in the head agent's store."""

    def __init__(self, store: Store, node_rank: int, nnodes: int, hosts: Mapping[int, str] | None = None) -> None:
        self._store = PrefixStore("board", store)
        self._node_rank = node_rank
        self._nnodes = nnodes
        self._hosts = hosts or {}
        self._beaten_at = self._echo_at = 0.0
        self._beats_at_echo: list[int] | None = None
        self._watched_at = 0.0
        self._seen: dict[int, tuple[int, float]] = {}

    def report(self, failure: Failure, *, echo: bool = False) -> None:
        """Tell every node; only the first report of each kind is kept."""
        self._store.compare_set("echo" if echo else "cause", "", json.dumps(dataclasses.asdict(failure)))

    def beat(self) -> None:
        """Show that this node's agent lives; cheap enough to call in a loop."""
        if time.monotonic() - self._beaten_at >= BEAT_S:
            self._store.add(f"beat/{self._node_rank}", 1)
            self._beaten_at = time.monotonic()

    def watch_nodes(self) -> None:
        """The head's part: report a node whose heart has stopped, even if nobody has missed it yet."""
        now = time.monotonic()
        if now - self._watched_at < BEAT_S:
            return
        if now - self._watched_at > PAUSE_S:  # this process was suspended, and so were the others
            self._seen.clear()
        self._watched_at = now
        for node, beats in enumerate(self._beats()):
            before, since = self._seen.get(node, (-1, now))
            if beats != before:
                self._seen[node] = (beats, now)
            elif beats and now - since > VANISHED_S:
                self.report(vanished(node, self._hosts.get(node, "unknown host")))

    def failed(self) -> bool:
        """True once anything was reported."""
        return self._store.check(["cause"]) or self._store.check(["echo"])

    def verdict(self) -> Failure | None:
        """The first failure; None while all is well or while an echo still waits for its cause. Call it in a loop."""
        if self._store.check(["cause"]):
            return self._read("cause")
        if not self._store.check(["echo"]):
            return None
        if self._beats_at_echo is None:
            self._beats_at_echo, self._echo_at = self._beats(), time.monotonic()
        if time.monotonic() - self._echo_at < SETTLE_S:
            return None
        for node, (before, now) in enumerate(zip(self._beats_at_echo, self._beats(), strict=True)):
            if before == now:
                self.report(vanished(node, self._hosts.get(node, "unknown host")))
                return self._read("cause")
        return self._read("echo")

    def leave(self, failure: Failure | None) -> None:
        """Hold the head, whose store all others read, until every node that still lives has read how it ended."""
        self._store.set(f"left/{self._node_rank}", "1")
        if self._node_rank == 0:
            deadline = time.monotonic() + (SETTLE_S if failure else LEAVE_S)
            keys = [f"left/{node}" for node in range(self._nnodes)]
            while not self._store.check(keys) and time.monotonic() < deadline:
                time.sleep(0.05)

    def _beats(self) -> list[int]:
        return [self._store.add(f"beat/{node}", 0) for node in range(self._nnodes)]

    def _read(self, key: str) -> Failure:
        return Failure(**json.loads(self._store.get(key)))
