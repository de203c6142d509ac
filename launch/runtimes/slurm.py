"""Slurm: a batch job whose script starts one agent a node, each inside the same SIF. Slurm places, Apptainer contains.

Slurm watches over the job, not we: everything is asked of squeue's relatives scontrol and sacct, in formats that have
stayed the same since Slurm 22.05.
"""

import dataclasses
import datetime
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from launch import sbatch, shell
from launch.job import Job
from launch.plan import Plan, new_run_id
from launch.runtimes import singularity
from launch.scheduled import Look
from trainer import contract
from trainer.errors import UserError

SCRIPT = "job.sbatch"
ANSWER_S = 60.0
# Environment variables by which a site or a user chooses where jobs go, unless a flag says otherwise. All others of
# sbatch would overrule the script.
_CHOICES = ("account", "constraint", "exclude", "partition", "qos", "reservation", "time_limit_min")
_KEPT = ("SLURM_CONF", "SLURM_JWT")
_LOCAL_DISKS = ("tmpfs", "ramfs", "devtmpfs")
_WAITING = (
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "SUSPENDED",
    "STOPPED",
    "RESV_DEL_HOLD",
)
_ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "RECONFIG_FAIL", "TIMEOUT"),
)
_REQUEUED_SOON = ("NODE_FAIL", "PREEMPTED")
REQUEUE_S = 15.0
# By a word of Slurm's message; the partition is named in many.
_HINTS = {
    "account": "--account with one that `sacctmgr show associations user=$USER` shows",
    "qos": "--qos with one that `sacctmgr show associations user=$USER` shows",
    "reservation": "--reservation with one that `scontrol show reservations` shows",
    "time limit": "--time-limit-min with a time that the partition allows",
    "node count": "fewer --nodes, or another --partition; `sinfo` shows how many there are",
    "node configuration": "fewer --nodes, --cpus, --memory-gb or GPUs; `sinfo -N -l` shows what nodes have",
    "gres": "--gpus-per-node or --gres as `sinfo -o %G` shows",
    "partition": "--partition with one that `sinfo` shows",
}


def prepare(job: Job) -> Job:
    """Name the run, check the SIF, the folders and the flags, before anything is submitted. Raises UserError."""
    if not shutil.which("sbatch"):
        raise UserError("This host has no sbatch.", "log in to the cluster, or --no-slurm to run on this host")
    sbatch.check_options(job.sbatch)
    gpus = sbatch.gpus_of_node(job)
    if job.gres and "gpu" in job.gres and job.gpus_per_node is not None:
        raise UserError(f"--gpus-per-node {job.gpus_per_node} contradicts --gres {job.gres}.", "give one of the two")
    if job.nproc_per_node and 0 < gpus < job.nproc_per_node:
        hint = f"--nproc-per-node {gpus}, or more GPUs"
        raise UserError(f"{job.nproc_per_node} processes on a node with {gpus} GPU(s): two never share one.", hint)
    job = singularity.identify(job)
    job = dataclasses.replace(
        job, name=job.name or new_run_id(job.command), nproc_per_node=job.nproc_per_node or gpus or 1
    )
    _check_folders(job)
    return job


def plan(job: Job) -> Plan:
    """The batch script; its nodes are Slurm's matter."""
    return Plan(job, (), text=sbatch.render(job))


def submit(plan: Plan, *, test_only: bool = False) -> str:
    """Hand the script to sbatch and return the job's number, or with `test_only` what Slurm would do. Raises UserError
    with Slurm's own words.
    """
    with tempfile.TemporaryDirectory() as elsewhere:
        script = Path(elsewhere if test_only else singularity.run_folder(plan.job), SCRIPT)
        _write(script, plan.script() + "\n")
        return _sbatch(script, plan.job, test_only)


def _write(script: Path, text: str) -> None:
    script.parent.mkdir(parents=True, exist_ok=True)
    script.unlink(missing_ok=True)
    with open(script, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text)


def _sbatch(script: Path, job: Job, test_only: bool) -> str:
    words = ["sbatch", "--test-only" if test_only else "--parsable", str(script)]
    env = _environment(job, os.environ)
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=script.parent, check=False)
    told = " ".join(line for line in done.stderr.splitlines() if line.strip())
    if done.returncode:
        raise UserError(f"Slurm refuses the job: {told or 'sbatch said nothing'}", _hint(told))
    return told if test_only else done.stdout.strip().partition(";")[0]


