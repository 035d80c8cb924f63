"""A Trainer around a model, for tests of single steps; and optimizers by their names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import resnet50_test
from backends.precision import Precision
from distributed.comm_hooks import AllReduceHook
from distributed.world import World
from input_pipeline.sampler import Sampler
from optimizers.param_groups import decay_groups, ngd_groups
from optimizers.schedules import Schedule
from training.batch_schedule import BatchSchedule
from training.losses import CrossEntropy, LossFn
from training.meta_mixup_step import MetaLearner
from training.run_log import RunLog
from training.trainer import Trainer, TrainerConfig

FP32 = Precision("fp32", "cpu")


class NoData:
    """A data set that nothing is read from."""

    lengths = None

    def __len__(self) -> int:
        return 64

    def batches(self, plan: Sequence[Tensor], epoch: int | None = None):
        raise AssertionError("this trainer has no data")


def build_optimizer(
    model: nn.Module,
    name: str,
    lr: float,
    weight_decay: float = 0.0,
    *,
    ngd_skip: Sequence[str] = (),
    **settings: Any,
) -> torch.optim.Optimizer:
    """The optimizer of that name over all parameters, as the entry scripts make it."""
    if name == "ngd":
        groups = ngd_groups(model, weight_decay, ngd_skip)
    else:
        groups = decay_groups(model, weight_decay)
    return resnet50_test.OPTIMIZERS[name].make(groups, lr=lr, **settings)


def make_trainer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World | None = None,
    *,
    loss_fn: LossFn | None = None,
    precision: Precision = FP32,
    comm_hook: AllReduceHook | None = None,
    meta_learner: MetaLearner | None = None,
    **config: Any,
) -> Trainer:
    """A Trainer without data and run folder; `config` holds fields of `TrainerConfig`."""
    world = world or World()
    return Trainer(
        model,
        optimizer,
        loss_fn or CrossEntropy(),
        BatchSchedule(world, Sampler(64, seed=0), base=8 * world.size),
        train_set=NoData(),
        eval_sets={},
        lr_schedule=Schedule("constant", 1),
        precision=precision,
        world=world,
        log=RunLog(Path(), is_main=False),
        config=TrainerConfig(**config),
        metadata={"script": "test", "classes": []},
        comm_hook=comm_hook,
        meta_learner=meta_learner,
    )
