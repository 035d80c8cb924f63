"""Reading and checking flags: command line, recipe, checkpoint.

    parser = flags.shared_parser(__doc__, datasets=["cifar10", "mnist"], optimizers=OPTIMIZERS)
    args, checkpoint = parse(parser, script="resnet50_test")

A value comes from the command line, else from --recipe, else from the checkpoint of --resume, else
from the default.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backends import torch_compat
from cli import compatibility, settings
from cli.flag_parser import Scope, setting, switch
from cli.flags import OptimizerChoice, Parser
from cli.yaml_file import excerpt, read_yaml
from distributed.worker import is_restarted, launcher_id
from distributed.world import under_torchrun
from errors import InputError, did_you_mean
from input_pipeline import own_data
from training import checkpoint, run_folder

AUTO = "auto"  # value of --resume: go on where --out holds a checkpoint, else start
INFERENCE = ("evaluate", "predict", "export")  # flags that use a trained model
YES_OR_NO = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
RECIPES = Path(__file__).resolve().parents[1] / "recipes"
META_VAL_FRACTION = 0.05  # held out for --mixup meta where the command line does not say
WARMUP_SHARE, LONGEST_WARMUP = 0.1, 5.0  # of the run, and epochs, where --warmup is not given


# -------------------------------------------------------------------- reading them


def parse(
    parser: Parser, script: str, arguments: Sequence[str] | None = None
) -> tuple[Namespace, dict[str, Any] | None]:
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
    command_line = Namespace(**values | {"out": recipe.get("out")} | given)
    if command_line.resume == AUTO:
        given["resume"] = command_line.resume = folder_to_go_on(command_line)
    state, path = None, resume_path(command_line, script)
    if path is not None:
        source = "--resume" if command_line.checkpoint is None else "--checkpoint"
        state = checkpoint.load(path, script, flag=source)
        if "warning" in state and os.environ.get("RANK", "0") == "0":
            print(state["warning"], file=sys.stderr, flush=True)
        values |= restored_flags(state["flags"], parser, given=given, source=f"{source} {path}")
    values = settings.merged(values, recipe, parser)
    args = Namespace(**settings.merged(values, given, parser))
    for name, value in computed_defaults(args, parser.optimizers[args.optimizer]).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    settings.complete(args, parser)
    if path is not None and args.out is None:
        args.out = str(path if path.is_dir() else path.parent)
    validate(args, script, resumed=state is not None)
    if state is not None:
        if command_line.lr is not None:  # the user's own remedy replaces those so far
            state["flags"]["lr"] *= state["progress"].get("lr_factor", 1.0)
            state["progress"] |= {"rollbacks": 0, "lr_factor": 1.0}
        state["changed"] = changed_flags(state["flags"], args, parser)
    if not uses_trained_model(args):
        check_overwritten(args, state)
        if os.environ.get("RANK", "0") == "0":
            for line in parser.unused(given, args):
                print(f"warning: {line}", file=sys.stderr, flush=True)
    return args, state


def restored_flags(
    flags: Mapping[str, Any], parser: Parser, *, given: Mapping[str, Any], source: str
) -> dict[str, Any]:
    """The flags of a checkpoint that another start of its script takes over.

    Known data sets may lie elsewhere on this machine, where DATA_DIR says so. A value that this
    version does not know matters for training alone: what says how a model is made checks itself.

    Args:
        flags: of the checkpoint.
        given: the flags of the command line.
        source: how the user named the checkpoint.
    Raises:
        InputError: this version does not support a value.
    """
    scopes = [Scope.RESULT, Scope.HOW, Scope.NODE]
    if not os.environ.get("DATA_DIR") or is_own_data(flags["dataset"]):
        scopes.append(Scope.PLACE)
    restored = {name: flags[name] for name in parser.of_scope(*scopes) if name in flags}
    for name, value in list(restored.items()):
        flag = parser.flags[name]
        if value == flag.default or isinstance(value, dict) or name in given:
            continue
        try:
            words = flag_arguments(name, value, parser)
            parser.given(words if len(words) > 2 else ["=".join(words)])
        except InputError:
            if not any(given.get(each) for each in INFERENCE):
                raise InputError(
                    f"{source}: the checkpoint's {flag.name} {excerpt(value)} is not supported any "
                    "more; give another value on the command line"
                ) from None
            del restored[name]
    return restored


def changed_flags(
    before: Mapping[str, Any], args: Namespace, parser: Parser
) -> dict[str, list[Any]]:
    """The flags in which a run that goes on differs from its checkpoint, as [before, now].

    Args:
        before: the values of the checkpoint.
    """
    changed = {}
    scopes = [Scope.RESULT, Scope.PLACE] if is_own_data(args.dataset) else [Scope.RESULT]
    for name in parser.of_scope(*scopes):
        pair = [before.get(name, parser.flags[name].default), getattr(args, name)]
        if parser.flags[name].scope is Scope.PLACE:
            pair = [os.path.abspath(value) for value in pair]
        pair = [list(value) if isinstance(value, tuple) else value for value in pair]
        if pair[0] != pair[1] and parser.flags[name].has_effect(args):
            changed[parser.flags[name].name] = pair
    return changed


def computed_defaults(chosen: Namespace, optimizer: OptimizerChoice) -> dict[str, Any]:
    """The defaults that depend on other flags, by name.

    Args:
        chosen: the flags of the run, of which these may be None.
        optimizer: that of --optimizer.
    """
    rises_by_itself = chosen.lr_schedule in ("onecycle", "cyclic")
    warmup = 0.0 if rises_by_itself else min(WARMUP_SHARE * chosen.epochs, LONGEST_WARMUP)
    return {
        "lr": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "momentum": optimizer.momentum,
        "nesterov": optimizer.nesterov and chosen.momentum != 0,
        "warmup": warmup,
        "val_fraction": META_VAL_FRACTION if chosen.mixup == "meta" else 0.0,
    }


def defaults_for(parser: Parser, flags: Mapping[str, Any]) -> dict[str, Any]:
    """What a run with these flags would have had for each flag that was not given, by name.

    Args:
        flags: of the run, which another version may have had.
    """
    defaults = parser.defaults()
    optimizer = parser.optimizers.get(str(flags.get("optimizer")))
    if optimizer is not None:
        chosen = Namespace(**{**defaults, **flags})
        defaults |= computed_defaults(chosen, optimizer)
        defaults |= {name: own for name, (_, own) in settings.settings_of(chosen, parser).items()}
    return defaults


def is_own_data(dataset: Any) -> bool:
    """Whether a value of --dataset is data of the user's own, which --data_dir names."""
    return dataset in own_data.DATASETS


