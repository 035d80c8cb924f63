"""Meta-mixup: a trial is the optimizer's own step and leaves nothing; the right slope is found."""

import copy
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import mixup
import ranks
import resnet50_test
import transformer_test
from backends.precision import Precision
from conftest import call, each_of
from distributed.world import World
from mixup import MetaMixup, Mix, after_step, mean_doubt
from models.transformer import Transformer
from optimizer_cases import assert_same
from trainers import FP32, build_optimizer, make_trainer
from training.losses import MixedCrossEntropy
from training.meta_mixup_step import HeldOutBatches, MetaMixupStep

ALONE = World()
BF16, FP16 = Precision("bf16", "cpu", torch.bfloat16), Precision("fp16", "cpu", torch.float16)


class Problem:
    """A network with BatchNorm and dropout, its optimizer after two steps, and a mixed batch."""

    def __init__(self, optimizer: str = "sgd") -> None:
        torch.manual_seed(0)
        first = nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Dropout(0.3)
        self.model = nn.Sequential(*first, nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 3))
        self.optimizer = build_optimizer(self.model, optimizer, 0.1, 0.01)
        self.x, self.held_out_x = torch.randn(2, 10, 16)
        self.labels, self.held_out_labels = torch.randint(3, (2, 10))
        for _ in range(2):
            self.step()

    def loss(self) -> Tensor:
        mix = Mix(torch.arange(10).flip(0), torch.linspace(0.1, 0.9, 10))
        return mixup.cross_entropy(self.model(mixup.blend(self.x, mix)), self.labels, mix=mix)

    def measure(self) -> Tensor:
        return mean_doubt(self.model(self.held_out_x), self.held_out_labels)

    def step(self, max_norm: float = 1e9) -> None:
        self.loss().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def trial(self, **settings: Any) -> Tensor:
        parts = {"loss": self.loss, "measure": self.measure, **settings}
        return after_step(self.model, self.optimizer, **parts)


