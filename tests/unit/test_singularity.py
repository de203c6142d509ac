"""A SIF on this host: what is refused, what gets inside, and what is left."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from launch.job import Job, Mount
from launch.runtimes import local, singularity
from trainer import contract
from trainer.errors import UserError

from .cluster import make_sif


@pytest.fixture
def host(cluster, monkeypatch):
    """A host that has Apptainer and no GPU, and the cluster's folder as its temporary one."""
    monkeypatch.setenv("PATH", str(cluster.bin))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("API_TOKEN", "evil")
    monkeypatch.setenv("http_proxy", "evil")
    (cluster.home / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(cluster.home / "tmp"))
    return cluster


def job(host, **values):
    told = {"command": ("train",), "name": "run", "runs_dir": f"{host.home}/runs", "data_dir": f"{host.home}/data"}
    return Job(runtime="singularity", **told | {"image": f"{host.home}/i.sif"} | values)


def refused(given):
    with pytest.raises(UserError) as caught:
        singularity.prepare(given)
    message, _, hint = str(caught.value).partition(" HINT: ")
    assert hint
    return message


def test_a_prepared_job_knows_its_image_its_port_and_its_gpus(host, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    prepared = singularity.prepare(job(host, nodes=2, name=None))
    assert (prepared.image, prepared.image_id, len(prepared.sif_sha256)) == (f"{host.home}/i.sif", "sha256:1", 64)
    assert prepared.gpus == (("GPU-a",), ("GPU-b",))
    assert 20000 <= prepared.master_port < 30000
    assert prepared.run_id


REFUSED = {
    "--partition": {"partition": "gpu"},
    "--sbatch": {"sbatch": ("--exclusive",)},
    "--data-stage": {"data_stage": True},
    "--max-restarts": {"max_restarts": 0},
    "--gres": {"gres": "gpu:1"},
    "--memory-gb": {"memory_gb": 1.0},
}


@pytest.mark.parametrize("flag", REFUSED)
def test_what_only_slurm_can_do_is_refused_here(flag, host):
    assert refused(job(host, **REFUSED[flag])) == f"{flag} needs Slurm, and this run is on this host."


def test_a_host_without_a_program_for_containers_is_told_so(host):
    (host.bin / "apptainer").unlink()
    assert "neither apptainer nor singularity" in refused(job(host))


def test_a_missing_image_more_cpus_or_more_memory_than_there_is_are_refused(host):
    assert f"no SIF {host.home}/none.sif" in refused(job(host, image=f"{host.home}/none.sif"))
    assert "CPUs each" in refused(job(host, cpus=99999.0))
    assert "--shm-gb 99999" in refused(job(host, shm_gb=99999.0))


def test_a_mount_that_is_not_there_and_a_mistyped_data_folder_are_refused(host):
    assert "--mount /nowhere" in refused(job(host, mount=(Mount("/nowhere", "/x"),)))
    assert "--data-dir /nowhere" in refused(job(host, data_dir="/nowhere"))


def executed(host, **values):
    """What Apptainer was told by the script of a plan, which bash runs."""
    plan = singularity.plan(singularity.prepare(job(host, **values)))
    subprocess.run(["bash", "-c", plan.script()], check=True, env={**os.environ, "EVIL": "evil"})
    return [host.told(node) for node in range(plan.job.nodes)]


def test_a_hostile_value_arrives_inside_by_the_script_that_a_dry_run_prints(hostile, host):
    (told,) = executed(host, command=("train", hostile, "--x"), env=(("KEY", hostile),))
    assert told["inside"]["KEY"] == hostile
    assert told["argv"][-5:] == [f"{host.home}/i.sif", "trainer", "train", hostile, "--x"]
    assert "evil" not in json.dumps(told)


def test_hostile_names_arrive(hostile, host):
    if "\n" in hostile:
        with pytest.raises(UserError, match=r"newline\. HINT: rename"):
            singularity.prepare(job(host, image=str(make_sif(host.home / f"{hostile}.sif"))))
        return
    place = host.home / f"at {hostile}"
    for name in ("in", "data"):
        (place / name).mkdir(parents=True)
    image = str(make_sif(place / f"{hostile}.sif"))
    (told,) = executed(
        host,
        image=image,
        runs_dir=f"{place}/runs",
        data_dir=f"{place}/data",
        mount=(Mount(f"{place}/in", f"/mnt/{hostile}x", read_only=True),),
    )
    mounts = {mount["destination"]: mount for mount in told["mounts"]}
    assert mounts["/runs/run"]["source"] == f"{place}/runs/run"
    assert mounts["/data"]["source"] == f"{place}/data"
    assert mounts[f"/mnt/{hostile}x"]["source"] == f"{place}/in"
    assert all(("ro" in mounts[target]) is (target in ("/data", f"/mnt/{hostile}x")) for target in mounts)
    assert image in told["argv"]


def test_nothing_of_this_host_gets_inside_but_what_is_named(host):
    for told in executed(host, nodes=2):
        assert {"--cleanenv", "--no-home", f"--home={contract.HOME_DIR}"} <= set(told["argv"])
        assert told["host"].keys() <= {*singularity.HOST_VARIABLES, "PWD", "SHLVL", "_"}
        mounts = {mount["destination"]: mount["holds"] for mount in told["mounts"]}
        assert (mounts[contract.HOME_DIR], mounts["/tmp"]) == ([], [])
        assert told["cwd"] == "/"
    assert os.listdir(host.home / "tmp") == []


def test_each_node_has_the_driver_and_gpus_of_its_own_or_none(host, monkeypatch):
    for told in executed(host):
        assert "--nv" not in told["argv"]
        assert not told["inside"].get("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    told = executed(host, nodes=2)
    assert ["--nv" in node["argv"] for node in told] == [True, True]
    assert [node["inside"]["CUDA_VISIBLE_DEVICES"] for node in told] == ["3", "5"]


def test_singularity_has_its_variables_by_another_name(host):
    (host.bin / "apptainer").rename(host.bin / "singularity")
    (told,) = executed(host, env=(("KEY", "a,b"),))
    assert told["inside"]["KEY"] == "a,b"


def test_nodes_that_are_started_are_those_of_the_plan_and_leave_nothing(host):
    plan = singularity.plan(singularity.prepare(job(host, nodes=2)))
    Path(plan.job.runs_dir, "run").mkdir(parents=True)
    nodes = singularity.start(plan)
    try:
        assert [(b"".join(node.chunks()), node.wait()) for node in nodes] == [(b"", 0), (b"", 0)]
    finally:
        for node in nodes:
            node.remove()
    for node in plan.nodes:
        told = host.told(node.index)
        assert told["argv"] == list(node.argv[1:])
        assert told["inside"]["TRAINER_PROGRESS"] == "lines"
        assert told["cwd"] == "/"
    for _ in range(2):
        singularity.clean(plan.job)
    assert os.listdir(host.home / "tmp") == []


def test_a_home_that_somebody_else_made_is_not_used(host, monkeypatch):
    plan = singularity.plan(singularity.prepare(job(host)))
    Path(plan.job.runs_dir, "run").mkdir(parents=True)
    singularity.scratch(plan.job, 0).mkdir()
    stat = Path.stat
    owner = os.getuid() + 1
    faked = os.stat_result(owner if index == 4 else value for index, value in enumerate(stat(host.home)))
    monkeypatch.setattr(Path, "stat", lambda path, **how: faked if "intermodal-" in path.name else stat(path, **how))
    with pytest.raises(UserError, match=r"belongs to another user\. HINT: "):
        singularity.start(plan)


def test_a_command_inside_a_sif_is_as_clean_as_a_run_and_ends_with_its_code(host):
    trainer = 'echo "$0"; exit 7'
    host.program("apptainer", f"#!{sys.executable} -IS\n{ENTERED}")
    (host.home / "trainer").write_text(trainer)
    assert singularity.enter(f"{host.home}/i.sif", ["make", "test"]) == 7
    told = json.loads((host.home / "entered").read_text())
    assert told["argv"][-3:] == [f"{host.home}/i.sif", "make", "test"]
    assert {"--cleanenv", "--no-home"} <= set(told["argv"])
    assert "evil" not in json.dumps(told)
    assert os.listdir(host.home / "tmp") == []
    with pytest.raises(UserError, match=r"no SIF .*none\.sif"):
        singularity.enter(f"{host.home}/none.sif", ["bash"])


ENTERED = """
import json, os, sys
from pathlib import Path
told = {"argv": sys.argv[1:], "env": dict(os.environ)}
(Path(__file__).parent.parent / "entered").write_text(json.dumps(told))
sys.exit(7)
"""


def test_a_port_that_is_taken_is_refused(host, monkeypatch):
    monkeypatch.setattr(local, "_is_free", lambda port: False)
    assert "Port 4321 is in use" in refused(job(host, master_port=4321))
