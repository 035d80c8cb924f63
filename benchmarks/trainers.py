"""Trainers for benchmarks and tests, as the entry scripts make them.

opened = open_script(resnet50_test, ["--bs", "64"], world)     # what the script would train
next(train_steps("resnet50", ["--bs", "64"]))                   # samples of one of its steps
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

import dynamic_batch
import mixup
import resnet50_test
import transformer_test
from cli import factory, image_classification, options, text_classification
from cli.data import Data, Run
from cli.settings import Settings
from distributed.world import World, init_world
from errors import InputError
from models.hugging_face import HF
from training.batch_sampler import RankBatch
from training.trainer import Trainer

SCRIPTS: dict[str, ModuleType] = {"resnet50": resnet50_test, "transformer": transformer_test}
WORDS = {  # before the flags that are given; steps of full size, as those of the results
    "resnet50": "--optimizer sgd --small_epochs 0 --backend eager",
    "transformer": "--optimizer adamw --depth 2 --backend eager",
}
BATCHES = {"resnet50": 64, "transformer": 128}
TASKS = {"resnet50_test": image_classification, "transformer_test": text_classification}


@dataclass(frozen=True)
class Opened:
    """What a script has created before its first step, as its `main` does."""

    settings: Settings
    run: Run
    data: Data
    trainer: Trainer


def open_script(
    script: ModuleType,
    arguments: Sequence[str],
    world: World,
    *,
    create_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
) -> Opened:
    """Create what a script trains with these command-line arguments, as its `main` does.

    `create_optimizer` makes an optimizer of the model that no flag names.
    """
    settings, checkpoint = options.parse(script.parser(), script.SCRIPT, arguments)
    if settings.arch.startswith(HF):
        raise InputError(f"--arch {settings.arch}: only the script itself reads it")
    task = TASKS[script.SCRIPT]
    run = factory.create_run(settings, script.SCRIPT, world, checkpoint)
    data = task.load_data(settings, run)
    settings = factory.with_batch_size(settings, run, data)
    model = task.create_model(settings, run, data)
    loss = factory.create_loss(
        settings, run, data, sample_mix=mixup.sample_mix, meta_mixup=mixup.MetaMixup
    )
    batches = factory.create_batch_sampler(settings, run, data, dynamic_batch.RULES)
    model = factory.prepare_model(settings, run, model, batches)
    if create_optimizer is not None:
        optimizer = create_optimizer(model)
    else:
        optimizer = factory.create_optimizer(settings, run, model)
    trainer = factory.create_trainer(
        settings, run, data, model=model, optimizer=optimizer, loss=loss, batches=batches
    )
    return Opened(settings, run, data, trainer)


@contextlib.contextmanager
def ready(name: str, flags: Sequence[str]) -> Iterator[Opened]:
    """Open one of `SCRIPTS` with a run folder that goes, ready for its first training step.

    Without other flags it has those of `WORDS`.
    """
    script = SCRIPTS[name]
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*WORDS[name].split(), *flags, "--out", f"{folder}/run"]
        settings, _ = options.parse(script.parser(), script.SCRIPT, arguments)
        with init_world(settings.device) as world:
            opened = open_script(script, arguments, world)
            opened.trainer.wrap_model()
            opened.trainer.model.train()
            yield opened


def all_batches(trainer: Trainer) -> Iterator[tuple[RankBatch, Tensor, Tensor]]:
    """Yield the full batches of the first epoch again and again: its plan, inputs and labels."""
    trainer.batches.start_epoch(0)
    trainer.parallel.start_epoch(0)
    every = trainer.batches.plan(0, 0)
    plan = [each for each in every if each.samples == trainer.batches.size] or every
    while True:
        trainer.progress.step_in_epoch = 0
        data = trainer.train_set.batches([planned.rows for planned in plan], 0)
        for planned, (inputs, labels) in zip(plan, data):
            yield planned, inputs, labels


def steps_of(trainer: Trainer) -> Iterator[int]:
    """Take training steps as `Trainer.train_epoch` does; yield the samples of each."""
    for planned, inputs, labels in all_batches(trainer):
        trainer.set_lr(trainer.scheduled_lr())
        trainer.train_step(inputs, labels, planned)
        trainer.progress.step_in_epoch += 1
        yield planned.samples


def train_steps(name: str, flags: Sequence[str]) -> Iterator[int]:
    """Take training steps of one of `SCRIPTS` without end; yield the samples of each."""
    with ready(name, flags) as opened:
        yield from steps_of(opened.trainer)
