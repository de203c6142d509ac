"""Checkpoints: one folder each, atomic, checksummed, independent of world size, loaded without pickle code.

    checkpoints/step-00000120/state.pt        what torch.save wrote
    checkpoints/step-00000120/manifest.json   step, sha256 and size of state.pt

A folder appears under its name only when all of it is on disk, so a reader never sees half a checkpoint.
"""

import errno
import hashlib
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from trainer.errors import UserError

State = dict[str, Any]


class _HashingFile(io.RawIOBase):
    """Passes writes on, hashes them, and keeps the first error, which torch.save replaces by one of its own."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        view = memoryview(data).cast("B")
        self.sha256.update(view)
        self.size += len(view)
        return len(view)


def save(folder: Path, step: int, state: State, keep: int) -> Path:
    """Write a checkpoint and remove all but the newest `keep`, and what lies beyond this step or was left half done.

    A run that went on behind a damaged checkpoint would else meet it again.
    Raises UserError if the disk is full; older checkpoints stay untouched then.
    """
    final = folder / f"step-{step:08d}"
    temporary = folder / f".{final.name}.{os.getpid()}"
    try:
        for leftover in folder.glob(".step-*"):
            shutil.rmtree(leftover)
        temporary.mkdir(parents=True)
        _write(temporary, step, state)
        if final.exists():
            shutil.rmtree(final)
        os.replace(temporary, final)
        _sync(folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"No space for the checkpoint of step {step} in {folder}; older ones are untouched.",
            "free space there, or --keep-checkpoints with a smaller number",
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    checkpoints = _newest_first(folder)
    place = checkpoints.index(final)
    for other in checkpoints[:place] + checkpoints[place + keep :]:
        shutil.rmtree(other)
    return final


def newest_valid(folder: Path) -> bytes | None:
    """Content of the newest intact state.pt below `folder`; damaged ones are named on stderr and skipped."""
    for path in _newest_first(folder):
        try:
            return _read(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"warning: skipping the damaged checkpoint {path}: {error}", file=sys.stderr, flush=True)
    return None


def load(content: bytes) -> State:
    """The state in a checkpoint's bytes, on the CPU (Adam's step counters must stay there); no pickled code runs."""
    state: State = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return state


def weights_sha256(state: dict[str, Tensor]) -> str:
    """Hash of names, types, shapes and bits of a model's state, independent of file format and device."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _write(folder: Path, step: int, state: State) -> None:
    with (folder / "state.pt").open("wb") as raw:
        file = _HashingFile(raw)
        try:
            torch.save(state, cast(BinaryIO, file))
            raw.flush()
            os.fsync(raw.fileno())
        except RuntimeError:
            if file.error:
                raise file.error from None
            raise
    manifest = {"step": step, "sha256": file.sha256.hexdigest(), "size": file.size}
    with (folder / "manifest.json").open("w") as out:
        json.dump(manifest, out)
        out.flush()
        os.fsync(out.fileno())
    _sync(folder)


def _read(path: Path) -> bytes:
    manifest = json.loads((path / "manifest.json").read_text())
    content = (path / "state.pt").read_bytes()
    if len(content) != manifest["size"]:
        raise ValueError(f"state.pt has {len(content)} bytes where {manifest['size']} were written")
    if hashlib.sha256(content).hexdigest() != manifest["sha256"]:
        raise ValueError("the checksum of state.pt does not match")
    return content


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), reverse=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
