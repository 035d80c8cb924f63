"""The runs of a race: what fits into its time, an equal search for each arm, then seeds in full.

run_race(config)                            # a RaceConfig; the same call goes on with the race

Both are sweeps whose trials are all known. A search begins with the arm's own learning rate, a
third and three times of it. Two more rates follow at a time, on both sides of the best one:
half-way, in logarithms, to the next rate that was tried, or three times beyond. The arms take
turns, so that what slows the machine down slows all of them.
"""

import json
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from errors import InputError, Interrupted
from figures import verdict
from figures.run_logs import ReportedRun, Row, read_run
from figures.verdict import Contender, best_rate
from training.atomic_file import atomic_write_text
from training.epoch_report import training_seconds
from training.progress import duration
from training.run_folder import lock_run_folder, make_run_folder
from tuning.config import Arm, Space, SweepConfig
from tuning.results import check_kept, training_command, write_recipe
from tuning.search import finished_trials, run_sweep, trial_arguments
from tuning.target_script import SPEED_FLAGS, TargetScript
from tuning.trials import TrialFailed, TrialRunner, complete_rows, gpu_slots, trial_folder

STEP = 3.0  # between the first rates of a search
FINALISTS = 2  # of the trials of a sweep
TRIALS = (9, 7, 5, 3)  # of each arm; the most that fit
FEWEST_EPOCHS = 3  # of a race that chooses its epochs
SEARCH_SEED = 1000  # of all trials; runs in full have seeds below it
MARGIN = 1.2  # of the planned time, for what slows the machine down


@dataclass(frozen=True, kw_only=True)
class RaceConfig(SweepConfig):
    """What a race compares, and how: the flags of `compare_parser`."""

    arms: Sequence[Arm]
    minutes: float
    folds: int = 0  # of the training set, on which the runs in full are measured, each on its own

    @property
    def wanted_epochs(self) -> int:
        """Epochs of a run where there is time for them."""
        return self.arms[0].script.flags({})["epochs"]

    def sweep(self, epochs: int, *, in_full: bool = False) -> SweepConfig:
        """Return the search, or the runs in full, as a sweep that has no trials yet."""
        common = ["--epochs", str(epochs), "--eval_every", str(epochs)]  # a single evaluation
        folds = self.folds if in_full else 0
        if folds:
            common += ["--no-test"]
        elif not in_full:
            common += ["--val_fraction", str(self.val_fraction), "--no-test"]
        arms = {arm.name: arm for arm in self.arms}
        settings: dict[str, Any] = {"minutes": self.minutes, "epochs": epochs}
        settings |= {"held_out": self.val_fraction, "jobs": self.jobs}
        settings |= {"folds": folds} if folds else {}
        given = self.script.given
        settings |= {name: given[name] for name in SPEED_FLAGS if name in given}  # of their times
        settings |= {f"arm {name}": [arm.rate, arm.script.settings()] for name, arm in arms.items()}
        space = arm_space(arms)
        script = RaceScript(self.script.file, [], settings, arms=arms, common=common, folds=folds)
        out = self.out / ("in_full" if in_full else "search")
        own: dict[str, Any] = {"script": script, "space": space, "val_fraction": 0.0, "out": out}
        return replace(self, **own, is_strict=True, keeps_weights=in_full)


@dataclass(frozen=True)
class RaceScript(TargetScript):
    """The entry script with a flag more: the arm, whose flags stand before those of all runs."""

    arms: Mapping[str, Arm]
    common: Sequence[str]
    folds: int = 0  # of which a run has that of its seed

    def to_arguments(self, params: Mapping[str, Any]) -> list[str]:
        """Return the arguments of a run with these values of arm, lr and seed."""
        own = ["--lr", str(params["lr"]), "--seed", str(params["seed"])]
        own += ["--fold", f"{params['seed'] + 1}/{self.folds}"] if self.folds else []
        return [*self.arms[params["arm"]].script.arguments, *own, *self.common]

    def settings(self) -> dict[str, Any]:
        """Return those of the arms, and what all runs have in common."""
        return dict(self.given)

    def check(self, arguments: Sequence[str], *, processes: int) -> None:
        """Raise InputError where the script would refuse an arm."""
        for arm in self.arms.values():
            values = {"arm": arm.name, "lr": arm.rate, "seed": 0}
            arm.script.check([*arguments, *self.to_arguments(values)], processes=processes)


