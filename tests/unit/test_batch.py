"""The batch script, executed by bash on a cluster of little programs: what arrives inside, and what does not."""

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.job import Mount
from launch.runtimes import slurm
from launch.runtimes.singularity import HOST_VARIABLES
from trainer import config, contract
from trainer.errors import UserError
from trainer.topology import resolve

from .cluster import hostile_environment, make_sif

# What no path in a batch script may hold: a newline anywhere, and in the run's folder, which sbatch reads, more.
NOWHERE, NOT_IN_A_DIRECTIVE = set("\n"), set('"\\\n')


@pytest.fixture
def prepare(cluster, monkeypatch):
    """A job that slurm.prepare() has seen, on a cluster whose nodes share every disk."""
    cluster.program("sbatch", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(cluster.bin))
    monkeypatch.setattr(slurm, "_LOCAL_DISKS", ())
    return lambda **values: slurm.prepare(cluster.job(**values))


def given_to(told):
    """The command inside, and the container's file."""
    words = told["argv"]
    index = next(index for index, word in enumerate(words) if index > 1 and not word.startswith("--"))
    return words[index], words[index + 1 :]


def sources(told):
    return {mount["destination"]: mount["source"] for mount in told["mounts"]}


def test_a_hostile_value_and_argument_arrive_unchanged_on_every_node(hostile, cluster):
    job = cluster.job(nodes=2, command=("train", hostile, "--x"), env=(("KEY", hostile),))
    assert cluster.run(job) == 0, cluster.log()
    for node in (0, 1):
        told = cluster.told(node)
        assert told["inside"]["KEY"] == hostile
        assert given_to(told) == (job.image, ["trainer", "train", hostile, "--x"])


def test_hostile_names_of_what_goes_inside_arrive_or_are_refused_before_anything_is_submitted(
    hostile, cluster, prepare
):
    place = cluster.home / f"at {hostile}"
    (place / "in").mkdir(parents=True)
    (place / "data").mkdir()
    image = str(make_sif(place / f"{hostile}.sif"))
    mounts = (Mount(f"{place}/in", f"/mnt/{hostile}x"),)
    try:
        job = prepare(image=image, data_dir=f"{place}/data", mount=mounts)
    except UserError:
        assert set(hostile) & NOWHERE
        return
    assert not set(hostile) & NOWHERE
    assert cluster.run(job) == 0, cluster.log()
    told = cluster.told()
    assert given_to(told)[0] == told["inside"]["TRAINER_IMAGE"] == image
    assert sources(told)["/data"] == f"{place}/data"
    assert sources(told)[f"/mnt/{hostile}x"] == f"{place}/in"


def test_a_hostile_name_of_the_runs_folder_arrives_or_is_refused_before_anything_is_submitted(
    hostile, cluster, prepare
):
    place = cluster.home / f"at {hostile}"
    try:
        job = prepare(runs_dir=str(place))
    except UserError:
        assert set(hostile) & NOT_IN_A_DIRECTIVE
        return
    assert not set(hostile) & NOT_IN_A_DIRECTIVE
    assert cluster.run(job) == 0, (place / "run" / "slurm-42.out").read_text()
    assert sources(cluster.told())["/runs/run"] == f"{place}/run"
    assert (place / "run" / "attempt-0.log").is_file()


VALUE = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"])
    | st.sampled_from(" '\"$`\\,\n\t*?~#!&|;<>(){}[]-=%@"),
    max_size=12,
)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(VALUE, min_size=5, max_size=20), st.lists(VALUE, max_size=10))
def test_whatever_is_given_arrives(cluster, values, arguments):
    pairs = tuple((f"KEY_{number}", value) for number, value in enumerate(values))
    assert cluster.run(cluster.job(env=pairs, command=("train", *arguments))) == 0, cluster.log()
    told = cluster.told()
    assert told["inside"].items() >= dict(pairs).items()
    assert given_to(told)[1] == ["trainer", "train", *arguments]


def test_nothing_of_the_users_shell_gets_inside_or_changes_the_script(cluster):
    assert cluster.run(cluster.job(), **hostile_environment(cluster.home)) == 0, cluster.log()
    told = cluster.told()
    assert "evil" not in json.dumps(told).lower()
    assert told["host"].keys() <= {*HOST_VARIABLES, "SHLVL"}
    assert "CUDA_VISIBLE_DEVICES" not in told["inside"]
    assert told["cwd"] == "/"
    assert not (cluster.home / "read").exists()
    assert "ld.so" not in cluster.log()
    assert cluster.requeued == []


