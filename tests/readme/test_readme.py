"""Every command of the README, in order, as a new user types them in a clean clone."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
BLOCKS = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of what is committed."""
    folder = tmp_path_factory.mktemp("new-user") / "intermodal"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


@pytest.mark.parametrize("block", BLOCKS, ids=[block.split("\n")[0][:40].strip() for block in BLOCKS])
def test_the_commands_work(clone: Path, block: str) -> None:
    drop = ("VIRTUAL_ENV", "PYTHONPATH", "INTERMODAL_PYTHON")
    env = {key: value for key, value in os.environ.items() if key not in drop}
    script = f"set -euo pipefail\n[ ! -d .venv ] || . .venv/bin/activate\n{block}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=clone,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    _check(block, done.stdout)


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