@dataclass(frozen=True)
class Plan:
    """What fits into a race's time."""

    trials: int
    epochs: int


# -------------------------------------------------------------------- search and runs in full


def run_race(config: RaceConfig) -> None:
    """Run a race, or go on with it, in its folder; print and write its verdict.

    Raises:
        InputError: a flag is wrong, the race does not fit into its time, or a run failed.
        Interrupted: Ctrl-C or another stop signal.
    """
    for in_full in (False, True):
        script = config.sweep(config.wanted_epochs, in_full=in_full).script
        script.check([], processes=config.nproc)
    with lock_run_folder(make_run_folder(str(config.out), "race")):
        try:
            run_arms(config)
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; the same command goes on in {config.out}") from None


def run_arms(config: RaceConfig) -> None:
    """Search the rate of each arm, run it in full with each seed, and conclude."""
    file = config.out / "plan.json"
    if not file.exists():
        check_kept(config.out)
        plan = make_plan(config)
        config.sweep(plan.epochs).script.check([], processes=config.nproc)
        atomic_write_text(file, json.dumps(asdict(plan)))
    plan = Plan(**json.loads(file.read_text(encoding="utf-8")))
    search = config.sweep(plan.epochs)
    values: list[dict[str, Any]] = []
    tried: dict[str, dict[float, Row]] = {arm.name: {} for arm in config.arms}
    while len(values) < plan.trials * len(config.arms):
        for rates in zip(*(next_rates(arm.rate, tried[arm.name]) for arm in config.arms)):
            for name, rate in zip(tried, rates):
                values.append({"arm": name, "lr": rate, "seed": SEARCH_SEED})
        for trial in do_runs(search, values):
            is_complete = trial.state is TrialState.COMPLETE
            row = complete_rows(trial_folder(search, trial))[-1] if is_complete else {}
            tried[trial.params["arm"]][trial.params["lr"]] = row
    values = [
        {"arm": name, "lr": best_rate(rates), "seed": seed}
        for seed in range(config.seeds)
        for name, rates in tried.items()
    ]
    arms, lost = run_seeds(config.sweep(plan.epochs, in_full=True), values, tried)
    limits = [f"{name} is left out ({why})." for name, why in lost.items()]
    conclude(config, plan, arms, limits=limits)


def run_seeds(
    config: SweepConfig,
    values: Sequence[dict[str, Any]],
    tried: Mapping[str, Mapping[float, Row]],
) -> tuple[list[Contender], dict[str, str]]:
    """Do runs of several arms.

    Args:
        config: of a `RaceScript`.
        values: the arm, lr and seed of each run.
        tried: the last row of each trial by its rate, of each arm.

    Returns:
        The arms of which all runs are complete; and why the others are not, by their names.

    Raises:
        InputError: there is no such arm.
    """
    runs: dict[str, list[ReportedRun]] = {name: [] for name in tried}
    lost: dict[str, str] = {}
    for trial in do_runs(config, values):
        name, title = trial.params["arm"], "{arm}-seed{seed}".format(**trial.params)
        if trial.state is TrialState.COMPLETE:
            runs[name].append(read_run(trial_folder(config, trial), title))
        else:
            lost[name] = f"{title}: {trial.user_attrs['error']}"
    if len(lost) == len(tried):
        raise InputError("; ".join(lost.values()))
    arms = [Contender(name, tried[name], runs[name]) for name in tried if name not in lost]
    return arms, lost