def uses_trained_model(args: Namespace) -> bool:
    """Whether this invocation evaluates, predicts or exports, and does not train."""
    return any(getattr(args, flag) for flag in INFERENCE)


def resume_path(args: Namespace, script: str) -> Path | None:
    """The checkpoint or run folder to go on from, or to use for inference; None for a new run.

    It is that of --checkpoint, else of --resume; a job that torchrun has restarted goes on with
    its own run by itself.

    Raises:
        InputError: the two flags contradict each other, or the run has no such checkpoint.
    """
    if is_restarted() and not uses_trained_model(args):
        folder = interrupted_run(args, script)
        if folder is not None and checkpoint.latest_files(folder):
            return folder
    if args.checkpoint is None:
        return None if args.resume is None else run_path(args, script, flag="--resume")
    if args.resume is None and not uses_trained_model(args):
        raise InputError(
            f"--checkpoint {args.checkpoint}: nothing is to be done with it; add --evaluate, "
            "--predict or --export, or --resume to go on training"
        )
    if args.checkpoint not in ("best", "last"):
        guess = did_you_mean(args.checkpoint, ["best", "last"])
        if args.resume is not None:
            raise InputError(
                f"--checkpoint {args.checkpoint}: with --resume it is best or last; to use a file, "
                f"give it to one of the two flags and leave the other one out{guess}"
            )
        if not Path(args.checkpoint).exists():
            raise InputError(
                f"--checkpoint {args.checkpoint}: no such checkpoint; give best, last, a run "
                f"folder or a .pt file{guess}"
            )
        return Path(args.checkpoint)
    run = run_path(args, script, flag=f"--checkpoint {args.checkpoint}")
    folder = run.parent if run.suffix == ".pt" else run
    if args.checkpoint == "last":
        return folder
    path = folder / "best.pt"
    if checkpoint.latest_files(folder) and not path.exists():
        raise InputError(
            f"--checkpoint best: {folder} has no best.pt, as before the end of its first epoch; "
            "use --checkpoint last"
        )
    return path


