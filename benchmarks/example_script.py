"""The plain DistributedDataParallel example as it is often written today; what benchmarks/epoch.py compares with.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -m benchmarks.example_script FOLDER

Samples go one by one through PIL and a transform in the training process itself, the sampler deals the same order in
every epoch (no set_epoch), and nothing is saved or validated. FOLDER is what torchvision.datasets.MNIST reads.
"""

import argparse
import time
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms

from benchmarks.measure import Turns

BATCH_SIZE = 100  # of each process
LEARNING_RATE = 1e-4
Loader: TypeAlias = "DataLoader[tuple[Tensor, Tensor]]"


class ExampleNet(nn.Module):
    """Two blocks of convolution (5 x 5), batch norm, ReLU and pooling, then one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.second = nn.Sequential(nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        self.linear = nn.Linear(32 * 7 * 7, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, 10] of images [b, 1, 28, 28]."""
        logits: Tensor = self.linear(self.second(self.first(images)).flatten(1))
        return logits


def make_loader(folder: str) -> Loader:
    """This rank's half of the training split."""
    train = datasets.MNIST(folder, train=True, transform=transforms.ToTensor())
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(train)
    return DataLoader(train, BATCH_SIZE, shuffle=False, num_workers=0, pin_memory=False, sampler=sampler)


def prepare(folder: str) -> tuple[nn.Module, Loader, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(ExampleNet())
    return model, make_loader(folder), torch.optim.SGD(model.parameters(), LEARNING_RATE)


def train_epoch(model: nn.Module, loader: Loader, optimizer: torch.optim.Optimizer) -> float:
    """One pass over the loader; returns the seconds."""
    began = time.perf_counter()
    criterion = nn.CrossEntropyLoss()
    for step, (images, labels) in enumerate(loader, start=1):
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 and dist.get_rank() == 0:
            print(f"step {step}/{len(loader)} loss {loss.item():.4f}")
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--turns", type=Path, help="folder through which another program takes turns with this one")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    prepared = prepare(arguments.folder)
    turns = Turns(arguments.turns, "example", "ours") if arguments.turns else None
    for epoch in range(arguments.epochs):
        if turns:
            turns.wait(epoch)
            dist.barrier()
        took = train_epoch(*prepared)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: {took:.6f} s", flush=True)
        if turns:
            dist.barrier()
            turns.end(epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
