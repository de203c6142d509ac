"""Time of an epoch against the plain example script as users write it: python -m benchmarks epoch

Both train the example's own model with the same optimizer on the same idx files, 2 ranks with 1 thread each, global
batch 200; the second epoch is timed. What differs is how batches are made and the loop around the model. Ours also
logs every 10 steps; neither validates or saves.
"""

import os
import re
import tempfile

from torch import nn

from benchmarks import ranks
from benchmarks.example_script import BATCH_SIZE, LEARNING_RATE, ExampleNet
from benchmarks.measure import ROOT, Row, in_turn, output, python, ratios, row
from trainer.config import TrainConfig
from trainer.datasets import Dataset
from trainer.distributed import World
from trainer.workloads import Mnist

SAMPLES, PROCESSES, PAIRS = 12000, 2, 5


def measure() -> list[Row]:
    """Seconds of an epoch, ours over the example's."""
    with tempfile.TemporaryDirectory() as folder:
        ranks.make_data(folder, SAMPLES)
        config = our_config(folder)
        pairs = in_turn(lambda: float(ranks.run_ranks(second_epoch, PROCESSES, config)), lambda: example(folder), PAIRS)
    what = f"epoch of {SAMPLES} samples, {PROCESSES} ranks x 1 thread"
    return [
        row("epoch", f"{what}: our time over the example script's", ratios(pairs), below=1),
        row("epoch", f"{what}: ours", [ours for ours, _ in pairs], unit=" s"),
        row("epoch", f"{what}: the example script's", [theirs for _, theirs in pairs], unit=" s"),
    ]


def our_config(folder: str) -> TrainConfig:
    """The example's settings in our words."""
    return TrainConfig(
        dataset="drawn-digits",
        data_dir=folder,
        batch_size=BATCH_SIZE * PROCESSES,
        optimizer="sgd",
        lr=LEARNING_RATE,
        momentum=0,
        weight_decay=0,
        device="cpu",
    )


class ExampleWorkload(Mnist):
    """Our data and loss with the example's model."""

    def model(self, data: Dataset) -> nn.Module:
        return ExampleNet()


def second_epoch(world: World, config: TrainConfig) -> float:
    """Body of a rank: seconds of the second epoch."""
    trainer = ranks.make_trainer(config, world, ExampleWorkload(config))
    trainer.advance(trainer.order.steps_per_epoch)
    second = trainer.advance(trainer.order.steps_per_epoch)
    trainer.close()
    return second


def example(folder: str) -> float:
    """Seconds of the second epoch of the example script."""
    script = str(ROOT / "benchmarks" / "example_script.py")
    launcher = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES))
    told = output([*launcher, script, f"{folder}/drawn-digits"], env={**os.environ, "OMP_NUM_THREADS": "1"})
    return float(re.findall(r"^epoch (\S+) s$", told, re.MULTILINE)[1])
