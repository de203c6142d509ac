"""Guards around every test, and values that break careless quoting."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import configuration, settings

# Nothing is written into the checkout, which may be read-only, and every run tries the same examples.
_HYPOTHESIS_HOME = tempfile.mkdtemp(prefix="hypothesis-")
configuration.set_hypothesis_home_dir(_HYPOTHESIS_HOME)
settings.register_profile("intermodal", database=None, deadline=None, derandomize=True, max_examples=50)
settings.load_profile("intermodal")

HOSTILE = {
    "a space": "two words",
    "a single quote": "it's",
    "a double quote": 'say "so"',
    "a dollar": "$HOME ${HOME} $(id)",
    "a backtick": "`id`",
    "a comma": "a,b",
    "a newline": "first\nsecond",
    "a backslash": "back\\slash\\n",
    "nothing": "",
    "a leading dash": "--rm",
    "letters beyond ASCII": "größe ☃ 数字",
}


def pytest_unconfigure() -> None:
    shutil.rmtree(_HYPOTHESIS_HOME, ignore_errors=True)


@pytest.fixture(params=HOSTILE.values(), ids=HOSTILE.keys())
def hostile(request: pytest.FixtureRequest) -> str:
    """One text that survives only careful quoting."""
    return request.param


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tests share their processor with others, and one thread gives the same bits everywhere."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def environment_stays() -> Iterator[None]:
    """Fail a test that leaves another environment behind."""
    before = _environment()
    yield
    after = _environment()
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    for name in changed:
        os.environ.pop(name, None)
    os.environ.update({name: before[name] for name in changed if name in before})
    assert not changed, f"the test left these environment variables changed: {', '.join(changed)}"


@pytest.fixture(autouse=True)
def no_child_stays() -> Iterator[None]:
    """Fail a test that leaves a process running."""
    before = _children()
    yield
    assert not _children() - before, "the test left a process running"


@pytest.fixture(autouse=True)
def no_process_group_stays() -> Iterator[None]:
    """Fail a test that leaves a process group open."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test left a torch process group open")


def _environment() -> dict[str, str]:
    others = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")  # pytest's and torch's own doing
    return {name: value for name, value in os.environ.items() if name not in others}


def _children() -> set[int]:
    """Living processes that this one started (proc(5): field 3 is the state, 4 the parent)."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return set()
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.add(int(path.parent.name))
    return found
