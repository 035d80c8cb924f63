"""LoRA, low-rank updates of a frozen network (Hu et al., arXiv:2106.09685), by peft.

add_adapters(model, inputs, rank=8, classifier=names)  # in place: these and that are trained
state = merged(model.state_dict())              # the weights of the network as it was, updated

A linear layer of weight W (out, in) computes (W + SCALE B A) x with A (rank, in) and B (out, rank),
of which B begins as 0.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from errors import needing

SCALE = 2.0  # alpha / rank, for any rank
BASE, A, B = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"  # of peft's names


def add_adapters(
    model: nn.Module, inputs: Tensor, *, rank: int, classifier: Collection[str]
) -> None:
    """Give each linear layer but the classifier an update of this rank, and freeze the rest.

    Layers whose weights are read, and which are not called, get none, as in torchvision's Swin.
    torch's fast path of its TransformerEncoderLayer, which reads them, is turned off.

    Args:
        inputs: of the model, with which it runs once, in evaluation.
        classifier: names of its parameters, which are trained as they are.

    Raises:
        ValueError: the model has no such layer.
        InputError: peft is missing.
    """
    with needing("LoRA", "peft"):
        from peft import LoraConfig, inject_adapter_in_model
    torch.backends.mha.set_fastpath_enabled(False)
    layers = {name: each for name, each in model.named_modules() if type(each) is nn.Linear}
    called = set[str]()
    hooks = [
        layer.register_forward_hook(lambda *_, name=name: called.add(name))  # type: ignore[misc]
        for name, layer in layers.items()
    ]
    modes = {module: module.training for module in model.modules()}
    with torch.no_grad():
        model.eval()(inputs)
    for hook in hooks:
        hook.remove()
    for module, is_training in modes.items():
        module.training = is_training
    targets = [name for name in layers if name in called and f"{name}.weight" not in classifier]
    if not targets:
        raise ValueError("this network has no linear layers before its classifier")
    config = LoraConfig(r=rank, lora_alpha=round(SCALE * rank), target_modules=targets)
    inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if name in classifier:
            parameter.requires_grad_()


def merged(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The weights without adapters, into which these are added; others are returned as they are."""
    if not any(BASE in name for name in state):
        return state
    names = [name for name in state if ".lora_" not in name]
    plain = {name.replace(BASE, "."): state[name] for name in names}
    for name, down in state.items():
        if name.endswith(A):
            layer = name.removesuffix(A)
            update = state[layer + B].double() @ down.double()
            weight = plain[f"{layer}.weight"]
            plain[f"{layer}.weight"] = (weight.double() + SCALE * update).to(weight.dtype)
    return plain
