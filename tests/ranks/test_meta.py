"""Meta-mixup: the gradient is exact, no state is left changed, and the right policy is found."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mixup
import ranks
import resnet50_test
import transformer_test
from backends.precision import Precision
from cli import factory, options
from conftest import each_of
from distributed.world import World
from errors import InputError
from mixup import MetaMixup, Mix, meta_gradient
from models.transformer import Transformer
from trainers import build_optimizer, make_trainer
from training.losses import BatchLoss, MixedCrossEntropy
from training.meta_mixup_step import HeldOutBatches, MetaMixupStep
from training.trainer import Trainer

RATE = 0.3
POLICIES = pytest.mark.parametrize("policy", mixup.POLICIES)


class Problem:
    """A smooth network with BatchNorm and dropout in float64, a batch to mix, and a clean one."""

    def __init__(self, seed: int = 0, dropout: float = 0.3) -> None:
        torch.manual_seed(seed)
        layers = (
            nn.Linear(6, 12),
            nn.BatchNorm1d(12),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(12, 8),
            nn.GELU(),
            nn.Linear(8, 3),
        )
        self.model = nn.Sequential(*layers).double()
        self.x, self.clean_x = torch.randn(2, 10, 6, dtype=torch.float64)
        self.labels, self.clean_labels = torch.randint(3, (2, 10))
        self.partner, self.weight = torch.randperm(10), torch.rand(10, dtype=torch.float64)

    def loss_of(self, mix: Mix, weights: dict[str, Tensor] | None = None) -> Tensor:
        mixed = mixup.blend(self.x, mix)
        logits = (
            torch.func.functional_call(self.model, weights, (mixed,))
            if weights
            else self.model(mixed)
        )
        return mixup.cross_entropy(logits, self.labels, mix=mix)

    def clean_loss(self, weights: dict[str, Tensor] | None = None) -> Tensor:
        logits = (
            torch.func.functional_call(self.model, weights, (self.clean_x,))
            if weights
            else self.model(self.clean_x)
        )
        return F.cross_entropy(logits, self.clean_labels)

    def after_the_step(self, weight: Tensor, rate: float = RATE) -> Tensor:
        """The clean loss as a function of lambda; every pass starts at the current random state."""
        state = torch.get_rng_state()
        named = dict(self.model.named_parameters())
        loss = self.loss_of(Mix(self.partner, weight), named)
        gradients = torch.autograd.grad(loss, list(named.values()), create_graph=True)
        torch.set_rng_state(state)
        value = self.clean_loss(
            {name: p - rate * g for (name, p), g in zip(named.items(), gradients)}
        )
        torch.set_rng_state(state)
        return value

    def gradient(self, rate: float = RATE, **options: float) -> Tensor:
        return meta_gradient(
            self.model,
            self.weight,
            mixed_loss=lambda weight: self.loss_of(Mix(self.partner, weight)),
            clean_loss=self.clean_loss,
            rate=rate,
            **options,
        )


@pytest.mark.parametrize("seed", range(3))
def test_the_meta_gradient_is_that_of_double_backward_and_of_finite_differences(seed: int) -> None:
    problem = Problem(seed)
    ours = problem.gradient(finite_difference_step=1e-4)
    weight = problem.weight.clone().requires_grad_()
    (exact,) = torch.autograd.grad(problem.after_the_step(weight), weight)
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-9)
    nudges = 1e-5 * torch.eye(10, dtype=torch.float64)
    values = [
        [problem.after_the_step(problem.weight + sign * nudge).item() for sign in (1, -1)]
        for nudge in nudges
    ]
    differences = torch.tensor([(up - down) / 2e-5 for up, down in values], dtype=torch.float64)
    torch.testing.assert_close(ours, differences, rtol=1e-4, atol=1e-9)
    assert F.cosine_similarity(problem.gradient(), exact, dim=0) > 0.99, "with the default step"


def test_the_meta_gradient_is_that_of_torch_func() -> None:
    problem = Problem(dropout=0.0)
    named = {name: parameter.detach() for name, parameter in problem.model.named_parameters()}
    problem.model.eval()  # func wants no statistics written in place

    def after(weight: Tensor) -> Tensor:
        gradients = torch.func.grad(
            lambda named: problem.loss_of(Mix(problem.partner, weight), named)
        )(named)
        return problem.clean_loss({name: named[name] - RATE * gradients[name] for name in named})

    torch.testing.assert_close(
        problem.gradient(finite_difference_step=1e-4),
        torch.func.grad(after)(problem.weight),
        rtol=1e-5,
        atol=1e-9,
    )


def test_the_loss_scale_cancels_and_the_rate_is_linear_at_first() -> None:
    problem = Problem()
    torch.testing.assert_close(
        problem.gradient(scale=2.0**14), problem.gradient(), rtol=1e-6, atol=1e-12
    )
    tensor = torch.tensor(2.0**14)
    torch.testing.assert_close(
        problem.gradient(scale=tensor), problem.gradient(), rtol=1e-6, atol=1e-12
    )
    torch.testing.assert_close(
        problem.gradient(rate=1e-6) * 2, problem.gradient(rate=2e-6), rtol=1e-4, atol=1e-12
    )


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem()
    for parameter in problem.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, noise = copy.deepcopy(problem.model), torch.get_rng_state()
    if fails:
        calls: Iterator[int] = iter(range(9))
        plain = problem.loss_of

        def once(mix: Mix) -> Tensor:
            if next(calls) == 2:  # the second of the two sides
                raise RuntimeError("out of memory")
            return plain(mix)

        monkeypatch.setattr(problem, "loss_of", once)
        with pytest.raises(RuntimeError, match="out of memory"):
            problem.gradient()
    else:
        assert problem.gradient().abs().sum() > 0
    for (name, now), then in zip(problem.model.state_dict().items(), before.state_dict().values()):
        assert torch.equal(now, then), name
    assert all(
        torch.equal(parameter.grad, torch.ones_like(parameter))
        for parameter in problem.model.parameters()
    )
    assert torch.equal(torch.get_rng_state(), noise)


# -------------------------------------------------------------------- the policy


def learn(
    meta: MetaMixup, problem: Problem, clean_loss: Callable[[], Tensor] | None = None
) -> None:
    meta.learn(
        problem.model,
        problem.labels,
        mixed_loss=problem.loss_of,
        clean_loss=clean_loss or problem.clean_loss,
        rate=RATE,
    )


@POLICIES
def test_a_policy_starts_as_mixup_with_the_larger_share_and_is_symmetric(policy: str) -> None:
    meta, labels = MetaMixup(5, policy), torch.randint(5, (4000,))
    mix = meta.mix(labels)
    assert sorted(mix.partner.tolist()) == list(range(4000))
    assert ((mix.weight >= 0.5) & (mix.weight <= 1)).all()
    assert mix.weight.mean().item() == pytest.approx(0.75, abs=0.01)
    assert not mix.weight.requires_grad
    tables = meta.tables()
    assert sorted(tables) == {"pair": ["lambda"], "beta": ["a", "b"]}[policy]
    with torch.no_grad():
        meta.table += torch.randn_like(meta.table)
    for before, after in zip(tables.values(), meta.tables().values()):
        assert torch.equal(after, after.T)
        assert (after != before).all()
    if policy == "pair":
        mix = meta.mix(labels)
        torch.testing.assert_close(mix.weight, meta.tables()["lambda"][labels, labels[mix.partner]])


def test_beta_draws_from_the_parameters_of_the_pair() -> None:
    meta = MetaMixup(2, "beta", alpha=3.0)
    with torch.no_grad():
        meta.table[:, 1] = torch.tensor([1.0, -1.0])  # of the pair (0, 1)
    assert meta.tables()["a"][0, 1].item() == pytest.approx(3 * torch.e)
    labels = torch.arange(2).repeat(20_000)
    mix = meta.mix(labels)
    across_classes = labels != labels[mix.partner]
    for rows, (a, b) in (
        (across_classes, (3 * torch.e, 3 / torch.e)),
        (~across_classes, (3.0, 3.0)),
    ):
        draws = torch.distributions.Beta(a, b).sample((200_000,))
        assert mix.weight[rows].mean().item() == pytest.approx(
            torch.maximum(draws, 1 - draws).mean().item(), abs=0.003
        )


@POLICIES
def test_learning_follows_the_exact_gradient_and_hands_its_batch_on_once(policy: str) -> None:
    problem = Problem(2, dropout=0.0)
    meta = MetaMixup(3, policy, lr=0.5)
    with torch.no_grad():
        meta.table += 0.1 * torch.randn(meta.table.shape)
    state = torch.get_rng_state()
    partner = torch.randperm(10)
    table = meta.table.detach().clone().requires_grad_()
    weight = meta.lambdas(table, problem.labels, partner=partner)
    problem.partner = partner
    (exact,) = torch.autograd.grad(problem.after_the_step(weight), table)
    torch.set_rng_state(state)
    before = meta.table.detach().clone()
    learn(meta, problem)
    assert F.cosine_similarity(meta.table.grad.flatten(), exact.flatten(), dim=0) > 0.99
    torch.testing.assert_close(before - meta.table, 0.5 * exact.sign())  # Adam's first step
    mix = meta.mix(problem.labels)
    assert torch.equal(mix.partner, partner)
    moved = mix.weight - weight.detach()
    if policy == "pair":
        torch.testing.assert_close(
            mix.weight, meta.tables()["lambda"][problem.labels, problem.labels[partner]]
        )
        assert (moved != 0).any()
    else:
        assert (moved == 0).all(), "the draw itself, which the policy was judged by"
    assert not torch.equal(meta.mix(problem.labels).partner, partner)
    learn(meta, problem)
    assert len(meta.mix(problem.labels[:4]).weight) == 4, "another batch than the one learned from"


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    problem, meta = Problem(), MetaMixup(3)
    learn(meta, problem, lambda: problem.clean_loss() * torch.nan)
    assert (meta.table == 0).all()
    learn(meta, problem)
    assert (meta.table != 0).any()
    assert meta.table.isfinite().all()


@POLICIES
def test_the_state_goes_through_a_file(policy: str) -> None:
    problem, meta = Problem(), MetaMixup(3, policy)
    learn(meta, problem)
    file = io.BytesIO()
    torch.save(meta.state_dict(), file)
    file.seek(0)
    other = MetaMixup(3, policy)
    other.load_state_dict(torch.load(file, weights_only=True))
    for each in (meta, other):
        each.learned_mix = None
        torch.manual_seed(5)
        learn(each, problem)
    assert torch.equal(meta.table, other.table)
    assert torch.equal(meta.mix(problem.labels).weight, other.mix(problem.labels).weight)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown policy tripel: choose one of pair, beta"):
        MetaMixup(3, "tripel")


CENTRES = torch.tensor([[-3.0, 0.0], [3.0, 0.0], [0.0, 0.0], [0.0, 8.0]])


def points(rows: int, noise: float) -> tuple[Tensor, Tensor]:
    """Four clouds; class 2 lies between 0 and 1, so that mixtures of these two lie in it."""
    labels = torch.randint(4, (rows,))
    wrong = torch.rand(rows) < noise
    return CENTRES[labels] + 0.6 * torch.randn(rows, 2), torch.where(
        wrong, torch.randint(4, (rows,)), labels
    )


@pytest.mark.parametrize("policy", ["pair", "beta"])
def test_the_policy_mixes_within_noisy_classes_and_not_across_another_class(policy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )
    meta, sgd = (
        MetaMixup(4, policy, lr=0.05),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )
    held = points(200, noise=0.0)
    for _ in range(400):
        x, labels = points(64, noise=0.3)
        rows = torch.randint(200, (64,))

        def loss(mix: Mix, x: Tensor = x, labels: Tensor = labels) -> Tensor:
            return mixup.cross_entropy(model(mixup.blend(x, mix)), labels, mix=mix)

        meta.learn(
            model,
            labels,
            mixed_loss=loss,
            clean_loss=lambda rows=rows: F.cross_entropy(model(held[0][rows]), held[1][rows]),
            rate=0.1,
        )
        sgd.zero_grad()
        loss(meta.mix(labels)).backward()
        sgd.step()
    labels = torch.randint(4, (20_000,))
    mix = meta.mix(labels)
    mean = torch.zeros(4, 4)
    for i in range(4):
        for j in range(4):
            mean[i, j] = mix.weight[(labels == i) & (labels[mix.partner] == j)].mean()
    between, beside, within = (
        (mean[0, 1] + mean[1, 0]) / 2,
        mean[[0, 1], [2, 2]].mean(),
        mean.diagonal().mean(),
    )
    assert between > 0.95, mean
    assert beside < between - 0.1, mean
    assert within < 0.7, mean


# -------------------------------------------------------------------- in the training step


class Rows:
    """A data set for `HeldOutBatches`: row i is (i, i % 3); counts what is read."""

    lengths = None

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def batches(
        self, plan: Sequence[Tensor], epoch: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        assert epoch is None, "held-out batches are not augmented"
        for rows in plan:
            yield rows, rows % 3


def test_held_out_batches_go_on_from_any_number_and_are_shared_out() -> None:
    held = HeldOutBatches(Rows(23), 4, seed=1, world=World())
    stream = held.start(0)
    first = [next(stream)[0].tolist() for _ in range(12)]
    assert sorted(row for batch in first[:5] for row in batch) != list(range(20)), (
        "shuffled, three rows wait"
    )
    assert len({row for batch in first[:5] for row in batch}) == 20
    assert first[:5] != first[5:10]
    later = held.start(7)
    assert [next(later)[0].tolist() for _ in range(5)] == first[7:]
    halves = [
        HeldOutBatches(Rows(23), 4, seed=1, world=World(rank=rank, size=2)).start(0)
        for rank in (0, 1)
    ]
    parts = [next(half)[0].tolist() for half in halves]
    assert [len(part) for part in parts] == [4, 4]
    assert not set(parts[0]) & set(parts[1])
    assert HeldOutBatches(Rows(5), 64, seed=1, world=World(size=2)).rows == 2
    with pytest.raises(
        InputError, match="3 held-out rows are too few; use a larger --val_fraction"
    ):
        HeldOutBatches(Rows(3), 64, seed=1, world=World(size=2))


def test_a_loaded_state_decides_which_held_out_batch_is_next() -> None:
    seen: list[list[int]] = []
    meta = SimpleNamespace(
        learn=lambda *_, clean_loss, **__: clean_loss(),
        state_dict=lambda: {},
        load_state_dict=lambda state: None,
    )
    held_out = HeldOutBatches(Rows(23), 4, seed=1, world=World())
    step = MetaMixupStep(meta, SimpleNamespace(label_smoothing=0.0), held_out=held_out, every=1)

    def note(model: nn.Module, inputs: Tensor, labels: Tensor) -> BatchLoss:
        seen.append(inputs.tolist())
        return BatchLoss(torch.zeros(()), torch.zeros(()))

    step.clean_loss_fn = note

    def steps(number: int) -> None:
        for _ in range(number):
            labels = torch.zeros(2)
            step.before_step(
                nn.Identity(),
                labels,
                labels,
                lr=0.1,
                precision=Precision("fp32", "cpu"),
                scaler=torch.amp.GradScaler("cpu", enabled=False),
            )

    steps(2)
    state = step.state_dict()
    steps(3)
    step.load_state_dict(state)
    steps(3)
    assert seen[5:] == seen[2:5]
    assert seen[2] != seen[3]


class Texts(Rows):
    """Held-out texts whose first token tells the class."""

    def batches(
        self, plan: Sequence[Tensor], epoch: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in plan:
            tokens = torch.randint(
                6, 50, (len(rows), 8), generator=torch.Generator().manual_seed(int(rows.sum()))
            )
            tokens[:, 0] = 3 + rows % 3
            yield tokens, rows % 3


def text_trainer(
    world: World,
    precision: Precision,
    every: int = 2,
    optimizer: str = "sgd",
    accumulate: int = 1,
    mix_at: str = "tokens",
) -> Trainer:
    torch.manual_seed(1)
    model = Transformer(
        50, 3, width=16, depth=1, heads=2, mlp_width=32, max_len=16, dropout=0.1, mix_at=mix_at
    )
    meta = MetaMixup(3, lr=0.05)
    loss_fn = MixedCrossEntropy(lambda labels, **size: meta.mix(labels), model_mixes=True)
    held_out = HeldOutBatches(Texts(30), 8, seed=0, world=world)
    trainer = make_trainer(
        model,
        build_optimizer(model, optimizer, 0.1),
        world,
        loss_fn=loss_fn,
        precision=precision,
        meta_learner=MetaMixupStep(meta, loss_fn, held_out=held_out, every=every),
        accumulation_steps=accumulate,
    )
    trainer.wrap_model()
    torch.manual_seed(10 + world.rank)
    return trainer


def table_of(trainer: Trainer) -> Tensor:
    assert isinstance(trainer.meta_learner, MetaMixupStep)
    return trainer.meta_learner.meta.table.detach().clone()


@each_of(
    ("name", "dtype"),
    [("fp32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
    ids=lambda value: str(value),
)
@each_of("optimizer", ["sgd", "ngd", "adamw"])
@each_of("mix_at", ["tokens", "pooled"])
def test_the_step_learns_the_policy_now_and_then(
    name: str, dtype: torch.dtype | None, optimizer: str, mix_at: str
) -> None:
    trainer = text_trainer(
        World(),
        Precision(name, "cpu", dtype),
        every=3,
        optimizer=optimizer,
        accumulate=2,
        mix_at=mix_at,
    )
    stream, tables = Texts(64).batches(list(torch.arange(64).view(8, 8))), [table_of(trainer)]
    for tokens, labels in stream:
        trainer.train_step(tokens, labels)
        tables.append(table_of(trainer))
    changed = [not torch.equal(*pair) for pair in zip(tables, tables[1:])]
    assert changed == [True, False, False, True, False, False, True, False]
    assert all(table.isfinite().all() for table in tables)
    assert trainer.sums.skipped == 0


def test_micro_batches_bound_what_the_policy_learns_from() -> None:
    trainer = text_trainer(World(), Precision("fp32", "cpu"), accumulate=4)
    sizes: list[int] = []
    assert isinstance(trainer.meta_learner, MetaMixupStep)
    with_mix = trainer.meta_learner.loss_fn.with_mix
    trainer.meta_learner.loss_fn.with_mix = lambda *given, **named: (
        sizes.append(len(named["labels"])),
        with_mix(*given, **named),
    )[1]  # type: ignore[method-assign]
    trainer.train_step(*next(Texts(64).batches([torch.arange(16)])))
    assert sizes == [4, 4, 4] + [4] * 4


def test_a_compiled_model_learns_the_same() -> None:
    tables = []
    for compiled in (False, True):
        trainer = text_trainer(World(), Precision("fp32", "cpu"), every=1)
        for module in trainer.model.modules():
            if hasattr(module, "p"):
                module.p = 0.0  # compiled dropout draws other numbers
        if compiled:
            trainer.model.compile(backend="aot_eager")
        for tokens, labels in Texts(64).batches(list(torch.arange(64).view(8, 8))):
            trainer.train_step(tokens, labels)
        tables.append(table_of(trainer))
    torch.testing.assert_close(*tables, rtol=1e-2, atol=1e-3)
    assert tables[0].abs().mean() > 0.05


def all_ranks_learn_one_policy(world: World) -> None:
    for optimizer, accumulate in (("sgd", 1), ("ngd", 2)):
        trainer = text_trainer(
            world,
            Precision("bf16", "cpu", torch.bfloat16),
            optimizer=optimizer,
            accumulate=accumulate,
        )
        mine = torch.arange(64).view(4, 16)[:, world.rank :: world.size]
        for tokens, labels in Texts(64).batches(list(mine)):
            trainer.train_step(tokens, labels)
        table = table_of(trainer)
        assert (table != 0).any()
        total = world.sum(table.clone())
        assert torch.equal(total, table * world.size), "ranks differ"
        weights = torch.cat(
            [parameter.detach().flatten() for parameter in trainer.model.parameters()]
        )
        assert torch.equal(world.sum(weights.clone()), weights * world.size), "ranks differ"
        assert isinstance(trainer.meta_learner, MetaMixupStep)
        gradients = trainer.meta_learner.meta.table.grad
        assert torch.equal(world.sum(gradients.clone()), gradients * world.size)


def test_all_ranks_learn_one_policy() -> None:
    ranks.run_ranks(all_ranks_learn_one_policy, 2)


# -------------------------------------------------------------------- flags


def test_meta_learning_holds_rows_out_by_itself() -> None:
    for words in ("--meta_learning", "--mixup meta", "--ngd --meta_learning"):
        args, _ = options.parse(resnet50_test.parser(), resnet50_test.SCRIPT, words.split())
        assert (args.mixup, args.val_fraction) == ("meta", 0.05)
        assert args.mixup_args == {"policy": "pair", "lr": 0.1, "every": 16}
    args, _ = options.parse(resnet50_test.parser(), resnet50_test.SCRIPT, ["--mixup", "mixup"])
    assert args.val_fraction == 0
    args, _ = options.parse(
        resnet50_test.parser(), resnet50_test.SCRIPT, "--meta_learning --val_fraction 0.2".split()
    )
    assert args.val_fraction == 0.2
    with pytest.raises(InputError, match="--mixup meta learns on held-out rows"):
        options.parse(
            resnet50_test.parser(), resnet50_test.SCRIPT, "--meta_learning --val_fraction 0".split()
        )


def test_the_flags_build_the_learner_on_the_validation_rows() -> None:
    words = "--meta_learning --meta_policy beta --meta_every 5 --meta_lr 0.3 --alpha 0.4 --bs 7"
    words += " --label_smoothing 0.1"
    args, _ = options.parse(transformer_test.parser(), transformer_test.SCRIPT, words.split())
    rows = Rows(50)
    data = factory.Data(rows, {"val": rows}, {"classes": ["class"] * 6}, model_mixes=True)
    run = factory.Run("x", World(), Precision("fp32", "cpu"))
    loss_fn, learner = factory.create_loss(
        args, run, data, sample_mix=mixup.sample_mix, meta_mixup=MetaMixup
    )
    assert isinstance(loss_fn, MixedCrossEntropy)
    assert isinstance(learner, MetaMixupStep)
    assert (learner.every, learner.held_out.data, learner.held_out.rows) == (5, rows, 7)
    assert learner.loss_fn is loss_fn
    meta = learner.meta
    assert (meta.policy, meta.alpha, meta.lr, meta.pair_index.shape) == ("beta", 0.4, 0.3, (6, 6))
    assert loss_fn.model_mixes
    assert loss_fn.label_smoothing == 0.1
    labels = torch.zeros(4, dtype=torch.long)
    assert len(loss_fn.sample_mix(labels, height=1, width=1).weight) == 4


@pytest.mark.process
@pytest.mark.parametrize(
    ("script", "words", "picture"),
    [
        (
            resnet50_test,
            "--dataset digits --arch resnet8 --bs 64 --lr 0.05 --epochs 2 --ngd --meta_learning "
            "--meta_every 4",
            True,
        ),
        (
            transformer_test,
            "--dataset headlines --bs 16 --epochs 2 --width 32 --meta_learning --meta_policy beta",
            True,
        ),
    ],
)
def test_a_run_logs_its_policy(script, words, picture, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        "sys.argv",
        [script.SCRIPT, *words.split(), "--out", str(tmp_path / "run"), "--threads", "1"],
    )
    script.main()
    assert all(0.5 < row["mean_lambda"] < 1 for row in ranks.metrics(tmp_path / "run"))
    assert all("val_accuracy" in row for row in ranks.metrics(tmp_path / "run"))
    file = tmp_path / "run" / "policy.png"
    assert file.exists() == picture
    if picture:
        assert file.read_bytes().startswith(b"\x89PNG")
    state = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    assert state["learner"]["steps"] == state["progress"]["step"]
