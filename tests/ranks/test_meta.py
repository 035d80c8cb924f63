"""Meta-mixup: the gradient is exact, no state is left changed, and the right policy is found."""

import contextlib
import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mixup
import ranks
import resnet50_test
import transformer_test
from backends.precision import Precision
from conftest import call, each_of
from distributed.world import World
from errors import InputError
from mixup import MetaMixup, Mix, meta_gradient
from models.transformer import Transformer
from optimizer_cases import assert_same
from trainers import FP32, build_optimizer, make_trainer
from training.losses import MixedCrossEntropy
from training.meta_mixup_step import HeldOutBatches, MetaMixupStep, adam_metric

RATE = 0.3
ALONE = World()
BF16, FP16 = Precision("bf16", "cpu", torch.bfloat16), Precision("fp16", "cpu", torch.float16)


class Problem:
    """A smooth network with BatchNorm and dropout in float64, a batch to mix, and a clean one."""

    def __init__(self, seed: int = 0, dropout: float = 0.3) -> None:
        torch.manual_seed(seed)
        first = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(dropout)
        second = nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 3)
        self.model = nn.Sequential(*first, *second).double()
        self.x, self.clean_x = torch.randn(2, 10, 6, dtype=torch.float64)
        self.labels, self.clean_labels = torch.randint(3, (2, 10))
        self.partner, self.weight = torch.randperm(10), torch.rand(10, dtype=torch.float64)

    def loss_of(self, mix: Mix) -> Tensor:
        logits = self.model(mixup.blend(self.x, mix))
        return mixup.cross_entropy(logits, self.labels, mix=mix)

    def clean_loss(self, weights: dict[str, Tensor] | None = None) -> Tensor:
        logits = torch.func.functional_call(self.model, weights or {}, (self.clean_x,))
        return F.cross_entropy(logits, self.clean_labels)

    def after_the_step(
        self, partner: Tensor, weight: Tensor, metric: list[Tensor] | None = None
    ) -> Tensor:
        """The clean loss as a function of lambda; every pass starts at the current random state."""
        state, named = torch.get_rng_state(), dict(self.model.named_parameters())
        loss = self.loss_of(Mix(partner, weight))
        steps = torch.autograd.grad(loss, list(named.values()), create_graph=True)
        if metric is not None:
            steps = [step * factor for step, factor in zip(steps, metric)]
        torch.set_rng_state(state)
        value = self.clean_loss({n: p - RATE * g for (n, p), g in zip(named.items(), steps)})
        torch.set_rng_state(state)
        return value

    def gradient(self, scale: Tensor | float = 1.0, metric: list[Tensor] | None = None) -> Tensor:
        return meta_gradient(
            self.model,
            self.weight,
            mixed_loss=lambda weight: self.loss_of(Mix(self.partner, weight)),
            clean_loss=self.clean_loss,
            rate=RATE,
            metric=metric,
            scale=scale,
        )


@each_of("seed", range(3))
def test_the_meta_gradient_is_that_of_double_backward_whatever_the_loss_scale(seed, monkeypatch):
    problem = Problem(seed)
    metric = [0.1 + torch.rand_like(p) for p in problem.model.parameters()]
    weight = problem.weight.clone().requires_grad_()
    (exact,) = torch.autograd.grad(problem.after_the_step(problem.partner, weight), weight)
    default = problem.gradient()
    assert F.cosine_similarity(default, exact, dim=0) > 0.99
    with monkeypatch.context() as patch:
        patch.setattr(mixup, "FINITE_DIFFERENCE_STEP", 1e-4)
        torch.testing.assert_close(problem.gradient(), exact, rtol=1e-5, atol=1e-9)
        scaled = problem.after_the_step(problem.partner, weight, metric)
        (exact,) = torch.autograd.grad(scaled, weight)
        given = problem.gradient(metric=metric)
        torch.testing.assert_close(given, exact, rtol=1e-5, atol=1e-9)
    for scale in (2.0**14, torch.tensor(2.0**14)):
        torch.testing.assert_close(problem.gradient(scale=scale), default, rtol=1e-6, atol=1e-12)


