"""What `docker save` writes, taken apart into an OCI image layout with its layers as they are.

Apptainer reads an archive of Docker too, but compresses every layer first, only to unpack it again: that was 100 of the
240 seconds of converting a 6 GB image. Layout: https://github.com/opencontainers/image-spec/blob/main/image-layout.md
"""

import hashlib
import io
import json
import os
import posixpath
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

_LAYER = "application/vnd.oci.image.layer.v1.tar"
_COMPRESSIONS = {b"\x1f\x8b": "+gzip", b"\x28\xb5": "+zstd"}
_CONFIG = "application/vnd.oci.image.config.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def unpack(chunks: Iterable[bytes], layout: Path) -> None:
    """Write the one image of a `docker save` stream as a layout into the new folder `layout`.

    Raises OSError if the disk is full, KeyError or ValueError if the stream holds no image.
    """
    (layout / "blobs" / "sha256").mkdir(parents=True)
    stored: dict[str, dict[str, Any]] = {}
    links: dict[str, str] = {}
    with tarfile.open(fileobj=io.BufferedReader(_Stream(iter(chunks)), 1 << 20), mode="r|") as tar:
        for member in tar:
            if member.issym():  # a layer that is there already
                links[member.name] = posixpath.normpath(posixpath.join(posixpath.dirname(member.name), member.linkname))
            elif file := tar.extractfile(member):
                stored[member.name] = _store(layout, file)
    manifest = json.loads(_path(layout, stored["manifest.json"]).read_text())[0]
    layers = [stored[links.get(name, name)] for name in manifest["Layers"]]
    content = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": {"mediaType": _CONFIG, **stored[manifest["Config"]]},
        "layers": [{"mediaType": _LAYER + _compression(_path(layout, layer)), **layer} for layer in layers],
    }
    described = _store(layout, io.BytesIO(json.dumps(content).encode()))
    index = {"schemaVersion": 2, "manifests": [{"mediaType": _MANIFEST, **described}]}
    (layout / "index.json").write_text(json.dumps(index))
    (layout / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))


def _store(layout: Path, file: IO[bytes]) -> dict[str, Any]:
    """Keep a file under its hash; returns its digest and size in bytes."""
    digest, temporary, size = hashlib.sha256(), layout / "blob", 0
    with temporary.open("wb") as out:
        while block := file.read(1 << 20):
            digest.update(block)
            size += out.write(block)
    described = {"digest": f"sha256:{digest.hexdigest()}", "size": size}
    os.replace(temporary, _path(layout, described))
    return described


def _path(layout: Path, described: dict[str, Any]) -> Path:
    return layout / "blobs" / str(described["digest"]).replace(":", "/")


def _compression(path: Path) -> str:
    with path.open("rb") as file:
        return _COMPRESSIONS.get(file.read(2), "")


class _Stream(io.RawIOBase):
    """Chunks of bytes as a file to read."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = chunk
        taken = self._rest[: len(buffer)]
        self._rest = self._rest[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)
