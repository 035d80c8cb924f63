"""The settings of one sweep, checked and complete: what `sweep.main` makes of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuning.objective import Objective
from tuning.target_script import TargetScript

Space = dict[str, dict[str, Any]]
"""Of each searched flag, the arguments of Optuna's suggest method and the method's `type`."""


@dataclass(frozen=True)
class SweepConfig:
    """What a sweep searches, how, and where its results go.

    Attributes:
        script: the entry script that is tuned, with the arguments that all trials share.
        space: what is searched.
        objective: what is optimised.
        val_fraction: fraction of the training rows that is held out to measure the objective.
        trials: number of trials in all, earlier starts of this sweep included.
        jobs: trials that run at the same time.
        nproc: processes of each trial.
        sampler: tpe, random or grid.
        sampler_seed: seed of the sampler.
        pruner: median, hyperband or none.
        pruner_epochs: epochs of a trial before the median pruner judges it.
        pruner_trials: complete trials before the median pruner judges any.
        storage: URL of Optuna's storage.
        out: folder of the sweep.
        recipe_out: file of the best trial's recipe.
    """

    script: TargetScript
    space: Space
    objective: Objective
    val_fraction: float
    trials: int
    jobs: int
    nproc: int
    sampler: str
    sampler_seed: int
    pruner: str
    pruner_epochs: int
    pruner_trials: int
    storage: str
    out: Path
    recipe_out: Path
