"""Reading and checking flags: command line, recipe, checkpoint.

    parser = flags.shared_parser(__doc__, datasets=["cifar10", "mnist"], optimizers=OPTIMIZERS)
    args, checkpoint = parse(parser, script="resnet50_test")

A value comes from the command line, else from --recipe, else from the checkpoint of --resume, else
from the default. --warmup and --nesterov of the checkpoint that are the defaults there follow the
flags of the resume, as defaults do.
"""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from backends import device, torch_compat
from cli import compatibility
from cli.flag_parser import Choice, Flag, Scope, ScriptParser, setting, switch
from cli.yaml_file import read_yaml
from distributed.worker import launcher_id
from distributed.world import under_torchrun
from errors import InputError, did_you_mean, excerpt, refused_as
from input_pipeline import own_data
from models.hugging_face import HF
from optimizers.schedules import Schedule
from training import checkpoint, run_folder
from training.checkpoint import Checkpoint

YES_OR_NO = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
INFERENCE = ("evaluate", "predict", "export")  # flags that use a trained model
RECIPES = Path(__file__).resolve().parents[1] / "recipes"
WARMUP_SHARE, LONGEST_WARMUP = 0.1, 5.0  # of the run, and epochs, where --warmup is not given


# -------------------------------------------------------------------- reading them


def parse(
    parser: ScriptParser, script: str, arguments: Sequence[str] | None = None
) -> tuple[Namespace, Checkpoint | None]:
    """The flags, and the checkpoint to go on from or None; warns of flags without effect.

    Args:
        arguments: the command line; None is this process's own.
    Raises:
        InputError: a flag, the recipe or the checkpoint is wrong.
    """
    given = parser.given(sys.argv[1:] if arguments is None else arguments)
    values = parser.defaults()
    recipe: dict[str, Any] = {}
    if path := given.get("recipe"):
        recipe = parser.given(recipe_arguments(path, parser))
    chosen = parser.merged(parser.merged(values, recipe), given)
    values |= parser.pretrained if begins_with_weights(chosen) else {}
    values |= parser.frozen if chosen["freeze"] else {}
    command_line = Namespace(**values | {"out": recipe.get("out")} | given)
    if command_line.resume == "auto":  # all ranks find the same, as none has written yet
        if not (out := command_line.out):
            raise InputError("--resume auto: give --out DIR, the folder of the run to go on with")
        going_on = out if checkpoint.latest_files(Path(out)) else None
        given["resume"] = command_line.resume = going_on
    found, path = None, resume_path(command_line, script)
    if path is not None:
        source = "--resume" if command_line.checkpoint is None else "--checkpoint"
        found = checkpoint.load(path, script, flag=source)
        if found.warning:
            print_once(found.warning)
        values |= restored_flags(found.flags, parser)
        if uses_trained_model(command_line) and not device.is_here(values["device"]):
            values |= {"device": "auto", "precision": "auto"}
    values = parser.merged(values, recipe)
    args = Namespace(**parser.merged(values, given))
    for name, value in computed_defaults(vars(args), parser).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for flag in parser.flags.values():
        value, choice = getattr(args, flag.dest), flag.type
        if isinstance(choice, Choice) and isinstance(value, str) and value not in choice.names:
            if (now := choice.former.get(value)) is None:
                there_is = ", ".join(choice.names)
                problem = f"{flag.name} {value}: the checkpoint has it"
                raise InputError(f"{problem}; now there is {there_is}")
            setattr(args, flag.dest, now)
            print_once(f"{flag.name} {value} is {now} now")
    parser.complete(args)
    if path is not None and args.out is None:
        args.out = str(path if path.is_dir() else path.parent)
    validate(args, script, resumed=found is not None)
    if found is not None:
        if args.lr != found.flags["lr"]:  # the user's own remedy replaces those so far
            found.flags["lr"] *= found.progress["lr_factor"]
            found.progress |= {"rollbacks": 0, "lr_factor": 1.0}
        found.changed = changed_flags(found.flags, args, parser)
    if not uses_trained_model(args):
        run_folder.check_overwritten(args.out, found)
        for line in parser.unused(given, args):
            print_once(f"warning: {line}")
        if args.lr_schedule != "constant" and create_lr_schedule(args).is_constant():
            how_long = f"in the {args.epochs} epochs of this run"
            print_once(f"warning: --lr_schedule {args.lr_schedule} changes no rate {how_long}")
    return args, found


