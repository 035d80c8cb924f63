"""How fast the two scripts train, beside the plain recipe one would write instead, on the same model and batch.

python benchmarks/throughput.py --quick                 # five minutes on two cores
python benchmarks/throughput.py --json throughput.json  # longer blocks, larger batch

Ours is what the scripts run with their default flags: built by their own functions, one step as engine.py does it. Plain
is torchvision transforms on PIL images or a tokenizing collate function, DataLoader workers, fp32, eager, NCHW, and
torch's optimizers as they come. Both start from the same weights and take turns in one process. Last comes what the
Transformer has learnt: the accuracy of a committed run beside TF-IDF and logistic regression on the same rows.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the scripts and modules measured here

import bench
import build
import distributed
import errors
import options
import resnet50_test
import runlog
import texts
import transformer_test
from engine import Trainer

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
class Opened:
    """What a script has built just before its first step, and the seconds it took to read (and tokenise) the data."""

    trainer: Trainer
    header: dict[str, Any]
    lr: float
    momentum: float
    weight_decay: float
    precision: str
    seconds: float


def open_script(script: ModuleType, words: list[str], world: distributed.World) -> Opened:
    """What `script` builds from these command-line words, by its own functions."""
    args, _ = options.parse(script.parser(), script.SCRIPT, words)
    run = build.open_run(args, script.SCRIPT, world)
    clock = time.perf_counter()
    sets, header = script.build_sets(args, run, None)
    seconds = time.perf_counter() - clock
    trainer = build.trainer(args, run, script.build_model(args, header, run), sets.pop("train"), sets, header)
    trainer.do_step.wrap()
    trainer.model.train()
    return Opened(trainer, header, args.lr, args.momentum, args.weight_decay, run.precision.name, seconds)


def our_batches(trainer: Trainer, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of epoch after epoch, as `Trainer.train_epoch` asks for them; it keeps its place in the schedule."""
    for epoch in itertools.count():
        trainer.epoch, trainer.step_in_epoch = epoch, 0
        yield from trainer.train_set.batches(list(trainer.sampler.epoch(epoch, batch_size)), epoch)


def our_steps(trainer: Trainer) -> Iterator[int]:
    """Training steps as in `Trainer.train_epoch`."""
    for inputs, labels in our_batches(trainer, trainer.batch_size):
        trainer.set_lr()
        trainer.do_step(inputs, labels)
        trainer.step_in_epoch += 1
        yield len(labels)


# -------------------------------------------------------------------- the plain recipe


class Lines(Dataset):
    """(text, class) of each row of train.csv, the text as it is in the file."""

    def __init__(self, data_dir: str) -> None:
        self.rows = texts.read_csv(Path(data_dir) / "ag_news_csv" / "train.csv", 3)

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
        ids = [torch.tensor(self.tokenizer.encode(texts.clean(text)).ids[: self.max_len]) for text, _ in rows]
        return pad_sequence(ids, batch_first=True), torch.tensor([label for _, label in rows])


def image_loader(data_dir: str, opened: Opened, batch_size: int) -> DataLoader:
    """CIFAR-10 the usual way."""
    augment = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    scale = transforms.Normalize(opened.header["mean"], opened.header["std"])
    data = datasets.CIFAR10(data_dir, train=True, transform=transforms.Compose([*augment, transforms.ToTensor(), scale]))
    return loader(data, batch_size)


def text_loader(data_dir: str, opened: Opened) -> DataLoader:
    """AG News the usual way, with the tokenizer that ours learnt."""
    collate = Collate(Tokenizer.from_str(opened.header["tokenizer"]), opened.header["max_len"])
    return loader(Lines(data_dir), TEXT_BATCH, collate)


def loader(data: Dataset, batch_size: int, collate: Collate | None = None) -> DataLoader:
    """Workers outlive the epoch, so that starting them is not held against the plain side."""
    return DataLoader(
        data, batch_size, shuffle=True, num_workers=WORKERS, collate_fn=collate, drop_last=True, persistent_workers=True
    )


def plain_batches(batches: DataLoader) -> Iterator[tuple[Tensor, Tensor]]:
    """Epoch after epoch."""
    while True:
        yield from batches


