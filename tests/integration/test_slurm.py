"""A real Slurm cluster of two nodes with Apptainer, and a user who is not root."""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import HOSTILE
from tests.integration.conftest import OS_IMAGE, Cluster, docker, invoke, until

SIF = "/shared/intermodal.sif"
LONG = ("--epochs", "30", "--checkpoint-every", "100")  # about 10 s after the start


@pytest.fixture
def runs(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    """A folder for results on the shared file system, empty."""
    name = re.sub(r"\W+", "-", request.node.name)
    cluster.lab("rm", "-rf", f"/shared/runs/{name}", check=True)
    return f"/shared/runs/{name}"


@pytest.fixture(autouse=True)
def _nobody_stays(cluster: Cluster) -> Iterator[None]:
    """No job outlives its test, and no process of the user stays on any node."""
    yield
    cluster.lab("scancel", "--user=lab")
    cluster.wake()
    until(lambda: not cluster.jobs(), "the end of all jobs", 60)
    until(lambda: not cluster.processes(), "the end of all processes", 20)


def launch(cluster: Cluster, runs: str, *words: str, timeout: float = 240) -> "subprocess.CompletedProcess[str]":
    """`invoke singularity-run` on the login node."""
    own = {"--image": SIF, "--runs-dir": runs}
    given = [word for flag, value in own.items() if flag not in words for word in (flag, value)]
    return cluster.lab("invoke", "singularity-run", *given, *words, timeout=timeout)


def record(cluster: Cluster, runs: str, name: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(cluster.local(f"{runs}/{name}/run.json").read_text())
    return told


def detach(cluster: Cluster, runs: str, *words: str) -> str:
    """Submit and return the job's number."""
    done = launch(cluster, runs, "--detach", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1].rpartition("/")[2]


def reach(cluster: Cluster, runs: str, name: str, step: int) -> None:
    path = cluster.local(f"{runs}/{name}/metrics.jsonl")
    until(lambda: path.exists() and f'"step": {step},' in path.read_text(), f"step {step}", 120)


def finish(cluster: Cluster, runs: str, name: str) -> str:
    """Follow a run to its end and return its lines."""
    return cluster.lab("invoke", "logs", "-f", f"slurm://{name}", "--runs-dir", runs, timeout=240).stdout


def draw(cluster: Cluster, runs: str) -> str:
    """A small set of drawn digits on the shared file system; returns its --data-dir."""
    data = f"{runs}-data"
    cluster.lab("rm", "-rf", data)
    make = ["trainer", "data", "make", "drawn-digits", "--train", "640", "--test", "64"]
    cluster.lab("apptainer", "-q", "exec", "--bind", "/shared", SIF, *make, "--out", f"{data}/drawn-digits", check=True)
    return data


@pytest.fixture(scope="session")
def undisturbed(cluster: Cluster) -> str:
    """Weights of LONG on two nodes of two, without any interruption."""
    runs = "/shared/runs/undisturbed"
    cluster.lab("rm", "-rf", runs)
    done = launch(cluster, runs, "-j", "2x2", "--name", "run", "--", *LONG)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(record(cluster, runs, "run")["result"]["weights_sha256"])


def test_every_layout_gives_the_same_bits_and_a_complete_record(cluster: Cluster, runs: str) -> None:
    hashes = set()
    for layout in ("1x4", "2x2"):
        done = launch(cluster, runs, "-j", layout, "--name", layout, "--", "--max-steps", "60")
        assert done.returncode == 0, done.stdout + done.stderr
        hashes.add(record(cluster, runs, layout)["result"]["weights_sha256"])
    assert len(hashes) == 1
    told = record(cluster, runs, "2x2")
    identity = json.loads(cluster.local(SIF + ".json").read_text())
    assert told["image"]["id"] == identity["image_id"]
    assert told["image"]["sif_sha256"] == identity["content_sha256"]
    assert told["image"]["reference"] == SIF
    assert told["image"]["base"]
    assert (told["runtime"], told["attempt"], told["topology"]["nodes"]) == ("slurm", 0, 2)
    assert told["job_id"].isdigit()
    log = cluster.local(f"{runs}/2x2/attempt-0.log").read_text()
    assert "[0:0] done: " in log
    assert cluster.local(f"{runs}/2x2/run.json").stat().st_uid == 2000


def test_docker_and_slurm_give_the_same_bits_from_the_same_image(cluster: Cluster, runs: str, tmp_path: Path) -> None:
    image = json.loads(cluster.local(SIF + ".json").read_text())["image"]
    words = ("--nodes", "2", "--name", "run", "--", "--max-steps", "50")
    in_docker = invoke("docker-run", "--image", image, "--runs-dir", str(tmp_path), *words)
    assert in_docker.returncode == 0, in_docker.stdout + in_docker.stderr
    in_slurm = launch(cluster, runs, *words)
    assert in_slurm.returncode == 0, in_slurm.stdout + in_slurm.stderr
    here, there = json.loads((tmp_path / "run" / "run.json").read_text()), record(cluster, runs, "run")
    assert (here["runtime"], there["runtime"]) == ("docker", "slurm")
    assert here["image"]["id"] == there["image"]["id"]
    assert here["result"]["weights_sha256"] == there["result"]["weights_sha256"]


@pytest.mark.parametrize("how", ["scancel --signal=USR1", "scontrol requeue", "a node loses power"])
def test_an_interrupted_job_goes_on_and_ends_with_the_same_bits(
    cluster: Cluster, runs: str, how: str, undisturbed: str
) -> None:
    job = detach(cluster, runs, "-j", "2x2", "--name", "run", "--", *LONG)
    reach(cluster, runs, "run", 110)
    if how == "a node loses power":
        cluster.power("kill", "c2")
        cluster.power("down", "c2")
        cluster.power("start", "c2")
    else:
        cluster.lab(*how.split(), job, check=True)
    lines = finish(cluster, runs, "run")
    told = record(cluster, runs, "run")
    assert told["status"] == "done", lines
    assert told["result"]["weights_sha256"] == undisturbed
    assert told["result"]["resumed_at"] >= 100
    assert (told["attempt"], told["job_id"]) == (1, job)
    assert "resuming at step" in cluster.local(f"{runs}/run/attempt-1.log").read_text()


def test_a_job_gives_way_to_another_and_goes_on_with_the_same_bits(
    cluster: Cluster, runs: str, undisturbed: str
) -> None:
    job = detach(cluster, runs, "-j", "2x2", "--name", "run", "--partition", "scavenger", "--", *LONG)
    reach(cluster, runs, "run", 110)
    urgent = ("--partition=main", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 10")
    cluster.lab("sbatch", "--wait", *urgent, check=True)
    lines = finish(cluster, runs, "run")
    told = record(cluster, runs, "run")
    assert told["status"] == "done", lines
    assert told["result"]["weights_sha256"] == undisturbed
    assert told["result"]["resumed_at"] >= 110
    assert (told["attempt"], told["job_id"]) == (1, job)


def test_a_node_that_is_silently_gone_is_noticed_and_the_job_goes_on(
    cluster: Cluster, runs: str, undisturbed: str
) -> None:
    detach(cluster, runs, "-j", "2x2", "--name", "run", "--", *LONG)
    reach(cluster, runs, "run", 110)
    cluster.power("kill", "c2")
    log = cluster.local(f"{runs}/run/attempt-0.log")
    until(lambda: "vanished" in log.read_text(), "the head says that a node is gone", 60)
    assert "node 1 on c2" in log.read_text()
    cluster.power("start", "c2")
    lines = finish(cluster, runs, "run")
    assert record(cluster, runs, "run")["result"]["weights_sha256"] == undisturbed, lines


def test_a_job_whose_time_is_over_saves_and_goes_on_with_the_same_bits(
    cluster: Cluster, runs: str, undisturbed: str
) -> None:
    words = ("-j", "1x4", "--time-limit-min", "1", "--signal-s", "10", "--name", "run")
    job = detach(cluster, runs, *words, "--", *LONG)
    reach(cluster, runs, "run", 110)
    node = cluster.lab("squeue", "--noheader", "--format=%N", f"--jobs={job}").stdout.strip()
    cluster.on(node, "pkill", "-STOP", "-u", "lab", "-f", "bin/trainer")  # the run is slow: its time will not do
    log = cluster.local(f"{runs}/run/attempt-0.log")
    until(lambda: "asking the run to save" in log.read_text(), "the request to save", 90)
    cluster.on(node, "pkill", "-CONT", "-u", "lab", "-f", "bin/trainer")
    lines = finish(cluster, runs, "run")
    told = record(cluster, runs, "run")
    assert told["status"] == "done", lines
    assert told["result"]["weights_sha256"] == undisturbed
    assert told["result"]["resumed_at"] > 0
    assert told["attempt"] >= 1
    assert "queued again" in log.read_text()


def test_cancel_saves_and_leaves_no_process_within_20_s(cluster: Cluster, runs: str) -> None:
    detach(cluster, runs, "-j", "2x2", "--name", "run", "--", *LONG)
    reach(cluster, runs, "run", 100)
    began = time.monotonic()
    done = cluster.lab("invoke", "cancel", "slurm://run", "--runs-dir", runs)
    assert done.returncode == 0, done.stderr
    until(lambda: not cluster.processes(), "no process", 20)
    assert time.monotonic() - began < 20
    assert record(cluster, runs, "run")["status"] == "preempted"
    assert "preempted" in cluster.lab("invoke", "status", "slurm://run", "--runs-dir", runs).stdout
    assert not cluster.jobs()


def test_a_crash_of_one_rank_fails_the_job_with_its_traceback_last(cluster: Cluster, runs: str) -> None:
    data = draw(cluster, runs)
    spoil = (
        "import pathlib, sys\n"
        "path = next(pathlib.Path(sys.argv[1]).rglob('train-labels-idx1-ubyte'))\n"
        "content = bytearray(path.read_bytes()); content[8 + 300] = 99; path.write_bytes(content)\n"
    )
    cluster.lab("python3", "-c", spoil, data, check=True)
    began = time.monotonic()
    done = launch(
        cluster, runs, "-j", "2x2", "--name", "run", "--data-dir", data, "--", "--dataset", "drawn-digits", timeout=90
    )
    assert done.returncode == 1, done.stdout
    assert time.monotonic() - began < 60
    log = cluster.local(f"{runs}/run/attempt-0.log").read_text()
    assert "Traceback" in log
    assert "first failure: rank " in log.split("Traceback")[-1]
    assert not cluster.local(f"{runs}/run/attempt-1.log").exists()
    assert "run failed with exit code 1" in done.stdout


@pytest.mark.parametrize("where", ["--slurm", "--no-slurm"])
def test_hostile_values_arrive_unchanged(cluster: Cluster, runs: str, where: str) -> None:
    values = {f"NCCL_HOSTILE_{index}": value for index, value in enumerate(HOSTILE.values())}  # on record as they are
    folder = f'{draw(cluster, runs)}/it\'s, a "data: $HOME" folder'
    cluster.lab("mkdir", folder, check=True)
    cluster.lab("mv", f"{runs}-data/drawn-digits", folder, check=True)
    hostile_runs = f"{runs}/it's, a $(id) `id` run: folder"
    words = [f"--env={name}={value}" for name, value in values.items()]
    words += ["--data-dir", folder, "--", "--dataset", "drawn-digits", "--max-steps", "2"]
    done = launch(cluster, hostile_runs, where, "-j", "1x1", "--name", "run", *words, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    told = record(cluster, hostile_runs, "run")
    assert told["status"] == "done"
    arrived = {name: value for name, value in told["environment"]["env"].items() if name in values}
    assert arrived == values


def test_nothing_of_the_host_gets_in(cluster: Cluster, runs: str) -> None:
    site = "$(python3 -c 'import site; print(site.getusersitepackages())')"
    prepare = f"""
    mkdir -p /home/lab/.local/lib/python3.11/site-packages /shared/leak {site}
    for d in /home/lab/.local/lib/python3.11/site-packages {site} /shared/leak; do
        echo 'raise SystemExit("the host got in")' | tee $d/sitecustomize.py $d/usercustomize.py $d/torch.py >/dev/null
    done
    """
    script = """
    srun() { echo a function of the user; exit 9; }
    trainer() { echo a function of the user; exit 9; }
    export -f srun trainer
    export PYTHONPATH=/shared/leak LD_PRELOAD=/nowhere.so CUDA_VISIBLE_DEVICES=7 http_proxy=http://nowhere:1
    export RANK=5 WORLD_SIZE=9 OMP_NUM_THREADS=7 TRAINER_EPOCHS=1 SBATCH_TIMELIMIT=1 SECRET_TOKEN=secret
    PYTHONPATH= LD_PRELOAD= exec invoke singularity-run --image /shared/intermodal.sif --runs-dir "$1" -j 2x1 \\
        --name run -- --max-steps 4
    """
    cluster.lab("bash", "-c", prepare, check=True)
    try:
        done = cluster.lab("bash", "-c", script, "bash", runs)
    finally:
        cluster.lab("rm", "-rf", "/home/lab/.local", "/shared/leak")
    assert done.returncode == 0, done.stdout + done.stderr
    told = record(cluster, runs, "run")
    assert told["topology"]["world_size"] == 2
    assert told["environment"]["threads"] == 1
    assert "secret" not in json.dumps(told)


def test_gpus_that_slurm_gives_are_handed_in(cluster: Cluster, runs: str) -> None:
    done = launch(cluster, runs, "-j", "1x2", "--gpus-per-node", "2", "--name", "run", "--", "--max-steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    script = cluster.local(f"{runs}/run/job.sbatch").read_text()
    assert "--nv" in script
    assert "#SBATCH --gpus-per-node=2" in script


def test_data_sets_are_copied_to_the_nodes_once(cluster: Cluster, runs: str) -> None:
    data = draw(cluster, runs)
    words = ("-j", "2x2", "--name", "run", "--data-dir", data, "--data-stage")
    done = launch(cluster, runs, *words, "--", "--dataset", "drawn-digits", "--max-steps", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    log = cluster.local(f"{runs}/run/attempt-0.log").read_text()
    assert log.count("data sets are on c") == 2
    assert cluster.on("c1", "sh", "-c", "ls -d /tmp/intermodal-* 2>&1").returncode != 0


REFUSED = {
    "no SIF": (["--image", "/shared/none.sif"], "There is no SIF"),
    "no SIF but a file": (["--image", "/shared/broken.sif"], "not a SIF"),
    "an unknown partition": (["--partition", "nowhere"], "HINT: --partition"),
    "an unknown account": (["--account", "nobody"], "HINT: --account"),
    "more nodes than there are": (["--nodes", "3"], "HINT: fewer --nodes"),
    "no time where the site wants one": (["--partition", "strict"], "HINT: --time-limit-min"),
    "too long a time": (["--partition", "small", "--time-limit-min", "10"], "HINT: --time-limit-min"),
    "an option that has another owner": (["--sbatch=--ntasks=4"], "belongs to --nodes"),
    "the beginning of such an option": (["--sbatch=--part=main"], "belongs to --partition"),
    "a folder in memory": (["--runs-dir", "/local/runs"], "other nodes cannot see"),
}


@pytest.mark.parametrize(("words", "told"), REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_request_is_refused_and_nothing_is_submitted(
    cluster: Cluster, runs: str, words: list[str], told: str
) -> None:
    cluster.lab("sh", "-c", "head -c 1000 /dev/urandom > /shared/broken.sif", check=True)
    done = launch(cluster, runs, "--detach", *words, "--", "--max-steps", "2")
    assert done.returncode == 2, done.stdout + done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not cluster.jobs()


def test_a_folder_that_the_nodes_cannot_see_ends_the_job_at_once(cluster: Cluster) -> None:
    done = launch(cluster, "/var/tmp/runs", "--name", "run", "--", "--max-steps", "2")
    cluster.lab("rm", "-rf", "/var/tmp/runs")
    assert done.returncode == 2
    assert "see that all nodes share that folder" in done.stdout


def test_a_bad_request_of_the_trainer_is_never_queued_again(cluster: Cluster, runs: str) -> None:
    done = launch(cluster, runs, "-j", "2x2", "--name", "run", "--", "--batch-size", "63")
    assert done.returncode == 2
    assert "cannot be shared among 4 ranks" in done.stdout
    assert not cluster.local(f"{runs}/run/attempt-1.log").exists()


def test_check_asks_slurm_and_submits_nothing(cluster: Cluster, runs: str) -> None:
    done = launch(cluster, runs, "--nodes", "2", "--check", "--", "--max-steps", "2")
    assert done.returncode == 0, done.stderr
    assert "to start at" in done.stdout
    assert not cluster.jobs()


def test_the_printed_script_can_be_submitted_by_hand(cluster: Cluster, runs: str) -> None:
    done = launch(cluster, runs, "-j", "2x1", "--name", "run", "--dryrun", "--", "--max-steps", "4")
    assert done.returncode == 0, done.stderr
    cluster.local(runs).mkdir(parents=True, exist_ok=True)
    submit = 'mkdir -p "$1/run" && printf "%s\\n" "$2" > "$1/run/job.sbatch" && sbatch --wait "$1/run/job.sbatch"'
    cluster.on("login", "chown", "-R", "lab", runs)
    assert cluster.lab("bash", "-c", submit, "bash", runs, done.stdout).returncode == 0
    assert record(cluster, runs, "run")["status"] == "done"


def test_without_slurm_the_same_command_runs_on_this_host(cluster: Cluster, runs: str) -> None:
    hashes = set()
    for layout in ("1x2", "2x1"):
        done = launch(cluster, runs, "--no-slurm", "-j", layout, "--name", layout, "--", "--max-steps", "50")
        assert done.returncode == 0, done.stdout + done.stderr
        hashes.add(record(cluster, runs, layout)["result"]["weights_sha256"])
    on_slurm = launch(cluster, runs, "-j", "2x1", "--name", "slurm", "--", "--max-steps", "50")
    assert on_slurm.returncode == 0
    hashes.add(record(cluster, runs, "slurm")["result"]["weights_sha256"])
    assert len(hashes) == 1
    assert record(cluster, runs, "2x1")["runtime"] == "singularity"


def test_ctrl_c_without_slurm_saves_and_leaves_nothing(cluster: Cluster, runs: str) -> None:
    words = (
        "invoke",
        "singularity-run",
        "--image",
        SIF,
        "--runs-dir",
        runs,
        "--no-slurm",
        "-j",
        "2x1",
        "--name",
        "run",
    )
    process = cluster.start(*words, "--", *LONG)
    reach(cluster, runs, "run", 50)
    cluster.lab("pkill", "-INT", "-o", "-f", "invoke singularity-run", check=True)
    assert process.wait(timeout=60) == 75
    until(lambda: not cluster.processes(), "no process", 20)


def test_list_and_status_know_the_runs(cluster: Cluster, runs: str) -> None:
    job = detach(cluster, runs, "-j", "1x1", "--name", "run", "--", "--max-steps", "4")
    handle = f"slurm://run/{job}"
    finish(cluster, runs, "run")
    assert handle in cluster.lab("invoke", "list", "--runs-dir", runs).stdout
    assert "done" in cluster.lab("invoke", "status", handle, "--runs-dir", runs).stdout


def test_make_test_passes_inside_the_sif(cluster: Cluster) -> None:
    done = invoke("test", "--base", "cpu", "--os-image", OS_IMAGE, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    out = str(cluster.SHARED / "intermodal-test.sif")
    done = invoke("singularity-build", "--from", "intermodal:test", "--out", out, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    done = cluster.lab("invoke", "singularity-test", "--image", "/shared/intermodal-test.sif", timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


def test_a_shell_opens_inside(cluster: Cluster) -> None:
    done = cluster.lab("bash", "-c", "echo 'echo $HOME; pwd; id -u' | invoke singularity-shell --image " + SIF)
    assert done.stdout.split() == ["/home/trainer", "/workspace", "2000"]


@pytest.fixture
def another_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a cluster beside the one of the other tests, and of all that Docker keeps for it."""
    name = "intermodal-another"
    monkeypatch.setenv("CLUSTER_NAME", name)
    monkeypatch.delenv("CLUSTER_NODES", raising=False)
    assert invoke("slurm-down").returncode == 0
    yield name
    assert invoke("slurm-down").returncode == 0


def test_a_cluster_of_three_nodes_comes_up_and_leaves_nothing(another_cluster: str) -> None:
    done = invoke("slurm-up", "--nodes", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    nodes = invoke("slurm-shell", "--", "sinfo", "--noheader", "--partition=main", "--format=%D %T %N")
    assert nodes.stdout.split() == ["3", "idle", "c[1-3]"]
    hosts = invoke("slurm-shell", "--", "getent", "hosts", "login", "c1", "c2", "c3").stdout.splitlines()
    assert len({line.split()[0] for line in hosts}) == 4
    assert invoke("slurm-shell", "--", "sh", "-c", "exit 7").returncode == 7
    refused = invoke("slurm-up", "--nodes", "2")
    assert refused.returncode == 2
    assert refused.stderr == "error: The cluster has 3 compute nodes, not 2. HINT: invoke slurm-down\n"
    assert invoke("slurm-down").returncode == 0
    for kind in (("ps", "--all"), ("network", "ls"), ("volume", "ls")):
        assert docker(*kind, "--quiet", "--filter", f"name={another_cluster}") == []
    assert "HINT: invoke slurm-up" in invoke("slurm-shell", "--", "true").stderr


def test_a_cluster_that_is_up_is_up_at_once(another_cluster: str) -> None:
    assert invoke("slurm-up").returncode == 0  # its images are there from now on
    began = time.monotonic()
    assert invoke("slurm-up").returncode == 0
    assert time.monotonic() - began < 5
    assert invoke("slurm-down").returncode == 0
    began = time.monotonic()
    assert invoke("slurm-up").returncode == 0
    assert time.monotonic() - began < 20
    assert invoke("slurm-shell", "--", "sinfo", "-h", "-p", "main", "-o", "%D %T").stdout == "2 idle\n"


@pytest.mark.parametrize("nodes", ["0", "100", "two"])
def test_a_number_of_nodes_that_is_none_is_refused(another_cluster: str, nodes: str) -> None:
    done = invoke("slurm-up", "--nodes", nodes)
    assert done.returncode == 2
    assert "HINT: --nodes" in done.stderr
    assert docker("ps", "--all", "--quiet", "--filter", f"name={another_cluster}") == []
