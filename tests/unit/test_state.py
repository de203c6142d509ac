"""launch.json, handles, and what the verbs say of runs in every state."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launch import submit
from launch.job import Job
from launch.state import Handle, LaunchState, all_runs, process_birth
from trainer.errors import UserError

ROOT = Path(__file__).parents[2]
KNOWN = ("local", "docker")
WITH_SLURM = ("local", "slurm")


def job(name="run"):
    return Job(command=("train",), runtime="local", name=name)


@pytest.fixture
def begun(tmp_path):
    """A run that this process watches over."""
    state = LaunchState(tmp_path / "run")
    state.begin(job())
    return state


def test_a_handle_is_read_as_it_was_printed():
    assert Handle.parse(str(Handle("docker", "run-1")), KNOWN) == Handle("docker", "run-1")


@pytest.mark.parametrize(
    ("text", "job_id"), [("slurm://run-1", ""), ("slurm://run-1/42", "42"), ("slurm://a/42_7", "42_7")]
)
def test_a_handle_may_hold_the_number_of_a_scheduler(text, job_id):
    handle = Handle.parse(text, WITH_SLURM)
    assert (handle.runtime, handle.job_id, str(handle)) == ("slurm", job_id, text)


@pytest.mark.parametrize(
    "text", ["slurm://run/", "slurm://run/x", "slurm://run/42/1", "slurm:///42", "slurm://run/42\n"]
)
def test_what_is_no_number_of_a_scheduler_is_refused(text):
    with pytest.raises(UserError, match=r"is not a handle \(local://RUN, slurm://RUN\)\. HINT: invoke list"):
        Handle.parse(text, WITH_SLURM)


@pytest.mark.parametrize(
    "text", ["", "run", "docker:run", "docker://", "slurm://run", "docker://a/b", "://run", "local://.."]
)
def test_what_is_no_handle_is_refused_with_the_forms(text):
    with pytest.raises(UserError, match=r"not a handle \(local://RUN, docker://RUN\).* HINT: "):
        Handle.parse(text, KNOWN)


def test_a_run_that_began_tells_who_watches_over_it(begun):
    told = begun.read()
    assert (told["handle"], told["pid"], told["exit_code"]) == ("local://run", os.getpid(), None)
    assert begun.supervisor() == os.getpid()


def test_a_run_that_ended_has_no_supervisor(begun):
    begun.end(0, "")
    assert begun.supervisor() is None
    assert begun.read()["finished_at"]


def test_a_process_number_that_was_given_away_again_is_not_the_supervisor(begun):
    begun.change(born="1")
    assert begun.supervisor() is None


def test_a_supervisor_that_is_gone_is_none(begun):
    child = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    begun.change(pid=child.pid, born=process_birth(child.pid))
    assert begun.supervisor() == child.pid
    child.communicate()
    assert process_birth(child.pid) is None
    assert begun.supervisor() is None


def test_a_supervisor_that_waits_to_be_reaped_is_none(begun):
    child = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    begun.change(pid=child.pid, born=process_birth(child.pid))
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert begun.supervisor() is None
    finally:
        child.wait()


def test_a_change_is_whole_or_not_at_all(begun, monkeypatch):
    before = begun.path.read_text()

    def killed(*names):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        begun.end(1, "boom")
    assert begun.path.read_text() == before


def test_a_run_of_a_scheduler_forgets_who_watched_over_an_earlier_one(begun):
    begun.end(3, "boom", ["a warning"])
    begun.enqueue(Job(command=("train",), runtime="slurm", name="run", env=(("TOKEN", "hush"),)), "42")
    told = begun.read()
    assert (told["handle"], told["job_id"], told["exit_code"], told["cause"]) == ("slurm://run/42", "42", None, "")
    assert not {"pid", "host", "born"} & told.keys()
    assert (begun.supervisor(), begun.elsewhere()) == (None, None)
    assert begun.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", [None, "{", ""], ids=["missing", "cut off", "empty"])
def test_a_run_without_a_readable_record_is_a_user_error(text, tmp_path):
    state = LaunchState(tmp_path / "run")
    if text is not None:
        state.folder.mkdir()
        state.path.write_text(text)
    with pytest.raises(UserError, match=r"HINT"):
        state.read()


def test_the_end_is_written_for_a_trainer_that_could_not(begun):
    (begun.folder / "run.json").write_text('{"status": "running", "config": {}}')
    begun.end(137, "node 1 ended with exit code 137")
    told = begun.outcome()
    assert (told["status"], told["exit_code"], told["config"]) == ("failed", 137, {})
    assert told["failure"]["message"] == "node 1 ended with exit code 137"


def test_the_cause_that_the_trainer_wrote_itself_is_the_one_kept(begun):
    told = '{"status": "failed", "exit_code": 1, "failure": {"message": "boom"}}'
    (begun.folder / "run.json").write_text(told)
    begun.end(1, "node 0 ended with exit code 1")
    assert begun.outcome()["failure"]["message"] == "boom"
    assert begun.read()["cause"] == "boom"


def test_the_cause_of_an_earlier_attempt_is_not_that_of_this_one(begun, tmp_path):
    told = {"status": "failed", "exit_code": 1, "finished_at": "then", "failure": {"message": "boom"}}
    (begun.folder / "run.json").write_text(json.dumps(told))
    begun.end(1, "node 0 ended with exit code 1")
    begun.begin(job())
    assert begun.end(125, "Docker cannot start the run") == "Docker cannot start the run"
    assert "boom" not in submit.status(Handle("local", "run"), str(tmp_path))
    begun.begin(job())
    (begun.folder / "run.json").write_text(json.dumps({**told, "finished_at": "now"}))
    assert begun.end(1, "node 0 ended with exit code 1") == "boom"


@pytest.mark.parametrize("earlier", [None, 0o644])
def test_nobody_else_can_read_what_may_hold_a_secret(earlier, begun, monkeypatch):
    if earlier:
        begun.path.chmod(earlier)
    seen = []
    monkeypatch.setattr(os, "replace", lambda new, old: seen.append(new.stat().st_mode) or os.rename(new, old))
    begun.change(job={"env": [["TOKEN", "hush"]]})
    assert [mode & 0o777 for mode in (*seen, begun.path.stat().st_mode)] == [0o600, 0o600]
    assert sorted(path.name for path in begun.folder.iterdir()) == ["launch.json", "run.log"]


def test_a_run_that_goes_on_cannot_begin_again(begun):
    with pytest.raises(UserError, match=r"is still going on\. HINT: invoke cancel local://run, or another --name"):
        begun.begin(job())


CLAIM = """
import sys
from launch.job import Job
from launch.state import LaunchState
from pathlib import Path
state = LaunchState(Path(sys.argv[1]))
job = Job(command=("train",), runtime="local", name="run")
print("ready", flush=True)
sys.stdin.readline()
try:
    state.begin(job)
    print("mine", flush=True)
