"""Time until the command lines answer, and what they import for it: python -m benchmarks startup

`invoke --list` is compared with `invoke --version`, which loads no tasks, and `trainer --help` with a Python that does
nothing. Neither may load what only a run needs.
"""

import subprocess
from collections.abc import Sequence

from benchmarks.measure import ROOT, Row, in_turn, python, ratios, row, seconds, verdict

PAIRS = 12
LIST, VERSION = ("-m", "invoke", "--list"), ("-m", "invoke", "--version")
HELP, NOTHING = ("-m", "trainer", "--help"), ("-c", "pass")


def measure() -> list[Row]:
    """Ratios of the start-up times, and the imports that must not happen."""
    return [
        row("startup", "time of `invoke --list` over `invoke --version`", _ratios(LIST, VERSION), below=2),
        _import_row("invoke --list", LIST, ("docker", "spython", "torch")),
        row("startup", "time of `trainer --help` over `python -c pass`", _ratios(HELP, NOTHING)),
        _import_row("trainer --help", HELP, ("torch", "torchvision", "numpy")),
    ]


def _ratios(first: Sequence[str], second: Sequence[str]) -> list[float]:
    seconds(python(*first)), seconds(python(*second))  # fill the file cache
    return ratios(in_turn(lambda: seconds(python(*first)), lambda: seconds(python(*second)), PAIRS))


def _import_row(command: str, arguments: Sequence[str], heavy: Sequence[str]) -> Row:
    found = sorted(imports(arguments).intersection(heavy))
    what = f"heavy imports of `{command}`"
    return Row("startup", what, ", ".join(found) or "none", f"none of {', '.join(heavy)}", verdict(not found))


def imports(arguments: Sequence[str]) -> set[str]:
    """Top-level names of all modules that a Python command imports."""
    argv = python("-X", "importtime", *arguments)
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = (line for line in done.stderr.splitlines() if line.startswith("import time:"))
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
