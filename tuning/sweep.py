"""Search hyper-parameters on a fraction of the training set, an entry script's process per trial.

bash tuning/resnet50_tuning.sh --trials 40 --jobs 4     # four trials at a time, on a GPU each
bash tuning/transformer_tuning.sh --sampler random --dataset agnews
python -m tuning.sweep --script transformer_test.py --space my_space.yaml --epoch 8

Flags that are not listed below are passed to the script. Accuracy is measured on rows held out
of the training set, never on the test set. A sweep that was killed resumes when the same command is
run again with the same --out. It ends with a table, trials.csv, pictures, and a recipe for the
script's --recipe.
"""

import importlib.metadata
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cli import flag_parser
from cli.flag_parser import Choice, FlagParser, file_path, number
from errors import InputError, exit_code
from tuning.config import SweepConfig
from tuning.target_script import TargetScript

SCRIPTS = ("resnet50_test.py", "transformer_test.py")
HELD_OUT = number(float, 0, 0.999, open_low=True)  # the type of --val_fraction
TRIALS = 20
TRIAL_ARGUMENTS = ("--subset", "0.1", "--epoch", "5")  # which the command line overrides


def sweep_parser() -> FlagParser:
    """Return the parser of a sweep's own flags."""
    parser = FlagParser(__doc__, foreign={"--output": "--out", "--output_dir": "--out"})
    add = parser.group("sweep")
    count = partial(add, metavar="N")
    add("--script", Choice(SCRIPTS), SCRIPTS[0], "entry script")
    add("--space", file_path, None, "search space (default tuning/*.yaml)", metavar="YAML")
    default = f"(default {TRIALS}; of a grid all)"
    count("--trials", flag_parser.count, None, f"trials, earlier starts included {default}")
    samplers = Choice(["tpe", "random", "grid"])
    add("--sampler", samplers, "tpe", "Optuna's sampler; grid takes all choices in turn")
    add("--pruner", Choice(["median", "none"]), "median", "Optuna's end of hopeless trials")
    add("--val_fraction", HELD_OUT, 0.1, "held-out training rows", metavar="F")
    count("--sweep_seed", flag_parser.natural, 0, "seed of the sampler")
    count("--seeds", flag_parser.count, 4, "runs of the defaults and each of the best two trials")
    count("--jobs", flag_parser.count, 1, "trials at a time, each on a GPU or core")
    count("--nproc", flag_parser.count, 1, "processes of each trial")
    add("--out", file_path, None, "folder of the sweep (default runs/tuning-SCRIPT)", metavar="DIR")
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
    from tuning import race, results, search, space  # import Optuna

    name = args.script.removesuffix("_test.py")
    arguments, sweep_flags = [*TRIAL_ARGUMENTS, *rest], parser.names()
    script = TargetScript.read(args.script, arguments, sweep_flags=sweep_flags)
    path = args.space or Path(__file__).parent / f"{name}.yaml"
    searched = space.read_space(path, script, is_usual=not args.space)
    trials = args.trials or TRIALS
    if args.sampler == "grid":
        whole = math.prod(map(len, space.grid(searched).values()))
        trials = min(args.trials or whole, whole)
    read = {"script": script, "space": searched, "trials": trials}
    read |= {"out": args.out or Path("runs", f"tuning-{name}")}
    config = SweepConfig(**vars(args) | read)
    defaults = space.usual_values(searched, script) if args.sampler != "grid" else None
    study = search.run_sweep(config, first=[defaults] if defaults else [])
    ranking = results.rank_trials(search.finished_trials(study))
    results.write_trials(study, ranking, config)
    best = [trial for trial in results.complete(ranking) if trial.params != defaults]
    arms, lost = race.race_defaults(config, best)
    results.write_winner(ranking, config, arms=arms, lost=lost)


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
