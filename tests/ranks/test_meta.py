"""Meta-mixup: wrong labels are found, doubted rows give way, held-out rows are given back."""

from unittest import mock

import pytest
import torch

import mixup
import ranks
from conftest import call, each_of
from input_pipeline.sampler import Sampler
from mixup import MetaMixup, Mix, least_share, wrong_labels
from models.transformer import Transformer
from trainers import build_optimizer, make_trainer
from training.batch_sampler import RankBatch
from training.losses import MixedCrossEntropy
from training.meta_learner import MetaLearner


@each_of("noise", [0.0, 0.1, 0.4])
def test_the_share_of_wrong_labels_is_that_of_confident_errors(noise):
    """Where the network itself is right in three of four rows, and knows when it is."""
    torch.manual_seed(0)
    true, sure = torch.randint(10, (20_000,)), torch.rand(20_000)
    is_right = torch.rand(20_000) < 2 * sure
    predicted = torch.where(is_right, true, torch.randint(10, (20_000,)))
    is_wrong = (true < 5) & (torch.rand(20_000) < 2 * noise)  # of half of the classes
    labels = torch.where(is_wrong, (true + 1) % 10, true)
    share, number, errors = wrong_labels(predicted, sure, labels)
    assert errors == pytest.approx((predicted != labels).float().mean().item())
    assert share == pytest.approx(noise, abs=0.015)
    assert number == pytest.approx(5000, abs=10)
    few = torch.tensor([7, 7, 7, 2, 2, 2, 2]), torch.linspace(0.1, 0.9, 7)
    found = wrong_labels(*few, torch.tensor([7, 7, 7, 2, 2, 2, 5]))
    assert found == (1, 1, pytest.approx(1 / 7)), "three rows have no quarter"
    meta = MetaMixup(1)
    meta.learn(*(each[:3] for each in (*few, few[0])))
    assert meta.shares is None, "not that labels are right"


def test_what_a_share_is_at_least():
    for share, number in ((0.0, 5), (0.4, 50), (1.0, 9), (0.07, 1000)):
        bound = torch.tensor(least_share(share, number), dtype=torch.float64)
        error = (bound * (1 - bound) / number).sqrt()  # Wilson's: that of the bound itself
        torch.testing.assert_close(share - bound, 2 * error, rtol=0, atol=1e-9)
    assert least_share(1.0, 1) < 0.21


def test_the_doubted_row_gives_way_and_lambda_varies_as_before():
    meta, labels = MetaMixup(20_000, alpha=0.7), torch.zeros(20_000, dtype=torch.long)
    meta.row_losses.excess.normal_()
    mixes, state = [], torch.get_rng_state()
    for meta.wrong in (0.0, 0.3, 0.9):
        torch.set_rng_state(state)
        meta.rows = torch.arange(20_000)
        mixes.append(meta.mix(labels))
    torch.set_rng_state(state)
    partner, start = torch.randperm(20_000), mixup.sample_beta(0.7, 20_000)
    assert mixes[0].weight.min() == 1, "no label is known to be wrong"
    assert all(torch.equal(mix.partner, partner) for mix in mixes[1:])
    excess = meta.row_losses.excess.double()
    doubt = (excess[partner] - excess) / (excess[partner] - excess).std()
    logit = torch.logit(start.double(), eps=1e-4)
    spread = torch.distributions.Beta(0.7, 0.7).sample((400_000,)).double().logit(eps=1e-6).std()
    for mix, slope in zip(mixes[1:], (1.2, 2.0)):
        expected = torch.sigmoid((logit + slope * spread * doubt) / (1 + slope**2) ** 0.5)
        torch.testing.assert_close(mix.weight.double(), expected, atol=5e-3, rtol=0)
        assert mix.weight.mean().item() == pytest.approx(0.5, abs=0.01)
        assert mix.weight.var().item() == pytest.approx(start.var().item(), rel=0.1)
    none = MetaMixup(4, alpha=0)
    none.wrong, none.rows = 0.9, torch.arange(4)
    none.row_losses.excess.normal_()
    assert none.mix(labels[:4]).weight.min() > 0.999, "alpha 0 mixes nothing"
    meta.rows = torch.arange(3)  # nobody said which rows the others are
    meta.observe(torch.randn(4, 2), labels[:4], meta.mix(labels[:4]))
    assert not meta.row_losses.sums.any()
    with pytest.raises(ValueError, match="of other data"):
        MetaMixup(4).load_state_dict(meta.state_dict())


