"""Runs that were launched from this host: one launch.json in each run folder, and handles that name them."""

import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from launch.job import Job
from trainer.errors import UserError

FILE = "launch.json"
_NOT_ENDED: dict[str, Any] = {"finished_at": None, "exit_code": None, "cause": "", "warnings": []}


@dataclasses.dataclass(frozen=True)
class Handle:
    """`runtime://run`, what every verb takes; where a scheduler gave the run a number, `runtime://run/number`."""

    runtime: str
    run_id: str
    job_id: str = ""

    def __str__(self) -> str:
        return f"{self.runtime}://{self.run_id}" + (f"/{self.job_id}" if self.job_id else "")

    @classmethod
    def parse(cls, text: str, known: tuple[str, ...]) -> "Handle":
        runtime, separator, rest = text.partition("://")
        run_id, _, job_id = rest.partition("/")
        if not separator or runtime not in known or not re.fullmatch(r"[a-z0-9][a-z0-9-]*(/[0-9_]+)?", rest):
            forms = ", ".join(f"{name}://RUN" for name in known)
            raise UserError(f"{text!r} is not a handle ({forms}).", "invoke list shows the handles")
        return cls(runtime, run_id, job_id)


class LaunchState:
    """launch.json of a run: who watches over it, on which host, and how it ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / FILE

    @property
    def log(self) -> Path:
        """Lines of all nodes, each with its [node:rank]."""
        return self.folder / "run.log"

    def read(self) -> dict[str, Any]:
        """Raises UserError if the folder holds no launch, or one that cannot be read."""
        try:
            told: dict[str, Any] = json.loads(self.path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            hint = "invoke list shows the runs; --runs-dir names the folder"
            raise UserError(f"No run at {self.folder}.", hint) from None
        except OSError as error:
            raise UserError(f"Cannot read {self.path}: {error.strerror}.", "ask as the user who launched it") from None
        except ValueError:
            raise UserError(f"{self.path} is damaged.", "remove the run's folder") from None
        return told

    def change(self, **values: Any) -> None:
        told = json.loads(self.path.read_text()) if self.path.exists() else {}
        _replace(self.path, {**told, **values}, mode=0o600)  # --env may hold a secret

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Make the run's folder. Raises UserError if it, or what is written inside the block, cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            name = error.filename or self.folder
            raise UserError(f"Cannot write {name}: {error.strerror}.", "--runs-dir with a writable folder") from None

    def enqueue(self, job: Job, job_id: str) -> None:
        """Write that a scheduler watches over the run from now on."""
        handle = str(Handle(job.runtime, job.run_id, job_id))
        told = {"handle": handle, "job_id": job_id, "job": json.loads(job.to_json()), "started_at": now()}
        _replace(self.path, {**told, **_NOT_ENDED}, mode=0o600)

    def begin(self, job: Job) -> None:
        """Write that this process watches over the run from now on. Raises UserError if another one does."""
        with self.writing(), self.log.open("ab") as claim:
            _lock(claim)
            self.refuse_if_going_on()
            self.change(
                handle=str(Handle(job.runtime, job.run_id)),
                job=json.loads(job.to_json()),
                host=socket.gethostname(),
                pid=os.getpid(),
                born=process_birth(os.getpid()),
                started_at=now(),
                **_NOT_ENDED,
                outcome_before=_digest(self.outcome()),
            )

    def refuse_if_going_on(self) -> None:
        """Raises UserError if somebody watches over the run, or may do so on another host."""
        if not self.path.exists():
            return
        told, host = self.read(), self.elsewhere()
        handle = told["handle"]
        if told.get("job_id") and told["exit_code"] is None:
            hint = f"invoke cancel {handle}, or another --name"
            raise UserError(f"The run {self.folder.name} is still going on.", hint)
        if host and told["exit_code"] is None:
            hint = f"invoke cancel {handle} on {host}, or another --name"
            raise UserError(f"The run {self.folder.name} was launched on host {host} and has not ended.", hint)
        if self.supervisor():
            hint = f"invoke cancel {handle}, or another --name"
            raise UserError(f"The run {self.folder.name} is still going on.", hint)

    def end(self, exit_code: int, cause: str, warnings: Sequence[str] = ()) -> str:
        """Write how the run ended, into run.json too if nobody inside could. Returns the cause: the trainer's own,
        unless that is of an earlier attempt.
        """
        told = self.outcome()
        if not self.close_outcome(exit_code, cause) and _digest(told) != self.read()["outcome_before"]:
            cause = (told.get("failure") or {}).get("message") or cause
        self.change(finished_at=now(), exit_code=exit_code, cause=cause, warnings=list(warnings))
        return cause

    def close_outcome(self, exit_code: int, cause: str) -> bool:
        """Write the end of a run into its run.json if nobody inside could. True if so."""
        told = self.outcome()
        if told.get("status") != "running":
            return False
        told |= {"status": "failed", "exit_code": exit_code, "finished_at": now(), "failure": {"message": cause}}
        _replace(self.folder / "run.json", told)
        return True

    def elsewhere(self) -> str | None:
        """The host on which the run was launched, if it is another one: its processes cannot be seen from here."""
        host = self.read().get("host")
        return str(host) if host not in (None, socket.gethostname()) else None

    def supervisor(self) -> int | None:
        """The process of this host that watches over the run, if it still lives. A number that was given away again
        is not it.
        """
        told = self.read()
        if told["exit_code"] is not None or "pid" not in told or self.elsewhere():
            return None
        return int(told["pid"]) if process_birth(told["pid"]) == told["born"] else None

    def outcome(self) -> dict[str, Any]:
        """The trainer's own run.json; empty if it never got that far."""
        path = self.folder / "run.json"
        try:
            told: dict[str, Any] = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError):
            return {}
        return told


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _replace(path: Path, content: dict[str, Any], mode: int = 0o666) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "x", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(json.dumps(content, indent=2) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _lock(file: IO[bytes]) -> None:
    """Hold a file until it is closed. Where the file system has no locks, only launches at the same moment collide."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)


def all_runs(runs_dir: str) -> list[LaunchState]:
    """Every run below `runs_dir` that was launched from here, oldest first."""
    return [LaunchState(path.parent) for path in sorted(Path(runs_dir).glob(f"*/{FILE}"))]


def process_birth(pid: int) -> str | None:
    """What no other process has: this boot, and the start time in clock ticks since then (proc(5), field 22). None if
    there is no such process, or it is dead.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    words = text.rpartition(")")[2].split()
    return None if words[0] == "Z" else f"{boot} {words[19]}"


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
