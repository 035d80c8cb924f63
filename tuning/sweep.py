"""Search hyper-parameters on a fraction of the training set, an entry script's process per trial.

python -m tuning.sweep --space tuning/resnet50.yaml --optimizer sgd --subset 0.1 --epoch 5
bash tuning/resnet50_tuning.sh --trials 40 --jobs 4     # these defaults; four GPUs side by side
bash tuning/transformer_tuning.sh --sampler random --objective time_to:0.85 --dataset agnews

Flags that are not listed below are passed to the script. The objective is measured on rows held out
of the training set, never on the test set. A sweep that was killed resumes when the same command is
run again with the same --out; several machines share one sweep through --storage. It ends with a
table, results.csv, figures, and a recipe for the script's --recipe.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.distributions import distribution_to_json
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import URL, make_url

from cli import flags
from cli.flag_parser import FlagParser, file_path
from errors import InputError, Interrupted, exit_code, first_line
from training.time_estimate import in_words
from tuning import report, space
from tuning.config import SweepConfig
from tuning.objective import Objective
from tuning.sweep_time import SweepTime
from tuning.target_script import TargetScript
from tuning.trials import ROOT, STOPPED, TrialFailed, TrialRunner, gpu_slots

SCRIPTS = ("resnet50_test.py", "transformer_test.py")
SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("median", "hyperband", "none")
SHORTER = {  # by script: what makes a sweep shorter
    "resnet50_test.py": "a smaller --arch such as resnet20, a smaller --subset, fewer --epochs",
    "transformer_test.py": "a smaller --subset, a smaller --max_len, fewer --epochs",
}
RESUMES = "after"  # user attribute of a trial: number of the stopped trial that it resumes

# -------------------------------------------------------------------- command line


def sweep_parser(script: str) -> FlagParser:
    """Return the parser of a sweep's own flags, with `script` as default."""
    parser = FlagParser(__doc__)
    add_search(parser, script)
    add_execution(parser)
    return parser


def add_search(parser: FlagParser, script: str) -> None:
    """Add the flags that say what is searched and how."""
    add = parser.group("search")
    add(
        "--script",
        choices=SCRIPTS,
        default=script,
        help="Tune the flags of this script (default %(default)s).",
    )
    add(
        "--space",
        type=file_path,
        metavar="YAML",
        help="Read the search space from this file, whose format is described in tuning/space.py "
        "(default tuning/resnet50.yaml or tuning/transformer.yaml).",
    )
    add(
        "--trials",
        type=flags.count,
        default=20,
        metavar="N",
        help="Run this many trials, those of earlier starts included (default %(default)s).",
    )
    add(
        "--sampler",
        choices=SAMPLERS,
        default="tpe",
        help="Choose values by Optuna's tree-structured Parzen estimator (tpe), at random, or all "
        "of them one after the other (grid) (default %(default)s).",
    )
    add(
        "--pruner",
        choices=PRUNERS,
        default="median",
        help="End trials early by comparing them with the median of the others, by Hyperband, or "
        "never (default %(default)s).",
    )
    add(
        "--pruner_epochs",
        type=flags.natural,
        default=1,
        metavar="EPOCHS",
        help="Let the median pruner judge no trial before it has trained this long "
        "(default %(default)s).",
    )
    add(
        "--pruner_trials",
        type=flags.count,
        default=4,
        metavar="N",
        help="Let the median pruner judge no trial before this many are complete "
        "(default %(default)s).",
    )
    add(
        "--objective",
        default="accuracy",
        help="Search for the highest validation accuracy, or with time_to:0.9 for the fewest "
        "seconds until an accuracy of 0.9 (default %(default)s).",
    )
    add(
        "--val_fraction",
        type=flags.below_one,
        default=0.1,
        metavar="F",
        help="Hold out this fraction of the training set to measure the objective "
        "(default %(default)s).",
    )
    add(
        "--sweep_seed",
        type=flags.natural,
        default=0,
        metavar="N",
        help="Seed the sampler with this number (default %(default)s).",
    )


def add_execution(parser: FlagParser) -> None:
    """Add the flags that say where and how trials are run."""
    add = parser.group("execution")
    add(
        "--jobs",
        type=flags.count,
        default=1,
        metavar="N",
        help="Run this many trials at the same time, each on GPUs or cores of its own "
        "(default %(default)s).",
    )
    add(
        "--nproc",
        type=flags.count,
        default=1,
        metavar="N",
        help="Run each trial in this many processes, through torchrun (default %(default)s).",
    )
    add(
        "--storage",
        metavar="URL",
        help="Keep the trials in this storage of Optuna's, which several machines can share "
        "(default an SQLite file in the folder of the sweep).",
    )
    add(
        "--out",
        aliases=("--output", "--output_dir"),
        type=file_path,
        metavar="DIR",
        help="Write the sweep into this folder (default runs/tuning-resnet50 or "
        "runs/tuning-transformer).",
    )
    add(
        "--recipe_out",
        type=file_path,
        metavar="YAML",
        help="Write the recipe of the best trial to this file (default recipe.yaml in --out).",
    )


