"""Fine-tuning beside Hugging Face's Trainer (texts) and timm's training loop (images).

python -m benchmarks.pretrained_models data          # weights and rows, once
python -m benchmarks.fine_tune --json FILE           # a quarter of an hour of two cores
python -m benchmarks.fine_tune --quick               # fewer rows and epochs, no bars of time

Both sides have the same weights, training rows, test rows, epochs and batches, in bf16 where the
device has it. They take turns: each run is a process of its own, to the last epoch. Ours are the
commands of docs/own_data.md. The peers:

- Trainer with the defaults of its TrainingArguments: AdamW, 5e-5 with a linear fall, batch 8, three
  epochs. (The README of run_glue.py has 2e-5 and batch 32: a quarter of the steps.)
- timm's train.py with smoothing and cosine, --amp, --channels-last, --opt adamw --weight-decay .05
  --scale .6 1 --color-jitter 0, without warm-up, at the best rate on 1,000 held-out rows: 3e-4,
  1e-3 and 3e-3 have 54.8, 63.5 and 59.4 %. (Its author's recipe of EfficientNets, RMSprop with
  strong crops at the rate of his issue 25, has 50.9.)

Rates are those of each epoch. A time to an accuracy begins before data and weights are read, ours
before the interpreter starts. Evaluations are left out of both, and the accuracy is taken to grow
evenly within an epoch. Memory is the peak of the process, without a DataLoader's workers.
"""

import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from backends.device import has_bf16, peak_memory
from benchmarks import bench
from benchmarks.pretrained_models import LITE0
from cli.flag_parser import path_text
from errors import InputError, exit_code, needing
from figures.run_logs import ROOT, Row, accuracy, epochs_to, read_rows
from input_pipeline.text_datasets import read_text_splits

TEST_ROWS, PIXELS = 1000, 128
TEXT_BATCH, IMAGE_BATCH = 8, 16  # defaults of ours and, of texts, of the peer
WORKERS = 2  # of timm's loader: one per core
TIMM = {"opt": "adamw", "lr": 1e-3, "weight_decay": 0.05}
PEERS = {"texts": "transformers", "images": "timm"}
WEIGHTS = {"texts": "minilm", "images": "lite0.safetensors"}
COMMANDS = {  # of ours, before the weights
    "texts": "transformer_test.py --dataset csv --arch hf:",
    "images": f"resnet50_test.py --dataset folder --image_size {PIXELS} --arch timm:{LITE0} "
    "--weights ",
}
RATE_BARS = {"texts": 1.8, "images": 1.0}  # ours over the peer's
TIME_BAR = 0.6  # ours over the peer's, to the accuracy that the peer ends with
# Data, epochs and rounds, with --quick and without.
SIZES = {
    True: ({"texts": "news200", "images": "cifar500"}, {"texts": 3, "images": 3}, 1),
    False: ({"texts": "news1000", "images": "cifar500"}, {"texts": 3, "images": 5}, 3),
}


@dataclass(frozen=True)
class Run:
    """The rows of a log, one an epoch, and the seconds that the run took besides."""

    rows: list[Row]
    start: float


