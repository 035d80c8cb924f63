"""Parameter groups: which parameters have weight decay, and which are under NGD.

optimizer = torch.optim.AdamW(decay_groups(model, 0.01), lr=1e-3)
optimizer = NGD(ngd_groups(model, 0.05), lr=0.08)
"""

from typing import Any

from torch import Tensor, nn

# Norms that may have several axes; torch 2.3 has no RMSNorm.
NORMS = (nn.LayerNorm, *([nn.RMSNorm] if hasattr(nn, "RMSNorm") else []))


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Splits the parameters into a group with weight decay and one without.

    Matrices, convolutions and embeddings, also those of positions, are decayed; biases, norms,
    other positions, and scales and tokens (three axes, one longer than 1) are not. Every parameter
    that requires a gradient is in exactly one group. Empty groups are left out.
    """
    norms = parameters_of(model, NORMS)
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_vector = parameter.ndim in (0, 1, 3) and long_axes(parameter) <= 1
            is_bias = is_vector or name.rpartition(".")[2].startswith("bias")
            is_decayed = not (is_bias or parameter in norms or is_position(name))
            (decayed if is_decayed else undecayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def ngd_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Splits the groups of `decay_groups` further, by whether a parameter is under NGD.

    Those that are not have `ngd=False`: the parameters of embeddings and of the classifier, those
    of norms that have several axes, and positions. Where `classifier_prefixes` does not know the
    classifier, make the groups yourself.
    """
    model = getattr(model, "_orig_mod", model)  # which torch.compile has wrapped
    left_out = parameters_of(model, (nn.Embedding, nn.EmbeddingBag))
    left_out |= {p for p in parameters_of(model, NORMS) if p.ndim > 1}
    heads = classifier_prefixes(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):  # also of shared ones
        if is_position(name) or name.startswith(heads):
            left_out.add(parameter)
    groups = []
    for group in decay_groups(model, weight_decay):
        for ngd in (True, False):
            parameters = [p for p in group["params"] if (p in left_out) != ngd]
            if parameters:
                groups.append({**group, "params": parameters, "ngd": ngd})
    return groups


def parameters_of(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> set[nn.Parameter]:
    """The parameters of all modules of some kinds."""
    modules = (module for module in model.modules() if isinstance(module, kinds))
    return {p for module in modules for p in module.parameters()}


def classifier_prefixes(model: nn.Module) -> tuple[str, ...]:
    """How names in the classifier begin: of the layers that timm names, or of the last linear one.

    >>> classifier_prefixes(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    ('1.',)
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    said = (getattr(model, "default_cfg", None) or {}).get("classifier") or linear[-1:]
    names = [said] if isinstance(said, str) else said
    return tuple(f"{name}." if name else "" for name in names)


def is_matrix(parameter: Tensor, group: dict[str, Any]) -> bool:
    """Whether a parameter of a group is under NGD, not AdamW: it has two axes longer than 1.

    One without elements is under AdamW, where there is nothing to do.
    """
    return bool(group["ngd"]) and long_axes(parameter) >= 2 and parameter.numel() > 0


def long_axes(parameter: Tensor) -> int:
    """The number of axes longer than 1."""
    return sum(length > 1 for length in parameter.shape)


def is_position(name: str) -> bool:
    """Whether this is the name of positions: positions, pos_embedding, ..."""
    words = name.rpartition(".")[2].split("_")
    return not {"pos", "position", "positions", "positional"}.isdisjoint(words)
