"""The batch script as text: what is on file, what sbatch reads in it, and the options that have another owner."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import sbatch
from launch.job import Job, Mount
from trainer.errors import UserError

from .test_plan import GOLDEN

SHELLCHECK = shutil.which(
    "shellcheck",
    path=os.pathsep.join([str(Path(sys.executable).parent), *(f"{folder}/bin" for folder in sys.path), os.defpath]),
)


@pytest.fixture
def place(monkeypatch, tmp_path):
    """A folder with data sets, on a host whose only variable is one of NCCL."""
    for name in os.environ:
        if name.startswith(("NCCL_", "GLOO_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    (tmp_path / "data").mkdir()
    return tmp_path


def job(place, **values):
    """A job as prepare() leaves it."""
    told = {"command": ("train", "--workload", "mnist"), "name": "golden", "nproc_per_node": 1}
    told |= {"runs_dir": f"{place}/runs", "data_dir": f"{place}/data", "image": f"{place}/intermodal.sif"}
    told |= {"image_id": "sha256:" + "0123" * 16, "sif_sha256": "89ab" * 16}
    return Job(runtime="slurm", **told | values)


def everything(place):
    return {
        "nodes": 4,
        "nproc_per_node": 2,
        "command": ("train", "--config", "it's mine"),
        "image": f"{place}/images of mine/intermodal.sif",
        "env": (("GREETING", 'say "hello"'), ("LIST", "a, b"), ("NCCL_DEBUG", "INFO"), ("PET_MASTER_ADDR", "ib-head")),
        "mount": (Mount(f"{place}/in, put", "/mnt/in", read_only=True), Mount(f"{place}/out", "/mnt/out")),
        "cpus": 7.5,
        "memory_gb": 1.5,
        "gpus_per_node": 2,
        "shm_gb": 1.5,
        "time_limit_min": 90.5,
        "data_stage": True,
        "max_restarts": 0,
        "master_port": 29500,
        "partition": "gpu,long",
        "account": "research",
        "qos": "normal",
        "constraint": "a100&ib",
        "exclude": "c1,c[3-4]",
        "reservation": "course",
        "sbatch": ("--comment=two words", "--exclusive", "--mail-type=END"),
    }


CASES = {
    "plain": lambda place: {"nodes": 2, "nproc_per_node": 2},
    "one-node-without-data": lambda place: {"data_dir": "/nowhere"},
    "gres": lambda place: {"gres": "gpu:a100:2", "nproc_per_node": 2},
    "everything": everything,
}


@pytest.mark.parametrize("name", CASES)
def test_the_script_is_the_one_on_file(name, place):
    script = sbatch.render(job(place, **CASES[name](place)))
    assert script.replace(str(place), "/srv") == (GOLDEN / f"{name}.sbatch").read_text()


def test_every_script_on_file_belongs_to_a_test():
    assert {path.stem for path in GOLDEN.glob("*.sbatch")} == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_bash_and_shellcheck_find_nothing_in_a_script_on_file(name):
    path = str(GOLDEN / f"{name}.sbatch")
    subprocess.run(["bash", "-n", path], check=True)
    assert SHELLCHECK, "make setup installs shellcheck"
    # SC2329: run_node is called on the nodes, by its text.
    found = subprocess.run([SHELLCHECK, "--exclude=SC2329", path], capture_output=True, text=True, check=False)
    assert found.stdout == ""


def test_a_script_is_made_of_its_job_alone(place):
    before = sorted(place.rglob("*"))
    assert sbatch.render(job(place, **everything(place))) == sbatch.render(job(place, **everything(place)))
    assert sorted(place.rglob("*")) == before


def directives(script):
    """The options in a script as sbatch reads them: words, quotes, backslashes, and # for a comment."""
    found = {}
    for line in script.splitlines():
        if not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            word = words_of(line.removeprefix("#SBATCH"))
            name, _, value = word.partition("=")
            assert name not in found
            found[name] = value
    return found


def words_of(line):
    """The one word of a directive."""
    words, word, quote, escaped = [], None, "", False
    for letter in line:
        if escaped:
            word, escaped = (word or "") + letter, False
        elif letter == "\\":
            escaped = True
        elif quote:
            quote, word = ("", word) if letter == quote else (quote, word + letter)
        elif letter in "\"'":
            quote, word = letter, word or ""
        elif letter == "#":
            break
        elif letter.isspace():
            words += [word] * (word is not None)
            word = None
        else:
            word = (word or "") + letter
    assert not quote
    words += [word] * (word is not None)
    (only,) = words
    return only


def test_slurm_is_asked_for_what_the_flags_say(place):
    asked = directives(sbatch.render(job(place, **everything(place))))
    assert asked == {
        "--job-name": "golden",
        "--nodes": "4",
        "--ntasks": "4",
        "--ntasks-per-node": "1",
        "--cpus-per-task": "8",
        "--signal": "B:USR1@120",
        "--requeue": "",
        "--open-mode": "append",
        "--output": f"{place}/runs/golden/slurm-%j.out",
        "--time": "91",
        "--mem": "1536M",
        "--gpus-per-node": "2",
        "--partition": "gpu,long",
        "--account": "research",
        "--qos": "normal",
        "--constraint": "a100&ib",
        "--exclude": "c1,c[3-4]",
        "--reservation": "course",
        "--comment": "two words",
        "--exclusive": "",
        "--mail-type": "END",
    }


