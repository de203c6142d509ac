"""Images as archives, and a folder in which an `apptainer` made of shell turns them into SIFs."""

import gzip
import hashlib
import io
import json
import shutil
import tarfile

from .cluster import TOOLS

# Keeps its words, variables and what lay at the final place; then does what the test says. $made is the file to make.
APPTAINER = r"""#!/bin/bash
home=${0%/bin/*}
if [ "$1" = --version ]; then echo "apptainer version 9.9.9"; exit; fi
printf '%s\n' "$@" >"$home/words"
env -0 >"$home/variables"
made=${@: -2:1}
uri=${@: -1}
cp -R "${uri#*:}" "$home/layout"
[ ! -e "$home/out.sif" ] || cp "$home/out.sif" "$home/before"
echo run >>"$home/runs"
. "$home/conversion"
"""
GOOD = r"""printf '#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0new' >"$made"; echo "INFO: Creating SIF file..." """
CONFIG = {
    "config": {"Labels": {"org.opencontainers.image.revision": "abc", "org.opencontainers.image.base.name": "os"}}
}
LAYERS = (b"first layer" * 99, gzip.compress(b"second layer" * 99, mtime=0))


def program(place, name, text):
    path = place / "bin" / name
    path.write_text(text)
    path.chmod(0o755)


def furnish(place):
    """Put an Apptainer that converts well into a folder, with the tools it needs, and an image."""
    (place / "bin").mkdir()
    for name in TOOLS:
        (place / "bin" / name).symlink_to(str(shutil.which(name)))
    program(place, "apptainer", APPTAINER)
    (place / "conversion").write_text(GOOD)
    (place / "tmp").mkdir()
    docker_archive(place / "image.tar")


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def archive(path, members):
    """A tar of these files; a value that is no bytes is written as JSON."""
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return path


def docker_archive(path, config=CONFIG, layers=LAYERS):
    """An image as `docker save` has always written it."""
    name = sha256(json.dumps(config).encode()) + ".json"
    files = {f"{number}/layer.tar": layer for number, layer in enumerate(layers)}
    return archive(path, {name: config, **files, "manifest.json": [{"Config": name, "Layers": list(files)}]})


def oci_archive(path, config=CONFIG, layers=LAYERS):
    """An image as an OCI layout: an index, a manifest, a configuration and layers, each by its hash."""
    blobs = {}

    def add(content):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        blobs[f"blobs/sha256/{sha256(data)}"] = data
        return {"digest": f"sha256:{sha256(data)}", "size": len(data)}

    manifest = add({"schemaVersion": 2, "config": add(config), "layers": [add(layer) for layer in layers]})
    told = {"oci-layout": {"imageLayoutVersion": "1.0.0"}, "index.json": {"schemaVersion": 2, "manifests": [manifest]}}
    return archive(path, {**told, **blobs})


ARCHIVES = {"docker-archive": docker_archive, "oci-archive": oci_archive}


def left(place):
    """What lies at the place and in the temporary folder, but for this test's own files."""
    own = {"bin", "tmp", "conversion", "image.tar", "words", "variables", "layout", "before", "runs"}
    return sorted(path.name for path in (*place.iterdir(), *(place / "tmp").iterdir()) if path.name not in own)


def converted(place):
    """Configuration, and layers with their kinds, of the layout that the converter was given."""

    def blob(described):
        return (place / "layout" / "blobs" / described["digest"].replace(":", "/")).read_bytes()

    (described,) = json.loads((place / "layout" / "index.json").read_text())["manifests"]
    manifest = json.loads(blob(described))
    assert json.loads((place / "layout" / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    kinds = [layer.get("mediaType", "").rpartition(".")[2] for layer in manifest["layers"]]
    return json.loads(blob(manifest["config"])), [blob(layer) for layer in manifest["layers"]], kinds


def conversions(place):
    path = place / "runs"
    return path.read_text().count("run") if path.exists() else 0
