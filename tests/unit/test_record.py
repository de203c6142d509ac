"""The folder of a run: run.json, metrics.jsonl, and the report made of them."""

import json
import os
import signal

import pytest
import tensorboardX  # noqa: F401 sets a variable of the environment when it is imported
import torch

from trainer import contract, failures, record
from trainer.config import TrainConfig
from trainer.errors import Unavailable, UserError
from trainer.failures import Failure
from trainer.record import Metrics, Record, close_failed, new_run_id, open_folder, read_metrics
from trainer.report import summary
from trainer.topology import Topology

DATA = {"name": "digits", "sha256": "c919f97cc7cf8133"}


@pytest.fixture
def config(tmp_path):
    return TrainConfig(runs_dir=str(tmp_path), run_id="run")


@pytest.fixture
def started(config):
    """The record of a run that has begun."""
    told = Record(open_folder(config))
    told.start(config, Topology(source="PET", nnodes=2, nproc_per_node=3))
    told.change(data=DATA)
    return told


def test_a_run_is_described_from_its_start(started, config):
    told = started.read()
    assert (told["run_id"], told["status"], told["exit_code"], told["finished_at"]) == ("run", "running", None, None)
    assert told["topology"] == {"nodes": 2, "nproc_per_node": 3, "world_size": 6, "source": "PET"}
    assert (told["config"]["batch_size"], told["config_sha256"], told["data"]) == (64, config.hash(), DATA)
    assert {"torch", "python", "cpu", "threads"} <= told["environment"].keys()


def test_only_variables_that_crossed_on_purpose_are_recorded(config, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("PET_NNODES", "1")
    monkeypatch.setenv("API_TOKEN", "hush")
    told = Record(open_folder(config))
    told.start(config, Topology(source="nothing"))
    assert {"NCCL_DEBUG", "PET_NNODES"} <= told.read()["environment"]["env"].keys()
    assert "hush" not in told.path.read_text()


def test_the_record_tells_the_schedulers_job_its_attempt_and_the_image(config, monkeypatch):
    told = {"TRAINER_JOB_ID": "42", "TRAINER_ATTEMPT": "3", "TRAINER_IMAGE": "/a.sif", "TRAINER_IMAGE_ID": "sha256:1"}
    for name, value in {**told, "TRAINER_IMAGE_BASE": "os", "TRAINER_SIF_SHA256": "2"}.items():
        monkeypatch.setenv(name, value)
    record_ = Record(open_folder(config))
    record_.start(config, Topology(source="nothing"))
    assert (record_.read()["job_id"], record_.read()["attempt"]) == ("42", 3)
    assert record_.read()["image"] == {"reference": "/a.sif", "id": "sha256:1", "base": "os", "sif_sha256": "2"}


def test_without_a_scheduler_and_an_image_there_is_none_to_tell(started):
    told = started.read()
    assert (told["job_id"], told["attempt"]) == (None, 0)
    assert set(told["image"].values()) == {None}


def test_a_failure_is_that_of_the_job_and_attempt_in_which_it_happened(started, config, monkeypatch):
    monkeypatch.setenv("TRAINER_JOB_ID", "43")
    monkeypatch.setenv("TRAINER_ATTEMPT", "1")
    close_failed(config, failures.vanished(1, "c2"))
    told = started.read()
    assert (told["job_id"], told["attempt"], told["failure"]["outside"]) == ("43", 1, True)


UNKNOWN = UserError("There is no such thing.", "another one")
OUTSIDE = {
    "a node that vanished": (failures.vanished(1, "c2"), True),
    "something that may come back": (failures.of_exception(Unavailable("No node 1.", "wait"), 0, 0), True),
    "a rank that was killed": (failures.of_exit(-signal.SIGKILL, 0, 0), True),
    "a rank that was told to end": (failures.of_exit(-signal.SIGTERM, 0, 0), True),
    "a file system that vanished": (failures.of_exit(-signal.SIGBUS, 0, 0), True),
    "a bad request": (failures.of_exception(UNKNOWN, 0, 0), False),
    "an exception": (failures.of_exception(ValueError("boom"), 0, 0), False),
    "a crash": (failures.of_exit(-signal.SIGSEGV, 0, 0), False),
    "an abort": (failures.of_exit(-signal.SIGABRT, 0, 0), False),
    "an exit code": (failures.of_exit(3, 0, 0), False),
}


@pytest.mark.parametrize(("failure", "outside"), OUTSIDE.values(), ids=OUTSIDE.keys())
def test_a_failure_says_whether_another_attempt_may_succeed(failure, outside):
    assert failure.outside is outside
    assert failure.exit_code not in (contract.EXIT_DONE, contract.EXIT_PREEMPTED)


def test_a_later_attempt_keeps_the_first_start_and_forgets_the_failure(started, config):
    started.change(started_at="2020-01-01T00:00:00+00:00")
    started.close("failed", 1, failure={"message": "boom"})
    started.start(config, Topology(source="nothing"))
    told = started.read()
    assert (told["status"], told["failure"], told["exit_code"]) == ("running", None, None)
    assert told["started_at"] == "2020-01-01T00:00:00+00:00"


def test_a_change_replaces_the_file_as_a_whole_or_not_at_all(started, monkeypatch):
    before = started.path.read_text()

    def killed(*names):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        started.change(status="done")
    assert started.path.read_text() == before


def test_a_preempted_run_asks_to_be_started_again(started):
    assert record.preempted(started) == contract.EXIT_PREEMPTED == 75
    assert (started.read()["status"], started.read()["exit_code"]) == ("preempted", 75)


def test_the_failure_of_a_run_is_kept(started, config):
    close_failed(config, Failure(node_rank=1, rank=3, host="n1", message="boom", exit_code=137))
    told = started.read()
    assert (told["status"], told["exit_code"]) == ("failed", 137)
    assert (told["failure"]["rank"], told["failure"]["host"], told["failure"]["message"]) == (3, "n1", "boom")
    assert told["finished_at"]


def test_a_failure_before_there_is_a_folder_leaves_nothing(tmp_path):
    failure = Failure(node_rank=0, message="boom")
    close_failed(TrainConfig(runs_dir=str(tmp_path)), failure)
    close_failed(TrainConfig(runs_dir=str(tmp_path), run_id="run"), failure)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_a_run_is_not_used_again_by_chance(started, config, tmp_path):
    with pytest.raises(UserError, match=r"already holds a run.* HINT: --resume auto"):
        open_folder(config)
    again = TrainConfig(runs_dir=str(tmp_path), run_id="run", resume="auto")
    assert open_folder(again) == tmp_path / "run"


def test_a_folder_that_cannot_be_made_is_a_user_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"Cannot write to .* HINT: --runs-dir"):
        open_folder(TrainConfig(runs_dir=str(tmp_path / "file"), run_id="run"))