@each_of("optimizer", ["sgd", "adamw", "ngd", "kaldi_ngd", "lamb", "slamb"])
def test_a_trial_is_a_step_of_the_optimizer_that_leaves_nothing_behind(optimizer):
    """Whatever the loss scale, and also where the loss or the measure fails."""
    problem = Problem(optimizer)
    untouched = copy.deepcopy(problem)
    for settings in ({}, {"scale": 2.0**14}, {"scale": torch.tensor(8.0), "max_grad_norm": 0.01}):
        stepped, noise = copy.deepcopy(untouched), torch.get_rng_state()
        stepped.step(settings.get("max_grad_norm", 1e9))
        with torch.no_grad():
            expected = stepped.measure()
        torch.set_rng_state(noise)
        torch.testing.assert_close(problem.trial(**settings), expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(torch.get_rng_state(), noise)
    for failing in ("loss", "measure"):
        with pytest.raises(RuntimeError):
            problem.trial(**{failing: mock.Mock(side_effect=RuntimeError("out of memory"))})
    assert all(p.grad is None for p in problem.model.parameters())
    noise = torch.get_rng_state()
    for each in (problem, untouched):
        torch.set_rng_state(noise)
        assert_same(each.model.state_dict(), untouched.model.state_dict())
        each.step()
    assert_same(problem.model.state_dict(), untouched.model.state_dict())
    assert_same(problem.optimizer.state_dict(), untouched.optimizer.state_dict())


# -------------------------------------------------------------------- the policy


def test_the_doubted_row_gives_way_and_lambda_varies_as_before():
    meta, labels = MetaMixup(20_000, alpha=0.7), torch.zeros(20_000, dtype=torch.long)
    meta.row_losses.excess.normal_()
    state = torch.get_rng_state()
    mixes = meta.sample(labels, rows=torch.arange(20_000), spans=(0.0, 1.5))
    torch.set_rng_state(state)
    partner, start = torch.randperm(20_000), mixup.sample_beta(0.7, 20_000)
    assert all(torch.equal(mix.partner, partner) for mix in mixes)
    torch.testing.assert_close(mixes[0].weight, start, atol=1e-3, rtol=0)
    excess = meta.row_losses.excess.double()
    doubt = (excess[partner] - excess) / (excess[partner] - excess).std()
    logit = torch.logit(start.double(), eps=1e-4)
    spread = torch.distributions.Beta(0.7, 0.7).sample((400_000,)).double().logit(eps=1e-6).std()
    expected = torch.sigmoid((logit + 1.5 * spread * doubt) / (1 + 1.5**2) ** 0.5)
    torch.testing.assert_close(mixes[1].weight.double(), expected, atol=5e-3, rtol=0)
    assert mixes[1].weight.mean().item() == pytest.approx(0.5, abs=0.01)
    assert mixes[1].weight.var().item() == pytest.approx(start.var().item(), rel=0.1)
    meta.rows = torch.arange(3)  # nobody said which rows the others are
    meta.slope.fill_(1.5)
    meta.observe(torch.randn(4, 2), labels[:4], meta.mix(labels[:4]))
    assert not meta.row_losses.sums.any()
    with pytest.raises(ValueError, match="of other data"):
        MetaMixup(4).load_state_dict(meta.state_dict())


def test_the_slope_moves_when_the_differences_differ_from_nothing():
    meta, kept, slope = MetaMixup(1), [], 0.0
    for step, mean in enumerate([0.5] * 60 + [-0.5] * 100):
        value = torch.nan if step % 7 == 3 else mean + torch.randn(()).item()
        meta.count(torch.tensor(value))
        kept += [value] if value == value else []
        if len(kept) >= 4:
            error = statistics.stdev(kept) / len(kept) ** 0.5
            if abs(statistics.mean(kept)) > 2 * error:
                slope = min(max(slope - (0.5 if statistics.mean(kept) > 0 else -0.5), -2), 2)
                kept = []
        assert meta.slope.item() == slope
        assert meta.trials[0] == len(kept)
        assert meta.goes_on() == (slope >= 1)
    assert slope > -2


def test_labels_that_are_wrong_at_random_do_not_change_which_prediction_is_the_better_one():
    logits = torch.randn(2, 50, 5) * 3
    doubts = [
        torch.stack([mean_doubt(each, torch.full((50,), c)) for c in range(5)]) for each in logits
    ]
    torch.testing.assert_close(torch.stack([each.mean() for each in doubts]), torch.full((2,), 0.8))


def test_the_excess_of_a_row_is_the_mean_over_its_two_places():
    """And a try that ran out of memory does not count."""
    meta, expected = MetaMixup(8), torch.zeros(8)
    step, losses = MetaMixupStep(meta, mock.Mock(), held_out=mock.Mock()), meta.row_losses
    rows, labels = torch.tensor([5, 0, 3, 6]), torch.tensor([2, 0, 2, 1])
    mix = Mix(torch.tensor([2, 3, 1, 0]), torch.tensor([0.9, 0.2, 0.6, 1.0]))
    logits = torch.randn(4, 3) * torch.tensor([[torch.nan], [1e3], [1.0], [1.0]])
    for again in (False, True):
        step.begin_step(rows, again=again)
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
    torch.testing.assert_close(losses.excess, expected)


CENTRES = torch.tensor([[-3.0, 0.0], [3.0, 0.0], [0.0, 0.0], [0.0, 8.0]])


def points(rows: int) -> tuple[Tensor, Tensor]:
    """Four clouds; class 2 lies between 0 and 1, so that mixtures of these two lie in it."""
    labels = torch.randint(4, (rows,))
    return CENTRES[labels] + 0.6 * torch.randn(rows, 2), labels


def test_the_slope_learns_to_doubt_wrong_labels_from_rows_that_are_as_wrong():
    torch.manual_seed(0)
    meta = MetaMixup(512)
    layers = nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    model = nn.Sequential(*layers)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, right = points(712)
    is_wrong = torch.rand(712) < 0.4
    labels = torch.where(is_wrong, (right + 1) % 4, right)

    def mixed_loss(mix: Mix) -> Tensor:
        return mixup.cross_entropy(model(mixup.blend(x[rows], mix)), labels[rows], mix=mix)

    def measure() -> Tensor:
        return mean_doubt(model(x[512:]), labels[512:])

    for _ in range(20):
        for rows in torch.randperm(512).split(64):
            meta.rows, given = rows, labels[rows]
            meta.learn(model, sgd, given, mixed_loss=mixed_loss, measure=measure)
            mix = meta.mix(given)
            logits = model(mixup.blend(x[rows], mix))
            meta.observe(logits, given, mix)
            sgd.zero_grad()
            mixup.cross_entropy(logits, given, mix=mix).backward()
            sgd.step()
        meta.row_losses.end_epoch()
    assert meta.slope.item() >= 1
    weight, is_wrong = torch.zeros(512), is_wrong[:512]
    for _ in range(20):
        meta.rows = torch.arange(512)
        weight += meta.mix(labels[:512]).weight / 20
    assert weight[is_wrong].mean() < weight[~is_wrong].mean() - 0.04


# -------------------------------------------------------------------- in the training step


class Texts:
    """Texts whose first token tells the class, and whose second one is 6 + the row's number."""

    lengths = None

    def __init__(self, rows: int) -> None:
        numbers, generator = torch.arange(rows), torch.Generator().manual_seed(0)
        self.tokens = torch.randint(6, 80, (rows, 8), generator=generator)
        self.tokens[:, 0], self.tokens[:, 1] = 3 + numbers % 3, 6 + numbers

    def __len__(self) -> int:
        return len(self.tokens)

    def batches(self, plan: Sequence[Tensor], epoch: int | None = None) -> Iterator[Any]:
        assert epoch is None, "held-out batches are not augmented"
        return ((self.tokens[rows], rows % 3) for rows in plan)


def test_held_out_batches_go_on_from_any_number_and_are_shared_out():
    def read(number: int, *, start: int = 0, world: World = ALONE) -> list[list[int]]:
        held = HeldOutBatches(Texts(23), 4, seed=1, world=world)
        return [(x[:, 1] - 6).tolist() for x, _ in itertools.islice(held.start(start), number)]

    first = read(12)
    drawn = {row for batch in first[:5] for row in batch}
    assert len(drawn) == 20, "three rows wait"
    assert drawn != set(range(20)), "shuffled"
    assert first[:5] != first[5:10]
    assert read(5, start=7) == first[7:]
    (one,), (other,) = (read(1, world=World(rank=rank, size=2)) for rank in (0, 1))
    assert len({*one, *other}) == 8
    assert HeldOutBatches(Texts(5), 64, seed=1, world=World(size=2)).rows == 2
    with pytest.raises(ValueError, match="3 held-out rows are too few"):
        HeldOutBatches(Texts(3), 64, seed=1, world=World(size=2))


class TextRun:
    """A trainer of a small Transformer, and the policy that learns in its steps."""

    def __init__(self, *, world=ALONE, every=2, optimizer="sgd", model=None, **options: Any):
        torch.manual_seed(1)
        sizes = {"width": 16, "depth": 1, "heads": 2, "mlp_width": 32, "max_len": 16}
        settings = {"dropout": 0.1, "mix_at": "tokens", **(model or {})}
        model = Transformer(80, 3, **sizes, **settings)
        self.meta = MetaMixup(64)
        self.meta.row_losses.excess.normal_()
        self.meta.row_losses.is_known = True
        mix = lambda labels, **size: self.meta.mix(labels)  # noqa: E731
        self.loss_fn = MixedCrossEntropy(mix, True, observe=self.meta.observe)
        held_out = HeldOutBatches(Texts(30), 8, seed=0, world=world)
        self.step = MetaMixupStep(self.meta, self.loss_fn, held_out=held_out, every=every)
        options |= {"loss_fn": self.loss_fn, "meta_learner": self.step}
        self.trainer = make_trainer(model, build_optimizer(model, optimizer, 0.1), world, **options)
        self.trainer.wrap_model()
        torch.manual_seed(10 + world.rank)

    def train(self, plan: Sequence[Tensor]) -> list[Tensor]:
        """Take a step on each batch; returns what was counted at the start and after each."""
        counted = [self.meta.trials.clone()]
        for rows, (tokens, labels) in zip(plan, Texts(64).batches(plan)):
            self.trainer.train_step(tokens, labels, rows=rows)
            counted.append(self.meta.trials.clone())
        return counted


EIGHT_STEPS = list(torch.arange(64).view(8, 8))


@each_of("precision", [FP32, BF16, FP16])
@each_of("optimizer", ["sgd", "ngd"])
@each_of("mix_at", ["tokens", "pooled"])
def test_the_slope_is_tried_now_and_then(precision, optimizer, mix_at):
    settings = {"precision": precision, "optimizer": optimizer, "accumulation_steps": 2}
    run = TextRun(every=3, model={"mix_at": mix_at}, **settings)
    counted = run.train(EIGHT_STEPS)
    assert [each[0].item() for each in counted] == [0, 1, 1, 1, 2, 2, 2, 3, 3]
    assert counted[-1].isfinite().all()
    assert counted[-1][2] > 0
    assert run.trainer.sums.skipped == 0


def test_micro_batches_bound_what_the_policy_learns_from():
    run = TextRun(accumulation_steps=4)
    with mock.patch.object(run.loss_fn, "_of_logits", wraps=run.loss_fn._of_logits) as noted:
        run.train([torch.arange(16)])
    sizes = [len(call.args[1]) for call in noted.call_args_list]
    assert sizes == [4] * 6, "two trials, four of the step"


@pytest.mark.compile
def test_a_compiled_model_learns_the_same():
    counted = []
    for compiled in (False, True):
        run = TextRun(every=1, model={"dropout": 0.0})  # compiled dropout draws other numbers
        if compiled:
            run.trainer.model.compile(backend="aot_eager")
        counted.append(run.train(EIGHT_STEPS[:3])[-1])
    torch.testing.assert_close(*counted, rtol=1e-2, atol=1e-6)


def all_ranks_learn_one_policy(world: World) -> None:
    run = TextRun(world=world, precision=BF16, optimizer="ngd", accumulation_steps=2)
    run.train(list(torch.arange(64).view(4, 16)[:, world.rank :: world.size]))
    assert run.meta.trials[2] > 0
    for values in (run.meta.trials, *run.trainer.model.parameters()):
        total = world.sum(values.detach().clone())
        assert torch.equal(total, values * world.size), "ranks differ"


def test_all_ranks_learn_one_policy():
    ranks.run_ranks(all_ranks_learn_one_policy, 2)


# -------------------------------------------------------------------- runs


@each_of("slope", [0.0, 1.0])
def test_a_run_stops_mixing_and_takes_its_held_out_rows_unless_labels_are_wrong(tmp_path, slope):
    for script, words in (
        (resnet50_test, "--dataset digits --arch resnet8 --subset 0.5 --bs 64 --ngd"),
        (transformer_test, "--dataset headlines --bs 16 --width 32 --meta_every 2"),
    ):
        run = tmp_path / f"{script.SCRIPT}{slope}"
        words = f"{words} --meta_learning --epochs 3 --threads 1 --out {run}"
        with mock.patch.object(MetaMixup, "GOES_ON", 1.0 - 2 * slope):  # is it found?
            assert call(script, words.split()) == 0
        logged, state = ranks.metrics(run), torch.load(run / "last.pt", weights_only=True)
        assert not any("val_accuracy" in row or "held_out_accuracy" in row for row in logged)
        done = [row["samples"] for row in logged]
        each = [done[0], done[1] - done[0], done[2] - done[1]]
        assert each[0] == each[1] < each[2] == state["batching"]["rows"]
        assert each[2] - each[0] == pytest.approx(0.05 * each[2], rel=0.2)
        is_mixed = [row["mean_lambda"] < 0.9 for row in logged]
        assert is_mixed == [True, True, slope == 1], "the policy says whether mixing goes on"
        assert all("mix_slope" in row for row in logged)
        assert state["flags"]["mixup_args"] == {
            "every": 16 if script is resnet50_test else 2,
            "held_out": 0.05,
            "end": 0.7,
        }
        assert state["learner"]["steps"] == state["progress"]["step"]
        assert state["learner"]["trials"][0] > 0
