"""Trainers of single steps, and optimizers by their names."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backends.precision import Precision
from cli.optimizers import OPTIMIZERS
from distributed.comm_hooks import AllReduceHook
from distributed.world import World
from models.transformer import Transformer
from optimizers.schedules import Schedule
from training.batch_sampler import DynamicBatchSampler
from training.losses import CrossEntropy
from training.run_log import RunLog
from training.trainer import Trainer, TrainerConfig

FP32 = Precision("fp32", "cpu")
ROWS = 64  # of the data set that is not there


def make_trainer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World | None = None,
    *,
    loss_fn: Any = None,
    meta_learner: Any = None,
    precision: Precision = FP32,
    comm_hook: AllReduceHook | None = None,
    **config: Any,
) -> Any:
    """A trainer of single steps, without data and run folder; `config` is of `TrainerConfig`."""
    world = world or World()
    return Trainer(
        model,
        optimizer,
        loss_fn or CrossEntropy(),
        DynamicBatchSampler(ROWS, 8 * world.size, world=world),
        train_set=None,  # type: ignore[arg-type]  # a step reads nothing of it
        eval_sets={},
        lr_schedule=Schedule("constant", 1),
        precision=precision,
        world=world,
        log=RunLog(Path(), is_main=False),
        config=TrainerConfig(**config),
        metadata={"script": "", "classes": []},
        comm_hook=comm_hook or AllReduceHook(world),
        meta_learner=meta_learner,
    )


def build_optimizer(model: nn.Module, name: str, lr: float, weight_decay=0.0, **settings: Any):
    """The optimizer of that name over all parameters, as the entry scripts make it."""
    choice = OPTIMIZERS[name]
    return choice.make(choice.groups(model, weight_decay), lr=lr, **settings)


def trainer_of(model: nn.Module, world: Any, **settings: Any) -> Any:
    """A trainer of steps of SGD, whose model is wrapped for data parallelism."""
    trainer = make_trainer(model, build_optimizer(model, "sgd", 0.1), world, **settings)
    trainer.wrap_model()
    return trainer


def text_model(depth: int = 1, **settings: Any) -> nn.Module:
    """A small Transformer in float64, without dropout unless it is given."""
    torch.manual_seed(1)
    sizes = {"width": 16, "depth": depth, "heads": 2, "mlp_width": 32, "max_len": 16}
    return Transformer(50, 4, **sizes, **{"dropout": 0.0, **settings}).double()


def text_batch(rows: int, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Tokens and labels for it."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(3, 50, (rows, 12), generator=generator)
    return inputs, torch.randint(4, (rows,), generator=generator)


def image_network(*norm: nn.Module) -> nn.Module:
    """A convolution and two matrices, one of which is large for SLAMB."""
    torch.manual_seed(0)
    first = nn.Conv2d(3, 18, 3, padding=1), *norm, nn.ReLU(), nn.AdaptiveAvgPool2d(2)
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(72, 128), nn.Linear(128, 10))


def flat(tensors) -> Tensor:
    return torch.cat([each.detach().flatten() for each in tensors])
