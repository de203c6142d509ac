"""The Makefile: a setup that cannot work says why, and training takes the processes that fit."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def make(folder, *words, **env):
    drop = ("INTERMODAL_PYTHON", "MAKEFLAGS", "MAKEOVERRIDES", "NPROC", "CUDA_VISIBLE_DEVICES")
    inherited = {key: value for key, value in os.environ.items() if key not in drop}
    return subprocess.run(
        ["make", *words], cwd=folder, env={**inherited, **env}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("python", ["false", "no-such-python"])
def test_a_python_without_venv_gets_a_hint_and_leaves_nothing(python, tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "containers").mkdir()
    for name in ("containers/host.lock", "pyproject.toml"):
        (tmp_path / name).touch()
    done = make(tmp_path, "setup", f"PYTHON={python}")
    assert done.returncode
    assert done.stderr.splitlines()[0].startswith(f"error: {python} is not a Python")
    assert "HINT: apt install python3-venv" in done.stderr
    assert not (tmp_path / ".venv").exists()


GPUS = {"none": ("", 2), "one": ("GPU-a", 1), "two": ("0,1", 2), "many": ("0,1,2,3", 2)}


@pytest.mark.parametrize(("visible", "processes"), GPUS.values(), ids=GPUS.keys())
def test_training_takes_two_processes_or_one_for_one_gpu(visible, processes):
    done = make(ROOT, "--dry-run", "train", INTERMODAL_PYTHON=sys.executable, CUDA_VISIBLE_DEVICES=visible)
    assert f" local-run --nproc-per-node {processes} -- " in done.stdout, done.stderr


def test_another_number_of_processes_may_be_asked_for():
    assert "--nproc-per-node 4 " in make(ROOT, "--dry-run", "train", NPROC="4", INTERMODAL_PYTHON=sys.executable).stdout
