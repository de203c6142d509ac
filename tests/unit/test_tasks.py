"""The tasks of invoke: which flags each has, and where a SIF is run."""

import inspect
import sys

import pytest

import tasks
from launch import job as jobs
from launch import submit
from trainer.errors import UserError

SLURMS = {name for name, field in jobs.flags().items() if field.metadata["only"] == "slurm"}


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """Put an sbatch on PATH, where there was none."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def put():
        (tmp_path / "sbatch").write_text("#!/bin/sh\n")
        (tmp_path / "sbatch").chmod(0o755)

    return put


def place(slurm=False, no_slurm=False, check=False):
    return tasks.place(slurm, no_slurm, check)


def test_a_sif_runs_on_slurm_where_there_is_slurm_and_on_this_host_where_not(sbatch):
    assert place() == "singularity"
    sbatch()
    assert place() == "slurm"


def test_the_user_may_say_where_a_sif_runs(sbatch):
    assert place(slurm=True) == place(check=True) == "slurm"
    sbatch()
    assert place(no_slurm=True) == "singularity"


def test_both_places_at_once_are_refused(sbatch):
    for flag in ("slurm", "check"):
        with pytest.raises(UserError, match=rf"--no-slurm contradicts --{flag}\. HINT: give one of the two"):
            place(no_slurm=True, **{flag: True})


def parameters(task):
    return set(inspect.signature(task.body).parameters) - {"c"}


def test_every_launcher_flag_is_one_of_its_task_with_its_help():
    common = {"j", "detach", "dryrun", *jobs.flags("docker")}
    for task in (tasks.local_run, tasks.docker_run):
        assert parameters(task) == common
    assert parameters(tasks.singularity_run) == common | SLURMS | {"slurm", "no_slurm", "check"}
    for task in (tasks.local_run, tasks.docker_run, tasks.singularity_run):
        assert {name.replace("_", "-") for name in parameters(task)} == task.help.keys()


@pytest.fixture
def run(monkeypatch):
    """Call singularity-run as invoke does; returns the job and how it was to be submitted."""
    told = {}
    monkeypatch.setattr(submit, "submit", lambda job, **how: told.update(job=job, **how) and 0)
    monkeypatch.setattr(sys, "argv", ["invoke", "singularity-run", "--", "--config", "it's here"])

    def call(**given):
        defaults = inspect.signature(tasks.singularity_run.body).parameters.values()
        values = {each.name: each.default for each in defaults if each.name != "c"}
        context = type("Context", (), {"config": type("Config", (), {"run": type("Run", (), {"dry": False})})})
        tasks.singularity_run.body(context, **{**values, **given})
        return told

    return call


def test_flags_and_words_become_a_job_of_the_runtime_that_was_chosen(run, sbatch):
    told = run(slurm=True, j="2x3", partition="gpu", sbatch=["--exclusive"], data_stage=True)
    job = told["job"]
    assert (job.runtime, job.nodes, job.nproc_per_node) == ("slurm", 2, 3)
    assert (job.partition, job.sbatch, job.data_stage) == ("gpu", ("--exclusive",), True)
    assert job.command == ("train", "--config", "it's here")
    assert (told["check"], told["dryrun"], told["detach"]) == (False, False, False)
    assert run()["job"].runtime == "singularity"


def test_a_check_is_slurms(run, sbatch):
    told = run(check=True)
    assert (told["job"].runtime, told["check"]) == ("slurm", True)
