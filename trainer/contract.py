"""What crosses the container boundary, as data: environment names, exit codes, paths.

The host side (`launch`) imports this module too, so it imports nothing heavy. DESIGN: docs/architecture.md.
"""

from typing import Final

EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1
EXIT_BAD_REQUEST: Final = 2  # never retried
EXIT_PREEMPTED: Final = 75  # state saved, start me again (EX_TEMPFAIL of sysexits.h)

RUNS_DIR: Final = "/runs"  # writable, results
DATA_DIR: Final = "/data"  # read-only, data sets
HOME_DIR: Final = "/home/trainer"  # writable, thrown away
WORK_DIR: Final = "/workspace"

DEFAULT_PORT: Final = 29500

# Names that torchrun, Kubeflow and enroot already use, and ours. A launcher sets all of the first group.
PLACEMENT: Final = {
    "PET_NNODES": "number of nodes",
    "PET_NPROC_PER_NODE": "processes on each node",
    "PET_NODE_RANK": "index of this node, 0 is the head",
    "PET_MASTER_ADDR": "address of the head node, as every node sees it",
    "PET_MASTER_PORT": "port on the head node where its agent listens",
}
IDENTITY: Final = {
    "TRAINER_RUNTIME": "what started this process: local, docker, singularity, slurm, kubernetes",
    "TRAINER_IMAGE": "image reference as the user gave it",
    "TRAINER_IMAGE_ID": "image ID (hash of its configuration)",
    "TRAINER_IMAGE_BASE": "base image, by digest where it has one",
    "TRAINER_SIF_SHA256": "SHA-256 of the SIF that the image was converted to",
    "TRAINER_JOB_ID": "number that a scheduler gave the job",
    "TRAINER_ATTEMPT": "how often the job was started anew, from 0",
    "TRAINER_GIT_REVISION": "revision of the code in the image",
    "TRAINER_GIT_DIRTY": "1 if the code differed from that revision",
}
CONTROL: Final = {
    "TRAINER_SHARED_HOST": "1 if all nodes are processes on one host, so that loopback is a valid head address",
    "TRAINER_LOG_PREFIX": "1 to start each line with [node:rank]",
    "TRAINER_PROGRESS": "bar, lines or none: how progress is shown",
}
TABLE: Final = {**PLACEMENT, **IDENTITY, **CONTROL}

# Everything else stays outside unless it matches one of these or is given with --env.
ALLOWED_PREFIXES: Final = ("NCCL_", "GLOO_")


def is_allowed(name: str) -> bool:
    """True if an environment variable of this name crosses the boundary without being asked for."""
    return name.startswith(ALLOWED_PREFIXES)
