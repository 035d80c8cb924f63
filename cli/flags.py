"""The flags of both scripts: names, types, defaults, help; cli/options.py reads and checks them.

parser = shared_parser(__doc__, datasets=["cifar10", "mnist"], optimizers=OPTIMIZERS, ...)
parser.group("images")("--arch", str, "resnet50", "network", common=True)

docs/flags.md is written from here by `python -m figures.flags_page`.
"""

import json
import os
from argparse import ArgumentTypeError
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch

from backends import execution, precision
from backends.device import MAX_THREADS
from cli.flag_parser import (
    OFF,
    ON,
    Choice,
    Scope,
    ScriptParser,
    below_one,
    count,
    file_path,
    fraction,
    natural,
    not_negative,
    number,
    output_file,
    own,
    path_text,
    positive,
    setting,
    switch,
)
from cli.foreign_names import FOREIGN
from cli.yaml_file import read_yaml
from distributed import comm_hooks, fsdp
from distributed.diloco import DiLoCo
from distributed.world import TimeLimits
from dynamic_batch import RULES, ByLoss, ByNoise, lr_power, schedule_growth
from input_pipeline.own_data import DATASETS
from mixup import FORMER_KINDS, mixup
from optimizers import schedules
from optimizers.param_groups import decay_groups
from optimizers.schedules import Schedule
from training import export, predictions
from training.evaluation import METRIC_NAMES
from training.tracking import TRACKERS

WIRE_BITS = {"int8": 8, "int4": 4}  # values of --wire_dtype for SLAMB alone


def class_weights(text: str) -> str | dict[str, float] | None:
    """An argparse type: balanced, none, or a YAML file of lines 'class: weight'.

    A recipe holds the weights themselves, which come here as JSON.
    """
    if text in ("balanced", "none"):
        return None if text == "none" else text
    if text.startswith("{"):
        entries: Any = json.loads(text)
    else:
        entries = read_yaml(file_path(text), f"--class_weights {text}", as_text=True)
    if not isinstance(entries, dict):
        raise ArgumentTypeError(f"{text} must hold lines of 'class: weight'")
    return {str(name): positive(str(weight)) for name, weight in entries.items()}


def label_noise(text: str) -> float | str:
    """An argparse type: a share below 1, alone or as in 0.4:cat=dog,deer=horse."""
    share, colon, pairs = text.partition(":")
    value = below_one(share)
    named = [name for pair in pairs.split(",") for name in pair.split("=")]
    is_paired = all(pair.count("=") == 1 for pair in pairs.split(","))
    if colon and not (is_paired and len(set(named)) == len(named)):
        raise ArgumentTypeError("must be as 0.4 or 0.4:cat=dog,deer=horse, each class once")
    return f"{value!r}:{pairs}" if pairs else value


@dataclass(frozen=True)
class OptimizerChoice:
    """A value of --optimizer."""

    make: Callable[..., torch.optim.Optimizer]  # called as make(groups, lr=..., **settings)
    flags: Sequence[str] = ()  # its own, by the names of its parameters
    _: KW_ONLY
    lr: float  # of this and the next three: where the command line does not give them
    weight_decay: float
    nesterov: bool = False
    momentum: float = 0.9
    own: Sequence[str] = ()  # its settings of --opt_args
    groups: Callable[..., list[dict[str, Any]]] = decay_groups  # called as groups(model, decay)


def by_optimizer(optimizers: Mapping[str, OptimizerChoice], name: str) -> str:
    """Write a default of each optimizer, for example '0.02 for sgd, ngd; 1 for lars'."""
    names = defaultdict(list)
    for optimizer, choice in optimizers.items():
        if name in ("lr", "weight_decay", *choice.flags):
            names[getattr(choice, name)].append(optimizer)
    return "; ".join(f"{value:g} for {', '.join(group)}" for value, group in names.items())


