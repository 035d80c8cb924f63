"""An honest race on your own data: which optimizer, flag or recipe is ahead, and at what cost.

python -m tuning.compare resnet50_test.py --dataset digits --optimizers sgd adamw ngd --minutes 10
python -m tuning.compare transformer_test.py --vary label_smoothing=0,0.1 --seeds 5 --jobs 4
python -m tuning.compare resnet50_test.py --vary recipe=fast94,my_flags.yaml --out races/recipes
python -m tuning.compare transformer_test.py --vary mixup=none,mixup --dataset headlines --folds 5

Each arm of the race gets the same number of trials, with learning rates around its own, on rows
held out of the training set. Its best rate is then trained in full with every seed, and evaluated
on the test set once; or, with --folds, on each fold of the training set by a run that is trained on
the other folds. Flags that are not listed below go to the script in all runs. A race that was
killed goes on when the same command is given again. It ends with verdict.md, verdict.png,
report.html, and recipe.yaml of the winner.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cli import flag_parser, options
from cli.flag_parser import Choice, FlagParser, file_path
from errors import InputError, exit_code
from input_pipeline import own_data
from tuning.config import Arm
from tuning.sweep import HELD_OUT, SCRIPTS, check_optuna
from tuning.target_script import TargetScript

OF_DATA = "epochs dataset data_dir label_column label_separator group_column test_views".split()
IN_COMMON = ("epochs", "seed", "dataset", "data_dir", "test_views")  # of all runs of a race


def compare_parser() -> FlagParser:
    """Return the parser of a race's own flags."""
    usage = "SCRIPT (--optimizers NAME... | --vary FLAG=A,B) [flags]"
    parser = FlagParser(__doc__, usage, foreign={"--output": "--out", "--output_dir": "--out"})
    add = parser.group("race")
    number = partial(add, metavar="N")
    add("script", Choice(SCRIPTS), None, "entry script", metavar="SCRIPT")
    words = "short form of --vary optimizer=A,B; MODULE:CLASS@RATE is yours, searched around RATE"
    add("--optimizers", str, None, words, nargs="+", metavar="NAME")
    words = "flag, or recipe, and its value in each arm"
    add("--vary", str, None, words, metavar="FLAG=A,B", action="append")
    seeds = flag_parser.number(int, 1, 1000)
    number("--seeds", seeds, None, "seeds of the runs in full (default 3)")
    words = "folds of the training set, in place of seeds and test set"
    number("--folds", flag_parser.number(int, 2), 0, words)
    number("--minutes", flag_parser.positive, 30.0, "time, for which trials and epochs are chosen")
    number("--val_fraction", HELD_OUT, 0.2, "held-out share of the training rows")
    number("--jobs", flag_parser.count, 1, "runs at a time, each on a GPU or core")
    number("--nproc", flag_parser.count, 1, "processes of each run")
    add("--out", file_path, None, "folder of the race (default races/SCRIPT-FLAG)", metavar="DIR")
    return parser


