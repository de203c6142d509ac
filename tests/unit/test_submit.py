"""Whole launches of a trainer made of shell: read by somebody who goes away, detached, or begun with a full disk."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.state import LaunchState

ROOT = Path(__file__).parents[2]
MANY = "seq 50000; echo last"


@pytest.fixture
def launch(tmp_path):
    """Start `invoke local-run` of a trainer that is these lines of shell."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    trainer = folder / "trainer"
    path = os.pathsep.join([str(ROOT), *sys.path])

    def start(script, *words, **more):
        trainer.write_text(f"#!/bin/sh\n{script}\n")
        trainer.chmod(0o755)
        invoke = (str(folder / "python"), "-m", "invoke", "local-run", "--runs-dir", str(tmp_path), "--name", "run")
        return subprocess.Popen(
            [*invoke, *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            **more,
        )

    return start


@pytest.fixture
def state(tmp_path):
    return LaunchState(tmp_path / "run")


@pytest.mark.parametrize(("script", "code"), [(MANY, 0), (f"{MANY}; exit 3", 3)], ids=["done", "failed"])
def test_a_reader_that_goes_away_changes_nothing_of_the_run(script, code, launch, state):
    process = launch(script, stdout=subprocess.PIPE)
    assert process.stdout.readline() == "[0:-] 1\n"
    process.stdout.close()
    told = process.stderr.read()
    assert (process.wait(), state.read()["exit_code"]) == (code, code)
    assert state.log.read_text().endswith("[0:-] last\n")
    assert len(told.splitlines()) == 1
    assert f"no longer shown ([Errno 32] Broken pipe); its lines are in {state.log}" in told


def test_a_screen_that_is_full_changes_nothing_of_the_run(launch, state):
    with open("/dev/full", "w") as full:
        process = launch(MANY, stdout=full)
        _, told = process.communicate()
    assert process.returncode == 0
    assert state.log.read_text().endswith("[0:-] last\n")
    assert len(told.splitlines()) == 1


def test_a_log_that_is_not_whole_is_named_in_the_end(launch, state):
    state.folder.mkdir()
    state.log.symlink_to("/dev/full")
    process = launch(MANY, stdout=subprocess.PIPE)
    shown, told = process.communicate()
    assert process.returncode == 0
    warning = f"warning: {state.log} is not whole: No space left on device"
    assert told == f"{warning}\n"
    assert warning in shown.splitlines()[-3:]
    assert shown.splitlines()[-1] == f"run done: {state.folder}"


def test_a_detached_run_shows_its_variables_to_nobody(launch, state):
    process = launch("sleep 60", "--detach", "--env", "TOKEN=hush", stdout=subprocess.PIPE)
    shown, _ = process.communicate()
    assert (process.returncode, shown) == (0, "local://run\n")
    supervisor = state.supervisor()
    assert "launch.submit" in Path(f"/proc/{supervisor}/cmdline").read_text()
    assert "hush" not in Path(f"/proc/{supervisor}/cmdline").read_text()
    assert [path.name for path in state.folder.iterdir() if "hush" in path.read_text()] == ["launch.json"]
    assert state.path.stat().st_mode & 0o777 == 0o600
    for _ in range(2):
        os.kill(supervisor, signal.SIGTERM)
        time.sleep(0.3)
    while state.supervisor():
        time.sleep(0.05)
    assert state.read()["job"]["env"] == [["TOKEN", "hush"]]


@pytest.mark.parametrize("flags", [(), ("--detach",)], ids=["in the foreground", "detached"])
def test_a_folder_that_cannot_be_written_is_one_line(flags, launch, state):
    state.folder.write_text("")
    process = launch("exit 0", *flags, stdout=subprocess.PIPE)
    shown, told = process.communicate()
    assert (process.returncode, shown) == (2, "")
    assert told == f"error: Cannot write {state.folder}: File exists. HINT: --runs-dir with a writable folder\n"
