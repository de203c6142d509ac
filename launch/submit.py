"""From a job to a run: in the foreground, detached, or as text; and the verbs that look at runs afterwards."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch import runtimes
from launch.job import Job
from launch.state import Handle, LaunchState, all_runs
from launch.supervisor import STOP_GRACE_S, supervise
from trainer import contract
from trainer.errors import UserError


def submit(job: Job, *, detach: bool, dryrun: bool) -> int:
    """Run a job; returns its exit code. A detached one prints its handle as the last line and returns 0."""
    runtime = runtimes.load(job.runtime)
    job = runtime.prepare(job)
    if dryrun:
        print(runtime.plan(job).script())
        return contract.EXIT_DONE
    state = LaunchState(Path(job.runs_dir, job.run_id))
    if state.path.exists() and state.supervisor():
        raise UserError(f"The run {job.run_id} is still going on.", f"invoke cancel {Handle(job.runtime, job.run_id)}")
    if detach:
        return _detach(job, state)
    code = watch(job, state, show=True)
    print(farewell(job, state, code), flush=True)
    return code


def watch(job: Job, state: LaunchState, *, show: bool) -> int:
    """Carry out a prepared job and stay with it to the end."""
    runtime = runtimes.load(job.runtime)
    plan = runtime.plan(job)
    return supervise(plan, lambda: runtime.start(plan), lambda: runtime.clean(job), state, show=show)


def farewell(job: Job, state: LaunchState, code: int) -> str:
    """The last lines of a run in the foreground: how it ended, where it lies, how to run it elsewhere."""
    if code == contract.EXIT_DONE:
        command = " ".join(job.command)
        again = f"same in Docker: invoke build && invoke docker-run -j {job.nodes}x{job.processes} -- {command}\n"
        return (again if job.runtime == "local" else "") + f"run done: {state.folder}"
    if code == contract.EXIT_PREEMPTED:
        return f"run stopped after saving: {state.folder} (go on with --name {job.run_id} -- … --resume auto)"
    if code == contract.EXIT_BAD_REQUEST:
        return f"run refused (exit code {code}); the error above says why"
    return f"run failed with exit code {code}: {state.folder}: {state.read()['cause']}"


def status(handle: Handle, runs_dir: str) -> str:
    """What a run is doing or how it ended, a few lines."""
    state = LaunchState(Path(runs_dir, handle.run_id))
    told = state.read()
    lines = [f"{handle}  {_word(state, told)}", f"folder   {state.folder}", f"started  {told['started_at']}"]
    if told["finished_at"]:
        lines.append(f"ended    {told['finished_at']} with exit code {told['exit_code']}")
    if told["cause"]:
        lines.append(f"cause    {told['cause']}")
    metrics = state.folder / "metrics.jsonl"
    last = metrics.read_text().splitlines()[-1:] if metrics.exists() else []
    return "\n".join(lines + [f"latest   {line}" for line in last])


def logs(handle: Handle, runs_dir: str, *, follow: bool) -> Iterator[str]:
    """The lines of a run so far, and with `follow` those to come until it ends."""
    state = LaunchState(Path(runs_dir, handle.run_id))
    state.read()
    state.log.touch()
    with state.log.open(encoding="utf-8") as file:
        while True:
            alive = state.supervisor() is not None
            while line := file.readline():
                yield line.rstrip("\n")
            if not follow or not alive:
                return
            time.sleep(0.2)


def cancel(handle: Handle, runs_dir: str) -> str:
    """Ask a run to save and end, wait for it, and remove whatever it left. Returns what happened, one line."""
    state = LaunchState(Path(runs_dir, handle.run_id))
    told = state.read()
    supervisor = state.supervisor()
    if supervisor is None and told["exit_code"] is not None:
        return f"{handle} had ended with exit code {told['exit_code']}"
    if supervisor is not None:
        os.kill(supervisor, signal.SIGTERM)
        deadline = time.monotonic() + STOP_GRACE_S + 20
        while state.supervisor() is not None and time.monotonic() < deadline:
            time.sleep(0.1)
    runtimes.load(handle.runtime).clean(Job.from_json(json.dumps(told["job"])))
    if state.read()["exit_code"] is None:
        state.end(contract.EXIT_FAILED, "its launcher was killed")
    return f"{handle} ended with exit code {state.read()['exit_code']}"


def table(runs_dir: str) -> str:
    """All runs below `runs_dir`, a line each."""
    rows = [(state, state.read()) for state in all_runs(runs_dir)]
    if not rows:
        return f"no runs in {runs_dir}"
    return "\n".join(f"{told['handle']:50} {_word(state, told):10} {told['started_at']}" for state, told in rows)


def _word(state: LaunchState, told: dict[str, Any]) -> str:
    if state.supervisor() is not None:
        return "running"
    words = {None: "lost", contract.EXIT_DONE: "done", contract.EXIT_PREEMPTED: "preempted"}
    return words.get(told["exit_code"], "failed")


def _detach(job: Job, state: LaunchState) -> int:
    state.make_folder()
    with (state.folder / "launcher.log").open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "launch.submit", job.to_json()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=Path(__file__).parent.parent,
        )
    while child.poll() is None:
        if state.path.exists() and state.read()["pid"] == child.pid:
            print(Handle(job.runtime, job.run_id))
            return contract.EXIT_DONE
        time.sleep(0.05)
    raise UserError(f"The run could not be started; see {state.folder}/launcher.log.", "start it without --detach")


def _main() -> int:
    job = Job.from_json(sys.argv[1])
    return watch(job, LaunchState(Path(job.runs_dir, job.run_id)), show=False)


if __name__ == "__main__":
    sys.exit(_main())
