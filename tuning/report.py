"""The results of a sweep: ranked table, results.csv, recipe, figures, and a report of the best.

write_report(study, trials, config)
"""

from __future__ import annotations

import csv
import os
import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from errors import InputError
from figures import report as run_report
from figures.html_page import MISSING, Section, table
from figures.reported_run import ReportedRun, read_run
from input_pipeline import csv_tables, own_data
from tuning.config import SweepConfig
from tuning.objective import NOT_REACHED
from tuning.trials import ROOT

NEVER_REACHED = "never reached"
MAX_REPORTED = 5  # trials whose curves are in report.html
LINEAR_SCALING = ("sgd", "kaldi_ngd", "lars", "apex_sgd", "apex_larc")
"""Optimizers whose learning rate scales with the batch size; that of others with its root."""
SCALING_RULES = {
    "linear": "linearly with the batch size (arXiv:1706.02677)",
    "sqrt": "with the square root of the batch size (arXiv:1404.5997)",
}


def format_params(params: Mapping[str, Any]) -> str:
    """Write flags and values on one line."""
    return ", ".join(f"{name} {format_value(value)}" for name, value in params.items())


def format_value(value: Any) -> str:
    """Write a value in few digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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


def write_report(study: optuna.Study, trials: Sequence[FrozenTrial], config: SweepConfig) -> None:
    """Print the ranking and write results.csv, the recipe, the figures and report.html.

    Raises:
        InputError: no trial is complete, or none reached the target of the objective.
    """
    ranking = rank_trials(study, trials)
    write_csv(config.out / "results.csv", ranking)
    print_ranking(ranking, config)
    if not ranking or ranking[0].state is not TrialState.COMPLETE:
        errors = [trial.user_attrs["error"] for trial in ranking if "error" in trial.user_attrs]
        reason = errors[0] if errors else ""
        raise InputError(f"no trial is complete, so there is no recipe. {reason}")
    best = ranking[0]
    if format_result(best) == NEVER_REACHED:
        raise InputError(
            f"--objective {config.objective.name}: no trial reached it, so there is no recipe; "
            f"give more --epoch or a lower target"
        )
    write_recipe(config, best, num_trials=len(trials))
    print(f"recipe: {training_command(config)}")
    for figure in draw_figures(study, config):
        print(f"figure: {figure}")
    if page := write_page(ranking, config):
        print(f"report: {page}")


def print_ranking(ranking: Sequence[FrozenTrial], config: SweepConfig) -> None:
    """Print a line for each trial, the best first, and the number of trials by state."""
    print(f"\n{'rank':>4} {'trial':>5} {config.objective.name:>14}  values")
    for rank, trial in enumerate(ranking, 1):
        params = format_params(trial.params)
        print(f"{rank:>4} {trial.number:>5} {format_result(trial):>14}  {params}")
    pruned = sum(trial.state is TrialState.PRUNED for trial in ranking)
    failed = sum(trial.state is TrialState.FAIL for trial in ranking)
    complete = len(ranking) - pruned - failed
    print(
        f"{len(ranking)} trials: {complete} complete, {pruned} pruned, {failed} failed; "
        f"{config.out / 'results.csv'}"
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


def write_recipe(config: SweepConfig, best: FrozenTrial, *, num_trials: int) -> None:
    """Write the best trial's flags as YAML for --recipe.

    A searched learning rate is written with its batch size and scaling rule, so that the recipe
    holds for other batch sizes and numbers of processes.
    """
    script = config.script
    values, flags = script.recipe(best.params), script.flags(best.params)
    lines = [
        f"# The best of {num_trials} trials of {script.file} by {config.objective.name}: "
        f"{best.value:.4f} on held-out training rows.",
        f"# Each trial: {flags['epochs']} epochs of {flags['subset']:.0%} of the training set, "
        f"{config.nproc} process(es).",
        f"# python {script.file} --recipe {config.recipe_out}",
    ]
    if "lr" in best.params:
        rule, base_bs = flags["lr_scaling"], flags["base_bs"]
        if rule == "none":  # else the rate already is the one for base_bs
            rule = "linear" if flags["optimizer"] in LINEAR_SCALING else "sqrt"
            base_bs = flags["batch_size"] * flags["accumulate"] * config.nproc
        lines.append(
            f"# The learning rate is for a global batch size of {base_bs}; "
            f"it scales {SCALING_RULES[rule]}."
        )
        values |= {"lr_scaling": rule, "base_bs": base_bs}
    config.recipe_out.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(lines) + "\n" + yaml.safe_dump(values, sort_keys=False)
    config.recipe_out.write_text(text, encoding="utf-8")


def training_command(config: SweepConfig) -> str:
    """Return the command line that trains with the recipe in full, quoted for a shell.

    It works from any folder. It names the folder of own data, which the recipe leaves out, and rows
    to hold out where that folder has nothing but a training set.
    """
    words = ["python", str(ROOT / config.script.file)]
    words += ["--recipe", str(config.recipe_out.resolve())]
    flags = config.script.flags({})
    dataset, data_dir = flags["dataset"], Path(flags["data_dir"])
    if "data_dir" in config.script.given or os.environ.get("DATA_DIR"):
        words += ["--data_dir", str(data_dir.resolve())]
    if dataset in own_data.DATASETS:
        suffixes = csv_tables.SUFFIXES if dataset == "csv" else ("",)
        if len(own_data.find_splits(data_dir, suffixes)) < 2:
            words += ["--val_fraction", str(config.val_fraction)]
    return shlex.join(words)


def draw_figures(study: optuna.Study, config: SweepConfig) -> list[Path]:
    """Draw the history, the importance of each flag, and what each trial reached over each flag.

    A figure that cannot be drawn from so few trials is left out with a message.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from optuna.visualization import matplotlib as visualization

    from tuning.trial_panels import draw_trials, read_trials

    logarithmic = {
        name
        for name, distribution in config.space.items()
        if isinstance(distribution, FloatDistribution | IntDistribution) and distribution.log
    }
    table = config.out / "results.csv"
    figures: dict[str, Callable[[], Any]] = {
        "history": lambda: visualization.plot_optimization_history(study).figure,
        "importance": lambda: visualization.plot_param_importances(study).figure,
        "trials": lambda: draw_trials(read_trials(table), config.objective.name, logarithmic),
    }
    paths = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, draw_figure in figures.items():
            try:
                figure = draw_figure()
            except (RuntimeError, ValueError, ZeroDivisionError) as error:
                print(f"no figure of {name}: {str(error).splitlines()[0]}")
                continue
            paths.append(config.out / f"{name}.png")
            figure.savefig(paths[-1], dpi=150, bbox_inches="tight")
            plt.close("all")
    return paths


