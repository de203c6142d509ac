"""Rules of the whole repository: who may import whom, how long a file may be, and links that lead somewhere."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import trainer

ROOT = Path(__file__).parents[2]
TRAINER = Path(trainer.__file__).parent  # in an image it is installed and not in the checkout
HEAVY = {"torch", "torchvision", "tensorboardX"}
HOST_SIDE = sorted([*(ROOT / "launch").rglob("*.py"), ROOT / "tasks.py"])
CONTAINER_SIDE = sorted(TRAINER.rglob("*.py"))


def short(path):
    for root, name in ((TRAINER, "trainer/"), (ROOT, "")):
        if path.is_relative_to(root):
            return f"{name}{path.relative_to(root)}"
    return str(path)


def imported(path, *, everywhere):
    """Names of the modules that a file imports: at its top, or everywhere in it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def top_level(names):
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("path", CONTAINER_SIDE, ids=short)
def test_the_trainer_never_imports_the_launcher(path):
    assert not top_level(imported(path, everywhere=True)) & {"launch", "tasks", "docker", "spython", "invoke"}


@pytest.mark.parametrize("path", HOST_SIDE, ids=short)
def test_the_launcher_imports_neither_torch_nor_what_imports_it(path):
    assert not top_level(imported(path, everywhere=True)) & HEAVY
    waiting = {name for name in imported(path, everywhere=True) if name.startswith("trainer")}
    seen = set()
    while waiting:
        name = waiting.pop()
        file = TRAINER.joinpath(*name.split(".")[1:]).with_suffix(".py")
        if name in seen or not file.is_file():
            continue
        seen.add(name)
        names = imported(file, everywhere=False)
        assert not top_level(names) & HEAVY, name
        waiting |= {other for other in names if other.startswith("trainer")}


def python(*words):
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_launcher_runs_without_torch():
    modules = ", ".join(
        short(path).removesuffix(".py").replace("/", ".") for path in HOST_SIDE if path.stem != "__init__"
    )
    done = python("-c", f"import {modules}, sys; assert not {HEAVY | {'numpy'}!r} & set(sys.modules)")
    assert done.returncode == 0, done.stderr


def test_listing_the_tasks_needs_no_library_of_a_runtime():
    done = python("-X", "importtime", "-m", "invoke", "--list")
    assert "local-run" in done.stdout
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "invoke" in names
    assert not {"docker", "spython", "torch", "numpy"} & names


@pytest.mark.parametrize("path", [*HOST_SIDE, *CONTAINER_SIDE, *sorted((ROOT / "tests").rglob("*.py"))], ids=short)
def test_no_file_is_too_long_to_read_in_one_go(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 400


@pytest.mark.parametrize("path", [*HOST_SIDE, *CONTAINER_SIDE], ids=short)
def test_every_module_says_what_it_is_for(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree) or path.name == "__main__.py"


DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=short)
def test_links_between_documents_lead_somewhere(path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:|#", target):
            continue
        place = (path.parent / target.partition("#")[0]).resolve()
        if place.is_relative_to(ROOT / "trainer"):
            place = TRAINER / place.relative_to(ROOT / "trainer")
        if not place.exists():
            missing.append(target)
    assert not missing


def test_the_architecture_is_written_down():
    assert (ROOT / "docs" / "architecture.md").is_file()


def test_the_changelog_tells_of_this_version():
    assert re.search(rf"^## \[?{re.escape(trainer.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_make_help_lists_every_target():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z-]+):.*##", makefile, re.MULTILINE)
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.findall(r"^  make ([a-z-]+) ", done.stdout, re.MULTILINE) == targets
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert sorted(phony.split()) == sorted(targets)
