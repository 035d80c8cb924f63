"""The peer that people write first: a plain training loop of the same model and batch as ours.

recipe = Recipe.of(opened)
for samples in train(recipe, read_batches(recipe, "data", batch_size=64)):     # a step each
python -m benchmarks.plain_training --arch vgg8 --bs 128 --lr 0.1 --epochs 16 --out runs/plain

torchvision transforms on PIL images or a tokenizing collate function, DataLoader workers, fp32,
eager, NCHW, and torch's optimizers with their defaults. It starts from the weights of ours.

The command trains on all of CIFAR-10 to the end, on a CPU, with SGD and a cosine. Its flags are
named as in resnet50_test.py; with --val_fraction it evaluates on the last rows of the training set
alone. Momentum and decay are those of the entry script's SGD.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from backends.device import has_bf16
from benchmarks import bench, trainers
from benchmarks.peer_log import PeerLog, peer_parser
from cli.flag_parser import FlagParser, below_one, count, positive
from errors import exit_code
from input_pipeline import text_datasets

WORKERS = 2  # of the DataLoader: one per core
CIFAR_ROWS = 50_000
ALL = slice(None)


@dataclass(frozen=True)
class Recipe:
    """What the plain side trains, without any of our settings."""

    texts: bool
    metadata: dict[str, Any]
    model: nn.Module  # with our initial weights, in NCHW
    lr: float
    momentum: float
    weight_decay: float

    @classmethod
    def of(cls, opened: trainers.Opened) -> Recipe:
        """Copy the model, the data's metadata and the rates."""
        model = copy.deepcopy(opened.trainer.model)
        return cls(
            texts=opened.run.script == "transformer_test",
            metadata=opened.data.metadata,
            model=model.to(memory_format=torch.contiguous_format),  # type: ignore[call-overload]
            lr=opened.settings.lr,
            momentum=opened.settings.momentum,
            weight_decay=opened.settings.weight_decay,
        )

    def in_own_memory(self) -> Recipe:
        """The same, with a model that no other process shares: it may have come from one."""
        return replace(self, model=copy.deepcopy(self.model))

    def optimizer(self) -> torch.optim.Optimizer:
        """Create torch's optimizer, with its own defaults."""
        weights, decay = self.model.parameters(), self.weight_decay
        if self.texts:
            return torch.optim.AdamW(weights, self.lr, weight_decay=decay)
        return torch.optim.SGD(weights, self.lr, self.momentum, weight_decay=decay)


class Collate:
    """Cleans and tokenises a batch and pads it to its longest row.

    It is a class because spawned workers cannot pickle a closure.
    """

    def __init__(self, tokenizer: Tokenizer, max_len: int) -> None:
        self.tokenizer, self.max_len = tokenizer, max_len

    def __call__(self, rows: list[tuple[str, int]]) -> tuple[Tensor, Tensor]:
        texts = [text_datasets.clean_text(text_datasets.repair(text)) for text, _ in rows]
        ids = [torch.tensor(self.tokenizer.encode(text).ids[: self.max_len]) for text in texts]
        return pad_sequence(ids, batch_first=True), torch.tensor([label for _, label in rows])


def create_loader(
    recipe: Recipe,
    data_dir: str,
    batch_size: int,
    *,
    rows: slice = ALL,
    train: bool = True,
    test_set: bool = False,
) -> DataLoader[Any]:
    """Load rows of CIFAR-10 or AG News in the usual way, to train on them or to evaluate."""
    # Without it tokenizers warns in every forked worker.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    metadata, collate = recipe.metadata, None
    if recipe.texts:
        train_set = text_datasets.read_text_splits("agnews", data_dir)[0]["train"]
        data: Any = [*zip(train_set.texts, train_set.labels)]
        collate = Collate(Tokenizer.from_str(metadata["tokenizer"]), metadata["max_len"])
    else:
        augment = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
        scale = [transforms.ToTensor(), transforms.Normalize(metadata["mean"], metadata["std"])]
        transform = transforms.Compose([*augment, *scale] if train else scale)
        data = datasets.CIFAR10(data_dir, train=not test_set, transform=transform)
        data.data, data.targets = data.data[rows], data.targets[rows]
    return DataLoader(
        data,
        batch_size,
        shuffle=train,
        num_workers=WORKERS,
        collate_fn=collate,
        drop_last=train,
        persistent_workers=True,  # so that starting them does not count
    )


