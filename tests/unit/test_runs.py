"""Whole runs with real processes: same bits in every layout, after every interruption, and clean ends."""

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo  # what the agent would import; here once for all tests

from tests.processes import Node, end_all, free_port, node_of, reached, record, run, start, start_run, until, weights
from trainer import checkpoint

torch.set_num_threads(1)
SHORT = ("--max-steps", "45", "--checkpoint-every", "20")
LONG = ("--epochs", "5000", "--batch-size", "60", "--keep-checkpoints", "1")


@pytest.fixture(autouse=True)
def nodes_end() -> Iterator[None]:
    yield
    end_all()


def ends_within(nodes: list[Node], seconds: float) -> list[int]:
    began = time.monotonic()
    codes = [node.wait() for node in nodes]
    assert time.monotonic() - began < seconds
    return codes


def test_the_layout_changes_nothing(tmp_path: Path) -> None:
    hashes = {layout: weights(run(tmp_path, f"run-{layout}", layout, *SHORT)) for layout in ("1x4", "2x2", "4x1")}
    assert len(set(hashes.values())) == 1, hashes


def test_an_interrupted_run_of_three_ranks_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    arguments = ("--batch-size", "63", "--max-steps", "120", "--schedule", "one-cycle")
    undisturbed = run(tmp_path, "whole", "1x3", *arguments)
    (node,) = start_run(tmp_path, "parts", "1x3", *arguments)
    until(lambda: reached(tmp_path, "parts", 30), "step 30")
    node.signal(signal.SIGUSR1)
    assert node.wait() == 75, node.text()
    assert record(tmp_path, "parts")["status"] == "preempted"
    resumed = run(tmp_path, "parts", "3x1", *arguments, TRAINER_RESUME="auto")
    assert weights(resumed) == weights(undisturbed)
    assert 30 <= resumed["result"]["resumed_at"] < 120  # type: ignore[index]
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "parts")]
    assert [_values(line) for line in lines[0]] == [_values(line) for line in lines[1]]


def _values(line: str) -> dict[str, object]:
    timed = ("time_s", "samples_per_s")
    return {key: value for key, value in json.loads(line).items() if key not in timed}


def test_a_damaged_checkpoint_is_named_and_the_older_one_used(tmp_path: Path) -> None:
    whole = run(tmp_path, "run", "1x2", *SHORT)
    newest = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1] / "state.pt"
    newest.write_bytes(newest.read_bytes()[:-1])
    (node,) = start_run(tmp_path, "run", "1x2", *SHORT, TRAINER_RESUME="auto")
    assert node.wait() == 0, node.text()
    assert "skipping the damaged checkpoint" in node.text()
    assert "resuming at step 40" in node.text()
    assert weights(record(tmp_path, "run")) == weights(whole)


def test_a_checkpoint_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    (node,) = start_run(tmp_path, "run", "1x2", "--batch-size", "60", "--max-steps", "2000")
    until(lambda: reached(tmp_path, "run", 30), "step 30")
    node.signal(signal.SIGTERM)
    assert node.wait() == 75
    step = int(sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1].name[5:])
    told = run(tmp_path, "run", "1x3", "--batch-size", "60", "--max-steps", str(step + 20), TRAINER_RESUME="auto")
    assert told["result"]["steps"] == step + 20  # type: ignore[index]


def test_a_resume_with_other_settings_is_refused(tmp_path: Path) -> None:
    run(tmp_path, "run", "1x1", "--max-steps", "5")
    (node,) = start_run(tmp_path, "run", "1x1", "--max-steps", "9", "--lr", "0.5", TRAINER_RESUME="auto")
    assert node.wait() == 2
    assert node.text().splitlines()[-1].startswith("error: The checkpoint was made with --lr 0.001, now it is 0.5.")


@pytest.mark.parametrize("victim", ["head rank", "last rank", "head agent", "other agent"])
def test_a_killed_process_ends_all_and_is_named(tmp_path: Path, victim: str) -> None:
    nodes = start_run(tmp_path, "run", "2x2", *LONG)
    until(lambda: reached(tmp_path, "run", 20), "step 20")
    ranks = [pid for node in nodes for pid in node.ranks()]
    assert len(ranks) == 4
    chosen = {"head rank": ranks[0], "last rank": ranks[3], "head agent": nodes[0].pid, "other agent": nodes[1].pid}
    os.kill(chosen[victim], signal.SIGKILL)
    codes = ends_within(nodes, 20)
    assert all(codes)
    until(lambda: not any(_alive(pid) for pid in ranks), "the end of all ranks")
    _check_cause(tmp_path, nodes, victim)