def test_no_name_is_strange_enough_to_get_inside(cluster):
    assert cluster.run(cluster.job(), **{"APPTAINERENV_EVIL.DOT": "1", "SINGULARITYENV_EVIL.DOT": "1"}) == 0
    assert not {name for name in cluster.told()["inside"] if "EVIL" in name}


@pytest.mark.parametrize("line", ["PATH=x", "APPTAINERENV_OTHER=x", "PET_NNODES=x", "TRAINER_RUN_ID=x", "=", "-i", ""])
def test_a_line_of_a_value_that_looks_like_a_variable_is_none(line, cluster):
    value = f"first\n{line}\nlast"
    assert cluster.run(cluster.job(env=(("KEY", value), ("OTHER", "other")))) == 0, cluster.log()
    inside = cluster.told()["inside"]
    assert (inside["KEY"], inside["OTHER"], inside["PET_NNODES"], inside["TRAINER_RUN_ID"]) == (
        value,
        "other",
        "1",
        "run",
    )
    assert cluster.told()["host"]["PATH"] == str(cluster.bin)


def test_no_value_stands_where_other_users_of_a_node_can_read_it(cluster):
    assert cluster.run(cluster.job(env=(("TOKEN", "hush"),))) == 0
    assert cluster.told()["inside"]["TOKEN"] == "hush"
    assert "hush" not in json.dumps(cluster.told()["argv"]) + (cluster.home / "srun-words").read_text() + cluster.log()


def test_the_head_is_the_first_node_in_slurms_list_whatever_number_srun_gives_it(cluster):
    cluster.program("scontrol", "#!/bin/sh\necho c2; echo c1\n")
    assert cluster.run(cluster.job(nodes=2)) == 0, cluster.log()
    for rank, node in enumerate(("c2", "c1")):
        told = cluster.told(rank)
        assert told["inside"]["PET_MASTER_ADDR"] == "c2"
        assert f"/disk/{node}/" in sources(told)["/tmp"]


def test_a_shell_that_the_user_made_posixly_correct_changes_nothing(cluster):
    cluster.trainer("exit 3")
    assert cluster.run(cluster.job(), POSIXLY_CORRECT="1") == 3, cluster.log()


def test_without_gpus_there_is_no_driver_inside_and_with_them_those_that_slurm_gave(cluster):
    for count, gpus in ((None, None), (0, None), (2, "3,5")):
        assert cluster.run(cluster.job(gpus_per_node=count), CUDA_VISIBLE_DEVICES="3,5") == 0
        told = cluster.told()
        assert told["inside"].get("CUDA_VISIBLE_DEVICES") == gpus
        assert ("--nv" in told["argv"]) is (gpus is not None)


def test_a_node_that_was_given_no_gpu_sees_none(cluster):
    assert cluster.run(cluster.job(gpus_per_node=1)) == 0
    assert cluster.told()["inside"]["CUDA_VISIBLE_DEVICES"] == ""


def test_the_trainer_knows_every_name_that_it_is_given_and_finds_its_place(cluster):
    assert cluster.run(cluster.job(nodes=2, nproc_per_node=3), attempt=1) == 0
    places = []
    for node in (0, 1):
        inside = cluster.told(node, attempt=1)["inside"]
        config.read_environment(inside)
        places.append(resolve(inside))
    assert [place.node_rank for place in places] == [0, 1]
    assert {(place.nnodes, place.nproc_per_node, place.rank) for place in places} == {(2, 3, None)}
    assert {place.master_addr for place in places} == {"c1"}


def test_the_node_knows_its_job_image_and_attempt(cluster):
    assert cluster.run(cluster.job()) == 0
    inside = cluster.told()["inside"]
    assert (inside["TRAINER_JOB_ID"], inside["TRAINER_ATTEMPT"], inside["TRAINER_RUNTIME"]) == ("42", "0", "slurm")
    assert (inside["TRAINER_IMAGE_ID"], inside["TRAINER_SIF_SHA256"]) == ("sha256:1", "2")
    assert "TRAINER_RESUME" not in inside


def test_what_the_user_says_of_the_head_wins_over_what_the_node_knows(cluster):
    env = (("PET_MASTER_ADDR", "ib-c1"), ("PET_MASTER_PORT", "4242"))
    assert cluster.run(cluster.job(env=env)) == 0
    inside = cluster.told()["inside"]
    assert (inside["PET_MASTER_ADDR"], inside["PET_MASTER_PORT"]) == ("ib-c1", "4242")


