"""Which samples make up a step: a pure function of (seed, epoch, step), whatever the topology."""

import torch
from torch import Tensor


class Order:
    """Shuffles `samples` anew each epoch and deals them in global batches; a last partial batch is left out."""

    def __init__(self, samples: int, batch_size: int, seed: int) -> None:
        self._samples = samples
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = -1
        self._shuffled = torch.empty(0, dtype=torch.int64)

    @property
    def steps_per_epoch(self) -> int:
        return self._samples // self._batch_size

    def global_batch(self, step: int) -> Tensor:
        """Indices [batch_size] of the samples of optimizer step `step`, counted from the start of the run."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(mix(self._seed, epoch))
            self._shuffled = torch.randperm(self._samples, generator=generator)
            self._epoch = epoch
        return self._shuffled[place * self._batch_size : (place + 1) * self._batch_size]

    def share(self, step: int, rank: int, world_size: int) -> Tensor:
        """This rank's indices [batch_size / world_size] of that step."""
        share = self._batch_size // world_size
        return self.global_batch(step)[rank * share : (rank + 1) * share]


def mix(*numbers: int) -> int:
    """One 63-bit seed from several numbers (the finalizer of splitmix64, applied after each)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Make the randomness of a step (dropout, augmentation) a pure function of (seed, step, rank).

    So no generator state has to be saved: a resumed run draws what an undisturbed one draws.
    """
    number = mix(seed, step, rank)
    torch.default_generator.manual_seed(number)  # torch.manual_seed walks the stack: 100 times slower
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
