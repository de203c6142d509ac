"""Apptainer or Singularity on this host: each node is an agent in the same SIF, on loopback.

How the container is entered stands here, once; Slurm's batch script uses the same words.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from launch import gpus, shell, sif
from launch.job import Job, Mount
from launch.plan import NodePlan, Plan, new_run_id, node_environment
from launch.runtimes import local
from launch.supervisor import Node
from trainer import contract
from trainer.errors import UserError

# What the program itself needs of the host. Nothing of it reaches the container.
HOST_VARIABLES = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "TMPDIR",
    "XDG_RUNTIME_DIR",
    "APPTAINER_CONFIGDIR",
    "APPTAINER_TMPDIR",
    "SINGULARITY_TMPDIR",
)


def prepare(job: Job) -> Job:
    """Name the run, check the SIF, share out the GPUs, choose a free port. Raises UserError."""
    for flag, value in {"--memory-gb": job.memory_gb, **job.only("slurm")}.items():
        if value is not None:
            raise UserError(f"{flag} needs Slurm, and this run is on this host.", f"leave out {flag}, or --slurm")
    program()
    job = identify(job)
    check_shm(job)
    local.cpus_of_node(job, 0)
    shares = gpus.shares(job.nodes, job.gpus_per_node)
    job = dataclasses.replace(job, name=job.name or new_run_id(job.command), gpus=shares)
    gpus.check(job.processes, shares)
    return dataclasses.replace(job, master_port=local.free_port(job))


def plan(job: Job) -> Plan:
    """One `apptainer exec` a node."""
    nodes = []
    for index in range(job.nodes):
        assert job.master_port is not None
        inside = {
            **environment(job),
            "TRAINER_SHARED_HOST": "1",
            **({"CUDA_VISIBLE_DEVICES": ",".join(job.gpus[index])} if job.gpus[index] else {}),
            **node_environment(job, index, local.HEAD, job.master_port, os.environ),
        }
        env = {**host_environment(os.environ), **prefixed(inside)}
        argv = (program(), *words(job, str(scratch(job, index)), gpus=bool(job.gpus[index])), *inner(job))
        nodes.append(NodePlan(index, argv, env, f"(cd / && exec {shell.command_line(argv, env)})"))
    return Plan(job, tuple(nodes), before=_before(job), after=_after(job))


def start(plan: Plan) -> list[Node]:
    """Start the agents; they die with this process."""
    for index in range(plan.job.nodes):
        _make_scratch(scratch(plan.job, index))
    progress = prefixed({"TRAINER_PROGRESS": "bar" if sys.stdout.isatty() else "lines"})
    return [local.Process(node, progress, local.cpus_of_node(plan.job, node.index), cwd="/") for node in plan.nodes]


def clean(job: Job) -> None:
    """Remove the throw-away homes."""
    for index in range(job.nodes):
        shutil.rmtree(scratch(job, index), ignore_errors=True)


def identify(job: Job) -> Job:
    """The job with its SIF as an absolute path and the ID of the image it was made from. Raises UserError."""
    path = Path(job.image or sif.DEFAULT).expanduser().absolute()
    identity = sif.check(path)
    check_path(str(path))
    check_sources(job)
    if identity:
        sif.warn_if_stale(path, identity)
    return dataclasses.replace(
        job,
        image=str(path),
        image_id=identity.image_id if identity else None,
        sif_sha256=identity.content_sha256 if identity else sif.sha256(path),
    )


def environment(job: Job) -> dict[str, str]:
    """The contract's variables that are the same on every node."""
    return {
        "TRAINER_RUNS_DIR": contract.RUNS_DIR,
        "TRAINER_DATA_DIR": contract.DATA_DIR,
        "TRAINER_IMAGE": str(job.image),
        "TRAINER_IMAGE_ID": job.image_id or "",
        "TRAINER_SIF_SHA256": job.sif_sha256 or "",
    }


def words(job: Job, scratch: str, data: str | None = None, *, gpus: bool) -> list[str]:
    """What follows the program's name, up to the SIF: nothing of the host gets in but what is named here.

    --cleanenv   only APPTAINERENV_ variables cross
    --no-eval    their values arrive as they are; a shell would expand them
    --no-home    the host's home stays outside, and with it ~/.local; HOME is a folder that is thrown away
    --pwd        the image's working folder, which Apptainer does not read from the image (--cwd since 1.3)
    --nv         the host's GPU driver, only where GPUs were asked for
    """
    mounts = [
        Mount(run_folder(job), f"{contract.RUNS_DIR}/{job.run_id}"),
        Mount(f"{scratch}/home", contract.HOME_DIR),
        Mount(f"{scratch}/tmp", "/tmp"),
        *job.mount,
    ]
    if data or os.path.isdir(job.data_dir):
        mounts.append(Mount(data or job.data_dir, contract.DATA_DIR, read_only=True))
    return _exec_words(mounts, gpus=gpus)


