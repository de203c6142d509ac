"""Runs that a scheduler watches over: submitted, followed through their log files, asked after, cancelled.

A runtime of this kind has prepare, plan and clean like the others, and submit, look and cancel instead of start.
"""

import contextlib
import dataclasses
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from launch import runtimes
from launch.job import Job
from launch.plan import Plan
from launch.state import Handle, LaunchState, now
from launch.supervisor import End
from trainer import contract
from trainer.errors import UserError

POLL_S = 0.5  # between two looks into the log files
ASK_S = 1.0  # between two questions to the scheduler, at first
SETTLE_S = 2.0  # an ended job may be queued again at once
CANCEL_S = 120.0


@dataclasses.dataclass(frozen=True)
class Look:
    """What a scheduler says of a job: pending, running, ended, gone or unknown (no answer), its own words, and the exit
    code if ended.
    """

    word: str
    detail: str
    exit_code: int | None = None
    attempt: int | None = None  # how often it was started anew, where that is known


class Scheduler(Protocol):
    """What a runtime of this kind offers."""

    def prepare(self, job: Job) -> Job: ...

    def plan(self, job: Job) -> Plan: ...

    def submit(self, plan: Plan, *, test_only: bool = False) -> str: ...

    def look(self, job_id: str, name: str) -> Look: ...

    def cancel(self, job_id: str) -> None: ...


def submit(plan: Plan, state: LaunchState, *, detach: bool) -> End:
    """Submit a plan; follow it to its end unless detached."""
    scheduler = runtimes.scheduler(plan.job.runtime)
    with state.writing():
        refuse_if_going_on(state)
        read = {path: path.stat().st_size for path in _logs(state.folder)}  # an earlier job's
        job_id = scheduler.submit(plan)
        state.enqueue(plan.job, job_id)
    handle = Handle(plan.job.runtime, plan.job.run_id, job_id)
    print(handle, flush=True)
    if detach:
        return End(contract.EXIT_DONE)
    with _Interrupts(scheduler, job_id) as interrupts:
        for line in lines(handle, state, follow=True, until=lambda: interrupts.count > 1, read=read):
            print(line, flush=True)
    if interrupts.count > 1 and ended(state) is None:
        return End(contract.EXIT_FAILED, f"not followed any more; invoke status {handle}")
    return ended(state) or End(contract.EXIT_FAILED, "nobody knows how it ended")


def check(plan: Plan) -> None:
    """Ask the scheduler what it would do with the plan, and print that. Raises UserError if it would refuse."""
    print(runtimes.scheduler(plan.job.runtime).submit(plan, test_only=True))


def refuse_if_going_on(state: LaunchState) -> None:
    """Raises UserError if a run of this name is in a queue or running."""
    if state.path.exists() and state.read().get("job_id"):
        ended(state)
    state.refuse_if_going_on()


def ended(state: LaunchState) -> End | None:
    """How a run ended, kept from then on; None while it goes on."""
    told = state.read()
    if told["exit_code"] is None:
        found = look(state)
        if found.word not in ("ended", "gone"):
            return None
        code, cause = _verdict(state, told, found)
        state.close_outcome(code, cause)
        state.change(exit_code=code, cause=cause, finished_at=now())
    told = state.read()
    return End(told["exit_code"], told["cause"])


def look(state: LaunchState) -> Look:
    told = state.read()
    return runtimes.scheduler(told["job"]["runtime"]).look(told["job_id"], told["job"]["name"])


def lines(
    handle: Handle,
    state: LaunchState,
    *,
    follow: bool,
    until: Callable[[], bool] = lambda: False,
    read: Mapping[Path, int] | None = None,
) -> Iterator[str]:
    """The lines of all attempts so far; with `follow` those to come, and what changes in the queue, until `until`."""
    offsets = dict(read or {})
    began = since = time.monotonic()
    said, asked_at, found = "", began, look(state)
    while True:
        if follow and found.detail != said:
            said = found.detail
            yield f"[queue] {handle}: {said}"
        yield from _new_lines(state.folder, offsets, last=not follow)
        if found.word not in ("ended", "gone"):
            since = time.monotonic()
        if not follow or until() or time.monotonic() - since > SETTLE_S:
            yield from _new_lines(state.folder, offsets, last=True)
            return
        time.sleep(POLL_S)
        over = found.word in ("ended", "gone")  # unless it is queued again
        if time.monotonic() - asked_at >= (ASK_S if over else _pause_s(time.monotonic() - began)):
            asked_at, found = time.monotonic(), look(state)


