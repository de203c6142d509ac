"""From a job to a run: in the foreground, detached, or as text; and the verbs that look at runs afterwards."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch import runtimes, scheduled
from launch.job import Job
from launch.state import Handle, LaunchState, all_runs
from launch.supervisor import STOP_GRACE_S, End, supervise
from trainer import contract
from trainer.errors import UserError


def submit(job: Job, *, detach: bool, dryrun: bool, check: bool = False) -> int:
    """Run a job; returns its exit code. A detached one prints its handle as the last line and returns 0.

    `dryrun` prints the script and `check` asks the scheduler about it; neither runs anything.
    """
    runtime = runtimes.load(job.runtime)
    job = runtime.prepare(job)
    if dryrun:
        _say(runtime.plan(job).script())
    if check:
        scheduled.check(runtime.plan(job))
    if dryrun or check:
        return contract.EXIT_DONE
    state = LaunchState(Path(job.runs_dir, job.run_id))
    if job.runtime in runtimes.SCHEDULED:
        end = scheduled.submit(runtime.plan(job), state, detach=detach)
        if not detach:
            _say(farewell(job, state, end))
        return end.code
    with state.writing():
        state.refuse_if_going_on()
    if detach:
        return _detach(job, state)
    end = watch(job, state, show=True)
    _say(farewell(job, state, end))
    return end.code


def watch(job: Job, state: LaunchState, *, show: bool) -> End:
    """Carry out a prepared job and stay with it to the end."""
    runtime = runtimes.load(job.runtime)
    plan = runtime.plan(job)
    return supervise(plan, lambda: runtime.start(plan), lambda: runtime.clean(job), state, show=show)


def farewell(job: Job, state: LaunchState, end: End) -> str:
    """The last lines of a run in the foreground: how it ended, where it lies, how to run it elsewhere."""
    return "\n".join([*(f"warning: {warning}" for warning in end.warnings), _ending(job, state, end)])


def _ending(job: Job, state: LaunchState, end: End) -> str:
    if end.code == contract.EXIT_DONE:
        command = " ".join(job.command)
        again = f"same in Docker: invoke build && invoke docker-run -j {job.nodes}x{job.processes} -- {command}\n"
        return (again if job.runtime == "local" else "") + f"run done: {state.folder}"
    if end.code == contract.EXIT_PREEMPTED:
        return f"run stopped after saving: {state.folder} (go on with --name {job.run_id} -- … --resume auto)"
    if end.code == contract.EXIT_BAD_REQUEST:
        return f"run refused (exit code {end.code}): {end.cause or 'the error above says why'}"
    return f"run failed with exit code {end.code}: {state.folder}: {end.cause}"


def _say(text: str) -> None:
    """Print, also if nobody reads any more: then Python must not try again when it ends."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def status(handle: Handle, runs_dir: str) -> str:
    """What a run is doing or how it ended, a few lines."""
    state = _find(handle, runs_dir)
    told = state.read()
    lines = scheduled.status(handle, state) if told.get("job_id") else _watched_status(handle, state, told)
    metrics = state.folder / "metrics.jsonl"
    last = metrics.read_text().splitlines()[-1:] if metrics.exists() else []
    return "\n".join(lines + [f"latest   {line}" for line in last])


def _find(handle: Handle, runs_dir: str) -> LaunchState:
    """Raises UserError if the run is not there, or was submitted again since the handle was printed."""
    state = LaunchState(Path(runs_dir, handle.run_id))
    now = str(state.read()["handle"])
    if handle.job_id and now != str(handle):
        raise UserError(f"{handle} was followed by {now}.", f"use {now}")
    return state


def _watched_status(handle: Handle, state: LaunchState, told: dict[str, Any]) -> list[str]:
    lines = [f"{handle}  {_word(state, told)}", f"folder   {state.folder}", f"started  {told['started_at']}"]
    if host := state.elsewhere():
        lines.append(f"host     launched on {host}" + ("" if told["finished_at"] else "; ask there how it is doing"))
    if told["finished_at"]:
        lines.append(f"ended    {told['finished_at']} with exit code {told['exit_code']}")
    if told["cause"]:
        lines.append(f"cause    {told['cause']}")
    return lines + [f"warning  {warning}" for warning in told["warnings"]]


