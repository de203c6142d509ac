"""Slurm's own words read, a job handed to sbatch, and all that is refused before: with programs that play Slurm."""

import dataclasses
import datetime
import json
import os
import re

import pytest

from launch.job import Mount
from launch.runtimes import slurm
from launch.scheduled import Look
from launch.sif import identity_file
from trainer.errors import UserError

from .cluster import MAGIC, make_sif

# Takes down its words, variables and folder, and a copy of the script; says what the test says.
SBATCH = r"""#!/bin/bash -p
home=${0%/bin/*}
printf '%s\n' "$@" >"$home/words"
env -0 >"$home/variables"
cp "${@: -1}" "$home/script"
echo "$PWD" >"$home/cwd"
cat "$home/says" >&2
cat "$home/prints"
exit "$(cat "$home/code")"
"""


@pytest.fixture
def login(cluster, monkeypatch):
    """A login node whose sbatch says what it is told to, and on which every disk is shared."""
    cluster.program("sbatch", SBATCH)
    for name, text in {"says": "", "prints": "42\n", "code": "0"}.items():
        (cluster.home / name).write_text(text)
    monkeypatch.setenv("PATH", str(cluster.bin))
    monkeypatch.setattr(slurm, "_LOCAL_DISKS", ())
    return cluster


def refused(job):
    with pytest.raises(UserError) as caught:
        slurm.prepare(job)
    assert re.fullmatch(r"[^\n]+ HINT: [^\n]+", str(caught.value))
    return str(caught.value)


def test_a_prepared_job_has_a_name_its_image_and_its_processes(login):
    job = slurm.prepare(login.job(name=None, image_id=None, sif_sha256=None, nproc_per_node=None, gpus_per_node=4))
    assert re.fullmatch(r"\d{8}-\d{6}-mnist-[0-9a-f]{4}", job.run_id)
    assert (job.image_id, len(job.sif_sha256), job.nproc_per_node) == ("sha256:1", 64, 4)
    assert slurm.prepare(login.job(nproc_per_node=None)).nproc_per_node == 1
    assert slurm.prepare(login.job(nproc_per_node=None, gres="gpu:2")).nproc_per_node == 2


def test_the_image_is_the_sif_beside_unless_another_is_named(login, monkeypatch):
    monkeypatch.chdir(login.home)
    make_sif(login.home / "intermodal.sif", "sha256:2")
    assert slurm.prepare(login.job(image=None)).image == f"{login.home}/intermodal.sif"
    assert slurm.prepare(login.job(image="i.sif")).image == f"{login.home}/i.sif"


def test_a_host_without_slurm_is_told_so(login):
    (login.bin / "sbatch").unlink()
    assert "no sbatch" in refused(login.job())


REFUSED = {
    "an option that has a flag": ({"sbatch": ("--partition=x",)}, "--sbatch --partition belongs to --partition"),
    "gpus said twice": ({"gpus_per_node": 2, "gres": "gpu:2"}, "--gpus-per-node 2 contradicts --gres gpu:2"),
    "two processes on a gpu": ({"gpus_per_node": 1, "nproc_per_node": 2}, "2 processes on a node with 1 GPU"),
    "two processes on a gpu of --gres": ({"gres": "gpu:a100:1", "nproc_per_node": 2}, "2 processes on a node with 1"),
    "a mount that is not there": ({"mount": (Mount("/nowhere", "/x"),)}, "--mount /nowhere does not exist"),
    "a data folder that is not there": ({"data_dir": "/nowhere"}, "--data-dir /nowhere is no folder"),
    "no image": ({"image": "/nowhere/i.sif"}, "no SIF /nowhere/i.sif"),
    "a folder that no script can hold": ({"runs_dir": '/shared/"'}, "batch script"),
    "a folder of two lines": ({"data_dir": "/shared\n/x"}, "newline"),
}