def link_rows(source: Path, folder: Path) -> None:
    """Make a folder of links to the training rows, and to `TEST_ROWS` of the test rows."""
    if (source / "train.csv").exists():
        lines = (source / "test.csv").read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / "test.csv").write_text("".join(lines[: TEST_ROWS + 1]), encoding="utf-8")
        (folder / "train.csv").symlink_to(source / "train.csv")
        return
    (folder / "train").symlink_to(source / "train")
    classes = sorted((source / "test").iterdir())
    for each in classes:
        (folder / "test" / each.name).mkdir(parents=True)
        for path in sorted(each.iterdir())[: TEST_ROWS // len(classes)]:
            (folder / "test" / each.name / path.name).symlink_to(path)


# -------------------------------------------------------------------- sides


def train_ours(name: str, data: str, weights: str, epochs: int, every: int, seed: int) -> Run:
    """Run a command that evaluates after each `every` epochs.

    Raises:
        InputError: it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--epochs {epochs} --eval_every {every} --seed {seed} --out {folder}/run"
        words = [*f"{COMMANDS[name]}{weights}".split(" "), "--data_dir", data, *flags.split()]
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, *words], cwd=ROOT, stdout=sys.stderr, check=False)
        took = time.perf_counter() - begin
        if done.returncode:
            raise InputError(f"{words[0]} has failed; its message is above")
        rows = read_rows(Path(folder) / "run")
    return Run(rows, took - rows[-1]["seconds"])


def run_of_peer(begin: float, clocks: Sequence[float], samples: int, reached: float) -> Run:
    """Return the run of a peer.

    Args:
        begin: time at which it began.
        clocks: times of the beginning and the end of each epoch.
        samples: of an epoch.
        reached: accuracy in 0..1 after the last epoch.
    """
    taken = [end - start for start, end in zip(clocks[::2], clocks[1::2])]
    rows: list[Row] = [
        {"epoch": epoch, "train_seconds": seconds, "samples_per_second": samples / seconds}
        | {"test_accuracy": None, "peak_memory_bytes": peak_memory(bench.DEVICE)}
        for epoch, seconds in enumerate(taken, 1)
    ]
    rows[-1]["test_accuracy"] = reached
    return Run(rows, clocks[-1] - begin - sum(taken))


def train_texts(data: str, weights: str, epochs: int, seed: int) -> Run:
    """Run Hugging Face's Trainer."""
    begin, clocks = time.perf_counter(), list[float]()
    import transformers as hf

    class Clock(hf.TrainerCallback):
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            clocks.append(time.perf_counter())

        on_epoch_end = on_epoch_begin

    hf.set_seed(seed)
    hf.logging.set_verbosity_error()
    tokenizer = hf.AutoTokenizer.from_pretrained(weights)
    splits, classes = read_text_splits("csv", data)
    train, test = (
        [
            {**tokenizer(text, truncation=True, max_length=128), "label": label}
            for text, label in zip(split.texts, split.labels)
        ]
        for split in (splits["train"], splits["test"])
    )
    model = hf.AutoModelForSequenceClassification.from_pretrained(weights, num_labels=len(classes))
    with tempfile.TemporaryDirectory() as folder:
        settings = hf.TrainingArguments(
            folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=TEXT_BATCH,
            bf16=has_bf16(bench.DEVICE),
            use_cpu=bench.DEVICE.type == "cpu",
            seed=seed,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        collator = hf.DataCollatorWithPadding(tokenizer)
        trainer = hf.Trainer(model, settings, collator, train, callbacks=[Clock()])
        trainer.train()
        found: Any = trainer.predict(test)  # type: ignore[arg-type]  # any sequence
    reached = (found.predictions.argmax(1) == found.label_ids).mean().item()
    return run_of_peer(begin, clocks, len(train), reached)


def train_images(data: str, weights: str, epochs: int, seed: int) -> Run:
    """Run the loop of timm's train.py."""
    begin, clocks = time.perf_counter(), list[float]()
    import timm.data
    import timm.optim
    import timm.scheduler
    import timm.utils
    from timm.loss import LabelSmoothingCrossEntropy

    timm.utils.random_seed(seed)
    device = bench.DEVICE
    autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=has_bf16(device))
    train = timm.data.create_dataset("", data, "train", is_training=True)
    test = timm.data.create_dataset("", data, "test")
    classes, file = len(train.reader.class_to_idx), {"file": weights}
    model = timm.create_model(LITE0, True, pretrained_cfg_overlay=file, num_classes=classes)
    model.to(device).to(memory_format=torch.channels_last)
    config = timm.data.resolve_data_config({"img_size": PIXELS}, model=model)
    load = partial(
        timm.data.create_loader,
        input_size=config["input_size"],
        batch_size=IMAGE_BATCH,
        mean=config["mean"],
        std=config["std"],
        num_workers=WORKERS,
        use_prefetcher=False,
        device=device,
    )
    batches = load(
        train, is_training=True, interpolation="random", scale=(0.6, 1.0), color_jitter=0.0
    )
    evaluated = load(test, interpolation=config["interpolation"], crop_pct=1.0)  # as ours
    optimizer = timm.optim.create_optimizer_v2(model, **TIMM)  # type: ignore[arg-type]
    schedule, _ = timm.scheduler.create_scheduler_v2(optimizer, num_epochs=epochs)
    criterion = LabelSmoothingCrossEntropy(smoothing=0.1)
    for epoch in range(epochs):
        clocks.append(time.perf_counter())
        model.train()
        for inputs, labels in batches:
            inputs = inputs.to(device).contiguous(memory_format=torch.channels_last)
            with autocast():
                loss = criterion(model(inputs), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step(epoch + 1)
        bench.wait_for_device()
        clocks.append(time.perf_counter())
    model.eval()
    with torch.inference_mode(), autocast():
        found = [model(inputs.to(device)).argmax(1).cpu() == labels for inputs, labels in evaluated]
    reached = torch.cat(found).float().mean().item()
    return run_of_peer(begin, clocks, len(batches) * IMAGE_BATCH, reached)


def train_peer(name: str, data: str, weights: str, epochs: int, seed: int) -> Run:
    """Train with a peer in a process of its own."""
    train = {"texts": train_texts, "images": train_images}[name]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(train, data, weights, epochs, seed).result()


# -------------------------------------------------------------------- results


def seconds_to(target: float, runs: Sequence[Run]) -> float:
    """Return the seconds to an accuracy in percent, by the means of the runs.

    It is infinite if that is not reached.
    """
    means: list[Row] = [
        {"epoch": rows[0]["epoch"], "test_accuracy": statistics.mean(found)}
        for rows in zip(*(run.rows for run in runs))
        if None not in (found := [row["test_accuracy"] for row in rows])
    ]
    epoch = statistics.mean(row["train_seconds"] for run in runs for row in run.rows)
    return statistics.mean(run.start for run in runs) + epochs_to(target, means) * epoch


def final(runs: Sequence[Run]) -> float:
    """Return the mean accuracy in percent after the last epoch, rounded down to .01."""
    return int(100 * statistics.mean(accuracy(run.rows[-1]) for run in runs)) / 100


def main() -> int:
    parser = bench.parser(__doc__)
    parser.add_argument("--folder", type=path_text, default="data", help="of pretrained_models")
    args = parser.parse_args()
    folder = Path(args.folder).resolve()
    if not (folder / "minilm").is_dir():
        raise InputError(f"{folder}: run python -m benchmarks.pretrained_models {args.folder}")
    with needing("this benchmark", "timm transformers accelerate"):
        machine = bench.machine(bench.DEVICE, ["torch", *PEERS.values(), "accelerate"])
    print(machine, flush=True)
    sets, epochs, rounds = SIZES[args.quick]
    pairs, bars, facts = [], [], {}
    lines = [["", "accuracy", "seconds to the peer's", "before training", "peak GiB"]]
    for name, peer in PEERS.items():
        with tempfile.TemporaryDirectory() as data:
            link_rows(folder / sets[name], Path(data))
            given = (name, data, str(folder / WEIGHTS[name]), epochs[name])
            every = epochs[name] if args.quick else 1
            ours = map(partial(train_ours, *given, every), itertools.count())
            theirs = map(partial(train_peer, *given), itertools.count())  # the count is the seed
            sides = {"ours": partial(next, ours), peer: partial(next, theirs)}
            runs: dict[str, list[Run]] = bench.take_turns(sides, rounds)
        rates, seconds = {}, {}
        for side, each in runs.items():
            rows = [row for run in each for row in run.rows]
            rates[side] = [row["samples_per_second"] for row in rows]
            seconds[side] = seconds_to(final(runs[peer]), each)
            start = statistics.mean(run.start for run in each)
            memory = max(row["peak_memory_bytes"] for row in rows) / 2**30
            cells = [f"{final(each):.2f}", f"{seconds[side]:.0f}", f"{start:.0f}", f"{memory:.2f}"]
            lines.append([f"{name} {side}", *cells])
        pairs.append(bench.Row(f"{name} {peer}", rates["ours"], rates[peer]))
        bars.append(bench.Bar(f"{name} rows/s of {peer}", pairs[-1].ratio, RATE_BARS[name]))
        if not args.quick:
            ratio = seconds["ours"] / seconds[peer]
            bars.append(bench.Bar(f"{name} seconds of {peer}", ratio, TIME_BAR, at_most=True))
        facts[name] = {side: [vars(run) for run in each] for side, each in runs.items()}
    print(f"{bench.table(pairs, 'peer')}\n\n{bench.aligned(lines)}")
    return bench.finish(args, bars, rows=pairs, machine=machine, runs=facts)


if __name__ == "__main__":
    sys.exit(exit_code(main))
