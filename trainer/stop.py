"""A request to stop, from a scheduler or a person, that the training loop looks at between two steps."""

import os
import signal
from types import FrameType


class StopRequest:
    """Becomes true on SIGTERM or SIGUSR1. Ctrl-C reaches the ranks through their agent, so they ignore it."""

    def __init__(self) -> None:
        self.requested = False
        self._pid = os.getpid()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._request)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:  # a forked data loader inherits the handler but is not asked
            self.requested = True
