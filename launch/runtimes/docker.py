"""Docker on this host: each node is a container with its own name on a network made for the run."""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import docker.errors
import docker.types
import requests

from launch import gpus, shell
from launch.job import Job, Mount
from launch.plan import NodePlan, Plan, new_run_id, node_environment
from launch.supervisor import Node
from trainer import contract
from trainer.errors import UserError

DEFAULT_IMAGE = "intermodal:latest"
RUN_LABEL = "intermodal.run"
NOBODY = 65534  # whom a container runs as when root launches it: never root inside
REMOVE_GRACE_S = 5.0
_GIB = 1024**3
_ERRORS = (docker.errors.DockerException, requests.RequestException)


def prepare(job: Job) -> Job:
    """Name the run, find the image's ID, share out the GPUs, choose the user. Raises UserError."""
    client = connect()
    reference = job.image or DEFAULT_IMAGE
    shares = gpus.shares(job.nodes, job.gpus_per_node)
    job = dataclasses.replace(
        job,
        name=job.name or new_run_id(job.command),
        image=reference,
        image_id=image_id(client, reference),
        gpus=shares,
        user=_user(),
        master_port=job.master_port or contract.DEFAULT_PORT,
    )
    gpus.check(job.processes, shares)
    _check_folders(job)
    if _containers(client, job):
        raise UserError(
            f"Containers of a run {job.run_id} exist.", f"invoke cancel docker://{job.run_id}, or another --name"
        )
    return job


def plan(job: Job) -> Plan:
    """One container a node; the lines are what one would type."""
    nodes = []
    for index in range(job.nodes):
        told = spec(job, index)
        nodes.append(NodePlan(index, tuple(told["command"]), told["environment"], shell.quote(run_line(told))))
    create = ["docker", "network", "create", "--label", f"{RUN_LABEL}={job.run_id}", network(job)]
    return Plan(
        job,
        tuple(nodes),
        before=(*_folder_lines(job), shell.quote(create) + " >/dev/null"),
        after=(shell.quote(["docker", "network", "rm", network(job)]) + " >/dev/null",),
    )


def start(plan: Plan) -> list[Node]:
    """Make the network, start all containers, and return them."""
    job = plan.job
    client = connect()
    _own_folder(job)
    try:
        return _start_nodes(client, job)
    except _ERRORS as error:
        hint = "check --mount, --gpus-per-node and --cpus"
        raise UserError(f"Docker cannot start the run: {_reason(error)}.", hint) from None


def _start_nodes(client: Any, job: Job) -> list[Node]:
    client.networks.create(network(job), driver="bridge", labels={RUN_LABEL: job.run_id})
    progress = {"TRAINER_PROGRESS": "bar" if sys.stdout.isatty() else "lines"}
    nodes: list[Node] = []
    for index in range(job.nodes):
        told = spec(job, index)
        told["environment"] = {**progress, **told["environment"]}
        nodes.append(Container(client.containers.create(**_keywords(told))))
    for node in nodes:
        assert isinstance(node, Container)
        node.start()
    return nodes


def clean(job: Job) -> None:
    """Remove what still carries the run's label, and hand its files to who launched it. Raises UserError."""
    client = connect()
    try:
        for container in _containers(client, job):
            _remove(container, force=True)
        _hand_over(job)
        for found in client.networks.list(filters=_label(job)):
            _remove(found)
    except _ERRORS as error:
        hint = f"invoke cancel docker://{job.run_id}, once nobody else uses the network {network(job)}"
        raise UserError(f"Docker cannot remove what the run left: {_reason(error)}.", hint) from None


def _label(job: Job) -> dict[str, str]:
    return {"label": f"{RUN_LABEL}={job.run_id}"}


def _containers(client: Any, job: Job) -> list[Any]:
    return list(client.containers.list(all=True, filters=_label(job), ignore_removed=True))


def _remove(found: Any, **how: bool) -> None:
    """Remove a container or network, if nobody else did. Docker may still be taking a network's containers off it, or
    removing the container itself.
    """
    deadline = time.monotonic() + REMOVE_GRACE_S
    while True:
        try:
            found.remove(**how)
            return
        except docker.errors.NotFound:
            return
        except docker.errors.APIError as error:
            if error.status_code not in (403, 409) or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