def shared_parser(
    description: str | None,
    datasets: Sequence[str],
    *,
    optimizers: Mapping[str, OptimizerChoice],
    mixing: Sequence[str],
    add_own: Callable[[ScriptParser], None],
    **defaults: Any,
) -> ScriptParser:
    """The flags that both scripts have, and those of one.

    Args:
        description: the script's docstring.
        datasets: values of --dataset, the default first.
        optimizers: values of --optimizer.
        mixing: values of --mixup.
        add_own: declares the flags of this script alone.
        defaults: of other flags in which the scripts differ.
    """
    parser = ScriptParser(description, FOREIGN)
    parser.optimizers = optimizers
    _add_data(parser, datasets)
    add_own(parser)
    _add_training(parser)
    _add_fine_tuning(parser)
    _add_mixing(parser, mixing)
    _add_optimizer(parser, optimizers)
    _add_schedule(parser)
    _add_speed(parser)
    _add_communication(parser)
    _add_batches(parser)
    _add_run(parser)
    for name, value in defaults.items():
        parser.flags[name] = replace(parser.flags[name], default=value)
    return parser


# A declaration of two lines would become one of eight.
# fmt: off
def _add_data(parser: ScriptParser, datasets: Sequence[str]) -> None:
    add = parser.group("data")
    own_name = next(name for name in datasets if name in DATASETS)
    add("--dataset", Choice(datasets), datasets[0], "data set; "
        f"{own_name} is your own files in --data_dir (docs/own_data.md)", common=True)
    add("--data_dir", path_text, path_text(os.environ.get("DATA_DIR") or "./data"), "folder of the "
        "data sets, into which missing ones are downloaded (default $DATA_DIR, else ./data)",
        metavar="DIR", scope=Scope.PLACE, common=True)
    add("--subset", fraction, 1.0, "share of the training set, the same of each class", metavar="F",
        common=True)
    add("--val_fraction", below_one, None, "share of the training set that is held out to choose "
        "the best epoch (default 0)", metavar="F", common=True)
    add("--label_noise", label_noise, 0.0, "share of the training rows of each class that get a "
        "wrong label; 0.4:cat=dog,deer=horse swaps labels within these pairs only",
        metavar="F")
    add("--balanced_sampling", switch, False, "epochs that draw each class equally often, rows of "
        "rare classes several times")
    add("--test", switch, True, "evaluation on the test set; --no-test leaves it alone, as a "
        "search should, and needs a validation set")
    add("--baseline", switch, None, "accuracy of a linear model before the first epoch, for "
        "comparison (default on for folder and csv)", scope=Scope.HOW)
    add("--workers", natural, None, "processes that decode or augment images (default as many as "
        "--threads)", metavar="N", scope=Scope.NODE)


def _add_training(parser: ScriptParser) -> None:
    add = parser.group("training")
    add("--bs --batch_size -b", count, 128, "samples of a process in one forward and backward pass",
        dest="batch_size", metavar="N", common=True)
    add("--epoch --epochs", count, 50, "length of the run", dest="epochs", metavar="N", common=True)
    add("--accumulate", count, 1, "batches whose gradients are added up for a step", metavar="K")
    add("--label_smoothing", below_one, 0.0, "share of each label that is spread over all classes",
        metavar="F")
    add("--class_weights", class_weights, None, "factors of the losses of each class: balanced "
        "(all classes count alike), none, or a YAML file of lines 'class: weight'",
        metavar="balanced|FILE")
    add("--best_by", Choice(METRIC_NAMES), "accuracy", "what chooses the best epoch, on the "
        "validation set where there is one")
    add("--patience", natural, 0, "epochs without a better one after which the run ends; 0 is off",
        metavar="EPOCHS")
    add("--stop_at", not_negative, 0.0, "value of --best_by, such as 0.9, at which the run ends; 0 "
        "is off", metavar="VALUE")
    add("--ema", below_one, 0.0, "decay, such as 0.999, of a moving average of the weights, which "
        "is evaluated and kept; 0 is none", metavar="DECAY")
    add("--clip", not_negative, 0.0, "norm to which the gradient is clipped; 0 is off",
        metavar="NORM")
    add("--seed", number(int, 0, 2 ** 32 - 1), 0, "seed of weights, order, augmentation and "
        "dropout", metavar="N", common=True)


