"""What several files of these tests start from."""

import tempfile

import pytest

from launch import sif

from . import archives
from .cluster import Cluster


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path / "cluster")
    yield made
    made.close()


@pytest.fixture
def place(monkeypatch, tmp_path):
    """A folder with an image in image.tar and an Apptainer that converts well; only tools beside it are on PATH."""
    archives.furnish(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


@pytest.fixture
def build(place):
    """Build out.sif from image.tar; words of sif.build may be changed."""

    def call(text=f"docker-archive:{place}/image.tar", **more):
        return sif.build(text, place / "out.sif", **more)

    return call
