"""Fused layers: outputs and gradients of the modules they replace, with less stored memory."""

import copy
from collections import OrderedDict

import torch
from torch import Tensor, nn

from conftest import each_of
from models import activation_checkpointing, fusion
from models.image_models import create_model
from trainers import text_model


def outcome(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, gradients of the input and of all parameters, buffers."""
    y = model(x)
    torch.manual_seed(2)
    grads = torch.autograd.grad(y, [x, *model.parameters()], torch.randn_like(y))
    return [y.detach(), *grads, *(buffer.clone() for buffer in model.buffers())]


def assert_same(one: nn.Module, other: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(outcome(other, x), outcome(one, x), rtol=1e-6, atol=1e-9)


def stored_bytes(run) -> int:
    """Bytes of distinct memory that are stored for the backward pass, parameters aside."""
    stored: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(stored.values())


@each_of("activation", ["gelu", "relu"])
def test_a_fused_mlp_equals_the_modules(activation):
    torch.manual_seed(3)
    kind = {"gelu": nn.GELU, "relu": nn.ReLU}[activation]
    layers = {"fc1": nn.Linear(5, 7), "act": kind(), "fc2": nn.Linear(7, 3)}
    modules = nn.Sequential(OrderedDict(layers)).double()
    x = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    model = nn.ModuleList([copy.deepcopy(modules).eval()])
    assert fusion.fuse(model) == 1
    fused = model[0]
    assert isinstance(fused, fusion.FusedMlp)
    assert not fused.training
    assert fused.state_dict().keys() == modules.state_dict().keys()
    assert_same(modules, fused, x)
    assert stored_bytes(lambda: fused(x)) == x.numel() * x.element_size()
    longer = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    assert fusion.fuse(nn.ModuleList([longer])) == 0, "another sequence is not replaced"


def resnet(arch: str) -> tuple[nn.Module, Tensor]:
    """A ResNet in double precision, and images for it."""
    torch.manual_seed(4)
    model = create_model(arch, classes=10, channels=3, image_size=32).double()
    return model, torch.randn(4, 3, 16, 16, dtype=torch.float64, requires_grad=True)


@each_of("arch", ["resnet8", "resnet18", "resnet50"])
def test_a_fused_resnet_has_the_same_gradients_names_and_statistics(arch):
    model, x = resnet(arch)
    fused = copy.deepcopy(model)
    assert fusion.fuse(fused) > 4
    assert_same(model, fused, x)
    assert model.state_dict().keys() == fused.state_dict().keys()
    assert stored_bytes(lambda: fused(x)) < 0.75 * stored_bytes(lambda: model(x))


@each_of(
    ("method", "dropout"),
    [(fusion.fuse, 0.0), (activation_checkpointing.checkpoint_activations, 0.3)],
)
def test_a_changed_transformer_has_the_same_gradients_names_and_dropout(method, dropout):
    model = text_model(depth=2, dropout=dropout)
    other, tokens = copy.deepcopy(model), torch.randint(3, 50, (6, 9))
    assert method(other) == 2
    for each in (model, other):
        torch.manual_seed(10)
        each(tokens).square().sum().backward()
    assert model.state_dict().keys() == other.state_dict().keys()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-9, atol=1e-12)


@each_of("fused", [False, True])
def test_checkpointed_blocks_have_the_same_gradients_and_statistics(fused):
    model, x = resnet("resnet8")
    names = list(model.state_dict())
    if fused:
        fusion.fuse(model)
    less = copy.deepcopy(model)
    assert activation_checkpointing.checkpoint_activations(less) == 3
    for _ in range(2):
        assert_same(model, less, x)
    assert list(less.state_dict()) == names
    assert stored_bytes(lambda: less(x)) < (0.8 if fused else 0.5) * stored_bytes(lambda: model(x))
