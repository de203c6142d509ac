"""Turn an image into a SIF, the one file that Apptainer runs, and keep its identity beside it in FILE.sif.json.

The one place that uses spython, and closes its gaps: it calls `singularity` by name only, reports success for a file
that was there before, and tells nothing of a failure. Here the result gets a temporary name, the exit code counts, and
a finished SIF takes its name in one step.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch import oci, shell
from trainer.errors import UserError, unknown_name

DEFAULT = "intermodal.sif"
# What mksquashfs is told. Its own default, gzip at level 9, takes fourteen times as long for the same size.
COMPRESSIONS = {
    "zstd": "-comp zstd -Xcompression-level 3",
    "gzip": "",  # mksquashfs's own, which needs no option: for old builders, and runtimes that can read nothing else
    "lz4": "-comp lz4",
    "none": "-no-compression",
}
_MAGIC, _MAGIC_AT = b"SIF_MAGIC", 32  # the launch script line of a SIF comes first, 32 bytes
# What reading a damaged archive, or one that holds something else, may raise.
_NO_IMAGE = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, LookupError, ValueError, TypeError, AttributeError)
_NEEDS = 3.0  # temporary space over an image's size: its layers, Apptainer's copy of them, the unpacked tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """What a SIF was made from and how. `content_sha256` is that of the file's bytes."""

    image: str
    image_id: str
    base: str | None
    revision: str | None
    content_sha256: str
    size: int
    mtime_ns: int
    compression: str
    converter: str
    created_at: str


@dataclasses.dataclass(frozen=True)
class Source:
    """An image to convert; `archive` is None for one in the Docker engine."""

    name: str
    image_id: str
    labels: dict[str, str]
    kind: str
    archive: Path | None
    size: int


def build(text: str, out: Path, compression: str = "zstd") -> Identity:
    """Convert IMAGE, docker-archive:FILE or oci-archive:FILE into the SIF `out`; an unchanged image is not done again.

    Raises UserError if the image, a converter or space is missing, or the conversion fails; `out` is then as it was.
    """
    if compression not in COMPRESSIONS:
        raise unknown_name("compression", compression, COMPRESSIONS, "--compression")
    source = find_source(text)
    known = read(out) if out.exists() else None
    if known and (known.image_id, known.compression) == (source.image_id, compression) and is_intact(out, known):
        print(f"{out} is up to date with {source.name} ({source.image_id[:19]})")
        return known
    _check_folder(out, source.size)
    with _work_folder(source.size) as work:
        uri = _provide(source, work)
        partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
        made = partial if _own_program() else work / "image.sif"
        try:
            converter = _convert(uri, made, compression, work)
            if made != partial:
                shutil.move(made, partial)
            return _finish(partial, out, source, compression, converter)
        except OSError as error:
            raise UserError(f"Cannot write {out}: {error.strerror or error}.", "--out on another disk") from None
        finally:
            partial.unlink(missing_ok=True)


def find_source(text: str) -> Source:
    """The image that `text` names. Raises UserError if there is none."""
    kind, colon, path = text.partition(":")
    if colon and kind in ("docker-archive", "oci-archive"):
        archive = Path(path).absolute()
        image_id, labels = _read_archive(archive, kind)
        return Source(text, image_id, labels, kind, archive, archive.stat().st_size)
    from launch.runtimes import docker as engine

    client = engine.connect()
    found_id = engine.image_id(client, text)
    attributes = client.images.get(found_id).attrs
    labels = attributes["Config"].get("Labels") or {}
    return Source(text, found_id, labels, "docker-archive", None, attributes["Size"])