class Container(Node):
    """A node that is a container."""

    def __init__(self, container: Any) -> None:
        self._container = container
        self._state: dict[str, Any] = {}

    def start(self) -> None:
        self._container.start()

    def chunks(self) -> Iterator[bytes]:
        with contextlib.suppress(docker.errors.NotFound):
            yield from self._container.logs(stream=True, follow=True)

    def wait(self) -> int:
        self._state = {"Status": "removing"}
        with contextlib.suppress(docker.errors.NotFound):
            code = int(self._container.wait()["StatusCode"])
            self._container.reload()
            self._state = self._container.attrs["State"]
            if not self._is_removed():
                return code
        return contract.EXIT_FAILED

    def why(self) -> str:
        if self._is_removed():
            return " (somebody removed its container)"
        return " (out of memory: raise --memory-gb)" if self._state.get("OOMKilled") else ""

    def stop(self) -> None:
        self._signal("SIGTERM")

    def kill(self) -> None:
        self._signal("SIGKILL")

    def remove(self) -> None:
        _remove(self._container, force=True)

    def _is_removed(self) -> bool:
        return self._state.get("Status") in ("removing", "dead")

    def _signal(self, name: str) -> None:
        try:
            self._container.kill(name)
        except docker.errors.APIError as error:
            if error.status_code not in (404, 409):  # it has ended
                raise


def connect() -> Any:
    """A client of the Docker engine. Raises UserError if none answers."""
    try:
        client = docker.from_env(timeout=60)
        client.ping()
    except _ERRORS as error:
        raise UserError(
            f"The Docker engine does not answer ({_reason(error)[:120]}).",
            "start it, join group docker, or set DOCKER_HOST as `docker context ls` shows it; or invoke local-run",
        ) from None
    return client


def _reason(error: Exception) -> str:
    return str(getattr(error, "explanation", None) or error).splitlines()[0]


def image_id(client: Any, reference: str) -> str:
    """ID of a local image. Raises UserError if there is none of that name."""
    try:
        return str(client.images.get(reference).id)
    except docker.errors.ImageNotFound:
        tag = "" if reference == DEFAULT_IMAGE else f" --tag {reference}"
        raise UserError(f"There is no image {reference} on this host.", f"invoke build{tag}, or --image") from None


def run_folder(job: Job) -> str:
    """The run's own folder on the host; a container sees no other run."""
    return os.path.join(os.path.abspath(job.runs_dir), job.run_id)


def network(job: Job) -> str:
    return f"intermodal-{job.run_id}"


def node_name(job: Job, index: int) -> str:
    return f"{job.run_id}-{index}"


def spec(job: Job, index: int) -> dict[str, Any]:
    """Everything Docker is told of one node, in docker-py's words where these are plain values."""
    mounts = [Mount(run_folder(job), f"{contract.RUNS_DIR}/{job.run_id}"), *job.mount]
    mounts = [dataclasses.replace(mount, source=os.path.abspath(mount.source)) for mount in mounts]
    if os.path.isdir(job.data_dir):
        mounts.append(Mount(os.path.abspath(job.data_dir), contract.DATA_DIR, read_only=True))
    environment = {
        "TRAINER_RUNS_DIR": contract.RUNS_DIR,
        "TRAINER_DATA_DIR": contract.DATA_DIR,
        "HOME": contract.HOME_DIR,
        "TRAINER_IMAGE": str(job.image),
        "TRAINER_IMAGE_ID": str(job.image_id),
        **node_environment(job, index, node_name(job, 0), job.master_port or contract.DEFAULT_PORT, os.environ),
    }
    told: dict[str, Any] = {
        "name": node_name(job, index),
        "hostname": node_name(job, index),
        "network": network(job),
        "user": job.user,
        "init": True,
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "tmpfs": dict.fromkeys(("/tmp", contract.HOME_DIR), "rw,exec,nosuid,mode=1777"),
        "shm_size": int((job.shm_gb or 1) * _GIB),
        "working_dir": contract.WORK_DIR,
        "labels": {RUN_LABEL: job.run_id},
        "mounts": mounts,
        "environment": environment,
    }
    if job.cpus is not None:
        told["nano_cpus"] = int(job.cpus * 1e9)
    if job.memory_gb is not None:
        told["mem_limit"] = told["memswap_limit"] = int(job.memory_gb * _GIB)
    if job.gpus[index]:
        told |= {"gpus": job.gpus[index], "ulimits": {"memlock": -1}}  # NCCL registers memory with the network card
    return {**told, "image": job.image_id, "command": ["trainer", *job.command]}