def _add_fine_tuning(parser: ScriptParser) -> None:
    add = parser.group("fine-tuning")
    add("--weights", path_text, None, "first weights, and the tokenizer of texts: a run folder or "
        ".pt file, a .safetensors or state_dict file, or for images DEFAULT, those of torchvision "
        "or timm; the classifier keeps classes of the same name (default random)",
        metavar="FILE|DEFAULT", only_with=[{"resume": OFF}], common=True)
    add("--head", Choice(["probe", "random"]), "probe", "with --weights: a classifier of new "
        "classes begins as a logistic regression on what the network computes (probe, for images), "
        "or at random (for texts without --freeze)")
    add("--freeze", switch, False, "training of the classifier alone, with --weights or --arch "
        "hf:NAME; without changes of images the network computes once")


def _add_mixing(parser: ScriptParser, mixing: Sequence[str]) -> None:
    add, all_epochs = parser.group("mixing of samples"), {"end": 1.0}
    former = {name: now for name, now in FORMER_KINDS.items() if now in mixing}
    add("--mixup", Choice(mixing, former), "none", "how pairs of samples and of their "
        "labels are mixed; --meta_learning stands for --mixup meta, which learns it", common=True)
    add("--alpha", positive, 0.99, "strength: weights are drawn from Beta(A, A)", metavar="A",
        only_with=[{"mixup": ON}], common=True)
    add("--mixup_args", setting, {}, "how samples are mixed: end, a "
        "share of the epochs; weight of mixup and the classes' kinds; per_sample of mixup; "
        "held_out, a share of the rows, of meta", owner="mixup", parts={
            "mixup": own(mixup, "weight", "per_sample") | all_epochs,
            **dict.fromkeys(["inter_class", "intra_class"], own(mixup, "weight") | all_epochs),
            **dict.fromkeys(["fmix", "cutmix"], all_epochs),
            "meta": {"held_out": 0.05, "end": 0.7}})


def _add_optimizer(parser: ScriptParser, optimizers: Mapping[str, OptimizerChoice]) -> None:
    add = parser.group("optimizer")

    def users(name: str) -> dict[str, Sequence[str]]:
        """The optimizers with this setting."""
        return {"optimizer": [key for key, each in optimizers.items() if name in each.flags]}

    add("--optimizer", Choice(optimizers), "ngd", "optimizer; --ngd "
        "stands for --optimizer ngd", common=True)
    add("--lr", positive, None, f"learning rate (default {by_optimizer(optimizers, 'lr')})",
        metavar="RATE", common=True)
    add("--weight_decay", not_negative, None, f"decay of weights, times the learning rate, but not "
        f"of biases and norms (default {by_optimizer(optimizers, 'weight_decay')})", metavar="F",
        common=True)
    add("--layer_decay", number(float, 1e-3, 1), 1.0, "factor of the learning rate from each layer "
        "to the one before it, for fine-tuning", metavar="F")
    add("--momentum", below_one, None,
        f"decay of the momentum (default {by_optimizer(optimizers, 'momentum')})", metavar="F",
        only_with=[users("momentum")])
    nesterov = ", ".join(name for name, choice in optimizers.items() if choice.nesterov)
    add("--nesterov", switch, None, f"Nesterov momentum (default on for {nesterov}, unless "
        f"--momentum is 0)", only_with=[users("nesterov")])
    add("--betas", below_one, [0.9, 0.999], "decays of the first and second moments of Adam",
        nargs=2, metavar="B", only_with=[users("betas")])
    add("--opt_args", setting, {}, "further settings of the optimizer, such as "
        "rank=16; docs/flags.md lists them", owner="optimizer",
        parts={name: own(choice.make, *choice.own) for name, choice in optimizers.items()})

    add = parser.group("SLAMB")
    add("--compress_ratio", fraction, 0.1, "share of the momentum that a step sends", metavar="F",
        only_with=[users("compress_ratio")])
    add("--compress_warmup", fraction, [0.5, 0.5, 0.2], "these shares in the first epochs instead; "
        "none without a value", nargs="*", metavar="F", only_with=[users("compress_warmup")])


