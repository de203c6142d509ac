"""Runs in real containers: same bits, no rest, named causes."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import docker, interrupt, invoke, start_invoke, until

SHORT = ("--max-steps", "50")
LONG = ("--epochs", "50000")
# Below init (1) is the agent, below the agent are the ranks.
KILL_A_RANK = """
import os, pathlib
parent = {}
for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
    words = path.read_text().rpartition(")")[2].split()
    parent[int(path.parent.name)] = int(words[1])
os.kill(max(pid for pid, above in parent.items() if parent.get(above) == 1), 9)
"""


def run(runtime: str, folder: Path, name: str, layout: str, *words: str, **env: str) -> dict[str, Any]:
    """A run to its good end; returns run.json. `words` are launcher flags, `--`, and the trainer's arguments."""
    done = invoke(f"{runtime}-run", "-j", layout, "--name", name, "--runs-dir", str(folder), *words, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return record(folder, name)


def record(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name / "run.json").read_text())
    return content


def stepping(folder: Path, name: str) -> bool:
    path = folder / name / "metrics.jsonl"
    return path.exists() and path.read_text().count("\n") > 3


def test_every_layout_in_docker_and_outside_gives_the_same_bits(image: str, tmp_path: Path) -> None:
    told = {
        f"{runtime} {layout}": run(runtime, tmp_path, f"{runtime}-{layout}", layout, *flags, "--", *SHORT)
        for runtime, layout, flags in (
            ("docker", "1x2", ("--image", image)),
            ("docker", "2x1", ("--image", image)),
            ("local", "1x2", ()),
        )
    }
    torch = {one["environment"]["torch"] for one in told.values()}
    python = {one["environment"]["python"].rpartition(".")[0] for one in told.values()}
    assert len(torch) == 1, "this host and the image have different torch: compare nothing"
    assert len({one["result"]["weights_sha256"] for one in told.values()}) == 1, (told, python)


def test_the_record_names_the_image_by_id(image: str, tmp_path: Path) -> None:
    told = run("docker", tmp_path, "record", "1x1", "--image", image, "--", *SHORT)
    assert told["runtime"] == "docker"
    assert told["image"]["reference"] == image
    assert told["image"]["id"] == docker("image", "inspect", "--format", "{{.Id}}", image)[0]
    assert told["image"]["base"]
    assert told["git"]["revision"]


def test_the_dry_run_is_a_script_that_gives_the_same_bits(image: str, tmp_path: Path) -> None:
    told = run("docker", tmp_path, "real", "2x1", "--image", image, "--", *SHORT)
    words = ("docker-run", "-j", "2x1", "--image", image, "--name", "dry", "--runs-dir", str(tmp_path), "--dryrun")
    script = invoke(*words, "--", *SHORT).stdout
    assert not (tmp_path / "dry").exists(), "a dry run changes nothing"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert record(tmp_path, "dry")["result"]["weights_sha256"] == told["result"]["weights_sha256"]


def test_files_belong_to_who_launched_and_nobody_is_root_inside(image: str, tmp_path: Path) -> None:
    sudo = {"SUDO_UID": "4321", "SUDO_GID": "4321"} if os.getuid() == 0 else {}
    run("docker", tmp_path, "owner", "1x1", "--image", image, "--", *SHORT, **sudo)
    owner = 4321 if sudo else os.getuid()
    assert {path.stat().st_uid for path in (tmp_path / "owner").rglob("*")} == {owner}


