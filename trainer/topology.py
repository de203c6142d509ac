"""Which rank am I? One table of the environments a process can be put into, one resolver.

Sources of the names: torchrun's options and worker environment (torch.distributed.run), srun(1) "OUTPUT
ENVIRONMENT VARIABLES", Open MPI's OMPI_COMM_WORLD_*, Kubeflow training-operator v1 (RANK is the pod's index),
Kubernetes Indexed Job (JOB_COMPLETION_INDEX).
"""

import dataclasses
import hashlib
import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from trainer import contract
from trainer.errors import UserError

Env = Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Where this process stands. `rank` is None for a node's agent, which starts the ranks itself."""

    source: str
    nnodes: int = 1
    nproc_per_node: int | None = 1  # None: as many as there are GPUs, else one
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0: any free port, for a single node
    rank: int | None = None
    local_rank: int = 0
    shared_host: bool = False
    agent_store: bool = False  # torchrun's agent already listens on master_port

    @property
    def world_size(self) -> int:
        """Number of ranks; needs nproc_per_node to be known."""
        assert self.nproc_per_node is not None
        return self.nnodes * self.nproc_per_node


class Row(NamedTuple):
    """One line of the table: its name, when it applies, and how it is read."""

    name: str
    applies: Callable[[Env], bool]
    read: Callable[[Env, int | None], Topology]


def resolve(env: Env, nproc_per_node: int | None = None) -> Topology:
    """The topology that the environment describes; `nproc_per_node` is the flag, None if not given.

    Raises UserError if the environment contradicts itself or lacks a head address.
    """
    row = next(row for row in TABLE if row.applies(env))
    topology = row.read(env, nproc_per_node)
    _check(topology, env)
    return topology


