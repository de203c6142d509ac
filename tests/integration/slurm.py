"""What the tests on the Slurm cluster say to it."""

import json
import subprocess
from typing import Any

from tests.integration.conftest import Cluster, until

SIF = "/shared/intermodal.sif"
LONG = ("--epochs", "30", "--checkpoint-every", "100")  # about 10 s after the start


def launch(cluster: Cluster, runs: str, *words: str, timeout: float = 240) -> "subprocess.CompletedProcess[str]":
    """`invoke singularity-run` on the login node."""
    own = {"--image": SIF, "--runs-dir": runs}
    given = [word for flag, value in own.items() if flag not in words for word in (flag, value)]
    return cluster.lab("invoke", "singularity-run", *given, *words, timeout=timeout)


def record(cluster: Cluster, runs: str, name: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(cluster.local(f"{runs}/{name}/run.json").read_text())
    return told


def detach(cluster: Cluster, runs: str, *words: str) -> str:
    """Submit and return the job's number."""
    done = launch(cluster, runs, "--detach", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1].rpartition("/")[2]


def reach(cluster: Cluster, runs: str, name: str, step: int) -> None:
    path = cluster.local(f"{runs}/{name}/metrics.jsonl")
    until(lambda: path.exists() and f'"step": {step},' in path.read_text(), f"step {step}", 120)


def finish(cluster: Cluster, runs: str, name: str) -> str:
    """Follow a run to its end and return its lines."""
    return cluster.lab("invoke", "logs", "-f", f"slurm://{name}", "--runs-dir", runs, timeout=240).stdout


def draw(cluster: Cluster, runs: str) -> str:
    """A small set of drawn digits on the shared file system; returns its --data-dir."""
    data = f"{runs}-data"
    cluster.lab("rm", "-rf", data)
    make = ["trainer", "data", "make", "drawn-digits", "--train", "640", "--test", "64"]
    cluster.lab("apptainer", "-q", "exec", "--bind", "/shared", SIF, *make, "--out", f"{data}/drawn-digits", check=True)
    return data