def test_estimates_are_averaged_and_small_ones_are_none():
    for shares, errors, number, known in (
        ((0.5,), 0.6, 100, 0.0),  # nobody knows yet whether it falls
        ((0.5, 0.49), 0.6, 100, 0.495),
        ((0.5, 0.3), 0.6, 100, 0.0),  # it falls
        ((0.4, 0.4, 0.2), 0.6, 100, 0.3),  # it has been known
        ((0.4, 0.4, 0.9), 0.6, 100, 0.5),
        ((0.4, 0.4, 0.0, 0.0), 0.5, 100, 0.0),
        ((0.4, 0.4), 0.5, 6, 0.0),  # six rows do not say it
        ((0.4, 0.4), 0.7, 100, 0.0),  # a hard task that is being learned
        ((0.7, 0.7), 0.75, 100, 0.0),  # a network that knows nothing yet
    ):
        meta = MetaMixup(1)
        for share in shares:
            with mock.patch.object(mixup, "wrong_labels", return_value=(share, number, errors)):
                meta.learn(*[torch.zeros(1)] * 3)
        assert meta.wrong == pytest.approx(known), shares


def test_the_excess_of_a_row_is_the_mean_over_its_two_places():
    """And a try that ran out of memory does not count."""
    meta, expected = MetaMixup(8), torch.full((8,), torch.nan)
    learner, losses = MetaLearner(meta, mock.Mock(), until=1), meta.row_losses
    rows, labels = torch.tensor([5, 0, 3, 6]), torch.tensor([2, 0, 2, 1])
    mix = Mix(torch.tensor([2, 3, 1, 0]), torch.tensor([0.9, 0.2, 0.6, 1.0]))
    logits = torch.randn(4, 3) * torch.tensor([[torch.nan], [1e3], [1.0], [1.0]])
    for again in (False, True):
        learner.begin_step(rows, again=again)
        losses.add(rows, logits, labels=labels, mix=mix)
    losses.end_epoch()
    scores, alike = logits.log_softmax(1), labels == labels[mix.partner]
    for row in range(4):
        host = mix.partner.tolist().index(row)
        own, other = mix.weight[row].item(), max(1 - mix.weight[host].item(), 1e-4)
        parts = [
            share
            * (torch.tensor(1.0 if alike[place] else share).log() - scores[place, labels[row]])
            .nan_to_num(0.0)
            .clamp(-10, 10)
            for share, place in ((own, row), (other, host))
        ]
        expected[rows[row]] = sum(parts) / (own + other)
    torch.testing.assert_close(losses.excess, expected, equal_nan=True)
    meta.wrong, meta.rows = 0.4, torch.arange(8)  # of which half are new
    torch.manual_seed(0)
    weight = meta.mix(torch.zeros(8, dtype=torch.long)).weight
    losses.excess.copy_(torch.where(expected.isnan(), expected.nanmean(), expected))
    torch.manual_seed(0)
    meta.rows = torch.arange(8)
    assert torch.equal(weight, meta.mix(torch.zeros(8, dtype=torch.long)).weight)


def test_rows_are_observed_before_labels_are_known_to_be_wrong():
    meta, model = MetaMixup(8), torch.nn.Linear(3, 2)
    learner = MetaLearner(meta, mock.Mock(), until=5)
    loss_fn = MixedCrossEntropy(meta.mix, False, observe=meta.observe, mixes=learner.mixes)
    assert loss_fn.start_epoch(0), "nothing is mixed"
    rows, x, labels = torch.tensor([5, 0, 3, 6]), torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    learner.begin_step(rows, again=False)
    found = loss_fn(model, x, labels)
    meta.row_losses.end_epoch()
    losses = -model(x).detach().log_softmax(1)[torch.arange(4), labels]
    torch.testing.assert_close(meta.row_losses.excess[rows], losses)
    torch.testing.assert_close(found.loss.detach(), losses.mean())
    assert (found.mix_weight, len(meta.rows)) == (4, 0)
    meta.wrong = 0.3
    assert loss_fn.start_epoch(1)


class Texts:
    """Texts whose first token tells the class, and whose second one is 6 + the row's number."""

    lengths = None

    def __init__(self, rows: int) -> None:
        numbers, generator = torch.arange(rows), torch.Generator().manual_seed(0)
        self.tokens = torch.randint(6, 80, (rows, 8), generator=generator)
        self.tokens[:, 0], self.tokens[:, 1] = 3 + numbers % 3, 6 + numbers

    def __len__(self) -> int:
        return len(self.tokens)

    def batches(self, plan, epoch: int | None = None):
        assert epoch is None, "held-out batches are not augmented"
        return ((self.tokens[rows], rows % 3) for rows in plan)


