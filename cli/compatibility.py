"""The flags that are not supported together: one table, checked at the start of a run.

check(flags)         # raises InputError with one line for the first conflict
"""

from collections.abc import Mapping, Sequence
from typing import Any

from backends.cuda_graph import RECORDED_OPTIMIZERS
from cli.flag_parser import OFF, ON, Not, Values, conditions_in_words, holds
from cli.settings import BY_SLAMB, MEETING
from errors import InputError
from input_pipeline import own_data

SHARDED = {"parallel": ("fsdp", "hsdp")}
GRAPH = {"backend": ("cudagraph",)}
APEX = {"precision": ("apex_O1", "apex_O2")}
SCALED = {"precision": ("fp16", *APEX["precision"])}
NOT_OF_SHARDS = {"optimizer": Not(("sgd", "adamw", "ngd"))}
NOT_RECORDED = {"optimizer": Not(RECORDED_OPTIMIZERS)}
CORRECTED = {"grad_compress": Not(("none", "fp16", "bf16"))}
COMPRESSED = {"grad_compress": ON}
NOISE = ({"noise_scale": ON}, {"dynamic_batch": ("noise",)})
EXCHANGES = (BY_SLAMB, MEETING)

# flags, what each of them is not supported with, and a sentence that says why and what to do
CONFLICTS: Sequence[tuple[Sequence[Values], Sequence[Values], str]] = (
    # ---- communication
    ([BY_SLAMB], [MEETING], "the optimizer communicates by itself; leave it out"),
    ([BY_SLAMB], [COMPRESSED], "the optimizer communicates by itself; use --compress_ratio"),
    ([MEETING], [COMPRESSED], "it sends weights, not gradients; leave --grad_compress out"),
    ([MEETING], [SCALED],
     "each process would skip steps of its own; use --precision bf16 or fp32"),
    ([CORRECTED], [SCALED],
     "what a step leaves to the next does not fit a loss scale that changes; use --precision bf16 "
     "or fp32"),
    ([{"wire_dtype": ("sign",)}], [BY_SLAMB],
     "its momentum needs 4 bits at least; use --wire_dtype int4"),
    ([{"ema": ON}], EXCHANGES,
     "weights differ between the processes; leave one of them out"),
    # ---- batches that change
    ([{"balance_workers": ON}, *NOISE], EXCHANGES,
     "it needs gradients that are averaged in every step; leave one of them out"),
    (NOISE, [CORRECTED],
     "it needs each step's own gradients; use --grad_compress none, fp16 or bf16"),
    # ---- weights in shards
    ([SHARDED], [NOT_OF_SHARDS, MEETING, CORRECTED, *NOISE, {"ema": ON}],
     "each process holds only a part of every layer; use --parallel ddp, or --optimizer sgd, adamw "
     "or ngd"),
    ([SHARDED], [{"balance_workers": ON}, APEX, {"backend": Not(("auto", "eager"))}],
     "sharding does not support it; use --parallel ddp"),
    # ---- recorded steps
    ([GRAPH], [NOT_RECORDED, {"precision": ("fp16",)}, APEX, {"mixup": ("cutmix",)}],
     "a CUDA graph cannot contain decisions of the host; use --backend compile, or --optimizer "
     "sgd, adamw, ngd, lamb or lars"),
    ([GRAPH], [{"sync": ("diloco",)}], "the host counts its steps; use --backend compile"),
    ([GRAPH], [{"processes": ON}], "collectives are not recorded; use --backend compile"),
    # ---- classes of unequal size
    ([{"class_weights": ("balanced",)}], [{"balanced_sampling": ON}],
     "each of them gives all classes the same weight; leave one of them out"),
    # ---- a frozen network
    ([{"lora": ON}], [{"freeze": ON}, SHARDED, {"fuse": ON}, APEX],
     "it freezes the network and trains what it adds to the layers; leave one of them out"),
    # ---- held-out rows
    ([{"fold": ON}], [{"val_fraction": ON}], "the fold is what is held out; leave one of them out"),
    ([{"group_column": ON}], [{"dataset": Not(own_data.DATASETS)}],
     "the rows of that data belong to nothing; leave it out"),
    # ---- several labels a row
    ([{"label_separator": ON}], [{"dataset": Not(own_data.DATASETS)}],
     "each row of that data has one label; leave it out"),
    ([{"label_separator": ON}], [{"balanced_sampling": ON}, {"label_noise": ON},
                                 {"mixup": ("inter_class", "meta")}],
     "it needs one label a row; leave it out, or use --class_weights balanced or --mixup mixup"),
    ([{"best_by": ("map", "micro_f1")}], [{"label_separator": OFF}],
     "it is measured where rows may have several labels; use --best_by accuracy or macro_f1"),
    # ---- precision and layers
    ([APEX], NOISE, "it needs torch's own loss scale; use --precision fp16"),
    ([{"backend": ("ort",)}], [{"precision": Not(("auto", "fp32"))}],
     "it computes in fp32; leave --precision out"),
    ([{"backend": ("ort",)}], [{"fuse": ON}, {"checkpoint_activations": ON}],
     "ONNX Runtime decides itself what it keeps; leave it out"),
    ([{"backend": ("compile", "cudagraph")}], [{"checkpoint_activations": ON}],
     "torch's compiler fails on the recomputation; use --fuse, or --backend eager"),
    ([{"nesterov": ON}], [{"momentum": (0,)}],
     "there is no momentum to look ahead along; give --momentum above 0"),
)  # fmt: skip


def check(flags: Mapping[str, Any]) -> None:
    """Refuse flags that are not supported together.

    Raises:
        InputError: the first conflict of the table.
    """
    if problem := first_conflict(flags):
        raise InputError(problem)


def first_conflict(flags: Mapping[str, Any]) -> str:
    """What `check` says of the flags; '' where they go together."""
    for alternatives, others, why in CONFLICTS:
        if (first := held(alternatives, flags)) and (second := held(others, flags)):
            return f"{first[0]} is not supported with {second[0]}: {why}"
    return ""


def held(alternatives: Sequence[Values], flags: Mapping[str, Any]) -> list[str]:
    """Those of some values that the flags have, as a user gives them."""
    return [
        conditions_in_words({name: (flags.get(name),)})
        for each in alternatives
        for name, values in each.items()
        if holds(flags, name, values)
    ]