def _check_cause(folder: Path, nodes: list[Node], victim: str) -> None:
    survivor = nodes[1] if victim == "head agent" else nodes[0]
    last = survivor.text().splitlines()[-1]
    expected = {
        "head rank": "rank 0 (node 0)",
        "last rank": "rank 3 (node 1)",
        "head agent": "node 0 on",
        "other agent": "node 1 on",
    }
    assert f"first failure: {expected[victim]}" in last, survivor.text()
    if victim != "head agent":  # nobody is left there to write it; the launcher does
        told = record(folder, "run")
        assert told["status"] == "failed"
        assert told["failure"]["message"] in last  # type: ignore[index]


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_a_rank_that_raises_is_the_last_thing_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer import workloads

    def explode(self: object, output: object, batch: object) -> torch.Tensor:
        if os.environ.get("RANK") == "2":
            raise ZeroDivisionError("made by the test")
        return torch.nn.functional.cross_entropy(output, batch.labels)  # type: ignore[arg-type,attr-defined]

    monkeypatch.setattr(workloads.Mnist, "loss", explode)
    nodes = start_run(tmp_path, "run", "1x3", "--batch-size", "60")
    assert [node.wait() for node in nodes] == [1]
    lines = nodes[0].text().splitlines()
    assert lines[-1].endswith("ZeroDivisionError: made by the test")
    assert "first failure: rank 2 (node 0)" in lines[-1]
    assert any("in explode" in line for line in lines)
    assert "closed by peer" not in nodes[0].text()


def test_a_full_disk_during_a_checkpoint_is_one_line_and_keeps_the_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint._write

    def full(folder: Path, step: int, state: checkpoint.State) -> None:
        if step > 20:
            raise OSError(28, "No space left on device")
        write(folder, step, state)

    monkeypatch.setattr(checkpoint, "_write", full)
    nodes = start_run(tmp_path, "run", "2x1", *SHORT)
    assert [node.wait() for node in nodes] == [2, 2]
    assert nodes[0].text().splitlines()[-1].startswith("error: No space for the checkpoint of step 40")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000020"]


BAD = {
    "batch not divisible": (("--batch-size", "50"), {}, "1x4", "cannot be shared among 4 ranks"),
    "batch larger than the data": (("--batch-size", "1440"), {}, "1x2", "larger than the 1438 training samples"),
    "data missing": (("--dataset", "mnist", "--data-dir", "nowhere"), {}, "1x2", "Data set mnist is missing"),
    "cuda without a gpu": (("--device", "cuda"), {}, "1x1", "has no GPU"),
    "more processes than GPUs": ((), {"FAKE_GPUS": "1"}, "1x2", "with 1 GPU(s)"),
}