def print_once(line: str) -> None:
    """Print a line on stderr; of several processes one speaks for all."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


def restored_flags(flags: Mapping[str, Any], parser: ScriptParser) -> dict[str, Any]:
    """The flags of a checkpoint that another start of its script takes over.

    Known data sets may lie elsewhere on this machine, where DATA_DIR says so.
    """
    scopes = [Scope.RESULT, Scope.HOW, Scope.NODE]
    if not os.environ.get("DATA_DIR") or flags["dataset"] in own_data.DATASETS:
        scopes.append(Scope.PLACE)
    restored = {name: flags[name] for name in parser.of_scope(*scopes) if name in flags}
    for flag in parser.settings():  # without those that there are no more
        known = {name for part in flag.parts.values() for name in part}
        given = restored.get(flag.dest, {})
        restored[flag.dest] = {name: value for name, value in given.items() if name in known}
    usual = computed_defaults(flags, parser)
    return restored | {
        name: None for name in ("warmup", "nesterov") if restored.get(name) == usual[name]
    }


def changed_flags(
    before: Mapping[str, Any], args: Namespace, parser: ScriptParser
) -> dict[str, list[Any]]:
    """The flags in which a run that goes on differs from its checkpoint, as [before, now].

    Args:
        before: the values of the checkpoint.
    """
    changed = {}
    for name in parser.of_scope(Scope.RESULT, Scope.PLACE):
        flag = parser.flags[name]
        pair = [flag.default if before.get(name) is None else before[name], getattr(args, name)]
        if flag.scope is Scope.PLACE:
            if args.dataset not in own_data.DATASETS:
                continue  # the same data in another place
            pair = list(map(os.path.abspath, pair))
        if pair[0] != pair[1] and flag.has_effect(args):
            changed[flag.name] = pair
    return changed


def computed_defaults(chosen: Mapping[str, Any], parser: ScriptParser) -> dict[str, Any]:
    """The defaults that depend on other flags, by name.

    Args:
        chosen: the flags of the run, of which these may be None.
    """
    optimizer = parser.optimizers[chosen["optimizer"]]
    rises_by_itself = chosen["lr_schedule"] in ("onecycle", "cyclic")
    warmup = 0.0 if rises_by_itself else min(WARMUP_SHARE * chosen["epochs"], LONGEST_WARMUP)
    lr = optimizer.lr
    if begins_with_weights(chosen):
        lr = parser.pretrained_lr.get(chosen["optimizer"], lr / 10)
    return {
        "lr": lr,
        "weight_decay": optimizer.weight_decay,
        "momentum": optimizer.momentum,
        "nesterov": optimizer.nesterov and chosen["momentum"] != 0,
        "warmup": warmup,
        "val_fraction": 0.0,
    }


def begins_with_weights(flags: Mapping[str, Any]) -> bool:
    """Whether a network that was trained before is trained on."""
    return flags["weights"] is not None or str(flags["arch"]).startswith(HF)


def uses_trained_model(args: Namespace) -> bool:
    """Whether this invocation evaluates, predicts or exports, and does not train."""
    return any(getattr(args, flag) for flag in INFERENCE)


def resume_path(args: Namespace, script: str) -> Path | None:
    """The checkpoint or run folder to go on from, or to use for inference; None for a new run.

    It is that of --checkpoint, else of --resume; a job whose processes torchrun starts anew, since
    one has failed or a node has joined, goes on with its own run by itself.

    Raises:
        InputError: the two flags contradict each other, or the run has no such checkpoint.
    """
    if not uses_trained_model(args):
        folder = interrupted_run(args, script)
        if folder is not None and checkpoint.latest_files(folder):
            return folder
    if args.checkpoint is None:
        return None if args.resume is None else run_path(args, script)
    if args.resume is None and not uses_trained_model(args):
        raise InputError(
            f"--checkpoint {args.checkpoint}: nothing is to be done with it; add --evaluate, "
            "--predict or --export, or --resume to go on training"
        )
    if args.checkpoint not in ("best", "last"):
        if args.resume is not None:
            raise InputError(
                f"--checkpoint {args.checkpoint}: with --resume it is best or last; to use a file, "
                "give it to one of the two flags and leave the other one out"
            )
        return Path(args.checkpoint)
    run = run_path(args, script)
    folder = run.parent if run.suffix == ".pt" else run
    return folder if args.checkpoint == "last" else folder / "best.pt"


def interrupted_run(args: Namespace, script: str) -> Path | None:
    """The run folder that this job wrote to before torchrun restarted it.

    None where it had not come so far: the restarted job then does what the first start did.
    """
    job, given = launcher_id(), args.out or args.resume
    if not given:
        return run_folder.latest_run(script, launcher=job) if job else None
    folder = Path(given).parent if Path(given).is_file() else Path(given)
    return folder if run_folder.is_run_of(job, folder) else None


def run_path(args: Namespace, script: str) -> Path:
    """What --resume names: its PATH, else --out, else the newest run.

    Raises:
        InputError: there is no run.
    """
    folder = args.resume or args.out or run_folder.latest_run(script)
    if folder is None:
        raise InputError(
            f"no run of {script} with a checkpoint below runs/; name its folder with "
            f"{'--resume' if args.checkpoint is None else '--checkpoint'} PATH"
        )
    return Path(folder)


def recipe_path(recipe: str) -> Path:
    """The file of --recipe, which is a path or the name of one of this project's recipes.

    A file of that path wins over a recipe of that name.

    Raises:
        InputError: there is neither.
    """
    for path in (Path(recipe), RECIPES / f"{recipe.removesuffix('.yaml')}.yaml"):
        if path.is_file():
            return path
    names = sorted(each.stem for each in RECIPES.glob("*.yaml"))
    raise InputError(
        f"--recipe {recipe}: this is no file; give the path of a YAML file, or one of the recipes "
        f"{', '.join(names)}{did_you_mean(Path(recipe).stem, names)}"
    )


def recipe_arguments(
    recipe: str, parser: ScriptParser, *, without: Collection[Flag] = ()
) -> list[str]:
    """A recipe as command-line arguments, so that it is checked like them.

    Args:
        recipe: a YAML file that maps names of flags to values, or the name of one of this
            project's recipes.
        without: flags to leave out.
    Raises:
        InputError: unreadable, not a mapping, or a flag is wrong.
    """
    source = f"--recipe {recipe}"
    entries = read_yaml(recipe_path(recipe), source, as_text=True)
    if not isinstance(entries, dict):
        raise InputError(f"{source}: must hold lines of 'flag: value'")
    arguments: list[str] = []
    named: dict[str, str] = {}  # by the attribute of a flag, or our name of a setting
    try:
        for key, value in entries.items():
            name = str(key)
            words = flag_arguments(name, value, parser)
            flag = parser.find(name.partition(".")[0])
            own = parser.own_name(f"--{name}")
            if flag and "." not in name:
                first = named.setdefault(own if own.endswith("=") else flag.dest, name)
                if first != name:
                    raise InputError(f"{first} and {name} are one flag; give one of them")
            if flag not in without:
                arguments += words
        parser.given(arguments)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    return arguments


def flag_arguments(name: str, value: Any, parser: ScriptParser) -> list[str]:
    """The command-line arguments for a line of a recipe.

    Args:
        name: any spelling of a flag, without dashes; opt_args.rank is a setting of --opt_args.
        value: a word, or several in a list, or the settings of a part; that of a flag without a
            value is true or false, yes or no, on or off.
    Raises:
        InputError: the flag may not be in a recipe, or the value is of another kind.
    """
    name, _, key = name.partition(".")
    flag = parser.find(name)
    if flag is not None and flag.scope is Scope.START:
        raise InputError(f"{name}: a recipe cannot hold this flag; give it on the command line")
    if key:
        value = {key: value}
    if isinstance(value, dict) and flag is not None and flag.type is not setting:
        return [f"--{name}", json.dumps(value)]
    if isinstance(value, dict | list):
        values = value.values() if isinstance(value, dict) else value
        if any(isinstance(each, dict | list) for each in values):
            raise InputError(f"--{name}: {excerpt(value)} is neither a value nor a list of values")
        keys = [f"{key}=" for key in value] if isinstance(value, dict) else [""] * len(value)
        return [f"--{name}", *(f"{key}{each}" for key, each in zip(keys, values))]
    word = str(value).lower()
    stands_for = parser.own_name(f"--{name}")[2:]
    is_choice = stands_for.count("=") == 1  # as ngd is optimizer=ngd
    is_switch = word in ("true", "false") or (flag is not None and flag.type is switch)
    if word in YES_OR_NO and (is_switch or is_choice):
        if is_choice and not YES_OR_NO[word]:
            instead = stands_for.partition("=")[0]
            raise InputError(
                f"{name}: {value} does not say which {instead} instead; give {instead}: VALUE"
            )
        return [f"--{name}" if YES_OR_NO[word] else f"--no-{name}"]
    return [f"--{name}", str(value)]


# -------------------------------------------------------------------- checking them


def validate(args: Namespace, script: str, resumed: bool) -> None:
    """Check what a single flag cannot tell.

    Raises:
        InputError: flags are not supported together, or something that they need is missing.
    """
    if args.distributed and not under_torchrun():
        raise InputError(f"--distributed needs torchrun: bash run_distributed.sh {script}.py ...")
    used = [flag for flag in INFERENCE if getattr(args, flag)]
    if len(used) > 1:
        raise InputError(
            f"--{used[0]} and --{used[1]}: one run of the script does one of them; run it once "
            "for each"
        )
    if used and not resumed:
        raise InputError(
            f"--{used[0]} needs a trained model: add --checkpoint with best, last, a run folder "
            "or a .pt file (or --resume PATH)"
        )
    if args.predict_out and not args.predict:
        raise InputError("--predict_out needs something to classify: add --predict PATH")
    if args.export and (reason := torch_compat.unavailable_reason("export")):
        raise InputError(
            f"--export {reason}: export from the stack of requirements.txt, "
            "which reads this run as well"
        )
    if args.stop_at > 1 and args.best_by != "loss":
        raise InputError(f"--stop_at {args.stop_at:g}: give a share of at most 1, such as 0.9")
    if args.dataset not in own_data.DATASETS:  # others may have a validation set: see load_data
        check_validation_set(args, has_val=bool(args.val_fraction))
    if not uses_trained_model(args):
        compatibility.check(args)
    create_lr_schedule(args)


def create_lr_schedule(args: Namespace) -> Schedule:
    """The learning rate over the run, as a multiple of --lr."""
    with refused_as("--lr_args or --warmup"):
        return Schedule(
            args.lr_schedule,
            args.epochs,
            warmup=args.warmup,
            gamma=args.gamma,
            milestones=args.milestones,
            **args.lr_args,
        )


def check_validation_set(args: Namespace, has_val: bool) -> None:
    """Check that there is a validation set where the flags need one.

    Raises:
        InputError: there is none.
    """
    if not has_val and not args.test:
        raise InputError(
            "--no-test chooses the best epoch by held-out rows of the training set: give "
            "--val_fraction above 0"
        )
