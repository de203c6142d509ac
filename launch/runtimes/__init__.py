"""The runtimes by name, imported on use so that listing tasks needs none of their libraries.

Each module has the same functions in the same order:

    prepare(job)       look at this machine: fill in what the job leaves open. Raises UserError
    plan(job)          pure: what will be executed on each node
    start(plan)        start the nodes, return them
    clean(job)         remove what belongs to the run beside its nodes; safe to call twice

Those of SCHEDULED hand the run over instead: see launch/scheduled.py.
"""

import importlib
from typing import TYPE_CHECKING, Protocol

from launch.job import Job
from launch.plan import Plan
from launch.supervisor import Node
from trainer.errors import unknown_name

if TYPE_CHECKING:
    from launch.scheduled import Scheduler

NAMES = ("local", "docker", "singularity", "slurm")
SCHEDULED = ("slurm",)


class Runtime(Protocol):
    """What every runtime module offers."""

    def prepare(self, job: Job) -> Job: ...

    def plan(self, job: Job) -> Plan: ...

    def start(self, plan: Plan) -> list[Node]: ...

    def clean(self, job: Job) -> None: ...


def load(name: str) -> Runtime:
    """The module of a runtime. Raises UserError for an unknown name."""
    if name not in NAMES:
        raise unknown_name("runtime", name, NAMES, "the runtime")
    module: Runtime = importlib.import_module(f"launch.runtimes.{name}")
    return module


def scheduler(name: str) -> "Scheduler":
    """The module of a runtime that a scheduler watches over."""
    module: Scheduler = importlib.import_module(f"launch.runtimes.{name}")
    return module
