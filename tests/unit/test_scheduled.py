"""Runs that a scheduler watches over: with a scheduler that gives the answers of a list, the last one for ever."""

import itertools
import json
import os
import signal
import time

import pytest

from launch import runtimes, scheduled, submit
from launch.job import Job
from launch.plan import Plan
from launch.scheduled import Look
from launch.state import Handle, LaunchState
from trainer.errors import UserError

PENDING, RUNNING = Look("pending", "PENDING (Resources)"), Look("running", "RUNNING, on c1")
DONE, FAILED, SAVED = (Look("ended", state, code) for state, code in (("COMPLETED", 0), ("FAILED", 1), ("FAILED", 75)))
SILENT = Look("unknown", "Slurm does not answer")
GONE = Look("gone", "Slurm does not know this job any more")
HANDLE = Handle("slurm", "run", "42")


class Slurm:
    """Answers each look with the next of its list; a function in the list is called and no answer."""

    def __init__(self):
        self.answers = [RUNNING]
        self.submitted = []
        self.cancelled = []
        self.on_cancel = []

    def submit(self, plan, *, test_only=False):
        self.submitted.append((plan.job.run_id, test_only))
        return "it would start" if test_only else str(41 + len(self.submitted))

    def look(self, job_id, name):
        while callable(self.answers[0]):
            self.answers.pop(0)()
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def cancel(self, job_id):
        self.cancelled.append(job_id)
        self.answers = self.on_cancel or self.answers


@pytest.fixture
def slurm(monkeypatch):
    told = Slurm()
    monkeypatch.setattr(runtimes, "scheduler", lambda name: told)
    monkeypatch.setattr(scheduled, "POLL_S", 0.001)
    monkeypatch.setattr(scheduled, "ASK_S", 0)
    monkeypatch.setattr(scheduled, "SETTLE_S", 0.05)
    return told


@pytest.fixture
def state(tmp_path):
    return LaunchState(tmp_path / "run")


@pytest.fixture
def job(tmp_path):
    return Job(command=("train",), runtime="slurm", name="run", runs_dir=str(tmp_path))


@pytest.fixture
def queued(state, job):
    """A run in the queue."""
    state.folder.mkdir()
    state.enqueue(job, "42")
    return state


def write(state, name, text):
    with (state.folder / name).open("a") as file:
        file.write(text)


def record(state, **values):
    told = {"status": "failed", "exit_code": 1, "job_id": "42", "attempt": 0, "failure": {"message": "boom"}}
    (state.folder / "run.json").write_text(json.dumps(told | values))


def test_a_run_that_was_submitted_is_written_down_with_its_handle(slurm, state, job, capsys):
    end = scheduled.submit(Plan(job, ()), state, detach=True)
    assert (end.code, capsys.readouterr().out) == (0, "slurm://run/42\n")
    told = state.read()
    assert (told["handle"], told["job_id"], told["exit_code"]) == ("slurm://run/42", "42", None)
    assert Job.from_json(json.dumps(told["job"])) == job
    assert state.path.stat().st_mode & 0o777 == 0o600


def test_a_run_in_the_foreground_shows_the_queue_and_its_lines_and_ends_as_it_did(slurm, state, job, capsys):
    slurm.answers = [PENDING, PENDING, RUNNING, lambda: write(state, "attempt-0.log", "[0:0] step 1\n"), RUNNING, DONE]
    end = scheduled.submit(Plan(job, ()), state, detach=False)
    assert (end.code, end.cause) == (0, "")
    shown = capsys.readouterr().out.splitlines()
    assert shown[:3] == [
        "slurm://run/42",
        "[queue] slurm://run/42: PENDING (Resources)",
        "[queue] slurm://run/42: RUNNING, on c1",
    ]
    assert "[0:0] step 1" in shown[3:]
    assert sum("PENDING" in line for line in shown) == 1
    assert state.read()["exit_code"] == 0


def test_what_an_earlier_job_wrote_is_not_shown_again(slurm, queued, job, capsys):
    write(queued, "attempt-0.log", "of the earlier job\n")
    slurm.answers = [DONE]
    assert scheduled.ended(queued).code == 0
    slurm.answers = [RUNNING, lambda: write(queued, "attempt-0.log", "of this one\n"), DONE]
    scheduled.submit(Plan(job, ()), queued, detach=False)
    shown = capsys.readouterr().out
    assert "of this one" in shown
    assert "of the earlier job" not in shown
    assert "of the earlier job" in list(scheduled.lines(HANDLE, queued, follow=False))