def folder_to_go_on(args: Namespace) -> str | None:
    """What --resume auto means: --out where it holds a checkpoint, else None.

    All ranks find the same: none writes a checkpoint before all have met.

    Raises:
        InputError: --out is missing.
    """
    if args.out is None:
        raise InputError("--resume auto: give --out DIR, the folder of the run to go on with")
    return args.out if checkpoint.latest_files(Path(args.out)) else None


def interrupted_run(args: Namespace, script: str) -> Path | None:
    """The run folder that this job wrote to before torchrun restarted it.

    None where it had not come so far: the restarted job then does what the first start did.
    """
    job = launcher_id()
    folder: Path | None
    if args.out:
        folder = Path(args.out)
    elif args.resume:
        path = Path(args.resume)
        folder = path if path.is_dir() else path.parent
    else:
        return run_folder.latest_run(script, launcher=job) if job else None
    return folder if run_folder.is_run_of(job, folder) else None


def run_path(args: Namespace, script: str, *, flag: str) -> Path:
    """What --resume names: its PATH, else --out, else the newest run.

    Raises:
        InputError: there is no run; the message begins with `flag`.
    """
    if args.resume:
        return Path(args.resume)
    folder = Path(args.out) if args.out else run_folder.latest_run(script)
    if folder is None:
        raise InputError(
            f"{flag}: no run of {script} with a checkpoint below runs/; "
            "name its folder with --resume PATH"
        )
    return folder


def recipe_path(recipe: str) -> Path:
    """The file of --recipe, which is a path or the name of one of this project's recipes.

    A file of that path wins over a recipe of that name.

    Raises:
        InputError: there is neither.
    """
    path, named = Path(recipe), RECIPES / f"{recipe.removesuffix('.yaml')}.yaml"
    if path.exists() and not path.is_dir():
        return path
    if named.parent == RECIPES and named.is_file():
        return named
    names = sorted(each.stem for each in RECIPES.glob("*.yaml"))
    problem = "is a folder" if path.is_dir() else "is no file and no recipe of this project"
    raise InputError(
        f"--recipe {recipe}: this {problem}; give the path of a YAML file, or one of the recipes "
        f"{', '.join(names)}{did_you_mean(path.stem, names)}"
    )


def recipe_arguments(recipe: str, parser: Parser) -> list[str]:
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
    spellings: dict[str, str] = {}  # by the own name of the flag, as the recipe has it
    try:
        for name, value in entries.items():
            words = flag_arguments(str(name), value, parser)
            flag = parser.find(str(name))
            if words and flag is not None and flag.type is not setting:
                other = spellings.setdefault(flag.name, str(name))
                if other != str(name):
                    raise InputError(f"{other} and {name} are the same flag; leave one out")
            arguments += words
        parser.given(arguments)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    return arguments


def flag_arguments(name: str, value: Any, parser: Parser) -> list[str]:
    """The command-line arguments for a line of a recipe.

    Args:
        name: any spelling of a flag, without dashes; opt_args.rank is a setting of --opt_args.
        value: a word, or several in a list, or the settings of a part; that of a flag without a
            value is true or false.
    Raises:
        InputError: there is no such flag, it may not be in a recipe, or the value is of a kind
            that it does not take.
    """
    if "." in name:  # opt_args.rank
        name, _, key = name.partition(".")
        value = {key: value}
    flag, own = parser.find(name), parser.own_name(f"--{name}")
    if flag is None:
        raise InputError(parser.explain_unknown(f"--{name}"))
    if flag.scope is Scope.START:
        raise InputError(f"{name}: a recipe cannot hold this flag; give it on the command line")
    if own.endswith("="):
        return [f"{own}{value}"]
    if flag.type is switch or "=" in own:
        is_on = YES_OR_NO.get(str(value).lower())
        if is_on is None:
            raise InputError(f"--{name}: must be true or false, got {excerpt(value)}")
        if "=" in own:
            return [own] if is_on else []
        is_on = is_on != own.startswith("--no-")
        return [flag.name if is_on else f"--no-{flag.name[2:]}"]
    if isinstance(value, dict) and flag.type is setting:
        return [own, *(f"{key}={each}" for key, each in value.items())]
    values = value if isinstance(value, list) else [value]
    if any(isinstance(each, dict | list) for each in values):
        raise InputError(f"--{name}: {excerpt(value)} is neither a value nor a list of values")
    return [own, *map(str, values)]