def _pause_s(followed_s: float) -> float:
    """Seconds between two questions: a controller serves many, so the longer a run is followed the rarer they are."""
    return min(ASK_S * (1 + followed_s / 30), 15)


def status(handle: Handle, state: LaunchState) -> list[str]:
    """What a person wants to know of a run."""
    found, end, told = look(state), ended(state), state.read()
    rows = [f"{handle}  {word(state)}", f"queue    {found.detail}", f"folder   {state.folder}"]
    rows.append(f"started  {told['started_at']}")
    if end:
        rows.append(f"ended    {told['finished_at']} with exit code {end.code}")
        rows += [f"cause    {end.cause}"] if end.cause else []
    return rows


def word(state: LaunchState) -> str:
    end = ended(state)
    if end is None:
        return look(state).word
    return {contract.EXIT_DONE: "done", contract.EXIT_PREEMPTED: "preempted"}.get(end.code, "failed")


def cancel(handle: Handle, state: LaunchState) -> str:
    """Ask a run to save and end, and wait for it. Returns what happened, one line."""
    if end := ended(state):
        return f"{handle} had ended with exit code {end.code}"
    told = state.read()
    runtimes.scheduler(handle.runtime).cancel(told["job_id"])
    deadline = time.monotonic() + CANCEL_S
    while (end := ended(state)) is None:
        if time.monotonic() > deadline:
            raise UserError(f"{handle} has not ended after {CANCEL_S:g} s.", f"invoke status {handle}")
        time.sleep(POLL_S)
    return f"{handle} ended with exit code {end.code}"


def _verdict(state: LaunchState, told: dict[str, Any], found: Look) -> tuple[int, str]:
    """Exit code and cause: the trainer's own record of this job first, else the scheduler's words."""
    outcome = state.outcome()
    own = outcome.get("job_id") == told["job_id"] and outcome.get("status") != "running"
    own = own and found.attempt in (None, outcome.get("attempt"))
    if own and found.exit_code != contract.EXIT_DONE and outcome.get("exit_code") is not None:
        code, failure = int(outcome["exit_code"]), outcome.get("failure") or {}
        return code, (str(failure.get("message", "")) or found.detail) if code else ""
    code = contract.EXIT_FAILED if found.exit_code is None else found.exit_code
    silent = not list(state.folder.glob("attempt-*.log"))
    if code and silent and found.word == "ended" and "CANCELLED" not in found.detail:
        return code, f"{found.detail}; it left no log in {state.folder}: see that all nodes share that folder"
    return code, _last_words(state.folder) or found.detail if code else ""


def _last_words(folder: Path) -> str:
    """The last error in the newest log, but not srun's of the end of its tasks. Empty if there is none."""
    logs = [path for path in _logs(folder) if path.suffix == ".log"][-1:]
    lines = [line for path in logs for line in path.read_text(errors="replace").splitlines()]
    told = [line for line in lines if re.search(r"error: |FATAL: ", line) and not line.startswith(("srun:", "slurm"))]
    return told[-1] if told else ""


def _logs(folder: Path) -> list[Path]:
    """Log files in the order in which they are to be read: the attempts, then the scheduler's own words."""
    attempts = sorted(folder.glob("attempt-*.log"), key=lambda path: int(path.stem.partition("-")[2]))
    return [*attempts, *sorted(folder.glob("slurm-*.out"))]


def _new_lines(folder: Path, offsets: dict[Path, int], *, last: bool) -> Iterator[str]:
    """Whole lines that were added; with `last` an unfinished one too."""
    for path in _logs(folder):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(offsets.get(path, 0))
            text = file.read()
            whole = len(text) if last else text.rfind(b"\n") + 1
            offsets[path] = offsets.get(path, 0) + whole
            yield from text[:whole].decode(errors="replace").splitlines()


class _Interrupts:
    """While active, Ctrl-C cancels the job, which saves and ends; a second one leaves it to itself."""

    def __init__(self, scheduler: Scheduler, job_id: str) -> None:
        self.count = 0
        self._scheduler, self._job_id = scheduler, job_id
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Interrupts":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count == 1:
            print("cancelling: the run saves and ends; once more leaves it to itself", file=sys.stderr, flush=True)
            self._scheduler.cancel(self._job_id)
