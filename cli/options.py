"""Reading and checking flags: command line, recipe, checkpoint.

    parser = script_parser(__doc__, ImageSettings, learning_rates={"sgd": 0.1, ...})
    settings, checkpoint = parse(parser, script="resnet50_test")

A value comes from the command line, else from --recipe, else from the checkpoint of --resume, else
from the default. --warmup and --nesterov of the checkpoint that are the defaults there follow the
flags of the resume, as defaults do.
"""

import json
import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from backends import device, torch_compat
from cli import compatibility
from cli.flag_parser import Choice, Flag, Scope, ScriptParser, setting, switch
from cli.optimizers import optimizer_choice
from cli.settings import S, Settings, begins_with_weights
from cli.yaml_file import read_yaml
from distributed.worker import launcher_id
from distributed.world import under_torchrun
from errors import InputError, did_you_mean, excerpt, refused_as
from input_pipeline import hugging_face_data, own_data
from models import own_parts
from models.hugging_face import HF, is_hf
from optimizers.schedules import Schedule
from training import checkpoint, run_folder
from training.checkpoint import Checkpoint

YES_OR_NO = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
INFERENCE = ("evaluate", "predict", "export")  # flags that use a trained model
# What --predict and --export take of the flags that belong to the result; arch has to fit.
OF_PREDICTION = ("arch", "model_args", "device", "deterministic", "batch_size", "text_column",
                 "label_column", "label_separator", "data_dir")  # fmt: skip
# Groups of flags of which --evaluate takes none.
OF_TRAINING = ("fine-tuning", "mixing of samples", "optimizer", "SLAMB", "learning rate")
RECIPES = Path(__file__).resolve().parents[1] / "recipes"
LORA_RATE = 10  # times that of whole layers (Schulman et al., "LoRA Without Regret", 2025)
WARMUP_SHARE, LONGEST_WARMUP = 0.1, 5.0  # of the run, and epochs, where --warmup is not given


# -------------------------------------------------------------------- reading them


def parse(
    parser: ScriptParser[S], script: str, arguments: Sequence[str] | None = None
) -> tuple[S, Checkpoint | None]:
    """The settings, and the checkpoint to go on from or None; warns of flags without effect.

    Args:
        arguments: the command line; None is this process's own.
    Raises:
        InputError: a flag, the recipe or the checkpoint is wrong.
    """
    given = parser.given(arguments)
    defaults, recipe = parser.defaults(), dict[str, Any]()
    if path := given.get("recipe"):
        recipe = parser.given(recipe_arguments(path, parser))
    given |= own_form({**recipe, **given}, parser)
    chosen = parser.merged(parser.merged(defaults, recipe), given)
    if chosen["resume"] == "auto":  # all ranks find the same, as none has written yet
        if not (out := chosen["out"]):
            raise InputError("--resume auto: give --out DIR, the folder of the run to go on with")
        going_on = out if checkpoint.latest_files(Path(out)) else None
        given["resume"] = chosen["resume"] = going_on
    found, path = None, resume_path(chosen, script)
    if path is not None:
        source = "--resume" if chosen["checkpoint"] is None else "--checkpoint"
        with refused_as(f"{source} {path}", (InputError,)):
            found = checkpoint.load(path, script)
        if found.warning:
            print_once(found.warning)
    known = {} if found is None else found.flags
    kept = {} if found is None else {"weights": known.get("weights")}  # which began the run
    defaults |= defaults_of_situation({**chosen, **known, **given, **kept}, parser)
    if found is not None:
        defaults |= restored_flags(found.flags, parser)
        if uses_trained_model(chosen) and not device.is_here(defaults["device"]):
            defaults |= {"device": "auto", "precision": "auto"}
    flags = parser.merged(parser.merged(defaults, recipe), given) | kept
    for name, value in computed_defaults(flags, parser).items():
        if flags[name] is None:
            flags[name] = value
    for flag in parser.flags.values():  # a checkpoint may have a choice that has gone
        value = flags[flag.dest]
        if isinstance(flag.type, Choice) and value is not None:
            with refused_as(f"{flag.name} {value}: the checkpoint has it", (ArgumentTypeError,)):
                flags[flag.dest] = flag.type(value)
    parser.complete(flags)
    if path is not None and flags["out"] is None:
        flags["out"] = str(path if path.is_dir() else path.parent)
    settings = parser.kind(**flags)
    validate(settings, script, resumed=found is not None)
    if found is not None:
        if settings.label_separator and not found.flags.get("label_separator"):
            raise InputError(
                f"--label_separator {settings.label_separator}: the run was trained with one label "
                "a row; train a new one"
            )
        for name in ("fold", "group_column"):
            if (before := found.flags.get(name)) != flags[name]:
                raise InputError(
                    f"--{name} {flags[name]}: the run was trained with {before or 'none'}, also on "
                    "rows that would be held out; train a new one"
                )
        if settings.lr != found.flags["lr"]:  # the user's own remedy replaces those so far
            found.flags["lr"] *= found.progress["lr_factor"]
            found.progress |= {"rollbacks": 0, "lr_factor": 1.0}
        found.changed = changed_flags(found.flags, flags, parser)
        found.given = {**recipe, **given}.keys()
        if use := next((name for name in reversed(INFERENCE) if flags[name]), None):
            differs = {flag.dest for flag in parser.flags.values() if flag.name in found.changed}
            differs |= {name for name in kept if name in given and given[name] != kept[name]}
            for flag in (parser.flags[name] for name in sorted(differs.intersection(given))):
                is_taken = flag.dest in OF_PREDICTION
                if not is_taken and (use != "evaluate" or flag.group in OF_TRAINING):
                    name = f"--no-{flag.name[2:]}" if flags[flag.dest] is False else flag.name
                    print_once(
                        f"warning: {name} has no effect with --{use}: the model stays as it was"
                    )
    if not uses_trained_model(flags):
        with refused_as(f"--out {settings.out}"):
            run_folder.check_overwritten(settings.out, found)
        for line in parser.unused(given, flags):
            print_once(f"warning: {line}")
        may_change = settings.epochs and settings.lr_schedule != "constant"
        if may_change and create_lr_schedule(settings).is_constant():
            how_long = f"in the {settings.epochs} epochs of this run"
            print_once(f"warning: --lr_schedule {settings.lr_schedule} changes no rate {how_long}")
    return settings, found


