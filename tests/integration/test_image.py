"""What is in the image, and what is not."""

import json
import os
from pathlib import Path
from typing import Any

from launch import images
from tests.integration.conftest import OS_IMAGE, docker, invoke

BASE = "intermodal-base:cpu"
SITE = "/opt/venv/lib/python3*/site-packages"


def inside(image: str, *words: str, user: str = "") -> list[str]:
    """Lines that a program prints in a container; as the image's own user unless told otherwise."""
    return list(docker("run", "--rm", "--network=none", *(["--user", user] if user else []), image, *words))


def told(image: str, what: str) -> Any:
    return json.loads(docker("image", "inspect", "--format", f"{{{{json {what}}}}}", image)[0])


def test_a_second_build_comes_from_the_cache(image: str) -> None:
    before = docker("image", "inspect", "--format", "{{.Id}}", image)
    again = invoke("build", "--base", "cpu", "--os-image", OS_IMAGE, "--tag", image)
    assert again.returncode == 0
    assert again.stdout.splitlines()[-1] == f"{image} {before[0]}"


UNCACHED = """#!/bin/sh
[ "$1" != build ] || {{ shift; set -- build --no-cache "$@"; }}
exec {docker} "$@"
"""


def test_a_build_without_the_cache_gives_the_same_files(image: str, tmp_path: Path) -> None:
    uncached = tmp_path / "docker"
    uncached.write_text(UNCACHED.format(docker=images.docker()))
    uncached.chmod(0o755)
    again = "intermodal:again"
    done = invoke("build", "--base", BASE, "--tag", again, DOCKER=str(uncached))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    try:
        assert told(again, ".RootFS.Layers") != told(image, ".RootFS.Layers"), "the time stamps differ"
        assert files(again) == files(image)
    finally:
        docker("image", "rm", again)


def files(image: str) -> list[str]:
    """Every file with its mode, owner and size, and what is in those that our layers bring."""
    every = r"find / -xdev -type f ! -path '/etc/host*' ! -path /etc/resolv.conf -printf '%m %u %s %p\n' | sort"
    ours = f"/opt/venv/bin {SITE}/trainer {SITE}/intermodal* {SITE}/tensorboard*"
    return inside(image, "sh", "-c", f"{every}; find {ours} -type f -exec sha256sum {{}} + | sort", user="0")


def test_there_is_no_compiler_no_sudo_and_no_leftover(image: str) -> None:
    assert inside(image, "sh", "-c", "for tool in gcc cc g++ make sudo; do command -v $tool; done; true") == []
    caches = "/var/lib/apt/lists /var/cache/apt /var/cache/ldconfig /var/cache/debconf/*-old /var/log /root/.cache"
    places = f"{caches} /tmp /home /workspace /runs /data"
    assert inside(image, "sh", "-c", f"find {places} -type f 2>/dev/null; true", user="0") == []


def test_it_runs_as_nobody(image: str) -> None:
    assert inside(image, "sh", "-c", "id -u; pwd; command -v trainer")[:2] == ["65534", "/workspace"]


FLAGS = """
import importlib.util, pathlib, trainer
for source in pathlib.Path(trainer.__path__[0]).parent.rglob("*.py"):
    if source.name != "py312_intrinsics.py":
        with open(importlib.util.cache_from_source(source), "rb") as compiled:
            print(int.from_bytes(compiled.read(8)[4:], "little"), source)
"""


def test_every_module_has_bytecode_that_is_never_checked(image: str) -> None:
    found = inside(image, "python3", "-B", "-c", FLAGS)
    assert [line for line in found if not line.startswith("1 ")] == [], "flags 1: a hash that is not checked (PEP 552)"
    for name in ("trainer/__init__.py", "trainer/loop.py", "tensorboardX/__init__.py", "torch/__init__.py"):
        assert any(line.endswith(f"/{name}") for line in found)


def test_the_labels_tell_revision_and_base(image: str) -> None:
    labels = told(image, ".Config.Labels")
    assert labels["org.opencontainers.image.base.name"] == BASE
    assert labels["org.opencontainers.image.base.digest"] == "", "it was never in a registry"
    assert len(labels["org.opencontainers.image.revision"]) == 40
    base, layers = told(BASE, ".Id"), told(BASE, ".RootFS.Layers")
    assert inside(image, "printenv", "TRAINER_IMAGE_BASE") == [f"{BASE} (image ID {base})"]
    assert told(image, ".RootFS.Layers")[: len(layers)] == layers


def test_no_setting_or_certificate_of_the_host_is_stored(image: str) -> None:
    history = "\n".join(docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", image))
    variables = "\n".join(docker("image", "inspect", "--format", "{{json .Config.Env}}", image))
    for name in ("PIP_CERT", "SSL_CERT_FILE", "HTTP_PROXY", "HTTPS_PROXY", "PIP_INDEX_URL"):
        if value := os.environ.get(name):
            assert f"{name}={value}" not in history + variables
    assert inside(image, "sh", "-c", "find /run/secrets /etc/pip.conf -type f 2>/dev/null; true") == []


def test_a_base_without_torch_is_refused_with_a_hint(image: str) -> None:
    done = invoke("build", "--base", OS_IMAGE, "--tag", "intermodal:impossible")
    assert done.returncode == 2
    assert "HINT: --base cpu --os-image IMAGE" in done.stdout + done.stderr


def test_the_hermetic_tests_pass_inside(image: str) -> None:
    done = invoke("test", "--base", "cpu", "--os-image", OS_IMAGE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
    where = "import importlib.util; print(importlib.util.find_spec('pytest'))"
    assert inside("intermodal:test", "python3", "-E", "-c", where) == ["None"], "test tools touch nothing of the base"
