"""Time of an epoch against the plain example script as users write it: python -m benchmarks epoch

Both train the example's own model with the same optimizer on the same idx files: 2 ranks with 1 thread each, global
batch 200. Each has its own processes and they take turns, epoch by epoch. What differs is how batches are made and
the loop around the model; ours also logs every 10 steps. Neither validates or saves. Both are started several times,
because how memory happens to lie changes the speed of a process for as long as it lives.
"""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from benchmarks import example_script, ranks
from benchmarks.measure import ROOT, Row, Turns, python, ratios, row
from trainer.config import TrainConfig
from trainer.datasets import Dataset
from trainer.distributed import World
from trainer.workloads import Mnist

SAMPLES, PROCESSES, LAUNCHES, EPOCHS = 6000, 2, 4, 5


def measure() -> list[Row]:
    """Seconds of an epoch, ours over the example's."""
    with tempfile.TemporaryDirectory() as folder:
        ranks.make_data(folder, SAMPLES)
        pairs = [pair for _ in range(LAUNCHES) for pair in launch(folder)]
    what = f"epoch of {SAMPLES} samples, {PROCESSES} ranks x 1 thread"
    return [
        row("epoch", f"{what}: ours over the example script's", ratios(pairs), below=1),
        row("epoch", f"{what}: ours", [seconds for seconds, _ in pairs], unit=" s"),
        row("epoch", f"{what}: the example script's", [seconds for _, seconds in pairs], unit=" s"),
    ]


def launch(folder: str) -> list[tuple[float, float]]:
    """Start both once and return the seconds of each epoch but the first, ours and theirs."""
    turns = Path(folder, "turns")
    shutil.rmtree(turns, ignore_errors=True)
    turns.mkdir()
    with _example(folder) as example:
        ours = ranks.run_ranks(our_epochs, PROCESSES, our_config(folder))
        told, _ = example.communicate()
    theirs = [float(text) for text in re.findall(r"^epoch \d+: (\S+) s$", told, re.MULTILINE)]
    return list(zip(ours, theirs, strict=True))[1:]


@contextlib.contextmanager
def _example(folder: str) -> Iterator["subprocess.Popen[str]"]:
    """The example script under torchrun, waiting for its turns; it does not outlive a failure of ours."""
    launcher = python("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}")
    script = ["-m", "benchmarks.example_script", f"{folder}/drawn-digits"]
    options = [f"--epochs={EPOCHS}", f"--turns={folder}/turns"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*launcher, *script, *options], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as run:
        try:
            yield run
        finally:
            run.terminate()


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


def our_epochs(world: World, config: TrainConfig) -> list[float]:
    """Body of a rank: seconds of each of our epochs, the example's in between."""
    trainer = ranks.make_trainer(config, world, ExampleWorkload(config))
    turns = Turns(Path(config.data_dir, "turns"), "ours", "example")
    took = []
    for epoch in range(EPOCHS):
        if epoch:
            turns.wait(epoch - 1)
        took.append(trainer.advance(trainer.order.steps_per_epoch))
        world.barrier()
        turns.end(epoch)
    trainer.close()
    return took