def test_what_was_not_said_is_left_to_slurm(place):
    asked = directives(sbatch.render(job(place, gpus_per_node=0, nproc_per_node=3)))
    assert asked["--cpus-per-task"] == "3"
    assert not {"--time", "--mem", "--gpus-per-node", "--gres", "--partition", "--account"} & asked.keys()


@pytest.mark.parametrize(
    ("minutes", "asked", "lead"),
    [(None, None, 120), (90, None, 120), (4, None, 120), (2, None, 60), (0.5, None, 15), (90, 300, 300), (2, 300, 60)],
)
def test_there_is_time_to_save_and_time_to_work(minutes, asked, lead, place):
    script = sbatch.render(job(place, time_limit_min=minutes, signal_s=asked))
    assert directives(script)["--signal"] == f"B:USR1@{lead}"


def test_the_output_of_a_hostile_folder_is_where_it_should_be_or_refused(hostile, place):
    folder = f"{place}/at {hostile} 100%j"
    if set(hostile) & set('"\\\n'):
        with pytest.raises(UserError, match=r"batch script.* HINT: rename it"):
            sbatch.render(job(place, runs_dir=folder))
        return
    output = directives(sbatch.render(job(place, runs_dir=folder)))["--output"]
    assert output.replace("%%", "%") == f"{folder}/golden/slurm-%j.out"
    assert output.count("%j") - output.count("%%j") == 1


@given(
    st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]) | st.sampled_from(" '#$`,%;&|~"), min_size=1)
)
def test_sbatch_reads_every_value_that_is_not_refused(text):
    try:
        value = sbatch.directive_value(text)
    except UserError:
        assert set(text) & set('"\\\n')
        return
    assert words_of(f" --comment={value}") == f"--comment={text}"


COUNTS = {
    "gpu": 1,
    "gpu:2": 2,
    "gpu:a100": 1,
    "gpu:a100:2": 2,
    "gpu:a100:2,gpu:h100:1": 3,
    "nvme:3,gpu:2": 2,
    "nvme:3": 0,
    "gpumem:80": 0,
    "gpu:a100:2(S:0-1),nvme:1": 2,
    "gpu:2(S:0,1),gpu:h100": 3,
}


@pytest.mark.parametrize("gres", COUNTS)
def test_gpus_among_the_generic_resources_are_counted(gres, place):
    assert sbatch.gpus_of_node(job(place, gres=gres)) == COUNTS[gres]
    assert ("--nv" in sbatch.render(job(place, gres=gres))) is (COUNTS[gres] > 0)


FREE = [
    "acctg-freq", "batch", "bb", "bbf", "begin", "cluster-constraint", "comment", "container",
    "container-id", "contiguous", "core-spec", "cores-per-socket", "cpu-freq", "deadline", "delay-boot",
    "dependency", "exclusive", "extra", "extra-node-info", "get-user-env", "gid", "gpu-bind",
    "gpu-freq", "hint", "hold", "ignore-pbs", "kill-on-invalid-dep", "licenses", "mail-type", "mail-user",
    "mcs-label", "mem-bind", "network", "nice", "no-kill", "nodefile", "nodelist", "ntasks-per-switch",
    "oom-kill-step", "overcommit", "oversubscribe", "power", "prefer", "priority", "profile", "propagate",
    "reboot", "segment", "sockets-per-node", "spread-job", "stepmgr", "switches", "thread-spec",
    "threads-per-core", "time-min", "tmp", "tres-bind", "uid", "usage", "use-min-nodes", "verbose", "version",
    "wait-all-nodes", "wckey",
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(sbatch.OWNED))
def test_an_option_that_has_an_owner_is_refused_however_short_it_is_written(name):
    known = {*sbatch.OWNED, *FREE}
    beginnings = [name[:length] for length in range(2, len(name))]
    unique = [short for short in beginnings if [each for each in known if each.startswith(short)] == [name]]
    for written in (name, *unique):
        for option in (f"--{written}", f"--{written}=x"):
            with pytest.raises(UserError) as caught:
                sbatch.check_options(["--comment=x", option])
            assert f"--sbatch --{written} belongs to {sbatch.OWNED[name]}. HINT: " in str(caught.value)


def test_a_hint_names_a_flag_where_there_is_one():
    with pytest.raises(UserError, match=r"HINT: --partition instead$"):
        sbatch.check_options(["--partition=gpu"])
    with pytest.raises(UserError, match=r"HINT: leave it out$"):
        sbatch.check_options(["--wrap=ls"])


# Those that end sbatch without a job.
WITHOUT_A_JOB = ("usage", "version")


@pytest.mark.parametrize("name", [name for name in FREE if name not in WITHOUT_A_JOB])
def test_any_other_option_is_slurms(name):
    sbatch.check_options([f"--{name}=x", f"--{name}"])


@pytest.mark.parametrize("name", WITHOUT_A_JOB)
def test_an_option_that_leaves_no_job_is_refused(name):
    with pytest.raises(UserError):
        sbatch.check_options([f"--{name}"])