@each_of("labels", [None, torch.arange(40) % 3])
def test_rows_that_are_held_out_come_from_an_epoch_on(labels):
    held_out = torch.tensor([0, 7, 30])
    sampler = Sampler(40, 0, labels=labels, held_out=held_out, until=2)
    for epoch in range(4):
        rows = sampler.rows_of(epoch)
        assert rows == (37 if epoch < 2 else 40)
        drawn = torch.cat(sampler.epoch(epoch, [20, rows - 20]))
        assert len(drawn) == rows
        if labels is None:
            assert len(drawn.unique()) == rows
        assert bool(torch.isin(drawn, held_out).any()) == (epoch >= 2)


def all_ranks_learn_one_policy(world) -> None:
    torch.manual_seed(1)
    sizes = {"width": 16, "depth": 1, "heads": 2, "mlp_width": 32, "max_len": 16}
    model = Transformer(80, 3, **sizes, mix_at="tokens")
    meta = MetaMixup(64)
    loss_fn = MixedCrossEntropy(lambda labels, **size: meta.mix(labels), True, observe=meta.observe)
    learner = MetaLearner(meta, Texts(30), until=1)
    options = {"loss_fn": loss_fn, "meta_learner": learner, "accumulation_steps": 2}
    trainer = make_trainer(model, build_optimizer(model, "ngd", 0.1), world, **options)
    trainer.wrap_model()
    torch.manual_seed(10 + world.rank)
    plan = list(torch.arange(64).view(4, 16)[:, world.rank :: world.size])
    for rows, (tokens, labels) in zip(plan, Texts(64).batches(plan)):
        trainer.train_step(tokens, labels, RankBatch(rows, 1.0, len(rows) * world.size))
    assert meta.row_losses.sums[1].count_nonzero() == 64 // world.size, "of this rank's rows"
    how = {"precision": trainer.precision, "world": world, "batch_size": 128}
    learner.end_epoch(model, **how)
    assert meta.row_losses.excess.isfinite().all()
    model.eval()
    (tokens, labels), *_ = Texts(30).batches([torch.arange(30)])
    confidence, predicted = model(tokens).softmax(1).max(1)
    alone = MetaMixup(1)
    alone.learn(predicted, confidence.detach(), labels)
    assert meta.shares == alone.shares
    total = world.sum(meta.row_losses.excess.clone())
    torch.testing.assert_close(total, meta.row_losses.excess * world.size)


def test_all_ranks_learn_one_policy():
    ranks.run_ranks(all_ranks_learn_one_policy, 2)


@each_of("wrong", [False, True])
def test_a_run_stops_mixing_and_takes_its_held_out_rows_unless_labels_are_wrong(tmp_path, wrong):
    for script, words in (
        ("images", "--dataset digits --arch resnet8 --subset 0.5 --bs 64 --ngd"),
        ("texts", "--dataset headlines --bs 16 --width 32"),
    ):
        run = tmp_path / f"{script}{wrong}"
        words = f"{words} --meta_learning --epochs 3 --threads 1 --out {run}"
        with mock.patch.object(mixup, "wrong_labels", return_value=(0.4 * wrong, 100, 0.5)):
            assert call(script, words.split()) == 0
        logged, state = ranks.metrics(run), torch.load(run / "last.pt", weights_only=True)
        assert not any("val_accuracy" in row or "held_out_accuracy" in row for row in logged)
        done = [row["samples"] for row in logged]
        each = [done[0], done[1] - done[0], done[2] - done[1]]
        assert each[0] == each[1] < each[2] == state["batching"]["rows"]
        assert each[2] - each[0] == pytest.approx(0.05 * each[2], rel=0.2)
        is_mixed = [row["mean_lambda"] < 1 for row in logged]
        assert is_mixed == [False, False, wrong], "only wrong labels are mixed"
        assert state["flags"]["mixup_args"] == {"held_out": 0.05, "end": 0.7}
        found = [row["wrong_labels"] for row in logged]
        assert found[1] == found[2] == state["learner"]["wrong"]
        assert (found[1] > 0) == wrong
        assert call(script, ["--resume", str(run), "--evaluate", "--out", str(run)]) == 0
        resume = ["--resume", str(run), "--epochs", "6", "--out", str(run)]
        assert call(script, resume) == 0
        last = ranks.metrics(run)[-1]
        assert last["samples"] == done[2] + 3 * each[2], "rows were held out again"
        assert last["wrong_labels"] == found[1]
        assert (last["mean_lambda"] < 1) == wrong