def test_nothing_is_left_behind():
    """Nor where the second of the two sides fails."""
    problem, calls = Problem(), itertools.count()
    for parameter in problem.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, noise, plain = copy.deepcopy(problem.model), torch.get_rng_state(), problem.loss_of

    def loss_of(mix: Mix) -> Tensor:
        if next(calls) == 5:
            raise RuntimeError("out of memory")
        return plain(mix)

    problem.loss_of = loss_of  # type: ignore[method-assign]
    for outcome in (contextlib.nullcontext(), pytest.raises(RuntimeError)):  # three calls each
        with outcome:
            assert problem.gradient().abs().sum() > 0
        assert_same(problem.model.state_dict(), before.state_dict())
        assert all((parameter.grad == 1).all() for parameter in problem.model.parameters())
        assert torch.equal(torch.get_rng_state(), noise)


# -------------------------------------------------------------------- the policy


def table_of(meta: MetaMixup) -> Tensor:
    """lambda of each pair of classes."""
    return (1 + torch.sigmoid(meta.numbers.detach()[meta.pair_index])) / 2


def learn(meta: MetaMixup, problem: Problem, factor: float = 1.0) -> None:
    losses = {"mixed_loss": problem.loss_of, "clean_loss": lambda: problem.clean_loss() * factor}
    meta.learn(problem.model, problem.labels, **losses, rate=RATE)


def test_a_policy_of_pairs_starts_as_mixup_with_the_larger_share_and_is_symmetric():
    meta, labels = MetaMixup(5, "pair"), torch.randint(5, (4000,))
    mix = meta.mix(labels)
    assert sorted(mix.partner.tolist()) == list(range(4000))
    assert (mix.weight == 0.75).all()
    with torch.no_grad():
        meta.numbers += torch.randn_like(meta.numbers)
    mix, table = meta.mix(labels), table_of(meta)
    assert torch.equal(table, table.T)
    assert ((table > 0.5) & (table < 1) & (table != 0.75)).all()
    torch.testing.assert_close(mix.weight, table[labels, labels[mix.partner]])


@each_of("policy", mixup.POLICIES)
def test_learning_follows_the_exact_gradient_and_hands_its_batch_on_once(policy):
    problem, meta = Problem(2, dropout=0.0), MetaMixup(3, policy, rows=40, lr=0.5)
    with torch.no_grad():
        meta.numbers += 0.1 * torch.randn(meta.numbers.shape)
    if policy == "loss":
        meta.rows = torch.randint(40, (10,))
        learn(meta, problem)  # without an excess there is no gradient, and Adam counts no step
        meta.row_losses.excess.normal_()
        meta.row_losses.is_known = True
    rows, state = meta.rows, torch.get_rng_state()
    partner = torch.randperm(10)
    numbers = meta.numbers.detach().clone().requires_grad_()
    weight = meta.lambdas(numbers, problem.labels, partner=partner, rows=rows)
    (exact,) = torch.autograd.grad(problem.after_the_step(partner, weight), numbers)
    torch.set_rng_state(state)
    learn(meta, problem)
    assert F.cosine_similarity(meta.numbers.grad, exact, dim=0) > 0.99
    torch.testing.assert_close(numbers - meta.numbers, 0.5 * exact.sign())  # Adam's first step
    mix = meta.mix(problem.labels)
    assert torch.equal(mix.partner, partner)
    if policy == "loss":
        assert torch.equal(mix.weight, weight), "the draw itself, which the policy was judged by"
    meta.rows = rows
    assert not torch.equal(meta.mix(problem.labels).partner, partner)
    meta.rows = rows
    learn(meta, problem)
    meta.rows = rows[:4]
    assert len(meta.mix(problem.labels[:4]).weight) == 4, "another batch than the one learned from"


def test_lambda_follows_the_losses_by_the_slope():
    meta, labels = MetaMixup(2, "loss", rows=4, alpha=0.7), torch.zeros(4, dtype=torch.long)
    meta.row_losses.excess = torch.tensor([0.0, 1.0, -2.0, 5.0])
    rows, partner = torch.tensor([3, 0, 1, 2]), torch.tensor([1, 0, 3, 2])
    state = torch.get_rng_state()
    weight = meta.lambdas(torch.tensor([0.4]), labels, partner=partner, rows=rows)
    torch.set_rng_state(state)
    logit = torch.logit(mixup.sample_beta(0.7, 4).double())
    shift = 0.4 * torch.tensor([-5.0, 5.0, -3.0, 3.0])
    expected = torch.sigmoid(logit + shift).float()
    torch.testing.assert_close(weight, expected, atol=1e-3, rtol=1e-3)
    meta.observe(torch.randn(4, 2), labels, meta.mix(labels))  # nobody said which rows these are
    assert not meta.row_losses.sums.any()
    faster = MetaMixup(2, "loss", rows=4, lr=0.3)
    faster.load_state_dict(meta.state_dict())
    assert faster.adam.param_groups[0]["lr"] == 0.3
    with pytest.raises(ValueError, match="of another kind"):
        MetaMixup(2, "pair", rows=4).load_state_dict(meta.state_dict())


