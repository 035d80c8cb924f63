"""Ranks together do what one process does; and they decide together."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ranks
from backends.precision import Precision
from distributed.world import StopVote, World, choose_collectives
from input_pipeline.sampler import rank_share
from models.transformer import Transformer
from trainers import build_optimizer, make_trainer
from training.losses import BatchLoss, CrossEntropy
from training.step_stats import StepSums
from training.trainer import Trainer

FP32 = Precision("fp32", "cpu")


def text_model() -> nn.Module:
    torch.manual_seed(1)
    return Transformer(
        50, 4, width=16, depth=1, heads=2, mlp_width=32, max_len=16, dropout=0.0
    ).double()


def text_batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(3, 50, (rows, 12), generator=generator), torch.randint(
        4, (rows,), generator=generator
    )


def trainer_of(model: nn.Module, world: World, **options) -> Trainer:
    trainer = make_trainer(model, build_optimizer(model, "sgd", 0.1), world, **options)
    trainer.wrap_model()
    return trainer


def gradients_equal_those_of_one_process(world, rows, accumulate):
    inputs, labels = text_batch(rows)
    alone = text_model()
    F.cross_entropy(alone(inputs), labels).backward()
    model = text_model()
    trainer = trainer_of(model, world, accumulation_steps=accumulate)
    mine = rank_share(torch.arange(rows), world.rank, world_size=world.size)
    for _ in range(2):  # the second backward of a static graph takes another path than the first
        model.zero_grad(set_to_none=True)
        trainer.forward_backward(trainer.parallel_model, inputs[mine], labels[mine])
        for (name, expected), given in zip(alone.named_parameters(), model.parameters()):
            torch.testing.assert_close(given.grad, expected.grad, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("splits", [2, 3, 5])
def test_micro_batches_of_unequal_size_have_the_gradient_of_the_whole(splits):
    gradients_equal_those_of_one_process(World(), 13, splits)


def a_bad_gradient_on_one_rank_is_skipped_by_all(world):
    model = text_model()
    trainer = trainer_of(model, world)
    inputs, labels = text_batch(8)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    if world.rank == 1:
        trainer.loss_fn = lambda model, x, y: BatchLoss(
            F.cross_entropy(model(x), y) * float("nan"), (y == y).sum()
        )
    trainer.train_step(inputs, labels)
    assert all(torch.equal(parameter, old) for parameter, old in zip(model.parameters(), before))
    assert trainer.sums.skipped == 1
    assert trainer.sums.samples == 0
    trainer.loss_fn = CrossEntropy()
    trainer.train_step(inputs, labels)
    assert trainer.sums.skipped == 1
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert flat.isfinite().all()
    assert not torch.equal(flat, torch.cat([old.flatten() for old in before]))
    assert torch.equal(world.sum(flat.clone()), flat * world.size), "ranks differ"


def memory_loss(limit: int):
    def loss_fn(model, x, y):
        if len(y) > limit:
            raise torch.cuda.OutOfMemoryError("made up")
        return CrossEntropy()(model, x, y)

    return loss_fn


def each_rank_finds_its_own_micro_batch(world):
    model = text_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = memory_loss(3 if world.rank == 1 else 8)
    trainer = make_trainer(model, optimizer, world, loss_fn=loss_fn)
    trainer.probe_step(trainer.model, *text_batch(8))
    assert trainer.micro_batches.number(8) == (4 if world.rank == 1 else 1)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_running_out_of_memory_halves_the_micro_batch_and_keeps_the_result(monkeypatch):
    outcomes, messages = [], []
    for loss_fn in (CrossEntropy(), memory_loss(3)):
        model = text_model()
        trainer = trainer_of(model, World(), loss_fn=loss_fn)
        monkeypatch.setattr(trainer.log, "info", messages.append)
        for _ in range(3):
            trainer.train_step(*text_batch(10))
        outcomes.append(
            torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        )
    torch.testing.assert_close(*outcomes, rtol=1e-9, atol=1e-12)
    assert trainer.micro_batches.number(10) == 4
    assert len(messages) == 2  # 10 -> 5 -> 3


def test_a_batch_that_is_tried_leaves_no_trace():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 3))
    trainer = trainer_of(model, World())
    before = [value.clone() for value in model.state_dict().values()]
    state = torch.get_rng_state()
    trainer.probe_step(model, torch.randn(8, 6, generator=torch.Generator()), torch.arange(8) % 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, q) for p, q in zip(model.state_dict().values(), before))
    assert all(p.grad is None for p in model.parameters())


def test_clipping_makes_no_gradient_longer():
    for clip, factor in ((0.0, 1.0), (100.0, 1.0), (1.0, 0.2)):
        model = nn.Linear(2, 1, bias=False)
        trainer = trainer_of(model, World(), max_grad_norm=clip)
        before = model.weight.detach().clone()
        model.weight.grad = torch.tensor([[3.0, 4.0]])
        trainer.optimizer_step(StepSums(torch.device("cpu")))
        moved = (before - model.weight.detach()) / 0.1
        torch.testing.assert_close(moved, factor * torch.tensor([[3.0, 4.0]]), rtol=1e-4, atol=1e-5)


def test_a_state_gives_back_the_random_numbers_and_the_loss_scale():
    precision = Precision("fp16", "cpu", torch.float16)
    trainers = [trainer_of(nn.Linear(2, 1), World(), precision=precision) for _ in range(2)]
    states = [each.checkpoints.train_state for each in trainers]
    trainers[0].scaler.scale(torch.ones(1))
    trainers[0].scaler.update(256.0)
    state = states[0].state_dict()
    drawn = torch.rand(3)
    states[1].load_state_dict(state)
    assert torch.equal(torch.rand(3), drawn)
    assert trainers[1].scaler.get_scale() == 256.0


def sums_and_votes(world):
    assert world.max_over_ranks(world.rank) == world.size - 1
    assert world.broadcast(f"from {world.rank}") == "from 0"
    assert world.gather(world.rank) == (list(range(world.size)) if world.is_main else [])
    norm = nn.BatchNorm1d(3)
    norm.running_mean.fill_(float(world.rank))
    world.average_buffers(norm)
    assert norm.running_mean.tolist() == [(world.size - 1) / 2] * 3
    vote, answers = StopVote(world), []
    for step in range(6):
        answers.append(vote.ask(world.rank == 1 and step == 2))
    assert answers == [
        False,
        False,
        False,
        True,
        False,
        False,
    ]  # one step late, the same on every rank
    assert vote.finish() is False


def bytes_are_counted(world):
    model = text_model().float()
    trainer = trainer_of(model, world)
    trainer.train_step(*text_batch(8))
    trainer.train_step(*text_batch(8))
    assert world.bytes_sent == 2 * 4 * sum(parameter.numel() for parameter in model.parameters())


def all_of_it(world):
    for rows, accumulate in ((8 * world.size, 1), (8 * world.size, 4)):
        gradients_equal_those_of_one_process(world, rows, accumulate)
    world.bytes_sent = 0
    for body in (
        bytes_are_counted,
        a_bad_gradient_on_one_rank_is_skipped_by_all,
        each_rank_finds_its_own_micro_batch,
        sums_and_votes,
    ):
        body(world)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.process)])
def test_ranks_do_together_what_one_process_does_and_decide_together(size):
    ranks.run_ranks(
        all_of_it, size
    )  # one start of the processes for all bodies: a start takes seconds


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "device", "processes", "backend"),
    [
        ("auto", "cpu", 4, "gloo"),
        ("auto", "cuda:1", 4, "nccl"),
        ("cuda", "cuda:0", 1, "nccl"),
        ("cuda:0", "cuda:0", 1, "nccl"),
        ("cuda:0", "cuda:0", 4, "gloo"),
    ],
)
def test_processes_that_share_a_gpu_speak_gloo(name, device, processes, backend):
    assert choose_collectives(name, torch.device(device), processes) == backend


def test_device_hours_count_gpus_or_nodes():
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    assert World().devices == 1
    assert World(size=4, local_size=2, device=cpu).devices == 2
    assert World(size=4, local_size=2, device=gpu).devices == 4
    assert World(size=4, local_size=4, device=gpu, shares_gpu=True).devices == 1


NO_THREADS_LEFT = """
import contextlib
import os
import distributed.world  # before the group is there
import torch
import torch.distributed as dist

