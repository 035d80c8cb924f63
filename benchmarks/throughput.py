"""How fast the two scripts train, compared with a plain training loop of the same model and batch.

python -m benchmarks.throughput --quick                 # five minutes on two cores
python -m benchmarks.throughput --json throughput.json  # longer blocks, larger batch

Ours is what the scripts run with their default flags: created by their own functions, with the
steps of the Trainer. Plain is torchvision transforms on PIL images or a tokenizing collate
function, DataLoader workers, fp32, eager, NCHW, and torch's optimizers with their defaults, in a
process of its own. Both start from the same weights and take turns.
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, transforms

import errors
import resnet50_test
import transformer_test
from benchmarks import bench, trainers
from cli.flag_parser import path_text
from distributed.world import World, init_world
from input_pipeline import csv_tables, text_datasets
from training.trainer import Trainer

# Target ratios of samples/s. Training: bf16 in channels_last alone gave 2.73 on two cores with AMX;
# without AMX the bar stays, and may be short. No speed-up of the small Transformer is promised.
# Input: the cores are there for the model, so our batches may cost a tenth (texts: a fifth) of what
# they cost with a worker process per core.
SPEED_UPS = {"resnet50 training": 2.7, "image input pipeline": 10.0, "text input pipeline": 5.0}

PACKAGES = ("torch", "torchvision", "tokenizers")
WORKERS = 2  # of the plain DataLoader: one per core
INPUT_BATCH = TEXT_BATCH = 128
OPTIMIZERS = {"resnet50": "sgd", "transformer": "adamw"}  # of both sides of a pair

# Seconds of a block, blocks of a side, and the seconds after which three blocks are enough; with
# --quick, and without.
SIZES = {  # of --quick, and of a full run
    "resnet50 training": ((4, 9, 90), (15, 11, 600)),
    "transformer training": ((3, 7, 50), (15, 11, 600)),
    "image input pipeline": ((1.5, 7, 25), (6, 11, 200)),
    "text input pipeline": ((1.5, 7, 25), (6, 11, 200)),
}

# -------------------------------------------------------------------- ours


@dataclass(frozen=True)
class Recipe:
    """What the plain side trains, without any of our settings."""

    texts: bool
    metadata: dict[str, Any]
    model: nn.Module  # with our initial weights, in NCHW
    lr: float
    momentum: float
    weight_decay: float


def open_script(script: ModuleType, arguments: list[str], world: World) -> trainers.Opened:
    """Create what a script trains with these arguments, ready for its first step."""
    opened = trainers.open_script(script, arguments, world)
    opened.trainer.wrap_model()
    opened.trainer.model.train()
    return opened


def recipe_of(opened: trainers.Opened) -> Recipe:
    """Return what the plain side trains: a copy of the model, the data and the rates."""
    model = copy.deepcopy(opened.trainer.model)
    return Recipe(
        texts=opened.run.script == transformer_test.SCRIPT,
        metadata=opened.data.metadata,
        model=model.to(memory_format=torch.contiguous_format),  # type: ignore[call-overload]
        lr=opened.lr,
        momentum=opened.momentum,
        weight_decay=opened.weight_decay,
    )


def our_batches(trainer: Trainer, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of all epochs, as `Trainer.train_epoch` reads them."""
    for epoch in itertools.count():
        trainer.progress.epoch, trainer.progress.step_in_epoch = epoch, 0
        row_batches = list(trainer.batches.order.full_batches(epoch, batch_size))
        yield from trainer.train_set.batches(row_batches, epoch)


def our_steps(trainer: Trainer) -> Iterator[int]:
    """Take training steps as `Trainer.train_epoch` does; yield the samples of each."""
    for inputs, labels in our_batches(trainer, trainer.batches.size):
        trainer.set_lr(trainer.scheduled_lr())
        trainer.train_step(inputs, labels)
        trainer.progress.step_in_epoch += 1
        yield len(labels)


# -------------------------------------------------------------------- the plain recipe


class Lines(Dataset):
    """The raw text and class of each row of train.csv."""

    def __init__(self, data_dir: str) -> None:
        self.rows = csv_tables.read_csv(Path(data_dir) / "ag_news_csv" / "train.csv", 3)

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


def image_loader(data_dir: str, metadata: dict[str, Any], batch_size: int) -> DataLoader:
    """Load CIFAR-10 in the usual way."""
    augment = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    scale = transforms.Normalize(metadata["mean"], metadata["std"])
    data = datasets.CIFAR10(
        data_dir, train=True, transform=transforms.Compose([*augment, transforms.ToTensor(), scale])
    )
    return loader(data, batch_size)


def text_loader(data_dir: str, metadata: dict[str, Any], batch_size: int) -> DataLoader:
    """Load AG News in the usual way, with our trained tokenizer."""
    collate = Collate(Tokenizer.from_str(metadata["tokenizer"]), metadata["max_len"])
    return loader(Lines(data_dir), batch_size, collate)


