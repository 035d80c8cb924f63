"""What a sweep has found: ranked table, results.csv, recipe, pictures.

findings.report(study, trials, args, script)
"""

from __future__ import annotations

import argparse
import csv
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.trial import FrozenTrial, TrialState

from errors import InputError
from tuning.target_script import Script
from tuning.trials import NOT_REACHED

NEVER = "never reached"
LINEAR = (
    "sgd",
    "ngd",
    "lars",
    "apex_sgd",
    "apex_larc",
)  # rates that go with the batch; those of Adam and LAMB go with its root


def show(values: Mapping[str, Any]) -> str:
    """Flags and values on a line."""
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in values.items()
    )


def product(grid: Mapping[str, Sequence[Any]]) -> int:
    """Points of a grid."""
    return math.prod(len(values) for values in grid.values())


def ranked(study: optuna.Study, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Whole runs, the best first; then those given up, the furthest first; then those that failed."""
    sign = -1 if study.direction.name == "MAXIMIZE" else 1

    def key(trial: FrozenTrial) -> tuple[int, float]:
        if trial.state is TrialState.COMPLETE:
            return 0, sign * (trial.value or 0.0)
        return (
            (1, -len(trial.intermediate_values))
            if trial.state is TrialState.PRUNED
            else (2, trial.number)
        )

    return sorted(trials, key=key)


def report(
    study: optuna.Study, trials: Sequence[FrozenTrial], args: argparse.Namespace, script: Script
) -> None:
    """Write and print all of it.

    Raises:
        InputError: no trial came to its end.
    """
    order = ranked(study, trials)
    write_csv(args.out / "results.csv", order)
    print(f"\n{'rank':>4} {'trial':>5} {args.objective:>14}  values")
    for rank, trial in enumerate(order, 1):
        print(f"{rank:>4} {trial.number:>5} {result(trial):>14}  {show(trial.params)}")
    pruned = sum(trial.state is TrialState.PRUNED for trial in trials)
    failed = sum(trial.state is TrialState.FAIL for trial in trials)
    print(
        f"{len(trials)} trials: {len(trials) - pruned - failed} whole, {pruned} given up, {failed} failed; "
        f"{args.out / 'results.csv'}"
    )
    if not order or order[0].state is not TrialState.COMPLETE:
        why = next(
            (trial.user_attrs["error"] for trial in order if "error" in trial.user_attrs), ""
        )
        raise InputError(f"no trial came to its end, so there is no recipe. {why}")
    if result(order[0]) == NEVER:
        raise InputError(
            f"--objective {args.objective}: no trial reached it: no recipe; give more --epoch or a lower target"
        )
    write_recipe(args, script, order[0], len(trials))
    print(f"recipe: python {args.script} --recipe {args.recipe_out}")
    for picture in draw(study, args.out):
        print(f"picture: {picture}")


def result(trial: FrozenTrial) -> str:
    """In a word."""
    if trial.state is not TrialState.COMPLETE or trial.value is None:
        return trial.state.name.lower()
    return f"{trial.value:.4f}" if trial.value < NOT_REACHED else NEVER


def write_csv(path: Path, trials: Sequence[FrozenTrial]) -> None:
    """A row a trial, the best first."""
    names = sorted({name for trial in trials for name in trial.params})
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["rank", "trial", "state", "value", "epochs", "seconds", *names, "folder", "error"]
        )
        for rank, trial in enumerate(trials, 1):
            seconds = trial.duration.total_seconds() if trial.duration else ""
            own = [trial.params.get(name, "") for name in names]
            folder = Path(trial.user_attrs.get("folder", "")).name  # below trials/
            attrs = [folder, trial.user_attrs.get("error", "")]
            values = trial.value if trial.state is TrialState.COMPLETE else ""
            writer.writerow(
                [
                    rank,
                    trial.number,
                    trial.state.name,
                    values,
                    len(trial.intermediate_values),
                    seconds,
                    *own,
                    *attrs,
                ]
            )


def write_recipe(args: argparse.Namespace, script: Script, best: FrozenTrial, count: int) -> None:
    """The best values, what was given beside them, and the rule by which their learning rate goes to other batches and worlds."""
    values, flags = script.recipe(best.params), script.flags(best.params)
    lines = [
        f"# The best of {count} trials of {script.file} by {args.objective}: {best.value:.4f} on held-out training rows.",
        f"# Each: {flags.epochs} epochs of {flags.subset:.0%} of the training set, {args.nproc} process(es).",
        f"# python {script.file} --recipe {args.recipe_out}",
    ]
    if "lr" in best.params:
        scaled = {"lr_scaling": flags.lr_scaling, "base_bs": flags.base_bs}
        if flags.lr_scaling == "none":  # else the rate is one for that batch already
            rule = "linear" if flags.optimizer in LINEAR else "sqrt"
            scaled = {
                "lr_scaling": rule,
                "base_bs": flags.batch_size * flags.accumulate * args.nproc,
            }
        rule = rule_of(scaled["lr_scaling"])
        lines.append(
            f"# The rate is one for a global batch of {scaled['base_bs']}; at others it is scaled with their {rule}."
        )
        values |= scaled
    args.recipe_out.parent.mkdir(parents=True, exist_ok=True)
    args.recipe_out.write_text("\n".join(lines) + "\n" + yaml.safe_dump(values, sort_keys=False))


def rule_of(name: str) -> str:
    """In words."""
    return {"linear": "size (arXiv:1706.02677)", "sqrt": "square root (arXiv:1404.5997)"}[name]


def draw(study: optuna.Study, folder: Path) -> list[Path]:
    """History, importance of each flag, parallel coordinates; those that Optuna can draw of so many trials."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from optuna.visualization import matplotlib as pictures

    drawn = []
    plots: dict[str, Callable[[optuna.Study], Any]] = {
        "history": pictures.plot_optimization_history,
        "importance": pictures.plot_param_importances,
        "parallel": pictures.plot_parallel_coordinate,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, plot in plots.items():
            try:
                plot(study)
            except (
                RuntimeError,
                ValueError,
                ZeroDivisionError,
            ) as error:  # too few whole trials, or all alike
                print(f"no picture of {name}: {str(error).splitlines()[0]}")
                continue
            plt.gcf().savefig(folder / f"{name}.png", dpi=150, bbox_inches="tight")
            plt.close("all")
            drawn.append(folder / f"{name}.png")
    return drawn
