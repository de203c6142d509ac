"""Ranks of a benchmark: processes on this host in one gloo world, and the trainer's real loop run in segments."""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing
from torch.distributed import FileStore

from trainer import worker, workloads
from trainer.config import TrainConfig
from trainer.datasets import drawn
from trainer.distributed import World, join_world
from trainer.loop import Trainer
from trainer.stop import StopRequest
from trainer.topology import Topology
from trainer.workloads import Workload

Body = Callable[[World, TrainConfig], Any]


class NeverAsked(StopRequest):
    """A stop that nobody requests; signals stay as they are, so that Ctrl-C ends a benchmark."""

    def __init__(self) -> None:
        self.requested = False


class SegmentTrainer(Trainer):
    """The trainer without validation and checkpoints, so that the time of `run` is that of its loop."""

    def validate(self) -> dict[str, float]:
        return {"left_out": 0.0}

    def save(self) -> None:
        pass

    def advance(self, steps: int) -> float:
        """Do so many more steps by `Trainer.run`, and return the seconds."""
        self.total_steps = self.step + steps
        self.world.barrier()
        began = time.perf_counter()
        self.run(NeverAsked())
        return time.perf_counter() - began


def make_trainer(config: TrainConfig, world: World, workload: Workload) -> SegmentTrainer:
    """A trainer that is ready for its first step and writes metrics as a real run does."""
    data = workload.data()
    model = workloads.seeded_model(workload, data, config.seed)
    trainer = SegmentTrainer(config, world, workload, data.train, data.validation, model)
    if world.is_main:
        Path(config.runs_dir, str(config.run_id)).mkdir(parents=True)
    trainer.resume()
    trainer.open_record(data)
    return trainer


def make_data(folder: str, samples: int) -> None:
    """Draw digits where both `--data-dir FOLDER` and torchvision's MNIST(FOLDER/drawn-digits) find them."""
    drawn.make(samples, 1000, 1, Path(folder, "drawn-digits"))


def run_ranks(body: Body, size: int, config: TrainConfig) -> Any:
    """Call `body` on `size` ranks and return what rank 0 returned."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(config.threads)
    with tempfile.TemporaryDirectory() as folder:
        told = {**vars(config), "runs_dir": folder, "run_id": "run"}
        torch.multiprocessing.spawn(_rank, (size, folder, body, TrainConfig(**told)), nprocs=size)
        return json.loads(Path(folder, "result.json").read_text())


def _rank(rank: int, size: int, folder: str, body: Body, config: TrainConfig) -> None:
    worker.configure_torch(config)
    topology = Topology(source="benchmark", nproc_per_node=size, rank=rank, local_rank=rank)
    store = FileStore(str(Path(folder, "store")), size)
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        with join_world(config, topology, store) as world:
            result = body(world, config)
            world.barrier()
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
