"""The log of a peer that has a loop of its own: files and rows as of the entry scripts.

log = PeerLog(args, "plain PyTorch", precision="fp32", command="python -m ...")
log.train(model, batches, step, evaluate)
"""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backends.device import peak_memory
from backends.machine import describe_machine
from benchmarks.bench import add_data_dir
from cli.flag_parser import FlagParser, count, file_path, natural
from errors import InputError
from training.run_folder import lock_run_folder
from training.run_log import RunLog

CPU = torch.device("cpu")
FOLDERS = ("source", "out", "data_dir")  # of this machine, which no log names


def peer_parser(doc: str | None, *, epochs: int) -> FlagParser:
    """Return a parser of the flags that all peers have; `epochs` is the default of --epochs."""
    parser = FlagParser(doc)
    add_data_dir(parser)
    add = parser.add_argument
    add("--out", type=file_path, required=True, help="a new folder for the log")
    add("--epochs", type=count, default=epochs)
    add("--seed", type=natural, default=0)
    add("--threads", type=natural, default=0, help="0 is torch's own choice")
    return parser


class PeerLog:
    """Writes config.json, and metrics.jsonl with a row an epoch, of one process on a CPU.

    Args:
        args: the command line, with `out`, `threads` (0 is torch's own choice) and `epochs`.
        peer: what is trained, with its version.
        precision: of matrix products.
        command: what config.json names.

    Raises:
        InputError: the folder holds a log already.
    """

    def __init__(
        self, args: argparse.Namespace, peer: str, *, precision: str, command: str
    ) -> None:
        folder: Path = args.out
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = lock_run_folder(folder)
        if (folder / "metrics.jsonl").exists():
            raise InputError(f"--out {folder}: holds the log of a run; give a new folder")
        if args.threads:
            torch.set_num_threads(args.threads)
        config = {
            "flags": {name: each for name, each in vars(args).items() if name not in FOLDERS},
            "peer": peer,
            **describe_machine(CPU),
            "threads": torch.get_num_threads(),
            "precision": precision,
            "command": command,
        }
        self.epochs, self.rows = args.epochs, list[dict[str, Any]]()
        self.seconds = dict.fromkeys(("train", "compile", "eval"), 0.0)
        self.log = RunLog(folder, True, config=config)
        self.log.begin([], epochs=args.epochs)

    @contextlib.contextmanager
    def clock(self, what: str) -> Iterator[None]:
        """Add the time of a block to 'train', 'compile' or 'eval'."""
        start = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - start

    def train(
        self,
        model: nn.Module,
        batches: Iterable[tuple[Tensor, Tensor]],
        step: Callable[[Tensor, Tensor], tuple[Tensor, float, float]],
        evaluate: Callable[[], dict[str, Any]],
    ) -> None:
        """Train and evaluate for all epochs, and write a row for each.

        Args:
            batches: inputs and labels of an epoch; all batches have the same size.
            step: takes a step; returns outputs, the sum of the losses, and the learning rate.
            evaluate: returns the results, such as test_accuracy in 0..1.
        """
        for epoch in range(1, self.epochs + 1):
            model.train()
            steps, loss_sum, num_correct = 0, 0.0, 0
            with self.clock("train"):
                for inputs, labels in batches:
                    outputs, loss, lr = step(inputs, labels)
                    steps += 1
                    loss_sum += loss
                    num_correct += int((outputs.argmax(1) == labels).sum())
            with self.clock("eval"):
                results = evaluate()
            samples = steps * len(labels)
            # of the first epoch with what was done before it
            train_seconds = self.seconds["train"] - sum(row["train_seconds"] for row in self.rows)
            row = {
                "epoch": epoch,
                "step": epoch * steps,
                "samples": epoch * samples,
                "seconds": sum(self.seconds.values()),
                "train_seconds": train_seconds,
                "compile_seconds": self.seconds["compile"],
                "eval_seconds": self.seconds["eval"],
                "samples_per_second": samples / train_seconds,
                "train_loss": loss_sum / samples,
                "train_accuracy": num_correct / samples,
                **results,
                "lr": lr,
                "batch_size": len(labels),
                "devices": 1,
                "peak_memory_bytes": peak_memory(CPU),
            }
            self.rows.append(row)
            self.log.epoch(self.rows)
