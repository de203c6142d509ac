"""The batch script, executed by bash: how an attempt ends, whether another follows, and what signals do."""

import json
import os
import shutil
import signal

import pytest

from launch.runtimes import slurm
from trainer import failures
from trainer.config import TrainConfig
from trainer.errors import Unavailable
from trainer.failures import Failure
from trainer.record import Record, close_failed
from trainer.topology import Topology

from .cluster import finish

WAIT = 'touch "$RUN/ready.$NODE"; until [ -e "$RUN/end" ] || [ "$asked" ]; do sleep 1; done'
WAIT_AND_SAVE = f"trap 'asked=1' USR1 TERM; {WAIT}; sleep 1; exit 75"  # saving takes its time
LONG = f"for i in {'1 ' * 12}; do sleep 5; done"  # longer than the script waits for a node that does not answer
BROKEN = Failure(node_rank=0, rank=1, message="ValueError: boom")
LOST = failures.vanished(1, "c2")
SEGFAULT = failures.of_exit(-signal.SIGSEGV, rank=0, node_rank=0)
KILLED = failures.of_exit(-signal.SIGKILL, rank=0, node_rank=0)
NEVER_MET = failures.of_exception(Unavailable("node 1 never came.", "see its log"), None, 0)


@pytest.fixture
def record(cluster, monkeypatch):
    """Write run.json as the trainer does: into the run's folder, or where the trainer of a test takes it from."""

    def write(*, failure=None, began=True, ended=True, code=0, job="42", attempt=0, there=False):
        monkeypatch.setenv("TRAINER_JOB_ID", job)
        monkeypatch.setenv("TRAINER_ATTEMPT", str(attempt))
        config = TrainConfig(runs_dir=f"{cluster.home}/runs", run_id="run")
        told = Record(cluster.home / "runs" / "run")
        told.path.parent.mkdir(parents=True, exist_ok=True)
        if began:
            told.start(config, Topology(source="PET", nnodes=2, nproc_per_node=1))
        if failure:
            close_failed(config, failure)
        elif ended:
            told.close({0: "done", 75: "preempted"}[code], code)
        if not there:
            shutil.move(told.path, cluster.home / "run.json")

    return write


ENDS = {
    "it is done": ({"code": 0}, 0, False),
    "it saved": ({"code": 75}, 75, True),
    "it saved without a word": (None, 75, True),
    "it was a bad request": (None, 2, False),
    "it was found to be a bad request in the middle of its work": ({"ended": False}, 2, False),
    "its code is broken": ({"failure": BROKEN}, 1, False),
    "its code crashed": ({"failure": SEGFAULT}, 139, False),
    "it failed before it began": (None, 1, False),
    "a rank was killed": ({"failure": KILLED}, 137, True),
    "a node was lost": ({"failure": LOST}, 1, True),
    "a node never came": ({"failure": NEVER_MET, "began": False}, 1, True),
    "it was killed before it began": (None, 137, True),
    "it was ended in the middle of its work": ({"ended": False}, 1, True),
}


@pytest.mark.parametrize(("told", "code", "again"), ENDS.values(), ids=ENDS.keys())
def test_the_end_of_an_attempt_decides_whether_another_follows(told, code, again, cluster, record):
    take = ""
    if told is not None:
        record(**told)
        take = f'cp "{cluster.home}/run.json" "$RUN/run.json"\n'
    cluster.trainer(f"{take}exit {code}")
    assert cluster.run(cluster.job()) == code
    assert cluster.requeued == ["42"] * again, cluster.log()
    assert f"attempt 0 ended with exit code {code}" in cluster.log()


@pytest.mark.parametrize("code", [137, 75])
@pytest.mark.parametrize("most", [0, 2])
def test_after_failures_from_outside_it_starts_anew_so_often_and_no_more(code, most, cluster):
    cluster.trainer(f"exit {code}")
    for attempt in range(3, 4 + most):  # starts for other reasons do not count
        assert cluster.run(cluster.job(max_restarts=most), attempt=attempt) == code
    assert cluster.requeued == ["42"] * most
    assert f"but --max-restarts is {most}" in cluster.log(3 + most)


