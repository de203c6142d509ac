"""Build the training image. BuildKit goes through the docker command line, because docker-py has none."""

import ast
import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch import shell
from launch.runtimes import docker as engine
from trainer.errors import UserError

ROOT = Path(__file__).parent.parent
# NGC's PyTorch release, named here and nowhere else. Put "@sha256:…" behind the tag to pin it for good.
NGC = "nvcr.io/nvidia/pytorch:26.08-py3"
CPU_BASE_TAG = "intermodal-base:cpu"
OS_IMAGE = "debian:bookworm-slim"
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "FTP_PROXY", "ALL_PROXY")
_CERTIFICATES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_EPOCH = "315532800"  # 1980, the oldest time a zip file can hold: the wheel's bytes depend on its content alone


@dataclasses.dataclass(frozen=True)
class Base:
    """What the image is built from: its name and its digest, or its ID where it was never in a registry."""

    name: str
    digest: str


def build(base: str, tag: str, os_image: str, *, target: str = "runtime") -> str:
    """Build the image on `base` (ngc, cpu, or an image that has torch) and return its ID.

    Raises UserError if Docker, BuildKit or the base is missing, or the build fails.
    """
    client = engine.connect()
    _check_buildkit()
    _make_wheel()
    with _secrets() as secrets:
        found = _find_base(client, base, os_image, secrets)
        revision = shell.output(["git", "-C", str(ROOT), "rev-parse", "HEAD"]) or ""
        dirty = "1" if shell.output(["git", "-C", str(ROOT), "status", "--porcelain"]) else "0"
        arguments = {
            "BASE": found.name,
            "BASE_NAME": found.name,
            "BASE_DIGEST": found.digest,
            "REVISION": revision,
            "DIRTY": dirty,
        }
        _docker_build("containers/Dockerfile", tag, arguments, secrets, target)
    return engine.image_id(client, tag)


def _find_base(client: Any, base: str, os_image: str, secrets: list[str]) -> Base:
    name = {"ngc": NGC, "cpu": CPU_BASE_TAG}.get(base, base)
    if base == "cpu":
        _docker_build("containers/cpu-base.Dockerfile", name, {"OS_IMAGE": os_image}, secrets)
    elif shell.output([docker(), "image", "inspect", name]) is None:
        shell.run([docker(), "pull", name])
    found = client.images.get(name)
    digests = found.attrs["RepoDigests"] or [found.id]
    return Base(name, digests[0].rpartition("@")[2])


def _docker_build(file: str, tag: str, arguments: dict[str, str], secrets: list[str], target: str = "") -> None:
    proxies = [name for name in (*_PROXIES, *map(str.lower, _PROXIES)) if name in os.environ]
    shell.run(
        [
            docker(),
            "build",
            "--file",
            str(ROOT / file),
            "--tag",
            tag,
            *(["--target", target] if target else []),
            *(f"--secret={secret}" for secret in secrets),
            *(f"--build-arg={name}" for name in proxies),
            *(f"--build-arg={name}={value}" for name, value in arguments.items()),
            str(ROOT),
        ],
        env={**os.environ, "DOCKER_BUILDKIT": "1"},
    )


def _make_wheel() -> None:
    """Our own package as a wheel in build/wheel; the same sources give the same bytes."""
    for leftover in ("lib", "bdist.linux-x86_64", "wheel"):
        shutil.rmtree(ROOT / "build" / leftover, ignore_errors=True)
    shell.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "--wheel-dir",
            str(ROOT / "build" / "wheel"),
            str(ROOT),
        ],
        env={**os.environ, "SOURCE_DATE_EPOCH": _EPOCH},
    )


@contextmanager
def _secrets() -> Iterator[list[str]]:
    """The host's pip settings and certificates as secrets of the build: usable in it, stored nowhere."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "pip.conf")
        settings.write_text(pip_settings(shell.output([sys.executable, "-m", "pip", "config", "list"]) or ""))
        secrets = [f"id=pip.conf,src={settings}"]
        bundle = next((os.environ[name] for name in _CERTIFICATES if os.path.isfile(os.environ.get(name, ""))), None)
        yield secrets + ([f"id=ca.pem,src={bundle}"] if bundle else [])


def pip_settings(listing: str) -> str:
    """What `pip config list` prints, as the text of a pip.conf. Certificates travel apart."""
    settings: dict[str, str] = {}
    for line in sorted(listing.splitlines(), key=lambda line: line.startswith(":env:")):  # the environment wins
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in ("global", ":env:", "install") and name not in ("cert", "client-cert", "no-input"):
            settings[name] = str(ast.literal_eval(value)).replace("\n", "\n    ")
    return "\n".join(["[global]", *(f"{name} = {value}" for name, value in settings.items())]) + "\n"


def docker() -> str:
    """The docker program: DOCKER in the environment, or the one on PATH."""
    return os.environ.get("DOCKER", "docker")


def _check_buildkit() -> None:
    version = shell.output([docker(), "version", "--format", "{{.Client.Version}}"]) or "0"
    if int(version.split(".")[0]) >= 23 and shell.output([docker(), "buildx", "version"]) is None:
        raise UserError(
            f"The docker program is version {version} and has no buildx, so it cannot build with BuildKit.",
            "install docker-buildx, or set DOCKER to another docker program",
        )