# -------------------------------------------------------------------- checking them


def validate(args: Namespace, script: str, resumed: bool) -> None:
    """Check what a single flag cannot tell.

    Raises:
        InputError: flags are not supported together, or something that they need is missing.
    """
    if args.distributed and not under_torchrun():
        raise InputError(
            f"--distributed needs torchrun: bash run_distributed.sh {script}.py ..., "
            f"or torchrun --standalone --nproc_per_node=2 {script}.py ..."
        )
    validate_inference(args, resumed)
    if args.dataset not in own_data.DATASETS:  # others may have a validation set: see load_data
        check_validation_set(args, has_val=bool(args.val_fraction))
    compatibility.check(args)
    if args.warmup and args.warmup >= args.epochs:
        raise InputError(
            f"--warmup {args.warmup:g}: must be shorter than the run of {args.epochs} epochs"
        )


def holds_other_run(folder: Path) -> bool:
    """Whether a folder holds a run that this job, before torchrun restarted it, did not begin."""
    if is_restarted() and run_folder.is_run_of(launcher_id(), folder):
        return False
    return (folder / "metrics.jsonl").exists()


def check_overwritten(args: Namespace, state: Mapping[str, Any] | None) -> None:
    """Check that a run does not overwrite what it is not a part of.

    Args:
        state: the checkpoint that the run goes on from, or None.
    Raises:
        InputError: the run folder holds another run, or the same run at a later step.
    """
    if state is None:
        if args.out and holds_other_run(Path(args.out)):
            raise InputError(
                f"--out {args.out} already holds a run: add --resume to go on with it, "
                "or choose another folder"
            )
        return
    folder, source = Path(args.out), Path(state["file"])
    if source.resolve().parent != folder.resolve():
        if holds_other_run(folder):
            raise InputError(
                f"--out {folder} already holds a run: choose another folder to go on from {source}"
            )
        return
    for path in checkpoint.latest_files(folder):
        if path.samefile(source):
            return
        later = checkpoint.read_progress(path)
        if later is not None and later["step"] > state["progress"]["step"]:
            raise InputError(
                f"{source} is of step {state['progress']['step']}, but its run has gone on to step "
                f"{later['step']} ({path.name}), which training on from there would overwrite; "
                "give --out with another folder"
            )


def check_validation_set(args: Namespace, has_val: bool) -> None:
    """Check that there is a validation set where the flags need one.

    Raises:
        InputError: there is none.
    """
    if has_val:
        return
    if not args.test:
        raise InputError(
            "--no-test: nothing is left to choose the best epoch by; give --val_fraction above 0"
        )
    if args.mixup == "meta":
        raise InputError(
            "--mixup meta learns on held-out rows of the training set: give --val_fraction above 0"
        )


def validate_inference(args: Namespace, resumed: bool) -> None:
    """Check --evaluate, --predict, --predict_out and --export.

    Raises:
        InputError: there is no model, or they are not for one run of the script.
    """
    used = [flag for flag in INFERENCE if getattr(args, flag)]
    if len(used) > 1:
        raise InputError(
            f"--{used[0]} and --{used[1]}: one run of the script does one of them; run it once "
            "for each"
        )
    for flag in used:
        if not resumed:
            raise InputError(
                f"--{flag} needs a trained model: add --checkpoint with best, last, a run folder "
                "or a .pt file (or --resume PATH)"
            )
    if args.predict_out and not args.predict:
        raise InputError("--predict_out needs something to classify: add --predict PATH")
    if args.export and (reason := torch_compat.unavailable_reason("export")):
        raise InputError(
            f"--export {reason}: export from the stack of requirements.txt, "
            "which reads this run as well"
        )
    name = args.export or ""
    if name.encode(errors="replace").decode() != name:  # the libraries cannot open such a file
        raise InputError(
            f"--export {name}: the name is not UTF-8 in this locale; give another one, or set "
            "PYTHONUTF8=1"
        )
