"""The trials of a sweep by Optuna: its study in a file, sampler, pruner, several at a time.

run_sweep(config)
"""

import os
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import optuna
from optuna.pruners import MedianPruner, NopPruner
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from tqdm import tqdm

from errors import INTERRUPTED, InputError, Interrupted, handled_signals
from training.run_folder import lock_run_folder, make_run_folder
from tuning import results, space
from tuning.config import SweepConfig
from tuning.trials import TrialFailed, TrialRunner, gpu_slots, trial_folder

MEDIAN_TRIALS = 4  # complete ones before the median pruner judges any, after its first epoch


def run_sweep(config: SweepConfig, first: Sequence[dict[str, Any]] = ()) -> optuna.Study:
    """Run all trials of a sweep that are not finished, and return its study.

    Args:
        first: values of its first trials, in this order; the sampler has those of the others.

    Raises:
        InputError: a flag or the space is wrong, or the folder is another sweep's.
        Interrupted: Ctrl-C or another stop signal; the same command resumes the sweep.
    """
    arguments = trial_arguments(config)
    config.script.check(arguments, processes=config.nproc)
    runner = TrialRunner(config, arguments, gpu_slots(config))
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with lock_run_folder(make_run_folder(str(config.out), config.script.file)):
        study = open_study(config)
        finished = finished_trials(study)
        waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        open_ones = list(first)  # of which other trials may have ended before one
        for trial in finished:
            if (values := trial.system_attrs.get("fixed_params")) in open_ones:
                open_ones.remove(values)
        queued = [trial.system_attrs.get("fixed_params") for trial in waiting]
        for values in open_ones:
            if values in queued:
                queued.remove(values)
            else:
                study.enqueue_trial(values)
        num_resumed = sum("folder" in trial.user_attrs for trial in waiting)
        print(
            f"{config.trials} trials of {config.script.file} in {config.out}: "
            f"{len(finished)} finished, {num_resumed} resumed",
            flush=True,
        )
        if count := max(config.trials - len(finished), len(open_ones)):
            run_trials(study, config, runner, count=count)
    return study


def run_trials(
    study: optuna.Study, config: SweepConfig, runner: TrialRunner, *, count: int
) -> None:
    """Run a number of trials, those that wait first.

    Raises:
        Interrupted: Ctrl-C or another stop signal.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        runner.stop.set()
        raise SystemExit(INTERRUPTED)  # which Optuna does not catch: the trial stays a running one

    failures: list[BaseException] = []  # Optuna does not raise those of its last threads

    def run_trial(trial: optuna.Trial) -> float:
        try:
            values = space.suggest(trial, config.space)
            return runner(trial, config.script.to_arguments(values))
        except (optuna.TrialPruned, TrialFailed):
            raise
        except BaseException as failure:
            failures.append(failure)
            runner.stop.set()  # else the trials beside this one would go on
            raise

    def trial_ended(study: optuna.Study, trial: FrozenTrial) -> None:
        num_finished = len(finished_trials(study))
        if not config.keeps_weights:
            for file in trial_folder(config, trial).glob("*.pt"):
                file.unlink(missing_ok=True)
        params, result = results.format_params(trial.params), results.format_result(trial)
        tqdm.write(f"trial {num_finished} of {config.trials}: {params}: {result}")
        sys.stdout.flush()

    try:
        with handled_signals(interrupt):
            study.optimize(
                run_trial,
                n_trials=count,
                n_jobs=config.jobs,
                catch=(TrialFailed,),
                callbacks=[trial_ended],
                show_progress_bar=sys.stderr.isatty(),
            )
        if failures:
            raise failures[0]
    except SystemExit as ended:
        if isinstance(ended.code, str):
            raise InputError(ended.code) from None
        message = f"interrupted; run the same command again to resume the sweep in {config.out}"
        raise Interrupted(message) from None


def trial_arguments(config: SweepConfig) -> list[str]:
    """Return the arguments that all trials share, with those that the sweep sets."""
    # A recipe may have another --eval_every; a --baseline that is given comes later.
    arguments = ["--no-baseline", *config.script.arguments, "--eval_every", "1"]
    if config.val_fraction:
        arguments += ["--val_fraction", str(config.val_fraction), "--no-test"]
    if "threads" not in config.script.given:
        cores = len(os.sched_getaffinity(0))
        arguments += ["--threads", str(max(1, cores // (config.jobs * config.nproc)))]
    return arguments


# -------------------------------------------------------------------- the study


def open_study(config: SweepConfig) -> optuna.Study:
    """Create the study in its file, or load it to resume the sweep, whose killed trials wait again.

    Raises:
        InputError: the file is missing, or its trials cannot be compared with these.
    """
    file = config.out / "study.log"
    if (config.out / "trials").exists() and not file.exists():
        raise InputError(f"--out {config.out}: trials without {file.name}; choose another folder")
    log = file.read_bytes() if file.exists() else b""
    if not log:
        results.check_kept(config.out)
    elif log.startswith(b"{"):  # a line that was cut when the machine stopped was never written
        os.truncate(file, log.rfind(b"\n") + 1)
    file.with_name(f"{file.name}.lock").unlink(missing_ok=True)  # of a sweep that was killed
    storage = JournalStorage(JournalFileBackend(str(file)))
    name = config.script.file.removesuffix(".py")
    if others := {*optuna.get_all_study_names(storage)} - {name}:
        raise InputError(f"--out {config.out}: trials of {others.pop()}; choose another folder")
    study = optuna.create_study(
        study_name=name,
        storage=storage,
        direction="maximize",
        load_if_exists=True,
    )
    check_settings(study, config)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)
    study.sampler = create_sampler(config, num_trials=len(study.get_trials(deepcopy=False)))
    # Several jobs are threads with one sampler, so that Optuna need not seed it anew in each.
    study.sampler.reseed_rng = lambda: None  # type: ignore[method-assign]
    median = MedianPruner(MEDIAN_TRIALS, n_warmup_steps=2)
    study.pruner = median if config.pruner == "median" else NopPruner()
    return study


def check_settings(study: optuna.Study, config: SweepConfig) -> None:
    """Store the sweep's settings in the study, or compare them with those stored.

    Raises:
        InputError: the study holds trials with other settings.
    """
    settings = {f"--{name}": value for name, value in config.script.settings().items()}
    settings |= {f"the space's {name}": entry for name, entry in config.space.items()}
    settings |= {"--val_fraction": config.val_fraction, "--nproc": config.nproc}
    stored = study.user_attrs.get("settings", settings)
    names = sorted(stored.keys() | settings)
    if different := [name for name in names if stored.get(name) != settings.get(name)]:
        raise InputError(
            f"--out {config.out}: trials with another {', '.join(different)}; choose another folder"
        )
    study.set_user_attr("settings", settings)


def create_sampler(config: SweepConfig, *, num_trials: int) -> optuna.samplers.BaseSampler:
    """Return Optuna's sampler of --sampler for a study with this number of trials."""
    if config.sampler == "grid":  # its seed is the order of the grid
        return optuna.samplers.GridSampler(space.grid(config.space), seed=config.sweep_seed)
    seed = config.sweep_seed + num_trials  # else a resumed sweep would sample the same values again
    if config.sampler == "tpe":
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(4, config.trials // 4))
    return optuna.samplers.RandomSampler(seed)


def finished_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Return the trials that have ended; a failed one counts if its script gave the reason."""
    ended = (each for each in study.get_trials(deepcopy=False) if each.state.is_finished())
    return [each for each in ended if each.state != TrialState.FAIL or "error" in each.user_attrs]
