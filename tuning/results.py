"""The results of a sweep: trials.csv, pictures, a recipe, and the command to train with it.

write_trials(study, ranking, config)
write_winner(ranking, arms, config)
"""

import csv
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import yaml
from optuna.trial import FrozenTrial, TrialState

from errors import InputError, first_line
from figures import verdict
from figures.run_logs import ROOT
from figures.verdict import Contender
from training.atomic_file import atomic_write, atomic_write_text
from tuning.config import SweepConfig
from tuning.trials import complete_rows, trial_folder

RECIPE = "recipe.yaml"  # in --out
LINEAR_SCALING = ("sgd", "kaldi_ngd", "lars")
"""Optimizers whose learning rate scales with the batch size; that of others with its root."""


def format_params(params: Mapping[str, Any]) -> str:
    """Write flags and values on one line, in few digits."""
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in params.items()
    )


def format_result(trial: FrozenTrial) -> str:
    """Return the value of a complete trial, else the error of its script, or its state."""
    if trial.state is TrialState.COMPLETE:
        return f"{trial.value:.4f}"
    return trial.user_attrs.get("error") or trial.state.name.lower()


def rank_trials(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Sort trials: complete ones by value, then pruned ones by epochs, then failed ones."""

    def key(trial: FrozenTrial) -> tuple[int, float]:
        if trial.state is TrialState.COMPLETE:
            return 0, -trial.values[0]
        return 1 + (trial.state is TrialState.FAIL), -len(trial.intermediate_values)

    return sorted(trials, key=key)


def complete(ranking: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the trials that are complete, in the same order."""
    return [trial for trial in ranking if trial.state is TrialState.COMPLETE]


def write_trials(study: optuna.Study, ranking: Sequence[FrozenTrial], config: SweepConfig) -> None:
    """Write trials.csv and the pictures.

    Raises:
        InputError: no trial is complete.
    """
    write_csv(config.out / "trials.csv", ranking)
    states = Counter(trial.state for trial in ranking)
    print(
        f"{len(ranking)} trials: {states[TrialState.COMPLETE]} complete, "
        f"{states[TrialState.PRUNED]} pruned, {states[TrialState.FAIL]} failed; "
        f"{config.out / 'trials.csv'}"
    )
    if not complete(ranking):
        reasons = [trial.user_attrs["error"] for trial in ranking if "error" in trial.user_attrs]
        raise InputError(f"no trial is complete, so there is no recipe: {reasons[0]}")
    draw_pictures(study, config)


def write_winner(
    ranking: Sequence[FrozenTrial],
    config: SweepConfig,
    *,
    arms: Sequence[Contender],
    lost: Mapping[str, str],
) -> None:
    """Write the recipe, and print the command that trains with it.

    Args:
        ranking: the trials, the best first.
        arms: of the race of the best ones against the defaults, which are first; none where there
            was none, so that the best trial wins.
        lost: why others failed in it.
    """
    best, found = ranking[0], ""
    chosen: FrozenTrial | None = best  # None for the defaults
    print(f"best: trial {best.number}, {format_params(best.params)}: {format_result(best)}")
    if arms:
        name = verdict.winner(arms).name
        by_name = {f"trial {trial.number}": trial for trial in ranking}
        chosen = by_name.get(name)
        why = [f"{other} failed ({reason})." for other, reason in lost.items()]
        why += [verdict.sentence(arms)] if len(arms) > 1 else []
        found = f"# Recipe of {name}, by a race with {config.seeds} new seeds: {' '.join(why)}\n"
        print(found[2:], end="")
    params = {} if chosen is None else chosen.params
    flags = config.script.flags(params)
    what = "mAP" if flags["label_separator"] else "accuracy"
    comment = (
        f"{found}# Trial {best.number} is the best of {len(ranking)} of {config.script.file} by "
        f"{what}: {best.value:.4f} on rows that were held out.\n"
        f"# Each trial: {flags['epochs']} epochs of {flags['subset']:.0%} of the training set, "
        f"{config.nproc} process(es).\n"
    )
    rows = complete_rows(trial_folder(config, chosen or best))
    batch = rows[0]["batch_size"] if rows else config.script.parser.kind.usual_batch_size
    write_recipe(config, params, batch=batch, comment=comment)
    print(f"recipe: {config.out / RECIPE}, with which this command trains:")
    print(training_command(config), flush=True)


def write_csv(path: Path, ranking: Sequence[FrozenTrial]) -> None:
    """Write a row for each trial, the best first."""
    names = sorted({name for trial in ranking for name in trial.params})
    columns = ["rank", "trial", "state", "value", "epochs", "seconds", *names, "folder", "error"]
    with atomic_write(path) as part, open(part, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for rank, trial in enumerate(ranking, 1):
            writer.writerow(
                {
                    "rank": rank,
                    "trial": trial.number,
                    "state": trial.state.name,
                    "value": trial.value if trial.state is TrialState.COMPLETE else "",
                    "epochs": len(trial.intermediate_values),
                    "seconds": trial.duration.total_seconds() if trial.duration else "",
                    **trial.params,
                    "folder": Path(trial.user_attrs.get("folder", "")).name,  # below trials/
                    "error": trial.user_attrs.get("error", ""),
                }
            )


def draw_pictures(study: optuna.Study, config: SweepConfig) -> None:
    """Draw Optuna's pictures, with a message in place of one that needs more trials."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from optuna.visualization import matplotlib as visualization

    objective = "accuracy on held-out rows"
    pictures: dict[str, Callable[[], Any]] = {
        "history": lambda: visualization.plot_optimization_history(study, target_name=objective),
        "curves": lambda: visualization.plot_intermediate_values(study),
        "flags": lambda: visualization.plot_slice(study, target_name=objective),
        "importance": lambda: visualization.plot_param_importances(study),
    }
    with warnings.catch_warnings(), plt.rc_context():  # Optuna sets a style of its own
        warnings.simplefilter("ignore")
        for name, draw in pictures.items():
            try:
                axes = np.ravel(draw())
            except (RuntimeError, ValueError, ZeroDivisionError) as error:
                print(f"no picture of {name}: {first_line(error)}")
                continue
            axes[0].figure.savefig(config.out / f"{name}.png", dpi=150, bbox_inches="tight")
            plt.close("all")
            print(f"picture: {config.out / name}.png")


def check_kept(out: Path) -> None:
    """Check that a new sweep would not overwrite a recipe, which may be its own --recipe.

    Raises:
        InputError: it would.
    """
    if (out / RECIPE).exists():
        raise InputError(f"--out {out} holds a {RECIPE} of something else: choose another folder")


def write_recipe(
    config: SweepConfig, params: Mapping[str, Any], *, batch: int, comment: str
) -> None:
    """Write the best trial's searched flags and the shared ones as YAML for --recipe.

    A searched learning rate is written with its global `batch`, in samples, and scaling rule, so
    that the recipe holds for other batch sizes and numbers of processes.
    """
    values, flags = config.script.recipe(params), config.script.flags(params)
    values = {name: "none" if value is None else value for name, value in values.items()}
    if "lr" in params:
        rule, base_bs = flags["lr_scaling"], flags["base_bs"]
        if rule == "none":  # else the rate already is the one for base_bs
            rule = "linear" if flags["optimizer"] in LINEAR_SCALING else "sqrt"
            base_bs = batch
        values |= {"lr_scaling": rule, "base_bs": base_bs}
    atomic_write_text(config.out / RECIPE, comment + yaml.safe_dump(values, sort_keys=False))


def training_command(config: SweepConfig) -> str:
    """Return the command line that trains in full with the recipe, from any folder, quoted.

    It starts as many processes as a trial has.

    It names the folder of the data, which the recipe leaves out, the file of --weights, and rows to
    hold out where own data is nothing but a training set.
    """
    script, flags = config.script, config.script.flags({})
    words = [sys.executable, str(ROOT / script.file)]
    if config.nproc > 1:
        start = ["env", f"PYTHON={sys.executable}", f"NGPU={config.nproc}", "bash"]
        words = [*start, str(ROOT / "run_distributed.sh"), script.file]
    words += ["--recipe", str(config.out.resolve() / RECIPE)]
    for name in ("data_dir", "weights"):
        if flags[name] and (path := Path(flags[name])).exists():
            words += [f"--{name}", str(path.resolve())]
    if len(script.own_splits()) < 2:
        words += ["--val_fraction", str(config.val_fraction)]
    return shlex.join(words)
