"""From flags to a job: every bad text is one line, and a job survives being written down."""

import dataclasses
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import job as jobs
from launch.job import Job, Mount, from_flags, trainer_command, variable
from trainer.errors import UserError


def given_flags(layout=None, arguments=("--workload", "mnist"), **flags):
    return from_flags("slurm", flags, layout, arguments)


def refused(**flags):
    with pytest.raises(UserError) as caught:
        given_flags(**flags)
    assert re.fullmatch(r"[^\n]+ HINT: [^\n]+", str(caught.value))
    return str(caught.value)


GOOD = {
    "nodes": ("3", 3),
    "nproc_per_node": ("4", 4),
    "image": ("registry:5000/team/intermodal:v1@sha256:00ff", "registry:5000/team/intermodal:v1@sha256:00ff"),
    "env": (["A=b=c", "EMPTY="], (("A", "b=c"), ("EMPTY", ""))),
    "mount": (["/a:/b", "/c d:/e:ro"], (Mount("/a", "/b"), Mount("/c d", "/e", read_only=True))),
    "cpus": ("1.5", 1.5),
    "memory_gb": ("2", 2.0),
    "gpus_per_node": ("0", 0),
    "shm_gb": ("0.25", 0.25),
    "time_limit_min": ("0.5", 0.5),
    "name": ("run-1", "run-1"),
    "runs_dir": ("/results", "/results"),
    "data_dir": ("/sets", "/sets"),
    "master_port": ("29500", 29500),
    "partition": ("gpu,long", "gpu,long"),
    "account": ("research", "research"),
    "qos": ("normal", "normal"),
    "constraint": ("[rack1*2&rack2*4]|(a100&ib)", "[rack1*2&rack2*4]|(a100&ib)"),
    "exclude": ("c1,c[3-4]", "c1,c[3-4]"),
    "reservation": ("course", "course"),
    "gres": ("gpu:a100:2,nvme:1", "gpu:a100:2,nvme:1"),
    "sbatch": (["--comment=it's a b", "--exclusive"], ("--comment=it's a b", "--exclusive")),
    "data_stage": (True, True),
    "signal_s": ("300", 300),
    "max_restarts": ("0", 0),
}


@pytest.mark.parametrize(("key", "text", "value"), [(key, *pair) for key, pair in GOOD.items()], ids=GOOD.keys())
def test_a_flag_becomes_a_value(key, text, value):
    assert getattr(given_flags(**{key: text}), key) == value


def test_every_flag_has_a_help_and_is_tested_here():
    assert jobs.flags().keys() == GOOD.keys()
    assert all(len(field.metadata["help"]) > 5 for field in jobs.flags().values())


@pytest.mark.parametrize("path", ["/a/b.sif", "a b.sif", "größe's.sif", "~/a,b.sif", "--x.sif"])
def test_a_sif_may_have_any_name(path):
    assert given_flags(image=path).image == path


def test_every_runtime_has_the_common_flags_and_slurm_alone_its_own():
    own = {*SLURMS_WORDS, "sbatch", "data_stage", "signal_s", "max_restarts"}
    for runtime in ("local", "docker", "singularity"):
        assert jobs.flags(runtime).keys() == jobs.flags().keys() - own
    assert jobs.flags("slurm").keys() == jobs.flags().keys()


def test_flags_that_one_runtime_has_are_told_where_they_were_given():
    assert given_flags().only("slurm") == {}
    job = given_flags(partition="gpu", max_restarts="0", data_stage=True, sbatch=["--exclusive"], cpus="2")
    assert job.only("slurm") == {
        "--partition": "gpu",
        "--max-restarts": 0,
        "--data-stage": True,
        "--sbatch": ("--exclusive",),
    }
    assert given_flags(max_restarts="3", data_stage=False).only("slurm") == {}


def test_auto_leaves_a_count_open():
    job = given_flags(nproc_per_node="auto", gpus_per_node="auto")
    assert (job.nproc_per_node, job.gpus_per_node, job.processes) == (None, None, 1)
    assert dataclasses.replace(job, gpus=(("a", "b"), ("c", "d"))).processes == 2
    assert dataclasses.replace(job, gpus=((), ())).processes == 1


