"""Ranks together do what one process does; and they decide together."""

import contextlib
import os
import socket
import subprocess
import sys

import pytest
import torch
from torch import nn

import conftest
import ranks
from conftest import each_of
from distributed import world
from distributed.interface import check_interfaces, interface_of, own_address, use_interface_of
from distributed.world import StopVote, World
from errors import InputError
from trainers import FP32, flat, make_trainer, text_batch, text_model, trainer_of
from training import linear_probe
from training.losses import CrossEntropy
from training.progress import device_hours
from training.step_stats import StepSums


def features_are_those_of_one_process(world):
    """In the order of the rows, which are computed by their lengths."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(), nn.Linear(5, 3))
    inputs, labels = torch.randn(31, 6), torch.arange(31) % 3
    data = linear_probe.Features(inputs, labels, world.device)
    data.lengths = torch.arange(31) * 7 % 5
    how = {"precision": FP32, "batch_size": 4}
    for most, rows in ((None, torch.arange(31)), (4, torch.tensor([0, 10, 20, 30]))):
        found = linear_probe.compute_features(model, model[2], data, world=world, most=most, **how)
        torch.testing.assert_close(found, (model[0](inputs[rows]).detach(), labels[rows]))
    model.append(nn.Tanh())
    found = linear_probe.compute_features(model, model[2], data, world=world, **how)
    assert found is None, "the outputs of the head are not the logits"


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
    trainer.probe.try_batch(trainer.model, *text_batch(8))
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
        outcomes.append(flat(model.parameters()))
    torch.testing.assert_close(*outcomes, rtol=1e-9, atol=1e-12)
    assert trainer.micro_batches.number(10) == 4
    assert len(messages) == 2  # 10 -> 5 -> 3


def test_a_batch_that_is_tried_leaves_no_trace():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 3))
    trainer = trainer_of(model, World())
    before = [value.clone() for value in model.state_dict().values()]
    state = torch.get_rng_state()
    inputs = torch.randn(8, 6, generator=torch.Generator())
    trainer.probe.try_batch(model, inputs, torch.arange(8) % 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, q) for p, q in zip(model.state_dict().values(), before))
    assert all(p.grad is None for p in model.parameters())


def sums_and_votes(world):
    vote = StopVote(world)
    answers = [vote.ask(world.rank == 1 and step == 2) for step in range(6)]
    assert [step for step, answer in enumerate(answers) if answer] == [3], "a step late, on all"
    assert vote.finish() == 0
    assert (vote.ask(1 + world.rank), vote.finish()) == (0, world.size), "the largest wish"
    sums = StepSums(world.device)
    sums.skipped.fill_(world.rank)
    assert sums.totals(world).skipped == (world.size - 1) / 2
    model = nn.BatchNorm1d(2)
    trainer = trainer_of(model, world, average_decay=0.5)
    model.register_buffer("constant", torch.tensor(float(world.rank)))
    for norm in (model, trainer.average.model):
        norm.running_mean.fill_(world.rank)
    state = trainer.parts.state_dict()  # in mid-epoch, for a single process to go on from
    if world.is_main and world.size > 1:
        alone = trainer_of(nn.BatchNorm1d(2), World(), average_decay=0.5)
        alone.parallel.model.register_buffer("constant", torch.tensor(0.0))
        alone.parts.load_state_dict(state)
        for norm in (alone.parallel.model, alone.average.model):
            assert norm.running_mean.tolist() == 2 * [(world.size - 1) / 2]
    trainer.parallel.sync_replicas(trainer.statistics())
    for norm in (model, trainer.average.model):
        assert norm.running_mean.tolist() == 2 * [(world.size - 1) / 2]
    assert model.constant == world.rank


def all_of_it(world):
    features_are_those_of_one_process(world)
    each_rank_finds_its_own_micro_batch(world)
    sums_and_votes(world)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.process)])
def test_ranks_do_together_what_one_process_does_and_decide_together(size):
    ranks.run_ranks(all_of_it, size)


def test_processes_that_share_a_gpu_speak_gloo_and_device_hours_count_gpus_or_nodes(monkeypatch):
    chosen: list[str] = []
    monkeypatch.setattr(world, "_init_process_group", lambda _, backend, __: chosen.append(backend))

    def meet(made, _) -> str:
        made.nodes = [range(4)]
        return "a store"

    monkeypatch.setattr(world, "_meet_at_first", meet)
    monkeypatch.setattr(world, "end_with_launcher", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, device, processes, backend in (
        ("cpu", "cpu", 4, ["gloo"]),
        ("auto", "cuda:1", 4, ["nccl"]),
        ("cuda:0", "cuda:0", 1, []),
        ("cuda:0", "cuda:0", 4, ["gloo"]),
    ):
        monkeypatch.setattr(world, "choose_device", lambda *_, found=device: torch.device(found))
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        monkeypatch.setenv("RANK", "0")
        chosen.clear()
        with world.init_world(name) as made:
            assert chosen == backend
        assert made.shares_gpu == (name == "cuda:0" and processes > 1)
    cpu, gpu, nodes = torch.device("cpu"), torch.device("cuda:0"), [[0, 2], [1, 3, 4]]
    assert World(size=5, nodes=nodes, device=cpu).devices == 2
    assert World(size=5, nodes=nodes, device=gpu).devices == 5
    assert World(size=4, nodes=[range(4)], device=gpu, shares_gpu=True).devices == 1
    rows = [{"seconds": 3600.0, "devices": 8}, {"seconds": 7200.0, "devices": 1}]
    assert device_hours(rows) == 9


def test_variables_of_the_network_that_are_wrong_are_named(monkeypatch):
    for variable in ("RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=localhost", "MASTER_PORT=29999"):
        monkeypatch.setenv(*variable.split("="))
    with socket.create_server(("", 0)) as taken:
        for name, value in (
            ("RANK", "2"),
            ("MASTER_ADDR", ""),
            ("MASTER_PORT", str(taken.getsockname()[1])),
            ("GLOO_SOCKET_IFNAME", "lo,eth77"),
        ):
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                with pytest.raises(InputError, match=name):
                    world.init_world("cpu").__enter__()


def test_the_interface_of_the_route_is_used_unless_the_user_chose_one(monkeypatch):
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("localhost") in ("127.0.0.1", "::1")
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") == "", "an address of documentation, RFC 5737"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    use_interface_of("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    for chosen, is_wrong in (("=lo", 0), ("l", 0), ("^lo", 0), ("=l", 1), ("eth77", 1)):
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", chosen)
        check_interfaces(is_gpu=False)
        with pytest.raises(InputError) if is_wrong else contextlib.nullcontext():
            check_interfaces(is_gpu=True)


NO_THREADS_LEFT = """
import distributed.world  # before the group is there
from pathlib import Path
import torch
import torch.distributed as dist

