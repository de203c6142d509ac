"""Build the training image. BuildKit goes through the docker command line, because docker-py has none."""

import ast
import dataclasses
import os
import re
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
CONVERTER_TAG = "intermodal-apptainer"
OS_IMAGE = "debian:bookworm-slim"
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "FTP_PROXY", "ALL_PROXY")
# Where packages are and how to get there. Other settings (target, user, require-virtualenv, cert…) are of this host.
_PIP_PLACES = ("index-url", "extra-index-url", "find-links")
_PIP_SETTINGS = (*_PIP_PLACES, "no-index", "trusted-host", "proxy", "timeout", "default-timeout", "retries")
_CERTIFICATES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_EPOCH = "315532800"  # 1980, the oldest time a zip file can hold: the wheel's bytes depend on its content alone


@dataclasses.dataclass(frozen=True)
class Base:
    """What the image is built from. The digest is empty where it was never in a registry."""

    name: str
    digest: str
    image_id: str
    layers: tuple[str, ...]

    @property
    def record(self) -> str:
        """What finds it again."""
        return f"{self.name}@{self.digest}" if self.digest else f"{self.name} (image ID {self.image_id})"


def build(base: str, tag: str, os_image: str, *, target: str = "runtime") -> str:
    """Build the image on `base` (ngc, cpu, or an image that has torch) and return its ID.

    Raises UserError if Docker, BuildKit or the base is missing, or the build fails.
    """
    client = engine.connect()
    _check_buildkit()
    _make_wheel()
    with secrets() as given:
        name = _provide_base(base, os_image, given)
        found = describe_base(name, client.images.get(name).attrs)
        revision, dirty = git_state()
        arguments = {
            "BASE": name,
            "BASE_NAME": found.name,
            "BASE_DIGEST": found.digest,
            "BASE_RECORD": found.record,
            "REVISION": revision,
            "DIRTY": dirty,
        }
        _docker_build("containers/Dockerfile", tag, arguments, given, target)
    _check_base(client, tag, found)
    return engine.image_id(client, tag)


def _provide_base(base: str, os_image: str, secrets: list[str]) -> str:
    """Build or fetch the base if it is not there, and return its name."""
    name = {"ngc": NGC, "cpu": CPU_BASE_TAG}.get(base, base)
    if base == "cpu":
        _docker_build("containers/cpu-base.Dockerfile", name, {"OS_IMAGE": os_image}, secrets)
    elif shell.output([docker(), "image", "inspect", name]) is None:
        shell.run([docker(), "pull", name])
    return name


def build_converter() -> str:
    """Name of the image that has Apptainer, built if it is not there yet."""
    if shell.output([docker(), "image", "inspect", CONVERTER_TAG]) is None:
        _check_buildkit()
        _docker_build("containers/apptainer.Dockerfile", CONVERTER_TAG, {"OS_IMAGE": OS_IMAGE}, [])
    return CONVERTER_TAG


def describe_base(name: str, attrs: dict[str, Any]) -> Base:
    """The base called `name`, from what Docker tells of its image."""
    tagged = name.partition("@")[0]
    repository = re.sub(r":[^/]*$", "", tagged)
    digests = dict(digest.split("@") for digest in attrs["RepoDigests"] or [])
    if digests and repository not in digests:  # it has this name on this host only
        tagged = repository = next(iter(digests))
    return Base(tagged, digests.get(repository, ""), attrs["Id"], tuple(attrs["RootFS"]["Layers"]))


def _check_base(client: Any, tag: str, base: Base) -> None:
    """Raises UserError if the image lies on something else than it says: a name is free to move during a build."""
    layers = client.images.get(tag).attrs["RootFS"]["Layers"]
    if tuple(layers[: len(base.layers)]) != base.layers:
        client.images.remove(tag)
        raise UserError(f"{base.name} became another image while {tag} was built.", "docker pull it, and build again")


def git_state() -> tuple[str, str]:
    """The checkout's commit, and "1" if files differ from it or else "0". Both are empty where git cannot tell."""
    if not (ROOT / ".git").exists():
        return "", ""
    git = ["git", "-C", str(ROOT)]
    changes = shell.output([*git, "status", "--porcelain"])
    return shell.output([*git, "rev-parse", "HEAD"]) or "", "" if changes is None else str(int(bool(changes)))


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
        env={**os.environ, "DOCKER_BUILDKIT": "1", "BUILDX_BUILDER": "default"},  # others keep images to themselves
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
def secrets() -> Iterator[list[str]]:
    """The host's pip settings and certificates as secrets of the build: usable in it, stored nowhere."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "pip.conf")
        settings.write_text(pip_settings(shell.output([sys.executable, "-m", "pip", "config", "list"]) or ""))
        given = [f"id=pip.conf,src={settings}"]
        bundle = next((os.environ[name] for name in _CERTIFICATES if os.path.isfile(os.environ.get(name, ""))), None)
        yield given + ([f"id=ca.pem,src={bundle}"] if bundle else [])


def pip_settings(listing: str) -> str:
    """What `pip config list` prints, as the text of a pip.conf that a build can use. Certificates travel apart."""
    settings: dict[str, list[str]] = {}
    for line in sorted(listing.splitlines(), key=lambda line: line.startswith(":env:")):  # the environment wins
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in ("global", ":env:", "install") and name in _PIP_SETTINGS:
            settings[name] = [word for word in str(ast.literal_eval(value)).split() if _crosses(name, word)]
    lines = [f"{name} = " + "\n    ".join(words) for name, words in settings.items() if words]
    return "\n".join(["[global]", *lines]) + "\n"


def _crosses(name: str, word: str) -> bool:
    """True unless the word is a folder of this host, which a build cannot see."""
    return name not in _PIP_PLACES or word.startswith(("http://", "https://"))


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
