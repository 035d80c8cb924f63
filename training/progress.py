"""Where a run is: what a checkpoint needs to go on from the next step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Progress:
    """Where a run is.

    Attributes:
        epoch, step, step_in_epoch, samples: what is done.
        rollbacks, lr_factor: returns to a checkpoint after divergence, and what they did to the
            learning rate.
        seconds, train_seconds: time since the run, and since the epoch, began, without saving.
        compile_seconds, eval_seconds: what of `seconds` was compiling, and evaluating.
        best: the best epoch so far: its accuracy, its number, its test accuracy, and the name of
            the evaluation set that chose it.
        rows: the epochs' rows in metrics.jsonl.
    """

    epoch: int = 0
    step: int = 0
    step_in_epoch: int = 0
    samples: int = 0
    rollbacks: int = 0
    lr_factor: float = 1.0
    seconds: float = 0.0
    train_seconds: float = 0.0
    compile_seconds: float = 0.0
    eval_seconds: float = 0.0
    best: dict[str, Any] = field(default_factory=lambda: {"accuracy": -1.0, "epoch": 0})
    rows: list[dict[str, Any]] = field(default_factory=list)

    def rescale_epoch(self, old_batch_size: int, new_batch_size: int) -> None:
        """Count the steps of this epoch in batches of another size."""
        self.step_in_epoch = self.step_in_epoch * old_batch_size // new_batch_size

    def state_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for name, value in state.items():
            setattr(self, name, value)
