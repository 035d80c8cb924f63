"""Where a run is: what a checkpoint needs to go on from the next step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Progress:
    """Where a run is."""

    epoch: int = 0  # of each of the first four: how many are done
    step: int = 0
    step_in_epoch: int = 0
    samples: int = 0
    rollbacks: int = 0  # returns to a checkpoint after divergence
    lr_factor: float = 1.0  # what they did to the learning rate
    seconds: float = 0.0  # since the run began, without saving
    train_seconds: float = 0.0  # of this epoch's steps
    compile_seconds: float = 0.0  # of `seconds`, what was compiling
    eval_seconds: float = 0.0  # of `seconds`, what was evaluating
    # The best epoch so far: its accuracy, its number, its test accuracy, and the name of the
    # evaluation set that chose it.
    best: dict[str, Any] = field(default_factory=lambda: {"accuracy": -1.0, "epoch": 0})
    rows: list[dict[str, Any]] = field(default_factory=list)  # the epochs' rows in metrics.jsonl

    @property
    def epoch_samples(self) -> int:
        """Samples of this epoch that are done."""
        return self.samples - (self.rows[-1]["samples"] if self.rows else 0)

    def count_step(self, samples: int) -> None:
        """Count a step of so many samples of all ranks."""
        self.step += 1
        self.step_in_epoch += 1
        self.samples += samples

    def rescale_epoch(self, old_batch_size: int, new_batch_size: int) -> None:
        """Count the steps of this epoch in batches of another size."""
        self.step_in_epoch = self.step_in_epoch * old_batch_size // new_batch_size

    def end_epoch(self, row: dict[str, Any], chosen_on: str) -> dict[str, Any] | None:
        """Count an epoch as done; returns the best epoch before, or None if this is not the best.

        Args:
            chosen_on: name of the evaluation set that chooses the best epoch. A resumed run with
                other evaluation sets cannot compare its epochs with those before.
        """
        self.rows.append(row)
        self.epoch, self.step_in_epoch, self.train_seconds = self.epoch + 1, 0, 0.0
        accuracy, best = row[f"{chosen_on}_accuracy"], self.best  # None without an evaluation
        if best.get("chosen_on", chosen_on) != chosen_on:
            best = Progress().best
        if accuracy is None or accuracy <= best["accuracy"]:
            return None
        self.best = {
            "chosen_on": chosen_on,
            "accuracy": accuracy,
            "epoch": row["epoch"],
            "test_accuracy": row.get("test_accuracy"),
        }
        return best

    def state_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