def read(sif: Path) -> Identity | None:
    """The identity beside a SIF; None if there is none, or it is not ours to read."""
    try:
        return Identity(**json.loads(identity_file(sif).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def identity_file(sif: Path) -> Path:
    return sif.with_name(sif.name + ".json")


def check(sif: Path) -> Identity | None:
    """See that a SIF can be run as it is, and return its identity; None (with a warning) if it has none.

    Raises UserError if it is missing, not a SIF, or not the file its identity describes.
    """
    hint = f"invoke singularity-build --out {sif}"
    if not sif.is_file():
        raise UserError(f"There is no SIF {sif}.", hint)
    if not _has_magic(sif):
        raise UserError(f"{sif} is not a SIF, or damaged: its header is not that of one.", hint)
    identity = read(sif)
    if identity is None:
        print(f"warning: no {identity_file(sif)}: nobody can tell which image {sif} is. HINT: {hint}", file=sys.stderr)
        return None
    if not is_intact(sif, identity):
        raise UserError(f"{sif} is damaged or was replaced: it is not the file that {identity_file(sif)} names.", hint)
    return identity


def is_intact(sif: Path, identity: Identity) -> bool:
    """True if the file is the one described: by size and time, or by hash where it was copied."""
    found = sif.stat()
    if found.st_size != identity.size:
        return False
    if found.st_mtime_ns == identity.mtime_ns:
        return True
    if sha256(sif) != identity.content_sha256:
        return False
    with contextlib.suppress(OSError):  # a copy without its time: the next question is answered faster
        _write_identity(sif, dataclasses.replace(identity, mtime_ns=found.st_mtime_ns))
    return True


def warn_if_stale(sif: Path, identity: Identity) -> None:
    """Where there is a Docker engine that has a newer image of the same name, say so."""
    if not Path("/var/run/docker.sock").exists() and "DOCKER_HOST" not in os.environ:
        return
    now = shell.output(["docker", "image", "inspect", "--format", "{{.Id}}", identity.image])
    if now and now != identity.image_id:
        hint = f"invoke singularity-build --from {identity.image} --out {sif}"
        print(f"warning: {sif} is older than the image {identity.image}. HINT: {hint}", file=sys.stderr, flush=True)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _read_archive(archive: Path, kind: str) -> tuple[str, dict[str, str]]:
    """Image ID and labels of the one image in an archive made by `docker save` or in OCI layout."""
    try:
        with tarfile.open(archive) as tar:
            name = _oci_config(tar) if kind == "oci-archive" else _member(tar, "manifest.json")[0]["Config"]
            content = _bytes(tar, name)
        labels = (json.loads(content).get("config") or {}).get("Labels") or {}
    except OSError as error:
        raise UserError(f"Cannot read {archive}: {error.strerror or error}.", "give an archive of one image") from None
    except _NO_IMAGE as error:
        hint = f"docker save IMAGE > FILE, and --from {kind}:FILE"
        raise UserError(f"{archive} holds no image ({_first_line(error)}).", hint) from None
    return "sha256:" + hashlib.sha256(content).hexdigest(), labels


def _oci_config(tar: tarfile.TarFile) -> str:
    def blob(digest: str) -> str:
        return "blobs/" + digest.replace(":", "/")

    manifest = _member(tar, blob(_member(tar, "index.json")["manifests"][0]["digest"]))
    return blob(manifest["config"]["digest"])


def _member(tar: tarfile.TarFile, name: str) -> Any:
    return json.loads(_bytes(tar, name))


def _bytes(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    if file is None:
        raise KeyError(name)
    return file.read()


def _check_folder(out: Path, size: int) -> None:
    folder = out.absolute().parent
    if out.is_dir():
        raise UserError(f"{out} is a folder.", "--out FILE.sif")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"Cannot write to {folder}.", "--out with a writable folder")
    _check_space(folder, size, "--out on another disk")


@contextmanager
def _work_folder(size: int) -> Iterator[Path]:
    """A folder below TMPDIR with room for the conversion, removed afterwards."""
    place = Path(tempfile.gettempdir())
    _check_space(place, int(size * _NEEDS), "TMPDIR=FOLDER on another disk")
    with tempfile.TemporaryDirectory(prefix="intermodal-sif-", dir=place) as folder:
        yield Path(folder)


def _check_space(folder: Path, needed: int, hint: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(f"{folder} has {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB are needed.", hint)


def _provide(source: Source, work: Path) -> str:
    """The image as a layout in the working folder, as a URI."""
    try:
        if source.archive and source.kind == "oci-archive":
            _extract(source.archive, work / "image")
        else:
            oci.unpack(_chunks(source), work / "image")
    except OSError as error:
        raise UserError(f"Cannot save {source.name}: {error}.", "TMPDIR=FOLDER on another disk") from None
    except _NO_IMAGE as error:
        raise UserError(f"{source.name} holds no whole image ({_first_line(error)}).", "save it again") from None
    return f"oci:{work}/image"


def _extract(archive: Path, folder: Path) -> None:
    """Plain files, and none outside `folder`. (The filters of tarfile are missing before Python 3.11.4.)"""
    with tarfile.open(archive) as tar:
        for member in tar:
            target = Path(os.path.normpath(folder / member.name))
            if (file := tar.extractfile(member) if member.isreg() else None) and target.is_relative_to(folder):
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as out:
                    shutil.copyfileobj(file, out, 1 << 20)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _chunks(source: Source) -> Iterator[bytes]:
    """What `docker save` writes, from the engine or from a file, with a line for every tenth of it."""
    done, shown = 0, 0
    for chunk in _read_file(source.archive) if source.archive else _save(source.image_id):
        yield chunk
        done += len(chunk)
        if done * 10 // source.size > shown and shown < 10:
            shown = done * 10 // source.size
            print(f"saving {source.name}: {done / 1e9:.1f} of about {source.size / 1e9:.1f} GB", flush=True)


def _save(image_id: str) -> Iterator[bytes]:
    from launch.runtimes import docker as engine

    chunks: Iterator[bytes] = engine.connect().images.get(image_id).save(chunk_size=1 << 22)
    return chunks


def _read_file(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            yield chunk


def _own_program() -> str | None:
    return shutil.which("apptainer") or shutil.which("singularity")


def _convert(uri: str, made: Path, compression: str, work: Path) -> str:
    """Run the conversion, its lines shown as they come; returns what converted. Raises UserError if it fails."""
    program = _own_program()
    options = ["--mksquashfs-args", COMPRESSIONS[compression]] if COMPRESSIONS[compression] else []
    words = ["build", "--disable-cache", *options, str(made), uri]
    prefix = [program] if program else _program_in_docker(work)
    environment = {"APPTAINER_TMPDIR": str(work), "SINGULARITY_TMPDIR": str(work), "SOURCE_DATE_EPOCH": "0"}
    print(f"converting with {Path(prefix[0]).name}, compression {compression}", flush=True)
    lines = _stream(["env", *(f"{key}={value}" for key, value in environment.items()), *prefix, *words])
    if not made.is_file() or not _has_magic(made):
        raise UserError(f"The conversion left no SIF. Its last line: {lines[-1] if lines else ''}", "see above")
    return (shell.output([*prefix, "--version"]) or prefix[0]).strip()


def _stream(argv: list[str]) -> list[str]:
    from spython.utils import stream_command

    lines: list[str] = []
    try:
        for line in stream_command(argv, sudo=False, output_type="both"):
            lines.append(line.rstrip("\n"))
            print("  " + lines[-1], flush=True)
    except subprocess.CalledProcessError as error:
        hint = "TMPDIR=FOLDER on a disk with more space, or --compression gzip for an old Singularity"
        told = lines[-1] if lines else "it said nothing"
        raise UserError(f"The conversion failed with exit code {error.returncode}: {told}", hint) from None
    return lines


def _program_in_docker(work: Path) -> list[str]:
    """Apptainer in a container, for hosts that have Docker only. It needs no right but a name for its user."""
    from launch import images
    from launch.runtimes.docker import NOBODY

    tag = images.build_converter()
    user, group = (os.getuid(), os.getgid()) if os.getuid() else (NOBODY, NOBODY)
    account = work / "passwd"
    account.write_text(f"user:x:{user}:{group}::{work}:/bin/sh\n")
    work.chmod(0o700 if os.getuid() else 0o777)
    return [
        images.docker(),
        "run",
        "--rm",
        f"--user={user}:{group}",
        "--network=none",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        f"--mount=type=bind,source={work},target={work}",
        f"--mount=type=bind,source={account},target=/etc/passwd,readonly",
        *(f"--env={key}={work}" for key in ("APPTAINER_TMPDIR", "TMPDIR", "HOME")),
        "--env=SOURCE_DATE_EPOCH=0",
        tag,
        "apptainer",
    ]


def _finish(partial: Path, out: Path, source: Source, compression: str, converter: str) -> Identity:
    """Give a finished SIF its name, and write its identity."""
    if os.getuid() == 0:
        os.chown(partial, 0, 0)
    partial.chmod(0o755)
    found = partial.stat()
    identity = Identity(
        image=source.name,
        image_id=source.image_id,
        base=source.labels.get("org.opencontainers.image.base.name"),
        revision=source.labels.get("org.opencontainers.image.revision"),
        content_sha256=sha256(partial),
        size=found.st_size,
        mtime_ns=found.st_mtime_ns,
        compression=compression,
        converter=converter,
        created_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )
    identity_file(out).unlink(missing_ok=True)  # never an old identity beside a new file
    os.replace(partial, out)
    _write_identity(out, identity)
    return identity


def _write_identity(sif: Path, identity: Identity) -> None:
    identity_file(sif).write_text(json.dumps(dataclasses.asdict(identity), indent=2) + "\n")


def _has_magic(sif: Path) -> bool:
    with sif.open("rb") as file:
        return file.read(_MAGIC_AT + len(_MAGIC))[_MAGIC_AT:] == _MAGIC
