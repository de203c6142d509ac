"""Time of making and of reading a SIF, and its size, by compressor: python -m benchmarks convert

Needs a Docker engine; DOCKER names the docker program, if it is not the usual one. The image that has Apptainer
(0.4 GB, built if it is missing) is converted by `launch.sif.build` with each compressor in turn, several times. What is
made is started and all its files in /usr are read, as a large import would do. Both are compared with what mksquashfs
does by itself, gzip at level 9.
"""

import contextlib
import dataclasses
import io
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from benchmarks.measure import Row, output, python, ratios, row, seconds
from launch import images, sif
from launch.runtimes import docker

DEFAULT = "gzip 9"  # as mksquashfs does it; not one of our compressions
NAMES = (*sif.COMPRESSIONS, DEFAULT)
ROUNDS, UNCHANGED = 3, 5
READ = '{ TIMEFORMAT=%R; time "$1" -q exec "$2" find /usr -type f -exec cat {} + >/dev/null; } 2>&1'
# Unprivileged, as on a cluster: Apptainer then mounts a SIF by FUSE.
AS_NOBODY = f'chmod 666 /dev/fuse; exec setpriv --reuid={docker.NOBODY} --regid={docker.NOBODY} --clear-groups "$@"'


@dataclasses.dataclass(frozen=True)
class Made:
    """One SIF: seconds of its conversion, seconds of reading it, and its bytes."""

    took: float
    read: float
    size: int


Round = dict[str, Made]


def measure() -> list[Row]:
    """Each compressor over gzip 9, and the time of a build that has nothing to do."""
    docker.connect()
    image = images.build_converter()
    with tempfile.TemporaryDirectory() as name, mock.patch.dict(sif.COMPRESSIONS, {DEFAULT: "-comp gzip"}):
        folder = Path(name)
        folder.chmod(0o755)
        rounds = [{name: make(image, folder, name) for name in NAMES} for _ in range(ROUNDS)]
        again = ["singularity-build", "--from", image, "--out", str(file(folder, "zstd"))]
        unchanged = [seconds(python("-m", "invoke", *again)) for _ in range(UNCHANGED)]
    return [
        *_over_default(f"conversion of {image}", rounds, lambda made: made.took, " s"),
        *_over_default("start and reading of /usr", rounds, lambda made: made.read, " s"),
        *_over_default("size", rounds, lambda made: made.size / 1e6, " MB"),
        row("convert", "`invoke singularity-build`, unchanged image", unchanged, unit=" s", below=1),
    ]


def _over_default(what: str, rounds: list[Round], figure: Callable[[Made], float], unit: str) -> list[Row]:
    """Ratios of all to gzip 9, round by round, and the figures of gzip 9."""
    theirs = [figure(made[DEFAULT]) for made in rounds]
    rows = []
    for name in sif.COMPRESSIONS:
        ours = [figure(made[name]) for made in rounds]
        rows.append(row("convert", f"{what}, {_label(name)} over {DEFAULT}", ratios(zip(ours, theirs, strict=True))))
    return [*rows, row("convert", f"{what}, {DEFAULT}", theirs, unit=unit)]


def _label(name: str) -> str:
    """A compression with its level, if it has one."""
    level = sif.COMPRESSIONS[name].rpartition(" ")[2]
    return f"{name} {level}" if level.isdigit() else name


def make(image: str, folder: Path, name: str) -> Made:
    """Convert the image anew and read what came out."""
    out = file(folder, name)
    out.unlink(missing_ok=True)
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        identity = sif.build(image, out, name)
    took = time.perf_counter() - began
    return Made(took, read(image, out), identity.size)


def file(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(' ', '-')}.sif"


def read(image: str, out: Path) -> float:
    """Seconds from starting a SIF until all of its /usr is read; in a container where the host has no Apptainer."""
    own = shutil.which("apptainer") or shutil.which("singularity")
    prefix = [] if own else _in_docker(image, out.parent)
    return float(output([*prefix, "bash", "-c", READ, "bash", own or "apptainer", str(out)]).split()[-1])


def _in_docker(image: str, folder: Path) -> list[str]:
    return [
        images.docker(),
        "run",
        "--rm",
        "--network=none",
        "--device=/dev/fuse",
        "--security-opt=seccomp=unconfined",
        "--security-opt=systempaths=unconfined",
        "--security-opt=apparmor=unconfined",
        f"--mount=type=bind,source={folder},target={folder},readonly",
        "--env=HOME=/tmp",
        image,
        *("bash", "-c", AS_NOBODY, "bash"),
    ]
