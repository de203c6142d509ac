"""A cluster made of little programs on PATH: Slurm's and Apptainer's, as far as words, variables and signals go."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from launch import sbatch, sif
from launch.job import Job

LIMIT_S = 30
MAGIC = b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0"
TOOLS = (
    *("bash", "cat", "cp", "date", "df", "env", "find", "grep", "head", "mkdir", "mktemp", "rm", "sed", "sh", "sort"),
    *("tail", "touch", "tr", "wc"),
)

# Writes down what it was given, then does what the test says that the trainer does.
APPTAINER = r"""#!{python} -IS
import csv, json, os, sys
from pathlib import Path
home, kind = Path(__file__).parent.parent, Path(__file__).name.upper() + "ENV_"
raw = Path("/proc/self/environ").read_bytes().decode("utf-8", "surrogateescape")
found = dict(item.split("=", 1) for item in raw.split("\0") if item)
inside = {name.removeprefix(kind): value for name, value in found.items() if name.startswith(kind)}
host = {name: value for name, value in found.items() if not name.startswith(kind)}
lines = [next(csv.reader([word.partition("=")[2]])) for word in sys.argv if word.startswith("--mount=")]
mounts = [dict(field.partition("=")[::2] for field in line) for line in lines]
for mount in mounts:
    path = mount["source"]
    mount["holds"] = sorted(os.listdir(path)) if os.path.isdir(path) else None
