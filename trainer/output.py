"""Whose line is this? Every line of a rank or an agent starts with `[node:rank]` if the launcher asks for it."""

import os
import re
import sys
from typing import TextIO


class PrefixedStream:
    """A text stream that starts each line with a prefix, in one write a line so that ranks do not mix."""

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self._stream = stream
        self._prefix = prefix
        self._at_start = True
        self._waiting = ""

    def write(self, text: str) -> int:
        for piece in re.findall(r"[^\r\n]*(?:\r\n|[\r\n])|[^\r\n]+", text):
            self._waiting += piece
            if piece[-1] in "\r\n":
                self.flush()
        return len(text)

    def flush(self) -> None:
        """Pass on what is there, even if the line is not complete."""
        if self._waiting:
            self._stream.write((self._prefix if self._at_start else "") + self._waiting)
            self._at_start = self._waiting[-1] in "\r\n"
            self._waiting = ""
        self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def prefix_lines(node_rank: int, rank: int | None) -> None:
    """Start all further lines of this process with its place, if TRAINER_LOG_PREFIX is 1."""
    if os.environ.get("TRAINER_LOG_PREFIX") == "1":
        prefix = f"[{node_rank}:{'-' if rank is None else rank}] "
        sys.stdout = _wrap(sys.__stdout__, prefix)
        sys.stderr = _wrap(sys.__stderr__, prefix)


def _wrap(stream: TextIO | None, prefix: str) -> TextIO:
    assert stream is not None
    return PrefixedStream(stream, prefix)  # type: ignore[return-value]