def logs(handle: Handle, runs_dir: str, *, follow: bool) -> Iterator[str]:
    """The lines of a run so far, and with `follow` those to come until it ends."""
    state = _find(handle, runs_dir)
    if state.read().get("job_id"):
        yield from scheduled.lines(handle, state, follow=follow)
        return
    try:
        file = state.log.open(encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot read {state.log}: {error.strerror}.", f"invoke status {handle}") from None
    with file:
        while True:
            alive = _going_on(state)
            while line := file.readline():
                yield line.rstrip("\n")
            if not follow or not alive:
                return
            time.sleep(0.2)


def cancel(handle: Handle, runs_dir: str) -> str:
    """Ask a run to save and end, wait for it, and remove whatever it left. Returns what happened, one line."""
    state = _find(handle, runs_dir)
    told = state.read()
    if told.get("job_id"):
        return scheduled.cancel(handle, state)
    had_ended = told["exit_code"] is not None
    if host := state.elsewhere():
        if had_ended:
            return f"{handle} had ended with exit code {told['exit_code']}"
        raise UserError(f"{handle} was launched on host {host}.", f"invoke cancel {handle} on {host}")
    _stop(state)
    runtimes.load(handle.runtime).clean(Job.from_json(json.dumps(told["job"])))
    if state.read()["exit_code"] is None:
        state.end(contract.EXIT_FAILED, "its launcher was killed")
    return f"{handle} {'had ended' if had_ended else 'ended'} with exit code {state.read()['exit_code']}"


def _stop(state: LaunchState) -> None:
    """Ask the supervisor of a run to end it, and wait until it has."""
    supervisor = state.supervisor()
    if supervisor is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(supervisor, signal.SIGTERM)
    deadline = time.monotonic() + STOP_GRACE_S + 20
    while state.supervisor() is not None and time.monotonic() < deadline:
        time.sleep(0.1)


def table(runs_dir: str) -> str:
    """All runs below `runs_dir`, a line each."""
    return "\n".join(map(_row, all_runs(runs_dir))) or f"no runs in {runs_dir}"


def _row(state: LaunchState) -> str:
    try:
        told = state.read()
    except UserError as error:
        return f"{state.folder.name:50} unreadable {error}"
    return f"{told['handle']:50} {_word(state, told):10} {told['started_at']}"


def _word(state: LaunchState, told: dict[str, Any]) -> str:
    if told.get("job_id"):
        return scheduled.word(state)
    if told["exit_code"] is None and state.elsewhere():
        return "elsewhere"
    if state.supervisor() is not None:
        return "running"
    words = {None: "lost", contract.EXIT_DONE: "done", contract.EXIT_PREEMPTED: "preempted"}
    return words.get(told["exit_code"], "failed")


def _going_on(state: LaunchState) -> bool:
    return _word(state, state.read()) in ("running", "elsewhere")


def _detach(job: Job, state: LaunchState) -> int:
    """Start a process of its own that watches over the run. It is given the job where no other user can read it."""
    path = state.folder / "launcher.log"
    with state.writing():
        path.open("ab").close()
    with path.open("ab") as log, tempfile.TemporaryFile() as told:
        told.write(job.to_json().encode())
        told.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-m", "launch.submit"],
            stdin=told,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=Path(__file__).parent.parent,
        )
    while child.poll() is None:
        if state.path.exists() and state.read()["pid"] == child.pid:
            _say(str(Handle(job.runtime, job.run_id)))
            return contract.EXIT_DONE
        time.sleep(0.05)
    raise UserError(f"The run could not be started; see {path}.", "start it without --detach")


def _main() -> int:
    job = Job.from_json(sys.stdin.read())
    return watch(job, LaunchState(Path(job.runs_dir, job.run_id)), show=False).code


if __name__ == "__main__":
    sys.exit(_main())