def main(
    argv: Sequence[str] | None = None,
    *,
    script: str = SCRIPTS[0],
    script_arguments: Sequence[str] = (),
    optimizer: str | None = None,
) -> None:
    """Run a sweep from the command line, on which the flags of the sweep and script are mixed.

    Args:
        argv: the command line; None is that of the process.
        script: default of --script.
        script_arguments: default arguments of the script; the command line overrides them.
        optimizer: of the trials, where neither the command line nor its recipe names one.

    Raises:
        InputError: a flag, the space or the storage is wrong.
        Interrupted: Ctrl-C or SIGTERM; the same command resumes the sweep.
    """
    parser = sweep_parser(script)
    args, rest = parser.parse_known_args(argv)
    name = args.script.removesuffix("_test.py")
    arguments, sweep_flags = [*script_arguments, *rest], parser.option_strings()
    target = TargetScript.read(args.script, arguments, sweep_flags=sweep_flags)
    if optimizer and "optimizer" not in target.given:
        arguments += ["--optimizer", optimizer]
        target = TargetScript.read(args.script, arguments, sweep_flags=sweep_flags)
    space_path = args.space or ROOT / "tuning" / f"{name}.yaml"
    searched = space.read_space(space_path, target.own_name)
    target.check_space(searched, source=f"--space {space_path}")
    trials = args.trials
    if args.sampler == "grid":
        trials = min(trials, space.grid_size(space_path, searched))
    out = args.out or Path("runs") / f"tuning-{name}"
    if "\n" in f"{out}{args.recipe_out}":
        raise InputError("--out, --recipe_out: the name has a line break; choose another one")
    config = SweepConfig(
        script=target,
        space_path=space_path,
        space=searched,
        objective=Objective.parse(args.objective),
        val_fraction=args.val_fraction,
        trials=trials,
        jobs=args.jobs,
        nproc=args.nproc,
        sampler=args.sampler,
        sampler_seed=args.sweep_seed,
        pruner=args.pruner,
        pruner_epochs=args.pruner_epochs,
        pruner_trials=args.pruner_trials,
        storage=args.storage or sqlite_url(out.resolve() / "study.db"),
        out=out,
        recipe_out=args.recipe_out or out / "recipe.yaml",
    )
    run_sweep(config)


# -------------------------------------------------------------------- the sweep


def run_sweep(config: SweepConfig) -> None:
    """Run all trials of a sweep that are not finished, then write its report.

    Raises:
        InputError: a flag, the space or the storage is wrong.
        Interrupted: Ctrl-C or SIGTERM; the same command resumes the sweep.
    """
    if not config.val_fraction:
        raise InputError(
            "--val_fraction 0: a sweep needs held-out training rows to compare trials; "
            "the test set is not for that"
        )
    gpus = torch.cuda.device_count()
    shared_arguments = trial_arguments(config, gpus)
    config.script.check(shared_arguments)
    slots = gpu_slots(config.jobs, config.nproc, gpus=gpus)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = open_study(config)
    num_resumed = enqueue_killed_trials(study)
    num_finished = len(finished_trials(study))
    sweep_time = create_sweep_time(config, config.trials - num_finished)

    def announce_time(row: dict[str, Any], elapsed: float) -> None:
        for line in sweep_time.epoch_done(row, elapsed):
            print(line, flush=True)

    runner = TrialRunner(
        script=config.script.file,
        arguments=shared_arguments,
        objective=config.objective,
        out=config.out.resolve(),
        nproc=config.nproc,
        gpu_slots=slots,
        epoch_done=announce_time,
    )
    print(
        f"{config.trials} trials of {config.script.file} in {config.out}: "
        f"{num_finished} finished, {num_resumed} resumed"
    )
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job ignores SIGINT
        signal.signal(number, signal.default_int_handler)

    def run_trial(trial: optuna.Trial) -> float:
        values = space.suggest(trial, config.space)
        return runner(trial, space.to_arguments(values, config.script.flag_names))

    Search(study, run_trial, config=config, sweep_time=sweep_time, stop=runner.stop).run()
    report.write_report(study, finished_trials(study), config)


