"""Parameter groups: which parameters have weight decay, and which NGD preconditions.

optimizer = torch.optim.AdamW(decay_groups(model, 0.01), lr=1e-3)
optimizer = NGD(ngd_groups(model, 5e-4, skip=["embedding"]), lr=0.1)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from errors import InputError


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Splits the parameters into a group with weight decay and one without.

    Matrices, convolutions and embeddings are decayed; biases, norms and positions are not. Every
    parameter that requires a gradient is in exactly one group. Empty groups are left out.
    """
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_position = "pos" in name.rpartition(".")[2]  # positions, pos_embedding, ...
            (undecayed if parameter.ndim <= 1 or is_position else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def ngd_groups(
    model: nn.Module, weight_decay: float, skip: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Splits the groups of `decay_groups` further, by whether NGD preconditions a parameter.

    Args:
        model: the model.
        weight_decay: see `decay_groups`.
        skip: parameters whose names contain one of these are put into groups with `ngd=False`.

    Raises:
        InputError: one of `skip` is in no parameter's name.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    for word in skip:
        if not any(word in name for name in names.values()):
            modules = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names.values()))
            raise InputError(
                f"--ngd_skip {word}: no parameter has this in its name; "
                f"the model's parts are {modules}"
            )
    groups = []
    for group in decay_groups(model, weight_decay):
        for ngd in (True, False):
            parameters = [
                p for p in group["params"] if any(word in names[p] for word in skip) != ngd
            ]
            if parameters:
                groups.append({**group, "params": parameters, "ngd": ngd})
    return groups
