"""How many epochs an optimizer needs to reach the training loss of tuned SGD.

    python -m benchmarks.convergence --logs figures/logs/ngd_convergence          # missing runs
    python -m benchmarks.convergence --logs figures/logs/ngd_convergence --report # the table only

ResNet-8 on 10,000 images of CIFAR-10, batch size 256. Every optimizer tries the same constant
learning rates with seed 0, without warm-up; the rate with the lowest training loss of the last
epoch (running mean over the augmented epoch) is repeated with seeds 1 and 2. An optimizer *passes*
SGD in the first epoch whose mean training loss over seeds is at most SGD's in its last epoch.
Seconds per epoch are those of training alone in the fastest epoch, which other load on the machine
affected least. On a processor that does not compute in bf16, as Muon does, --quick leaves Muon out,
whose steps would take most of the time. When it is killed, the same command resumes the run that it
was in.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import resnet50_test
from backends.device import has_bf16
from benchmarks import bench, peers, trainers
from distributed.world import init_world
from errors import NonFiniteLoss, exit_code

METHODS = ("sgd", "adamw", "muon", "ngd")
# Weight decay, coupled for the first two, decoupled for the others.
WEIGHT_DECAY = {"sgd": 5e-4, "ngd": 5e-4, "adamw": 0.05, "muon": 0.05}
FLAGS = "--arch resnet8 --bs 256 --lr_schedule constant --workers 0"
# SGD's epochs over those in which NGD passes it: fewer would not pay for NGD's costlier step.
SPEED_UP = 1.4


@dataclass(frozen=True)
class Size:
    """The size of the comparison; every learning rate is tried with the first seed."""

    subset: float
    epochs: int
    rates: tuple[float, ...]
    seeds: tuple[int, ...]


FULL = Size(0.2, 8, (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0), (0, 1, 2))
QUICK = Size(0.05, 4, (0.03, 0.3), (0, 1))


class Muon(torch.optim.Optimizer):
    """`peers.Muon` for the Trainer, which sets the learning rate before each step.

    Its runs cannot be resumed.
    """

    def __init__(self, model: nn.Module, lr: float, weight_decay: float) -> None:
        super().__init__(model.parameters(), {"lr": lr})
        self.both = peers.Muon(model, lr, weight_decay)

    def step(self, closure: None = None) -> None:
        """Step Muon and AdamW with the current learning rate."""
        for optimizer in (self.both.muon, self.both.adamw):
            for group in optimizer.param_groups:
                group["lr"] = self.param_groups[0]["lr"]
        self.both.step()


class Comparison:
    """The runs of the comparison, each in a folder below `logs`."""

    def __init__(self, logs: Path, size: Size) -> None:
        self.logs, self.size = logs, size

    def folder(self, method: str, lr: float, seed: int) -> Path:
        return self.logs / f"{method}-lr{lr:g}-seed{seed}"

    def rows(self, method: str, lr: float, seed: int) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl of a run, finished or not."""
        file = self.folder(method, lr, seed) / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def train(self, method: str, lr: float, seed: int, threads: int) -> None:
        """Do what is missing of a run, in the way of the entry script."""
        folder = self.folder(method, lr, seed)
        if len(self.rows(method, lr, seed)) == self.size.epochs or (folder / "diverged").exists():
            return
        optimizer = "sgd" if method == "muon" else method
        arguments = f"{FLAGS} --subset {self.size.subset} --epochs {self.size.epochs} --lr {lr}"
        arguments += f" --seed {seed} --threads {threads} --optimizer {optimizer}"
        arguments += f" --weight_decay {WEIGHT_DECAY[method]} --out {folder}"
        if method == "muon":
            shutil.rmtree(folder, ignore_errors=True)
        resume = ["--resume"] if (folder / "last.pt").exists() else []
        muon = partial(Muon, lr=lr, weight_decay=WEIGHT_DECAY[method]) if method == "muon" else None
        try:
            with init_world("cpu") as world:
                opened = trainers.open_script(
                    resnet50_test, arguments.split() + resume, world, create_optimizer=muon
                )
                opened.trainer.fit(opened.checkpoint)
        except NonFiniteLoss as error:
            (folder / "diverged").write_text(f"{error}\n")
        for weights in folder.glob("*.pt"):
            weights.unlink()

    def last_loss(self, method: str, lr: float, seed: int) -> float:
        """Return the training loss of the last epoch; infinity for a run that diverged."""
        rows = self.rows(method, lr, seed)
        return rows[-1]["train_loss"] if len(rows) == self.size.epochs else float("inf")

    def best_rate(self, method: str) -> float:
        """Return the learning rate with the lowest final training loss of the first seed."""
        return min(self.size.rates, key=lambda lr: self.last_loss(method, lr, self.size.seeds[0]))

    def curve(self, method: str, field: str) -> list[list[float]]:
        """Return a field of shape (epochs, seeds) at the best learning rate."""
        runs = [self.rows(method, self.best_rate(method), seed) for seed in self.size.seeds]
        return [[row[field] for row in epoch] for epoch in zip(*runs)]

    def report(self) -> list[bench.Bar]:
        """Print the table and return the bar of NGD."""
        goal = statistics.mean(self.curve("sgd", "train_loss")[-1])
        columns = f"{'train loss':>16} {'test accuracy':>16} {'passes SGD':>11} {'s/epoch':>8}"
        print(f"{'':8} {'lr':>6} {columns} {'s to pass':>10}")
        bars = []
        for method in METHODS:
            losses = self.curve(method, "train_loss")
            accuracies = self.curve(method, "test_accuracy")
            if not losses:
                print(f"{method:8} not run")
                continue
            seconds = min(
                second for epoch in self.curve(method, "train_seconds") for second in epoch
            )
            passed = next(
                (epoch for epoch, loss in enumerate(losses, 1) if statistics.mean(loss) <= goal),
                None,
            )
            loss, accuracy = (
                f"{statistics.mean(last):.3f} +- {statistics.stdev(last):.3f}"
                for last in (losses[-1], accuracies[-1])
            )
            time = f"{passed * seconds:.0f}" if passed else "-"
            values = f"{loss:>16} {accuracy:>16} {passed or '-':>11} {seconds:>8.1f} {time:>10}"
            print(f"{method:8} {self.best_rate(method):>6g} {values}")
            if method == "ngd":
                bars.append(
                    bench.Bar(
                        "ngd epochs fewer than sgd",
                        self.size.epochs / passed if passed else 0.0,
                        SPEED_UP,
                    )
                )
        return bars


def main() -> int:
    parser = bench.parser(__doc__)
    parser.add_argument(
        "--logs", type=Path, required=True, metavar="DIR", help="folder of the runs' folders"
    )
    parser.add_argument("--report", action="store_true", help="print the table without running")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default 0: all)")
    args = parser.parse_args()
    runs = Comparison(args.logs, QUICK if args.quick else FULL)
    rate_seed, *other_seeds = runs.size.seeds
    chosen = args.methods
    if args.quick and not has_bf16(torch.device("cpu")):
        print("muon left out: it computes in bf16, and this processor does not")
        chosen = [method for method in chosen if method != "muon"]
    if not args.report:
        for method in chosen:
            for lr in runs.size.rates:
                runs.train(method, lr, rate_seed, args.threads)
            for seed in other_seeds:
                runs.train(method, runs.best_rate(method), seed, args.threads)
    bars = runs.report()
    bench.write_json(args.json, [], bars, logs=str(args.logs))
    return bench.verdict(bars)


if __name__ == "__main__":
    sys.exit(exit_code(main))
