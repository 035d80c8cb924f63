"""The settings of a sweep or of a race, and what they maximise."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuning.target_script import TargetScript

Space = dict[str, dict[str, Any]]
"""Of each searched flag, the arguments of Optuna's suggest method and the method's `type`."""


@dataclass(frozen=True)
class Arm:
    """One side of a race: its name, the script with its flags, and its own learning rate."""

    name: str
    script: TargetScript
    rate: float


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """What a sweep searches, how, and where its results go: the flags of `sweep_parser`."""

    script: TargetScript
    space: Space = field(default_factory=dict)
    val_fraction: float
    trials: int = 0
    sampler: str = "random"
    sweep_seed: int = 0
    pruner: str = "none"
    jobs: int
    nproc: int
    out: Path
    seeds: int = 0  # of the runs in full of a race, or of the best trials of a sweep
    is_strict: bool = False  # a trial that fails, but for divergence, ends all
    keeps_weights: bool = False  # of trials that have ended
    ends_after_one: bool = False  # a trial is over after its first epoch, to time it
