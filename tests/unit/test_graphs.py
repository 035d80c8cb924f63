"""CUDA graphs of training steps, with a recording of their operations where there is no GPU."""

import copy
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import conftest
import fake_cuda
import mixup
from backends import cuda_graph
from backends.precision import Precision
from cli import factory
from cli.data import Run
from conftest import each_of, needs_gpu
from distributed.world import World
from errors import InputError
from models.image_models import create_model
from trainers import build_optimizer, flat, make_trainer
from training.batch_sampler import RankBatch
from training.checkpoint import Checkpoint
from training.losses import CrossEntropy, MixedCrossEntropy
from training.meta_learner import MetaLearner

RATES = {"sgd": 0.1, "adamw": 1e-3, "ngd": 0.05, "lamb": 0.01, "lars": 1.0}


class StandIn(fake_cuda.Recording):
    """Takes the place of a recorded CUDA graph. Recording it has done its first replay."""

    def __init__(self, body, tensors, *, weight):
        super().__init__()
        with self:
            body(*tensors, weight)
        self.is_done = True

    def replay(self):
        if not self.is_done:
            super().replay()
        self.is_done = False


def batches(device: str = "cpu"):
    generator = torch.Generator().manual_seed(3)
    for rows in (8, 8, 6, 8, 8, 6, 8, 6, 6, 8, 6):
        x = torch.randn(rows, 1, 8, 8, generator=generator)
        yield x.to(device), torch.randint(10, (rows,), generator=generator).to(device)


def make(name: str, device: str = "cpu", *, loss_fn=None, graph: bool = False):
    torch.manual_seed(0)
    model = create_model("resnet8", classes=10, channels=1, image_size=8).to(device)
    optimizer = build_optimizer(model, name, RATES[name], 1e-3)
    settings = {"accumulation_steps": 2, "max_grad_norm": 1.0, "record_cuda_graph": graph}
    settings |= {"loss_fn": loss_fn or CrossEntropy(0.1), "precision": Precision("fp32", device)}
    return make_trainer(model, optimizer, World(device=torch.device(device)), **settings)