def loader(data: Dataset, batch_size: int, collate: Collate | None = None) -> DataLoader:
    """Return a DataLoader with persistent workers, so that starting them does not count."""
    return DataLoader(
        data,
        batch_size,
        shuffle=True,
        num_workers=WORKERS,
        collate_fn=collate,
        drop_last=True,
        persistent_workers=True,
    )


def plain_batches(
    recipe: Recipe, data_dir: str, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of all epochs."""
    batches = (text_loader if recipe.texts else image_loader)(data_dir, recipe.metadata, batch_size)
    while True:
        yield from batches


def plain_training(recipe: Recipe, data_dir: str, batch_size: int) -> Iterator[int]:
    """Run the training loop of a tutorial; yield the samples of each step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = recipe.model.to(device)
    if recipe.texts:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), recipe.lr, weight_decay=recipe.weight_decay
        )
    else:
        optimizer = torch.optim.SGD(
            model.parameters(), recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay
        )
    for inputs, labels in plain_batches(recipe, data_dir, batch_size):
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        yield len(labels)


def plain_input(recipe: Recipe, data_dir: str, batch_size: int) -> Iterator[int]:
    """Yield the sizes of batches, without training."""
    return (len(labels) for _, labels in plain_batches(recipe, data_dir, batch_size))


# -------------------------------------------------------------------- the pairs


def pair(name: str, quick: bool, ours: Iterator[int], plain: bench.Remote) -> bench.Row:
    block, blocks, limit = SIZES[name][0 if quick else 1]
    return bench.interleave(name, ours, plain, block=block, blocks=blocks, limit=limit)


def both_pairs(
    name: str, opened: trainers.Opened, data_dir: str, quick: bool, batch: int
) -> list[bench.Row]:
    """Measure training, and the input pipeline alone, each with plain in its own process."""
    recipe = recipe_of(opened)
    plain = bench.Remote(plain_training, recipe, data_dir, batch)
    training = pair(f"{name} training", quick, our_steps(opened.trainer), plain)
    ours = (len(labels) for _, labels in our_batches(opened.trainer, INPUT_BATCH))
    plain = bench.Remote(plain_input, recipe, data_dir, INPUT_BATCH)
    return [
        training,
        pair(f"{'text' if recipe.texts else 'image'} input pipeline", quick, ours, plain),
    ]


def measure(
    data_dir: str, quick: bool, folder: str, world: World
) -> tuple[list[bench.Row], dict[str, Any]]:
    """Measure the four pairs; return their rows and the settings."""
    batch = 64 if quick else 128
    common = ["--data_dir", data_dir, "--out"]
    arguments = [*common, f"{folder}/image", "--bs", str(batch)]
    arguments += ["--optimizer", OPTIMIZERS["resnet50"]]
    image = open_script(resnet50_test, arguments, world)
    rows = both_pairs("resnet50", image, data_dir, quick, batch)
    arguments = [*common, f"{folder}/text", "--bs", str(TEXT_BATCH)]
    arguments += ["--optimizer", OPTIMIZERS["transformer"]]
    text = open_script(transformer_test, arguments, world)
    rows += both_pairs("transformer", text, data_dir, quick, TEXT_BATCH)
    facts = {
        "precision": image.run.precision.name,
        "prepare_seconds": {"images": image.seconds, "texts": text.seconds},
    }
    return rows, {
        **facts,
        "resnet50_batch": batch,
        "input_batch": INPUT_BATCH,
        "transformer_batch": TEXT_BATCH,
    }


def main() -> None:
    started = time.perf_counter()
    parser = bench.parser(__doc__)
    data_dir = os.environ.get("DATA_DIR", "./data")
    add = parser.add_argument
    add(
        "--data_dir",
        type=path_text,
        default=data_dir,
        help="folder of the data sets (default $DATA_DIR or ./data)",
    )
    args = parser.parse_args()
    # Without it tokenizers warns in every forked worker.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    with tempfile.TemporaryDirectory() as folder, init_world() as world:
        machine = bench.machine(world.device, PACKAGES)
        rows, facts = measure(args.data_dir, args.quick, folder, world)
    bars = [
        bench.Bar(row.name, row.ratio, SPEED_UPS[row.name]) for row in rows if row.name in SPEED_UPS
    ]
    seconds = time.perf_counter() - started
    print(bench.table(rows, "plain"))
    print(f"{machine}; ours in {facts['precision']}, plain in fp32; {seconds:.0f} s")
    prepare = ", ".join(f"{v:.1f} s ({k})" for k, v in facts["prepare_seconds"].items())
    print(f"before the first epoch ours takes {prepare}")
    bench.write_json(
        args.json,
        rows,
        bars,
        machine=machine,
        seconds=seconds,
        quick=args.quick,
        **facts,
    )
    sys.exit(bench.verdict(bars))


if __name__ == "__main__":
    sys.exit(errors.exit_code(main))