def test_names_of_runs_differ_and_are_folder_names():
    names = {new_run_id(TrainConfig()) for _ in range(20)}
    assert len(names) > 15
    for name in names:
        assert TrainConfig(run_id=name).run_id == name


def steps(folder):
    return [line["step"] for line in read_metrics(folder / "metrics.jsonl")]


def write(folder, resumed_at, *numbers):
    metrics = Metrics(folder, resumed_at)
    for step in numbers:
        metrics.write(step, 1, loss=1 / step)
    metrics.close()


def test_metrics_are_lines_of_json_and_events(tmp_path):
    write(tmp_path, 0, 1, 2)
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert (first["step"], first["epoch"], first["loss"]) == (1, 1, 1.0)
    assert 0 <= first["time_s"] <= second["time_s"]
    assert any((tmp_path / "tensorboard").iterdir())


def test_a_line_is_on_disk_when_it_is_written(tmp_path):
    metrics = Metrics(tmp_path, 0)
    metrics.write(1, 1, loss=0.5)
    assert steps(tmp_path) == [1]
    metrics.close()


def test_a_resumed_run_writes_each_step_once(tmp_path):
    write(tmp_path, 0, 10, 20, 30)
    write(tmp_path, 20, 30, 40)
    assert steps(tmp_path) == [10, 20, 30, 40]
    write(tmp_path, 0, 5)
    assert steps(tmp_path) == [5]


def test_the_time_of_a_resumed_run_goes_on_where_it_was(tmp_path):
    line = {"step": 10, "epoch": 1, "time_s": 100.0, "loss": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    write(tmp_path, 10, 11)
    assert 100 <= read_metrics(tmp_path / "metrics.jsonl")[-1]["time_s"] < 110


@pytest.mark.parametrize("cut", [1, 2, 15])
def test_a_last_line_that_was_cut_off_is_left_out_and_overwritten(cut, tmp_path):
    write(tmp_path, 0, 10, 20)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-cut])
    assert steps(tmp_path) in ([10], [10, 20])
    write(tmp_path, 10, 20, 30)
    assert steps(tmp_path) == [10, 20, 30]
    assert len(path.read_text().splitlines()) == 3


def rows(text):
    return {line[:15].strip(): line[16:] for line in text.splitlines()}


def test_the_report_of_a_finished_run_fits_on_a_screen(started):
    started.close("done", 0, result={"val_accuracy": 0.99, "weights_sha256": "abc", "steps": 7})
    told = rows(summary(started.path.parent))
    assert told["run"] == "run  done (exit code 0)"
    assert told["layout"] == "2 nodes x 3 = 6 ranks, process"
    assert told["data"] == "digits c919f97cc7cf"
    assert (told["val accuracy"], told["weights sha256"], told["steps"]) == ("0.99", "abc", "7")
    assert "failure" not in told


def test_the_report_of_a_running_and_of_a_failed_run_say_so(started):
    assert rows(summary(started.path.parent))["time"].endswith(" to now")
    started.close("failed", 1, failure={"message": "boom"})
    told = rows(summary(started.path.parent))
    assert (told["run"], told["failure"]) == ("run  failed (exit code 1)", "boom")


def test_a_run_that_failed_before_its_data_were_read_can_be_reported(config):
    told = Record(open_folder(config))
    told.start(config, Topology(source="nothing"))
    close_failed(config, Failure(node_rank=0, rank=0, message="labels are damaged", exit_code=2))
    report = rows(summary(told.path.parent))
    assert (report["run"], report["failure"]) == ("run  failed (exit code 2)", "labels are damaged")


def test_the_agent_writes_the_record_without_opening_cuda(config, monkeypatch):
    """It forks the ranks afterwards, and a process that was forked from one with CUDA open cannot use it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was opened"))
    Record(open_folder(config)).start(config, Topology(source="nothing"))
