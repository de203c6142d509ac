"""Images turned into SIFs by an `apptainer` made of shell, and SIFs that are not what they say."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch import images, sif
from launch.runtimes import docker
from trainer.errors import UserError

from .archives import (
    APPTAINER,
    ARCHIVES,
    CONFIG,
    LAYERS,
    conversions,
    converted,
    docker_archive,
    left,
    program,
    sha256,
)
from .cluster import MAGIC, make_sif


@pytest.mark.parametrize("kind", ARCHIVES)
def test_a_sif_knows_the_image_it_was_made_from(kind, place, build):
    ARCHIVES[kind](place / "image.tar")
    made = build(f"{kind}:{place}/image.tar")
    content = (place / "out.sif").read_bytes()
    assert content.endswith(b"new")
    assert made.image_id == "sha256:" + sha256(json.dumps(CONFIG).encode())
    assert (made.revision, made.base, made.compression) == ("abc", "os", "zstd")
    assert (made.content_sha256, made.size, made.converter) == (
        sha256(content),
        len(content),
        "apptainer version 9.9.9",
    )
    assert sif.read(place / "out.sif") == sif.check(place / "out.sif") == made
    assert json.loads((place / "out.sif.json").read_text()) == dataclasses.asdict(made)
    assert left(place) == ["out.sif", "out.sif.json"]


@pytest.mark.parametrize(
    "config", [{}, {"config": None}, {"config": {"Labels": None}}], ids=["bare", "null", "no labels"]
)
def test_an_image_without_labels_has_none(config, place, build):
    docker_archive(place / "image.tar", config)
    assert (build().revision, build().base) == (None, None)


def test_the_converter_writes_under_another_name(place, build):
    make_sif(place / "out.sif", content=MAGIC + b"old")
    build()
    assert (place / "before").read_bytes() == MAGIC + b"old"
    *words, made, uri = (place / "words").read_text().splitlines()
    assert words == ["build", "--disable-cache", "--mksquashfs-args", "-comp zstd -Xcompression-level 3"]
    assert Path(made).parent == place, "on the same file system, so that it takes its name in one step"
    assert made != f"{place}/out.sif"
    assert uri.startswith(f"oci:{place}/tmp/")


def test_the_converter_works_where_tmpdir_points_and_makes_the_same_bytes_again(place, build):
    build()
    found = dict(item.split("=", 1) for item in (place / "variables").read_text().split("\0") if "=" in item)
    assert found["APPTAINER_TMPDIR"] == found["SINGULARITY_TMPDIR"]
    assert found["APPTAINER_TMPDIR"].startswith(f"{place}/tmp/")
    assert found["SOURCE_DATE_EPOCH"] == "0"


def test_the_lines_of_the_converter_are_shown(build, capsys):
    build()
    shown = capsys.readouterr().out
    assert "converting with apptainer, compression zstd" in shown
    assert "INFO: Creating SIF file..." in shown


def test_an_unchanged_image_is_not_converted_again(place, build, capsys):
    first = build()
    assert build() == first
    assert conversions(place) == 1
    assert "up to date" in capsys.readouterr().out


CHANGES = {
    "the image": lambda place: docker_archive(place / "image.tar", {"config": {}}),
    "the SIF": lambda place: (place / "out.sif").write_bytes(MAGIC),
    "its identity": lambda place: (place / "out.sif.json").write_text("{}"),
    "its identity, removed": lambda place: (place / "out.sif.json").unlink(),
    "the SIF, removed": lambda place: (place / "out.sif").unlink(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_whatever_changed_is_converted_again(change, place, build):
    build()
    change(place)
    made = build()
    assert sif.check(place / "out.sif") == made
    assert conversions(place) == 2


def test_another_compression_is_another_sif(place, build):
    build()
    build(compression="gzip")
    assert "--mksquashfs-args" not in (place / "words").read_text()
    assert sif.read(place / "out.sif").compression == "gzip"


FAILURES = {
    "it fails": ("echo working; echo 'FATAL: no space left' >&2; exit 3", "exit code 3: FATAL: no space left"),
    "it fails midway": ('printf part >"$made"; exit 255', "exit code 255: it said nothing"),
    "it leaves no file": ("echo done", "left no SIF. Its last line: done"),
    "it leaves something else": ('echo hello >"$made"', "left no SIF"),
}


@pytest.mark.parametrize("older", [True, False], ids=["where there was one", "where there was none"])
@pytest.mark.parametrize(("script", "error"), FAILURES.values(), ids=FAILURES.keys())
def test_a_conversion_that_fails_changes_nothing_and_leaves_nothing(script, error, older, place, build):
    if older:
        make_sif(place / "out.sif", content=MAGIC + b"old")
    before = {name: (place / name).read_bytes() for name in left(place)}
    (place / "conversion").write_text(script)
    with pytest.raises(UserError) as caught:
        build()
    assert error in str(caught.value)
    assert " HINT: " in str(caught.value)
    assert {name: (place / name).read_bytes() for name in left(place)} == before


def test_at_no_moment_does_an_identity_lie_beside_another_file(place, build, monkeypatch):
    build()
    docker_archive(place / "image.tar", {"config": {}})
    seen = {}

    def replace(new, old):
        seen[old] = sif.read(place / "out.sif")
        os.rename(new, old)

    monkeypatch.setattr(os, "replace", replace)
    made = build()
    assert (seen[place / "out.sif"], sif.read(place / "out.sif")) == (None, made)


def test_an_interrupt_leaves_nothing(place, build, monkeypatch):
    def interrupted(argv):
        Path(argv[-2]).touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(sif, "_stream", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build()
    assert left(place) == []


def test_an_unknown_compression_is_told_with_those_there_are(build):
    with pytest.raises(UserError, match=r"valid are: gzip, lz4, none, zstd\. HINT: --compression zstd"):
        build(compression="zst")


def test_there_must_be_room_for_the_sif_and_for_the_work(place, build, monkeypatch):
    os.truncate(place / "image.tar", 10_000_000)
    for full, hint in ((place / "tmp", "TMPDIR=FOLDER"), (place, "--out")):
        free = {place: 10**10, place / "tmp": 10**10} | {full: 9_999_999}
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free[Path(folder)]))
        with pytest.raises(UserError, match=rf"^{full} has 0\.0 GB free, 0\.0 GB are needed\. HINT: {hint}"):
            build()
    assert (conversions(place), left(place)) == (0, [])


def test_the_folder_of_the_sif_must_be_there_and_the_sif_no_folder(place):
    docker_archive(place / "image.tar")
    (place / "folder.sif").mkdir()
    for out in ("nowhere/out.sif", "image.tar/out.sif", "folder.sif"):
        with pytest.raises(UserError, match=r" HINT: --out "):
            sif.build(f"docker-archive:{place}/image.tar", place / out)
    assert conversions(place) == 0


class Engine:
    """A Docker engine with one image, intermodal:latest."""

    def __init__(self, content):
        self.images = self
        self.id, self.content = "sha256:" + "5" * 64, content
        self.attrs = {"Config": {"Labels": CONFIG["config"]["Labels"]}, "Size": len(content)}

    def get(self, name):
        if name not in ("intermodal:latest", self.id):
            raise docker.docker.errors.ImageNotFound("no")
        return self

    def save(self, chunk_size):
        for start in range(0, len(self.content), 1000):
            yield self.content[start : start + 1000]


@pytest.fixture
def engine(build, place, monkeypatch):
    made = Engine((place / "image.tar").read_bytes())
    monkeypatch.setattr(docker, "connect", lambda: made)
    return made


def test_an_image_of_the_docker_engine_is_saved_and_converted(engine, place, build, capsys):
    made = build("intermodal:latest")
    assert (made.image, made.image_id, made.revision) == ("intermodal:latest", engine.id, "abc")
    assert converted(place)[:2] == (CONFIG, list(LAYERS))
    assert "saving intermodal:latest" in capsys.readouterr().out
    assert build("intermodal:latest") == made
    assert conversions(place) == 1


def test_an_image_that_the_engine_does_not_have_is_a_user_error(engine, build):
    with pytest.raises(UserError, match=r"no image localhost:5000/mine:1 .* HINT: "):
        build("localhost:5000/mine:1")


def test_an_image_that_cannot_be_saved_leaves_nothing(engine, place, build, monkeypatch):
    def broken(chunk_size):
        yield b"part"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engine, "save", broken)
    with pytest.raises(UserError, match=r"Cannot save intermodal:latest: .*No space left.* HINT: TMPDIR"):
        build("intermodal:latest")
    assert left(place) == []


DOCKER = r"""#!/bin/bash
home=${0%/bin/*}
printf '%s\n' "$@" >"$home/docker-words"
while [ "$1" != apptainer ]; do shift; done
shift
exec "$home/apptainer" "$@"
"""


def test_a_host_with_docker_alone_converts_in_a_container_that_is_nobody_and_has_no_network(place, build, monkeypatch):
    (place / "apptainer").write_text(APPTAINER.replace("${0%/bin/*}", str(place)))
    (place / "apptainer").chmod(0o755)
    (place / "bin" / "apptainer").unlink()
    program(place, "docker", DOCKER)
    monkeypatch.setenv("DOCKER", "docker")
    monkeypatch.setattr(images, "build_converter", lambda: "converter:1")
    assert build().converter == "apptainer version 9.9.9"
    words = (place / "docker-words").read_text().splitlines()
    assert "--network=none" in words
    assert not any(word.startswith("--user=0") or word == "--privileged" for word in words)
    assert "converter:1" in words
    assert set(left(place)) == {"apptainer", "docker-words", "out.sif", "out.sif.json"}


def test_a_copied_sif_is_known_by_its_content(place, build):
    build()
    for name in ("out.sif", "out.sif.json"):
        shutil.copyfile(place / name, place / name.replace("out", "copy"))
    os.utime(place / "copy.sif", (1, 1))
    assert sif.check(place / "copy.sif") == sif.read(place / "out.sif")


@pytest.fixture
def answers(place, monkeypatch):
    """What `docker image inspect` answers."""

    def say(text, host="unix:///nowhere"):
        program(place, "docker", f"#!/bin/sh\n{text}\n")
        monkeypatch.setenv("DOCKER_HOST", host)

    return say


def test_a_sif_that_is_older_than_its_image_is_warned_about(place, build, answers, capsys):
    build()
    known = sif.read(place / "out.sif")
    for text, warned in ((f"echo {known.image_id}", False), ("exit 1", False), ("echo sha256:2", True)):
        answers(text)
        capsys.readouterr()
        sif.warn_if_stale(place / "out.sif", known)
        told = capsys.readouterr().err
        assert bool(told) is warned
        if warned:
            assert told.startswith(f"warning: {place}/out.sif is older than the image {known.image}. HINT: ")


NOT_OURS = {"nothing": None, "no JSON": "{", "of another version": '{"image": "a"}', "a list": "[]", "a word": '"a"'}


@pytest.mark.parametrize("text", NOT_OURS.values(), ids=NOT_OURS.keys())
def test_an_identity_that_nobody_can_read_is_none(text, place):
    make_sif(place / "out.sif")
    sif.identity_file(place / "out.sif").unlink()
    if text is not None:
        sif.identity_file(place / "out.sif").write_text(text)
    assert sif.read(place / "out.sif") is None
