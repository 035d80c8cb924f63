"""Search hyper-parameters on a fraction of the training set: each trial is an entry script in a process of its own.

python tuning/sweep.py --script resnet50_test.py --space tuning/resnet50.yaml --trials 20 --subset 0.1 --epoch 5
bash tuning/resnet50_tuning.sh --trials 40 --jobs 4              # the same with its defaults; four GPUs side by side
bash tuning/transformer_tuning.sh --sampler random --objective time_to:0.85 --dataset agnews

Flags that are not listed below go to the script. The objective is measured on rows held out of the training set, never on the test
set. A sweep that was killed goes on where it stopped when it is started again with the same --out; several machines can share one
through --storage. It ends with a table, results.csv, pictures, and a recipe that --recipe takes as it is.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.distributions import distribution_to_json
from optuna.trial import TrialState

import errors
from cli import flags
from errors import InputError, Interrupted
from tuning import report, space
from tuning.space import Space
from tuning.target_script import Script
from tuning.trials import ROOT, STOPPED, Objective, Runner, TrialFailed, slots

SAMPLERS, PRUNERS = ("tpe", "random", "grid"), ("median", "hyperband", "none")
SCRIPTS = ("resnet50_test.py", "transformer_test.py")


def parser(**defaults: Any) -> flags.Parser:
    """The flags of a sweep."""
    parser = flags.Parser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--script", choices=SCRIPTS, default=SCRIPTS[0], help="what is tuned (default %(default)s)")
    add(
        "--space",
        type=Path,
        metavar="YAML",
        help="where values come from: see space.py (default tuning/<script>.yaml)",
    )
    add(
        "--trials",
        type=flags.count,
        default=20,
        help="in all, those of an earlier start included (default %(default)s)",
    )
    add(
        "--sampler",
        choices=SAMPLERS,
        default="tpe",
        help="which values come next (default %(default)s)",
    )
    add(
        "--pruner",
        choices=PRUNERS,
        default="median",
        help="which runs are given up early (default %(default)s)",
    )
    add(
        "--pruner_epochs",
        type=flags.natural,
        default=1,
        metavar="N",
        help="of median: a run's before it judges it (default 1)",
    )
    add(
        "--pruner_trials",
        type=flags.count,
        default=4,
        metavar="N",
        help="of median: whole runs before it judges (default 4)",
    )
    add(
        "--objective",
        default="accuracy",
        help="validation accuracy, or time_to:0.9, the seconds to it (default %(default)s)",
    )
    add(
        "--val_fraction",
        type=flags.below_one,
        default=0.1,
        metavar="F",
        help="of the training rows, held out (default %(default)s)",
    )
    add(
        "--jobs",
        type=flags.count,
        default=1,
        help="trials at a time, each on GPUs or cores of its own (default %(default)s)",
    )
    add(
        "--nproc",
        type=flags.count,
        default=1,
        help="processes of a trial, through torchrun (default %(default)s)",
    )
    add(
        "--sweep_seed",
        type=flags.natural,
        default=0,
        metavar="N",
        help="of the sampler (default %(default)s)",
    )
    add(
        "--storage",
        metavar="URL",
        help="Optuna's, to be shared by machines (default sqlite in --out)",
    )
    add(
        "--out", type=Path, metavar="DIR", help="folder of the sweep (default runs/tuning-<script>)"
    )
    add(
        "--recipe_out",
        type=Path,
        metavar="YAML",
        help="where the recipe goes (default recipes/tuned_<script>.yaml)",
    )
    parser.set_defaults(**defaults)
    return parser


def make_study(
    args: argparse.Namespace, script: Script, searched: Space, objective: Objective
) -> optuna.Study:
    """The study in its storage, made or gone on with.

    Raises:
        InputError: the storage cannot be used, or holds a sweep whose trials do not compare with these.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    storage = args.storage or f"sqlite:///{args.out.resolve() / 'study.db'}"
    name = script.file.removesuffix(".py")
    try:
        study = optuna.create_study(
            study_name=name, storage=storage, direction=objective.direction, load_if_exists=True
        )
    except Exception as error:  # of the data base's driver, of its address
        raise InputError(f"--storage {storage}: {str(error).splitlines()[0]}") from None
    wanted = {f"--{name}": value for name, value in script.settings().items()}
    wanted |= {f"the space's {name}": distribution_to_json(of) for name, of in searched.items()}
    wanted |= {
        "--objective": args.objective,
        "--val_fraction": args.val_fraction,
        "--nproc": args.nproc,
    }
    if (held := study.user_attrs.setdefault("settings", wanted)) != wanted:
        names = ", ".join(
            sorted(name for name in held.keys() | wanted if held.get(name) != wanted.get(name))
        )
        raise InputError(
            f"--out {args.out}: holds a sweep with another {names}; choose another folder"
        )
    study.set_user_attr("settings", wanted)
    seed = args.sweep_seed + len(
        study.get_trials(deepcopy=False)
    )  # gone on with, the same one would draw the same values again
    tpe = optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(4, args.trials // 4))
    study.sampler = tpe if args.sampler == "tpe" else optuna.samplers.RandomSampler(seed)
    if args.sampler == "grid":
        axes = space.grid(args.space, searched)
        for values in itertools.product(*axes.values()):
            study.enqueue_trial(dict(zip(axes, values)), skip_if_exists=True)
    if args.pruner == "median":
        study.pruner = optuna.pruners.MedianPruner(
            n_startup_trials=args.pruner_trials, n_warmup_steps=args.pruner_epochs + 1
        )
    else:
        study.pruner = (
            optuna.pruners.HyperbandPruner()
            if args.pruner == "hyperband"
            else optuna.pruners.NopPruner()
        )
    return study


def take_up(study: optuna.Study) -> int:
    """Trials that a killed sweep left running on this machine go on from their checkpoints; returns how many."""
    left = []
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if trial.user_attrs.get("host", socket.gethostname()) == socket.gethostname() and not alive(
            trial.user_attrs.get("pid", 0)
        ):
            left.append(trial)
    for trial in left:
        study.tell(trial.number, state=TrialState.FAIL)
        put_back(study, trial)
    return len(left)


def put_back(study: optuna.Study, trial: optuna.Trial | optuna.trial.FrozenTrial) -> None:
    """Another trial goes on with this one's values, from its checkpoint."""
    kept = {"folder": trial.user_attrs["folder"]} if "folder" in trial.user_attrs else {}
    study.enqueue_trial(trial.params, user_attrs=kept | {"after": trial.number})


def alive(pid: int) -> bool:
    """Whether a process of this number runs, other than this one: a container may give the same number again."""
    if pid in (0, os.getpid()):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def finished(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """Trials that are over, but for those that another one goes on with."""
    trials = study.get_trials(deepcopy=False)
    gone_on = {trial.user_attrs["after"] for trial in trials if "after" in trial.user_attrs}
    return [trial for trial in trials if trial.state.is_finished() and trial.number not in gone_on]


def search(
    study: optuna.Study,
    one: Callable[[optuna.Trial], float],
    args: argparse.Namespace,
    before: int,
    stop: threading.Event,
) -> None:
    """Ask for trials, run and tell them, as many at a time as there are jobs. Optuna's own threads may take a waiting trial twice.

    Raises:
        Interrupted: Ctrl-C; the trials under way are put back.
    """
    one_at_a_time, start = threading.Lock(), time.monotonic()

    def worker() -> None:
        while not stop.is_set():
            with one_at_a_time:
                running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
                if (
                    len(finished(study)) + len(running) >= args.trials
                ):  # other machines may have begun some
                    return
                trial = study.ask()
            state, value = TrialState.COMPLETE, None
            try:
                value = one(trial)
            except optuna.TrialPruned:
                state = TrialState.PRUNED
            except TrialFailed as error:
                state = TrialState.FAIL
                trial.set_user_attr("error", str(error))
            except BaseException:
                stop.set()  # the others must not go on alone
                raise
            with one_at_a_time:
                done = study.tell(trial, value, state)
                if stop.is_set() or done.user_attrs.get("error") == STOPPED:
                    put_back(study, done)
                else:
                    tell_progress(study, done, args.trials, before, start)

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        workers = [pool.submit(worker) for _ in range(args.jobs)]
        try:
            for future in workers:
                future.result()
        except KeyboardInterrupt:
            stop.set()
            raise Interrupted(
                f"interrupted; the same command goes on with the sweep in {args.out}"
            ) from None


def tell_progress(
    study: optuna.Study, trial: optuna.trial.FrozenTrial, wanted: int, before: int, start: float
) -> None:
    """A line after each trial, with the time left."""
    over = len(finished(study))
    left = max(0.0, (time.monotonic() - start) / max(1, over - before) * (wanted - over))
    what = {
        TrialState.PRUNED: "given up",
        TrialState.FAIL: "failed: " + trial.user_attrs.get("error", ""),
    }
    result = what.get(trial.state) or f"{trial.value:.4f}"
    print(
        f"trial {over} of {wanted}: {report.show(trial.params)}: {result}; {left / 60:.1f} min left",
        flush=True,
    )


def run(args: argparse.Namespace, words: list[str]) -> None:
    """The sweep.

    Raises:
        InputError: a flag, the space or the storage is wrong.
        Interrupted: Ctrl-C; it goes on when started again.
    """
    name = args.script.removesuffix("_test.py")
    args.space = args.space or ROOT / "tuning" / f"{name}.yaml"
    args.out = args.out or Path("runs") / f"tuning-{name}"
    args.recipe_out = args.recipe_out or ROOT / "recipes" / f"tuned_{name}.yaml"
    objective = Objective.read(args.objective)
    if not args.val_fraction:
        raise InputError(
            "--val_fraction 0: a sweep needs rows to choose by; the test set is not for that"
        )
    script = Script.read(args.script, words)
    searched = space.read_space(args.space, script.names)
    if args.sampler == "grid":
        args.trials = min(args.trials, report.product(space.grid(args.space, searched)))
    gpus, cores = torch.cuda.device_count(), len(os.sched_getaffinity(0))
    fixed = [*words, "--val_fraction", str(args.val_fraction), "--no-test"]
    if not gpus and "threads" not in script.given:
        fixed += ["--threads", str(max(1, cores // (args.jobs * args.nproc)))]
    script.check(fixed)
    runner = Runner(
        args.script,
        fixed,
        objective,
        args.out.resolve(),
        args.nproc,
        slots(args.jobs, args.nproc, gpus),
    )
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = make_study(args, script, searched, objective)
    again, before = take_up(study), len(finished(study))
    print(
        f"{args.trials} trials of {args.script} in {args.out}, {before} of them done, {again} taken up again"
    )
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # a shell's background jobs start with SIGINT ignored
        signal.signal(number, signal.default_int_handler)

    def one(trial: optuna.Trial) -> float:
        return runner(trial, space.as_words(space.suggest(trial, searched), script.names))

    search(study, one, args, before, runner.stop)
    report.report(study, finished(study), args, script)


def main(argv: Sequence[str] | None = None, **defaults: Any) -> None:
    """Flags of the sweep and of the script, mixed; `defaults` of either kind."""
    own = parser(**{name: value for name, value in defaults.items() if name != "words"})
    words = list(sys.argv[1:] if argv is None else argv)
    args, rest = own.parse_known_args(words)
    run(args, [*defaults.get("words", []), *rest])


if __name__ == "__main__":
    sys.exit(errors.exit_code(main))
