"""TODO."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from errors import InputError


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two parameter groups: matrices, convolutions and embeddings with weight decay; biases, norms and positions without.

    Every parameter that wants a gradient is in exactly one group.
    """
    decayed: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            bare = (
                parameter.ndim <= 1 or "pos" in name.rpartition(".")[2]
            )  # positions, pos_embedding, relative_position_...
            (rest if bare else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def ngd_groups(model: nn.Module, weight_decay: float, skip: Sequence[str] = ()) -> list[dict]:
    """`decay_groups` for NGD: parameters whose names contain one of `skip` are put into groups with `ngd=False`.

    Raises:
        InputError: one of `skip` is in no name.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    for word in skip:
        if not any(word in name for name in names.values()):
            parts = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names.values()))
            raise InputError(
                f"--ngd_skip {word}: no parameter has this in its name; the model's parts are {parts}"
            )
    groups = []
    for group in decay_groups(model, weight_decay):
        for ngd in (True, False):
            some = [p for p in group["params"] if any(word in names[p] for word in skip) != ngd]
            if some:
                groups.append({**group, "params": some, "ngd": ngd})
    return groups
