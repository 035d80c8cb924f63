"""How fast the two scripts train, beside the plain recipe one would write instead, on the same model and batch.

python -m benchmarks.throughput --quick                 # five minutes on two cores
python -m benchmarks.throughput --json throughput.json  # longer blocks, larger batch

Ours is what the scripts run with their default flags: built by their own functions, one step as engine.py does it. Plain
is torchvision transforms on PIL images or a tokenizing collate function, DataLoader workers, fp32, eager, NCHW, and
torch's optimizers as they come, in a process of its own. Both start from the same weights and take turns. Last comes what
the Transformer has learnt: the accuracy of a committed run beside TF-IDF and logistic regression on the same rows.
"""

from __future__ import annotations

import copy
import itertools
import json
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
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, transforms

import errors
import resnet50_test
import transformer_test
from benchmarks import bench
from cli import factory, options
from distributed.world import World, init_world
from input_pipeline import text_datasets
from training import run_log
from training.trainer import Trainer

# Speed-ups wanted, as ratios of samples/s. Training: bf16 in channels_last alone gave 2.73 on two cores with AMX; without
# AMX the bar stays, and may be short. No speed-up of the small Transformer is promised. Input: the cores are there for the
# model, so our batches may cost a tenth (texts: a fifth) of what workers, a process a core, make them cost.
SPEED_UPS = {"resnet50 training": 2.7, "image input pipeline": 10.0, "text input pipeline": 5.0}
ACCURACY = 87.5  # percent of the official AG News test set; TF-IDF on the same training rows is printed beside it

PACKAGES = ("torch", "torchvision", "tokenizers", "scikit-learn")
WORKERS = 2  # of the plain DataLoader: one a core
INPUT_BATCH = TEXT_BATCH = 128

# Seconds of a block, blocks of a side, and the seconds after which three blocks will do: with --quick, and without.
SIZES = {
    "resnet50 training": ((4, 9, 90), (15, 11, 600)),
    "transformer training": ((3, 7, 50), (15, 11, 600)),
    "image input pipeline": ((1.5, 7, 25), (6, 11, 200)),
    "text input pipeline": ((1.5, 7, 25), (6, 11, 200)),
}

# -------------------------------------------------------------------- ours


@dataclass(frozen=True)
class Recipe:
    """What the plain side is told: what it is to train, and nothing of how we do it."""

    text_datasets: bool
    metadata: dict[str, Any]
    model: nn.Module  # with our first weights, in the memory format that torch gives it (NCHW)
    lr: float
    momentum: float
    weight_decay: float


@dataclass(frozen=True)
class Opened:
    """What a script has built just before its first step, and the seconds it took to read (and tokenise) the data."""

    trainer: Trainer
    recipe: Recipe
    precision: str
    seconds: float


def open_script(script: ModuleType, words: list[str], world: World) -> Opened:
    """What `script` builds from these command-line words, by its own functions."""
    args, _ = options.parse(script.parser(), script.SCRIPT, words)
    run = factory.create_run(args, script.SCRIPT, world)
    clock = time.perf_counter()
    sets, metadata = script.build_sets(args, run, None)
    seconds = time.perf_counter() - clock
    trainer = factory.trainer(
        args, run, script.create_model(args, metadata, run), sets.pop("train"), sets, metadata
    )
    trainer.do_step.wrap()
    trainer.model.train()
    plain = copy.deepcopy(trainer.model).to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    recipe = Recipe(
        script is transformer_test, metadata, plain, args.lr, args.momentum, args.weight_decay
    )
    return Opened(trainer, recipe, run.precision.name, seconds)