def _add_schedule(parser: ScriptParser) -> None:
    add = parser.group("learning rate")

    add("--lr_schedule", Choice(schedules.SCHEDULES), "cosine", "schedule; polynomial falls "
        "linearly unless --lr_args power is given", common=True)
    add("--warmup", not_negative, None, "epochs of a linear rise from 0 (default a tenth of the "
        "run, at most 5; 0 for onecycle and cyclic)", metavar="EPOCHS", common=True)
    add("--gamma", positive, 0.1, "factor of the rate at a change; inverse divides by 1 + F x "
        "epochs", metavar="F", only_with=[
            {"lr_schedule": ("step", "multistep", "exponential", "inverse")}])
    add("--milestones", count, None, "epochs of the changes (default 60 % and 80 % of the run)",
        nargs="+", metavar="EPOCH", only_with=[{"lr_schedule": ("multistep",)}])
    add("--lr_args", setting, {}, "further settings of the schedule, such as power=2 or end=0.1; "
        "step_size defaults to 60 % of the run, of cyclic to half of it", owner="lr_schedule",
        parts={name: own(Schedule, *each) for name, each in schedules.SETTINGS.items()})
    add("--lr_scaling", Choice(["none", "linear", "sqrt"]), "none", "scaling of --lr by the global "
        "batch / --base_bs, or its square root")
    add("--base_bs", count, 128, "global batch, in samples, for which --lr was tuned", metavar="N",
        only_with=[{"lr_scaling": ON}])


def _add_speed(parser: ScriptParser) -> None:
    add = parser.group("speed and devices")
    several = {"processes": ON}
    add("--device", str, "auto", "auto (a GPU if there is one), cpu, cuda, or cuda:N, which all "
        "processes share", common=True)
    add("--precision", Choice(precision.PRECISIONS), "auto",
        "precision; auto is bf16 where the device has it, else fp16 on GPUs and fp32 on CPUs",
        common=True)
    add("--deterministic", switch, False, "kernels that give the same bits in every run on a GPU")
    add("--backend", Choice(execution.BACKENDS), "auto", "how the model is executed; compile is "
        "torch.compile, auto is cudagraph for long runs on one GPU that allow it, else eager",
        common=True)
    add("--fuse", switch, False, "less memory: convolution, norm and ReLU, or MLPs, are recomputed")
    add("--checkpoint_activations", switch, False, "least memory: residual blocks are recomputed")
    add("--threads", number(int, 0, MAX_THREADS), 0, "CPU threads of a process; 0 shares the cores "
        "of the node", metavar="N", scope=Scope.NODE)
    add("--parallel", Choice(fsdp.PARALLEL), "ddp", "a copy of the model on each device (ddp), or "
        "shards over all devices (fsdp) or those of a node (hsdp)", only_with=[several])
    add("--distributed", switch, False, "an error unless torchrun started the script",
        scope=Scope.OUTPUT)
    add("--timeout", number(float, 0, 1e9, open_low=True), [TimeLimits.start, TimeLimits.step],
        "seconds to wait for another process, up to the first step and in later ones", nargs=2,
        metavar="SECONDS", scope=Scope.HOW)


def _add_communication(parser: ScriptParser) -> None:
    add = parser.group("communication")
    forms = [*comm_hooks.AllReduceHook.compressions, *comm_hooks.ROUNDED_BITS]
    several, diloco = {"processes": ON}, {"sync": ("diloco",)}
    slamb, meeting = {"optimizer": ("slamb",)}, {"sync": ("local", "diloco")}
    add("--grad_compress", Choice(forms), "none", "form in which gradients are "
        "sent; int8, int4 and sign correct what they lose", only_with=[several])
    add("--sync", Choice(comm_hooks.SYNCS), "sync", "gradients averaged in each step (sync); "
        "weights averaged every --local_steps (local), also with momentum (diloco)",
        only_with=[several, diloco])
    add("--local_steps", count, 50, "steps between two averagings of the weights", metavar="STEPS",
        only_with=[slamb, meeting])
    add("--dense_steps", natural, 10, "steps at the start that send everything", metavar="STEPS",
        only_with=[slamb, meeting])
    add("--wire_dtype", Choice(["bf16", "fp32", *WIRE_BITS]), "bf16", "format of what is "
        "sent; int8 and int4 are for SLAMB's momentum", only_with=[slamb, diloco])
    add("--sync_args", setting, {}, "lr and momentum of diloco",
        owner="sync", parts={"diloco": own(DiLoCo, "lr", "momentum")})


