"""The batch script of a run: slurm/job.sbatch with its @names@ filled in."""

import math
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from launch import shell
from launch.job import Job
from launch.plan import node_environment
from launch.runtimes import singularity
from trainer.errors import UserError

TEMPLATE = Path(__file__).parent.parent / "slurm" / "job.sbatch"
LEAD_S = 120  # between the request to save and the end of the time
_SCRATCH = "\0scratch\0"  # stands for the node's own folder, which only the node knows

# Options of sbatch that have a flag of ours, or that the script itself depends on.
OWNED = {
    "account": "--account",
    "array": "one run a job",
    "chdir": "the script",
    "clusters": "the cluster you are logged in to",
    "constraint": "--constraint",
    "cpus-per-gpu": "--cpus",
    "cpus-per-task": "--cpus",
    "distribution": "the script",
    "error": "--runs-dir",
    "exclude": "--exclude",
    "export": "--env",
    "export-file": "--env",
    "gpus": "--gpus-per-node",
    "gpus-per-node": "--gpus-per-node",
    "gpus-per-task": "--gpus-per-node",
    "gres": "--gres",
    "help": "sbatch itself",
    "input": "the script",
    "job-name": "--name",
    "mem": "--memory-gb",
    "mem-per-cpu": "--memory-gb",
    "mem-per-gpu": "--memory-gb",
    "no-requeue": "--max-restarts",
    "nodes": "--nodes",
    "ntasks": "--nodes",
    "ntasks-per-core": "--nproc-per-node",
    "ntasks-per-gpu": "--nproc-per-node",
    "ntasks-per-node": "--nproc-per-node",
    "ntasks-per-socket": "--nproc-per-node",
    "open-mode": "the script",
    "output": "--runs-dir",
    "parsable": "the launcher",
    "partition": "--partition",
    "qos": "--qos",
    "quiet": "the launcher",
    "requeue": "--max-restarts",
    "reservation": "--reservation",
    "signal": "--signal-s",
    "test-only": "--check",
    "time": "--time-limit-min",
    "usage": "sbatch itself",
    "version": "sbatch itself",
    "tres-per-task": "--cpus",
    "wait": "the launcher",
    "wrap": "the script",
}


def render(job: Job) -> str:
    """The whole script; pure but for the presence of the data folder."""
    folder = singularity.run_folder(job)
    filled = {
        "run_id": job.run_id,
        "folder": shlex.quote(folder),
        "output": directive_value(folder.replace("%", "%%") + "/slurm-%j.out"),
        "nodes": str(job.nodes),
        "cpus": str(cpus(job)),
        "lead_s": str(_lead_s(job)),
        "asked": "\n".join(asked(job)),
        "sif": shlex.quote(str(job.image)),
        "needed": shell.quote([str(job.image), f"{folder}/job.sbatch", *_read(job)]),
        "data": shlex.quote(job.data_dir if os.path.isdir(job.data_dir) else ""),
        "stage": str(int(job.data_stage)),
        "shm_gb": str(math.ceil(job.shm_gb or 0)),
        "max_restarts": str(job.max_restarts),
        "environment": "\n".join(f"    {shlex.quote(f'{key}={value}')}" for key, value in _environment(job).items()),
        "command": shell.quote(["trainer", *job.command]),
        "words": _words(job),
        "port": str(job.master_port) if job.master_port else "$((20000 + (SLURM_JOB_ID * 17 + attempt) % 10000))",
        "more": "\n    ".join(_more(job)),
        "host_names": "|".join(singularity.HOST_VARIABLES),
        "host": " ".join(singularity.HOST_VARIABLES),
    }
    template = TEMPLATE.read_text()
    for name in (name for name, value in filled.items() if not value):
        template = re.sub(rf"^ *@{name}@\n", "", template, flags=re.MULTILINE)
    return re.sub(r"@([a-z_]+)@", lambda match: filled[match.group(1)], template)


