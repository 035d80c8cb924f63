"""CUDA graphs of training steps, with a stand-in on fixed tensors where there is no GPU."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import conftest
import mixup
from backends import cuda_graph
from backends.precision import Precision
from conftest import needs_gpu
from distributed.world import World
from models.image_models import create_model
from trainers import build_optimizer, make_trainer
from training.losses import CrossEntropy, MixedCrossEntropy
from training.trainer import Trainer


def batches(device: str = "cpu"):
    generator = torch.Generator().manual_seed(3)
    for rows in (8, 8, 6, 8, 8, 6, 8, 6, 6, 8, 6):
        x = torch.randn(rows, 1, 8, 8, generator=generator)
        yield x.to(device), torch.randint(10, (rows,), generator=generator).to(device)


def make(name: str, device: str = "cpu", *, loss_fn=None, graph: bool = False) -> Trainer:
    torch.manual_seed(0)
    model = create_model("resnet8", classes=10, channels=1, image_size=8).to(device)
    optimizer = build_optimizer(model, name, 0.1 if name == "sgd" else 1e-3, 1e-3)
    settings = {"accumulation_steps": 2, "max_grad_norm": 1.0, "record_cuda_graph": graph}
    settings |= {"loss_fn": loss_fn or CrossEntropy(0.1), "precision": Precision("fp32", device)}
    return make_trainer(model, optimizer, World(device=torch.device(device)), **settings)


def run(trainer: Trainer, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    for number, (x, y) in enumerate(batches(device)):
        trainer.set_lr(0.1 / (1 + number))
        trainer.train_step(x, y)
    weights = torch.cat([p.detach().flatten() for p in trainer.parameters])
    return weights.cpu(), trainer.sums.values.cpu()


@pytest.fixture
def recorded_rows(monkeypatch) -> list[int]:
    """The rows of each graph that a stand-in has recorded."""
    recorded = []

    def record(body, tensors, *, weight):
        recorded.append(len(tensors[0]))
        return SimpleNamespace(replay=lambda: body(*tensors, weight))

    monkeypatch.setattr(cuda_graph, "record_cuda_graph", record)
    return recorded


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_recorded_steps_are_the_steps(name, recorded_rows):
    plain, recorded = make(name), make(name, graph=True)
    # Not bit for bit: the learning rate of recorded steps is an fp32 tensor.
    torch.testing.assert_close(run(recorded), run(plain), rtol=1e-5, atol=1e-6)
    assert recorded_rows == [8, 6]
    assert isinstance(recorded.optimizer.param_groups[0]["lr"], torch.Tensor)


def test_the_first_calls_of_a_shape_are_not_recorded_and_weights_are_part_of_it(recorded_rows):
    calls, expected = [], []
    runner = cuda_graph.CudaGraphRunner(lambda x, weight: calls.append((x.tolist(), weight)))
    for number in range(cuda_graph.WARM_UP_CALLS + 2):
        assert bool(runner.recorded) == (number > cuda_graph.WARM_UP_CALLS)
        for value, weight in ((float(number), 0.5), (float(-number), 2.0)):
            runner(torch.tensor([value]), weight=weight)
            expected.append(([value], weight))
    assert calls == expected
    assert recorded_rows == [1, 1]
    runner.invalidate()
    runner(torch.zeros(1), weight=0.5)
    assert not runner.recorded


def test_the_number_of_graphs_is_limited(recorded_rows, monkeypatch):
    monkeypatch.setattr(cuda_graph, "MAX_GRAPHS", 2)
    calls = []
    runner = cuda_graph.CudaGraphRunner(lambda x, weight: calls.append(len(x)))
    expected = [rows for rows in (1, 2, 3) for _ in range(cuda_graph.WARM_UP_CALLS + 1)]
    for rows in expected:
        runner(torch.zeros(rows))
    assert calls == expected
    assert recorded_rows == [1, 2]


@pytest.mark.usefixtures("recorded_rows")
def test_loading_a_state_invalidates_the_graphs():
    trainer, other = make("adamw", graph=True), make("adamw")
    run(trainer)
    assert trainer.graph is not None
    assert trainer.graph.recorded
    state = copy.deepcopy(other.checkpoints.train_state.state_dict())
    file = str(trainer.log.folder / "last.pt")
    trainer.restore({**state, "progress": other.progress.state_dict(), "file": file})
    assert not trainer.graph.recorded
    trainer.sums.values.zero_()
    torch.testing.assert_close(run(trainer), run(other), rtol=1e-5, atol=1e-6)


def test_it_needs_a_gpu_and_refuses_flags_that_it_does_not_support(refused):
    if not torch.cuda.is_available():
        refused("images", "--backend cudagraph", "needs a GPU")
    refused("images", "--backend cudagraph --mixup cutmix", "cutmix")
    base = conftest.IMAGES.replace("fp32", "fp16")
    refused("images", "--backend cudagraph", "--precision fp16", base)


@needs_gpu
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_graphs_are_the_steps(name):
    plain, recorded = make(name, "cuda"), make(name, "cuda", graph=True)
    torch.testing.assert_close(run(recorded, "cuda"), run(plain, "cuda"), rtol=1e-3, atol=1e-4)


@needs_gpu
def test_each_replay_draws_its_own_mix():
    drawn = []

    class Noted(MixedCrossEntropy):
        def with_mix(self, mix, *given, **named):
            drawn.append(mix.weight)
            return super().with_mix(mix, *given, **named)

    loss_fn = Noted(partial(mixup.sample_mix, "mixup", alpha=1.0), False)
    trainer = make("sgd", "cuda", loss_fn=loss_fn, graph=True)
    seen = set()
    for _ in range(8):
        x = torch.randn(8, 1, 8, 8, device="cuda")
        trainer.train_step(x, torch.randint(10, (8,), device="cuda"))
        seen.add(float(drawn[-1][0]))
    assert len(seen) == 8
