"""The training loop, from data to weights. Reads from top to bottom; every rank runs it alike."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer import checkpoint, contract, environment, record, workloads
from trainer.config import TrainConfig, flag, shaping_fields
from trainer.datasets import Batch, Dataset, Split
from trainer.distributed import Agreement, World
from trainer.errors import UserError
from trainer.optim import build_optimizer, build_scheduler
from trainer.order import Order, seed_step
from trainer.progress import Progress
from trainer.stop import StopRequest
from trainer.workloads import Workload


def train(config: TrainConfig, world: World, stop: StopRequest) -> int:
    """Train to the end or to an agreed stop; returns 0 or the exit code that asks for a restart."""
    workload = workloads.build(config)
    data = workload.data()
    trainer = Trainer(
        config,
        world,
        workload,
        data.train.to(world.device),
        data.validation.to(world.device),
        workloads.seeded_model(workload, data, config.seed),
    )
    try:
        trainer.resume()
        trainer.open_record(data)
        code = trainer.run(stop)
    except BaseException:
        with contextlib.suppress(OSError):  # a full disk again must not hide the first failure
            trainer.close()
        raise
    trainer.close()
    return code


class Trainer:
    """The state of a run on one rank: model, optimizer, position. `step` counts optimizer steps done."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        workload: Workload,
        train_split: Split,
        validation_split: Split,
        model: nn.Module,
    ) -> None:
        self.config, self.world, self.workload = config, world, workload
        self.train_split, self.validation_split = train_split, validation_split
        self.order = Order(len(train_split), config.batch_size, config.seed)
        self.total_steps = min(config.epochs * self.order.steps_per_epoch, config.max_steps or 2**62)
        self.module = model.to(world.device)
        self.model = wrap(self.module, world)
        self.optimizer: Optimizer = build_optimizer(config, self.module.parameters())
        self.scheduler: LRScheduler = build_scheduler(
            config, self.optimizer, self.total_steps, self.order.steps_per_epoch
        )
        self.step = self.resumed_at = 0
        self.trained_s = 0.0
        self.clock = Stopwatch(world.device)
        self.record: record.Record | None = None
        self.metrics: record.Metrics | None = None
        self.rehearse()

    def run(self, stop: StopRequest) -> int:
        """The loop: step, and between steps log, validate, save, or stop together."""
        agreement = Agreement(self.world)
        progress = Progress(self.total_steps, self.order.steps_per_epoch, None if self.world.is_main else "none")
        validated: dict[str, float] = {}
        self.clock = Stopwatch(self.world.device, self.trained_s)
        while self.step < self.total_steps:
            loss = self.train_step()
            if self.record and self.step == self.resumed_at + 1:
                self.record.mark("first_step")
            last = self.step == self.total_steps
            if last or self.step % self.config.log_every == 0:
                self.log(loss, progress)
            if last or self.is_due(self.config.val_every):
                with self.clock.paused():
                    validated = self.validate()
            stopping = not last and agreement.reached(stop.requested)
            if last or stopping or self.is_due(self.config.checkpoint_every):
                with self.clock.paused():
                    self.save()
            if stopping:
                agreement.close()
                return record.preempted(self.record) if self.record else contract.EXIT_PREEMPTED
        agreement.close()
        self.finish(validated or self.validate())
        return contract.EXIT_DONE

    def train_step(self) -> Tensor:
        """One optimizer step on this rank's share of the global batch; returns its mean loss, detached."""
        seed_step(self.config.seed, self.step, self.world.rank, self.world.device)
        indices = self.order.share(self.step, self.world.rank, self.world.size).to(self.world.device)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.backward(self.train_split.batch(indices))
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        return loss

    def backward(self, batch: Batch) -> Tensor:
        with self.arithmetic():
            loss = self.workload.loss(self.model(batch.images), batch)
        loss.backward()
        return loss.detach()

    def rehearse(self) -> None:
        """One forward and backward whose result is thrown away, before step 0 and before a checkpoint is loaded.

        DDP regroups its gradient buckets after the first backward, which changes the order of additions for three or
        more ranks; without this a resumed run would do its first steps with other groups than an undisturbed one.
        """
        before = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        indices = self.order.share(0, self.world.rank, self.world.size).to(self.world.device)
        self.model.train()
        self.backward(self.train_split.batch(indices))
        self.optimizer.zero_grad(set_to_none=True)
        self.module.load_state_dict(before)

    def arithmetic(self) -> torch.autocast:
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.config.precision == "bf16")

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Means over the whole validation split: each sample is counted once, on one rank."""
        self.module.eval()
        size, rank, world_size = len(self.validation_split), self.world.rank, self.world.size
        mine = torch.arange(size * rank // world_size, size * (rank + 1) // world_size, device=self.world.device)
        sums: dict[str, Tensor] = {}
        for indices in mine.split(self.config.eval_batch_size):
            batch = self.validation_split.batch(indices)
            with self.arithmetic():
                output = self.module(batch.images)
            for name, values in self.workload.metrics(output.float(), batch).items():
                sums[name] = sums.get(name, torch.zeros(())) + values.double().sum()
        self.module.train()
        means = [total / size for total in self.world.sum([float(sums[name]) for name in sorted(sums)])]
        validated = {f"val_{name}": mean for name, mean in zip(sorted(sums), means, strict=True)}
        if self.metrics:
            self.metrics.write(self.step, self.epoch, **validated)
        return validated

    def save(self) -> None:
        """Rank 0 writes everything a run needs to go on; the others wait, so that no one leaves before it is safe."""
        if self.world.is_main:
            folder = record.run_folder(self.config) / "checkpoints"
            checkpoint.save(folder, self.step, self.state(), self.config.keep_checkpoints)
        self.world.barrier()

    def state(self) -> checkpoint.State:
        """Model, optimizer, schedule and position. Random generators need no place: see order.seed_step."""
        shaping = {name: getattr(self.config, name) for name in shaping_fields()}
        return {
            "step": self.step,
            "total_steps": self.total_steps,
            "train_s": self.clock.seconds,
            "config": shaping,
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def open_record(self, data: Dataset) -> None:
        if self.world.is_main:
            folder = record.run_folder(self.config)
            self.record, self.metrics = record.Record(folder), record.Metrics(folder, self.step)
            self.record.mark("joined")
            self.record.change(
                data={"name": data.name, "sha256": data.sha256()}, gpus=environment.gpus(self.world.device)
            )

    def resume(self) -> None:
        """Load the newest valid checkpoint, which rank 0 reads and hands to all, if --resume auto asks for it."""
        if self.config.resume == "auto":
            folder = record.run_folder(self.config) / "checkpoints"
            content = self.world.broadcast(checkpoint.newest_valid(folder) if self.world.is_main else None)
            if content is not None:
                self.load(checkpoint.load(content))

    def load(self, state: checkpoint.State) -> None:
        """Take over the state of a checkpoint. Raises UserError if it was made with settings that shape the result."""
        self.compare(state)
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = self.resumed_at = state["step"]
        self.trained_s = state["train_s"]
        if self.world.is_main:
            print(f"resuming at step {self.step}", flush=True)

    def compare(self, state: checkpoint.State) -> None:
        for name, value in state["config"].items():
            now = getattr(self.config, name)
            if now != value:
                raise UserError(
                    f"The checkpoint was made with {flag(name)} {value}, now it is {now}.",
                    f"{flag(name)} {value}, or another --run-id",
                )
        if self.config.schedule in ("cosine", "one-cycle") and state["total_steps"] != self.total_steps:
            raise UserError(
                f"--schedule {self.config.schedule} was for {state['total_steps']} steps, now {self.total_steps}.",
                "the same --epochs and --max-steps, or another --run-id",
            )

    @property
    def epoch(self) -> int:
        """Number of the epoch that the last step belongs to, from 1."""
        return -(-self.step // self.order.steps_per_epoch)

    def is_due(self, every: int | None) -> bool:
        return self.step % (every or self.order.steps_per_epoch) == 0

    def log(self, loss: Tensor, progress: Progress) -> None:
        """Show and write the mean loss of this step over all ranks."""
        (mean,) = self.world.sum([float(loss) / self.world.size])
        progress.show(self.step, mean, self.samples_per_s)
        if self.metrics:
            lr = float(self.optimizer.param_groups[0]["lr"])
            self.metrics.write(self.step, self.epoch, loss=mean, lr=lr, samples_per_s=round(self.samples_per_s, 1))

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks over the time spent in training steps, earlier attempts included."""
        return self.step * self.config.batch_size / max(self.clock.seconds, 1e-9)

    def finish(self, validated: dict[str, float]) -> None:
        if self.record is None:
            return
        result: dict[str, Any] = {
            **validated,
            "weights_sha256": checkpoint.weights_sha256(self.module.state_dict()),
            "samples_per_s": round(self.samples_per_s, 1),
            "steps": self.step,
            "resumed_at": self.resumed_at,
        }
        self.record.close("done", contract.EXIT_DONE, result=result)
        print(
            "done: "
            + "  ".join(f"{name} {value:.4f}" for name, value in sorted(validated.items()))
            + f"  {self.step} steps  {self.samples_per_s:,.0f} samples/s  weights {result['weights_sha256'][:12]}"
        )
        print(f"run folder: {self.record.path.parent}", flush=True)

    def close(self) -> None:
        if self.metrics:
            self.metrics.close()


class Stopwatch:
    """Seconds of training: runs from its making, stands still while paused."""

    def __init__(self, device: torch.device, seconds: float = 0.0) -> None:
        self._device = device
        self._since = time.perf_counter() - seconds

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._since

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # steps that are still on the way are training
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began


def wrap(module: nn.Module, world: World) -> DistributedDataParallel:
    """Average gradients over all ranks."""
    devices = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(module, device_ids=devices, gradient_as_bucket_view=True)