def test_a_gradient_that_is_not_finite_changes_nothing():
    problem, meta = Problem(), MetaMixup(3, "pair")
    learn(meta, problem, torch.nan)
    assert (meta.numbers == 0).all()
    learn(meta, problem)
    assert (meta.numbers != 0).any()
    assert meta.numbers.isfinite().all()


def test_a_pair_that_does_not_occur_keeps_its_number():
    problem, meta = Problem(), MetaMixup(3, "pair", lr=0.5)
    learn(meta, problem)
    problem.labels.clamp_(max=1)  # no class 2
    before = table_of(meta)
    learn(meta, problem)
    assert torch.equal(table_of(meta)[2], before[2])
    assert not torch.equal(table_of(meta)[0, 0], before[0, 0])


def test_the_excess_of_a_row_is_the_mean_over_its_two_places():
    """And a try that ran out of memory does not count."""
    meta, expected = MetaMixup(3, "loss", rows=8), torch.zeros(8)
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


def test_the_metric_of_adamw_makes_its_steps_of_its_first_moments():
    used, unused = (nn.Parameter(torch.zeros(4, 3)) for _ in range(2))
    model = nn.ParameterList([used, unused])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    assert adam_metric(model, optimizer) is None, "before the first step"
    for step in range(1, 4):
        before, used.grad = used.detach().clone(), torch.randn(4, 3)
        optimizer.step()
        metric, nothing = adam_metric(model, optimizer)
        m = optimizer.state[used]["exp_avg"] / (1 - 0.9**step)
        torch.testing.assert_close(before - used, 0.1 * m * metric, rtol=1e-4, atol=1e-6)
        assert not nothing.any()


CENTRES = torch.tensor([[-3.0, 0.0], [3.0, 0.0], [0.0, 0.0], [0.0, 8.0]])


def points(rows: int) -> tuple[Tensor, Tensor]:
    """Four clouds; class 2 lies between 0 and 1, so that mixtures of these two lie in it."""
    labels = torch.randint(4, (rows,))
    return CENTRES[labels] + 0.6 * torch.randn(rows, 2), labels


def test_a_policy_of_losses_learns_to_doubt_wrong_labels():
    torch.manual_seed(0)
    meta = MetaMixup(4, "loss", rows=512)
    layers = nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    model = nn.Sequential(*layers)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (x, labels), (clean_x, clean_labels) = points(512), points(200)
    is_wrong = torch.rand(512) < 0.4
    labels = torch.where(is_wrong, (labels + 1) % 4, labels)

    def loss(mix: Mix) -> Tensor:
        logits = model(mixup.blend(x[meta.rows], mix))
        return mixup.cross_entropy(logits, labels[meta.rows], mix=mix)

    def clean_loss() -> Tensor:
        return F.cross_entropy(model(clean_x), clean_labels)

    for _ in range(20):
        for meta.rows in torch.randperm(512).split(64):
            rows = meta.rows  # which mixing takes away
            given = labels[rows]
            meta.learn(model, given, mixed_loss=loss, clean_loss=clean_loss, rate=0.1)
            mix = meta.mix(given)
            logits = model(mixup.blend(x[rows], mix))
            meta.observe(logits, given, mix)
            sgd.zero_grad()
            mixup.cross_entropy(logits, given, mix=mix).backward()
            sgd.step()
        meta.row_losses.end_epoch()
    assert meta.numbers.item() > 0.5
    weight = torch.zeros(512)
    for _ in range(20):
        meta.rows = torch.arange(512)
        weight += meta.mix(labels).weight / 20
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
    with pytest.raises(InputError, match="3 held-out rows are too few"):
        HeldOutBatches(Texts(3), 64, seed=1, world=World(size=2))