def create_sweep_time(config: SweepConfig, trials: int) -> SweepTime:
    """Return the estimate of the time that so many trials take."""
    return SweepTime(
        epochs=config.script.flags({})["epochs"],
        trials=max(0, trials),
        jobs=config.jobs,
        ends_early=config.pruner != "none" or config.objective.target is not None,
        hint=f"for a shorter sweep: {SHORTER[config.script.file]}, or fewer --trials",
    )


def trial_arguments(config: SweepConfig, gpus: int) -> list[str]:
    """Return the arguments that all trials share, with those that the sweep sets."""
    arguments = [*config.script.arguments, "--val_fraction", str(config.val_fraction), "--no-test"]
    arguments += ["--eval_every", "1"]  # also where a recipe has another one
    if not gpus and "threads" not in config.script.given:
        cores = len(os.sched_getaffinity(0))
        arguments += ["--threads", str(max(1, cores // (config.jobs * config.nproc)))]
    return arguments


# -------------------------------------------------------------------- Optuna's study


def open_study(config: SweepConfig) -> optuna.Study:
    """Create the study in its storage, or load it to resume the sweep.

    Raises:
        InputError: the storage cannot be used, or holds a sweep whose trials cannot be compared
            with these.
    """
    config.out.mkdir(parents=True, exist_ok=True)
    try:
        study = optuna.create_study(
            study_name=config.script.file.removesuffix(".py"),
            storage=config.storage,
            direction=config.objective.direction,
            load_if_exists=True,
        )
    except Exception as error:  # its type depends on the database and its driver
        reason = first_line(error).replace(config.storage, without_password(config.storage))
        raise InputError(f"--storage {without_password(config.storage)}: {reason}") from None
    check_settings(study, config)
    # A resumed sweep needs another seed: the same one would sample the same values again.
    seed = config.sampler_seed + len(study.get_trials(deepcopy=False))
    study.sampler = create_sampler(config, seed)
    study.pruner = create_pruner(config)
    if config.sampler == "grid":
        axes = space.grid_values(config.space_path, config.space)
        for values in itertools.product(*axes.values()):
            study.enqueue_trial(dict(zip(axes, values)), skip_if_exists=True)
    return study


def sqlite_url(path: Path) -> str:
    """Return the URL of a database file.

    Raises:
        InputError: the path has a character that a URL of the installed SQLAlchemy cannot have.
    """
    with contextlib.suppress(UnicodeEncodeError):
        url = URL.create("sqlite", database=str(path)).render_as_string(hide_password=False)
        if make_url(url).database == str(path):
            return url
    raise InputError(
        f"--out {path.parent}: no URL of a database can have this name; choose another folder, "
        "of plain letters"
    )


def without_password(storage: str) -> str:
    """The URL of a storage for a message: its password, if it has one, is replaced by ***."""
    masked = re.sub(r"(//[^:/@]*:).*@", r"\1***@", storage)
    return re.sub(r"((password|passwd|pwd)=)[^&]*", r"\1***", masked, flags=re.IGNORECASE)


def check_settings(study: optuna.Study, config: SweepConfig) -> None:
    """Store the sweep's settings in the study, or compare them with those stored.

    Raises:
        InputError: the study holds trials with other settings.
    """
    settings = {f"--{name}": value for name, value in config.script.settings().items()}
    for name, distribution in config.space.items():
        settings[f"the space's {name}"] = distribution_to_json(distribution)
    settings |= {
        "--objective": config.objective.name,
        "--val_fraction": config.val_fraction,
        "--nproc": config.nproc,
    }
    stored = study.user_attrs.get("settings", settings)
    different = [
        name for name in sorted(stored.keys() | settings) if stored.get(name) != settings.get(name)
    ]
    if different:
        raise InputError(
            f"--out {config.out} holds a sweep with another {', '.join(different)}; "
            f"choose another folder"
        )
    study.set_user_attr("settings", settings)


def create_sampler(config: SweepConfig, seed: int) -> optuna.samplers.BaseSampler:
    """Return Optuna's sampler; with a grid all trials are enqueued, so any sampler does."""
    if config.sampler == "tpe":
        num_random = max(4, config.trials // 4)
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=num_random)
    return optuna.samplers.RandomSampler(seed)


def create_pruner(config: SweepConfig) -> optuna.pruners.BasePruner:
    """Return Optuna's pruner of --pruner."""
    if config.pruner == "median":
        return optuna.pruners.MedianPruner(
            n_startup_trials=config.pruner_trials, n_warmup_steps=config.pruner_epochs + 1
        )
    if config.pruner == "hyperband":
        return optuna.pruners.HyperbandPruner()
    return optuna.pruners.NopPruner()


def enqueue_killed_trials(study: optuna.Study) -> int:
    """Enqueue the trials that a killed sweep left running on this machine; return their number."""
    killed = [
        trial
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        if trial.user_attrs.get("host", socket.gethostname()) == socket.gethostname()
        and not is_process_alive(trial.user_attrs.get("pid", 0))
    ]
    for trial in killed:
        study.tell(trial.number, state=TrialState.FAIL)
        enqueue_again(study, trial)
    return len(killed)


def enqueue_again(study: optuna.Study, trial: FrozenTrial) -> None:
    """Enqueue a trial that resumes this one: the same values, folder and checkpoint."""
    attributes = {RESUMES: trial.number}
    if "folder" in trial.user_attrs:
        attributes["folder"] = trial.user_attrs["folder"]
    study.enqueue_trial(trial.params, user_attrs=attributes)


def is_process_alive(pid: int) -> bool:
    """Tell whether another process has this id; a restarted container may reuse our own."""
    if pid in (0, os.getpid()):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def finished_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Return the trials that have ended, without those that another trial resumes."""
    trials = study.get_trials(deepcopy=False)
    resumed = {trial.user_attrs[RESUMES] for trial in trials if RESUMES in trial.user_attrs}
    return [trial for trial in trials if trial.state.is_finished() and trial.number not in resumed]


# -------------------------------------------------------------------- running trials


@dataclass
class Search:
    """Runs the trials of a study, `jobs` at the same time.

    Optuna's own `study.optimize(n_jobs=...)` is not used: two of its threads may run the same
    enqueued trial.

    Attributes:
        study: where trials come from and results go.
        run_trial: runs one trial and returns its value.
        config: settings of the sweep.
        sweep_time: estimates the time left.
        stop: set when the sweep is interrupted; `run_trial` then ends.
    """

    study: optuna.Study
    run_trial: Callable[[optuna.Trial], float]
    config: SweepConfig = field(kw_only=True)
    sweep_time: SweepTime = field(kw_only=True)
    stop: threading.Event = field(kw_only=True)

    def __post_init__(self) -> None:
        self.study_lock = threading.Lock()

    def run(self) -> None:
        """Run trials until the study holds as many as asked for.

        Raises:
            Interrupted: Ctrl-C or SIGTERM; the trials that were running are enqueued again.
        """
        with concurrent.futures.ThreadPoolExecutor(self.config.jobs) as pool:
            workers = [pool.submit(self.work) for _ in range(self.config.jobs)]
            try:
                for worker in workers:
                    worker.result()
            except KeyboardInterrupt:
                self.stop.set()
                raise Interrupted(
                    f"interrupted; run the same command again to resume the sweep in "
                    f"{self.config.out}"
                ) from None

    def work(self) -> None:
        """Run one trial after the other, in one of the threads."""
        while not self.stop.is_set():
            with self.study_lock:
                running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
                # Other machines may share the study, so count what runs anywhere.
                if len(finished_trials(self.study)) + len(running) >= self.config.trials:
                    return
                trial = self.study.ask()
            state, value, start = TrialState.COMPLETE, None, time.monotonic()
            try:
                value = self.run_trial(trial)
            except optuna.TrialPruned:
                state = TrialState.PRUNED
            except TrialFailed as error:
                state = TrialState.FAIL
                trial.set_user_attr("error", str(error))
            except BaseException:
                self.stop.set()  # else the other threads would start further trials
                raise
            if state is not TrialState.FAIL:  # which may be over in seconds
                self.sweep_time.trial_ended(time.monotonic() - start)
            with self.study_lock:
                ended = self.study.tell(trial, value, state)
                if self.stop.is_set() or ended.user_attrs.get("error") == STOPPED:
                    enqueue_again(self.study, ended)
                else:
                    self.print_progress(ended)

    def print_progress(self, trial: FrozenTrial) -> None:
        """Print a trial's values and result, and an estimate of the time left."""
        finished, trials = len(finished_trials(self.study)), self.config.trials
        left = self.sweep_time.seconds_left(max(0, trials - finished))
        result = report.format_result(trial)
        if trial.state is TrialState.FAIL:
            result = f"failed: {trial.user_attrs.get('error', '')}"
        line = f"trial {finished} of {trials}: {report.format_params(trial.params)}: {result}"
        print(line if left is None else f"{line}; about {in_words(left)} left", flush=True)


if __name__ == "__main__":
    sys.exit(exit_code(main))
