"""What a runtime is going to do: data, made by a pure function, printed by --dryrun, carried out by a supervisor."""

import dataclasses
import datetime
import itertools
import os
from collections.abc import Mapping

from launch.job import Job
from trainer import contract


@dataclasses.dataclass(frozen=True)
class NodePlan:
    """One node: what is executed, with which environment, and the shell line that does the same by hand."""

    index: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    line: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """All nodes of a run, and the shell lines to type before and after them."""

    job: Job
    nodes: tuple[NodePlan, ...]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    text: str = ""  # the whole script, where a scheduler takes one

    def script(self) -> str:
        """A shell script that does what submitting the plan does; its exit code is that of the run."""
        if self.text:
            return self.text.rstrip("\n")
        lines = [
            "#!/bin/bash",
            f"# run {self.job.run_id}",
            *self.before,
            "codes=()",
            *(f"{node.line} & codes+=($!)" for node in self.nodes),
            'result=0; for code in "${codes[@]}"; do wait "$code" || result=$?; done',
            *self.after,
            'exit "$result"',
        ]
        return "\n".join(lines)


def new_run_id(command: tuple[str, ...]) -> str:
    """A name that sorts by time and tells what runs."""
    words = dict(itertools.pairwise(command))
    moment = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")
    label = words.get("--workload", "mnist" if command[0] == "train" else command[0])
    safe = (
        "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in label.lower())[:20].strip("-")
        or "run"
    )
    return f"{moment}-{safe}-{os.urandom(2).hex()}"


def node_environment(job: Job, index: int, head: str, port: int, host: Mapping[str, str]) -> dict[str, str]:
    """The contract's variables for one node, what the allow-list lets through of `host`, and --env, which wins."""
    placement = {
        "PET_NNODES": str(job.nodes),
        "PET_NPROC_PER_NODE": str(job.processes),
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": head,
        "PET_MASTER_PORT": str(port),
    }
    allowed = {key: value for key, value in host.items() if contract.is_allowed(key)}
    own = {
        "TRAINER_RUN_ID": job.run_id,
        "TRAINER_RUNTIME": job.runtime,
        "TRAINER_LOG_PREFIX": "1",
        "OMP_NUM_THREADS": "1",
    }
    return {**allowed, **placement, **own, **dict(job.env)}
