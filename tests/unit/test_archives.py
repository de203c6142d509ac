"""Images in files: what the converter is given of them, and files that hold none."""

import gzip
import os
import tarfile

import pytest

from trainer.errors import UserError

from .archives import ARCHIVES, CONFIG, LAYERS, archive, conversions, converted, docker_archive, left, oci_archive


@pytest.mark.parametrize("kind", ARCHIVES)
def test_the_converter_is_given_the_image_with_its_layers_as_they_are(kind, place, build):
    ARCHIVES[kind](place / "image.tar")
    build(f"{kind}:{place}/image.tar")
    config, layers, kinds = converted(place)
    assert (config, layers) == (CONFIG, list(LAYERS))
    assert kinds == (["tar", "tar+gzip"] if kind == "docker-archive" else ["", ""])


def test_a_layer_that_is_a_link_to_another_is_that_layer(place, build):
    docker_archive(place / "image.tar", layers=(LAYERS[0], b"", LAYERS[1]))
    with tarfile.open(place / "image.tar") as tar, tarfile.open(place / "linked.tar", "w") as made:
        for member in tar:
            if member.name == "1/layer.tar":
                member.type, member.linkname, member.size = tarfile.SYMTYPE, "../0/layer.tar", 0
            made.addfile(member, tar.extractfile(member) if member.isreg() else None)
    build(f"docker-archive:{place}/linked.tar")
    assert converted(place)[1] == [LAYERS[0], LAYERS[0], LAYERS[1]]


@pytest.mark.parametrize("name", ["../escaped", "/ESCAPED", "blobs/../../escaped"])
def test_an_archive_writes_nothing_outside_its_folder(name, place, build):
    name = name.replace("/ESCAPED", f"{place}/escaped")
    oci_archive(place / "image.tar")
    with tarfile.open(place / "image.tar", "a") as tar:
        for kind in (tarfile.REGTYPE, tarfile.SYMTYPE):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.mode = kind, "/", 0o777
            tar.addfile(entry)
    build(f"oci-archive:{place}/image.tar")
    assert left(place) == ["out.sif", "out.sif.json"]


@pytest.mark.parametrize("name", ["a:b.tar", "a b.tar", "it's.tar", "größe.tar", "-x.tar", "a,b.tar"])
def test_the_name_of_an_archive_may_be_any(name, place, build):
    (place / "image.tar").rename(place / name)
    assert build(f"docker-archive:{place}/{name}").image == f"docker-archive:{place}/{name}"
    (place / name).rename(place / "image.tar")
    assert left(place) == ["out.sif", "out.sif.json"]


def nested(place):
    index = {"manifests": [{"digest": "sha256:1"}]}
    archive(place / "image.tar", {"index.json": index, "blobs/sha256/1": index})


DAMAGED = {
    "missing": lambda place: (place / "image.tar").unlink(),
    "a folder": lambda place: ((place / "image.tar").unlink(), (place / "image.tar").mkdir()),
    "empty": lambda place: (place / "image.tar").write_bytes(b""),
    "no tar": lambda place: (place / "image.tar").write_bytes(b"hello" * 1000),
    "an empty tar": lambda place: archive(place / "image.tar", {}),
    "without an image": lambda place: archive(
        place / "image.tar", {"manifest.json": [], "index.json": {"manifests": []}}
    ),
    "without a configuration": lambda place: archive(place / "image.tar", {"manifest.json": [{"Config": "x"}]}),
    "of another kind": lambda place: archive(place / "image.tar", {"manifest.json": None, "index.json": []}),
    "with no JSON": lambda place: archive(place / "image.tar", {"manifest.json": b"{", "index.json": b"\xff"}),
    "with a configuration that is no JSON": lambda place: archive(
        place / "image.tar", {"manifest.json": [{"Config": "x"}], "x": b"{", "index.json": b"{"}
    ),
    "with a configuration of another kind": lambda place: archive(
        place / "image.tar", {"manifest.json": [{"Config": "x"}], "x": [], "index.json": [5]}
    ),
    "with a name that is none": lambda place: archive(
        place / "image.tar", {"manifest.json": [{"Config": None}], "index.json": {"manifests": [{"digest": None}]}}
    ),
    "cut off": lambda place: os.truncate(place / "image.tar", 700),
    "without its layer": lambda place: archive(
        place / "image.tar",
        {"c": CONFIG, "manifest.json": [{"Config": "c", "Layers": ["0/layer.tar"]}], "index.json": {}},
    ),
    "packed and cut off": lambda place: (place / "image.tar").write_bytes(
        gzip.compress((place / "image.tar").read_bytes())[:100]
    ),
    "of images for many machines": nested,
}


@pytest.mark.parametrize("kind", ARCHIVES)
@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED.keys())
def test_an_archive_that_holds_no_image_is_a_line_that_names_it(damage, kind, place, build):
    ARCHIVES[kind](place / "image.tar")
    damage(place)
    with pytest.raises(UserError, match=r"^[^\n]+ HINT: [^\n]+$") as caught:
        build(f"{kind}:{place}/image.tar")
    assert f"{place}/image.tar" in str(caught.value)
    assert conversions(place) == 0