@pytest.mark.parametrize("case", BAD, ids=list(BAD))
def test_a_bad_request_is_one_line_with_a_hint_and_exit_code_2(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, env, layout, message = BAD[case]
    count = int(env.get("FAKE_GPUS", "0"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    (node,) = start_run(tmp_path, "run", layout, *arguments)
    assert node.wait() == 2
    assert message in node.text()
    assert "HINT:" in node.text()
    assert len(node.text().splitlines()) == 1


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        nodes = start_run(tmp_path, "run", "1x2", PET_MASTER_PORT=str(holder.getsockname()[1]))
        assert nodes[0].wait() == 2
    assert "of the head node is in use" in nodes[0].text()


def test_nodes_that_never_arrive_are_named_on_every_node_that_came(tmp_path: Path) -> None:
    env = node_of(4, 0, tmp_path)
    limit = ("--rendezvous-timeout-s", "2")
    nodes = [start(tmp_path / f"log{rank}", {**env, "PET_NODE_RANK": str(rank)}, *limit) for rank in (0, 1)]
    assert [node.wait() for node in nodes] == [1, 1]
    for node in nodes:
        assert "these did not arrive within 2 s: 2, 3." in node.text()
        assert "Traceback" not in node.text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_head_that_is_stopped_or_killed_takes_the_waiting_nodes_along(tmp_path: Path, number: int) -> None:
    env = node_of(4, 0, tmp_path)
    nodes = [start(tmp_path / f"log{rank}", {**env, "PET_NODE_RANK": str(rank)}) for rank in (0, 1)]
    time.sleep(1)
    nodes[0].signal(number)
    assert [node.wait() for node in nodes] == ([75, 75] if number == signal.SIGTERM else [-9, 1])
    assert ("head node went away" in nodes[1].text()) == (number == signal.SIGKILL)
    assert "Traceback" not in nodes[1].text()


def test_a_head_that_never_answers_is_named(tmp_path: Path) -> None:
    env = node_of(2, 1, tmp_path)
    node = start(tmp_path / "log", env, "--rendezvous-timeout-s", "1")
    assert node.wait() == 1
    assert "could not reach the head node" in node.text()
    assert "refused" in node.text()


@pytest.mark.parametrize("name", ["--seed", "--epochs", "--log-every"])
def test_nodes_with_different_commands_are_refused(tmp_path: Path, name: str) -> None:
    env = node_of(2, 0, tmp_path) | {"TRAINER_RUN_ID": "run"}
    nodes = [
        start(tmp_path / f"log{rank}", {**env, "PET_NODE_RANK": str(rank)}, name, str(rank + 1)) for rank in (0, 1)
    ]
    assert [node.wait() for node in nodes] == [2, 2]
    for node in nodes:
        assert f"Nodes differ in {name}: node 0 (" in node.text()
        assert "Traceback" not in node.text()


def test_a_request_to_stop_before_the_ranks_exist_is_not_lost(tmp_path: Path) -> None:
    env = node_of(2, 0, tmp_path)
    node = start(tmp_path / "log", env)
    time.sleep(0.5)
    node.signal(signal.SIGTERM)
    assert node.wait() == 75


def test_ranks_that_a_scheduler_started_need_no_agent(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
    job |= {"TRAINER_RUN_ID": "srun", "TRAINER_RUNS_DIR": str(tmp_path), "MASTER_PORT": str(free_port())}
    nodes = [
        start(tmp_path / f"{rank}.log", {**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}, *SHORT)
        for rank in (0, 1)
    ]
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].text()
    assert weights(record(tmp_path, "srun")) == weights(run(tmp_path, "agent", "1x2", *SHORT))


@pytest.mark.parametrize("end", ["done", "stopped", "killed"])
def test_no_temporary_file_is_left(tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)  # the nodes are forks of this process
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    (node,) = start_run(tmp_path, "run", "1x2", "--max-steps", "45" if end == "done" else "9999", TMPDIR=str(temporary))
    if end != "done":
        until(lambda: reached(tmp_path, "run", 20), "step 20")
        os.kill(
            node.pid if end == "stopped" else node.ranks()[0], signal.SIGTERM if end == "stopped" else signal.SIGKILL
        )
    assert node.wait() == {"done": 0, "stopped": 75, "killed": 137}[end]
    assert list(temporary.iterdir()) == []


def test_validation_counts_every_sample_once(tmp_path: Path) -> None:
    accuracies = set()
    for layout in ("1x1", "1x2", "1x3"):
        arguments = ("--max-steps", "1", "--batch-size", "60", "--lr", "0", "--eval-batch-size", "100")
        told = run(tmp_path, f"run-{layout}", layout, *arguments)
        accuracies.add(round(told["result"]["val_accuracy"] * 359, 6))  # type: ignore[index]
    assert len(accuracies) == 1
    assert accuracies.pop().is_integer()


def test_the_run_folder_is_complete(tmp_path: Path) -> None:
    told = run(tmp_path, "run", "1x2", *SHORT, NCCL_DEBUG="WARN", SECRET_TOKEN="hidden")
    assert told["status"] == "done"
    assert told["exit_code"] == 0
    assert told["topology"] == {"nodes": 1, "nproc_per_node": 2, "world_size": 2, "source": "PET"}
    assert {"reference", "id", "base", "sif_sha256"} == set(told["image"])  # type: ignore[call-overload]
    assert told["environment"]["env"]["NCCL_DEBUG"] == "WARN"  # type: ignore[index]
    assert "hidden" not in json.dumps(told)
    assert {"val_accuracy", "val_loss", "weights_sha256", "samples_per_s", "steps"} <= set(told["result"])  # type: ignore[call-overload]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all({"step", "epoch", "time_s"} <= set(line) for line in lines)
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("schedule", ["constant", "cosine", "one-cycle", "step"])
def test_every_optimizer_schedule_and_precision_learns(
    tmp_path: Path, precision: str, optimizer: str, schedule: str
) -> None:
    arguments = ("--optimizer", optimizer, "--schedule", schedule, "--precision", precision, "--max-steps", "60")
    rate = ("--lr", "0.05" if optimizer == "sgd" else "0.002")
    told = run(tmp_path, "run", "1x1", *arguments, *rate)
    assert told["result"]["val_accuracy"] > 0.6  # type: ignore[index]