def test_a_run_that_saved_is_queued_again_however_often(cluster, record):
    for attempt in range(3):
        record(code=75, attempt=attempt)
        cluster.trainer(f'mkdir -p "$RUN/checkpoints/step-0{attempt}"; cp "{cluster.home}/run.json" "$RUN"; exit 75')
        assert cluster.run(cluster.job(max_restarts=0), attempt=attempt) == 75
    assert cluster.requeued == ["42"] * 3


def test_a_run_that_saves_nothing_new_is_not_queued_again_for_ever(cluster, record):
    for attempt in range(3):
        record(code=75, attempt=attempt)
        cluster.trainer(f'mkdir -p "$RUN/checkpoints/step-01"; cp "{cluster.home}/run.json" "$RUN"; exit 75')
        assert cluster.run(cluster.job(max_restarts=1), attempt=attempt) == 75
    assert cluster.requeued == ["42"] * 2  # once because it saved, once although it did not


def test_a_node_that_refuses_decides_also_if_the_others_were_told_to_stop(cluster):
    cluster.trainer('[ "$NODE" = 1 ] && exit 2; sleep 1; sleep 1; exit 75')
    assert cluster.run(cluster.job(nodes=2)) == 2
    assert cluster.requeued == []


def test_an_end_that_is_recorded_counts_even_if_a_node_never_answers(cluster, record):
    record(code=0)
    cluster.trainer(f'cp "{cluster.home}/run.json" "$RUN/run.json"; exit 137')
    assert cluster.run(cluster.job()) == 0
    assert cluster.requeued == []


def test_a_node_with_a_trouble_is_refused_at_first_and_tried_again_later(cluster):
    (cluster.home / "i.sif").unlink()
    assert cluster.run(cluster.job()) == 2
    assert cluster.run(cluster.job(), attempt=1) == 69
    assert cluster.requeued == ["42"]


def test_where_slurm_refuses_the_way_on_is_told(cluster):
    (cluster.home / "refuses").touch()
    cluster.trainer("exit 75")
    assert cluster.run(cluster.job()) == 75
    assert "go on with --name run -- … --resume auto" in cluster.log()


def test_the_record_of_an_earlier_attempt_says_nothing_of_this_one(cluster, record):
    record(failure=LOST, there=True)
    cluster.trainer("exit 1")
    assert cluster.run(cluster.job(), attempt=1) == 1
    assert cluster.requeued == []


def test_the_record_of_an_earlier_job_says_nothing_of_this_one(cluster, record):
    record(failure=LOST, job="41", there=True)
    cluster.trainer("exit 1")
    assert cluster.run(cluster.job()) == 1
    assert cluster.requeued == []


def test_a_run_that_an_earlier_job_ended_has_its_time_to_begin(cluster, record):
    record(code=75, job="41", there=True)
    cluster.trainer(LONG)
    assert cluster.run(cluster.job()) == 0, cluster.log()


def test_the_next_attempt_goes_on_and_has_a_log_of_its_own(cluster):
    cluster.trainer('echo "trainer of $ATTEMPT"; exit $((75 * (1 - ATTEMPT)))')
    job = cluster.job(nodes=2)
    assert (cluster.run(job), cluster.run(job, attempt=1)) == (75, 0)
    for attempt in (0, 1):
        assert cluster.log(attempt).count(f"trainer of {attempt}\n") == 2
        assert cluster.told(1, attempt)["inside"]["TRAINER_ATTEMPT"] == str(attempt)
    assert "TRAINER_RESUME" not in cluster.told(0, 0)["inside"]
    assert cluster.told(0, 1)["inside"]["TRAINER_RESUME"] == "auto"
    assert (cluster.home / "runs" / "run" / "slurm-42.out").read_text() == ""


