"""Trainers of single steps, and optimizers by their names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import resnet50_test
from benchmarks.trainers import FP32, NoData, step_trainer
from optimizers.param_groups import optimizer_groups

__all__ = ["FP32", "NoData", "build_optimizer", "make_trainer"]

make_trainer = step_trainer


def build_optimizer(
    model: nn.Module,
    name: str,
    lr: float,
    weight_decay: float = 0.0,
    **settings: Any,
) -> torch.optim.Optimizer:
    """The optimizer of that name over all parameters, as the entry scripts make it."""
    groups = optimizer_groups(name, model, weight_decay)
    return resnet50_test.OPTIMIZERS[name].make(groups, lr=lr, **settings)
