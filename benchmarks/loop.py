"""Speed of the training loop over a bare loop whose batch is already in memory: python -m benchmarks loop

Both run in the same processes, in turn: a segment of `Trainer.run` (shuffling, gathering and normalising each batch,
seeding each step, the agreement on stopping, metrics every 10 steps; no validation, no checkpoint), then as many steps
of zero_grad, forward, loss, backward, step on one batch. Same model, data, batch size, optimizer, DDP and threads.

The learning rate is 0: a bare loop that learns its one batch by heart soon multiplies other numbers than a real run
does, which made it 5 % slower and would flatter ours.
"""

import tempfile
import time

import torch

from benchmarks import ranks
from benchmarks.measure import Row, in_turn, ratios, row
from trainer import workloads
from trainer.config import TrainConfig
from trainer.distributed import World
from trainer.loop import wrap
from trainer.optim import build_optimizer

SAMPLES, BATCH_SIZE, LAUNCHES, STEPS, PAIRS = 12000, 128, 2, 10, 12
REQUIRED = 0.97


def measure() -> list[Row]:
    """Samples/s of the loop over those of the bare loop, with 2 ranks and with 1."""
    with tempfile.TemporaryDirectory() as folder:
        ranks.make_data(folder, SAMPLES)
        config = TrainConfig(dataset="drawn-digits", data_dir=folder, batch_size=BATCH_SIZE, lr=0.0, device="cpu")
        return [line for size in (2, 1) for line in _rows(size, config)]


def _rows(size: int, config: TrainConfig) -> list[Row]:
    pairs = [pair for _ in range(LAUNCHES) for pair in ranks.run_ranks(compare, size, config)]
    speeds = [STEPS * BATCH_SIZE / ours for _, ours in pairs]
    where = f"{size} rank{'s' * (size > 1)} x 1 thread, batch {BATCH_SIZE}"
    return [
        row("loop", f"samples/s over a bare loop, {where}", ratios(pairs), at_least=REQUIRED),
        row("loop", f"samples/s, {where}", speeds),
    ]


def compare(world: World, config: TrainConfig) -> list[tuple[float, float]]:
    """Body of a rank: seconds of the bare loop and of the trainer's, segment by segment."""
    trainer = ranks.make_trainer(config, world, workloads.build(config))
    bare = BareLoop(world, config)
    bare.advance(STEPS), trainer.advance(STEPS)  # warm up
    pairs = in_turn(lambda: bare.advance(STEPS), lambda: trainer.advance(STEPS), PAIRS)
    trainer.close()
    return pairs


class BareLoop:
    """The least that training can be: one batch, again and again."""

    def __init__(self, world: World, config: TrainConfig) -> None:
        workload = workloads.build(config)
        data = workload.data()
        module = workloads.seeded_model(workload, data, config.seed)
        self.world, self.workload, self.model = world, workload, wrap(module, world)
        self.optimizer = build_optimizer(config, module.parameters())
        self.batch = data.train.batch(torch.arange(config.batch_size // world.size))

    def advance(self, steps: int) -> float:
        """Do so many steps and return the seconds."""
        self.world.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.workload.loss(self.model(self.batch.images), self.batch)
            loss.backward()
            self.optimizer.step()
        return time.perf_counter() - began