def own_form(flags: Mapping[str, Any], parser: ScriptParser[S]) -> dict[str, str]:
    """The flags that read what a data set of Hugging Face is converted into; none for others.

    Raises:
        InputError: it cannot be converted.
    """
    dataset = flags.get("dataset", "")
    if not is_hf(dataset):
        return {}
    root = flags.get("data_dir", parser.flags["data_dir"].default)
    with refused_as(f"--dataset {dataset}", (InputError,)):
        folder = hugging_face_data.convert(dataset.removeprefix(HF), Path(root))
    own = next(name for name in own_data.DATASETS if name in parser.kind.datasets)
    return {"dataset": own, "data_dir": str(folder)}


def print_once(line: str) -> None:
    """Print a line on stderr; of several processes one speaks for all."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


def restored_flags(flags: Mapping[str, Any], parser: ScriptParser[S]) -> dict[str, Any]:
    """The flags of a checkpoint that another start of its script takes over.

    Known data sets may lie elsewhere on this machine, where DATA_DIR says so.
    """
    scopes = [Scope.RESULT, Scope.HOW, Scope.NODE]
    if not os.environ.get("DATA_DIR") or flags["dataset"] in own_data.DATASETS:
        scopes.append(Scope.PLACE)
    restored = {name: flags[name] for name in parser.of_scope(*scopes) if name in flags}
    for flag in parser.settings():  # without those that there are no more
        given, owner = restored.get(flag.dest, {}), flags.get(flag.owner)
        known = {name for part in flag.parts.values() for name in part if not is_hf(owner)}
        if not own_parts.is_own(owner):
            restored[flag.dest] = {name: value for name, value in given.items() if name in known}
    usual = computed_defaults({**parser.defaults(), **flags}, parser)  # it may lack new flags
    return restored | {
        name: None for name in ("warmup", "nesterov") if restored.get(name) == usual[name]
    }


def changed_flags(
    before: Mapping[str, Any], flags: Mapping[str, Any], parser: ScriptParser[S]
) -> dict[str, list[Any]]:
    """The flags in which a run that goes on differs from its checkpoint, as [before, now].

    Args:
        before: the values of the checkpoint.
    """
    changed = {}
    for name in parser.of_scope(Scope.RESULT, Scope.PLACE):
        flag = parser.flags[name]
        pair = [flag.default if before.get(name) is None else before[name], flags[name]]
        if flag.scope is Scope.PLACE:
            if flags["dataset"] not in own_data.DATASETS:
                continue  # the same data in another place
            pair = list(map(os.path.abspath, pair))
        if pair[0] != pair[1] and flag.has_effect(flags):
            changed[flag.name] = pair
    return changed


def computed_defaults(chosen: Mapping[str, Any], parser: ScriptParser[S]) -> dict[str, Any]:
    """The defaults that depend on other flags, by name.

    Args:
        chosen: the flags of the run, of which these may be None.
    Raises:
        InputError: there is no rate.
    """
    name = chosen["optimizer"]
    optimizer, lr = optimizer_choice(name), parser.learning_rates.get(name, chosen["lr"])
    if lr is None:
        with refused_as(f"--optimizer {name}"):
            own_parts.find(name)
        raise InputError(
            f"--optimizer {name}: has no default rate; give --lr, in a race {name}@RATE"
        )
    rises_by_itself = chosen["lr_schedule"] in ("onecycle", "cyclic")
    measured = parser.kind.measured_for(chosen)
    longest = measured.longest_warmup if measured else LONGEST_WARMUP
    warmup = 0.0 if rises_by_itself else usual_warmup(chosen["epochs"], longest)
    if begins_with_weights(chosen):
        lr = parser.kind.pretrained_lr.get(name, lr / 10) * (LORA_RATE if chosen["lora"] else 1)
    elif measured:
        lr = measured.lr.get(name, lr)
    return {
        "lr": lr,
        "weight_decay": optimizer.weight_decay,
        "momentum": optimizer.momentum,
        "nesterov": optimizer.nesterov and chosen["momentum"] != 0,
        "warmup": warmup,
        "val_fraction": 0.0,
        "best_by": "map" if chosen["label_separator"] else "accuracy",
    }


def defaults_of_situation(chosen: Mapping[str, Any], parser: ScriptParser[S]) -> dict[str, Any]:
    """The defaults that depend on how a run begins; none where the usual ones hold.

    It begins with weights, with --freeze or without, or from scratch with a network and a data set
    that have defaults of their own.
    """
    kind = parser.kind
    if begins_with_weights(chosen):
        of_rows = {"batch_size": 0}  # until the rows are known
        return {**kind.pretrained, **of_rows, **(kind.frozen if chosen["freeze"] else {})}
    if (measured := kind.measured_for(chosen)) is None:
        return {}
    base = {"base_bs": measured.batch} if chosen["optimizer"] in measured.lr else {}
    return {**measured.flags, **base}


def usual_warmup(epochs: int, longest: float = LONGEST_WARMUP) -> float | None:
    """The default of --warmup, in epochs; None while the rows that choose --epochs are not read."""
    return min(WARMUP_SHARE * epochs, longest) if epochs else None


def uses_trained_model(flags: Mapping[str, Any]) -> bool:
    """Whether this invocation evaluates, predicts or exports, and does not train."""
    return any(flags[name] for name in INFERENCE)


def resume_path(flags: Mapping[str, Any], script: str) -> Path | None:
    """The checkpoint or run folder to go on from, or to use for inference; None for a new run.

    It is that of --checkpoint, else of --resume; a job whose processes torchrun starts anew, since
    one has failed or a node has joined, goes on with its own run by itself.

    Raises:
        InputError: the two flags contradict each other, or there is no run.
    """
    if not uses_trained_model(flags):
        folder = interrupted_run(flags, script)
        if folder is not None and checkpoint.latest_files(folder):
            return folder
    given, resumed = flags["checkpoint"], flags["resume"]
    if given is None and resumed is None:
        return None
    if resumed is None and not uses_trained_model(flags):
        raise InputError(
            f"--checkpoint {given}: nothing is to be done with it; add --evaluate, "
            "--predict or --export, or --resume to go on training"
        )
    if given not in (None, "best", "last"):
        if resumed is not None:
            raise InputError(
                f"--checkpoint {given}: with --resume it is best or last; to use a file, "
                "give it to one of the two flags and leave the other one out"
            )
        return Path(given)
    run = resumed or flags["out"] or run_folder.latest_run(script)
    if run is None:
        flag = "--resume" if given is None else "--checkpoint"
        reason = "with a checkpoint below runs/; name its folder with"
        raise InputError(f"no run of {script} {reason} {flag} PATH")
    folder = Path(run).parent if given and str(run).endswith(".pt") else Path(run)
    return folder / "best.pt" if given == "best" else folder


def interrupted_run(flags: Mapping[str, Any], script: str) -> Path | None:
    """The run folder that this job wrote to before torchrun restarted it.

    None where it had not come so far: the restarted job then does what the first start did.
    """
    job, given = launcher_id(), flags["out"] or flags["resume"]
    if not given:
        return run_folder.latest_run(script, launcher=job) if job else None
    folder = Path(given).parent if Path(given).is_file() else Path(given)
    return folder if run_folder.is_run_of(job, folder) else None


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
    recipe: str, parser: ScriptParser[S], *, without: Collection[Flag] = ()
) -> list[str]:
    """A recipe as command-line arguments, so that it is checked like them.

    Args:
        recipe: a YAML file that maps names of flags to values, or the name of one of this
            project's recipes.
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
            known = parser.find(name.partition(".")[0])
            if name == "help" or (known is not None and known.scope is Scope.START):
                problem = "a recipe cannot hold this flag; give it on the command line"
                raise InputError(f"{name}: {problem}")
            words = flag_arguments(name, value, parser)
            own = parser.own_name(f"--{name}")
            if known and "." not in name:
                first = named.setdefault(own if own.endswith("=") else known.dest, name)
                if first != name:
                    raise InputError(f"{first} and {name} are one flag; give one of them")
            if known not in without:
                arguments += words
        parser.given(arguments)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    return arguments


