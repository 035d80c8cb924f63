"""The settings of a run: each field is a flag with its type, default and help, and what it is for.

parser = script_parser(__doc__, ImageSettings, learning_rates={"sgd": 0.1, ...})
settings, checkpoint = options.parse(parser, "resnet50_test")     # an ImageSettings
settings.alpha                                                    # 0.99, a float for mypy

`Settings` has the flags of both scripts; those of one are in cli/image_classification.py and
cli/text_classification.py. Values that depend on others, such as lr, are filled in by
`options.parse`. docs/flags.md is written from here by `python -m figures.flags_page`.
"""

import json
import os
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from backends.device import MAX_THREADS
from backends.execution import BACKENDS
from backends.precision import PRECISIONS
from cli.flag_parser import (
    OFF,
    ON,
    Choice,
    Scope,
    ScriptParser,
    below_one,
    count,
    file_path,
    flag,
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
from cli.optimizers import OPTIMIZERS, by_value, defaults_in_words, users
from cli.yaml_file import read_yaml
from distributed import comm_hooks, fsdp
from distributed.diloco import DiLoCo
from distributed.world import TimeLimits
from dynamic_batch import RULES, ByLoss, ByNoise, lr_power, schedule_growth
from input_pipeline import own_data
from mixup import mixup
from models.hugging_face import is_hf
from models.own_parts import is_own
from optimizers import schedules
from optimizers.schedules import Schedule
from training import predictions
from training.evaluation import METRIC_NAMES
from training.export import SUFFIXES as EXPORT_SUFFIXES
from training.tracking import TRACKERS


def weights_of_classes(text: str) -> str | dict[str, float] | None:
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


def kth_fold(text: str) -> str:
    """An argparse type: K/N, the number of a fold from 1 on and how many there are."""
    number, slash, folds = text.partition("/")
    is_one = slash and number.isdecimal() and folds.isdecimal()
    if not is_one or not 1 <= int(number) <= int(folds) or int(folds) < 2:
        raise ArgumentTypeError(f"must be as 2/5, from 1/5 to 5/5, got {text}")
    return f"{int(number)}/{int(folds)}"


def interval(text: str) -> float:
    """An argparse type: a number of epochs, or a share of one."""
    value: float = not_negative(text)
    return fraction(text) if value < 1 else count(text.removesuffix(".0"))


def share_of_noise(text: str) -> float | str:
    """An argparse type: a share below 1, alone or as in 0.4:cat=dog,deer=horse."""
    share, colon, pairs = text.partition(":")
    value = below_one(share)
    named = [name for pair in pairs.split(",") for name in pair.split("=")]
    is_paired = all(pair.count("=") == 1 for pair in pairs.split(","))
    if colon and not (is_paired and len(set(named)) == len(named)):
        raise ArgumentTypeError("must be as 0.4 or 0.4:cat=dog,deer=horse, each class once")
    return f"{value!r}:{pairs}" if pairs else value


# -------------------------------------------------------------------- what some flags are for

USUAL_EPOCHS = 50  # of images
SEVERAL = {"processes": ON}
BY_SLAMB, BY_DILOCO = {"optimizer": ("slamb",)}, {"sync": ("diloco",)}
MEETING = {"sync": ("local", "diloco")}
FORMS = [*comm_hooks.AllReduceHook.compressions, *comm_hooks.ROUNDED_BITS]
NESTEROV = [name for name, choice in OPTIMIZERS.items() if choice.nesterov]
ALL_EPOCHS = {"end": 1.0}
MIXUP_ARGS = {
    "mixup": own(mixup, "weight", "per_sample") | ALL_EPOCHS,
    "inter_class": own(mixup, "weight") | ALL_EPOCHS,
    **dict.fromkeys(["fmix", "cutmix"], ALL_EPOCHS),
    "meta": {"held_out": 0.05, "end": 0.7},
}
OF_ALL_RULES = {**own(lr_power, "lr"), "min": None, "max": None}
SCHEDULED = OF_ALL_RULES | own(schedule_growth, "factor")
BATCH_ARGS = {
    "increase": SCHEDULED | own(schedule_growth, "replace_decay"),
    "decrease": SCHEDULED,
    "loss": OF_ALL_RULES | own(ByLoss, "kind", "factor", "threshold", "window"),
    "noise": OF_ALL_RULES | own(ByNoise, "factor"),
}


# -------------------------------------------------------------------- the groups of --help


@dataclass(frozen=True)
class Measured:
    """Defaults of a network from scratch on a data set, in place of those of all others."""

    flags: Mapping[str, Any]
    lr: Mapping[str, float]  # by optimizer; of others the usual
    batch: int  # samples of a step over all processes
    longest_warmup: float  # epochs
    image_size: int = 0  # its own, in pixels a side; another one is another data set


# A field of two lines would become one of eight.
# fmt: off
@dataclass(frozen=True, kw_only=True)
class Settings:
    """What both scripts can be told, in groups; each has a subclass with flags of its own."""

    datasets: ClassVar[Sequence[str]]  # values of --dataset, the default first
    mixing: ClassVar[Sequence[str]]  # values of --mixup
    defaults: ClassVar[Mapping[str, Any]] = {}  # those in which the scripts differ, by field
    measured: ClassVar[Mapping[tuple[str, str], Measured]] = {}  # by --dataset and --arch
    pretrained: ClassVar[Mapping[str, Any]]  # defaults of a run that begins with pretrained weights
    frozen: ClassVar[Mapping[str, Any]]  # defaults with --freeze
    pretrained_lr: ClassVar[Mapping[str, float]]  # of --lr, by optimizer; else a tenth of the usual
    model_flags: ClassVar[Sequence[str]]  # fields that weights must share with their new model
    fewest_steps: ClassVar[int]  # of an epoch, where --bs is not given
    usual_batch_size: ClassVar[int] = 128  # samples of one process where --bs is not given

    dataset: str = flag(Choice([]), "", "data set; hf:NAME or hf:FOLDER is Hugging "
        "Face's, folder and csv are your own files in --data_dir (docs/own_data.md)", common=True,
        group="data")
    data_dir: str = flag(path_text, "./data",
        "folder of the data sets, into which missing ones are downloaded (default $DATA_DIR, else "
        "./data)", metavar="DIR", scope=Scope.PLACE, common=True)
    subset: float = flag(fraction, 1.0, "share of the training set, the same of each class",
        metavar="F", common=True)
    val_fraction: float = flag(below_one, None, "share of the training set that is held out to "
        "choose the best epoch (default 0)", metavar="F", common=True)
    fold: str | None = flag(kth_fold, None, "held-out fold of the training set, and how many there "
        "are, as 2/5: with classes in proportion, but for several labels a row, and the same for "
        "every --seed", metavar="K/N")
    label_column: str | None = flag(str, None, "column of the labels of a table, by name or number "
        "from 1 on (default found by name; of texts, else the first)", metavar="COLUMN",
        common=True)
    group_column: str | None = flag(str, None, "column of what rows belong to, such as a patient, "
        "which is held out as a whole or not at all; of images in folders it is folder, the one "
        "below the class", metavar="COLUMN", only_with=[{"fold": ON}, {"val_fraction": ON}])
    label_noise: float | str = flag(share_of_noise, 0.0, "share of the training rows of each class "
        "that get a wrong label; 0.4:cat=dog,deer=horse swaps labels within these pairs only",
        metavar="F")
    balanced_sampling: bool = flag(switch, False, "epochs that draw each class equally often, rows "
        "of rare classes several times")
    label_separator: str | None = flag(str, None, "what separates the labels of a row in csv, "
        "tsv or jsonl, such as a vertical bar; rows may then have several labels, or none",
        metavar="TEXT", common=True)
    test: bool = flag(switch, True, "evaluation on the test set; --no-test leaves it alone, as a "
        "search should, and needs a validation set")
    baseline: bool | None = flag(switch, None, "accuracy of a linear model before the first epoch, "
        "for comparison (default on for folder and csv)", scope=Scope.HOW)
    workers: int | None = flag(natural, None, "processes that decode or augment images (default as "
        "many as --threads)", metavar="N", scope=Scope.NODE)

    batch_size: int = flag(count, 0, "", names="--bs --batch_size -b", metavar="N", common=True,
        group="training")
    epochs: int = flag(count, USUAL_EPOCHS, "", names="--epoch --epochs", metavar="N",
        common=True)
    accumulate: int = flag(count, 1, "batches whose gradients are added up for a step", metavar="K")
    label_smoothing: float = flag(below_one, 0.0, "share of each label that is spread over all "
        "classes", metavar="F")
    class_weights: str | dict[str, float] | None = flag(weights_of_classes, None,
        "factors of the losses of each class: balanced (all classes count alike), none, or a YAML "
        "file of lines 'class: weight'", metavar="balanced|FILE")
    best_by: str = flag(Choice(METRIC_NAMES), None, "what chooses the best epoch, on the "
        "validation set where there is one (default accuracy; map with --label_separator)")
    patience: int = flag(natural, 0, "epochs without a better one after which the run ends; 0 is "
        "off", metavar="EPOCHS")
    stop_at: float = flag(not_negative, 0.0, "value of --best_by, such as 0.9, at which the run "
        "ends; 0 is off", metavar="VALUE")
    ema: float = flag(below_one, 0.0, "decay, such as 0.999, of a moving average of the weights, "
        "which is evaluated and kept; 0 is none", metavar="DECAY")
    clip: float = flag(not_negative, 0.0, "norm to which the gradient is clipped; 0 is off",
        metavar="NORM")
    seed: int = flag(number(int, 0, 2 ** 32 - 1), 0, "seed of weights, order, augmentation and "
        "dropout", metavar="N", common=True)

    weights: str | None = flag(path_text, None, "first weights, and the tokenizer of texts: a run "
        "folder or .pt file, a .safetensors or state_dict file, or for images DEFAULT, those of "
        "torchvision or timm; the classifier keeps classes of the same name (default random)",
        metavar="FILE|DEFAULT", only_with=[{"resume": OFF}], common=True, group="fine-tuning")
    head: str = flag(Choice(["probe", "random"]), "probe", "with --weights: a classifier of new "
        "classes begins as a logistic regression on what the network computes (probe, for images), "
        "or at random (for texts without --freeze)", only_with=[{"resume": OFF}])
    freeze: bool = flag(switch, False, "training of the classifier alone, with --weights or --arch "
        "hf:NAME; without changes of images the network computes once")
    lora: int = flag(number(int, 0, 1024), 0, "rank of the updates of a frozen network (LoRA), "
        "with --weights or --arch hf:NAME; 0 trains it whole", metavar="RANK")

    mixup: str = flag(Choice([]), "none", "how pairs of samples and of their labels "
        "are mixed; --meta_learning stands for --mixup meta, which learns it", common=True,
        group="mixing of samples")
    alpha: float = flag(positive, 0.99, "strength: weights are drawn from Beta(A, A)", metavar="A",
        only_with=[{"mixup": ON}], common=True)
    mixup_args: dict[str, Any] = flag(setting, {}, "how samples are mixed: end, a share of the "
        "epochs; weight of mixup and the classes' kinds; per_sample of mixup; held_out, a share of "
        "the rows, of meta", owner="mixup", parts=MIXUP_ARGS)

    optimizer: str = flag(Choice(OPTIMIZERS, also=is_own), "ngd", "optimizer; --ngd stands for "
        "--optimizer ngd; MODULE:CLASS is your own, with --lr", common=True, group="optimizer")
    lr: float = flag(positive, None, "learning rate", metavar="RATE", common=True)
    weight_decay: float = flag(not_negative, None, "decay of weights, times the learning rate, but "
        f"not of biases and norms (default {defaults_in_words('weight_decay')}; 0 for your own)",
        metavar="F", common=True)
    momentum: float = flag(below_one, None, "decay of the momentum (default "
        f"{defaults_in_words('momentum')})", metavar="F", only_with=[users("momentum")])
    nesterov: bool = flag(switch, None, f"Nesterov momentum (default on for {', '.join(NESTEROV)}, "
        "unless --momentum is 0)", only_with=[users("nesterov")])
    betas: Sequence[float] = flag(below_one, [0.9, 0.999], "decays of the first and second moments "
        "of Adam", nargs=2, metavar="B", only_with=[users("betas")])
    opt_args: dict[str, Any] = flag(setting, {}, "further settings of the optimizer, such as "
        "rank=16; docs/flags.md lists them", owner="optimizer",
        parts={name: own(choice.make, *choice.own) for name, choice in OPTIMIZERS.items()})

    compress_ratio: float = flag(fraction, 0.1, "share of the momentum that a step sends",
        metavar="F", only_with=[users("compress_ratio")], group="SLAMB")
    compress_warmup: Sequence[float] = flag(fraction, [0.5, 0.5, 0.2],
        "these shares in the first epochs instead; none without a value", nargs="*", metavar="F",
        only_with=[users("compress_warmup")])

    lr_schedule: str = flag(Choice(schedules.SCHEDULES), "cosine", "schedule; polynomial falls "
        "linearly unless --lr_args power is given", common=True, group="learning rate")
    warmup: float = flag(not_negative, None, "epochs of a linear rise from 0 (default a tenth of "
        "the run, at most 5; 0 for onecycle and cyclic)", metavar="EPOCHS", common=True)
    gamma: float = flag(positive, 0.1, "factor of the rate at a change; inverse divides by 1 + F x "
        "epochs", metavar="F",
        only_with=[{"lr_schedule": ("step", "multistep", "exponential", "inverse")}])
    milestones: Sequence[int] | None = flag(count, None, "epochs of the changes (default 60 % and "
        "80 % of the run)", nargs="+", metavar="EPOCH", only_with=[{"lr_schedule": ("multistep",)}])
    lr_args: dict[str, Any] = flag(setting, {}, "further settings of the schedule, such as power=2 "
        "or end=0.1; step_size defaults to 60 % of the run, of cyclic to half of it",
        owner="lr_schedule",
        parts={name: own(Schedule, *each) for name, each in schedules.SETTINGS.items()})
    lr_scaling: str = flag(Choice(["none", "linear", "sqrt"]), "none",
        "scaling of --lr by the global batch / --base_bs, or its square root")
    base_bs: int = flag(count, 128, "global batch, in samples, for which --lr was tuned",
        metavar="N", only_with=[{"lr_scaling": ON}])

    device: str = flag(str, "auto", "auto (a GPU if there is one), cpu, cuda, or cuda:N, "
        "which all processes share", common=True, group="speed and devices")
    precision: str = flag(Choice(PRECISIONS), "auto", "precision; auto is bf16 where the "
        "device has it, else fp16 on GPUs and fp32 on CPUs", common=True)
    deterministic: bool = flag(switch, False, "kernels that give the same bits in every run on a "
        "GPU")
    backend: str = flag(Choice(BACKENDS), "auto", "how the model is executed; compile is "
        "torch.compile, auto is cudagraph for long runs on one GPU that allow it, else eager",
        common=True)
    fuse: bool = flag(switch, False, "less memory: convolution, norm and ReLU, or MLPs, are "
        "recomputed")
    checkpoint_activations: bool = flag(switch, False, "least memory: residual blocks are "
        "recomputed")
    threads: int = flag(number(int, 0, MAX_THREADS), 0, "CPU threads of a process; 0 shares the "
        "cores of the node", metavar="N", scope=Scope.NODE)
    parallel: str = flag(Choice(fsdp.PARALLEL), "ddp", "a copy of the model on each device (ddp), "
        "or shards over all devices (fsdp) or those of a node (hsdp)", only_with=[SEVERAL])
    distributed: bool = flag(switch, False, "an error unless torchrun started the script",
        scope=Scope.OUTPUT)
    timeout: Sequence[float] = flag(number(float, 0, 1e9, open_low=True),
        [TimeLimits.start, TimeLimits.step], "seconds to wait for another process, up to the first "
        "step and in later ones", nargs=2, metavar="SECONDS", scope=Scope.HOW)

    grad_compress: str = flag(Choice(FORMS), "none", "form in which gradients are sent; int8, int4 "
        "and sign correct what they lose", only_with=[SEVERAL], group="communication")
    sync: str = flag(Choice(comm_hooks.SYNCS), "sync", "gradients averaged in each step (sync); "
        "weights averaged every --local_steps (local), also with momentum (diloco)",
        only_with=[SEVERAL, BY_DILOCO])
    local_steps: int = flag(count, 50, "steps between two averagings of the weights",
        metavar="STEPS", only_with=[BY_SLAMB, MEETING])
    dense_steps: int = flag(natural, 10, "steps at the start that send everything", metavar="STEPS",
        only_with=[BY_SLAMB, MEETING])
    wire_dtype: str = flag(Choice(["bf16", "fp32", *comm_hooks.ROUNDED_BITS]), "bf16",
        "format of what is sent: SLAMB's momentum, diloco's changes of weights",
        only_with=[BY_SLAMB, BY_DILOCO])
    sync_args: dict[str, Any] = flag(setting, {}, "lr and momentum of diloco", owner="sync",
        parts={"diloco": own(DiLoCo, "lr", "momentum")})

    dynamic_batch: str = flag(Choice(RULES), "none", "rule by which the batch changes from epoch "
        "to epoch", common=True, group="batches that change (sizes over all processes)")
    noise_scale: bool = flag(switch, False, "log of the gradient noise scale after each epoch; a "
        "single process takes its batch in two halves")
    balance_workers: bool = flag(switch, False, "shares of the batch in proportion to speed",
        only_with=[SEVERAL])
    micro_bs: int | None = flag(count, None, "most samples at once on a device (default --bs on "
        "CPUs, what fits on GPUs)", metavar="N")
    batch_milestones: Sequence[int] | None = flag(count, None, "epochs of the changes (default one "
        "half and three quarters of the run)", nargs="+", metavar="EPOCH",
        only_with=[{"dynamic_batch": ("increase", "decrease")}])
    batch_args: dict[str, Any] = flag(setting, {}, "further settings of the rule, such as "
        "max=4096, factor=1.5 or lr=sqrt; replace_decay=true lets the batch grow where "
        "--lr_schedule would lower the rate", owner="dynamic_batch", parts=BATCH_ARGS)

    out: str | None = flag(path_text, None, "run folder (default runs/SCRIPT-TIME)", metavar="DIR",
        scope=Scope.OUTPUT, common=True, group="run")
    resume: str | None = flag(path_text, None, "checkpoint or run folder to go on from; without "
        "PATH, --out or the newest run; auto: --out if it holds a checkpoint, else a new run",
        names="--resume -r", nargs="?", metavar="PATH|auto", common=True, scope=Scope.START)
    checkpoint: str | None = flag(path_text, None, "trained model: best or last of --resume, --out "
        "or the newest run (last with --resume alone), a run folder or a .pt file", common=True,
        metavar="best|last|PATH", scope=Scope.START)
    eval_every: float = flag(interval, 1, "epochs between two evaluations, or a share of one, such "
        "as 0.25; the last is always evaluated", metavar="EPOCHS")
    save_every: int = flag(natural, 0, "steps between two saves; 0 saves after each epoch only",
        metavar="STEPS", scope=Scope.HOW)
    keep: int = flag(count, 2, "checkpoints to keep: last.pt, last-1.pt before it and so on",
        metavar="N", scope=Scope.HOW)
    recipe: str | None = flag(path_text, None, "recipes/NAME.yaml, or a YAML file, with flags that "
        "the command line overrides", names="--recipe -c", metavar="NAME", common=True,
        scope=Scope.START)
    track: str = flag(Choice(TRACKERS), "none", "tracker; wandb stays offline unless WANDB_MODE is "
        "set", scope=Scope.OUTPUT)
    log_every: float = flag(not_negative, 60.0, "seconds without output after which a line of "
        "progress is printed; 0 is never", metavar="SECONDS", scope=Scope.NODE)
    evaluate: bool = flag(switch, False, "accuracy of --checkpoint on the test set, in all and of "
        "each class", common=True, scope=Scope.START)
    predict: Sequence[str] | None = flag(path_text, None, "images, texts (a line or a row each) or "
        "folders to classify", nargs="+", metavar="PATH", common=True, scope=Scope.START)
    predict_out: str | None = flag(output_file(predictions.SUFFIXES, overwrite=False), None,
        ".jsonl or .csv file for the predictions and probabilities", metavar="FILE", common=True,
        scope=Scope.START)
    export: str | None = flag(output_file(EXPORT_SUFFIXES, overwrite=True), None,
        ".onnx or .pt2 file for the model of --checkpoint, or .safetensors for its weights",
        metavar="FILE", common=True, scope=Scope.START)

    arch: str  # the first field that both scripts declare
    # fmt: on

    @classmethod
    def measured_for(cls, flags: Mapping[str, Any]) -> Measured | None:
        """What was measured of a run's network and data set, from scratch; None for others."""
        measured = cls.measured.get((flags["dataset"], flags["arch"]))
        if measured is None or flags["weights"] is not None:
            return None
        return measured if flags.get("image_size") in (None, 0, measured.image_size) else None

    def usual_batch(self, parts: int) -> int:
        """Samples of a part of a step, where --bs is not given; each process has --accumulate."""
        if begins_with_weights(vars(self)):
            return self.pretrained["batch_size"]
        measured = self.measured_for(vars(self))
        return max(1, measured.batch // parts) if measured else self.usual_batch_size

    @property
    def holds_out(self) -> bool:  # rows of the training set, for a validation set if there is none
        return bool(self.val_fraction or self.fold)

    @property
    def views(self) -> int:  # of a test sample, over which outputs are averaged
        return 1

    @property
    def repeats_samples(self) -> bool:  # alike in every epoch of training
        return True

    @property
    def several_sizes(self) -> bool:  # of a sample, during the run
        return False


S = TypeVar("S", bound=Settings)


def begins_with_weights(flags: Mapping[str, Any]) -> bool:
    """Whether a network that was trained before is trained on."""
    return flags["weights"] is not None or is_hf(flags["arch"])


def script_parser(
    description: str | None, kind: type[S], learning_rates: Mapping[str, float]
) -> ScriptParser[S]:
    """The flags of a script, with its defaults of --lr by optimizer."""
    epochs = str(kind.defaults.get("epochs", USUAL_EPOCHS))
    batch = f"{kind.usual_batch_size}, of few rows fewer"
    for (dataset, arch), measured in kind.measured.items():
        epochs += f"; {measured.flags['epochs']} for {arch} on {dataset}"
        batch += f"; {measured.batch} over all processes for {arch} on {dataset}"
    own = [name for name in own_data.DATASETS if name in kind.datasets]
    changes: dict[str, dict[str, Any]] = {
        "dataset": {"type": Choice(kind.datasets, also=is_hf), "default": kind.datasets[0]},
        "data_dir": {"default": path_text(os.environ.get("DATA_DIR") or "./data")},
        "batch_size": {
            "help": f"samples of a process in one forward and backward pass (default {batch})"
        },
        "epochs": {"help": f"length of the run (default {epochs})"},
        "mixup": {"type": Choice(kind.mixing)},
        "label_column": {"only_with": [{"dataset": own}]},
        "lr": {"help": f"learning rate (default {by_value(learning_rates)})"},
    }
    for field, value in kind.defaults.items():
        changes[field] = {**changes.get(field, {}), "default": value}
    return ScriptParser(description, kind, learning_rates=learning_rates, changes=changes)