def _exec_words(mounts: Iterable[Mount], *, gpus: bool) -> list[str]:
    return [
        "--quiet",
        "exec",
        "--cleanenv",
        "--no-eval",
        "--no-home",
        f"--home={contract.HOME_DIR}",
        f"--pwd={contract.WORK_DIR}",
        *(["--nv"] if gpus else []),
        *(f"--mount={mount_words(mount)}" for mount in mounts),
    ]


def inner(job: Job) -> tuple[str, ...]:
    """The SIF and the command inside, the same words as on every runtime."""
    return (str(job.image), "trainer", *job.command)


def mount_words(mount: Mount) -> str:
    """A value of --mount, which is read as a line of CSV: commas, colons and quotes in a path arrive."""
    fields = [
        "type=bind",
        f"source={mount.source}",
        f"destination={mount.target}",
        *(["ro"] if mount.read_only else []),
    ]
    return ",".join('"' + field.replace('"', '""') + '"' if set(field) & set('",') else field for field in fields)


def prefixed(inside: Mapping[str, str]) -> dict[str, str]:
    """Variables by the names under which Apptainer hands them in; those with commas too, which --env would split."""
    return {f"{prefix()}{key}": value for key, value in inside.items()}


def prefix() -> str:
    return "APPTAINERENV_" if Path(program()).name == "apptainer" else "SINGULARITYENV_"


def host_environment(host: Mapping[str, str]) -> dict[str, str]:
    return {key: host[key] for key in HOST_VARIABLES if key in host}


def program() -> str:
    """Path of apptainer or singularity. Raises UserError if this host has neither."""
    found = shutil.which("apptainer") or shutil.which("singularity")
    if not found:
        raise UserError(
            "This host has neither apptainer nor singularity.", "module load apptainer, or invoke docker-run"
        )
    return found


def scratch(job: Job, index: int) -> Path:
    """A node's throw-away folder on this host."""
    return Path(tempfile.gettempdir(), f"intermodal-{os.getuid()}-{job.run_id}-{index}")


def _make_scratch(folder: Path) -> None:
    """Raises UserError if somebody else was there first: the folder's name is no secret."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise UserError(f"{folder} belongs to another user.", "TMPDIR=FOLDER of your own")
    for name in ("home", "tmp"):
        (folder / name).mkdir(exist_ok=True)


def run_folder(job: Job) -> str:
    return os.path.join(job.runs_dir, job.run_id)


def check_sources(job: Job) -> None:
    """Raises UserError for a folder of --mount or --data-dir that is not there."""
    for path in (job.data_dir, *(mount.source for mount in job.mount)):
        check_path(path)
    for mount in job.mount:
        if not os.path.exists(mount.source):
            raise UserError(f"--mount {mount.source} does not exist.", "give a folder that every node sees")
    if not os.path.isdir(job.data_dir) and job.data_dir != os.path.abspath(Job.data_dir):
        raise UserError(f"--data-dir {job.data_dir} is no folder.", "give a folder, or leave it out")


def check_path(path: str) -> None:
    """Raises UserError for a path that no batch script could carry."""
    if "\n" in path or "\0" in path:
        raise UserError(f"{path!r} holds a newline.", "rename the folder")


def check_shm(job: Job) -> None:
    """The container uses the host's /dev/shm. Raises UserError if that is too small."""
    stat = os.statvfs("/dev/shm")
    free_gb = stat.f_bavail * stat.f_frsize / 1024**3
    if job.shm_gb and job.shm_gb > free_gb:
        raise UserError(
            f"--shm-gb {job.shm_gb:g}, but /dev/shm of this host has {free_gb:.1f} GB.", "--shm-gb with less"
        )


def _before(job: Job) -> tuple[str, ...]:
    folders = [run_folder(job)]
    folders += [str(scratch(job, index) / name) for index in range(job.nodes) for name in ("home", "tmp")]
    return (shell.quote(["mkdir", "-p", *folders]),)


def _after(job: Job) -> tuple[str, ...]:
    return (shell.quote(["rm", "-rf", *(str(scratch(job, index)) for index in range(job.nodes))]),)


def enter(image: str, command: Sequence[str]) -> int:
    """Run a command inside a SIF, as clean as a run is, with this terminal; returns its exit code."""
    path = Path(image).absolute()
    sif.check(path)
    with tempfile.TemporaryDirectory(prefix="intermodal-") as folder:
        for name in ("home", "tmp"):
            Path(folder, name).mkdir()
        mounts = [Mount(f"{folder}/home", contract.HOME_DIR), Mount(f"{folder}/tmp", "/tmp")]
        argv = [program(), *_exec_words(mounts, gpus=bool(gpus.visible())), str(path), *command]
        return subprocess.run(argv, env=host_environment(os.environ), cwd="/", check=False).returncode