SLURMS_WORDS = ("partition", "account", "qos", "constraint", "exclude", "reservation", "gres")
BAD = [
    *(("nodes", text) for text in ("0", "", "x", "-1", "1.5", "auto", "9" * 20, "1\n")),
    *(("nproc_per_node", text) for text in ("0", "gpu", "-1", "²")),
    *(("image", text) for text in ("", "--rm", "a b", "a\nb", "a\nb.sif", "a\0.sif", "a b.sif.json")),
    *(("env", [text]) for text in ("A", "=b", "1A=b", "A B=c", "A-B=c", "", "A=b\0c", "A\n=b")),
    *(("mount", [text]) for text in ("/a", ":/b", "/a:b", "/a:/b:rx", "/a,x:/b", "/a:/b\n", "")),
    *(("cpus", text) for text in ("0", "-1", "x", "inf", "nan", "1e3", "0.0")),
    *((name, text) for name in ("memory_gb", "shm_gb", "time_limit_min") for text in ("0", "x", "2g", "")),
    *(("gpus_per_node", text) for text in ("-1", "all", "1.5")),
    *(("name", text) for text in ("", "A", "a/b", "-a", "a-", "a_b", "a" * 53, "..", "a\n")),
    *((name, text) for name in ("runs_dir", "data_dir") for text in ("", "a\nb", "a\0b")),
    *(("master_port", text) for text in ("80", "65536", "x", "-1", "²")),
    *(
        (name, text)
        for name in SLURMS_WORDS
        for text in ("", "a b", "a\nb", "a'b", 'a"b', "a$b", "a;b", "a#b", "größe")
    ),
    *(
        ("sbatch", [text])
        for text in ("", "exclusive", "-x", "-p gpu", "--", "--p x", "--X=1", "---p", "--=1", "--a\n")
    ),
    *(("sbatch", [f"--comment={text}"]) for text in ('say "so"', "back\\slash", "two\nlines", "zero\0byte")),
    *(("signal_s", text) for text in ("0", "-1", "x", "", "1.5")),
    *(("max_restarts", text) for text in ("-1", "x", "", "1.5", "many")),
]


@pytest.mark.parametrize(("key", "text"), BAD)
def test_a_bad_text_is_refused_by_its_flag(key, text):
    told = refused(**{key: text})
    assert told.startswith("--" + key.replace("_", "-"))
    assert "invalid literal" not in told


def test_a_layout_gives_nodes_and_processes():
    job = given_flags("2x4")
    assert (job.nodes, job.nproc_per_node) == (2, 4)
    assert given_flags("2x4", nodes="2", nproc_per_node="4") == job


@pytest.mark.parametrize(
    "text", ["4", "0x2", "2x0", "00x2", "2x00", "x2", "2x", "2x2x2", "-1x2", "2X4", "", " 1x2", "2x4\n"]
)
def test_a_bad_layout_is_refused(text):
    with pytest.raises(UserError, match=r"-j .* HINT: -j 2x4"):
        given_flags(text)


@pytest.mark.parametrize(("flag", "value"), [("nodes", "1"), ("nproc_per_node", "2"), ("nproc_per_node", "auto")])
def test_a_layout_that_contradicts_a_flag_is_refused(flag, value):
    with pytest.raises(UserError, match=rf"-j 2x4 contradicts --{flag.replace('_', '-')} {value}.* HINT: "):
        given_flags("2x4", **{flag: value})


COMMANDS = {
    "nothing means train": ([], ["train"]),
    "an option first means train": (["--workload", "mnist"], ["train", "--workload", "mnist"]),
    "a verb stays": (["report", "/runs/a"], ["report", "/runs/a"]),
    "train is not doubled": (["train", "--epochs", "1"], ["train", "--epochs", "1"]),
}


@pytest.mark.parametrize(("words", "command"), COMMANDS.values(), ids=COMMANDS.keys())
def test_the_words_after_the_dashes_are_the_trainers(words, command):
    assert trainer_command(tuple(words)) == tuple(command)
    assert given_flags(arguments=words).command == tuple(command)


