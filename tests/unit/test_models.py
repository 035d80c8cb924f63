"""ResNets and the Transformer: sizes, torchvision's weights, padding, pooling, token dropout."""

import copy

import pytest
import torch
from torch import nn
from torchvision import models

from backends.precision import Precision
from conftest import each_of
from models.image_models import create_model
from models.transformer import PAD, UNKNOWN, Dropout, Transformer
from models.vgg import patch_filters


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@each_of(
    ("arch", "expected"),
    [
        ("resnet18", 11_173_962),  # He et al.'s nets with a 3x3 stem and 10 classes
        ("resnet20", 272_474),  # 0.27 M in table 6 of the paper; projections add 2,752
        ("resnet110", 1_730_714),  # 1.7 M
    ],
)
def test_resnet_for_small_images_has_the_parameters_of_the_paper(arch, expected):
    assert count(create_model(arch, classes=10, channels=3, image_size=32)) == expected


def test_resnet_keeps_small_images_large():
    model = create_model("resnet18", classes=10, channels=1, image_size=32)
    sizes: list[int] = []
    for layer in (model.layer1, model.layer2, model.layer3, model.layer4):
        layer.register_forward_hook(lambda _m, _i, out: sizes.append(out.shape[-1]))
    model(torch.randn(2, 1, 32, 32))
    assert sizes == [32, 16, 8, 4]


@each_of("arch", ["resnet18", "resnet50"])
def test_torchvision_weights_load_by_name_and_give_the_same_outputs(arch):
    peer = models.get_model(arch, weights=None).eval()
    for module in peer.modules():  # statistics and scales that matter
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.running_var, module.weight.data):
                tensor.uniform_(0.5, 1.5)
            for tensor in (module.running_mean, module.bias.data):
                tensor.uniform_(-0.2, 0.2)
    ours = create_model(arch, classes=1000, channels=3, image_size=224).eval()
    ours.load_state_dict(peer.state_dict(), strict=True)
    x = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        expected = peer(x)
        atol = 1e-5 * expected.abs().max().item()
        torch.testing.assert_close(ours(x), expected, rtol=1e-5, atol=atol)


@each_of("channels", [1, 3])
def test_filters_of_vgg8_whiten_patches(channels):
    mix = torch.randn(channels, channels)
    smooth = nn.functional.avg_pool2d(torch.randn(64, channels, 20, 20), 3, stride=1)
    images = torch.einsum("cd,ndhw->nchw", mix, smooth) * 10
    filters = patch_filters(images)
    half = 4 * channels
    assert tuple(filters.shape) == (2 * half, channels, 2, 2)
    torch.testing.assert_close(filters[half:], -filters[:half])
    outputs = nn.functional.conv2d(images, filters[:half]).transpose(0, 1).flatten(1)
    covariance = outputs @ outputs.T / outputs.shape[1]
    torch.testing.assert_close(covariance, torch.eye(half), rtol=0, atol=0.05)


def test_vgg8_has_the_layers_of_the_paper_and_trains_all_but_the_filters():
    model = create_model("vgg8", classes=10, channels=3, image_size=32)
    assert count(model) == 1_972_514
    model.set_whitening(torch.randn(10, 3, 32, 32))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x, y = torch.randn(8, 3, 32, 32), torch.arange(8)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    changed = {n for n, tensor in model.state_dict().items() if not tensor.equal(before[n])}
    assert changed == set(before) - {"filters"}


@pytest.mark.compile
def test_compiled_vgg8_has_finite_gradients_in_bf16():
    """Its maximum over all places is looked for among values of another precision."""
    model = create_model("vgg8", classes=10, channels=3, image_size=16)
    with torch.autocast("cpu", torch.bfloat16):
        logits = torch.compile(model)(torch.randn(16, 3, 16, 16))
    logits.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


SIZES = {"width": 16, "depth": 2, "heads": 4, "mlp_width": 32, "max_len": 24, "dropout": 0.0}


def small(**options: object) -> Transformer:
    model = Transformer(60, 3, **SIZES | options)
    # far from the near-zero initial weights, so that every path matters
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    nn.init.zeros_(model.embed.weight[PAD].data)
    return model


def some_tokens(length: int) -> torch.Tensor:
    tokens = torch.randint(3, 60, (5, length))
    tokens[:, 0] = 2
    return tokens


def test_depthwise_convolutions_on_a_cpu_compute_in_fp32_as_do_those_of_a_copy():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 8, 1))
    precision = Precision("bf16", "cpu", torch.bfloat16)
    precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied[0].weight.zero_()
    x = torch.randn(2, 4, 8, 8)
    with precision.autocast():
        depthwise = model[0](x)
        assert model(x).dtype == torch.bfloat16
        assert torch.equal(copied[0](x)[0, :, 0, 0], copied[0].bias)
    assert torch.equal(depthwise, nn.Conv2d.forward(model[0], x))


def test_padding_does_not_change_the_logits_but_the_order_does():
    model = small().eval()
    tokens = some_tokens(9)
    padded = nn.functional.pad(tokens, (0, 15))
    with torch.no_grad():
        torch.testing.assert_close(model(padded), model(tokens), rtol=1e-5, atol=1e-5)
        swapped = tokens.clone()
        swapped[:, [3, 7]] = tokens[:, [7, 3]]
        assert (model(tokens) - model(swapped)).abs().max() > 1e-3
        tokens[0, 5:] = PAD  # rows of unequal length in one batch
        torch.testing.assert_close(model(tokens)[0], model(tokens[:1, :5])[0], rtol=1e-5, atol=1e-5)


def test_token_dropout_hides_tokens_in_training_only():
    model, seen = small(token_dropout=0.5), []
    model.embed.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0]))
    tokens = nn.functional.pad(some_tokens(20).repeat(40, 1), (0, 4))
    model.train()(tokens)
    model.eval()(tokens)
    hidden = seen[0] != tokens
    assert torch.equal(seen[1], tokens)
    assert (seen[0][hidden] == UNKNOWN).all()
    assert not hidden[:, 0].any()  # [CLS] stays
    assert not hidden[:, 20:].any()  # padding stays
    assert hidden[:, 1:20].float().mean().item() == pytest.approx(0.5, abs=0.03)


@each_of("p", [0.1, 0.5, 0.9])
def test_dropout_by_bytes_drops_that_share_and_keeps_the_mean(p):
    dropout = Dropout(p)
    x = torch.ones(100, 1001, dtype=torch.float64, requires_grad=True)
    y = dropout(x)
    assert (y == 0).double().mean().item() == pytest.approx(p, abs=0.005)
    assert y.mean().item() == pytest.approx(1, abs=0.02)
    assert y.unique().numel() == 2
    y.sum().backward()
    assert torch.equal(x.grad, y), "the gradient passes where the value does"
    assert torch.equal(dropout.eval()(x), x)
    assert not Dropout(1.0)(x).any()


def test_a_prior_adds_its_scores_over_the_root_of_the_words():
    scores = torch.randn(40, 3)
    scores[:3] = 0
    model = Transformer(40, 3, **SIZES, prior=scores).eval()
    tokens = torch.tensor([[2, 5, 6, 7, 0], [2, 9, 1, 0, 0]])
    with torch.no_grad():
        model.head.weight.zero_()  # the encoder says nothing, its bias is zero
        expected = torch.stack([scores[[5, 6, 7]].sum(0) / 3**0.5, scores[9]]) * model.prior_weight
        torch.testing.assert_close(model(tokens), expected)
        torch.testing.assert_close(model(tokens[1:, :3]), expected[1:])
    assert "prior" in {name for name, _ in model.named_buffers()} & model.state_dict().keys()
