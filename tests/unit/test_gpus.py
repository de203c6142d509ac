"""Sharing out GPUs: none belongs to two nodes, and too few is said before anything starts."""

import pytest

from launch import shell
from launch.gpus import check, share_out, shares, visible
from trainer.errors import UserError

SHARES = {
    "all for one node": ("abcd", 1, None, ("abcd",)),
    "half for each of two": ("abcd", 2, None, ("ab", "cd")),
    "the odd one stays free": ("abc", 2, None, ("a", "b")),
    "fewer if asked": ("abcd", 2, 1, ("a", "b")),
    "none if asked": ("abcd", 2, 0, ("", "")),
    "none where there are none": ("", 3, None, ("", "", "")),
}


@pytest.mark.parametrize(("available", "nodes", "each", "shared"), SHARES.values(), ids=SHARES.keys())
def test_gpus_are_shared_out(available, nodes, each, shared):
    assert share_out(tuple(available), nodes, each) == tuple(map(tuple, shared))


@pytest.mark.parametrize(("available", "nodes", "each", "hint"), [("abc", 2, 2, 1), ("", 1, 1, 0), ("a", 4, 1, 0)])
def test_too_few_gpus_are_refused_with_the_number_that_would_do(available, nodes, each, hint):
    with pytest.raises(UserError, match=rf"this host has {len(available)}\. HINT: --gpus-per-node {hint}"):
        share_out(tuple(available), nodes, each)


@pytest.mark.parametrize(("processes", "gpus"), [(1, ("a",)), (2, ("ab", "cd")), (8, ("",)), (1, ("ab",))])
def test_a_process_has_its_own_gpu_or_none(processes, gpus):
    check(processes, tuple(map(tuple, gpus)))


def test_two_processes_never_share_a_gpu():
    with pytest.raises(UserError, match=r"2 processes on a node with 1 GPU.* HINT: --nproc-per-node 1"):
        check(2, (("a",), ("b",)))


VISIBLE = {
    "two by number": ("0,1", ("0", "1")),
    "one by its name": ("GPU-0a1b", ("GPU-0a1b",)),
    "with blanks": ("0, 1", ("0", "1")),
    "none": ("", ()),
    "none, as torch users write it": ("-1", ()),
}


@pytest.mark.parametrize(("text", "found"), VISIBLE.values(), ids=VISIBLE.keys())
def test_cuda_visible_devices_is_heeded(text, found, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    monkeypatch.setattr(shell, "output", lambda argv: pytest.fail("nvidia-smi was asked"))
    assert visible() == found


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Install an nvidia-smi that prints a text and ends with a code."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def install(text, code):
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\nprintf '{text}'\nexit {code}\n")
        path.chmod(0o755)

    return install


@pytest.mark.parametrize(("listed", "found"), [("", ()), ("GPU-a\nGPU-b\n", ("GPU-a", "GPU-b"))])
def test_otherwise_the_driver_is_asked(listed, found, driver):
    driver(listed, 0)
    assert visible() == found


def test_a_host_without_a_driver_has_no_gpus(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shares(2, None) == ((), ())


def test_a_driver_that_fails_is_not_a_host_without_gpus(driver):
    driver("NVIDIA-SMI has failed", 9)
    with pytest.raises(UserError, match=r"nvidia-smi is installed but fails.* HINT: --gpus-per-node 0"):
        shares(1, None)


def test_the_driver_is_not_asked_for_gpus_that_nobody_wants(driver):
    driver("NVIDIA-SMI has failed", 9)
    assert shares(2, 0) == ((), ())


def test_nodes_never_fall_back_to_the_cpu_because_gpus_are_few():
    with pytest.raises(UserError, match=r"4 nodes cannot share out 2 GPU.* HINT: --nodes 2"):
        share_out(("a", "b"), 4, None)