def _read_ranks(env: Env, nproc: int | None) -> Topology:
    world = size(env, "WORLD_SIZE")
    local_world = size(env, "LOCAL_WORLD_SIZE", default=world)
    if world % local_world:
        raise contradiction(env, "WORLD_SIZE", "LOCAL_WORLD_SIZE", "all nodes need the same number of ranks")
    _same(env, "LOCAL_WORLD_SIZE", local_world, "--nproc-per-node", nproc)
    rank = integer(env, "RANK")
    return Topology(
        source="torchrun",
        nnodes=world // local_world,
        nproc_per_node=local_world,
        node_rank=integer(env, "GROUP_RANK", default=rank // local_world),
        rank=rank,
        local_rank=integer(env, "LOCAL_RANK"),
        master_addr=head(env, "MASTER_ADDR", nnodes=world // local_world),
        master_port=integer(env, "MASTER_PORT", default=contract.DEFAULT_PORT),
        shared_host=env.get("TRAINER_SHARED_HOST") == "1",
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _read_pet(env: Env, nproc: int | None) -> Topology:
    given = _nproc(env)
    if given is not None:
        _same(env, "PET_NPROC_PER_NODE", given, "--nproc-per-node", nproc)
    nnodes = integer(env, "PET_NNODES", default=1)
    if "PET_NNODES" not in env and "JOB_COMPLETION_INDEX" in env:
        return _read_indexed_job(env, nproc)
    node_rank = _index(env, nnodes)
    for other in ("JOB_COMPLETION_INDEX", "RANK"):
        if other in env and integer(env, other) != node_rank:
            raise contradiction(env, "PET_NODE_RANK", other, "both are this node's index")
    world = integer(env, "WORLD_SIZE", default=nnodes)
    if world not in (nnodes, nnodes * (given or nproc or 1)):
        raise contradiction(env, "PET_NNODES", "WORLD_SIZE", "the latter counts nodes or ranks of the same run")
    port = "MASTER_PORT" if "PET_MASTER_ADDR" not in env and "MASTER_ADDR" in env else "PET_MASTER_PORT"
    single = nnodes == 1 and port not in env
    return Topology(
        source="PET",
        nnodes=nnodes,
        node_rank=node_rank,
        nproc_per_node=given if given is not None else nproc or (None if "PET_NPROC_PER_NODE" in env else 1),
        master_addr=head(env, "PET_MASTER_ADDR", "MASTER_ADDR", nnodes=nnodes),
        master_port=0 if single else integer(env, port, default=contract.DEFAULT_PORT),
        shared_host=env.get("TRAINER_SHARED_HOST") == "1",
    )


def _read_indexed_job(env: Env, nproc: int | None) -> Topology:
    raise UserError(
        "JOB_COMPLETION_INDEX is set but PET_NNODES is not: the number of nodes is unknown.",
        "set PET_NNODES and PET_MASTER_ADDR in the Job's container",
    )


def _read_pytorchjob(env: Env, nproc: int | None) -> Topology:
    nnodes = integer(env, "WORLD_SIZE")
    return Topology(
        source="PyTorchJob",
        nnodes=nnodes,
        nproc_per_node=nproc or 1,
        node_rank=integer(env, "RANK"),
        master_addr=head(env, "MASTER_ADDR", nnodes=nnodes),
        master_port=integer(env, "MASTER_PORT", default=contract.DEFAULT_PORT),
    )


def _read_mpi(env: Env, nproc: int | None) -> Topology:
    world, local_size = size(env, "OMPI_COMM_WORLD_SIZE"), size(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    nnodes = world // local_size
    if world % local_size:
        raise contradiction(env, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "use equal slots on all hosts")
    _same(env, "OMPI_COMM_WORLD_LOCAL_SIZE", local_size, "--nproc-per-node", nproc)
    rank = integer(env, "OMPI_COMM_WORLD_RANK")
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or "0"
    return Topology(
        source="Open MPI",
        nnodes=nnodes,
        nproc_per_node=local_size,
        rank=rank,
        node_rank=rank // local_size,
        local_rank=integer(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
        master_addr=head(env, "MASTER_ADDR", nnodes=nnodes),
        master_port=integer(env, "MASTER_PORT", default=port_for(job)),
    )


def _read_slurm(env: Env, nproc: int | None) -> Topology:
    tasks = size(env, "SLURM_STEP_NUM_TASKS", default=size(env, "SLURM_NTASKS", default=1))
    nnodes = size(env, "SLURM_STEP_NUM_NODES", default=size(env, "SLURM_NNODES", default=1))
    if tasks % nnodes:
        raise contradiction(env, "SLURM_NTASKS", "SLURM_NNODES", "srun with --ntasks-per-node")
    hosts = expand_nodelist(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "")
    if nnodes > 1 and not (hosts or env.get("MASTER_ADDR")):
        raise UserError("Slurm gave no node list, so the head node is unknown.", "export MASTER_ADDR before srun")
    common = Topology(
        source="Slurm",
        nnodes=nnodes,
        nproc_per_node=tasks // nnodes,
        node_rank=integer(env, "SLURM_NODEID", default=0),
        master_addr=env.get("MASTER_ADDR") or (hosts[0] if nnodes > 1 else "127.0.0.1"),
        master_port=integer(env, "MASTER_PORT", default=port_for(env.get("SLURM_JOB_ID", "0"))),
    )
    if tasks == nnodes and nproc is not None:
        return dataclasses.replace(common, nproc_per_node=nproc)
    _same(env, "SLURM_NTASKS", tasks // nnodes, "--nproc-per-node", nproc)
    return dataclasses.replace(common, rank=integer(env, "SLURM_PROCID"), local_rank=integer(env, "SLURM_LOCALID"))


def _read_slurm_batch(env: Env, nproc: int | None) -> Topology:
    if integer(env, "SLURM_NNODES", default=1) > 1 or integer(env, "SLURM_NTASKS", default=1) > 1:
        raise UserError(
            f"Started outside srun in a Slurm job of {env.get('SLURM_NTASKS', '?')} tasks: the others never start.",
            "write `srun trainer train …` in the batch script",
        )
    return _read_nothing(env, nproc)


def _read_nothing(env: Env, nproc: int | None) -> Topology:
    return Topology(source="nothing", nproc_per_node=nproc or 1)


def _in_step(env: Env) -> bool:
    """True inside srun. The batch script has a step number too: -5, or 2**32 - 5 (slurm.h, SLURM_BATCH_SCRIPT)."""
    step = env.get("SLURM_STEP_ID", "")
    return step.isascii() and step.isdigit() and int(step) < 2**32 - 16


# The first row that applies wins: a launcher inside another (torchrun in srun, mpirun in Slurm) comes first.
TABLE = (
    Row("torchrun", lambda env: "RANK" in env and "LOCAL_RANK" in env, _read_ranks),
    Row("PET", lambda env: "PET_NNODES" in env or "PET_NPROC_PER_NODE" in env, _read_pet),
    Row("Open MPI", lambda env: "OMPI_COMM_WORLD_RANK" in env, _read_mpi),
    Row("PyTorchJob", lambda env: "RANK" in env and "WORLD_SIZE" in env, _read_pytorchjob),
    Row("Indexed Job", lambda env: "JOB_COMPLETION_INDEX" in env, _read_indexed_job),
    Row("Slurm", lambda env: "SLURM_PROCID" in env and _in_step(env), _read_slurm),
    Row("Slurm batch script", lambda env: "SLURM_JOB_ID" in env, _read_slurm_batch),
    Row("nothing", lambda env: True, _read_nothing),
)


def integer(env: Env, name: str, *, default: int | None = None) -> int:
    """A whole number from the environment; UserError if missing without default, or not a number >= 0."""
    if name not in env and default is not None:
        return default
    if name not in env:
        raise UserError(f"{name} is not set although its companions are.", f"set {name}, or none of them")
    if not re.fullmatch(r"[0-9]{1,9}", env[name]):
        raise UserError(f"{name}={env[name]!r} is not a whole number.", f"set {name} to one number")
    return int(env[name])


def size(env: Env, name: str, *, default: int | None = None) -> int:
    """A whole number above 0 from the environment."""
    number = integer(env, name, default=default)
    if number < 1:
        raise UserError(
            f"{name}={env[name]}: a run needs at least one node and one process.", f"set {name} to 1 or more"
        )
    return number


def head(env: Env, *names: str, nnodes: int = 2) -> str:
    """The head's address from the first of `names` that is set; loopback only for a single node."""
    for name in names:
        if env.get(name):
            return env[name]
    if nnodes > 1:
        raise UserError(f"{nnodes} nodes but no address of the head node.", f"set {names[0]}")
    return "127.0.0.1"


def contradiction(env: Env, first: str, second: str, reason: str) -> UserError:
    return UserError(
        f"Contradictory environment: {first}={env.get(first)} but {second}={env.get(second)}.",
        f"{reason}; unset one of the two",
    )


def port_for(job: str) -> int:
    """A port that all nodes of a job derive alike, below the usual ephemeral range (32768-60999)."""
    return 20000 + int(hashlib.sha256(job.encode()).hexdigest(), 16) % 10000


def expand_nodelist(nodelist: str) -> list[str]:
    """Host names of a Slurm node list such as `gpu[01-03,7],login`, in Slurm's order.

    Needed because `scontrol` does not exist inside a container.
    """
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        hosts += _expand_host(part)
    return hosts


def _expand_host(pattern: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", pattern)
    if not match:
        return [pattern]
    names = []
    for item in match.group(1).split(","):
        first, _, last = item.partition("-")
        if not re.fullmatch(r"[0-9]+(-[0-9]+)?", item):
            raise UserError(f"{pattern!r} is not a Slurm node list.", "export MASTER_ADDR before srun")
        for number in range(int(first), int(last or first) + 1):
            names += _expand_host(f"{pattern[: match.start()]}{number:0{len(first)}d}{pattern[match.end() :]}")
    return names


def is_loopback(address: str) -> bool:
    """True for localhost and every address of the loopback net."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost" or address.startswith("localhost.")


def _index(env: Env, nnodes: int) -> int:
    for name in ("PET_NODE_RANK", "JOB_COMPLETION_INDEX"):
        if name in env:
            return integer(env, name)
    if nnodes > 1:
        raise UserError(f"PET_NNODES={nnodes} but this node's index is unknown.", "set PET_NODE_RANK")
    return 0


def _nproc(env: Env) -> int | None:
    """PET_NPROC_PER_NODE as a number; None if it is unset or one of torchrun's words for "decide there"."""
    value = env.get("PET_NPROC_PER_NODE", "auto")
    return None if value in ("auto", "gpu", "cpu") else integer(env, "PET_NPROC_PER_NODE")


def _same(env: Env, name: str, value: int, flag: str, given: int | None) -> None:
    if given is not None and given != value:
        raise UserError(f"{name} says {value} processes on each node but {flag} says {given}.", f"leave out {flag}")


def _check(topology: Topology, env: Env) -> None:
    nproc = topology.nproc_per_node
    if topology.nnodes < 1 or nproc == 0:
        raise UserError("A run needs at least one node and one process.", "set PET_NNODES and PET_NPROC_PER_NODE")
    if topology.node_rank >= topology.nnodes:
        raise UserError(f"Node index {topology.node_rank} of {topology.nnodes} nodes.", "nodes count from 0")
    if topology.rank is None or nproc is None:
        pass  # an agent, whose ranks are yet to come
    elif topology.rank >= topology.world_size or topology.local_rank >= nproc:
        raise UserError(
            f"Rank {topology.rank} (local {topology.local_rank}) of {topology.world_size} ranks, {nproc} a node.",
            "ranks count from 0; start every rank with the same WORLD_SIZE and LOCAL_WORLD_SIZE",
        )
    if topology.nnodes > 1 and is_loopback(topology.master_addr) and not topology.shared_host:
        raise UserError(
            f"Head address {topology.master_addr} is loopback but there are {topology.nnodes} nodes.",
            "set PET_MASTER_ADDR (or MASTER_ADDR) to a name that every node can reach",
        )
    if not 0 <= topology.master_port <= 65535:
        raise UserError(f"Port {topology.master_port} does not exist.", "choose 1024 to 65535")