def _add_batches(parser: ScriptParser) -> None:
    add = parser.group("batches that change (sizes over all processes)")
    add("--dynamic_batch", Choice(RULES), "none", "rule by which the batch changes from "
        "epoch to epoch", common=True)
    add("--noise_scale", switch, False, "log of the gradient noise scale after each epoch; a "
        "single process takes its batch in two halves")
    add("--balance_workers", switch, False, "shares of the batch in proportion to speed",
        only_with=[{"processes": ON}])
    add("--micro_bs", count, None, "most samples at once on a device (default --bs on CPUs, what "
        "fits on GPUs)", metavar="N")
    add("--batch_milestones", count, None, "epochs of the changes (default one half and three "
        "quarters of the run)", nargs="+", metavar="EPOCH",
        only_with=[{"dynamic_batch": ("increase", "decrease")}])
    common = {**own(lr_power, "lr"), "min": None, "max": None}
    scheduled = common | own(schedule_growth, "factor")
    add("--batch_args", setting, {},
        "further settings of the rule, such as max=4096, factor=1.5 or lr=sqrt; "
        "replace_decay=true lets the batch grow where --lr_schedule would lower the rate",
        owner="dynamic_batch", parts={
            "increase": scheduled | own(schedule_growth, "replace_decay"), "decrease": scheduled,
            "loss": common | own(ByLoss, "kind", "factor", "threshold", "window"),
            "noise": common | own(ByNoise, "factor")})


def _add_run(parser: ScriptParser) -> None:
    add = parser.group("run")
    start, how = {"scope": Scope.START}, {"scope": Scope.HOW}
    add("--out", path_text, None, "run folder (default runs/SCRIPT-TIME)", metavar="DIR",
        scope=Scope.OUTPUT, common=True)
    add("--resume -r", path_text, None, "checkpoint or run folder to go on from; without PATH, "
        "--out or the newest run; auto: --out if it holds a checkpoint, else a new run", nargs="?",
        metavar="PATH|auto", common=True, **start)
    add("--checkpoint", path_text, None, "trained model: best or last of --resume, --out or the "
        "newest run (last with --resume alone), a run folder or a .pt file", common=True,
        metavar="best|last|PATH", **start)
    add("--eval_every", count, 1, "epochs between two evaluations; the last is always evaluated",
        metavar="EPOCHS")
    add("--save_every", natural, 0, "steps between two saves; 0 saves after each epoch only",
        metavar="STEPS", **how)
    add("--keep", count, 2, "checkpoints to keep: last.pt, last-1.pt before it and so on",
        metavar="N", **how)
    add("--recipe -c", path_text, None, "recipes/NAME.yaml, or a YAML file, with flags that the "
        "command line overrides", metavar="NAME", common=True, **start)
    add("--track", Choice(TRACKERS), "none", "tracker; wandb stays offline unless WANDB_MODE is "
        "set", scope=Scope.OUTPUT)
    add("--log_every", not_negative, 60.0, "seconds without output after which a line of progress "
        "is printed; 0 is never", metavar="SECONDS", scope=Scope.NODE)
    add("--evaluate", switch, False, "accuracy of --checkpoint on the test set, in all and of each "
        "class", common=True, **start)
    add("--predict", path_text, None, "images, texts (a line or a row each) or folders to classify",
        nargs="+", metavar="PATH", common=True, **start)
    add("--predict_out", output_file(predictions.SUFFIXES, overwrite=False), None, ".jsonl or .csv "
        "file for the predictions and probabilities", metavar="FILE", common=True, **start)
    add("--export", output_file(export.SUFFIXES, overwrite=True), None, ".onnx or .pt2 file for "
        "the model of --checkpoint, or .safetensors for its weights", metavar="FILE", common=True,
        **start)