def write_page(ranking: Sequence[FrozenTrial], config: SweepConfig) -> Path | None:
    """Write report.html: all trials, and the runs of the best ones as `figures.report` shows them.

    A trial whose folder cannot be read, such as one of another machine, is left out with a message.

    Returns:
        Its path, or None where no trial can be read.
    """
    runs: list[ReportedRun] = []
    for trial in ranking[:MAX_REPORTED]:
        if trial.state is TrialState.COMPLETE:
            try:
                folder = Path(trial.user_attrs.get("folder", ""))
                runs.append(read_run(folder, f"trial {trial.number}"))
            except InputError as error:
                print(f"trial {trial.number} is not in the report: {error}")
    if not runs:
        return None
    path = config.out / "report.html"
    best = f"the best {len(runs)}" if len(runs) > 1 else "the best one"
    run_report.write_report(
        runs,
        path,
        title=f"{len(ranking)} trials of {config.script.file}, and {best} by "
        f"{config.objective.name}",
        first=[Section("Trials", trials_table(ranking, config))],
    )
    return path


def trials_table(ranking: Sequence[FrozenTrial], config: SweepConfig) -> str:
    """A row of HTML for each trial, the best first."""
    names = sorted({name for trial in ranking for name in trial.params})
    rows = [
        [
            str(rank),
            str(trial.number),
            format_result(trial),
            str(len(trial.intermediate_values)),
            *(format_value(trial.params[n]) if n in trial.params else MISSING for n in names),
        ]
        for rank, trial in enumerate(ranking, 1)
    ]
    return table(["rank", "trial", config.objective.name, "epochs", *names], rows, numbers=True)