except ValueError as error:
    print(error, flush=True)
sys.stdin.read()
"""


def test_of_launches_at_the_same_moment_one_has_the_run(tmp_path):
    words = [sys.executable, "-c", CLAIM, str(tmp_path / "run")]
    launches = [
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=ROOT)
        for _ in range(4)
    ]
    for launch in launches:
        assert launch.stdout.readline() == "ready\n"
    for launch in launches:
        launch.stdin.write("go\n")
    said = [launch.stdout.readline() for launch in launches]
    for launch in launches:
        launch.communicate()
    assert said.count("mine\n") == 1
    assert sum("is still going on. HINT: " in line for line in said) == 3


@pytest.fixture
def moved(begun, monkeypatch):
    """The same run, seen from another host that shares the file system."""
    monkeypatch.setattr(socket, "gethostname", lambda: "other")
    return begun


def test_a_run_of_another_host_is_seen_as_such(moved, tmp_path):
    host = moved.read()["host"]
    assert submit.table(str(tmp_path)).split()[1] == "elsewhere"
    status = submit.status(Handle("local", "run"), str(tmp_path))
    assert f"launched on {host}; ask there" in status
    moved.change(exit_code=0, finished_at="then")
    assert submit.table(str(tmp_path)).split()[1] == "done"
    assert submit.cancel(Handle("local", "run"), str(tmp_path)).endswith("had ended with exit code 0")


def test_a_run_of_another_host_is_neither_cancelled_nor_begun_here(moved, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "kill", lambda *told: pytest.fail("a process of this host was signalled"))
    hint = f"HINT: invoke cancel local://run on {moved.read()['host']}"
    with pytest.raises(UserError, match=hint):
        submit.cancel(Handle("local", "run"), str(tmp_path))
    with pytest.raises(UserError, match=hint):
        moved.begin(job())
    assert moved.read()["exit_code"] is None


def test_a_process_of_an_earlier_boot_is_not_the_supervisor(begun):
    begun.change(born=f"another-boot {begun.read()['born'].split()[1]}")
    assert begun.supervisor() is None


WORDS = {
    "running": lambda state: None,
    "lost": lambda state: state.change(born="1"),
    "done": lambda state: state.end(0, ""),
    "preempted": lambda state: state.end(75, ""),
    "failed": lambda state: state.end(1, "boom"),
}


@pytest.mark.parametrize("word", WORDS)
def test_list_and_status_have_a_word_for_every_state(word, begun, tmp_path):
    WORDS[word](begun)
    (line,) = submit.table(str(tmp_path)).splitlines()
    assert line.split()[:2] == ["local://run", word]
    status = submit.status(Handle("local", "run"), str(tmp_path)).splitlines()
    assert status[0].split() == ["local://run", word]
    assert any("boom" in line for line in status) is (word == "failed")


def test_status_shows_the_latest_metrics(begun, tmp_path):
    (begun.folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    assert submit.status(Handle("local", "run"), str(tmp_path)).endswith('latest   {"step": 2}')


def test_runs_are_listed_by_name_and_strangers_left_out(tmp_path):
    for name in ("b", "a"):
        LaunchState(tmp_path / name).begin(job(name))
    (tmp_path / "other").mkdir()
    assert [state.folder.name for state in all_runs(str(tmp_path))] == ["a", "b"]
    assert submit.table(str(tmp_path / "nowhere")) == f"no runs in {tmp_path}/nowhere"


def test_a_damaged_record_does_not_keep_the_others_from_being_listed(begun, tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "launch.json").write_text("{")
    first, second = submit.table(str(tmp_path)).splitlines()
    assert first.split()[:2] == ["bad", "unreadable"]
    assert second.split()[:2] == ["local://run", "running"]


def test_lines_that_are_gone_are_a_user_error(begun, tmp_path):
    begun.log.unlink()
    with pytest.raises(UserError, match=r"Cannot read .*run\.log: No such file or directory\. HINT: "):
        list(submit.logs(Handle("local", "run"), str(tmp_path), follow=False))


def test_the_lines_of_an_ended_run_are_given_once_even_if_asked_to_follow(begun, tmp_path):
    begun.log.write_text("[0:-] a\n[0:0] größe\n", encoding="utf-8")
    begun.end(0, "")
    assert list(submit.logs(Handle("local", "run"), str(tmp_path), follow=True)) == ["[0:-] a", "[0:0] größe"]


def test_cancelling_what_has_ended_changes_nothing(begun, tmp_path):
    begun.end(3, "boom")
    before = begun.path.read_text()
    assert "had ended with exit code 3" in submit.cancel(Handle("local", "run"), str(tmp_path))
    assert begun.path.read_text() == before


def test_cancelling_a_lost_run_closes_its_record(begun, tmp_path):
    begun.change(born="1")
    assert submit.cancel(Handle("local", "run"), str(tmp_path)) == "local://run ended with exit code 1"
    assert begun.read()["exit_code"] == 1