def test_what_a_scheduler_refuses_is_not_written_down(slurm, state, job, monkeypatch):
    def refuse(plan, *, test_only=False):
        raise UserError("Slurm refuses the job: no.", "--partition")

    monkeypatch.setattr(slurm, "submit", refuse)
    with pytest.raises(UserError, match=r"no\. HINT: --partition"):
        scheduled.submit(Plan(job, ()), state, detach=False)
    assert not state.path.exists()


def test_a_check_is_asked_and_printed_and_leaves_no_run(slurm, state, job, capsys):
    scheduled.check(Plan(job, ()))
    assert (slurm.submitted, capsys.readouterr().out) == ([("run", True)], "it would start\n")
    assert not state.folder.exists()


@pytest.mark.parametrize("look", [PENDING, RUNNING, SILENT])
def test_a_run_that_goes_on_is_not_submitted_again(look, slurm, queued, job):
    slurm.answers = [look]
    with pytest.raises(UserError, match=r"run is still going on\. HINT: invoke cancel slurm://run/42, or another"):
        scheduled.submit(Plan(job, ()), queued, detach=True)
    assert slurm.submitted == []


@pytest.mark.parametrize("look", [DONE, FAILED, SAVED, GONE])
def test_a_run_that_ended_may_be_submitted_again_and_is_a_new_one(look, slurm, queued, job):
    slurm.answers = [look]
    scheduled.submit(Plan(job, ()), queued, detach=True)
    slurm.answers = [PENDING]
    assert (scheduled.ended(queued), queued.read()["exit_code"]) == (None, None)


def test_a_run_in_the_queue_is_not_begun_on_this_host(slurm, queued, job):
    slurm.answers = [RUNNING]
    with pytest.raises(UserError, match=r" HINT: "):
        queued.begin(Job(command=("train",), runtime="local", name="run", runs_dir=job.runs_dir))
    assert queued.read()["job_id"] == "42"


def test_a_run_that_goes_on_on_this_host_is_not_submitted(slurm, state, job):
    state.begin(Job(command=("train",), runtime="local", name="run", runs_dir=job.runs_dir))
    with pytest.raises(UserError, match=r" HINT: "):
        scheduled.submit(Plan(job, ()), state, detach=True)
    assert slurm.submitted == []


def test_the_lines_of_attempts_come_in_their_order_and_slurms_own_last(slurm, queued):
    slurm.answers = [DONE]
    for name in ("slurm-42.out", "attempt-10.log", "attempt-2.log", "attempt-0.log", "slurm-42.out"):
        write(queued, name, f"{name}\n")
    told = list(scheduled.lines(HANDLE, queued, follow=False))
    assert told == ["attempt-0.log", "attempt-2.log", "attempt-10.log", "slurm-42.out", "slurm-42.out"]


def test_a_line_is_shown_once_it_is_whole_and_once_only(slurm, queued):
    slurm.answers = [RUNNING]
    told = scheduled.lines(HANDLE, queued, follow=True)
    assert next(told) == "[queue] slurm://run/42: RUNNING, on c1"
    write(queued, "attempt-0.log", "first\nsec")
    assert next(told) == "first"
    slurm.answers = [RUNNING, RUNNING, lambda: write(queued, "attempt-0.log", "ond größe\n"), RUNNING]
    assert next(told) == "second größe"
    write(queued, "attempt-0.log", "cut off")
    slurm.answers = [Look("ended", "RUNNING, on c1", 0)]
    assert list(told) == ["cut off"]


def test_an_unfinished_line_is_told_to_who_asks_for_the_lines_so_far(slurm, queued):
    write(queued, "attempt-0.log", "first\nsec")
    assert list(scheduled.lines(HANDLE, queued, follow=False)) == ["first", "sec"]


def test_following_goes_on_when_a_job_is_queued_again(slurm, queued):
    slurm.answers = [RUNNING, SAVED, SAVED, PENDING, RUNNING, lambda: write(queued, "attempt-1.log", "again\n"), DONE]
    told = list(scheduled.lines(HANDLE, queued, follow=True))
    assert [line.rpartition(": ")[2] for line in told] == [
        "RUNNING, on c1",
        "FAILED",
        "PENDING (Resources)",
        "RUNNING, on c1",
        "COMPLETED",
        "again",
    ]


