"""Every command of the README, in order, as a new user types them in a clean clone."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import images

ROOT = Path(__file__).parent.parent.parent
NAME = "intermodal-readme"  # of the cluster, beside that of the other tests
BLOCKS = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of what is committed."""
    folder = tmp_path_factory.mktemp("new-user") / "intermodal"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


@pytest.fixture(scope="session")
def login_node(clone: Path) -> Iterator[None]:
    """A test cluster whose home folders are shared by all nodes; a user has put a clone and the SIF there."""
    shared = clone / "build" / "cluster"
    shared.mkdir(parents=True, exist_ok=True)
    for path in clone.glob("intermodal.sif*"):
        shutil.copy2(path, shared)
    with images.secrets() as secrets:  # pip of that host needs what pip of this host needs
        for name, secret in zip(("pip.conf", "ca.pem"), secrets, strict=False):
            shutil.copy(secret.rpartition("src=")[2], shared / name)
    cluster(clone, "up")
    cluster(clone, "sh", "git", "config", "--global", "safe.directory", "*")
    cluster(clone, "sh", "git", "clone", "--quiet", "/shared/project", "/home/lab/intermodal")
    cluster(clone, "sh", "sh", "-c", "ln -s /shared/intermodal.sif* ~/intermodal")
    yield
    cluster(clone, "down")  # unless the README did


def cluster(clone: Path, *words: str) -> None:
    env = {**os.environ, "CLUSTER_NAME": NAME}
    subprocess.run([clone / "slurm/cluster/cluster", *words], check=True, stdout=subprocess.DEVNULL, env=env)


def on_the_login_node(block: str) -> list[str]:
    prepare = """
    unset INTERMODAL_PYTHON
    export PIP_CONFIG_FILE=/shared/pip.conf
    [ ! -e /shared/ca.pem ] || export PIP_CERT=/shared/ca.pem
    cd ~/intermodal
    """
    return ["slurm/cluster/cluster", "sh", "bash", "-c", f"set -euo pipefail\n{prepare}\n{block}"]


@pytest.mark.parametrize("block", BLOCKS, ids=[block.split("\n")[0][:40].strip() for block in BLOCKS])
def test_the_commands_work(clone: Path, block: str, request: pytest.FixtureRequest) -> None:
    if "invoke singularity-build" in block:
        _spare_the_conversion(clone)
    drop = ("VIRTUAL_ENV", "PYTHONPATH", "INTERMODAL_PYTHON")
    env = {key: value for key, value in os.environ.items() if key not in drop} | {"CLUSTER_NAME": NAME}
    script = f"set -euo pipefail\n[ ! -d .venv ] || . .venv/bin/activate\n{block}"
    argv = ["bash", "-c", script]
    if block.startswith("# on a login node"):
        request.getfixturevalue("login_node")
        argv = on_the_login_node(block)
    done = subprocess.run(
        argv,
        cwd=clone,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    _check(block, done.stdout)


def _spare_the_conversion(clone: Path) -> None:
    """The integration tests have made a SIF of the same image: it is up to date here, too."""
    for path in (ROOT / "build" / "cluster").glob("intermodal.sif*"):
        shutil.copy2(path, clone)


def _check(block: str, output: str) -> None:
    """What the README promises of the output."""
    if "make train" in block:
        accuracy = re.search(r"val_accuracy ([\d.]+)", output)
        assert accuracy, output
        assert float(accuracy.group(1)) >= 0.97
        assert "same in Docker: invoke build && invoke docker-run" in output
        assert re.search(r"run done: .*/runs/\S+", output)
    if "weights_sha256" in block:
        hashes = [line for line in output.splitlines() if "weights_sha256" in line]
        assert len(hashes) == 4
        assert len(set(hashes)) == 1
    if "--show-config" in block:
        assert "flag" in output
        assert "epoch" in output
