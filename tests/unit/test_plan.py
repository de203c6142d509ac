"""What will be run, as data and as a script that a person can read and bash can execute."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from launch.job import Job, Mount
from launch.job import name as job_name
from launch.plan import NodePlan, Plan, new_run_id, node_environment
from launch.runtimes import docker, local, singularity
from trainer import contract
from trainer.topology import resolve

GOLDEN = Path(__file__).parents[1] / "golden"
IMAGE_ID = "sha256:" + "0123456789abcdef" * 4
COMMAND = ("train", "--workload", "mnist", "--dataset", "digits")
RUNTIMES = {"local": local, "docker": docker, "singularity": singularity}


@pytest.fixture
def host(monkeypatch, tmp_path):
    """A host with nothing in its environment, standing in a folder of its own."""
    kept = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/home/someone", "NCCL_DEBUG": "WARN", "API_TOKEN": "hush"}
    for name in set(os.environ) - kept.keys() - {"PYTEST_CURRENT_TEST"}:
        monkeypatch.delenv(name)
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "executable", "/opt/venv/bin/python3")
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    monkeypatch.setattr(singularity, "program", lambda: "/usr/bin/apptainer")
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepared(folder, runtime="local", **values):
    """A job as prepare() leaves it."""
    nodes = values.get("nodes", 1)
    told = {
        "command": COMMAND,
        "name": "golden",
        "runs_dir": f"{folder}/runs",
        "data_dir": f"{folder}/data",
        "gpus": ((),) * nodes,
        "master_port": 29500,
    }
    if runtime == "docker":
        told |= {"image": "intermodal:latest", "image_id": IMAGE_ID, "user": "1000:1000"}
    if runtime == "singularity":
        told |= {"image": f"{folder}/intermodal.sif", "image_id": IMAGE_ID, "sif_sha256": "89ab" * 16}
    return Job(runtime=runtime, **told | values)


def everything(folder):
    return {
        "nodes": 2,
        "nproc_per_node": 2,
        "command": ("train", "--config", "it's $HOME"),
        "env": (("GREETING", 'say "hello"'), ("NCCL_DEBUG", "INFO")),
        "mount": (Mount(f"{folder}/in put", "/mnt/in", read_only=True), Mount(f"{folder}/out", "/mnt/out")),
        "gpus": (("GPU-0", "GPU-1"), ("GPU-2", "GPU-3")),
        "cpus": 1.5,
        "memory_gb": 4.0,
        "shm_gb": 0.5,
    }


CASES = {
    "local": ("local", lambda folder: {}),
    "local-two-nodes": (
        "local",
        lambda folder: {
            "nodes": 2,
            "nproc_per_node": 2,
            "env": (("GREETING", "it's $HOME"),),
            "gpus": (("0",), ("1",)),
        },
    ),
    "docker": ("docker", lambda folder: {}),
    "docker-everything": ("docker", everything),
    "singularity": ("singularity", lambda folder: {}),
    "singularity-everything": ("singularity", everything),
}


def inside(node):
    """The variables that a node has inside its container, if it is one."""
    prefix = "APPTAINERENV_"
    prefixed = any(name.startswith(prefix) for name in node.env)
    return {name.removeprefix(prefix): node.env[name] for name in node.env if name.startswith(prefix * prefixed)}


@pytest.mark.parametrize("name", CASES)
def test_the_script_is_the_one_on_file(name, host):
    runtime, values = CASES[name]
    script = RUNTIMES[runtime].plan(prepared(host, runtime, **values(host))).script()
    path = GOLDEN / f"{name}.sh"
    script = script.replace(str(host), "/srv").replace(f"/tmp/intermodal-{os.getuid()}-", "/tmp/intermodal-1000-")
    assert script + "\n" == path.read_text()


def test_every_script_on_file_belongs_to_a_test_and_bash_can_read_it():
    assert {path.name for path in GOLDEN.glob("*.sh")} == {f"{name}.sh" for name in CASES}
    for path in GOLDEN.glob("*.sh"):
        subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_plan_is_pure(runtime, host):
    job = prepared(host, runtime, **everything(host))
    before = sorted(host.rglob("*"))
    assert RUNTIMES[runtime].plan(job) == RUNTIMES[runtime].plan(job)
    assert sorted(host.rglob("*")) == before


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_every_node_of_a_plan_resolves_to_its_place(runtime, host):
    plan = RUNTIMES[runtime].plan(prepared(host, runtime, nodes=3, nproc_per_node=2))
    places = [resolve(inside(node)) for node in plan.nodes]
    assert [place.node_rank for place in places] == [0, 1, 2]
    assert {(place.nnodes, place.nproc_per_node, place.rank) for place in places} == {(3, 2, None)}
    assert len({(place.master_addr, place.master_port) for place in places}) == 1


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_only_what_is_allowed_or_asked_for_crosses(runtime, host):
    plan = RUNTIMES[runtime].plan(prepared(host, runtime, env=(("ASKED", "for"),)))
    assert "hush" not in plan.script()
    (node,) = plan.nodes
    assert (inside(node)["NCCL_DEBUG"], inside(node)["ASKED"]) == ("WARN", "for")
    ours = {name for name in inside(node) if name.startswith(("TRAINER_", "PET_"))}
    assert ours - contract.TABLE.keys() == {"TRAINER_RUN_ID", "TRAINER_RUNS_DIR", "TRAINER_DATA_DIR"}


def test_numbers_of_gpus_mean_to_a_process_what_they_mean_here(host, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    (node,) = local.plan(prepared(host, gpus=(("1",),))).nodes
    assert (node.env["CUDA_VISIBLE_DEVICES"], node.env["CUDA_DEVICE_ORDER"]) == ("1", "PCI_BUS_ID")


def test_what_the_user_gives_wins_over_what_the_launcher_would_set():
    job = Job(command=COMMAND, name="a", env=(("NCCL_DEBUG", "INFO"), ("OMP_NUM_THREADS", "4")))
    env = node_environment(job, 0, "head", 1, {"NCCL_DEBUG": "WARN"})
    assert (env["NCCL_DEBUG"], env["OMP_NUM_THREADS"]) == ("INFO", "4")


HARDENING = [
    "--init",
    "--read-only",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
    "--user",
    "--tmpfs=/tmp:rw,exec,nosuid,mode=1777",
    "--shm-size=1073741824",
]


@pytest.mark.parametrize("flag", HARDENING)
def test_a_container_is_confined(flag, host):
    words = shlex.split(docker.plan(prepared(host, "docker")).nodes[0].line)
    assert flag in words[: words.index(IMAGE_ID)]


def test_a_container_runs_the_image_by_its_id_and_never_as_root(host):
    words = shlex.split(docker.plan(prepared(host, "docker")).nodes[0].line)
    assert words[:3] == ["docker", "run", "--rm"]
    assert words[words.index("--user") + 1] == "1000:1000"
    assert words[words.index(IMAGE_ID) :] == [IMAGE_ID, "trainer", *COMMAND]
    assert not {"--privileged", "--network=host", "--pid=host", "--ipc=host"} & set(words)


def test_data_is_mounted_only_if_it_is_there_and_never_to_be_written(host):
    line = f"--mount=type=bind,source={host}/data,target=/data,readonly"
    assert line in shlex.split(docker.plan(prepared(host, "docker")).nodes[0].line)
    (host / "data").rmdir()
    assert "target=/data" not in docker.plan(prepared(host, "docker")).nodes[0].line


class Engine:
    """A Docker engine that takes down what it is told."""

    def __init__(self):
        self.created = []
        self.containers = self.networks = self

    def create(self, *name, **told):
        if not name:
            self.created.append(told)
        return self

    def start(self):
        pass


def test_docker_is_told_what_the_printed_line_says(host, monkeypatch):
    engine = Engine()
    monkeypatch.setattr(docker, "connect", lambda: engine)
    monkeypatch.setattr(docker.os, "chown", lambda *told, **more: None)
    mounts = (Mount("in put", "/mnt/in", read_only=True), Mount(str(host), "/mnt/out"))
    plan = docker.plan(prepared(host, "docker", **everything(host) | {"mount": mounts}))
    docker.start(plan)
    for node, told in zip(plan.nodes, engine.created, strict=True):
        words = shlex.split(node.line)
        assert told["environment"].items() >= node.env.items()
        assert [told["image"], *told["command"]] == words[words.index(IMAGE_ID) :]
        for mount in told["mounts"]:
            flag = f"--mount=type=bind,source={mount['Source']},target={mount['Target']}"
            assert flag + (",readonly" if mount["ReadOnly"] else "") in words
        assert told["device_requests"][0]["DeviceIDs"] == list(plan.job.gpus[node.index])
        assert f"--memory={told['mem_limit']}" in words
        assert (told["init"], told["read_only"], told["cap_drop"]) == (True, True, ["ALL"])


SPY = """#!/bin/bash
printf '%s\\0' "$@"
printf '%s\\0' "KEY=$KEY"
"""


def executed(script, folder, program):
    """Run a script whose program is replaced by one that prints its words and the variable KEY."""
    (folder / "bin").mkdir()
    spy = folder / "bin" / program
    spy.write_text(SPY)
    spy.chmod(0o755)
    path = f"{folder}/bin:/usr/local/bin:/usr/bin:/bin"
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True, env={"PATH": path})
    return done.stdout.decode().split("\0")[:-1]


def test_a_hostile_value_survives_the_script_of_plain_processes(hostile, host, monkeypatch):
    monkeypatch.setattr(sys, "executable", f"{host}/bin/python3")
    plan = local.plan(prepared(host, command=("train", hostile, "--x"), env=(("KEY", hostile),)))
    assert executed(plan.script(), host, "trainer") == ["train", hostile, "--x", f"KEY={hostile}"]


def test_a_hostile_value_survives_the_script_of_docker(hostile, host):
    plan = docker.plan(prepared(host, "docker", command=("train", hostile, "--x"), env=(("KEY", hostile),)))
    (line,) = (node.line for node in plan.nodes)
    words = executed(line, host, "docker")[:-1]
    assert f"--env=KEY={hostile}" in words
    assert words[words.index(IMAGE_ID) :] == [IMAGE_ID, "trainer", "train", hostile, "--x"]


@pytest.mark.parametrize(
    ("codes", "result"),
    [((0, 0), 0), ((3, 0), 3), ((0, 75), 75)],
    ids=["all nodes end well", "the first fails", "the last asks for a restart"],
)
def test_the_script_ends_as_the_run_does(codes, result):
    nodes = tuple(NodePlan(index, (), {}, f"sh -c 'exit {code}'") for index, code in enumerate(codes))
    plan = Plan(Job(command=COMMAND, name="a"), nodes, before=("echo before",), after=("echo after",))
    done = subprocess.run(["bash", "-c", plan.script()], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (result, "before\nafter\n")


NAMED = {
    "mnist": COMMAND,
    "report": ("report", "/runs/a"),
    "my-own-net": ("train", "--workload", "My Own/Net!"),
    "run": ("train", "--workload", "!"),
}


@pytest.mark.parametrize("label", NAMED)
def test_a_run_is_named_after_its_time_and_workload(label):
    assert re.fullmatch(rf"\d{{8}}-\d{{6}}-{label}-[0-9a-f]{{4}}", new_run_id(NAMED[label]))


@pytest.mark.parametrize("workload", ["größe", "数字", "x" * 99, "-", ""])
def test_the_name_of_a_run_is_one_that_could_have_been_given(workload):
    assert job_name(new_run_id(("train", "--workload", workload)))
