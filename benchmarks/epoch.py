"""Time of an epoch against the plain example script as users write it: python -m benchmarks epoch

Both train the example's own model with the same optimizer on the same idx files: 2 ranks with 1 thread each, global
batch 200. They take turns in the same processes, epoch by epoch, each with the switches of torch it has when it runs
alone. What differs is how batches are made and the loop around the model; ours also logs every 10 steps. Neither
validates or saves.
"""

import tempfile

import torch
from torch import nn

from benchmarks import example_script, ranks
from benchmarks.measure import Row, in_turn, ratios, row
from trainer import worker
from trainer.config import TrainConfig
from trainer.datasets import Dataset
from trainer.distributed import World
from trainer.workloads import Mnist

SAMPLES, PROCESSES, PAIRS = 6000, 2, 16


def measure() -> list[Row]:
    """Seconds of an epoch, ours over the example's."""
    with tempfile.TemporaryDirectory() as folder:
        ranks.make_data(folder, SAMPLES)
        pairs = ranks.run_ranks(compare, PROCESSES, our_config(folder))
    what = f"epoch of {SAMPLES} samples, {PROCESSES} ranks x 1 thread"
    return [
        row("epoch", f"{what}: ours over the example script's", ratios(pairs), below=1),
        row("epoch", f"{what}: ours", [ours for ours, _ in pairs], unit=" s"),
        row("epoch", f"{what}: the example script's", [theirs for _, theirs in pairs], unit=" s"),
    ]


def our_config(folder: str) -> TrainConfig:
    """The example's settings in our words."""
    return TrainConfig(
        dataset="drawn-digits",
        data_dir=folder,
        batch_size=example_script.BATCH_SIZE * PROCESSES,
        optimizer="sgd",
        lr=example_script.LEARNING_RATE,
        momentum=0,
        weight_decay=0,
        device="cpu",
    )


class ExampleWorkload(Mnist):
    """Our data and loss with the example's model."""

    def model(self, data: Dataset) -> nn.Module:
        return example_script.ExampleNet()


def compare(world: World, config: TrainConfig) -> list[tuple[float, float]]:
    """Body of a rank: seconds of our epochs and of the example's, in turn."""
    trainer = ranks.make_trainer(config, world, ExampleWorkload(config))
    prepared = example_script.prepare(f"{config.data_dir}/drawn-digits")

    def ours() -> float:
        worker.configure_torch(config)
        return trainer.advance(trainer.order.steps_per_epoch)

    def theirs() -> float:
        torch.use_deterministic_algorithms(False)
        world.barrier()
        return example_script.train_epoch(*prepared)

    ours(), theirs()  # warm up
    pairs = in_turn(ours, theirs, PAIRS)
    trainer.close()
    return pairs