def begun(cluster, **values):
    """A job of two nodes whose trainers are at work."""
    process = cluster.start(cluster.job(nodes=2, **values))
    for node in (0, 1):
        cluster.until(f"runs/run/ready.{node}")
    return process


@pytest.fixture(params=["all processes", "the first process"])
def reach(request, cluster):
    """Which processes of a task a signal reaches."""
    if request.param == "the first process":
        (cluster.home / "signals-first").touch()


@pytest.mark.usefixtures("reach")
def test_when_the_time_is_nearly_over_every_node_is_asked_to_save_and_the_job_is_queued_again(cluster):
    cluster.trainer(WAIT_AND_SAVE)
    process = begun(cluster)
    process.send_signal(signal.SIGUSR1)
    assert finish(process) == 75
    assert "asking the run to save" in cluster.log()
    assert (cluster.home / "signals").read_text() == "USR1\n"
    assert cluster.requeued == ["42"]
    assert cluster.on_disk() == []


@pytest.mark.parametrize("code", [0, 1, 75, 137])
def test_a_cancelled_job_is_not_queued_again(code, cluster):
    cluster.trainer(f"{WAIT}; exit {code}")
    process = begun(cluster)
    process.send_signal(signal.SIGTERM)
    (cluster.home / "runs" / "run" / "end").touch()
    assert finish(process) == code
    assert "Slurm was asked to end it" in cluster.log()
    assert cluster.requeued == []


@pytest.mark.usefixtures("reach")
def test_a_cancelled_job_saves_on_every_node(cluster):
    cluster.trainer(WAIT_AND_SAVE)
    process = begun(cluster)
    for pid in (process.pid, int((cluster.home / "srun").read_text())):
        os.kill(pid, signal.SIGTERM)
    assert finish(process) == 75
    assert (cluster.home / "signals").read_text() == "TERM\n"
    assert (cluster.requeued, cluster.on_disk()) == ([], [])


def test_a_request_to_save_while_data_are_copied_loses_nothing_and_leaves_nothing(cluster):
    cluster.program("cp", f"#!/bin/sh\ntouch {cluster.home}/copying; while :; do sleep 1; done\n")
    process = cluster.start(cluster.job(data_stage=True))
    cluster.until("copying")
    process.send_signal(signal.SIGUSR1)
    assert finish(process) != 0
    assert cluster.requeued == ["42"], cluster.log()
    assert cluster.on_disk() == []


def test_a_node_that_never_answers_does_not_hold_a_run_that_has_ended(cluster, record):
    record(failure=LOST)
    cluster.trainer(f'cp "{cluster.home}/run.json" "$RUN/run.json"; {WAIT}')
    process = cluster.start(cluster.job())
    try:
        assert finish(process) == 1
    finally:
        (cluster.home / "runs" / "run" / "end").touch()
    assert "a node does not answer any more" in cluster.log()
    assert cluster.requeued == ["42"]


def test_a_run_that_goes_on_is_left_alone_however_long_it_takes(cluster, record):
    record(ended=False)
    cluster.trainer(f'cp "{cluster.home}/run.json" "$RUN/run.json"; {LONG}')
    assert cluster.run(cluster.job()) == 0, cluster.log()


@pytest.mark.parametrize("code", [0, 1, 2, 75, 137])
def test_the_launcher_reads_the_exit_code_that_the_script_ends_with(code, cluster):
    cluster.trainer(f"exit {code}")
    told = cluster.run(cluster.job())
    assert slurm.exit_code("COMPLETED" if told == 0 else "FAILED", f"{told}:0") == code


def test_the_record_says_what_the_script_looks_for(cluster, record):
    record(failure=LOST, attempt=3)
    text = (cluster.home / "run.json").read_text()
    told = json.loads(text)
    assert (told["job_id"], told["attempt"], told["status"], told["failure"]["outside"]) == ("42", 3, "failed", True)