def test_a_zero_byte_is_refused():
    with pytest.raises(UserError, match=r"zero byte.* HINT: "):
        given_flags(arguments=["--config", "a\0b"])


def test_folders_become_absolute_once(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    job = given_flags(data_dir="~/sets", mount=["here:/there", "~/mine:/mine"])
    assert (job.runs_dir, job.data_dir) == (str(tmp_path / "runs"), "/home/someone/sets")
    assert [mount.source for mount in job.mount] == [f"{tmp_path}/here", "/home/someone/mine"]


OWN = {"--run-id": "--name", "--runs-dir": "--runs-dir", "--data-dir": "--data-dir"}


@pytest.mark.parametrize("flag", OWN)
def test_what_the_launcher_says_itself_cannot_be_said_behind_its_back(flag):
    for words in ([flag, "x"], [f"{flag}=x"], ["train", "--epochs", "1", flag, "x"]):
        with pytest.raises(UserError, match=rf"^{flag} after the -- contradicts.* HINT: {OWN[flag]} before the --$"):
            given_flags(arguments=words)
    variable = "TRAINER_" + flag[2:].upper().replace("-", "_")
    assert refused(env=[f"{variable}=x"]).endswith(f"HINT: {OWN[flag]}")


def test_a_longer_flag_or_a_value_that_looks_like_the_launchers_is_the_trainers():
    words = ("--run-idle", "1", "--config", "runs-dir")
    assert given_flags(arguments=words).command == ("train", *words)


@pytest.mark.parametrize("target", ["/", "/runs", "/data", "/tmp", "/dev/shm", "/runs/", "/data/../runs", "//"])
def test_a_mount_cannot_hide_what_the_run_needs(target):
    assert "--mount" in refused(mount=[f"/a:{target}"])


def test_two_mounts_cannot_share_a_place():
    assert "/b" in refused(mount=["/a:/b", "/c:/b"])


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=10)
JOBS = st.builds(
    Job,
    command=st.lists(TEXT, min_size=1, max_size=4).map(tuple),
    runtime=st.sampled_from(["local", "docker", "slurm"]),
    nodes=st.integers(1, 9),
    nproc_per_node=st.none() | st.integers(1, 9),
    image=st.none() | TEXT,
    env=st.lists(st.tuples(st.from_regex(r"[A-Z_]{1,5}", fullmatch=True), TEXT), max_size=3).map(tuple),
    mount=st.lists(st.builds(Mount, TEXT, TEXT.map(lambda text: f"/mnt/{text}"), st.booleans()), max_size=1).map(tuple),
    cpus=st.none() | st.floats(0.001, 1e6),
    name=st.none() | TEXT,
    runs_dir=TEXT,
    master_port=st.none() | st.integers(1024, 65535),
    gpus=st.lists(st.lists(TEXT, max_size=2).map(tuple), max_size=2).map(tuple),
    user=st.none() | st.just("1000:1000"),
    partition=st.none() | TEXT,
    sbatch=st.lists(TEXT, max_size=2).map(tuple),
    data_stage=st.booleans(),
    max_restarts=st.integers(0, 9),
    sif_sha256=st.none() | TEXT,
)


@given(JOBS)
def test_a_job_written_down_is_the_same_job(job):
    assert Job.from_json(job.to_json()) == job


@given(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*", fullmatch=True), TEXT)
def test_any_value_of_a_variable_is_taken_as_it_stands(key, value):
    assert variable(f"{key}={value}") == (key, value)


def test_a_hostile_value_survives_flags_and_json(hostile):
    job = given_flags(env=[f"KEY={hostile}"], arguments=["--config", hostile])
    assert Job.from_json(job.to_json()).env == (("KEY", hostile),)
    assert Job.from_json(job.to_json()).command == ("train", "--config", hostile)


def test_a_job_never_changes():
    with pytest.raises(dataclasses.FrozenInstanceError):
        given_flags().nodes = 2
    assert os.path.isabs(given_flags().runs_dir)
