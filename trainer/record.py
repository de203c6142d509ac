"""The folder of a run: run.json (what ran, where, how it ended), metrics.jsonl, TensorBoard events, checkpoints.

Only rank 0 writes here, and the head's agent when rank 0 no longer can.
"""

import dataclasses
import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from trainer import contract, environment
from trainer.config import TrainConfig
from trainer.errors import UserError
from trainer.failures import Failure
from trainer.topology import Topology


def new_run_id(config: TrainConfig) -> str:
    """A name that sorts by time and tells what ran."""
    moment = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")
    return f"{moment}-{config.workload}-{os.urandom(2).hex()}"


def run_folder(config: TrainConfig) -> Path:
    assert config.run_id is not None
    return Path(config.runs_dir, config.run_id)


def open_folder(config: TrainConfig) -> Path:
    """Make the run's folder and see that it can be written.

    Raises UserError if it cannot, or if it holds a run and --resume was not given.
    """
    folder = run_folder(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"Cannot write to {folder}: {error.strerror}.", "--runs-dir with a writable folder") from None
    if (folder / "run.json").exists() and config.resume == "never":
        raise UserError(f"{folder} already holds a run.", "--resume auto to go on with it, or another --run-id")
    return folder


class Record:
    """run.json of one run. Every change replaces the file as a whole."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run.json"

    def read(self) -> dict[str, Any]:
        """The record so far; empty before the start."""
        if not self.path.exists():
            return {}
        try:
            content: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        except ValueError as error:
            print(f"warning: {self.path} was damaged and is written anew: {error}", file=sys.stderr, flush=True)
            return {}
        return content

    def change(self, **values: Any) -> None:
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({**self.read(), **values}, indent=2) + "\n")
        os.replace(temporary, self.path)

    def mark(self, name: str) -> None:
        """Write when something was reached, in seconds since 1970."""
        self.change(timeline={**self.read().get("timeline", {}), name: round(time.time(), 3)})

    def start(self, config: TrainConfig, topology: Topology) -> None:
        """Write what is known before the first step. `started_at` of an earlier attempt is kept."""
        self.change(
            run_id=config.run_id,
            status="running",
            exit_code=None,
            command=sys.argv,
            config=dataclasses.asdict(config),
            config_sha256=config.hash(),
            topology={
                "nodes": topology.nnodes,
                "nproc_per_node": topology.nproc_per_node,
                "world_size": topology.world_size,
                "source": topology.source,
            },
            runtime=os.environ.get("TRAINER_RUNTIME", "process"),
            image=environment.image(),
            **environment.job(),
            environment=environment.describe(config),
            git=environment.git(),
            data={"name": config.dataset, "sha256": None},
            started_at=self.read().get("started_at") or now(),
            timeline={"process": environment.process_started(), "met": round(time.time(), 3)},
            finished_at=None,
            failure=None,
            result=None,
        )

    def close(self, status: str, exit_code: int, **values: Any) -> None:
        self.change(status=status, exit_code=exit_code, finished_at=now(), **values)


def close_failed(config: TrainConfig, failure: Failure) -> None:
    """Write the end of a run whose rank 0 may no longer be able to."""
    if config.run_id is None or not run_folder(config).is_dir():
        return
    told = dataclasses.asdict(failure)
    try:
        Record(run_folder(config)).close("failed", failure.exit_code, failure=told, **environment.job())
    except OSError as error:
        print(f"warning: run.json could not be written: {error}", file=sys.stderr, flush=True)


class Metrics:
    """metrics.jsonl and TensorBoard events, one line and one point for each call of `write`."""

    def __init__(self, folder: Path, resumed_at: int) -> None:
        from tensorboardX import SummaryWriter

        self._path = folder / "metrics.jsonl"
        self._began = time.monotonic() - self._keep_until(resumed_at)
        self._file = self._path.open("a", buffering=1)
        self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_at + 1 if resumed_at else None)

    def write(self, step: int, epoch: int, **values: float) -> None:
        """Append the named values of a step; `time_s` counts from the start of the run."""
        line = {"step": step, "epoch": epoch, "time_s": round(time.monotonic() - self._began, 3), **values}
        try:
            self._file.write(json.dumps(line) + "\n")
            for name, value in values.items():
                self._events.add_scalar(name, value, step)
        except OSError as error:
            raise UserError(f"Cannot write to {self._path}: {error.strerror}.", "free space for --runs-dir") from None

    def close(self) -> None:
        self._file.close()
        self._events.close()

    def _keep_until(self, step: int) -> float:
        """Drop lines of steps that are done again after a resume; return the time reached until then."""
        if not self._path.exists():
            return 0.0
        kept = [line for line in read_metrics(self._path) if line["step"] <= step]
        self._path.write_text("".join(json.dumps(line) + "\n" for line in kept))
        return float(kept[-1]["time_s"]) if kept else 0.0


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line that was cut off by a crash is left out."""
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def preempted(record: Record) -> int:
    """Write that the run was stopped after saving, and return the exit code that asks for a restart."""
    record.close("preempted", contract.EXIT_PREEMPTED)
    return contract.EXIT_PREEMPTED
