"""The results of a sweep: ranked table, trials.csv, pictures, recipe, and a command to train by it.

write_results(study, trials, config)
"""

from __future__ import annotations

import csv
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import yaml
from optuna.trial import FrozenTrial, TrialState

from cli.options import is_own_data
from errors import InputError, first_line
from input_pipeline import csv_tables, own_data
from tuning.config import SweepConfig
from tuning.objective import NOT_REACHED
from tuning.trials import ROOT

NEVER_REACHED = "never reached"
LINEAR_SCALING = ("sgd", "kaldi_ngd", "lars", "apex_sgd", "apex_larc")
"""Optimizers whose learning rate scales with the batch size; that of others with its root."""


def format_params(params: Mapping[str, Any]) -> str:
    """Write flags and values on one line, in few digits."""
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in params.items()
    )


def format_result(trial: FrozenTrial) -> str:
    """Return the value of a complete trial, else its state."""
    if trial.state is not TrialState.COMPLETE or trial.value is None:
        return trial.state.name.lower()
    return f"{trial.value:.4f}" if trial.value < NOT_REACHED else NEVER_REACHED


def rank_trials(study: optuna.Study, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Sort trials: complete ones by value, then pruned ones by epochs, then failed ones."""
    sign = -1 if study.direction.name == "MAXIMIZE" else 1

    def key(trial: FrozenTrial) -> tuple[int, float]:
        if trial.state is TrialState.COMPLETE:
            return 0, sign * (trial.value or 0.0)
        if trial.state is TrialState.PRUNED:
            return 1, -len(trial.intermediate_values)
        return 2, trial.number

    return sorted(trials, key=key)


def write_results(study: optuna.Study, trials: Sequence[FrozenTrial], config: SweepConfig) -> None:
    """Print the ranking and the command; write trials.csv, the pictures and the recipe.

    Raises:
        InputError: no trial is complete, or none reached the target of the objective.
    """
    ranking = rank_trials(study, trials)
    write_csv(config.out / "trials.csv", ranking)
    print_ranking(ranking, config)
    if not ranking or ranking[0].state is not TrialState.COMPLETE:
        errors = [trial.user_attrs["error"] for trial in ranking if "error" in trial.user_attrs]
        raise InputError(f"no trial is complete, so there is no recipe. {(errors or [''])[0]}")
    if format_result(ranking[0]) == NEVER_REACHED:
        raise InputError(
            f"--objective {config.objective.name}: no trial reached it, so there is no recipe; "
            f"give more --epoch or a lower target"
        )
    draw_pictures(study, ranking, config)
    write_recipe(config, ranking[0], num_trials=len(trials))
    print(f"recipe: {config.recipe_out}, with which this command trains:")
    print(training_command(config), flush=True)


def print_ranking(ranking: Sequence[FrozenTrial], config: SweepConfig) -> None:
    """Print a line for each trial, the best first, and the number of trials by state."""
    print(f"\n{'rank':>4} {'trial':>5} {config.objective.name:>14}  values")
    for rank, trial in enumerate(ranking, 1):
        result, params = format_result(trial), format_params(trial.params)
        print(f"{rank:>4} {trial.number:>5} {result:>14}  {params}")
    states = Counter(trial.state for trial in ranking)
    print(
        f"{len(ranking)} trials: {states[TrialState.COMPLETE]} complete, "
        f"{states[TrialState.PRUNED]} pruned, {states[TrialState.FAIL]} failed; "
        f"{config.out / 'trials.csv'}"
    )


def write_csv(path: Path, ranking: Sequence[FrozenTrial]) -> None:
    """Write a row for each trial, the best first."""
    names = sorted({name for trial in ranking for name in trial.params})
    columns = ["rank", "trial", "state", "value", "epochs", "seconds", *names, "folder", "error"]
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for rank, trial in enumerate(ranking, 1):
            is_complete = trial.state is TrialState.COMPLETE
            writer.writerow(
                {
                    "rank": rank,
                    "trial": trial.number,
                    "state": trial.state.name,
                    "value": trial.value if is_complete else "",
                    "epochs": len(trial.intermediate_values),
                    "seconds": trial.duration.total_seconds() if trial.duration else "",
                    **trial.params,
                    "folder": Path(trial.user_attrs.get("folder", "")).name,  # below trials/
                    "error": trial.user_attrs.get("error", ""),
                }
            )


def draw_pictures(study: optuna.Study, trials: Sequence[FrozenTrial], config: SweepConfig) -> None:
    """Draw Optuna's pictures of the trials, without those that never reached the target.

    A picture that cannot be drawn from so few trials is left out with a message.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from optuna.visualization import matplotlib as visualization

    reached = [trial for trial in trials if format_result(trial) != NEVER_REACHED]
    if len(reached) < len(trials):
        study = optuna.create_study(direction=study.direction)
        study.add_trials(reached)
    value = {"target_name": f"{config.objective.name} on held-out rows"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, plot in {
            "history": partial(visualization.plot_optimization_history, **value),
            "curves": visualization.plot_intermediate_values,
            "flags": partial(visualization.plot_slice, **value),
            "importance": visualization.plot_param_importances,
        }.items():
            try:
                axes = np.ravel(np.asarray(plot(study)))
            except (RuntimeError, ValueError, ZeroDivisionError) as error:
                print(f"no picture of {name}: {first_line(error)}")
                continue
            axes[0].figure.savefig(config.out / f"{name}.png", dpi=150, bbox_inches="tight")
            plt.close("all")
            print(f"picture: {config.out / name}.png")


def write_recipe(config: SweepConfig, best: FrozenTrial, *, num_trials: int) -> None:
    """Write the best trial's flags as YAML for --recipe.

    A searched learning rate is written with its batch size and scaling rule, so that the recipe
    holds for other batch sizes and numbers of processes.
    """
    script = config.script
    values, flags = script.recipe(best.params), script.flags(best.params)
    comment = (
        f"# The best of {num_trials} trials of {script.file} by {config.objective.name}: "
        f"{best.value:.4f} on held-out training rows.\n"
        f"# Each trial: {flags['epochs']} epochs of {flags['subset']:.0%} of the training set, "
        f"{config.nproc} process(es).\n"
    )
    if "lr" in best.params:
        rule, base_bs = flags["lr_scaling"], flags["base_bs"]
        if rule == "none":  # else the rate already is the one for base_bs
            rule = "linear" if flags["optimizer"] in LINEAR_SCALING else "sqrt"
            base_bs = flags["batch_size"] * flags["accumulate"] * config.nproc
        values |= {"lr_scaling": rule, "base_bs": base_bs}
    config.recipe_out.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(values, sort_keys=False)
    config.recipe_out.write_text(comment + text, encoding="utf-8")


def training_command(config: SweepConfig) -> str:
    """Return the command line that trains in full with the recipe, from any folder, quoted.

    It names the folder of the data, which the recipe leaves out, and rows to hold out where own
    data is nothing but a training set.
    """
    words = [sys.executable, str(ROOT / config.script.file)]
    words += ["--recipe", str(config.recipe_out.resolve())]
    flags = config.script.flags({})
    dataset, data_dir = flags["dataset"], Path(flags["data_dir"])
    if data_dir.is_dir():
        words += ["--data_dir", str(data_dir.resolve())]
    if is_own_data(dataset):
        suffixes = csv_tables.SUFFIXES if dataset == "csv" else ("",)
        if len(own_data.find_splits(data_dir, suffixes)) < 2:
            words += ["--val_fraction", str(config.val_fraction)]
    return shlex.join(words)