place = inside.get("PET_NODE_RANK", "0") + "." + inside.get("TRAINER_ATTEMPT", "0")
told = {"argv": sys.argv[1:], "inside": inside, "host": host, "mounts": mounts, "cwd": os.getcwd()}
(home / "told.new").with_suffix("." + place).write_text(json.dumps(told))
os.replace((home / "told.new").with_suffix("." + place), home / ("told." + place))
run = next(mount["source"] for mount in mounts if mount["destination"].startswith("/runs/"))
data = next((mount["source"] for mount in mounts if mount["destination"] == "/data"), "")
own = {"PATH": host["PATH"], "RUN": run, "DATA": data, "NODE": place[0], "ATTEMPT": place[2:]}
os.execve("/bin/sh", ["sh", str(home / "trainer")], own)
"""

# Like srun: the words after the options once a node; a signal goes to all processes of every task, or to the first of
# each, as sites have it.
SRUN = r"""#!/bin/bash -p
home=${0%/bin/*}
echo $$ >"$home/srun"
printf '%s\n' "$@" >"$home/srun-words"
while [[ $1 == --* ]]; do
    case $1 in --nodes=*) nodes=${1#*=} ;; esac
    shift
done
set -m
for ((node = 0; node < nodes; node++)); do
    mkdir -p "$home/disk/c$((node + 1))"
    SLURM_NODEID=$node SLURMD_NODENAME=c$((node + 1)) SLURM_TMPDIR=$home/disk/c$((node + 1)) "$@" &
    tasks+=($!)
done
reached=("${tasks[@]/#/-}")
if [ -e "$home/signals-first" ]; then reached=("${tasks[@]}"); fi
for signal in USR1 TERM; do
    trap "echo $signal >>'$home/signals'; kill -$signal -- ${reached[*]}" "$signal"
done
result=0
for task in "${tasks[@]}"; do
    while kill -0 "$task" 2>/dev/null; do wait "$task"; done
    wait "$task"
    code=$?
    if ((code > result)); then result=$code; fi
done
exit "$result"
"""

SCONTROL = r"""#!/bin/bash -p
home=${0%/bin/*}
case "$1 $2" in
    "show hostnames") echo c1; echo c2 ;;
    "requeue "*) if [ -e "$home/refuses" ]; then echo refused >&2; exit 1; fi; echo "$2" >>"$home/requeued" ;;
esac
"""

SLEEP = "#!/bin/sh\nexec {sleep} 0.1\n"


def make_sif(path, image_id="sha256:1", content=MAGIC):
    """A file that looks like a SIF, with its identity beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    found = path.stat()
    told = {"image": "intermodal:latest", "image_id": image_id, "base": None, "revision": None}
    told |= {
        "content_sha256": hashlib.sha256(content).hexdigest(),
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
    }
    told |= {"compression": "zstd", "converter": "apptainer version 1.4.0", "created_at": "2025-01-01T00:00:00+00:00"}
    sif.identity_file(path).write_text(json.dumps(told))
    return path


class Cluster:
    """Its programs are all that its jobs find on PATH."""

    def __init__(self, home: Path) -> None:
        self.home, self.bin = home.resolve(), home.resolve() / "bin"
        self.nodes_see_the_runs = True
        self._started: list[subprocess.Popen[bytes]] = []
        for folder in (self.bin, self.home / "data"):
            folder.mkdir(parents=True)
        (self.home / "data" / "digits").touch()
        make_sif(self.home / "i.sif")
        for name in TOOLS:
            (self.bin / name).symlink_to(str(shutil.which(name)))
        self.program("apptainer", APPTAINER.replace("{python}", sys.executable))
        self.program("srun", SRUN)
        self.program("scontrol", SCONTROL)
        self.program("sleep", SLEEP.format(sleep=shutil.which("sleep")))
        self.trainer("exit 0")

    def program(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def trainer(self, text: str) -> None:
        """What happens inside: lines of sh that see RUN and DATA (the folders), NODE and ATTEMPT."""
        (self.home / "trainer").write_text(text)

    def job(self, **values) -> Job:
        """A job as prepare() leaves it."""
        told = {"command": ("train",), "name": "run", "runs_dir": f"{self.home}/runs", "data_dir": f"{self.home}/data"}
        told |= {"image": f"{self.home}/i.sif", "image_id": "sha256:1", "sif_sha256": "2", "nproc_per_node": 1}
        return Job(runtime="slurm", **told | values)

    def start(self, job: Job, attempt: int = 0, **env: str):
        """Start a job's script as Slurm does: a copy of it, whose words go to slurm-42.out."""
        folder = Path(job.runs_dir, job.run_id)
        folder.mkdir(parents=True, exist_ok=True)
        script = self.home / "slurm_script"
        script.write_text(sbatch.render(job))
        script.chmod(0o700)
        if self.nodes_see_the_runs:
            shutil.copy(script, folder / "job.sbatch")
        given = {"PATH": str(self.bin), "HOME": "/home/someone", "USER": "someone"}
        given |= {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "c[1-2]"}
        given |= {"SLURM_RESTART_COUNT": str(attempt)} if attempt else {}
        with (folder / "slurm-42.out").open("ab") as out:
            process = subprocess.Popen([script], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=given | env)
        self._started.append(process)
        return process

    def run(self, job: Job, attempt: int = 0, **env: str) -> int:
        """The exit code of a job's script."""
        return finish(self.start(job, attempt, **env))

    def told(self, node: int = 0, attempt: int = 0):
        """What Apptainer was told on a node: argv, mounts, cwd, and variables for the inside and of the host."""
        return json.loads((self.home / f"told.{node}.{attempt}").read_text())

    def log(self, attempt: int = 0) -> str:
        return (self.home / "runs" / "run" / f"attempt-{attempt}.log").read_text()

    def on_disk(self) -> list[str]:
        """What lies on the nodes' own disks."""
        return sorted(path.name for path in (self.home / "disk").glob("*/*"))

    @property
    def requeued(self) -> list[str]:
        """Jobs that were queued again."""
        path = self.home / "requeued"
        return path.read_text().split() if path.exists() else []

    def until(self, name: str) -> None:
        """Wait until there is a file of this name in the cluster's folder."""
        deadline = time.monotonic() + LIMIT_S
        while not (self.home / name).exists():
            assert time.monotonic() < deadline, f"never came: {name}"
            time.sleep(0.01)

    def close(self) -> None:
        """End what a failing test left running."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(self.home).encode() in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)
        for process in self._started:
            process.wait()


def finish(process) -> int:
    """The exit code of a script. One that hangs fails the test."""
    return process.wait(LIMIT_S)


def hostile_environment(home: Path) -> dict[str, str]:
    """What a user's shell may have and no run should see."""
    (home / "bashenv").write_text(f"touch {home}/read\nexport EVIL=1\n")
    functions = {f"BASH_FUNC_{name}%%": "() { echo EVIL; }" for name in ("say", "env", "srun", "kill", "mktemp", "cd")}
    return {
        **functions,
        "BASH_ENV": f"{home}/bashenv",
        "ENV": f"{home}/bashenv",
        "LD_PRELOAD": "/nowhere/evil.so",
        "PYTHONPATH": "/evil",
        "http_proxy": "http://evil",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "TRAINER_EPOCHS": "9",
        "PET_NODE_RANK": "9",
        "NCCL_DEBUG": "EVIL",
        "APPTAINER_BIND": "/evil",
        "SINGULARITY_BIND": "/evil",
        "APPTAINERENV_EVIL": "1",
        "name.with.a.dot": "EVIL",
        "environment": "EVIL=1",
        "code": "9",
        "folder": "/evil",
        "cancelled": "1",
        "IFS": "/",
        "CDPATH": "/tmp",
        "SHELLOPTS": "xtrace:noexec",
        "BLOCK_SIZE": "1",
    }