def gloo_threads():
    found = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it may end at this moment
            found.append(open(f"/proc/self/task/{task}/comm").read())
    return [name for name in found if "gloo" in name]

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
weight = torch.zeros(3, requires_grad=True)
weight.sum().backward()
torch.optim.SGD([weight]).step()  # imports much of torch
dist.all_reduce(weight.detach())
assert gloo_threads()
dist.destroy_process_group()
assert not gloo_threads()
"""


def test_the_end_of_the_process_group_ends_its_threads() -> None:
    """A thread that outlives it may abort the process while the interpreter ends."""
    done = subprocess.run(
        [sys.executable, "-c", NO_THREADS_LEFT], capture_output=True, text=True, cwd=ranks.ROOT
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.process
def test_run_distributed_trains_whatever_port_is_taken(tmp_path):
    flags = [
        "--dataset",
        "digits",
        "--arch",
        "resnet20",
        "--bs",
        "50",
        "--lr",
        "0.1",
        "--epochs",
        "2",
        "--out",
        tmp_path / "run",
    ]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = ranks.start(
            ranks.torchrun("resnet50_test.py", *flags), tmp_path, NGPU="2", MASTER_PORT=port
        )
        console = ranks.finish(process, tmp_path)
    rows = ranks.metrics(tmp_path / "run")
    assert [row["world_size"] for row in rows] == [2, 2]
    assert [row["batch_size"] for row in rows] == [100, 100]
    assert rows[0]["comm_bytes"] > 0
    assert console.count("best.pt: epoch") == 1, "rank 0 alone writes"
    # 360 test images over two ranks in batches of 64: each counted once
    assert (rows[-1]["test_accuracy"] * 360) == pytest.approx(
        round(rows[-1]["test_accuracy"] * 360), abs=1e-6
    )
    state = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    assert not any(name.startswith("module.") for name in state["model"])


@pytest.mark.process
def test_run_distributed_hands_on_the_exit_code_and_one_line(tmp_path):
    process = ranks.start(
        ranks.torchrun("transformer_test.py", "--dataset", "headlines", "--bs", "9999"),
        tmp_path,
        NGPU="2",
    )
    console = ranks.finish(process, tmp_path, expected=2)
    errors = [line for line in console.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, console
    assert "--bs 9999" in errors[0]
    assert "Traceback" not in console
    assert not list(Path(tmp_path).glob("runs/*")), "a refused run leaves nothing behind"
