"""Runs that were launched from this host: one launch.json in each run folder, and handles that name them."""

import dataclasses
import datetime
import json
import os
import re
from pathlib import Path
from typing import Any

from launch.job import Job
from trainer.errors import UserError

FILE = "launch.json"


@dataclasses.dataclass(frozen=True)
class Handle:
    """`runtime://run`, what every verb takes."""

    runtime: str
    run_id: str

    def __str__(self) -> str:
        return f"{self.runtime}://{self.run_id}"

    @classmethod
    def parse(cls, text: str, known: tuple[str, ...]) -> "Handle":
        runtime, separator, run_id = text.partition("://")
        if not separator or runtime not in known or not re.fullmatch(r"[a-z0-9][a-z0-9-]*", run_id):
            forms = ", ".join(f"{name}://RUN" for name in known)
            raise UserError(f"{text!r} is not a handle ({forms}).", "invoke list shows the handles")
        return cls(runtime, run_id)


class LaunchState:
    """launch.json of a run: who watches over it, and how it ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / FILE

    @property
    def log(self) -> Path:
        """Lines of all nodes, each with its [node:rank]."""
        return self.folder / "run.log"

    def read(self) -> dict[str, Any]:
        """Raises UserError if the folder holds no launch, or a damaged one."""
        try:
            told: dict[str, Any] = json.loads(self.path.read_text())
        except OSError:
            raise UserError(
                f"No run at {self.folder}.", "invoke list shows the runs; --runs-dir names the folder"
            ) from None
        except json.JSONDecodeError:
            raise UserError(f"{self.path} is damaged.", "remove the run's folder") from None
        return told

    def change(self, **values: Any) -> None:
        told = json.loads(self.path.read_text()) if self.path.exists() else {}
        _replace(self.path, {**told, **values})

    def make_folder(self) -> None:
        """Raises UserError if the runs folder cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            hint = "--runs-dir with a writable folder"
            raise UserError(f"Cannot make {self.folder}: {error.strerror}.", hint) from None

    def begin(self, job: Job) -> None:
        """Write that this process watches over the run from now on."""
        self.make_folder()
        self.change(
            handle=str(Handle(job.runtime, job.run_id)),
            job=json.loads(job.to_json()),
            pid=os.getpid(),
            born=process_birth(os.getpid()),
            started_at=now(),
            finished_at=None,
            exit_code=None,
            cause="",
        )

    def end(self, exit_code: int, cause: str) -> None:
        """Write how the run ended, into run.json too if nobody inside could."""
        told = self.outcome()
        if told.get("status") == "running":
            told |= {"status": "failed", "exit_code": exit_code, "finished_at": now(), "failure": {"message": cause}}
            _replace(self.folder / "run.json", told)
        self.change(finished_at=now(), exit_code=exit_code, cause=(told.get("failure") or {}).get("message") or cause)

    def supervisor(self) -> int | None:
        """The process that watches over the run, if it still lives. A number that was given away again is not it."""
        told = self.read()
        alive = told["exit_code"] is None and process_birth(told["pid"]) == told["born"]
        return int(told["pid"]) if alive else None

    def outcome(self) -> dict[str, Any]:
        """The trainer's own run.json; empty if it never got that far."""
        path = self.folder / "run.json"
        try:
            told: dict[str, Any] = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError):
            return {}
        return told


def _replace(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(temporary, path)


def all_runs(runs_dir: str) -> list[LaunchState]:
    """Every run below `runs_dir` that was launched from here, oldest first."""
    return [LaunchState(path.parent) for path in sorted(Path(runs_dir).glob(f"*/{FILE}"))]


def process_birth(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot (proc(5), field 22); None if there is none, or it is dead."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    words = text.rpartition(")")[2].split()
    return None if words[0] == "Z" else words[19]


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
