"""Start-up on a Slurm cluster, ours over a batch script written by hand: python -m benchmarks slurm

Needs the test cluster (`slurm/cluster/cluster up`; CLUSTER_NAME and DOCKER as there) with a SIF in its shared folder.
Both train in turn with the same words in the same SIF, on 2 nodes of 2 ranks; only the launch differs. Ours is
`invoke singularity-run`, theirs is by_hand.sbatch. A first run of each fills the file cache and does not count.

Where the time goes, on both sides: until the batch script runs (Slurm), until the agent or torchrun runs (Apptainer),
until the nodes have met (import and rendezvous), until rank 0 has joined the others and has data and model (ranks),
until its first step is done.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, Row, output, ratios, row
from trainer.errors import UserError

CLUSTER = ROOT / "slurm" / "cluster" / "cluster"
SIF, FOLDER = "/shared/intermodal.sif", "/shared/bench"
SCRIPT = "/shared/project/benchmarks/by_hand.sbatch"
STEPS = ("--max-steps", "3")
PAIRS, LONGEST_S = 5, 300
STAGES = ("Slurm", "Apptainer", "import and rendezvous", "ranks", "first step")
MAKE_SIF = "invoke build, and invoke singularity-build --out build/cluster/intermodal.sif"

Moments = list[float]  # the command, its sbatch, then the end of each stage; seconds since 1970


def measure() -> list[Row]:
    """Seconds until the first step, ours over the hand-written script's, and their parts."""
    check()
    sh("rm", "-rf", FOLDER)
    pairs = [(ours(number), by_hand(number)) for number in range(1 + PAIRS)][1:]
    sh("rm", "-rf", FOLDER)
    return [
        _ratio_row("from sbatch to the first step", pairs, from_sbatch, below=1.1),
        _ratio_row("from the command to the first step", pairs, from_command),
        row("slurm", "from sbatch to the first step: ours", [from_sbatch(mine) for mine, _ in pairs], unit=" s"),
        row("slurm", "from sbatch to the first step: by hand", [from_sbatch(other) for _, other in pairs], unit=" s"),
        *(_stage_row(index, pairs) for index in range(len(STAGES))),
        row("slurm", "from `invoke singularity-run` to sbatch", [mine[1] - mine[0] for mine, _ in pairs], unit=" s"),
    ]


def from_sbatch(moments: Moments) -> float:
    return moments[-1] - moments[1]


def from_command(moments: Moments) -> float:
    return moments[-1] - moments[0]


def _ratio_row(
    what: str,
    pairs: list[tuple[Moments, Moments]],
    figure: Callable[[Moments], float],
    below: float | None = None,
) -> Row:
    told = ratios((figure(mine), figure(other)) for mine, other in pairs)
    return row("slurm", f"{what}, 2 nodes x 2 ranks: ours over by hand", told, below=below)


def _stage_row(index: int, pairs: list[tuple[Moments, Moments]]) -> Row:
    took = [[moments[index + 2] - moments[index + 1] for moments in pair] for pair in pairs]
    mine, other = (statistics.median(side) for side in zip(*took, strict=True))
    numbers = {"ours": mine, "by_hand": other}
    return Row("slurm", f"of that, {STAGES[index]}: ours, by hand", f"{mine:.2f} s, {other:.2f} s", numbers=numbers)


def check() -> None:
    """Raises UserError if there is no cluster or no SIF."""
    try:
        sh("sinfo")
    except UserError:
        hint = "slurm/cluster/cluster up (CLUSTER_NAME names another one)"
        raise UserError("The test cluster is not up.", hint) from None
    if not on_host(SIF).exists():
        raise UserError(f"There is no SIF {on_host(SIF)}.", MAKE_SIF)


def ours(number: int) -> Moments:
    """One run by the launcher."""
    name = f"ours-{number}"
    own = ["invoke", "singularity-run", "--image", SIF, "--runs-dir", FOLDER, "-j", "2x2", "--name", name, "--detach"]
    asked, job = submit(*own, "--", *STEPS)
    folder = on_host(FOLDER) / name
    told = timeline(folder, folder / "attempt-0.log")
    # The launcher writes the script just before sbatch. Slurm makes the output file just before it starts the script,
    # and nothing is written there.
    began = [(folder / file).stat().st_mtime for file in ("job.sbatch", f"slurm-{job}.out")]
    return [asked, *began, told["process"], told["met"], told["joined"], told["first_step"]]


def by_hand(number: int) -> Moments:
    """One run by the hand-written script. Its nodes have met when torchrun starts rank 0."""
    there = f"{FOLDER}/by-hand-{number}"
    sh("mkdir", "-p", there)
    words = ["--runs-dir", there, "--run-id", "run", *STEPS]
    asked, job = submit("sbatch", "--parsable", f"--chdir={there}", SCRIPT, SIF, *words)
    folder = on_host(there)
    told = timeline(folder / "run", folder / f"slurm-{job}.out")
    began = [float((folder / file).read_text()) for file in ("script-began", "agent-0-began")]
    return [asked, asked, *began, told["process"], told["joined"], told["first_step"]]


def submit(*command: str) -> tuple[float, str]:
    """Run a command that submits a job, and wait for the job's end. Returns when the command began, and the job."""
    began, *told = sh("bash", "-c", 'date +%s.%N; exec "$@"', "bash", *command).split()
    job = told[-1].rpartition("/")[2]
    deadline = time.monotonic() + LONGEST_S
    while sh("squeue", "--noheader", "--jobs", job):
        if time.monotonic() > deadline:
            sh("scancel", job)
            raise UserError(f"Job {job} had not ended after {LONGEST_S} s.", "slurm/cluster/cluster sh squeue")
        time.sleep(1)
    return float(began), job


def timeline(folder: Path, log: Path) -> dict[str, float]:
    """When a run reached what. Raises UserError if it failed, or if its trainer does not tell."""
    path = folder / "run.json"
    told: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if told.get("status") != "done":
        lines = log.read_text()[-1500:] if log.exists() else ""
        raise UserError(f"The run {folder} did not end well:\n{lines}\n", "see above")
    if "first_step" not in told.get("timeline", {}):
        raise UserError("The trainer in the SIF is too old: its run.json has no timeline.", MAKE_SIF)
    reached: dict[str, float] = told["timeline"]
    return reached


def sh(*words: str) -> str:
    """Output of a command on the login node, run as its ordinary user."""
    return output([str(CLUSTER), "sh", *words])


def on_host(path: str) -> Path:
    """Where this host sees a path below /shared."""
    return Path(output([str(CLUSTER), "shared"]).strip()) / Path(path).relative_to("/shared")
