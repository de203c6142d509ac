"""Measure every figure of the README: python -m benchmarks [NAME...]

Each benchmark prints a table and a line of JSON. benchmarks/results.json keeps the newest figures of each, with the
date, the processor and the version of torch. Exit code 1 if a required figure was missed or could not be measured.
"""

import argparse
import dataclasses
import importlib
import json
import sys
from pathlib import Path

from benchmarks.measure import Row, as_json, table
from trainer.errors import UserError

NAMES = ("startup", "loop", "epoch", "rebuild", "convert", "slurm")
RESULTS = Path(__file__).with_name("results.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure the figures of the README.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)} (default: all)")
    names = parser.parse_args().names or list(NAMES)
    if unknown := set(names) - set(NAMES):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    measured = {name: rows for name in names if (rows := run(name)) is not None}
    rows = [row for name in measured for row in measured[name]]
    if len(measured) > 1:
        print(f"== all\n{table(rows)}")
    return int(len(measured) < len(names) or any(row.verdict == "MISSED" for row in rows))


def run(name: str) -> list[Row] | None:
    """Measure, print and keep one benchmark; None if it could not be measured."""
    print(f"== {name}", flush=True)
    try:
        rows: list[Row] = importlib.import_module(f"benchmarks.{name}").measure()
    except UserError as error:
        print(f"error: {name} could not be measured: {error}", file=sys.stderr, flush=True)
        return None
    print(f"{table(rows)}\n{as_json(rows)}", flush=True)
    keep(name, rows)
    return rows


def keep(name: str, rows: list[Row]) -> None:
    """Put the rows into results.json in place of this benchmark's older ones."""
    from trainer import environment, record
    from trainer.config import TrainConfig

    told = environment.describe(TrainConfig())
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[name] = {
        "date": record.now(),
        "cpu": told["cpu"],
        "torch": told["torch"],
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
