"""What all benchmarks share: interleaved pairs, the spread of their ratios, and the rows that are printed.

A machine is never quiet, so two things are always timed in turn (A B A B ...) and only their ratios are judged.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from trainer.errors import UserError

ROOT = Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured figure. `verdict` is ok or MISSED, or - where nothing is required."""

    name: str
    what: str
    value: str
    required: str = "-"
    verdict: str = "-"
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)


def row(
    name: str,
    what: str,
    values: Sequence[float],
    *,
    unit: str = "",
    at_least: float | None = None,
    below: float | None = None,
) -> Row:
    """The median of some figures with their least and greatest; the median is what is judged."""
    low, middle, high = min(values), statistics.median(values), max(values)
    value = f"{middle:.3g}{unit} ({low:.3g} to {high:.3g}, n={len(values)})"
    numbers = {"median": middle, "min": low, "max": high, "n": len(values)}
    if at_least is not None:
        return Row(name, what, value, f">= {at_least:g}", verdict(middle >= at_least), numbers)
    if below is not None:
        return Row(name, what, value, f"< {below:g}", verdict(middle < below), numbers)
    return Row(name, what, value, numbers=numbers)


def verdict(good: bool) -> str:
    return "ok" if good else "MISSED"


def in_turn(first: Callable[[], float], second: Callable[[], float], pairs: int) -> list[tuple[float, float]]:
    """Seconds of both, called in turn: first, second, first, second ..."""
    return [(first(), second()) for _ in range(pairs)]


def ratios(pairs: Iterable[tuple[float, float]]) -> list[float]:
    """First over second, pair by pair."""
    return [first / second for first, second in pairs]


class Turns:
    """Lets two programs that run at the same time work in turn, by files in a folder that both see."""

    def __init__(self, folder: Path, own: str, other: str) -> None:
        self._folder, self._own, self._other = folder, own, other

    def wait(self, number: int) -> None:
        """Return when the other's turn of this number is over; turns count from 0."""
        deadline = time.monotonic() + 120
        while not (self._folder / f"{self._other}-{number}").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._other} did not finish its turn {number}")
            time.sleep(0.002)

    def end(self, number: int) -> None:
        """Tell the other that our turn of this number is over."""
        (self._folder / f"{self._own}-{number}").touch()


def seconds(argv: Sequence[str], cwd: Path = ROOT) -> float:
    """Wall time of a command that must end well; its output is thrown away."""
    began = time.perf_counter()
    output(argv, cwd)
    return time.perf_counter() - began


def output(argv: Sequence[str], cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
    """Standard output of a command. Raises UserError with its last lines if it fails."""
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip()[-1500:]
        raise UserError(f"`{' '.join(argv)}` ended with exit code {done.returncode}:\n{lines}\n", "see above")
    return done.stdout


def python(*arguments: str) -> list[str]:
    """A command of the Python that runs this."""
    return [sys.executable, *arguments]


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [("name", "what", "value", "required", "verdict")]
    lines += [(row.name, row.what, row.value, row.required, row.verdict) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    lines.insert(1, tuple("-" * width for width in widths))  # type: ignore[arg-type]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in padded)


def as_json(rows: Sequence[Row]) -> str:
    """The rows on one line."""
    return json.dumps([dataclasses.asdict(row) for row in rows])
