"""Data sets that fit in memory: uint8 tensors, gathered and normalised in one vectorised step a batch."""

import dataclasses
import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from trainer.config import TrainConfig
from trainer.errors import UserError


class Batch(NamedTuple):
    """`images` float32 [b, 1, h, w], normalised; `labels` int64 [b]."""

    images: Tensor
    labels: Tensor


@dataclasses.dataclass(frozen=True)
class Split:
    """`images` uint8 [n, h, w], `labels` int64 [n]; a batch is pixels * scale + shift."""

    images: Tensor
    labels: Tensor
    scale: float
    shift: float

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> "Split":
        return dataclasses.replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def batch(self, indices: Tensor) -> Batch:
        """The samples at `indices` [b], on the device of the split."""
        images = self.images.index_select(0, indices).float().mul_(self.scale).add_(self.shift)
        return Batch(images.unsqueeze_(1), self.labels.index_select(0, indices))


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A named pair of splits with `classes` labels."""

    name: str
    train: Split
    validation: Split
    classes: int = 10

    def sha256(self) -> str:
        """Hash of all pixels and labels, whatever file they came from."""
        digest = hashlib.sha256()
        for split in (self.train, self.validation):
            digest.update(split.images.cpu().numpy().tobytes())
            digest.update(split.labels.cpu().numpy().tobytes())
        return digest.hexdigest()


class IdxSource(NamedTuple):
    """Where torchvision's class finds its idx files below --data-dir, and the statistics of the training split."""

    torchvision_class: str
    root: str
    mean: float
    std: float


# Means and deviations of pixel / 255 over the training split; for drawn-digits with the default seed and size.
IDX = {
    "drawn-digits": IdxSource("MNIST", "drawn-digits", 0.0922, 0.2201),
    "mnist": IdxSource("MNIST", ".", 0.1307, 0.3081),
    "fashion-mnist": IdxSource("FashionMNIST", ".", 0.2860, 0.3530),
}
IDX_FILES = tuple(f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
_DIGITS_MEAN, _DIGITS_STD, _DIGITS_MAX = 0.3058, 0.3764, 16


def load(config: TrainConfig) -> Dataset:
    """The data set that the configuration names.

    Raises UserError if it is missing, damaged, or smaller than one batch.
    """
    dataset = _digits() if config.dataset == "digits" else _idx(config)
    if len(dataset.train) < config.batch_size:
        raise UserError(
            f"--batch-size {config.batch_size} is larger than the {len(dataset.train)} training samples of "
            f"{dataset.name}.",
            f"--batch-size {len(dataset.train)} or less",
        )
    return dataset


def check(config: TrainConfig) -> None:
    """Find missing or damaged files before any process is started. Raises UserError."""
    if config.dataset == "digits":
        return
    folder = raw_folder(config)
    missing = [name for name in IDX_FILES if not (folder / name).is_file()]
    if missing and not config.download:
        hint = f"trainer data make drawn-digits --out {Path(config.data_dir, 'drawn-digits')}"
        raise UserError(
            f"Data set {config.dataset} is missing: no {missing[0]} in {folder}.",
            hint if config.dataset == "drawn-digits" else "--download, or --data-dir with the folder that has it",
        )
    for name in set(IDX_FILES) - set(missing):
        check_idx(folder / name)


def raw_folder(config: TrainConfig) -> Path:
    """Where torchvision keeps the idx files of a data set."""
    source = IDX[config.dataset]
    return Path(config.data_dir, source.root, source.torchvision_class, "raw")


def check_idx(path: Path) -> None:
    """Compare the size of an idx file with its header (http://yann.lecun.com/exdb/mnist describes the format)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(4)
        dims = head[3] if len(head) == 4 and head[:3] == b"\0\0\x08" else 0
        shape = file.read(4 * dims)
    expected = 4 + 4 * dims
    if dims and len(shape) == 4 * dims:
        expected += int(np.prod(struct.unpack(f">{dims}i", shape), dtype=np.int64))
    if not dims or size != expected:
        raise UserError(f"{path} is damaged: {size} bytes where its header says {expected}.", "make or fetch it again")


def _digits() -> Dataset:
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as archive:
        images, labels = torch.from_numpy(archive["images"]), torch.from_numpy(archive["labels"]).long()
    validation = torch.arange(len(labels)) % 5 == 4
    scale, shift = 1 / (_DIGITS_MAX * _DIGITS_STD), -_DIGITS_MEAN / _DIGITS_STD
    return Dataset(
        "digits",
        Split(images[~validation], labels[~validation], scale, shift),
        Split(images[validation], labels[validation], scale, shift),
    )


def _idx(config: TrainConfig) -> Dataset:
    import torchvision.datasets

    source = IDX[config.dataset]
    make: Callable[..., torchvision.datasets.MNIST] = getattr(torchvision.datasets, source.torchvision_class)
    root = Path(config.data_dir, source.root)
    if config.download:
        _download(make, root, config.dataset)
    check(dataclasses.replace(config, download=False))
    scale, shift = 1 / (255 * source.std), -source.mean / source.std
    train, test = make(root, train=True), make(root, train=False)
    return Dataset(
        config.dataset, Split(train.data, train.targets, scale, shift), Split(test.data, test.targets, scale, shift)
    )


def _download(make: Callable[..., object], root: Path, name: str) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{name}.lock"):
            make(root, download=True)
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"Could not download {name} to {root}: {error}.", "copy its idx files into --data-dir, without --download"
        ) from None
