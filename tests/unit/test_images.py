"""Building images, as far as it goes without Docker."""

import configparser
import subprocess
from types import SimpleNamespace

import pytest

from launch import images
from launch.images import pip_settings
from launch.runtimes import docker
from trainer.errors import UserError

LISTINGS = {
    "nothing": ("", {}),
    "an index": ("global.index-url='https://mirror/simple'", {"index-url": "https://mirror/simple"}),
    "an index from the environment": (
        ":env:.index-url='https://mirror/simple'",
        {"index-url": "https://mirror/simple"},
    ),
    "settings of install": ("install.trusted-host='mirror'", {"trusted-host": "mirror"}),
    "settings of other verbs": ("list.format='json'", {}),
    "certificates, which travel apart": ("global.cert='/etc/ca.pem'\nglobal.client-cert='/etc/me.pem'", {}),
    "a folder of this host": ("global.find-links='/opt/wheels'\nglobal.index-url='file:///opt/pypi'", {}),
    "places in many words": (
        "global.find-links='/opt/wheels https://a/wheels'",
        {"find-links": "https://a/wheels"},
    ),
    "settings that would break a build": (
        "\n".join(f"global.{name}='1'" for name in ("target", "user", "prefix", "require-virtualenv", "constraint")),
        {},
    ),
    "how to get there": (
        "global.proxy='http://proxy:3128'\nglobal.retries='9'\n:env:.default-timeout='180'",
        {"proxy": "http://proxy:3128", "retries": "9", "default-timeout": "180"},
    ),
    "the same twice": ("global.timeout='9'\n:env:.timeout='9'", {"timeout": "9"}),
    "a password with signs": (
        "global.index-url='https://me:50%25=#;@mirror'",
        {"index-url": "https://me:50%25=#;@mirror"},
    ),
    "the environment against a file": (
        ":env:.index-url='https://a'\nglobal.index-url='https://b'",
        {"index-url": "https://a"},
    ),
}


def read(text):
    """A pip.conf as pip reads it."""
    parser = configparser.RawConfigParser()
    parser.read_string(text)
    return dict(parser["global"])


@pytest.mark.parametrize(("listing", "settings"), LISTINGS.values(), ids=LISTINGS.keys())
def test_the_pip_settings_of_the_host_become_those_of_the_build(listing, settings):
    assert read(pip_settings(listing)) == settings


def test_several_indexes_stay_several():
    text = read(pip_settings(r"global.extra-index-url='https://a\nhttps://b'"))["extra-index-url"]
    assert text.split() == ["https://a", "https://b"]


def test_the_docker_program_may_be_another(monkeypatch):
    monkeypatch.setenv("DOCKER", "podman")
    assert images.docker() == "podman"
    monkeypatch.delenv("DOCKER")
    assert images.docker() == "docker"


def test_a_docker_engine_that_does_not_answer_is_a_user_error(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    for ask in (docker.connect, lambda: images.build("cpu", "intermodal:x", "debian")):
        with pytest.raises(UserError, match=r"Docker engine does not answer.* HINT: ") as caught:
            ask()
        assert "\n" not in str(caught.value)


def test_docker_without_buildx_is_refused(monkeypatch):
    answers = {"version": "29.0.1", "buildx": None}
    monkeypatch.setattr(images.shell, "output", lambda argv: answers[argv[1]])
    with pytest.raises(UserError, match=r"no buildx.* HINT: install docker-buildx"):
        images._check_buildkit()


LOCAL = "debian (image ID sha256:id)"
RECORDS = {
    "a tag": ("debian:12", ["debian@sha256:a"], "debian:12@sha256:a"),
    "no tag": ("debian", ["debian@sha256:a"], "debian@sha256:a"),
    "a tag and a digest": ("debian:12@sha256:a", ["debian@sha256:a"], "debian:12@sha256:a"),
    "a registry with a port": ("host:5000/os/debian", ["host:5000/os/debian@sha256:a"], "host:5000/os/debian@sha256:a"),
    "one of many registries": (
        "host/debian:12",
        ["debian@sha256:a", "host/debian@sha256:b"],
        "host/debian:12@sha256:b",
    ),
    "a name of this host only": ("mine:1", ["debian@sha256:a"], "debian@sha256:a"),
    "never in a registry": ("debian", [], LOCAL),
    "never in a registry, as old engines tell it": ("debian", None, LOCAL),
}


@pytest.mark.parametrize(("name", "digests", "record"), RECORDS.values(), ids=RECORDS.keys())
def test_the_record_of_a_base_finds_it_again(name, digests, record):
    attrs = {"Id": "sha256:id", "RepoDigests": digests, "RootFS": {"Layers": []}}
    assert images.describe_base(name, attrs).record == record


def engine_with(layers):
    """An engine whose every image has these layers, and the names of the images removed from it."""
    removed = []
    image = SimpleNamespace(attrs={"RootFS": {"Layers": layers}})
    return SimpleNamespace(images=SimpleNamespace(get=lambda tag: image, remove=removed.append)), removed


def test_an_image_lies_on_the_base_it_tells_of():
    base = images.Base("debian:12", "", "sha256:id", ("a", "b"))
    engine, removed = engine_with(["a", "b", "c"])
    images._check_base(engine, "mine:1", base)
    assert removed == []
    engine, removed = engine_with(["a", "x", "c"])
    with pytest.raises(UserError, match=r"debian:12 became another image .* HINT: "):
        images._check_base(engine, "mine:1", base)
    assert removed == ["mine:1"], "an image that tells of another base does not stay"


def test_the_state_of_the_checkout_is_told_or_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "ROOT", tmp_path)
    assert images.git_state() == ("", ""), "no checkout"
    for words in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "a"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    revision, dirty = images.git_state()
    assert (len(revision), dirty) == (40, "0")
    (tmp_path / "new").touch()
    assert images.git_state() == (revision, "1")
    monkeypatch.setenv("PATH", "")
    assert images.git_state() == ("", ""), "no git"


def test_a_build_uses_the_engine_that_runs_the_image(monkeypatch):
    found = {}
    monkeypatch.setenv("BUILDX_BUILDER", "far-away")
    monkeypatch.setattr(images.shell, "run", lambda argv, env: found.update(env))
    images._docker_build("containers/Dockerfile", "mine:1", {}, [])
    assert (found["BUILDX_BUILDER"], found["DOCKER_BUILDKIT"]) == ("default", "1")