@pytest.mark.parametrize(("values", "error"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_work_is_refused_before_it_waits_in_a_queue(values, error, login):
    assert error in refused(login.job(**values))


def test_staging_without_data_is_refused_and_a_missing_default_folder_alone_is_not(login, monkeypatch):
    monkeypatch.chdir(login.home)
    (login.home / "data" / "digits").unlink()
    (login.home / "data").rmdir()
    slurm.prepare(login.job())
    assert "--data-stage" in refused(login.job(data_stage=True))


def test_a_folder_that_already_holds_a_run_needs_resume_or_another_name(login):
    folder = login.home / "runs" / "run"
    folder.mkdir(parents=True)
    slurm.prepare(login.job())
    (folder / "run.json").write_text("{}")
    assert f"{folder} already holds a run" in refused(login.job())
    slurm.prepare(login.job(command=("train", "--resume", "auto")))
    slurm.prepare(login.job(command=("train", "--resume=auto")))
    slurm.prepare(login.job(name="other"))


SPOILED = {
    "not a SIF": lambda path: path.write_bytes(b"hello" * 20),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(MAGIC[:-2]),
    "cut off behind its header": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "replaced": lambda path: path.write_bytes(MAGIC + b"another"),
    "replaced by one of the same size": lambda path: path.write_bytes(MAGIC[:-1] + b"x"),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_an_image_that_is_not_the_one_built_is_refused(spoil, login):
    path = login.home / "i.sif"
    make_sif(path, content=MAGIC + b"content")
    spoil(path)
    assert str(path) in refused(login.job())


def test_an_image_that_nobody_can_name_is_warned_about_and_runs(login, capsys):
    identity_file(login.home / "i.sif").unlink()
    job = slurm.prepare(login.job(image_id=None, sif_sha256=None))
    assert (job.image_id, len(job.sif_sha256)) == (None, 64)
    assert re.fullmatch(r"warning: no .*/i\.sif\.json: .* HINT: [^\n]*\n", capsys.readouterr().err)


@pytest.mark.parametrize("what", ["runs_dir", "data_dir", "image", "mount"])
def test_what_lies_in_the_memory_of_this_host_is_refused(what, login, monkeypatch):
    """/dev/shm is in memory on every Linux."""
    monkeypatch.setattr(slurm, "_LOCAL_DISKS", ("tmpfs",))
    disk = slurm._kind_of_disk
    monkeypatch.setattr(slurm, "_kind_of_disk", lambda path: disk(path) if path.startswith("/dev/shm") else None)
    monkeypatch.setattr(slurm.singularity, "identify", lambda job: job)
    value = "/dev/shm/ours" if what != "mount" else (Mount("/dev/shm/ours", "/x"),)
    assert "/dev/shm/ours" in (told := refused(login.job(**{what: value})))
    assert "tmpfs of this host, which other nodes cannot see" in told


def submitted(login, **values):
    plan = slurm.plan(slurm.prepare(login.job(**values)))
    return plan, slurm.submit(plan)


def variables(login):
    return dict(item.split("=", 1) for item in (login.home / "variables").read_text().split("\0") if item)


def test_sbatch_gets_the_script_that_a_dry_run_prints_and_nobody_else_can_read_it(login):
    plan, job_id = submitted(login, env=(("TOKEN", "hush"),))
    folder = login.home / "runs" / "run"
    assert job_id == "42"
    assert (login.home / "script").read_text() == plan.script() + "\n"
    assert (login.home / "words").read_text().split() == ["--parsable", f"{folder}/job.sbatch"]
    assert (login.home / "cwd").read_text().strip() == str(folder)
    assert (folder / "job.sbatch").stat().st_mode & 0o777 == 0o600


def test_a_script_that_somebody_could_read_is_replaced_and_not_written_into(login):
    path = login.home / "runs" / "run" / "job.sbatch"
    path.parent.mkdir(parents=True)
    path.write_text("what was here before")
    path.chmod(0o644)
    submitted(login)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text().startswith("#!/bin/bash -p\n")


@pytest.mark.parametrize(("printed", "job_id"), [("42\n", "42"), ("42;other\n", "42")])
def test_the_number_of_a_job_is_read_with_and_without_its_cluster(printed, job_id, login):
    (login.home / "prints").write_text(printed)
    assert submitted(login)[1] == job_id


def test_what_would_overrule_the_script_does_not_reach_sbatch_and_the_users_choices_do(login, monkeypatch):
    taken = ["SBATCH_JOB_NAME", "SBATCH_EXPORT", "SBATCH_NO_REQUEUE", "SBATCH_GPUS", "SBATCH_OUTPUT", "SLURM_JOB_ID"]
    taken += [
        "SLURM_NTASKS",
        "SLURM_CPUS_PER_TASK",
        "SLURM_EXPORT_ENV",
        "SBATCH_OPEN_MODE",
        "SBATCH_WAIT",
        "SLURM_MPI_TYPE",
    ]
    kept = ["SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION", "SLURM_CONF", "OTHER"]
    for name in taken + kept:
        monkeypatch.setenv(name, "x")
    submitted(login)
    assert variables(login).keys() >= set(kept)
    assert not variables(login).keys() & set(taken)


def test_a_choice_of_the_environment_gives_way_to_a_flag(login, monkeypatch):
    for name in ("SBATCH_PARTITION", "SBATCH_TIMELIMIT", "SBATCH_QOS"):
        monkeypatch.setenv(name, "x")
    submitted(login, partition="gpu", time_limit_min=5.0)
    assert {"SBATCH_PARTITION", "SBATCH_TIMELIMIT", "SBATCH_QOS"} & variables(login).keys() == {"SBATCH_QOS"}


def test_a_check_submits_nothing_and_tells_what_slurm_would_do(login):
    words = "sbatch: Job 7 to start at 2025-01-01T00:00:00 using 2 processors on nodes c[1-2] in partition all\n"
    (login.home / "says").write_text(words)
    (login.home / "prints").write_text("")
    told = slurm.submit(slurm.plan(slurm.prepare(login.job())), test_only=True)
    assert told == words.strip()
    assert (login.home / "words").read_text().split()[0] == "--test-only"
    assert not (login.home / "runs").exists()


FAILED = "sbatch: error: Batch job submission failed: "
WORDS = {
    "sbatch: error: invalid partition specified: gpux\n" + FAILED + "Invalid partition name specified": "--partition",
    FAILED + "Invalid account or account/partition combination specified": "--account",
    FAILED + "Invalid qos specification": "--qos",
    FAILED + "Requested reservation is invalid": "--reservation",
    FAILED + "Requested time limit is invalid (missing or exceeds some limit)": "--time-limit-min",
    FAILED + "Node count specification invalid": "--nodes",
    FAILED + "Requested node configuration is not available": "--nodes",
    FAILED + "Invalid generic resource (gres) specification": "--gres",
    "allocation failure: Requested partition configuration not available now": "--partition",
    FAILED + "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)": "sacctmgr",
    "": "--dryrun",
}


@pytest.mark.parametrize("words", WORDS, ids=lambda words: words.rpartition(": ")[2] or "nothing")
def test_a_refusal_is_told_in_slurms_words_with_the_flag_that_mends_it(words, login):
    (login.home / "says").write_text(words + "\n" if words else "")
    (login.home / "code").write_text("1")
    with pytest.raises(UserError) as caught:
        submitted(login)
    message, _, hint = str(caught.value).partition(" HINT: ")
    assert message.startswith("Slurm refuses the job: ")
    assert " ".join(words.splitlines()) in message
    assert WORDS[words] in hint
    assert "\n" not in str(caught.value)


def test_a_slow_controller_has_nothing_to_do_with_the_time_limit(login):
    (login.home / "says").write_text(FAILED + "Socket timed out on send/recv operation\n")
    (login.home / "code").write_text("1")
    with pytest.raises(UserError, match=r"Socket timed out .* HINT: ") as caught:
        submitted(login)
    assert "--time-limit-min" not in str(caught.value)


SHOWN = (
    "JobId=42 JobName=run UserId=lab(1000) GroupId=lab(1000) MCS_label=N/A Priority=4294901758 Nice=0 "
    "Account=research QOS=normal JobState={state} Reason={reason} Dependency=(null) Requeue=1 Restarts={restarts} "
    "BatchFlag=1 Reboot=0 ExitCode={code} RunTime=00:01:40 TimeLimit=01:00:00 TimeMin=N/A Partition=all "
    "AllocNode:Sid=login:77 ReqNodeList=(null) ExcNodeList=(null) NodeList={nodes} BatchHost=c1 NumNodes=2 NumCPUs=2 "
    "NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:* {more} MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0 Features=(null) "
    "OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null) Command=/shared/runs/run/job.sbatch "
    "WorkDir=/shared/runs/run StdErr=/shared/runs/run/slurm-42.out StdIn=/dev/null "
    "StdOut=/shared/runs/run/slurm-42.out {last}"
)
STYLES = {
    "22.05": {"more": "TRES=cpu=2,node=2,billing=2 Socks/Node=* NtasksPerN:B:S:C=1:0:*:* CoreSpec=*", "last": "Power="},
    "25.05": {
        "more": "ReqTRES=cpu=2,mem=2M,node=2 AllocTRES=cpu=2,node=2,gres/gpu=2 Socks/Node=* SubmitLine=sbatch x y",
        "last": "TresPerNode=gres/gpu:2 TresPerTask=cpu=1",
    },
}
LOOKS = {
    "waiting": ("PENDING", "Resources", "0:0", "", 0, Look("pending", "PENDING (Resources)")),
    "waiting for itself": ("PENDING", "BeginTime", "0:0", "", 2, Look("pending", "PENDING (BeginTime), restarts: 2")),
    "held": ("REQUEUE_HOLD", "job_requeued_in_held_state", "0:0", "", 0, "pending"),
    "starting": ("CONFIGURING", "None", "0:0", "c[1-2]", 0, Look("pending", "CONFIGURING, on c[1-2]")),
    "running": ("RUNNING", "None", "0:0", "c[1-2]", 1, Look("running", "RUNNING, on c[1-2], restarts: 1")),
    "ending": ("COMPLETING", "None", "75:0", "c1", 0, Look("running", "COMPLETING, on c1")),
    "done": ("COMPLETED", "None", "0:0", "c1", 0, Look("ended", "COMPLETED, on c1", 0)),
    "failed": ("FAILED", "NonZeroExitCode", "3:0", "c1", 0, Look("ended", "FAILED (NonZeroExitCode), on c1", 3)),
    "cancelled": ("CANCELLED", "None", "0:15", "c1", 0, Look("ended", "CANCELLED, on c1", 143)),
    "out of time": ("TIMEOUT", "TimeLimit", "0:0", "c1", 0, Look("ended", "TIMEOUT (TimeLimit), on c1", 1)),
    "its node was lost": ("NODE_FAIL", "NodeDown", "0:0", "c2", 0, Look("ended", "NODE_FAIL (NodeDown), on c2", 1)),
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("case", LOOKS)
def test_what_scontrol_shows_of_a_job_is_understood(case, style, login):
    state, reason, code, nodes, restarts, look = LOOKS[case]
    text = SHOWN.format(
        state=state, reason=reason, code=code, nodes=nodes or "(null)", restarts=restarts, **STYLES[style]
    )
    login.program("scontrol", f"#!/bin/sh\ntest \"$*\" = 'show job --oneliner 42' && cat <<'E'\n{text}\nE\n")
    found = slurm.look("42", "run")
    assert found.word == look if isinstance(look, str) else found == dataclasses.replace(look, attempt=restarts)


@pytest.mark.parametrize("state", ["NODE_FAIL", "PREEMPTED"])
def test_an_end_of_this_moment_may_be_no_end(state, login):
    for seconds, word in ((1, "pending"), (60, "ended")):
        ended = (datetime.datetime.now() - datetime.timedelta(seconds=seconds)).isoformat(timespec="seconds")
        told = f"JobId=42 JobName=run JobState={state} Requeue=1 Restarts=0 ExitCode=0:0 EndTime={ended}"
        login.program("scontrol", f"#!/bin/sh\necho '{told}'\n")
        assert slurm.look("42", "run").word == word


def test_a_state_that_nobody_knows_yet_is_no_end(login):
    login.program("scontrol", "#!/bin/sh\necho JobId=42 JobName=run JobState=EXPEDITING ExitCode=0:0\n")
    assert slurm.look("42", "run").word == "running"


def test_a_number_that_was_given_again_is_not_ours(login):
    login.program("scontrol", "#!/bin/sh\necho JobId=42 JobName=other JobState=RUNNING ExitCode=0:0\n")
    assert slurm.look("42", "run").word == "gone"


def test_words_that_the_user_chose_are_not_taken_for_slurms(login):
    text = SHOWN.format(
        state="RUNNING", reason="None", code="0:0", nodes="c1", restarts=0, more="", last="Comment=see JobState=FAILED"
    )
    login.program("scontrol", f"#!/bin/sh\ncat <<'E'\n{text}\nE\n")
    assert slurm.look("42", "run").word == "running"


ROWS = {
    "COMPLETED|0:0|c[1-2]": Look("ended", "COMPLETED, on c[1-2]", 0),
    "FAILED|75:0|c1": Look("ended", "FAILED, on c1", 75),
    "CANCELLED by 1000|0:15|c1": Look("ended", "CANCELLED, on c1", 143),
    "CANCELLED by 1000|0:0|None assigned": Look("ended", "CANCELLED", 1),
    "NODE_FAIL|1:0|c1": Look("ended", "NODE_FAIL, on c1", 1),
    "TIMEOUT|0:0|c1": Look("ended", "TIMEOUT, on c1", 1),
    "OUT_OF_MEMORY|0:9|c1": Look("ended", "OUT_OF_MEMORY, on c1", 137),
    "PENDING|0:0|None assigned": Look("pending", "PENDING"),
    "NODE_FAIL|0:0|c1\nCOMPLETED|0:0|c2": Look("ended", "COMPLETED, on c2", 0),
}
UNKNOWN = "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n"
SILENT = "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1\n"


@pytest.mark.parametrize("rows", ROWS)
def test_what_scontrol_has_forgotten_accounting_knows(rows, login):
    login.program("scontrol", UNKNOWN)
    login.program("sacct", f"#!/bin/sh\nprintf '%s\\n' '{rows}'\n")
    assert slurm.look("42", "run") == ROWS[rows]


@pytest.mark.parametrize("sacct", [None, "#!/bin/sh\nexit 0\n", "#!/bin/sh\nexit 1\n"], ids=["none", "empty", "off"])
def test_a_job_that_nobody_remembers_is_gone(sacct, login):
    login.program("scontrol", UNKNOWN)
    if sacct:
        login.program("sacct", sacct)
    assert slurm.look("42", "run").word == "gone"


def test_a_controller_that_does_not_answer_is_not_the_end_of_a_job(login):
    login.program("scontrol", SILENT)
    login.program("sacct", SILENT)
    assert slurm.look("42", "run").word not in ("gone", "ended")


def test_a_job_is_cancelled_by_its_number(login):
    login.program("scancel", '#!/bin/sh\necho "$@" >"${0%/bin/*}/cancelled"\n')
    slurm.cancel("42")
    assert (login.home / "cancelled").read_text() == "42\n"


CODES = {
    ("COMPLETED", "0:0"): 0,
    ("FAILED", "1:0"): 1,
    ("FAILED", "2:0"): 2,
    ("FAILED", "75:0"): 75,
    ("FAILED", "137:0"): 137,
    ("CANCELLED", "0:15"): 143,
    ("FAILED", "0:9"): 137,
    ("NODE_FAIL", "0:0"): 1,
    ("TIMEOUT", ""): 1,
    ("BOOT_FAIL", "0"): 1,
}


@pytest.mark.parametrize(("state", "text"), CODES)
def test_every_end_has_an_exit_code(state, text):
    assert slurm.exit_code(state, text) == CODES[state, text]


def test_nothing_of_a_job_is_left_to_clean_here(login):
    before = sorted(os.listdir(login.home))
    slurm.clean(login.job())
    assert sorted(os.listdir(login.home)) == before
    assert json.loads(identity_file(login.home / "i.sif").read_text())