def test_jobs_and_attempts_that_share_a_node_have_ports_of_their_own(cluster):
    ports = set()
    for job, attempt in (("42", 0), ("42", 1), ("44", 0), ("99999999", 0)):
        assert cluster.run(cluster.job(), attempt=attempt, SLURM_JOB_ID=job) == 0
        ports.add(int(cluster.told(attempt=attempt)["inside"]["PET_MASTER_PORT"]))
    assert len(ports) == 4
    assert all(20000 <= port < 30000 for port in ports)
    assert cluster.run(cluster.job(master_port=4321)) == 0
    assert cluster.told()["inside"]["PET_MASTER_PORT"] == "4321"


def test_home_and_tmp_are_empty_folders_of_the_node_that_are_gone_afterwards(cluster):
    cluster.trainer("exit 1")
    assert cluster.run(cluster.job(nodes=2)) == 1
    homes = set()
    for node in (0, 1):
        mounts = {mount["destination"]: mount for mount in cluster.told(node)["mounts"]}
        for place in (contract.HOME_DIR, "/tmp"):
            assert mounts[place]["holds"] == []
            assert mounts[place]["source"].startswith(f"{cluster.home}/disk/")
        homes.add(mounts[contract.HOME_DIR]["source"])
    assert len(homes) == 2
    assert cluster.on_disk() == []


def test_data_are_read_where_they_are_or_from_a_copy_on_the_nodes_own_disk(cluster):
    for staged in (False, True):
        assert cluster.run(cluster.job(data_stage=staged)) == 0
        (data,) = (mount for mount in cluster.told()["mounts"] if mount["destination"] == "/data")
        assert (data["holds"], "ro" in data) == (["digits"], True)
        assert data["source"].startswith(f"{cluster.home}/disk/") is staged
    assert "data sets are on" in cluster.log()
    assert cluster.on_disk() == []


def test_a_link_among_the_data_is_copied_as_what_it_leads_to(cluster):
    (cluster.home / "elsewhere").write_text("content")
    (cluster.home / "data" / "link").symlink_to("../elsewhere")
    cluster.trainer('cat "$DATA/link"')
    assert cluster.run(cluster.job(data_stage=True)) == 0, cluster.log()
    assert "content" in cluster.log()


def test_where_there_are_no_data_sets_none_are_mounted(cluster):
    assert cluster.run(cluster.job(data_dir="/nowhere")) == 0
    assert "/data" not in sources(cluster.told())


def test_singularity_is_as_good_as_apptainer(cluster):
    (cluster.bin / "apptainer").rename(cluster.bin / "singularity")
    assert cluster.run(cluster.job(env=(("KEY", "a,b"),))) == 0
    assert cluster.told()["inside"]["KEY"] == "a,b"


def without_a_program(cluster):
    (cluster.bin / "apptainer").unlink()


def without_the_sif(cluster):
    (cluster.home / "i.sif").unlink()


def without_a_mount(cluster):
    (cluster.home / "in").rmdir()


def with_a_full_disk(cluster):
    cluster.program("cp", "#!/bin/sh\necho no space left >&2; exit 1\n")


UNFIT = {
    "no container program": (without_a_program, {}, "neither apptainer nor singularity"),
    "no such file there": (without_the_sif, {}, "cannot see .*/i.sif"),
    "too little shared memory": (lambda cluster: None, {"shm_gb": 999999}, "/dev/shm has less than 999999 GB"),
    "a mount that is not there": (without_a_mount, {"mount": "in"}, "cannot see .*/in"),
    "no room for the data": (with_a_full_disk, {"data_stage": True}, "cannot be copied"),
}


def test_a_node_that_does_not_see_the_runs_folder_says_so_to_slurm_and_is_not_tried_again(cluster):
    cluster.nodes_see_the_runs = False
    folder = cluster.home / "runs" / "run"
    assert cluster.run(cluster.job()) == 2
    assert re.fullmatch(rf"error: .* cannot see {folder}\. HINT: .*\n", (folder / "slurm-42.out").read_text())
    assert cluster.requeued == []


@pytest.mark.parametrize(("spoil", "values", "error"), UNFIT.values(), ids=UNFIT.keys())
def test_a_node_that_cannot_run_it_says_so_in_a_line_and_is_not_tried_again(spoil, values, error, cluster):
    (cluster.home / "in").mkdir()
    mounts = (Mount(f"{cluster.home}/{values['mount']}", "/mnt/in"),) if "mount" in values else ()
    job = cluster.job(**values | {"mount": mounts})
    spoil(cluster)
    assert cluster.run(job) == 2
    (line,) = (line for line in cluster.log().splitlines() if "error: " in line)
    assert re.search(rf"error: .*{error}.* HINT: ", line)
    assert cluster.requeued == []
    assert cluster.on_disk() == []
