"""Containers and networks that vanish, or will not, under the eyes of the launcher: with an engine that plays them."""

import docker.errors
import pytest
import requests

from launch.job import Job
from launch.runtimes import docker as runtime
from trainer.errors import UserError


def refusal(status):
    response = requests.Response()
    response.status_code = status
    kind = docker.errors.NotFound if status == 404 else docker.errors.APIError
    return kind("refused", response, explanation=f"answer {status}")


class Thing:
    """A container or network; each call takes the next answer of its list: a value, or an exception to raise."""

    def __init__(self, **answers):
        self._answers = {name: list(told) for name, told in answers.items()}
        self.attrs = {"State": {"Status": "exited"}}

    def __getattr__(self, name):
        def call(*words, **told):
            answer = self._answers[name].pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    def left(self, name):
        return len(self._answers[name])


GONE = {
    "before its output is read": Thing(logs=[refusal(404)], wait=[refusal(404)]),
    "while it is waited for": Thing(logs=[[b"a\n"]], wait=[refusal(404)]),
    "after it was killed": Thing(logs=[[b"a\n"]], wait=[{"StatusCode": 137}], reload=[refusal(404)]),
}


@pytest.mark.parametrize("thing", GONE.values(), ids=GONE.keys())
def test_a_container_that_somebody_removed_has_failed_and_says_why(thing):
    node = runtime.Container(thing)
    list(node.chunks())
    assert (node.wait(), node.why()) == (1, " (somebody removed its container)")


def test_a_container_that_is_just_being_removed_counts_as_removed():
    thing = Thing(wait=[{"StatusCode": 137}], reload=[None])
    thing.attrs = {"State": {"Status": "removing"}}
    node = runtime.Container(thing)
    assert (node.wait(), node.why()) == (1, " (somebody removed its container)")


def test_a_container_that_ended_tells_its_own_code():
    thing = Thing(wait=[{"StatusCode": 137}], reload=[None])
    thing.attrs = {"State": {"Status": "exited", "OOMKilled": True}}
    node = runtime.Container(thing)
    assert (node.wait(), node.why()) == (137, " (out of memory: raise --memory-gb)")


@pytest.mark.parametrize("status", [404, 409])
def test_a_container_that_is_gone_can_be_stopped_killed_and_removed(status):
    node = runtime.Container(Thing(kill=[refusal(status)] * 2, remove=[refusal(404)]))
    node.stop()
    node.kill()
    node.remove()


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """Clean up a run of which these are left."""

    def clean(containers, networks):
        client = type("Client", (), {"containers": Thing(list=[containers]), "networks": Thing(list=[networks])})
        monkeypatch.setattr(runtime, "connect", lambda: client)
        runtime.clean(Job(command=("train",), runtime="docker", name="run", runs_dir=str(tmp_path)))

    return clean


BUSY = {
    "vanished in between": [refusal(404)],
    "being removed by somebody else": [refusal(409), refusal(404)],
    "a network whose containers are still being taken off": [refusal(403), refusal(403), None],
}


@pytest.mark.parametrize("answers", BUSY.values(), ids=BUSY.keys())
def test_cleaning_has_patience(answers, engine):
    things = Thing(remove=answers), Thing(remove=answers)
    engine(*([thing] for thing in things))
    assert [thing.left("remove") for thing in things] == [0, 0]


def test_a_network_that_stays_in_use_is_named(engine, monkeypatch):
    monkeypatch.setattr(runtime, "REMOVE_GRACE_S", 0)
    with pytest.raises(UserError, match=r"answer 403\. HINT: invoke cancel docker://run.*network intermodal-run$"):
        engine([], [Thing(remove=[refusal(403)] * 2)])


def test_a_missing_engine_is_one_line_that_names_docker_host(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    with pytest.raises(UserError, match=r"^The Docker engine does not answer [^\n]+ HINT: [^\n]*DOCKER_HOST[^\n]*$"):
        runtime.connect()


def folders(tmp_path, **values):
    told = {"command": ("train",), "name": "run", "runs_dir": f"{tmp_path}/runs", "data_dir": f"{tmp_path}/data"}
    runtime._check_folders(Job(**told | values))


def test_a_mistyped_data_folder_is_refused_and_a_missing_default_is_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders(tmp_path)
    (tmp_path / "file").touch()
    for name in ("dta", "file"):
        with pytest.raises(UserError, match=rf"--data-dir {tmp_path}/{name} is no folder\. HINT: "):
            folders(tmp_path, data_dir=f"{tmp_path}/{name}")