def look(job_id: str, name: str) -> Look:
    """How Slurm says a job is doing. Numbers are given again one day; a job of another name is not ours."""
    told, trouble = _ask("scontrol", "show", "job", "--oneliner", job_id)
    if told:
        facts = dict(reversed(re.findall(r"(\w[\w:/]*)=(\S*)", told)))  # what a user wrote comes last
        ours = facts.get("JobName", name) == name
        return _look(facts["JobState"], facts.get("ExitCode", ""), facts) if ours else Look("gone", f"not {name}'s job")
    if "invalid job id" not in trouble.lower():
        return Look("unknown", f"Slurm does not answer ({trouble})")
    # Slurm forgets an ended job after some minutes; its accounting does not, where there is one.
    row, _ = _ask("sacct", "-n", "-P", "-X", "-j", job_id, f"--name={name}", "--format=State,ExitCode,NodeList")
    if not row:
        return Look("gone", "Slurm does not know this job any more")
    state, code, nodes = row.splitlines()[-1].split("|")
    return _look(state.split()[0], code, {"NodeList": nodes})


def cancel(job_id: str) -> None:
    """Ask a job to save and end."""
    shell.run(["scancel", job_id])


def clean(job: Job) -> None:
    """Nodes clean up by themselves."""


def _look(state: str, code: str, facts: Mapping[str, str]) -> Look:
    reason = facts.get("Reason", "")
    detail = ", ".join(
        part
        for part in (
            state + (f" ({reason})" if reason not in ("", "None") else ""),
            f"on {facts['NodeList']}" if facts.get("NodeList") not in (None, "", "(null)", "None assigned") else "",
            f"restarts: {facts['Restarts']}" if facts.get("Restarts", "0") != "0" else "",
        )
        if part
    )
    attempt = int(facts["Restarts"]) if facts.get("Restarts", "").isdigit() else None
    if state in _WAITING or (state in _REQUEUED_SOON and _ended_now(facts)):
        return Look("pending", detail, attempt=attempt)
    if state not in _ENDED:
        return Look("running", detail, attempt=attempt)
    return Look("ended", detail, exit_code(state, code), attempt)


def _ended_now(facts: Mapping[str, str]) -> bool:
    """True for an end that is a moment old: Slurm is about to queue the job again, if it may."""
    try:
        ended = datetime.datetime.fromisoformat(facts.get("EndTime", ""))
    except ValueError:
        return False
    return facts.get("Requeue") == "1" and (datetime.datetime.now() - ended).total_seconds() < REQUEUE_S


def exit_code(state: str, text: str) -> int:
    """The exit code of an ended job: its own, 128 + n for a signal n, 1 for an end that has none of its own."""
    code, _, number = text.partition(":")
    if state == "COMPLETED":
        return contract.EXIT_DONE
    return int(code or 0) or (128 + int(number) if number not in ("", "0") else contract.EXIT_FAILED)


def _ask(*argv: str) -> tuple[str, str]:
    """What a program of Slurm prints, and what it complains about."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    return ("" if done.returncode else done.stdout.strip()), " ".join(done.stderr.split())


def _hint(told: str) -> str:
    words = told.lower()
    return next((hint for word, hint in _HINTS.items() if word in words), "--dryrun shows the script")


def _environment(job: Job, host: Mapping[str, str]) -> dict[str, str]:
    """The user's environment without what would overrule the script: options of sbatch, and an outer job's."""
    names = {"time_limit_min": "TIMELIMIT"}
    open_choices = [names.get(flag, flag.upper()) for flag in _CHOICES if getattr(job, flag) is None]
    keep = {*_KEPT, *(f"SBATCH_{name}" for name in open_choices)}
    return {key: value for key, value in host.items() if key in keep or not key.startswith(("SBATCH_", "SLURM_"))}


def _check_folders(job: Job) -> None:
    folder = Path(singularity.run_folder(job))
    for path in (str(folder), str(job.image), job.data_dir, *(mount.source for mount in job.mount)):
        singularity.check_path(path)
        if kind := _kind_of_disk(path):
            hint = "a folder on a file system that all nodes share"
            raise UserError(f"{path} is on {kind} of this host, which other nodes cannot see.", hint)
    sbatch.directive_value(str(folder))
    if job.data_stage and not os.path.isdir(job.data_dir):
        raise UserError(f"--data-stage, but there is no folder {job.data_dir}.", "--data-dir")
    resumes = re.search(r"--resume[= ]auto", " ".join(job.command)) or dict(job.env).get("TRAINER_RESUME") == "auto"
    if (folder / "run.json").exists() and not resumes:
        hint = "-- … --resume auto to go on with it, or another --name"
        raise UserError(f"{folder} already holds a run.", hint)


def _kind_of_disk(path: str) -> str | None:
    """The file system type of a path if it surely lies in this host's memory."""
    mounts = [line.split(" ") for line in Path("/proc/mounts").read_text().splitlines()]
    real = os.path.realpath(path)
    below = [(target, kind) for _, target, kind, *_ in mounts if os.path.commonpath([target, real]) == target]
    kind = max(below, key=lambda mount: len(mount[0]))[1] if below else ""
    return kind if kind in _LOCAL_DISKS else None