def plain_steps(model: nn.Module, batches: DataLoader, optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[int]:
    """The training loop of every tutorial."""
    for inputs, labels in plain_batches(batches):
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        yield len(labels)


# -------------------------------------------------------------------- the pairs


def pair(name: str, quick: bool, ours: Iterator[int], plain: Iterator[int]) -> bench.Row:
    return bench.interleave(name, ours, plain, *SIZES[name][0 if quick else 1])


def input_pair(name: str, quick: bool, opened: Opened, plain: DataLoader) -> bench.Row:
    return pair(name, quick, lengths(our_batches(opened.trainer, INPUT_BATCH)), lengths(plain_batches(plain)))


def lengths(batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[int]:
    return (len(labels) for _, labels in batches)


def plain_copy(opened: Opened) -> nn.Module:
    """The model with the same weights, in the memory format that torch gives it (NCHW)."""
    return copy.deepcopy(opened.trainer.model).to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


def measure(data_dir: str, quick: bool, folder: str, world: distributed.World) -> tuple[list[bench.Row], dict[str, Any]]:
    """The four pairs, and what else was seen. The plain side, too, has `backends.keep_freed_memory`: one process, one malloc."""
    batch = 64 if quick else 128
    words = ["--data_dir", data_dir, "--out"]
    image = open_script(resnet50_test, [*words, f"{folder}/image", "--bs", str(batch)], world)
    rows = [input_pair("image input pipeline", quick, image, image_loader(data_dir, image, INPUT_BATCH))]
    model = plain_copy(image)
    sgd = torch.optim.SGD(model.parameters(), image.lr, image.momentum, weight_decay=image.weight_decay)
    plain = plain_steps(model, image_loader(data_dir, image, batch), sgd, world.device)
    rows.insert(0, pair("resnet50 training", quick, our_steps(image.trainer), plain))

    text = open_script(transformer_test, [*words, f"{folder}/text", "--bs", str(TEXT_BATCH)], world)
    model = plain_copy(text)
    adamw = torch.optim.AdamW(model.parameters(), text.lr, weight_decay=text.weight_decay)
    plain = plain_steps(model, text_loader(data_dir, text), adamw, world.device)
    rows.insert(1, pair("transformer training", quick, our_steps(text.trainer), plain))
    rows.append(input_pair("text input pipeline", quick, text, text_loader(data_dir, text)))
    facts = {"precision": image.precision, "prepare_seconds": {"images": image.seconds, "texts": text.seconds}}
    return rows, {**facts, "resnet50_batch": batch, "input_batch": INPUT_BATCH, "transformer_batch": TEXT_BATCH}


# -------------------------------------------------------------------- accuracy


def accuracies(log: Path, data_dir: str) -> dict[str, Any]:
    """Test accuracy in percent of TF-IDF and logistic regression, and of the logged run where there is one.

    The rows are those the run trained on: its --subset, --val_fraction and --seed are taken from its config.json.
    """
    flags = runlog.read_config(log).get("flags", {})
    words = [word for name in ("subset", "val_fraction", "seed") if name in flags for word in (f"--{name}", str(flags[name]))]
    args, _ = options.parse(transformer_test.parser(), transformer_test.SCRIPT, ["--data_dir", data_dir, *words])
    splits, _ = texts.read_splits("agnews", data_dir)
    train = splits["train"].take(build.split_rows(torch.tensor(splits["train"].labels), args)["train"].tolist())
    vectors = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), min_df=2)
    regression = LogisticRegression(C=4, max_iter=300).fit(vectors.fit_transform(train.texts), train.labels)
    tfidf = 100 * regression.score(vectors.transform(splits["test"].texts), splits["test"].labels)
    found = {"train_rows": len(train), "test_rows": len(splits["test"]), "tfidf": tfidf}
    if not (log / "metrics.jsonl").exists():
        return found
    epochs = [100 * json.loads(line)["test_accuracy"] for line in (log / "metrics.jsonl").read_text().splitlines()]
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
    add("--data_dir", default=data_dir, help="folder of the data sets (default $DATA_DIR or ./data)")
    log = root / "figures/logs/agnews12k/prior-seed0"
    add("--agnews_log", type=Path, default=log, help="run folder (default figures/logs/agnews12k/prior-seed0)")
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # else tokenizers warns in every worker that is forked
    with tempfile.TemporaryDirectory() as folder, distributed.world() as world:
        machine = bench.machine(world.device, PACKAGES)
        rows, facts = measure(args.data_dir, args.quick, folder, world)
    found = accuracies(args.agnews_log, args.data_dir)
    bars = [bench.Bar(row.name, row.ratio, SPEED_UPS[row.name]) for row in rows if row.name in SPEED_UPS]
    if "transformer" in found:
        bars.append(bench.Bar("transformer accuracy", found["transformer"], ACCURACY))
    seconds = time.perf_counter() - started
    print(bench.table(rows, "plain"))
    print(f"{machine}; ours in {facts['precision']}, plain in fp32; {seconds:.0f} s")
    print("once before the first epoch ours takes " + ", ".join(f"{v:.1f} s ({k})" for k, v in facts["prepare_seconds"].items()))
    print(accuracy_line(found, args.agnews_log))
    bench.write_json(args.json, rows, bars, machine=machine, seconds=seconds, quick=args.quick, accuracy=found, **facts)
    sys.exit(bench.verdict(bars))


if __name__ == "__main__":
    sys.exit(errors.exit_code(main))