def run(trainer, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and sums after steps at a falling rate; the gradients of two are not finite."""
    for number, (x, y) in enumerate(batches(device)):
        trainer.set_lr(trainer.optimizer.defaults["lr"] / (1 + number))
        trainer.train_step(x * float("nan") if number in (1, 9) else x, y)
    return flat(trainer.parallel.parameters).cpu(), trainer.sums.values.cpu()


@each_of("name", list(cuda_graph.RECORDED_OPTIMIZERS))
def test_recorded_steps_are_the_steps(name, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(cuda_graph, "record_cuda_graph", StandIn)
        # as on a GPU: all matrices together, and no eigenvalues
        patch.setattr("ngd.ALONE_DEVICES", set())
        patch.setattr("optimizers.matrix_functions.EIGH_DEVICES", set())
        plain, recorded = make(name), make(name, graph=True)
        weights, sums = run(recorded)
        assert len(recorded.graph.recorded) == 2  # two shapes
        # Not bit for bit: the learning rate of recorded steps is an fp32 tensor.
        torch.testing.assert_close((weights, sums), run(plain), rtol=1e-4, atol=1e-5)
        patch.setattr(cuda_graph, "WARM_UP_CALLS", 99)
        unrecorded = make(name, graph=True)
        again, _ = run(unrecorded)
        assert torch.equal(weights, again)
        states = (each.optimizer.state_dict() for each in (recorded, unrecorded))
        torch.testing.assert_close(*states, rtol=0, atol=0)


def test_the_first_calls_of_a_shape_are_not_recorded_and_weights_are_part_of_it(monkeypatch):
    calls, expected, recorded = [], [], []

    def record(body, tensors, *, weight):
        recorded.append((tensors[0].shape, weight))
        return SimpleNamespace(replay=partial(body, *tensors, weight))

    monkeypatch.setattr(cuda_graph, "record_cuda_graph", record)
    runner = cuda_graph.CudaGraphRunner(lambda x, weight: calls.append((x.tolist(), weight)))
    for number in range(cuda_graph.WARM_UP_CALLS + 2):
        assert bool(runner.recorded) == (number > cuda_graph.WARM_UP_CALLS)
        runner(torch.tensor([float(number)]), weight=0.5)
        runner(torch.tensor([float(-number)]), weight=2.0)
        expected += [([float(number)], 0.5), ([float(-number)], 2.0)]
    assert calls == expected
    assert recorded == [((1,), 0.5), ((1,), 2.0)]
    monkeypatch.setattr(cuda_graph, "MAX_GRAPHS", 2)
    for _ in range(cuda_graph.WARM_UP_CALLS + 1):
        runner(torch.zeros(2), weight=0.5)
        assert calls.pop() == ([0.0, 0.0], 0.5)
    assert len(recorded) == 2, "no more than so many"
    runner.invalidate()
    runner(torch.zeros(1), weight=0.5)
    assert not runner.recorded


def test_a_step_that_cannot_be_recorded_runs_without_a_graph_where_that_is_allowed(monkeypatch):
    error = RuntimeError("operation not permitted when stream is capturing\nmore of it")
    monkeypatch.setattr(cuda_graph, "record_cuda_graph", mock.Mock(side_effect=error))
    lines, calls = [], []
    runner = cuda_graph.CudaGraphRunner(lambda x, weight: calls.append(len(x)), lines.append)
    for rows in (1, 2) * 6:
        runner(torch.zeros(rows))
    assert calls == [1, 2] * 6
    (line,) = lines
    assert "could not be recorded (operation not permitted when stream is capturing)" in line
    with pytest.raises(RuntimeError, match="not permitted"):
        run(make("sgd", graph=True))


def test_a_recorded_step_of_meta_mixup_reads_its_rows_and_notes_their_losses(monkeypatch):
    monkeypatch.setattr(cuda_graph, "record_cuda_graph", StandIn)
    sums = []
    for graph in (False, True):
        meta = mixup.MetaMixup(32)
        meta.wrong = 0.4
        meta.row_losses.excess.copy_(torch.linspace(-1, 1, 32))
        monkeypatch.setattr(torch, "randperm", lambda n, **_: torch.arange(n).flip(0))
        monkeypatch.setattr(mixup, "sample_beta", lambda a, n, **_: torch.full((n,), 0.3))
        draw = lambda labels, meta=meta, **size: meta.mix(labels)  # noqa: E731
        trainer = make(
            "sgd", loss_fn=MixedCrossEntropy(draw, False, observe=meta.observe), graph=graph
        )
        trainer.meta_learner = MetaLearner(meta, None, until=9)
        for number, (x, y) in enumerate(batches()):
            rows = (torch.arange(len(y)) + 3 * number) % 32
            trainer.train_step(x, y, RankBatch(rows, 1.0, len(y)))
        sums.append(meta.row_losses.sums)
    torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-5)
    assert (sums[0][1] > 0).all()


def test_auto_records_long_runs_on_one_gpu_that_allow_it():
    def chosen(words: str, device: str = "cuda", ranks: int = 1) -> str:
        run = Run("", World(size=ranks, device=torch.device(device)), Precision("bf16", "cuda"))
        batches = SimpleNamespace(steps=lambda: 350)
        return factory.choose_backend(conftest.parsed("images", words), run, batches)

    assert chosen("") == chosen("--ngd --meta_learning") == "cudagraph"
    others = ("--optimizer muon", "--mixup cutmix", "--checkpoint_activations", "--epochs 5")
    for words in (*others, "--arch timm:resnet18", "--backend eager"):
        assert chosen(words) == "eager", words
    assert chosen("", "cpu") == chosen("", ranks=2) == "eager"
    assert chosen("--backend compile --epochs 1", "cpu") == "compile"


def test_a_full_memory_ends_recorded_steps_with_one_line():
    def full(model, x, y):
        raise torch.cuda.OutOfMemoryError

    with pytest.raises(InputError, match="out of memory in mid-run"):
        make("sgd", loss_fn=full, graph=True).train_step(*next(batches()))


def test_loading_a_state_invalidates_the_graphs(monkeypatch):
    monkeypatch.setattr(cuda_graph, "record_cuda_graph", StandIn)
    trainer, other = make("adamw", graph=True), make("adamw")
    run(trainer)
    assert trainer.graph is not None
    assert trainer.graph.recorded
    state = copy.deepcopy(other.parts.state_dict())
    file = trainer.log.folder / "last.pt"
    trainer.restore(Checkpoint(file, {}, other.progress.state_dict(), state))
    assert not trainer.graph.recorded
    trainer.sums.values.zero_()
    torch.testing.assert_close(run(trainer), run(other), rtol=1e-5, atol=1e-6)


@needs_gpu
@pytest.mark.parametrize("name", cuda_graph.RECORDED_OPTIMIZERS)
def test_graphs_are_the_steps(name):
    plain, recorded = make(name, "cuda"), make(name, "cuda", graph=True)
    torch.testing.assert_close(run(recorded, "cuda"), run(plain, "cuda"), rtol=1e-3, atol=1e-4)


@needs_gpu
def test_each_replay_draws_its_own_mix():
    drawn = []

    def note(logits, labels, mix):
        drawn.append(mix.weight)

    draw = partial(mixup.sample_mix, "mixup", alpha=1.0)
    loss_fn = MixedCrossEntropy(draw, False, observe=note)
    trainer = make("sgd", "cuda", loss_fn=loss_fn, graph=True)
    seen = set()
    for _ in range(8):
        x = torch.randn(8, 1, 8, 8, device="cuda")
        trainer.train_step(x, torch.randint(10, (8,), device="cuda"))
        seen.add(float(drawn[-1][0]))
    assert len(seen) == 8