def flag_arguments(name: str, value: Any, parser: ScriptParser[S]) -> list[str]:
    """The command-line arguments for a value of a flag, as in a line of a recipe.

    Args:
        name: any spelling of a flag, without dashes; opt_args.rank is a setting of --opt_args.
        value: a word, or several in a list, or the settings of a part; that of a flag without a
            value is true or false, yes or no, on or off.
    Raises:
        InputError: the value is of another kind.
    """
    name, _, key = name.partition(".")
    flag = parser.find(name)
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
    if str(value).startswith("-"):  # else argparse would read a flag
        return [f"--{name}={value}"]
    return [f"--{name}", str(value)]


# -------------------------------------------------------------------- checking them


def validate(settings: Settings, script: str, resumed: bool) -> None:
    """Check what a single flag cannot tell.

    Raises:
        InputError: flags are not supported together, or something that they need is missing.
    """
    if settings.distributed and not under_torchrun():
        raise InputError(f"--distributed needs torchrun: bash run_distributed.sh {script}.py ...")
    used = [flag for flag in INFERENCE if getattr(settings, flag)]
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
    for name in ("arch", "optimizer"):
        if own_parts.is_own(value := getattr(settings, name)) and (name == "arch" or not used):
            with refused_as(f"--{name} {value}"):
                own_parts.find(value)
    if settings.predict_out and not settings.predict:
        raise InputError("--predict_out needs something to classify: add --predict PATH")
    if settings.export and (reason := torch_compat.unavailable_reason("export")):
        raise InputError(
            f"--export {reason}: export from the stack of requirements.txt, "
            "which reads this run as well"
        )
    if settings.stop_at > 1 and settings.best_by != "loss":
        raise InputError(f"--stop_at {settings.stop_at:g}: give a share of at most 1, such as 0.9")
    if settings.dataset not in own_data.DATASETS:  # others may have a validation set: see load_data
        check_validation_set(settings, has_val=settings.holds_out)
    if not uses_trained_model(vars(settings)):
        compatibility.check(vars(settings))
    if settings.epochs:
        create_lr_schedule(settings)


def create_lr_schedule(settings: Settings) -> Schedule:
    """The learning rate over the run, as a multiple of --lr."""
    with refused_as("--lr_args or --warmup"):
        return Schedule(
            settings.lr_schedule,
            settings.epochs,
            warmup=settings.warmup,
            gamma=settings.gamma,
            milestones=settings.milestones,
            **settings.lr_args,
        )


def check_validation_set(settings: Settings, has_val: bool) -> None:
    """Check that there is a validation set where the flags need one.

    Raises:
        InputError: there is none.
    """
    if not has_val and not settings.test:
        raise InputError(
            "--no-test chooses the best epoch by held-out rows of the training set: give "
            "--val_fraction above 0, or --fold"
        )
