"""Requests to stop, from a scheduler or a person. None is lost, from the first moment of the process to the last.

Signals are held (blocked, so they stay pending) until somebody is there to handle them, and again at the end, so that
a late one cannot spoil a good exit code.
"""

import ctypes
import os
import signal
import sys
from types import FrameType

_PR_SET_PDEATHSIG = 1  # prctl(2)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def hold() -> None:
    """Let requests wait. Processes forked meanwhile hold them too."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def release() -> None:
    """Deliver the requests that waited, now that they are handled."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def waiting() -> bool:
    """True if a request came while they were held."""
    return not signal.sigpending().isdisjoint(STOP_SIGNALS)


def die_with_parent() -> None:
    """No orphans: this forked process ends when its agent is killed (Linux only)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


class StopRequest:
    """What the training loop looks at between two steps: true after SIGTERM or SIGUSR1, and after Ctrl-C.

    With `agent`, Ctrl-C reaches the ranks through their agent, so they ignore it themselves.
    """

    def __init__(self, *, agent: bool) -> None:
        self.requested = False
        self._pid = os.getpid()
        for number in (*STOP_SIGNALS, signal.SIGINT):
            signal.signal(number, self._request)
        if agent:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        release()

    def _request(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:  # a forked data loader inherits the handler but is not asked
            self.requested = True
