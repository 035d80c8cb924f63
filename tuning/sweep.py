"""Search hyper-parameters on a fraction of the training set, an entry script's process per trial.

bash tuning/resnet50_tuning.sh --trials 40 --jobs 4     # four trials at a time, on a GPU each
bash tuning/transformer_tuning.sh --sampler random --objective time_to:0.85 --dataset agnews
python -m tuning.sweep --script transformer_test.py --space my_space.yaml --epoch 8

Flags that are not listed below are passed to the script. The objective is measured on rows held out
of the training set, never on the test set. A sweep that was killed resumes when the same command is
run again with the same --out. It ends with a table, trials.csv, pictures, and a recipe for the
script's --recipe.
"""

from __future__ import annotations

import importlib.metadata
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cli import flags
from cli.flag_parser import Choice, FlagParser, file_path
from errors import InputError, exit_code
from tuning.config import Objective, SweepConfig
from tuning.target_script import TargetScript

SCRIPTS = ("resnet50_test.py", "transformer_test.py")
TRIALS = 20
TRIAL_ARGUMENTS = ("--subset", "0.1", "--epoch", "5")  # which the command line overrides


def sweep_parser() -> FlagParser:
    """Return the parser of a sweep's own flags."""
    parser = FlagParser(__doc__, foreign={"--output": "--out", "--output_dir": "--out"})
    add = parser.group("sweep")
    count = partial(add, type=flags.count, metavar="N")
    natural = partial(add, type=flags.natural, metavar="N")
    share = partial(add, type=flags.below_one, metavar="F")
    help_of_script = "Entry script (default %(default)s)."
    add("--script", type=Choice(SCRIPTS), default=SCRIPTS[0], help=help_of_script)
    add("--space", type=file_path, metavar="YAML", help="Search space (default tuning/*.yaml).")
    count("--trials", help=f"Trials, earlier starts included (default {TRIALS}; of a grid all).")
    samplers, pruners = ["tpe", "random", "grid"], ["median", "none"]
    help_of_sampler = "Optuna's sampler; grid is all choices in turn (default %(default)s)."
    add("--sampler", type=Choice(samplers), default="tpe", help=help_of_sampler)
    help_of_pruner = "Optuna's pruner, which ends hopeless trials early (default %(default)s)."
    add("--pruner", type=Choice(pruners), default="median", help=help_of_pruner)
    help_of_objective = "accuracy, or time_to:0.9, the seconds to reach it (default %(default)s)."
    add("--objective", default="accuracy", help=help_of_objective)
    share("--val_fraction", default=0.1, help="Held-out training rows (default %(default)s).")
    natural("--sweep_seed", default=0, help="Seed of the sampler (default %(default)s).")
    count("--jobs", default=1, help="Trials at a time, each on a GPU or core (%(default)s).")
    count("--nproc", default=1, help="Processes of each trial (default %(default)s).")
    help_of_out = "Folder of the sweep (default runs/tuning-SCRIPT)."
    add("--out", type=file_path, metavar="DIR", help=help_of_out)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run a sweep with flags of its own and of the script, by default those of this process.

    Raises:
        InputError: Optuna is missing, or a flag or the space is wrong.
        Interrupted: Ctrl-C or SIGTERM; the same command resumes the sweep.
    """
    parser = sweep_parser()
    args, rest = parser.parse_known_args(parser.translate(sys.argv[1:] if argv is None else argv))
    check_optuna()
    from tuning import results, search, space  # import Optuna

    name = args.script.removesuffix("_test.py")
    arguments, sweep_flags = [*TRIAL_ARGUMENTS, *rest], parser.names()
    script = TargetScript.read(args.script, arguments, sweep_flags=sweep_flags)
    if args.script == SCRIPTS[0] and not args.space and "optimizer" not in script.given:
        script = TargetScript.read(args.script, [*arguments, "--optimizer", "sgd"])
    path = args.space or Path(__file__).parent / f"{name}.yaml"
    searched, trials = space.read_space(path, script), args.trials or TRIALS
    if args.sampler == "grid":
        whole = math.prod(map(len, space.grid(searched).values()))
        trials = min(args.trials or whole, whole)
    if not args.val_fraction:
        raise InputError("--val_fraction 0: a sweep needs held-out rows to compare trials by")
    read = {"script": script, "space": searched, "objective": Objective.parse(args.objective)}
    read |= {"trials": trials, "out": args.out or Path("runs", f"tuning-{name}")}
    config = SweepConfig(**vars(args) | read)
    study = search.run_sweep(config)
    results.write_results(study, search.finished_trials(study), config)


def check_optuna() -> None:
    """Refuse a sweep where its library is not installed.

    Raises:
        InputError: Optuna is missing or too old.
    """
    try:
        version = importlib.metadata.version("optuna")
    except importlib.metadata.PackageNotFoundError:
        version = "0"
    if int(version.partition(".")[0]) < 5:
        raise InputError(f"a sweep needs Optuna: {sys.executable} -m pip install 'optuna>=5'")


if __name__ == "__main__":
    sys.exit(exit_code(main))
