"""Building images, as far as it goes without Docker."""

import configparser

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