def _read(job: Job) -> list[str]:
    return [*([job.data_dir] if os.path.isdir(job.data_dir) else []), *(mount.source for mount in job.mount)]


def _more(job: Job) -> Iterable[str]:
    """What only the node knows, and what --env says about it."""
    if gpus_of_node(job) and "CUDA_VISIBLE_DEVICES" not in dict(job.env):
        yield 'environment+=("CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-}")    # those that Slurm gave'
    if late := [f"{key}={value}" for key, value in job.env if key in _KNOWN_ON_THE_NODE]:
        yield f"environment+=({shell.quote(late)})"


def asked(job: Job) -> Iterable[str]:
    """The directives of flags that were given."""
    options = {
        "time": None if job.time_limit_min is None else str(math.ceil(job.time_limit_min)),
        "mem": None if job.memory_gb is None else f"{math.ceil(job.memory_gb * 1024)}M",
        "gpus-per-node": None if job.gpus_per_node is None else str(job.gpus_per_node),
        "gres": job.gres,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.constraint,
        "exclude": job.exclude,
        "reservation": job.reservation,
    }
    for name, value in options.items():
        if value not in (None, "0"):
            yield f"#SBATCH --{name}={directive_value(str(value))}"
    for option in job.sbatch:
        name, equals, value = option.partition("=")
        yield f"#SBATCH {name}{equals}{directive_value(value) if equals else ''}"


def check_options(options: Iterable[str]) -> None:
    """Raises UserError for an option of sbatch that has another owner. sbatch takes any unique beginning of a name."""
    for option in options:
        given = option.partition("=")[0].removeprefix("--")
        owner = next((owner for name, owner in OWNED.items() if name == given or name.startswith(given)), None)
        if owner:
            hint = f"{owner} instead" if owner.startswith("--") else "leave it out"
            raise UserError(f"--sbatch --{given} belongs to {owner}.", hint)


def directive_value(text: str) -> str:
    """A value after `#SBATCH --name=`, quoted where sbatch needs it. Raises UserError if no quoting carries it."""
    if set(text) & set('"\\\n'):
        raise UserError(f"{text!r} cannot stand in a batch script: it holds a quote or backslash.", "rename it")
    return f'"{text}"' if re.search(r"[^A-Za-z0-9_.,:=+@%/&|()\[\]*!-]", text) else text


def cpus(job: Job) -> int:
    """CPUs of each node: one for each process unless said otherwise."""
    return math.ceil(job.cpus) if job.cpus else job.processes


def gpus_of_node(job: Job) -> int:
    """GPUs of each node that the flags ask for; --gres gpu[:TYPE][:COUNT] counts too."""
    if job.gpus_per_node is not None:
        return job.gpus_per_node
    kinds = [re.sub(r"\(.*?\)", "", item).split(":") for item in re.split(r",(?![^(]*\))", job.gres or "")]
    return sum(int(kind[-1]) if kind[-1].isdigit() else 1 for kind in kinds if kind[0] == "gpu")


def _lead_s(job: Job) -> int:
    lead_s = job.signal_s or LEAD_S
    return min(lead_s, int(job.time_limit_min * 30)) if job.time_limit_min else lead_s


def _environment(job: Job) -> dict[str, str]:
    told = {**singularity.environment(job), "TRAINER_PROGRESS": "lines", **node_environment(job, 0, "", 0, os.environ)}
    return {key: value for key, value in told.items() if key not in _KNOWN_ON_THE_NODE}


_KNOWN_ON_THE_NODE = ("PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")


def _words(job: Job) -> str:
    words = singularity.words(
        job, _SCRATCH, f"{_SCRATCH}/data" if job.data_stage else None, gpus=bool(gpus_of_node(job))
    )
    return " \\\n        ".join(shlex.quote(word).replace(_SCRATCH, "'\"$scratch\"'") for word in words)