def race_defaults(
    config: SweepConfig, trials: Sequence[FrozenTrial]
) -> tuple[list[Contender], dict[str, str]]:
    """Let the best trials of a sweep race against the defaults on held-out rows, with new seeds.

    Args:
        trials: the best first, with their values.

    Returns:
        The defaults first, unless they diverge; then those of the trials, named 'trial N', that do
        not; and why the others do. None where there is no trial.

    Raises:
        InputError: all diverge, or a run failed, with which the same command goes on.
    """
    if not trials:
        return [], {}
    shared = config.script
    arms = {"defaults": Arm("defaults", shared, shared.usual("lr"))}
    params = [trial.params for trial in trials]  # of which later ones may repeat earlier ones
    firsts = [trial for n, trial in enumerate(trials) if trial.params not in params[:n]]
    finalists = firsts[:FINALISTS]
    for trial in finalists:
        words = [*shared.arguments, *shared.to_arguments(trial.params)]
        own = TargetScript.read(shared.file, words)
        name = f"trial {trial.number}"
        arms[name] = Arm(name, own, own.usual("lr"))
    settings: dict[str, Any] = {
        name: [arm.rate, arm.script.settings()] for name, arm in arms.items()
    }
    settings |= {name: shared.given[name] for name in SPEED_FLAGS if name in shared.given}
    searched, seeds = shared.flags({})["seed"], range(1, config.seeds + 2)
    numbers = "-".join(str(trial.number) for trial in finalists)
    final = replace(
        config,
        script=RaceScript(shared.file, [], settings, arms=arms, common=[]),
        space=arm_space(arms),
        out=config.out / f"final-{numbers}-{config.seeds}-seeds",
        sampler="random",
        pruner="none",
        is_strict=True,
    )
    values = [
        {"arm": name, "lr": arm.rate, "seed": seed}
        for seed in [seed for seed in seeds if seed != searched][: config.seeds]
        for name, arm in arms.items()
    ]
    return run_seeds(final, values, {name: {arm.rate: {}} for name, arm in arms.items()})


def arm_space(arms: Collection[str]) -> Space:
    """The search space of runs whose values are all given."""
    return {
        "arm": {"type": "categorical", "choices": list(arms)},
        "lr": {"type": "float", "low": 0.0, "high": 1e9},
        "seed": {"type": "int", "low": 0, "high": SEARCH_SEED},
    }


def do_runs(config: SweepConfig, values: Sequence[dict[str, Any]]) -> list[FrozenTrial]:
    """Do the runs with these values that are not done yet; return all of them in this order."""
    done = finished_trials(run_sweep(replace(config, trials=len(values)), first=values))
    return [next(trial for trial in done if trial.params == each) for each in values]


def next_rates(own: float, tried: Mapping[float, Row]) -> list[float]:
    """Return the rates of three digits that follow those tried: the arm's own, and around it.

    They are the next lower ones where training has diverged at each.
    """
    rates = [own, own / STEP, own * STEP]
    if tried and not any(tried.values()):
        rates = [min(tried) / STEP, min(tried) / STEP**2]
    elif tried:
        ordered, best = sorted(tried), best_rate(tried)
        place = ordered.index(best)
        below = math.sqrt(ordered[place - 1] * best) if place else best / STEP
        above = math.sqrt(ordered[place + 1] * best) if best < ordered[-1] else best * STEP
        rates = [below, above]
    return [float(f"{rate:.3g}") for rate in rates]


# -------------------------------------------------------------------- what fits into the time