def our_batches(trainer: Trainer, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of epoch after epoch, as `Trainer.train_epoch` asks for them; it keeps its place in the schedule."""
    for epoch in itertools.count():
        trainer.epoch, trainer.step_in_epoch = epoch, 0
        yield from trainer.train_set.batches(
            list(trainer.batching.order.epoch(epoch, batch_size)), epoch
        )


def our_steps(trainer: Trainer) -> Iterator[int]:
    """Training steps as in `Trainer.train_epoch`."""
    for inputs, labels in our_batches(trainer, trainer.batching.size):
        trainer.set_lr()
        trainer.do_step(inputs, labels)
        trainer.step_in_epoch += 1
        yield len(labels)


# -------------------------------------------------------------------- the plain recipe


class Lines(Dataset):
    """(text, class) of each row of train.csv, the text as it is in the file."""

    def __init__(self, data_dir: str) -> None:
        self.rows = text_datasets.read_csv(Path(data_dir) / "ag_news_csv" / "train.csv", 3)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[str, int]:
        label, title, description = self.rows[index]
        return f"{title} {description}", int(label) - 1


class Collate:
    """Cleans and tokenises a batch and pads it to its longest row. A class, so that workers that are not forked can have it."""

    def __init__(self, tokenizer: Tokenizer, max_len: int) -> None:
        self.tokenizer, self.max_len = tokenizer, max_len

    def __call__(self, rows: list[tuple[str, int]]) -> tuple[Tensor, Tensor]:
        ids = [
            torch.tensor(self.tokenizer.encode(text_datasets.clean_text(text)).ids[: self.max_len])
            for text, _ in rows
        ]
        return pad_sequence(ids, batch_first=True), torch.tensor([label for _, label in rows])


def image_loader(data_dir: str, metadata: dict[str, Any], batch_size: int) -> DataLoader:
    """CIFAR-10 the usual way."""
    augment = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    scale = transforms.Normalize(metadata["mean"], metadata["std"])
    data = datasets.CIFAR10(
        data_dir, train=True, transform=transforms.Compose([*augment, transforms.ToTensor(), scale])
    )
    return loader(data, batch_size)


def text_loader(data_dir: str, metadata: dict[str, Any], batch_size: int) -> DataLoader:
    """AG News the usual way, with the tokenizer that ours learnt."""
    collate = Collate(Tokenizer.from_str(metadata["tokenizer"]), metadata["max_len"])
    return loader(Lines(data_dir), batch_size, collate)


def loader(data: Dataset, batch_size: int, collate: Collate | None = None) -> DataLoader:
    """Workers outlive the epoch, so that starting them is not held against the plain side."""
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
    """Epoch after epoch."""
    batches = (text_loader if recipe.texts else image_loader)(data_dir, recipe.metadata, batch_size)
    while True:
        yield from batches


def plain_training(recipe: Recipe, data_dir: str, batch_size: int) -> Iterator[int]:
    """The training loop of every tutorial."""
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
    """Batches alone."""
    return (len(labels) for _, labels in plain_batches(recipe, data_dir, batch_size))


# -------------------------------------------------------------------- the pairs


def pair(name: str, quick: bool, ours: Iterator[int], plain: bench.Remote) -> bench.Row:
    return bench.interleave(name, ours, plain, *SIZES[name][0 if quick else 1])


def both_pairs(
    name: str, opened: Opened, data_dir: str, quick: bool, batch: int
) -> list[bench.Row]:
    """Training, and the input pipeline alone. The plain side is a process of its own, with the allocator as it comes."""
    plain = bench.Remote(plain_training, opened.recipe, data_dir, batch)
    training = pair(f"{name} training", quick, our_steps(opened.trainer), plain)
    ours = (len(labels) for _, labels in our_batches(opened.trainer, INPUT_BATCH))
    plain = bench.Remote(plain_input, opened.recipe, data_dir, INPUT_BATCH)
    return [
        training,
        pair(f"{'text' if opened.recipe.texts else 'image'} input pipeline", quick, ours, plain),
    ]


def measure(
    data_dir: str, quick: bool, folder: str, world: World
) -> tuple[list[bench.Row], dict[str, Any]]:
    """The four pairs, and what else was seen."""
    batch = 64 if quick else 128
    words = ["--data_dir", data_dir, "--out"]
    image = open_script(resnet50_test, [*words, f"{folder}/image", "--bs", str(batch)], world)
    rows = both_pairs("resnet50", image, data_dir, quick, batch)
    text = open_script(transformer_test, [*words, f"{folder}/text", "--bs", str(TEXT_BATCH)], world)
    rows += both_pairs("transformer", text, data_dir, quick, TEXT_BATCH)
    facts = {
        "precision": image.precision,
        "prepare_seconds": {"images": image.seconds, "texts": text.seconds},
    }
    return rows, {
        **facts,
        "resnet50_batch": batch,
        "input_batch": INPUT_BATCH,
        "transformer_batch": TEXT_BATCH,
    }


# -------------------------------------------------------------------- accuracy


def accuracies(log: Path, data_dir: str) -> dict[str, Any]:
    """Test accuracy in percent of TF-IDF and logistic regression, and of the logged run where there is one.

    The rows are those the run trained on: its --subset, --val_fraction and --seed are taken from its config.json.
    """
    flags = run_log.read_config(log).get("flags", {})
    words = [
        word
        for name in ("subset", "val_fraction", "seed")
        if name in flags
        for word in (f"--{name}", str(flags[name]))
    ]
    args, _ = options.parse(
        transformer_test.parser(), transformer_test.SCRIPT, ["--data_dir", data_dir, *words]
    )
    splits, _ = text_datasets.read_text_splits("agnews", data_dir)
    train = splits["train"].take(
        factory.split_rows(torch.tensor(splits["train"].labels), args)["train"].tolist()
    )
    vectors = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), min_df=2)
    regression = LogisticRegression(C=4, max_iter=300).fit(
        vectors.fit_transform(train.texts), train.labels
    )
    tfidf = 100 * regression.score(vectors.transform(splits["test"].texts), splits["test"].labels)
    found = {"train_rows": len(train), "test_rows": len(splits["test"]), "tfidf": tfidf}
    if not (log / "metrics.jsonl").exists():
        return found
    epochs = [
        100 * json.loads(line)["test_accuracy"]
        for line in (log / "metrics.jsonl").read_text().splitlines()
    ]
    return {**found, "transformer": max(epochs), "last_epoch": epochs[-1]} if epochs else found


def accuracy_line(found: dict[str, Any], log: Path) -> str:
    rows = f"AG News, {found['train_rows']} training rows, {found['test_rows']} test rows"
    line = f"{rows}: TF-IDF + logistic regression {found['tfidf']:.2f} %"
    if "transformer" not in found:
        return f"{line}; no run in {log}, so the bar of the Transformer's accuracy is left out"
    return f"{line}, Transformer {found['transformer']:.2f} % in its best epoch, {found['last_epoch']:.2f} % in its last ({log})"


def main() -> None:
    started = time.perf_counter()
    parser = bench.parser(__doc__)
    root, data_dir = Path(__file__).resolve().parents[1], os.environ.get("DATA_DIR", "./data")
    add = parser.add_argument
    add(
        "--data_dir", default=data_dir, help="folder of the data sets (default $DATA_DIR or ./data)"
    )
    log = root / "figures/logs/agnews12k/prior-seed0"
    add(
        "--agnews_log",
        type=Path,
        default=log,
        help="run folder (default figures/logs/agnews12k/prior-seed0)",
    )
    args = parser.parse_args()
    os.environ.setdefault(
        "TOKENIZERS_PARALLELISM", "true"
    )  # else tokenizers warns in every worker that is forked
    with tempfile.TemporaryDirectory() as folder, init_world() as world:
        machine = bench.machine(world.device, PACKAGES)
        rows, facts = measure(args.data_dir, args.quick, folder, world)
    found = accuracies(args.agnews_log, args.data_dir)
    bars = [
        bench.Bar(row.name, row.ratio, SPEED_UPS[row.name]) for row in rows if row.name in SPEED_UPS
    ]
    if "transformer" in found:
        bars.append(bench.Bar("transformer accuracy", found["transformer"], ACCURACY))
    seconds = time.perf_counter() - started
    print(bench.table(rows, "plain"))
    print(f"{machine}; ours in {facts['precision']}, plain in fp32; {seconds:.0f} s")
    print(
        "once before the first epoch ours takes "
        + ", ".join(f"{v:.1f} s ({k})" for k, v in facts["prepare_seconds"].items())
    )
    print(accuracy_line(found, args.agnews_log))
    bench.write_json(
        args.json,
        rows,
        bars,
        machine=machine,
        seconds=seconds,
        quick=args.quick,
        accuracy=found,
        **facts,
    )
    sys.exit(bench.verdict(bars))


if __name__ == "__main__":
    sys.exit(errors.exit_code(main))
