"""What happens to jobs on a real Slurm cluster: requests to save, lost nodes, preemption, cancelling, crashes."""

import time

import pytest

from tests.integration.conftest import Cluster, until
from tests.integration.slurm import LONG, detach, draw, finish, launch, reach, record


@pytest.fixture(scope="session")
def undisturbed(cluster: Cluster) -> str:
    """Weights of LONG on two nodes of two, without any interruption."""
    runs = "/shared/runs/undisturbed"
    cluster.lab("rm", "-rf", runs)
    done = launch(cluster, runs, "-j", "2x2", "--name", "run", "--", *LONG)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(record(cluster, runs, "run")["result"]["weights_sha256"])


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
