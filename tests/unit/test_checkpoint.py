"""Checkpoints: what was saved comes back, damage is noticed, and a full disk costs nothing older."""

import errno
import io
import json
import os
import pickle

import pytest
import torch

from trainer import checkpoint
from trainer.checkpoint import load, newest_valid, save, weights_sha256
from trainer.errors import UserError


def state(step):
    return {
        "step": step,
        "lr": 0.1,
        "name": "mnist",
        "model": {"weight": torch.full((3, 2), float(step)), "count": torch.tensor(step)},
        "optimizer": {"state": {0: {"exp_avg": torch.arange(6.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    }


def steps(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path):
    """Three checkpoints, of the steps 10, 20 and 30."""
    for step in (10, 20, 30):
        save(tmp_path / "checkpoints", step, state(step), keep=3)
    return tmp_path / "checkpoints"


def test_what_was_saved_comes_back(folder):
    back = load(newest_valid(folder))
    assert back["step"] == 30
    assert torch.equal(back["model"]["weight"], torch.full((3, 2), 30.0))
    assert back["model"]["count"].dtype == torch.int64
    assert torch.equal(back["optimizer"]["state"][0]["exp_avg"], torch.arange(6.0))
    assert back["optimizer"]["param_groups"] == [{"lr": 0.1, "params": [0]}]


def test_a_checkpoint_can_be_read_without_this_program(folder):
    manifest = json.loads((folder / "step-00000030" / "manifest.json").read_text())
    path = folder / "step-00000030" / "state.pt"
    assert (manifest["step"], manifest["size"]) == (30, path.stat().st_size)
    assert torch.load(path, weights_only=True)["step"] == 30


def test_without_checkpoints_there_is_nothing_to_resume_from(tmp_path):
    assert newest_valid(tmp_path) is None
    assert newest_valid(tmp_path / "nowhere") is None


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_only_the_newest_are_kept(keep, tmp_path):
    for step in (9, 10, 100, 1000):
        path = save(tmp_path, step, state(step), keep)
        assert load(newest_valid(tmp_path))["step"] == step
        assert path.is_dir()
    assert steps(tmp_path) == [f"step-{step:08d}" for step in (9, 10, 100, 1000)[-keep:]]


def test_the_same_step_may_be_saved_again(folder):
    changed = state(30) | {"name": "again"}
    save(folder, 30, changed, keep=3)
    assert load(newest_valid(folder))["name"] == "again"
    assert len(steps(folder)) == 3


def _cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "state flipped in one bit": ("state.pt", _flip),
    "state cut off": ("state.pt", _cut),
    "state missing": ("state.pt", os.unlink),
    "manifest missing": ("manifest.json", os.unlink),
    "manifest cut off": ("manifest.json", _cut),
    "manifest empty": ("manifest.json", lambda path: path.write_bytes(b"")),
    "manifest of another form": ("manifest.json", lambda path: path.write_text("[]")),
    "manifest without its sum": ("manifest.json", lambda path: path.write_text('{"step": 30}')),
    "manifest that is no text": ("manifest.json", lambda path: path.write_bytes(b"\xff\xfe")),
}


@pytest.mark.parametrize(("name", "damage"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint_is_skipped_with_a_warning(name, damage, folder, capsys):
    damage(folder / "step-00000030" / name)
    assert load(newest_valid(folder))["step"] == 20
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("warning: ")
    assert "step-00000030" in told.err
    assert told.err.count("\n") == 1


def test_all_damaged_is_as_if_there_were_none(folder, capsys):
    for path in folder.glob("*/state.pt"):
        _flip(path)
    assert newest_valid(folder) is None
    assert capsys.readouterr().err.count("warning: ") == 3


def test_a_checkpoint_just_written_is_never_the_one_removed(folder, capsys):
    """A run that resumed behind a damaged checkpoint saves an older step than that of the damaged one."""
    _flip(folder / "step-00000030" / "state.pt")
    path = save(folder, 25, state(25), keep=1)
    assert path.is_dir()
    assert load(newest_valid(folder))["step"] == 25


def test_what_a_killed_process_left_hinders_no_one(folder):
    """In containers process numbers repeat, so a restarted rank meets the folder that it left itself."""
    (folder / f".step-00000040.{os.getpid()}").mkdir()
    save(folder, 40, state(40), keep=3)
    assert load(newest_valid(folder))["step"] == 40


def test_half_a_checkpoint_is_never_seen(folder, monkeypatch):
    def killed(*names):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save(folder, 40, state(40), keep=3)
    assert steps(folder) == ["step-00000010", "step-00000020", "step-00000030"]


class FullDisk(io.RawIOBase):
    """A file on a disk that is full after some bytes."""

    def __init__(self, room, code):
        self._room = room
        self._code = code

    def writable(self):
        return True

    def write(self, data):
        self._room -= len(data)
        if self._room < 0:
            raise OSError(self._code, os.strerror(self._code))
        return len(data)


@pytest.mark.parametrize("room", [0, 100, 1000])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=["disk full", "quota used up"])
def test_a_full_disk_is_a_user_error_and_older_checkpoints_stay(code, room, folder, monkeypatch):
    _write_to(monkeypatch, "state.pt", FullDisk(room, code))
    with pytest.raises(UserError, match=r"No space for the checkpoint of step 40.* HINT: "):
        save(folder, 40, state(40), keep=1)
    assert steps(folder) == ["step-00000010", "step-00000020", "step-00000030"]
    assert load(newest_valid(folder))["step"] == 30


def test_any_other_write_error_is_not_taken_for_a_full_disk(folder, monkeypatch):
    _write_to(monkeypatch, "state.pt", FullDisk(100, errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        save(folder, 40, state(40), keep=1)
    assert steps(folder) == ["step-00000010", "step-00000020", "step-00000030"]


def _write_to(monkeypatch, name, file):
    genuine = checkpoint.Path.open
    monkeypatch.setattr(
        checkpoint.Path,
        "open",
        lambda path, *how, **more: file if path.name == name and how == ("wb",) else genuine(path, *how, **more),
    )


class Surprise:
    """An object whose unpickling runs code."""

    def __reduce__(self):
        return os.mkdir, ("/tmp/intermodal-surprise",)


def test_a_checkpoint_with_code_in_it_is_refused():
    buffer = io.BytesIO()
    torch.save({"model": Surprise()}, buffer)
    with pytest.raises(pickle.UnpicklingError, match=r"(?i)weights.only"):
        load(buffer.getvalue())
    assert not os.path.exists("/tmp/intermodal-surprise")


WEIGHTS = {
    "a": torch.tensor([[1.0, -0.0], [3.0, 4.0]]),
    "b": torch.tensor(5),
    "c": torch.tensor([1.5], dtype=torch.bfloat16),
    "d": torch.empty(0),
}


def test_the_hash_of_weights_does_not_depend_on_order_or_memory():
    turned = {name: WEIGHTS[name] for name in reversed(WEIGHTS)}
    turned["a"] = WEIGHTS["a"].t().contiguous().t().requires_grad_()
    assert not turned["a"].is_contiguous()
    assert weights_sha256(turned) == weights_sha256(WEIGHTS)


CHANGES = {
    "one bit": {
        "a": WEIGHTS["a"].clone().view(torch.int32).bitwise_xor(torch.tensor([[0, 0], [1, 0]])).view(torch.float32)
    },
    "a sign of zero": {"a": WEIGHTS["a"].abs()},
    "a number of another type": {"b": torch.tensor(5, dtype=torch.int32)},
    "another shape": {"a": WEIGHTS["a"].reshape(4)},
    "another name": {"e": torch.empty(0)},
    "a half in its last bit": {"c": torch.tensor([1.5078125], dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_the_hash_of_weights_sees(change):
    assert weights_sha256(WEIGHTS | change) != weights_sha256(WEIGHTS)