def make_plan(config: RaceConfig) -> Plan:
    """Time an epoch of each arm, and fit the race into its minutes.

    Raises:
        InputError: an equal search does not fit; the message says how many minutes do.
    """
    began, wanted = time.monotonic(), config.wanted_epochs
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    costs = list(filter(None, (time_arm(config, arm, epochs=wanted) for arm in config.arms)))
    if not costs:
        raise InputError("the loss of every arm is not finite in its first epoch")
    start, epoch = (statistics.mean(each) for each in zip(*costs))
    taken = time.monotonic() - began
    choices = [(trials, wanted) for trials in TRIALS]
    if all("epochs" not in arm.script.given for arm in config.arms):
        fewer = range(wanted - 1, FEWEST_EPOCHS - 1, -1)
        choices += [(trials, epochs) for trials in TRIALS[-2:] for epochs in fewer]
    of_runs = "folds" if config.folds else "seeds"
    for trials, epochs in choices:
        rounds = [3, *[2] * (trials // 2 - 1)]
        searched = sum(math.ceil(len(config.arms) * each / config.jobs) for each in rounds)
        in_full = math.ceil(len(config.arms) * config.seeds / config.jobs)
        share = 1 - 1 / config.folds if config.folds else 1
        steps = searched + share * in_full / (1 - config.val_fraction)  # times a trial's epochs
        seconds = taken + MARGIN * ((searched + in_full) * start + steps * epochs * epoch)
        text = f"{len(config.arms)} arms x ({trials} trials + {config.seeds} {of_runs} in full)"
        if seconds <= 60 * config.minutes:
            print(f"{text} of {epochs} epochs take about {duration(seconds)}", flush=True)
            return Plan(trials, epochs)
    raise InputError(
        f"--minutes {config.minutes:g}: {text} of {epochs} epochs need --minutes "
        f"{math.ceil(seconds / 60)}; or give fewer arms, seeds or epochs"
    )


def time_arm(config: RaceConfig, arm: Arm, *, epochs: int) -> tuple[float, float] | None:
    """Run the first epoch of an arm; return its seconds, after those to start and end a run.

    The epoch is of whole images. With folds it is that of the first fold's run, so that a number of
    folds that is too large is refused before the search; the seconds are scaled to a trial's rows.
    None: the arm diverges in it, and may have a better rate.

    Raises:
        InputError: the run failed, or its first epoch takes too long.
    """
    limit = max(60, 30 * config.minutes / len(config.arms))
    with tempfile.TemporaryDirectory(dir=config.out) as scratch:
        sweep = config.sweep(epochs, in_full=bool(config.folds))
        sweep = replace(sweep, ends_after_one=True, out=Path(scratch))
        runner = TrialRunner(sweep, trial_arguments(sweep), gpu_slots(sweep))
        timer, began = threading.Timer(limit, runner.stop.set), time.monotonic()
        timer.start()
        arguments = sweep.script.to_arguments({"arm": arm.name, "lr": arm.rate, "seed": 0})
        if arm.script.flags({}).get("augment_args", {}).get("small_epochs"):
            arguments += ["--small_epochs", "0"]
        try:
            trial = optuna.create_study().ask()
            runner(trial, [*arguments, "--eval_every", "1"])
            epoch = training_seconds(complete_rows(trial_folder(sweep, trial))[0])
            if config.folds:
                epoch *= (1 - config.val_fraction) / (1 - 1 / config.folds)
        except TrialFailed:
            return None
        except SystemExit as ended:
            if not runner.stop.is_set():
                raise InputError(f"{arm.name}: {ended}") from None
            runs = len(config.arms) * (TRIALS[-1] + config.seeds)
            least = math.ceil(runs * min(epochs, FEWEST_EPOCHS) * limit / config.jobs / 60)
            raise InputError(
                f"--minutes {config.minutes:g}: the first epoch of {arm.name} is not over after "
                f"{duration(limit)}; the race needs more than --minutes {least}"
            ) from None
        finally:
            timer.cancel()
    start = time.monotonic() - began - epoch
    print(f"{arm.name}: {start:.1f} s to start and end, {epoch:.2f} s an epoch", flush=True)
    return start, epoch


# -------------------------------------------------------------------- verdict


def conclude(
    config: RaceConfig, plan: Plan, arms: Sequence[Contender], *, limits: Sequence[str]
) -> None:
    """Write the verdict and the winner's recipe, and print its command and the verdict.

    `limits` are those of the verdict that are known already.
    """
    limits = [*limits, *verdict.limits(arms)]
    if plan.epochs < config.wanted_epochs:
        limits.append(f"There was time for {plan.epochs} of {config.wanted_epochs} epochs.")
    if any(arm.script.has_usual_epochs for arm in config.arms):
        limits.append(
            "The number of epochs is the race's; without --epochs the script chooses it by the "
            "training rows."
        )
    best, text = verdict.winner(arms), verdict.write_verdict(arms, config.out, limits)
    script = next(arm.script for arm in config.arms if arm.name == best.name)
    of_best = replace(config, script=script)
    comment = f"# {best.name}, by this verdict: {verdict.sentence(arms)}\n"
    params = {"lr": best.rate, "epochs": plan.epochs}
    write_recipe(of_best, params, batch=best.runs[0].rows[0]["batch_size"], comment=comment)
    print(f"{config.out}: verdict.md, verdict.png, report.html, and recipe.yaml of {best.name}:")
    print(f"{training_command(of_best)}\n\n{text}", flush=True)