def read_batches(recipe: Recipe, data_dir: str, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of all epochs."""
    batches = create_loader(recipe, data_dir, batch_size)
    while True:
        yield from batches


def train(
    recipe: Recipe,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    bf16: bool = False,
    channels_last: bool = False,
) -> Iterator[int]:
    """Run the training loop of a tutorial; yield the samples of each step.

    Args:
        optimizer: of the model; None is the recipe's.
        bf16: autocast, where the device has it.
        channels_last: of images and weights, in place of NCHW.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = recipe.model.to(bench.DEVICE).to(memory_format=layout)  # type: ignore[call-overload]
    optimizer, bf16 = optimizer or recipe.optimizer(), bf16 and has_bf16(bench.DEVICE)
    for inputs, labels in batches:
        inputs, labels = inputs.to(bench.DEVICE), labels.to(bench.DEVICE)
        if inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=layout)
        optimizer.zero_grad()
        with torch.autocast(bench.DEVICE.type, torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        yield len(labels)


# -------------------------------------------------------------------- to the end


def train_to_the_end(recipe: Recipe, args: argparse.Namespace, log: PeerLog) -> None:
    """Train images for --epochs, with a cosine to 0; a row of the log for each epoch."""
    load, model = partial(create_loader, recipe, args.data_dir, args.bs), recipe.model
    held_out = round(args.val_fraction * CIFAR_ROWS)
    batches = load(rows=slice(CIFAR_ROWS - held_out))
    if held_out:
        name, evaluated = "val_accuracy", load(rows=slice(-held_out, None), train=False)
    else:
        name, evaluated = "test_accuracy", load(train=False, test_set=True)
    optimizer = recipe.optimizer()
    schedule = CosineAnnealingLR(optimizer, args.epochs * len(batches))

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        model.eval()
        correct = (int((model(inputs).argmax(1) == labels).sum()) for inputs, labels in evaluated)
        return {name: sum(correct) / len(evaluated.dataset)}  # type: ignore[arg-type]

    def step(inputs: Tensor, labels: Tensor) -> tuple[Tensor, float, float]:
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = F.cross_entropy(outputs, labels)
        loss.backward()
        optimizer.step()
        lr = float(schedule.get_last_lr()[0])
        schedule.step()
        return outputs, loss.item() * len(labels), lr

    log.train(model, batches, step, evaluate)


def parser() -> FlagParser:
    flags = peer_parser(__doc__, epochs=50)
    add = flags.add_argument
    add("--arch", default="resnet50")
    add("--bs", type=count, default=128)
    add("--lr", type=positive, default=0.1)
    add("--val_fraction", type=below_one, default=0.0, help="last rows of the training set")
    return flags


def make_recipe(words: Sequence[str]) -> Recipe:
    with trainers.ready("resnet50", words) as opened:
        return Recipe.of(opened)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    same = {name: getattr(args, name) for name in ("arch", "bs", "lr", "seed", "data_dir")}
    words = [word for name, each in same.items() for word in (f"--{name}", str(each))]
    words += ["--device", "cpu"]
    # In a process of its own: a script's start changes the allocator and the threads.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        recipe = pool.submit(make_recipe, words).result().in_own_memory()
    args.momentum, args.weight_decay = recipe.momentum, recipe.weight_decay  # for the log
    command = "python -m benchmarks.plain_training"
    log = PeerLog(args, f"plain PyTorch {torch.__version__}", precision="fp32", command=command)
    torch.manual_seed(args.seed)
    train_to_the_end(recipe, args, log)


if __name__ == "__main__":
    sys.exit(exit_code(main))
