"""How fast the two scripts train, compared with a plain training loop of the same model and batch.

python -m benchmarks.throughput --quick                 # five minutes on two cores
python -m benchmarks.throughput --json throughput.json  # longer turns, larger batch

Ours is what the scripts run with their default flags: created by their own functions, with the
steps of the Trainer. Plain is torchvision transforms on PIL images or a tokenizing collate
function, DataLoader workers, fp32, eager, NCHW, and torch's optimizers with their defaults. Both
start from the same weights, in processes of their own that take turns.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, transforms

from benchmarks import bench, trainers
from errors import exit_code
from input_pipeline import csv_tables, text_datasets

# Target ratios of samples/s. Training: bf16 in channels_last alone gave 2.73 on two cores with AMX;
# without AMX the bar stays, and may be short. No speed-up of the small Transformer is promised.
# Input: the cores are there for the model, so our batches may cost a tenth (texts: a fifth) of what
# they cost with a worker process per core.
SPEED_UPS = {"resnet50 training": 2.7, "image input pipeline": 10.0, "text input pipeline": 5.0}

WORKERS = 2  # of the plain DataLoader: one per core
INPUT_BATCH = 128
PLAIN, TRAINING, INPUT = "plain", "training", "input pipeline"
# Rounds, and seconds of each side in a round; with --quick and without.
SIZES = {
    TRAINING: {True: (9, 4.0), False: (11, 15.0)},
    INPUT: {True: (7, 1.5), False: (11, 6.0)},
}

# -------------------------------------------------------------------- the plain recipe


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
            lr=opened.args.lr,
            momentum=opened.args.momentum,
            weight_decay=opened.args.weight_decay,
        )

    def optimizer(self) -> torch.optim.Optimizer:
        """Create torch's optimizer, with its own defaults."""
        weights, decay = self.model.parameters(), self.weight_decay
        if self.texts:
            return torch.optim.AdamW(weights, self.lr, weight_decay=decay)
        return torch.optim.SGD(weights, self.lr, self.momentum, weight_decay=decay)


class Lines(Dataset):
    """The raw text and class of each row of train.csv."""

    def __init__(self, data_dir: str) -> None:
        path = Path(data_dir) / "ag_news_csv" / "train.csv"
        self.rows = [row for _, row in csv_tables.read_rows(path, columns=3)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[str, int]:
        label, title, description = self.rows[index]
        return f"{title} {description}", int(label) - 1


class Collate:
    """Cleans and tokenises a batch and pads it to its longest row.

    It is a class because spawned workers cannot pickle a closure.
    """

    def __init__(self, tokenizer: Tokenizer, max_len: int) -> None:
        self.tokenizer, self.max_len = tokenizer, max_len

    def __call__(self, rows: list[tuple[str, int]]) -> tuple[Tensor, Tensor]:
        texts = [text_datasets.clean_text(text) for text, _ in rows]
        ids = [torch.tensor(self.tokenizer.encode(text).ids[: self.max_len]) for text in texts]
        return pad_sequence(ids, batch_first=True), torch.tensor([label for _, label in rows])


def plain_batches(
    recipe: Recipe, data_dir: str, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Load CIFAR-10 or AG News in the usual way; yield the batches of all epochs."""
    metadata, collate = recipe.metadata, None
    if recipe.texts:
        data: Dataset = Lines(data_dir)
        collate = Collate(Tokenizer.from_str(metadata["tokenizer"]), metadata["max_len"])
    else:
        augment = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
        scale = [transforms.ToTensor(), transforms.Normalize(metadata["mean"], metadata["std"])]
        data = datasets.CIFAR10(data_dir, transform=transforms.Compose([*augment, *scale]))
    batches = DataLoader(
        data,
        batch_size,
        shuffle=True,
        num_workers=WORKERS,
        collate_fn=collate,
        drop_last=True,
        persistent_workers=True,  # so that starting them does not count
    )
    while True:
        yield from batches


def plain_training(recipe: Recipe, data_dir: str, batch_size: int) -> Iterator[int]:
    """Run the training loop of a tutorial; yield the samples of each step."""
    model = recipe.model.to(bench.DEVICE)
    optimizer = recipe.optimizer()
    for inputs, labels in plain_batches(recipe, data_dir, batch_size):
        inputs, labels = inputs.to(bench.DEVICE), labels.to(bench.DEVICE)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        yield len(labels)


def plain_input(recipe: Recipe, data_dir: str, batch_size: int) -> Iterator[int]:
    """Yield the sizes of batches, without training."""
    return (len(labels) for _, labels in plain_batches(recipe, data_dir, batch_size))


# -------------------------------------------------------------------- the pairs


def our_input(name: str, flags: list[str]) -> Iterator[int]:
    """Yield the sizes of our batches, without training."""
    with trainers.ready(name, flags) as opened:
        for _, labels in trainers.all_batches(opened.trainer, INPUT_BATCH):
            yield len(labels)


def measure(
    name: str, data_dir: str, batch: int, *, quick: bool, budget: bench.Budget
) -> tuple[dict[str, bench.Row], trainers.Opened]:
    """Measure training of a script, and its input pipeline alone, over plain."""
    flags = ["--data_dir", data_dir, "--bs", str(batch)]
    with trainers.ready(name, flags) as opened:
        recipe = Recipe.of(opened)
    pairs: dict[str, tuple[str, Callable[..., Iterator[int]], Callable[..., Iterator[int]], int]]
    pairs = {
        TRAINING: (name, trainers.train_steps, plain_training, batch),
        INPUT: ("text" if recipe.texts else "image", our_input, plain_input, INPUT_BATCH),
    }
    rows = {}
    for work, (title, ours, plain, size) in pairs.items():
        starts = {
            PLAIN: partial(bench.Remote, plain, recipe, data_dir, size),
            work: partial(bench.Remote, ours, name, flags),
        }
        rounds, seconds = SIZES[work][quick]
        measured, _ = bench.compare(starts, title, rounds=rounds, seconds=seconds, budget=budget)
        rows[measured[work].name] = measured[work]
    return rows, opened


def main() -> int:
    args = bench.parser(__doc__, reads_data=True).parse_args()
    # Without it tokenizers warns in every forked worker.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    machine = bench.machine(bench.DEVICE, ("torch", "torchvision", "tokenizers"))
    budget = bench.Budget(args.quick, 4)
    batches = {**trainers.BATCHES, "resnet50": 64 if args.quick else 128}
    rows: dict[str, bench.Row] = {}
    for name, batch in batches.items():
        more, opened = measure(name, args.data_dir, batch, quick=args.quick, budget=budget)
        rows |= more
    precision = opened.run.precision.name
    print(bench.table(rows.values(), PLAIN))
    print(f"{machine}; ours in {precision}, plain in fp32")
    return bench.finish(
        args,
        [bench.Bar(name, rows[name].ratio, target) for name, target in SPEED_UPS.items()],
        rows=rows.values(),
        machine=machine,
        precision=precision,
        batches=batches | {INPUT: INPUT_BATCH},
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