def test_following_outlasts_a_scheduler_that_does_not_answer(slurm, queued):
    slurm.answers = [RUNNING, *[SILENT] * 100, RUNNING, lambda: write(queued, "attempt-0.log", "still here\n"), DONE]
    told = list(scheduled.lines(HANDLE, queued, follow=True))
    assert [line.rpartition(": ")[2] for line in told] == [
        "RUNNING, on c1",
        "Slurm does not answer",
        "RUNNING, on c1",
        "COMPLETED",
        "still here",
    ]


def test_a_run_without_lines_has_none(slurm, queued):
    assert list(submit.logs(HANDLE, str(queued.folder.parent), follow=False)) == []


VERDICTS = {
    "it is done": (DONE, {"status": "done", "exit_code": 0, "failure": None}, (0, "")),
    "it failed and said why": (FAILED, {}, (1, "boom")),
    "it saved": (SAVED, {"status": "preempted", "exit_code": 75, "failure": None}, (75, "FAILED")),
    "the words of an earlier job": (FAILED, {"job_id": "41"}, (1, "FAILED")),
    "the words of an earlier attempt": (Look("ended", "FAILED", 1, attempt=1), {}, (1, "FAILED")),
    "the words of this attempt": (Look("ended", "FAILED", 1, attempt=0), {}, (1, "boom")),
    "no record at all": (FAILED, None, (1, "FAILED")),
    "killed in its midst": (Look("ended", "NODE_FAIL", 1), {"status": "running", "exit_code": None}, (1, "NODE_FAIL")),
    "forgotten after it was done": (GONE, {"status": "done", "exit_code": 0, "failure": None}, (0, "")),
    "forgotten after it failed": (GONE, {}, (1, "boom")),
    "forgotten without a word": (GONE, None, (1, GONE.detail)),
    "forgotten, an earlier job is done": (
        GONE,
        {"job_id": "41", "status": "done", "exit_code": 0, "failure": None},
        (1, GONE.detail),
    ),
    "the trainer's code before the scheduler's": (Look("ended", "CANCELLED", 143), {"exit_code": 75}, (75, "boom")),
}


@pytest.mark.parametrize(("look", "told", "end"), VERDICTS.values(), ids=VERDICTS.keys())
def test_a_run_ended_as_its_trainer_says_or_else_as_its_scheduler_does(look, told, end, slurm, queued):
    write(queued, "attempt-0.log", "[job] attempt 0\n")
    if told is not None:
        record(queued, **told)
    slurm.answers = [look]
    found = scheduled.ended(queued)
    assert (found.code, found.cause) == end


def test_a_job_that_left_no_log_may_have_run_where_nobody_sees_its_folder(slurm, queued):
    slurm.answers = [Look("ended", "FAILED", 2)]
    assert f"no log in {queued.folder}: see that all nodes share" in scheduled.ended(queued).cause


def test_a_job_that_was_cancelled_before_it_ran_is_no_matter_of_folders(slurm, queued):
    slurm.answers = [Look("ended", "CANCELLED", 1)]
    assert "share" not in scheduled.ended(queued).cause


def test_a_cause_that_only_the_script_knows_is_the_last_error_in_its_log(slurm, queued):
    write(queued, "attempt-0.log", "[job] error: an older one\n")
    write(queued, "attempt-1.log", "[job] error: c1 cannot see /shared. HINT: x\n[job] attempt 1 ended\n")
    slurm.answers = [Look("ended", "FAILED", 2)]
    assert scheduled.ended(queued).cause == "[job] error: c1 cannot see /shared. HINT: x"


def test_a_record_that_says_running_is_closed_when_the_run_is_over(slurm, queued):
    record(queued, status="running", exit_code=None, failure=None, config={"epochs": 1})
    slurm.answers = [Look("ended", "NODE_FAIL", 1)]
    assert scheduled.ended(queued).code == 1
    told = queued.outcome()
    assert (told["status"], told["exit_code"], told["config"]) == ("failed", 1, {"epochs": 1})


