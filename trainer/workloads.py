"""What is trained: data, model and loss. A workload knows nothing of processes."""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer import datasets
from trainer.config import TrainConfig
from trainer.datasets import Batch, Dataset


class Workload(Protocol):
    """What the training loop asks of a workload."""

    def data(self) -> Dataset:
        """Load both splits. Raises UserError if they are missing or damaged."""

    def model(self, data: Dataset) -> nn.Module:
        """A freshly initialised model; torch's generators are seeded before the call."""

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """Mean loss of a batch, a scalar."""

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Values to average over all samples, each [b]."""


class Mnist:
    """The small CNN of torch's own MNIST example, for square grey images: 28 x 28, or 8 x 8 digits."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config

    def data(self) -> Dataset:
        return datasets.load(self._config)

    def model(self, data: Dataset) -> nn.Module:
        return ConvNet(side=data.train.images.shape[-1], classes=data.classes)

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return functional.cross_entropy(output, batch.labels)

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {
            "loss": functional.cross_entropy(output, batch.labels, reduction="none"),
            "accuracy": (output.argmax(1) == batch.labels).float(),
        }


class ConvNet(nn.Module):
    """Convolutions 1-32-64 (3 x 3), pooling, dropout, and two linear layers: 9216-128-10 for 28 x 28 pixels."""

    def __init__(self, side: int, classes: int) -> None:
        super().__init__()
        features = 64 * ((side - 4) // 2) ** 2
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(features, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, classes] of images [b, 1, side, side]."""
        logits: Tensor = self.head(self.convolutions(images))
        return logits


TABLE = {"mnist": Mnist}


def build(config: TrainConfig) -> Workload:
    """The workload that the configuration names."""
    return TABLE[config.workload](config)


def seeded_model(workload: Workload, data: Dataset, seed: int) -> nn.Module:
    """The model with the same initial weights on every rank."""
    torch.manual_seed(seed)
    return workload.model(data)
