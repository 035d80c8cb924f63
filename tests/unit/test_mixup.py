"""Mixing: inputs and labels have the same weights, and the loss is that of the soft labels."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

import mixup
from cli import factory
from cli.data import Data
from conftest import each_of, parsed
from distributed.world import World
from errors import InputError
from trainers import text_model
from training.losses import CrossEntropy, MixedCrossEntropy

SIZE = (12, 10)


def labels_of(count: int = 64, classes: int = 5):
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(0))


@each_of("kind", ["mixup", "inter_class"])
def test_samples_have_the_given_weight(kind):
    mix = mixup.sample_mix(kind, labels_of(), alpha=1.0, weight=0.8, height=1, width=1)
    torch.testing.assert_close(mix.weight, torch.full((64,), 0.8))
    assert len(mix.partner.unique()) > 30
    alone = mixup.sample_mix(
        "inter_class", torch.zeros(3), alpha=1.0, weight=0.8, height=1, width=1
    )
    assert torch.equal(alone.weight, torch.ones(3)), "no partner of another class"


@each_of("kind", [kind for kind in mixup.KINDS if kind not in ("none", "meta")])
def test_blend_is_the_weighted_sum_and_the_labels_weigh_as_the_inputs_do(kind):
    torch.manual_seed(0)
    mix = mixup.sample_mix(kind, labels_of(), alpha=1.0, height=SIZE[0], width=SIZE[1])
    x = torch.randn(64, 3, *SIZE, dtype=torch.float64)
    weight = mix.weight[:, None, None, None] if mix.weight_map is None else mix.weight_map
    weight = weight.double().expand(64, 1, *SIZE).clone()
    if mix.box is not None:
        top, bottom, left, right = mix.box
        weight[:] = 1
        weight[..., top:bottom, left:right] = 0
    expected = weight * x + (1 - weight) * x[mix.partner]
    torch.testing.assert_close(mixup.blend(x, mix), expected)
    last = x.to(memory_format=torch.channels_last)
    torch.testing.assert_close(mixup.blend(last, mix), expected)
    assert mixup.blend(last, mix).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(x, last), "the input is left alone"
    if mix.weight_map is None and mix.box is None:
        layout = torch.channels_last_3d
        video = torch.stack([x, x + 1], 2).to(memory_format=layout)
        torch.testing.assert_close(mixup.blend(video, mix)[:, :, 1], expected + 1)
        assert mixup.blend(video, mix).is_contiguous(memory_format=layout)
    # an image of ones among zeros: what is left of it is its label's weight
    own = mixup.blend(torch.eye(64)[:, :, None, None].expand(64, 64, *SIZE), mix).mean((2, 3))
    other = mix.partner != torch.arange(64)
    torch.testing.assert_close(own.diagonal()[other], mix.weight[other])
    assert ((mix.weight >= 0) & (mix.weight <= 1)).all()
    assert mix.weight.std() > 0 or kind in ("mixup", "fmix", "cutmix")


def test_lambda_follows_the_beta_distribution():
    for alpha in (0.01, 0.3, 2.0):
        generator = torch.Generator().manual_seed(0)
        weight = mixup.sample_beta(alpha, 20_000, generator=generator)
        assert weight.mean().item() == pytest.approx(0.5, abs=0.01)
        assert weight.var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.03)
    assert all(min(each, 1 - each) < 0.01 for each in mixup.sample_beta(1e-5, 1000).tolist())
    assert set(mixup.sample_beta(0.0, 1000).tolist()) == {1.0}
    assert mixup.sample_beta(1e38, 9).tolist() == [0.5] * 9
    with pytest.raises(ValueError, match="alpha=-1"):
        mixup.sample_beta(-1, 2)


def test_mixup_permutes_and_draws_one_lambda_or_one_each_and_classes_are_as_named():
    labels = labels_of()
    for per_sample, count in ((False, 1), (True, 64)):
        mix = mixup.mixup(labels, 1.0, per_sample=per_sample)
        assert sorted(mix.partner.tolist()) == list(range(64))
        assert len(mix.weight.unique()) == count
    mix = mixup.inter_class(labels, 1.0)
    assert (labels[mix.partner] != labels).all()
    assert (mix.weight < 1).all()


def test_fmix_cuts_out_a_shape_of_the_sampled_size_with_a_short_edge():
    for alpha in (0.3, 1.0, 3.0):
        torch.manual_seed(0)
        mix = mixup.fmix(labels_of(), alpha, height=40, width=33)
        torch.manual_seed(0)
        sampled = mixup.mixup(labels_of(), alpha)
        torch.testing.assert_close(mix.weight, sampled.weight, atol=1 / 1320, rtol=0)
        assert set(mix.weight_map.unique().tolist()) <= {0.0, 1.0}
        assert mix.weight_map.diff(dim=3).abs().mean() < 0.1, "noise of no smoothness has 0.5"


def test_the_area_of_the_rectangle_of_cutmix_follows_lambda(monkeypatch):
    sample = partial(mixup.cutmix, torch.zeros(2), alpha=1.0, height=64, width=32)
    for lam in (1.0, 0.9, 0.3, 0.0):
        monkeypatch.setattr(mixup, "sample_beta", lambda *_, lam=lam, **__: torch.tensor([lam]))
        mixes = [sample() for _ in range(300)]
        for length, first in ((64, 0), (32, 2)):  # of an axis, and where the box has its edges
            edges = [mix.box[first : first + 2] for mix in mixes]
            longest = max(stop - start for start, stop in edges)  # not cut off at a border
            assert longest == pytest.approx(length * (1 - lam) ** 0.5, abs=1)
            assert lam > 0.5 or {0, length} <= {edge for each in edges for edge in each}
        for mix in mixes:
            top, bottom, left, right = mix.box
            assert mix.weight[0].item() == pytest.approx(1 - (bottom - top) * (right - left) / 2048)


@each_of("smoothing", [0.0, 0.1])
@each_of("per_sample", [False, True])
@each_of("weights", [None, torch.tensor([0.1, 0.5, 1.0, 2.0, 5.0]).double()])
def test_the_loss_and_its_gradient_are_those_of_the_soft_label(smoothing, per_sample, weights):
    labels, logits = labels_of(), torch.randn(64, 5, dtype=torch.float64, requires_grad=True)
    mix = mixup.mixup(labels, 1.0, per_sample=per_sample)
    mix.weight = mix.weight.double().expand(64)
    settings = {"mix": mix, "label_smoothing": smoothing, "class_weights": weights}
    ours = mixup.cross_entropy(logits, labels, **settings)
    fp32 = None if weights is None else weights.float()  # as those of --class_weights are
    target = F.one_hot(labels, 5).double()
    plain = F.cross_entropy(logits, target, weights, label_smoothing=smoothing)
    unmixed = CrossEntropy(smoothing, fp32).compare(logits, labels).loss
    torch.testing.assert_close(unmixed, plain, rtol=1e-6, atol=0)
    hot = mixup.blend(F.one_hot(labels, 5).double(), mix)
    soft = F.cross_entropy(logits, hot, weights, label_smoothing=smoothing)
    torch.testing.assert_close(ours, soft)
    assert torch.equal(mixup.cross_entropy(logits, labels.int(), **settings), ours)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (ours, soft)))
    pixels = logits.unsqueeze(-1).expand(-1, -1, 64), labels.unsqueeze(-1).expand(-1, 64)
    torch.testing.assert_close(mixup.cross_entropy(*pixels, **settings), soft)


def test_correct_predictions_weigh_both_labels():
    labels = torch.tensor([0, 1, 2, 1])
    mix = mixup.Mix(torch.tensor([1, 0, 3, 3]), torch.tensor([0.7, 0.4, 0.9, 0.2]))
    logits = F.one_hot(torch.tensor([0, 0, 0, 1]), 3).float()
    assert mixup.num_correct(logits, labels, mix=mix).item() == pytest.approx(0.7 + 0.6 + 0.0 + 1.0)


@each_of("box", [(3, 3, 0, 8), (0, 8, 0, 8), (2, 5, 7, 8), (8, 8, 8, 8)])
@each_of("channels", [1, 3])
@each_of("last", [False, True])
def test_any_box_is_pasted_with_and_without_a_gradient(box, channels, last):
    layout = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(4, channels, 8, 8).to(memory_format=layout)
    mix = mixup.Mix(torch.tensor([1, 2, 3, 0]), torch.ones(4), box=box)
    in_box = torch.zeros(8, 8, dtype=torch.bool)
    in_box[box[0] : box[1], box[2] : box[3]] = True
    expected = torch.where(in_box, x[mix.partner], x)
    assert torch.equal(mixup.blend(x, mix), expected)
    leaf = x.clone().requires_grad_()
    mixed = mixup.blend(leaf, mix)
    assert torch.equal(mixed, expected)
    mixed.sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(x))


def transformer(**options):
    """A small model whose prior says nothing of padding, as naive Bayes scores have it."""
    prior = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    prior[:3] = 0
    return text_model(**{"prior": prior, **options}).eval()


def test_the_transformer_mixes_pooled_texts_and_their_prior():
    model = transformer(depth=1)
    tokens = torch.randint(3, 50, (6, 9))
    tokens[2, 4:] = 0
    partner, weight = torch.randperm(6), torch.rand(6, dtype=torch.float64)
    plain, own = model(tokens), weight[:, None]
    # everything behind the pooling is linear, so that logits mix as the pooled texts do
    expected = own * plain + (1 - own) * plain[partner]
    torch.testing.assert_close(model(tokens, partner, weight), expected)


def test_the_transformer_mixes_token_embeddings_with_padding_as_absence():
    model = transformer(depth=2, mix_at="tokens")
    torch.nn.init.normal_(model.positions)
    tokens = torch.randint(3, 50, (6, 9))
    tokens[2, 4:] = tokens[3, 7:] = 0
    partner, weight = torch.tensor([2, 3, 0, 5, 1, 4]), torch.rand(6, dtype=torch.float64)
    plain, mixed = model(tokens), model(tokens, partner, weight)
    torch.testing.assert_close(model(tokens, partner, torch.ones(6)), plain)
    torch.testing.assert_close(model(tokens, partner, torch.zeros(6)), plain[partner])
    torch.testing.assert_close(model(tokens, torch.arange(6), weight), plain)
    torch.testing.assert_close(model(tokens[partner], partner.argsort(), 1 - weight), mixed)
    assert (mixed - plain).abs().min() > 1e-4
    # more padding changes nothing
    wider = torch.cat([tokens[:, :8], torch.zeros(6, 1, dtype=torch.long)], 1)
    torch.testing.assert_close(model(wider, partner, weight), model(tokens[:, :8], partner, weight))


def test_mixed_tokens_attend_to_a_place_as_much_as_it_is_there():
    model = transformer(depth=1, mix_at="tokens", prior=None)
    tokens = torch.tensor([[2, 7, 8, 0, 0], [2, 9, 10, 11, 12]])
    weight = torch.tensor([0.7, 0.7], dtype=torch.float64)
    # the same text with each position written 10 times its presence, in plain attention and mean
    counts = [10, 10, 10, 3, 3]
    table = model.embed(tokens) * 4
    row = (0.7 * table[0] + 0.3 * table[1] + model.positions[:5])[None]
    many = row.repeat_interleave(torch.tensor(counts), 1)
    seen = model.blocks[0](many, torch.ones(1, 1, 1, sum(counts), dtype=torch.bool))
    expected = model.head(model.norm(seen).mean(1))
    torch.testing.assert_close(model(tokens, torch.tensor([1, 0]), weight)[:1], expected)


def test_the_flags_choose_the_loss(tmp_path):
    sample_mix = mock.Mock()

    def create(words: str, inside: bool = False):
        args = parsed("texts", words)
        classes = {"classes": ["a", "no", "1", "d"]}
        data = Data(None, {}, classes, torch.tensor([0, 1, 1, 3, 3]), model_mixes=inside)
        made = {"sample_mix": sample_mix, "meta_mixup": mixup.MetaMixup}
        run = mock.Mock(world=World())
        return factory.create_loss(args, run, data, **made)[0]

    for inside in (False, True):
        flags = "--mixup inter_class --mixup_args weight=0.8 --label_smoothing 0.2"
        loss_fn = create(flags, inside)
        assert (loss_fn.model_mixes, loss_fn.unmixed.label_smoothing) == (inside, 0.2)
        loss_fn.sample_mix(labels_of(), height=3, width=4)
        (kind, _), named = sample_mix.call_args
        assert (kind, named["alpha"], named["weight"]) == ("inter_class", 0.99, 0.8)
        assert (named["height"], named["width"]) == (3, 4)
    assert create("").class_weights is None
    balanced = create("--class_weights balanced --mixup mixup").unmixed.class_weights
    torch.testing.assert_close(balanced[[0, 1, 3]], torch.tensor([5 / 3, 5 / 6, 5 / 6]))
    path = tmp_path / "weights.yaml"
    path.write_text("' no': 3\n1: 0.5\n")  # a blank too much
    given = create(f"--class_weights {path}").class_weights
    torch.testing.assert_close(given, torch.tensor([1, 3, 0.5, 1]) * 5 / 9)
    for text, message in (
        ("dd: 3", "there is no class 'dd'; the classes are a, no, 1, d"),
        ("d: -1", "must be above 0, got -1"),
        ("- d", "must hold lines of 'class: weight'"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            create(f"--class_weights {path}")


def test_the_loss_mixes_inputs_or_lets_the_model_do_it():
    labels, x = labels_of(), torch.randn(64, 1, *SIZE)
    model = mock.Mock(return_value=torch.zeros(64, 5))
    for inside in (False, True):
        torch.manual_seed(0)
        loss_fn = MixedCrossEntropy(lambda labels, **size: mixup.mixup(labels, 1.0), inside)
        loss, _, weight = loss_fn(model, x, labels)
        torch.testing.assert_close(loss, torch.tensor(5.0).log())
    (mixed,), (raw, partner, weights) = (call.args for call in model.call_args_list)
    assert raw is x
    torch.testing.assert_close(mixed, mixup.blend(x, mixup.Mix(partner, weights)))
    torch.testing.assert_close(weight, weights.sum())