def test_a_verdict_stays_whatever_the_scheduler_forgets(slurm, queued):
    slurm.answers = [Look("ended", "FAILED", 3)]
    first = scheduled.ended(queued)
    before = queued.path.read_text()
    slurm.answers = [GONE]
    assert scheduled.ended(queued) == first
    slurm.answers = [DONE]
    assert scheduled.ended(queued) == first
    assert queued.path.read_text() == before


def test_a_run_that_goes_on_has_no_end(slurm, queued):
    for look in (PENDING, RUNNING, SILENT):
        slurm.answers = [look]
        assert scheduled.ended(queued) is None
    record(queued)
    assert scheduled.ended(queued) is None


WORDS = {
    "pending": PENDING,
    "running": RUNNING,
    "unknown": SILENT,
    "done": DONE,
    "preempted": SAVED,
    "failed": FAILED,
}


@pytest.mark.parametrize("word", WORDS)
def test_list_and_status_have_a_word_for_every_state(word, slurm, queued):
    slurm.answers = [WORDS[word]]
    runs_dir = str(queued.folder.parent)
    (line,) = submit.table(runs_dir).splitlines()
    assert line.split()[:2] == ["slurm://run/42", word]
    lines = submit.status(HANDLE, runs_dir).splitlines()
    assert lines[0].split() == ["slurm://run/42", word]
    assert f"queue    {WORDS[word].detail}" in lines
    assert any(line.startswith("ended ") for line in lines) is (word not in ("pending", "running", "unknown"))


def test_status_tells_the_cause_and_the_latest_metrics(slurm, queued):
    slurm.answers = [FAILED]
    record(queued)
    write(queued, "metrics.jsonl", '{"step": 1}\n{"step": 2}\n')
    lines = submit.status(HANDLE, str(queued.folder.parent)).splitlines()
    assert "cause    boom" in lines
    assert lines[-1] == 'latest   {"step": 2}'


def test_cancelling_asks_the_scheduler_and_waits_for_the_end(slurm, queued):
    slurm.on_cancel = [RUNNING, RUNNING, Look("ended", "CANCELLED", 143)]
    told = submit.cancel(HANDLE, str(queued.folder.parent))
    assert (told, slurm.cancelled) == ("slurm://run/42 ended with exit code 143", ["42"])
    assert submit.cancel(HANDLE, str(queued.folder.parent)).endswith("had ended with exit code 143")
    assert slurm.cancelled == ["42"]


def test_a_run_that_does_not_end_is_told(slurm, queued, monkeypatch):
    monkeypatch.setattr(scheduled, "CANCEL_S", 0.01)
    with pytest.raises(UserError, match=r"has not ended after 0\.01 s\. HINT: invoke status slurm://run/42"):
        scheduled.cancel(HANDLE, queued)


def test_an_old_handle_does_not_cancel_the_job_that_took_its_place(slurm, queued):
    slurm.on_cancel = [FAILED]
    with pytest.raises(UserError, match=r" HINT: "):
        submit.cancel(Handle("slurm", "run", "41"), str(queued.folder.parent))
    assert slurm.cancelled == []


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)


def test_an_interrupt_cancels_the_job_and_its_end_is_waited_for(slurm, state, job, capsys):
    slurm.answers = [RUNNING, interrupt, RUNNING]
    slurm.on_cancel = [RUNNING, SAVED]
    before = signal.getsignal(signal.SIGINT)
    assert scheduled.submit(Plan(job, ()), state, detach=False).code == 75
    assert slurm.cancelled == ["42"]
    assert "cancelling" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_leaves_the_job_to_itself(slurm, state, job):
    counting = (Look("running", f"RUNNING {number}") for number in itertools.count())
    slurm.answers = [RUNNING, interrupt, RUNNING]
    slurm.on_cancel = [RUNNING, interrupt, *itertools.islice(counting, 500)]
    end = scheduled.submit(Plan(job, ()), state, detach=False)
    assert (end.code, slurm.cancelled) == (1, ["42"])
    assert "invoke status slurm://run/42" in end.cause
    assert state.read()["exit_code"] is None


def test_a_second_interrupt_is_heeded_while_nothing_happens(slurm, state, job):
    slurm.answers = [RUNNING, interrupt, RUNNING]
    slurm.on_cancel = [RUNNING, interrupt, *[RUNNING] * 200, lambda: pytest.fail("still followed"), RUNNING]
    assert scheduled.submit(Plan(job, ()), state, detach=False).code == 1
