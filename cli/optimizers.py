"""The values of --optimizer: how each is made, and its defaults but for the learning rate.

OPTIMIZERS["ngd"].make(groups, lr=0.08, momentum=0.6, nesterov=True, betas=(0.9, 0.999))
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch

from errors import InputError
from models import own_parts
from ngd import NGD
from optimizers.kaldi_ngd import KaldiNGD
from optimizers.lars import LARS
from optimizers.muon import Muon
from optimizers.param_groups import decay_groups, ngd_groups
from optimizers.torch_fused import fused_adamw, fused_sgd
from slamb import LAMB, SLAMB

MOMENTUM, ADAM = ("momentum", "nesterov"), ("betas",)
COMPRESSION = ("compress_ratio", "compress_warmup", "local_steps", "dense_steps")


@dataclass(frozen=True)
class OptimizerChoice:
    """A value of --optimizer."""

    make: Callable[..., torch.optim.Optimizer]  # called as make(groups, lr=..., **settings)
    flags: Sequence[str] = ()  # its own, by the names of its parameters
    _: KW_ONLY
    weight_decay: float  # of this and the next two: where the command line does not give them
    nesterov: bool = False
    momentum: float = 0.9
    own: Sequence[str] = ()  # its settings of --opt_args
    groups: Callable[..., list[dict[str, Any]]] = decay_groups  # called as groups(model, decay)


_SGD = partial(OptimizerChoice, flags=MOMENTUM, weight_decay=5e-4, nesterov=True)
_WHITENED = partial(
    OptimizerChoice,
    flags=MOMENTUM + ADAM,
    weight_decay=0.05,
    nesterov=True,
    momentum=0.6,
    groups=ngd_groups,
)
_LAMB = partial(OptimizerChoice, weight_decay=0.01)

OPTIMIZERS: Mapping[str, OptimizerChoice] = {
    "sgd": _SGD(fused_sgd),
    "adamw": OptimizerChoice(fused_adamw, ADAM, weight_decay=0.05),
    "ngd": _WHITENED(NGD, own=("rank", "adamw_ratio")),
    "kaldi_ngd": _SGD(KaldiNGD, own=("rank", "alpha", "eta", "update_period", "max_dim")),
    "muon": _WHITENED(Muon, own=("adamw_ratio",)),
    "lars": _SGD(LARS, own=("trust_coefficient", "clip")),
    "lamb": _LAMB(LAMB, ADAM),
    "slamb": _LAMB(SLAMB, ADAM + COMPRESSION, own=("beta3",)),
}


def optimizer_choice(name: str) -> OptimizerChoice:
    """A value of --optimizer; MODULE:NAME is a class or function of the user's own."""
    if not own_parts.is_own(name):
        return OPTIMIZERS[name]

    def make(groups: list[dict[str, Any]], *, lr: float, **settings: Any) -> Any:
        optimizer = own_parts.call(name, groups, settings={"lr": lr, **settings})
        if not isinstance(optimizer, torch.optim.Optimizer) or "lr" not in optimizer.defaults:
            raise InputError(f"{name}: makes no torch.optim.Optimizer with a default lr")
        parameters = inspect.signature(optimizer.step).parameters.values()
        if any(each.default is each.empty and each.kind <= 1 for each in parameters):
            raise InputError(f"{name}: its step needs arguments, and the scripts give it none")
        return optimizer

    return OptimizerChoice(make, weight_decay=0.0)


def users(flag: str) -> dict[str, Sequence[str]]:
    """The optimizers that have a flag, as `only_with` takes them."""
    return {"optimizer": [name for name, choice in OPTIMIZERS.items() if flag in choice.flags]}


def by_value(values: Mapping[str, float]) -> str:
    """Write a value of each optimizer, for example '0.02 for sgd, ngd; 1 for lars'."""
    names = defaultdict(list)
    for optimizer, value in values.items():
        names[value].append(optimizer)
    return "; ".join(f"{value:g} for {', '.join(group)}" for value, group in names.items())


def defaults_in_words(name: str) -> str:
    """Write the default of a flag for each optimizer that has it."""
    optimizers = OPTIMIZERS if name == "weight_decay" else users(name)["optimizer"]
    return by_value({each: getattr(OPTIMIZERS[each], name) for each in optimizers})