def run_line(told: dict[str, Any]) -> list[str]:
    """The `docker run` that does what `told` says."""
    flags: dict[str, Callable[[Any], list[str]]] = {
        "name": lambda value: ["--name", value],
        "hostname": lambda value: ["--hostname", value],
        "network": lambda value: ["--network", value],
        "user": lambda value: ["--user", value],
        "init": lambda value: ["--init"],
        "read_only": lambda value: ["--read-only"],
        "cap_drop": lambda value: [f"--cap-drop={name}" for name in value],
        "security_opt": lambda value: [f"--security-opt={name}" for name in value],
        "tmpfs": lambda value: [f"--tmpfs={path}:{options}" for path, options in value.items()],
        "shm_size": lambda value: [f"--shm-size={value}"],
        "working_dir": lambda value: [f"--workdir={value}"],
        "labels": lambda value: [f"--label={key}={text}" for key, text in value.items()],
        "mounts": lambda value: [_mount_flag(mount) for mount in value],
        "environment": lambda value: [f"--env={key}={text}" for key, text in value.items()],
        "nano_cpus": lambda value: [f"--cpus={value / 1e9:g}"],
        "mem_limit": lambda value: [f"--memory={value}"],
        "memswap_limit": lambda value: [f"--memory-swap={value}"],
        "gpus": lambda value: ["--gpus", '"device=' + ",".join(value) + '"'],
        "ulimits": lambda value: [f"--ulimit={name}={limit}:{limit}" for name, limit in value.items()],
        "image": lambda value: [value],
        "command": lambda value: value,
    }
    return ["docker", "run", "--rm", *(word for key, value in told.items() for word in flags[key](value))]


def _keywords(told: dict[str, Any]) -> dict[str, Any]:
    """The same for docker-py."""
    types: Any = docker.types
    mounts = [types.Mount(mount.target, mount.source, "bind", mount.read_only) for mount in told["mounts"]]
    more: dict[str, Any] = {"mounts": mounts}
    if "gpus" in told:
        more["device_requests"] = [types.DeviceRequest(device_ids=list(told["gpus"]), capabilities=[["gpu"]])]
        more["ulimits"] = [types.Ulimit(name=name, soft=limit, hard=limit) for name, limit in told["ulimits"].items()]
    return {key: value for key, value in told.items() if key != "gpus"} | more


def _mount_flag(mount: Mount) -> str:
    return f"--mount=type=bind,source={mount.source},target={mount.target}" + (",readonly" if mount.read_only else "")


def _user() -> str:
    """The caller; for root the one behind sudo, or nobody."""
    if os.getuid():
        return f"{os.getuid()}:{os.getgid()}"
    return f"{os.environ.get('SUDO_UID', NOBODY)}:{os.environ.get('SUDO_GID', NOBODY)}"


def _check_folders(job: Job) -> None:
    for mount in (Mount(job.runs_dir, "/runs"), Mount(job.data_dir, "/data"), *job.mount):
        if set(',"\n') & set(os.path.abspath(mount.source)):
            raise UserError(f"Docker cannot mount {mount.source}: a comma or quote in its name.", "rename it")
    for mount in job.mount:
        if not os.path.exists(mount.source):
            raise UserError(f"--mount {mount.source} does not exist.", "give a folder of this host")
    if not os.path.isdir(job.data_dir) and job.data_dir != os.path.abspath(Job.data_dir):
        raise UserError(f"--data-dir {job.data_dir} is no folder.", "give a folder of this host, or leave it out")
    parent = Path(job.runs_dir)
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK):
        raise UserError(f"Cannot write to {job.runs_dir}.", "--runs-dir with a writable folder")


def _folder_lines(job: Job) -> list[str]:
    folder = run_folder(job)
    give = shell.quote(["chown", str(job.user), folder])
    return [shell.quote(["mkdir", "-p", folder]), f'[ "$(id -u)" != 0 ] || {give}']


def _own_folder(job: Job) -> None:
    """Make the run's folder, writable for the container's user."""
    folder = Path(run_folder(job))
    folder.mkdir(parents=True, exist_ok=True)
    if os.getuid() == 0:
        _chown(folder, *map(int, str(job.user).split(":")))


def _hand_over(job: Job) -> None:
    """Files of a run that root launched belong to root again, or to the one behind sudo, when it has ended."""
    folder = Path(run_folder(job))
    if os.getuid() == 0 and folder.exists():
        _chown(folder, int(os.environ.get("SUDO_UID", 0)), int(os.environ.get("SUDO_GID", 0)))


def _chown(folder: Path, uid: int, gid: int) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, uid, gid, follow_symlinks=False)
