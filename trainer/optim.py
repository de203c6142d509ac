"""Optimizers and learning rate schedules by name. A schedule advances once an optimizer step."""

from collections.abc import Iterable

from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LRScheduler, OneCycleLR, StepLR

from trainer.config import TrainConfig


def build_optimizer(config: TrainConfig, parameters: Iterable[nn.Parameter]) -> Optimizer:
    if config.optimizer == "sgd":
        return SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    return AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)


def build_scheduler(config: TrainConfig, optimizer: Optimizer, total_steps: int, steps_per_epoch: int) -> LRScheduler:
    """The schedule over `total_steps` optimizer steps; --lr is its peak."""
    if config.schedule == "cosine":
        return CosineAnnealingLR(optimizer, T_max=total_steps)
    if config.schedule == "one-cycle":
        return OneCycleLR(optimizer, max_lr=config.lr, total_steps=total_steps + 1)
    if config.schedule == "step":
        return StepLR(optimizer, step_size=config.step_epochs * steps_per_epoch, gamma=config.step_gamma)
    return ConstantLR(optimizer, factor=1.0)
