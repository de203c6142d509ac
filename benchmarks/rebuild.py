"""Time of an image build after a one-line edit of the trainer: python -m benchmarks rebuild

Needs a Docker engine. DOCKER names the docker program and OS_IMAGE the Debian image, if they are not the usual ones.
The tracked files are copied to a temporary folder and built once; then builds after an edit and builds with nothing
changed take turns.
"""

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import ROOT, Row, in_turn, output, python, ratios, row, seconds, verdict
from launch import images
from launch.runtimes import docker

TAG = "intermodal-bench:rebuild"
EDITS = 3


def measure() -> list[Row]:
    """Seconds of both kinds of build. Raises UserError if no Docker engine answers."""
    docker.connect()
    with tempfile.TemporaryDirectory() as folder, _images() as built:
        checkout = Path(folder)
        copy_tracked(checkout)
        _build(checkout, built)
        pairs = in_turn(lambda: _edit_and_build(checkout, built), lambda: _build(checkout, built), EDITS)
    return [
        row(
            "rebuild", "`invoke build` after a one-line edit of the trainer", [edited for edited, _ in pairs], unit=" s"
        ),
        row("rebuild", "`invoke build` with nothing changed", [same for _, same in pairs], unit=" s"),
        row("rebuild", "after an edit over nothing changed", ratios(pairs)),
        _count_row(len(built)),
    ]


def _count_row(found: int) -> Row:
    """Each edit must reach the image, and the same files must give the same image."""
    expected = 1 + EDITS
    what = f"different images after {EDITS} edits, each followed by a build with nothing changed"
    return Row("rebuild", what, str(found), str(expected), verdict(found == expected))


def copy_tracked(target: Path) -> None:
    """The files that git tracks, as they are in the working tree."""
    for name in output(["git", "ls-files", "-z"]).split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)


def _edit_and_build(checkout: Path, built: set[str]) -> float:
    with (checkout / "trainer" / "optim.py").open("a") as file:
        file.write(f"# one line more: {uuid.uuid4()}\n")  # a line that no build cache has seen
    return _build(checkout, built)


def _build(checkout: Path, built: set[str]) -> float:
    os_image = os.environ.get("OS_IMAGE", images.OS_IMAGE)
    arguments = ["build", "--base", "cpu", "--os-image", os_image, "--tag", TAG]
    took = seconds(python("-m", "invoke", *arguments), checkout)
    built.add(output([images.docker(), "image", "inspect", "--format", "{{.Id}}", TAG]).strip())
    return took


@contextlib.contextmanager
def _images() -> Iterator[set[str]]:
    """IDs of the images that were built; they are removed at the end, and with the last one the tag."""
    built: set[str] = set()
    try:
        yield built
    finally:
        for image in built:
            output([images.docker(), "image", "rm", image])