class TextRun:
    """A trainer of a small Transformer, and the policy that learns in its steps."""

    def __init__(self, *, world=ALONE, every=2, optimizer="sgd", model=None, **options: Any):
        torch.manual_seed(1)
        sizes = {"width": 16, "depth": 1, "heads": 2, "mlp_width": 32, "max_len": 16}
        settings = {"dropout": 0.1, "mix_at": "tokens", **(model or {})}
        model = Transformer(80, 3, **sizes, **settings)
        self.meta = MetaMixup(3, "pair", lr=0.05)
        mix = lambda labels, **size: self.meta.mix(labels)  # noqa: E731
        self.loss_fn = MixedCrossEntropy(mix, True, observe=self.meta.observe)
        held_out = HeldOutBatches(Texts(30), 8, seed=0, world=world)
        self.step = MetaMixupStep(self.meta, self.loss_fn, held_out=held_out, every=every)
        options |= {"loss_fn": self.loss_fn, "meta_learner": self.step}
        self.trainer = make_trainer(model, build_optimizer(model, optimizer, 0.1), world, **options)
        self.trainer.wrap_model()
        torch.manual_seed(10 + world.rank)

    def train(self, plan: Sequence[Tensor]) -> list[Tensor]:
        """Take a step on each batch; returns the policy's numbers at the start and after each."""
        tables = [self.meta.numbers.detach().clone()]
        for tokens, labels in Texts(64).batches(plan):
            self.trainer.train_step(tokens, labels)
            tables.append(self.meta.numbers.detach().clone())
        return tables


EIGHT_STEPS = list(torch.arange(64).view(8, 8))


@each_of("precision", [FP32, BF16, FP16])
@each_of("optimizer", ["sgd", "ngd"])
@each_of("mix_at", ["tokens", "pooled"])
def test_the_step_learns_the_policy_now_and_then(precision, optimizer, mix_at):
    settings = {"precision": precision, "optimizer": optimizer, "accumulation_steps": 2}
    run = TextRun(every=3, model={"mix_at": mix_at}, **settings)
    tables = run.train(EIGHT_STEPS)
    changed = [not torch.equal(*pair) for pair in itertools.pairwise(tables)]
    assert changed == [True, False, False, True, False, False, True, False]
    assert all(table.isfinite().all() for table in tables)
    assert run.trainer.sums.skipped == 0


def test_micro_batches_bound_what_the_policy_learns_from():
    run = TextRun(accumulation_steps=4)
    with mock.patch.object(run.loss_fn, "_of_logits", wraps=run.loss_fn._of_logits) as noted:
        run.train([torch.arange(16)])
    sizes = [len(call.args[1]) for call in noted.call_args_list]
    assert sizes == [4] * 7, "three of the policy, four of the step"


@pytest.mark.compile
def test_a_compiled_model_learns_the_same():
    tables = []
    for compiled in (False, True):
        run = TextRun(every=1, model={"dropout": 0.0})  # compiled dropout draws other numbers
        if compiled:
            run.trainer.model.compile(backend="aot_eager")
        tables.append(run.train(EIGHT_STEPS)[-1])
    torch.testing.assert_close(*tables, rtol=1e-2, atol=1e-3)
    assert tables[0].abs().mean() > 0.05


def all_ranks_learn_one_policy(world: World) -> None:
    run = TextRun(world=world, precision=BF16, optimizer="ngd", accumulation_steps=2)
    run.train(list(torch.arange(64).view(4, 16)[:, world.rank :: world.size]))
    assert (run.meta.numbers != 0).any()
    for values in (run.meta.numbers, run.meta.numbers.grad, *run.trainer.model.parameters()):
        total = world.sum(values.detach().clone())
        assert torch.equal(total, values * world.size), "ranks differ"


def test_all_ranks_learn_one_policy():
    ranks.run_ranks(all_ranks_learn_one_policy, 2)


# -------------------------------------------------------------------- runs


def test_a_run_holds_rows_out_and_logs_its_policy(tmp_path):
    for script, words, policy, every in (
        (resnet50_test, "--dataset digits --arch resnet8 --subset 0.5 --bs 64 --ngd", "pair", 32),
        (transformer_test, "--dataset headlines --bs 16 --width 32 --meta_every 4", "loss", 4),
    ):
        run = tmp_path / script.SCRIPT
        words = f"{words} --meta_policy {policy} --meta_learning --epochs 2 --threads 1 --out {run}"
        assert call(script, words.split()) == 0
        rows, state = ranks.metrics(run), torch.load(run / "last.pt", weights_only=True)
        assert all(0 < row["mean_lambda"] < 1 and "val_accuracy" in row for row in rows)
        assert all(("mix_slope" in row) == (policy == "loss") for row in rows)
        flags, learner = state["flags"], state["learner"]
        assert (flags["mixup"], flags["val_fraction"]) == ("meta", 0.05)
        assert flags["mixup_args"] == {"policy": policy, "lr": 0.1, "every": every}
        assert learner["steps"] == state["progress"]["step"]