def read_arms(
    shared: TargetScript, arguments: Sequence[str], *, flag: str, values: Sequence[str]
) -> list[Arm]:
    """Return an arm for each value of the flag that differs.

    Args:
        shared: the script with the flags that all arms share.
        arguments: these flags.
        flag: any spelling of the flag, without dashes; or recipe.
        values: its value in each arm.

    Raises:
        InputError: a flag or value is wrong, or the arms cannot be compared.
    """
    parser, common = shared.parser, shared.flags({})
    meant = parser.own_name(f"--{flag}")
    if "=" in meant and not meant.endswith("="):  # a value of another flag, not a setting
        meant = meant.replace("=", " ")
        raise InputError(
            f"--vary {flag}: stands for {meant}; write --vary {meant.split()[0][2:]}=..."
        )
    name = "recipe" if flag in ("recipe", "c") else shared.own_name(flag)
    if name == "lr":
        raise InputError("--vary lr: the race searches the rate of each arm; vary another flag")
    if name in IN_COMMON:
        raise InputError(f"--vary {name}: all runs of a race have the same; vary another flag")
    if len(values) < 2 or not all(values):
        raise InputError(f"--vary {name}={','.join(values)}: give two values or more, as in A,B")
    own = {"recipe": "recipe", "optimizer": "lr"}.get(name, "seed")
    if taken := parser.given(arguments).keys() & {"seed", own}:
        raise InputError(f"--{taken.pop()}: each run of the race has its own; leave it out")
    arms: list[Arm] = []
    for value in values:
        words, own_rate = ["--recipe", value, *arguments], ""
        if name == "optimizer":
            value, _, own_rate = value.partition("@")
        if name != "recipe":
            varied = parser.find(name.partition(".")[0])
            is_list = varied is not None and varied.nargs and " " in value  # as of --betas 0.9 0.99
            several = value.split() if is_list else value
            words = [*arguments, *shared.to_arguments({name: several})]
            words += ["--lr", own_rate] if own_rate else []
        script = TargetScript.read(shared.file, words)
        chosen = script.flags({})
        usual = options.computed_defaults(chosen, parser)["lr"]
        is_own = name == "optimizer" and value != common["optimizer"] and not own_rate
        rate = usual if is_own else chosen["lr"] or usual  # a recipe's is of its own optimizer
        for each in OF_DATA:
            if arms and not are_same(each, chosen, arms[0].script.flags({})):
                raise InputError(f"the arms differ in {each}; give --{each} for all of them")
        label = {"recipe": Path(value).stem, "optimizer": value}.get(name, f"{name}={value}")
        label = re.sub(r"[^\w.+=-]+", "_", label)
        copies = sum(arm.name.partition("#")[0] == label for arm in arms)
        arms.append(Arm(f"{label}#{copies + 1}" if copies else label, script, rate))
    return arms


def are_same(name: str, *flags: Mapping[str, Any]) -> bool:
    """Whether a flag of arms has one value, or none of their scripts has it."""
    values = [each.get(name) for each in flags]
    return len({*(map(os.path.abspath, values) if name == "data_dir" else values)}) == 1


def check_data(script: TargetScript, *, in_folds: bool) -> None:
    """Raise InputError where the data lacks what a race needs, or has what folds do not."""
    data_dir, splits = script.flags({})["data_dir"], script.own_splits()
    if in_folds and splits is not own_data.SPLIT_NAMES and "val" in splits:
        raise InputError(f"--folds: {data_dir} has a validation set; make it a part of train")
    if not in_folds and "test" not in splits:
        problem = "has no test set, which a race without --folds needs"
        is_there = Path(data_dir).exists()
        raise InputError(f"--data_dir {data_dir}: {problem if is_there else 'no such folder'}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run a race with flags of its own and of the script, by default those of this process.

    Raises:
        InputError: a flag is wrong, the race does not fit into its time, or a run failed.
        Interrupted: Ctrl-C or SIGTERM; the same command goes on.
    """
    parser = compare_parser()
    args, rest = parser.parse_known_args(parser.translate(sys.argv[1:] if argv is None else argv))
    check_optuna()
    from tuning import race  # imports Optuna

    if (args.optimizers is None) == (args.vary is None):
        raise InputError("give either --optimizers sgd adamw or --vary FLAG=A,B")
    if args.vary and len(args.vary) > 1:
        raise InputError("--vary is given twice; arms differ in one flag, or in whole recipes")
    if args.folds and args.seeds:
        raise InputError("--folds and --seeds: each fold has a seed of its own; give one of them")
    args.seeds = args.folds or args.seeds or 3
    (varied,) = args.vary or [f"optimizer={','.join(args.optimizers)}"]
    flag, _, values = varied.partition("=")
    script = TargetScript.read(args.script, rest, sweep_flags=parser.names())
    arms = read_arms(script, rest, flag=flag.lstrip("-"), values=values.split(","))
    for arm in arms:  # of which recipes may name the data
        check_data(arm.script, in_folds=bool(args.folds))
    out = args.out or Path("races", f"{script.file.removesuffix('_test.py')}-{flag.lstrip('-')}")
    read = {"script": script, "arms": arms, "out": out}
    own = {name: value for name, value in vars(args).items() if name not in ("optimizers", "vary")}
    race.run_race(race.RaceConfig(**own | read))


if __name__ == "__main__":
    sys.exit(exit_code(main))