def has_gloo_threads():
    return any("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
weight = torch.zeros(3, requires_grad=True)
weight.sum().backward()
torch.optim.SGD([weight]).step()  # imports much of torch
dist.all_reduce(weight.detach())
assert has_gloo_threads()
dist.destroy_process_group()
assert not has_gloo_threads()
"""


def test_the_end_of_the_process_group_ends_its_threads() -> None:
    """A thread that outlives it may abort the process while the interpreter ends."""
    command = [sys.executable, "-c", NO_THREADS_LEFT]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ranks.ROOT)
    assert done.returncode == 0, done.stderr


SKIPPING = """import torch
from torch import nn

class Skipping(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, classes)

    def forward(self, x):
        x = x.flatten(1)
        if not self.training or torch.rand(()) < 0.5:
            x = x + self.layer(x)
        return self.head(x)
"""


@each_of("more", ["", "--accumulate 2", "--balance_workers"])
def test_an_own_network_may_leave_parameters_out(tmp_path, more):
    """Which differ from pass to pass, or are never used."""
    folder = conftest.write(tmp_path / (more or "plain"), mine__py=SKIPPING)
    words = "resnet50_test.py --dataset digits --subset 0.2 --arch mine:Skipping --optimizer sgd"
    words += f" --lr 0.01 --bs 16 --epochs 2 --threads 1 --out run {more}"
    ranks.run(words, folder, 2)
    assert len(ranks.metrics(folder / "run")) == 2
