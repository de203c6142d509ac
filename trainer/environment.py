"""Facts about the place a run happened in, for its record."""

import dataclasses
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from trainer import __version__, contract, distributed
from trainer.config import NODE_SETTINGS, TrainConfig, flag
from trainer.topology import Topology


def describe(config: TrainConfig) -> dict[str, Any]:
    """Versions, processor, threads and the environment variables that crossed on purpose."""
    allowed = {key: value for key, value in os.environ.items() if contract.is_allowed(key) or key in contract.PLACEMENT}
    return {
        "python": platform.python_version(),
        "trainer": __version__,
        "torch": torch.__version__,
        "torchvision": _version("torchvision"),
        "numpy": _version("numpy"),
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": config.threads,
        "env": dict(sorted(allowed.items())),
    }


def gpus(device: torch.device) -> list[str]:
    """Names of the head node's GPUs if the run uses them. Opens CUDA: a rank may ask, an agent that forks may not."""
    if device.type != "cuda":
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def image() -> dict[str, str | None]:
    """The image this process runs in, as its launcher and its builder told; all None outside images."""
    get = os.environ.get
    return {
        "reference": get("TRAINER_IMAGE"),
        "id": get("TRAINER_IMAGE_ID"),
        "base": get("TRAINER_IMAGE_BASE"),
        "sif_sha256": get("TRAINER_SIF_SHA256"),
    }


def job() -> dict[str, Any]:
    """The scheduler's number of this job, and which start of it this is, from 0."""
    return {"job_id": os.environ.get("TRAINER_JOB_ID"), "attempt": int(os.environ.get("TRAINER_ATTEMPT", "0"))}


def git() -> dict[str, Any]:
    """Revision of the running code: told by the image, else asked of the checkout this module lies in."""
    if "TRAINER_GIT_REVISION" in os.environ:
        dirty = {"1": True, "0": False}.get(os.environ.get("TRAINER_GIT_DIRTY", ""))
        return {"revision": os.environ["TRAINER_GIT_REVISION"] or None, "dirty": dirty}
    revision = _git("rev-parse", "HEAD")
    return {"revision": revision, "dirty": bool(_git("status", "--porcelain")) if revision else None}


def agreed_facts(config: TrainConfig, topology: Topology) -> dict[str, Any]:
    """What must be the same on every node of a run: versions, kind of device, and all settings but its own folders."""
    settings = {flag(name): value for name, value in dataclasses.asdict(config).items() if name not in NODE_SETTINGS}
    return {
        **settings,
        "processes a node": topology.nproc_per_node,
        "device": "cuda" if distributed.count_devices(config) else "cpu",
        "trainer": __version__,
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:2])),
        "image": os.environ.get("TRAINER_IMAGE_ID"),
    }


def process_started() -> float:
    """When this process was started, in seconds since 1970 (proc(5): field 22 of stat, in clock ticks since boot)."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return round(time.time(), 3)
    return round(time.time() - uptime_s + ticks / os.sysconf("SC_CLK_TCK"), 3)


def _git(*arguments: str) -> str | None:
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
