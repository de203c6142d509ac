"""A real Slurm cluster of two nodes with Apptainer, and a user who is not root."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import HOSTILE
from tests.integration.conftest import OS_IMAGE, Cluster, docker, invoke, until
from tests.integration.slurm import LONG, SIF, detach, draw, finish, launch, reach, record


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