def test_data_sets_and_hostile_values_arrive(image: str, tmp_path: Path) -> None:
    make = ("-m", "trainer", "data", "make", "drawn-digits", "--out", str(tmp_path / "da ta" / "drawn-digits"))
    subprocess.run([os.sys.executable, *make, "--train", "600", "--test", "100"], check=True, capture_output=True)  # type: ignore[attr-defined]
    value = "a b'c\"d$HOME`id`,e\\f\ng=h*"
    done = invoke(
        "docker-run", "--image", image, "--name", "hostile", "--runs-dir", str(tmp_path), "--data-dir",
        str(tmp_path / "da ta"), "--env", f"NCCL_HOSTILE={value}", "--", "--dataset", "drawn-digits", *SHORT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert record(tmp_path, "hostile")["environment"]["env"]["NCCL_HOSTILE"] == value


@pytest.mark.parametrize("victim", ["a rank", "a container", "the head's container"])
def test_a_killed_part_ends_all_within_20_s_and_is_named(image: str, tmp_path: Path, victim: str) -> None:
    process = start_invoke(
        "docker-run", "-j", "2x2", "--image", image, "--name", "victim", "--runs-dir", str(tmp_path), "--", *LONG
    )
    until(lambda: stepping(tmp_path, "victim"), "the first steps")
    if victim == "a rank":
        docker("exec", "victim-1", "python3", "-c", KILL_A_RANK)
    else:
        docker("kill", "victim-0" if "head" in victim else "victim-1")
    began = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert process.returncode not in (0, 2, 75)
    told = record(tmp_path, "victim")
    assert told["status"] == "failed"
    expected = {
        "a rank": "SIGKILL",
        "a container": "vanished",
        "the head's container": "node 0 ended with exit code 137",
    }
    assert expected[victim] in told["failure"]["message"]
    assert output.splitlines()[-1].startswith("run failed with exit code")
    assert told["failure"]["message"] in output.splitlines()[-1]


def test_a_container_that_somebody_removes_is_named_as_the_cause(image: str, tmp_path: Path) -> None:
    words = ("docker-run", "--image", image, "--name", "removed", "--runs-dir", str(tmp_path), "--", *LONG)
    process = start_invoke(*words)
    until(lambda: stepping(tmp_path, "removed"), "the first steps")
    docker("rm", "--force", "removed-0")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert output.splitlines()[-1].endswith("(somebody removed its container)")
    assert record(tmp_path, "removed")["failure"]["message"].endswith("(somebody removed its container)")


def test_a_network_that_a_stranger_uses_is_told_and_cancel_removes_it_later(image: str, tmp_path: Path) -> None:
    words = ("docker-run", "--image", image, "--name", "shared", "--runs-dir", str(tmp_path), "--", *LONG)
    process = start_invoke(*words)
    until(lambda: stepping(tmp_path, "shared"), "the first steps")
    docker("run", "--detach", "--init", "--name", "stranger", "--network", "intermodal-shared", image, "sleep", "120")
    try:
        interrupt(process)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 75, output
        assert "warning: what the run left was not removed" in output
        assert "invoke cancel docker://shared" in output
    finally:
        docker("rm", "--force", "stranger")
    assert "had ended with exit code 75" in invoke("cancel", "docker://shared", "--runs-dir", str(tmp_path)).stdout


def test_a_second_ctrl_c_ends_the_run_at_once_and_is_the_cause(image: str, tmp_path: Path) -> None:
    words = ("docker-run", "--image", image, "--name", "hurry", "--runs-dir", str(tmp_path), "--", *LONG)
    process = start_invoke(*words)
    until(lambda: stepping(tmp_path, "hurry"), "the first steps")
    docker("pause", "hurry-0")  # it cannot save
    interrupt(process)
    time.sleep(1)
    interrupt(process)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 137, output
    assert output.splitlines()[-1].endswith("node 0 was stopped at once by a second request")


def test_ctrl_c_saves_and_leaves_nothing(image: str, tmp_path: Path) -> None:
    words = ("docker-run", "-j", "2x1", "--image", image, "--name", "ctrlc", "--runs-dir", str(tmp_path), "--", *LONG)
    process = start_invoke(*words)
    until(lambda: stepping(tmp_path, "ctrlc"), "the first steps")
    interrupt(process)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert record(tmp_path, "ctrlc")["status"] == "preempted"
    assert list((tmp_path / "ctrlc" / "checkpoints").iterdir())


@pytest.mark.parametrize("runtime", ["docker", "local"])
def test_a_detached_run_is_seen_followed_and_cancelled(image: str, tmp_path: Path, runtime: str) -> None:
    flags = ("--image", image) if runtime == "docker" else ()
    where = ("--runs-dir", str(tmp_path))
    started = invoke(f"{runtime}-run", "-j", "2x1", *flags, "--name", "back", *where, "--detach", "--", *LONG)
    handle = started.stdout.splitlines()[-1]
    assert handle == f"{runtime}://back"
    until(lambda: stepping(tmp_path, "back"), "the first steps")
    assert "running" in invoke("status", handle, *where).stdout
    assert handle in invoke("list", *where).stdout
    again = invoke(f"{runtime}-run", *flags, "--name", "back", *where, "--", *SHORT)
    assert (again.returncode, len(again.stderr.splitlines())) == (2, 1)
    assert "exit code 75" in invoke("cancel", handle, *where).stdout
    assert "preempted" in invoke("status", handle, *where).stdout
    assert "[0:0] epoch" in invoke("logs", "-f", handle, *where).stdout
    assert "had ended" in invoke("cancel", handle, *where).stdout


@pytest.mark.parametrize("runtime", ["docker", "local"])
def test_after_kill_9_of_the_launcher_cancel_removes_the_rest(image: str, tmp_path: Path, runtime: str) -> None:
    flags = ("--image", image) if runtime == "docker" else ()
    where = ("--runs-dir", str(tmp_path))
    process = start_invoke(f"{runtime}-run", "-j", "2x1", *flags, "--name", "lost", *where, "--", *LONG)
    until(lambda: stepping(tmp_path, "lost"), "the first steps")
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert "lost" in invoke("list", *where).stdout
    assert invoke("cancel", f"{runtime}://lost", *where).returncode == 0
    assert record(tmp_path, "lost")["status"] == "failed"


def test_too_little_memory_is_named(image: str, tmp_path: Path) -> None:
    done = invoke(
        "docker-run", "--image", image, "--memory-gb", "0.1", "--name", "oom", "--runs-dir", str(tmp_path), "--", *SHORT
    )
    assert done.returncode == 137, done.stdout
    assert "raise --memory-gb" in done.stdout


def test_the_time_limit_saves_and_ends(image: str, tmp_path: Path) -> None:
    words = ("docker-run", "--image", image, "--name", "limit", "--runs-dir", str(tmp_path), "--time-limit-min", "0.1")
    done = invoke(*words, "--", *LONG)
    assert done.returncode == 75, done.stdout


def test_a_missing_image_and_a_missing_engine_are_one_line(tmp_path: Path) -> None:
    for words, env, message in (
        (("--image", "nowhere:1"), {}, "There is no image nowhere:1"),
        ((), {"DOCKER_HOST": f"unix://{tmp_path}/none"}, "The Docker engine does not answer"),
    ):
        done = invoke("docker-run", *words, "--runs-dir", str(tmp_path), **env)
        assert done.returncode == 2
        assert message in done.stderr
        assert "HINT:" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_bad_request_inside_is_one_line_and_exit_code_2(image: str, tmp_path: Path) -> None:
    where = ("--runs-dir", str(tmp_path), "--image", image)
    done = invoke("docker-run", "-j", "2x1", *where, "--", "--workload", "nope")
    assert done.returncode == 2, done.stdout
    assert "Unknown workload 'nope'; valid are: mnist." in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
