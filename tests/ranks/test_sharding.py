"""Sharded weights: equal to data parallelism; checkpoints for any number of ranks."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ranks
from conftest import run
from distributed import comm_hooks, fsdp
from distributed.world import World
from errors import InputError
from models.residual import residual_blocks
from ngd import NGD
from trainers import build_optimizer, make_trainer, text_batch, text_model
from training.batch_sampler import RankBatch
from training.losses import BatchLoss, CrossEntropy
from training.trainer import Trainer


def trainer_of(world: World, parallel: str, name="sgd", wire="none", **options) -> Trainer:
    net = text_model(depth=2)
    if parallel != "ddp":
        wire_dtype = comm_hooks.WIRE_DTYPES.get(wire)
        blocks = residual_blocks(net)
        fsdp.shard(net, world, kind=parallel, blocks=blocks, wire_dtype=wire_dtype)
    optimizer = build_optimizer(net, name, 0.05 if name == "sgd" else 1e-2, weight_decay=0.01)
    hook = comm_hooks.AllReduceHook(world, wire)
    return make_trainer(net, optimizer, world, comm_hook=hook, **options)


def trained(world: World, parallel: str, name: str = "sgd", **options) -> Trainer:
    """Five steps; the third of them has a gradient that is not finite on one rank."""
    trainer = trainer_of(world, parallel, name, **options)
    trainer.wrap_model()
    for number in range(5):
        inputs, labels = text_batch(6, seed=10 * world.rank + number)
        trainer.loss_fn = not_a_number if number == 2 and world.rank == 1 else CrossEntropy()
        trainer.train_step(inputs, labels)
    return trainer


def not_a_number(net, inputs, labels):
    return BatchLoss(CrossEntropy()(net, inputs, labels).loss * float("nan"), torch.zeros(()))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_parameters(trainer: Trainer) -> torch.Tensor:
    return torch.cat(
        [whole(parameter.detach()).flatten() for parameter in trainer.parallel.parameters]
    )


def assert_close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def shards_train_as_copies_do(world, parallel, local_size):
    world.nodes = torch.arange(world.size).view(local_size, -1).T.tolist()  # as by srun -m cyclic
    for name, accumulate, clip in (
        ("sgd", 1, 0.0),
        ("sgd", 3, 0.1),
        ("adamw", 2, 0.1),
        ("ngd", 2, 0),
    ):
        options = {"accumulation_steps": accumulate, "max_grad_norm": clip}
        copies, shards = (trained(world, kind, name, **options) for kind in ("ddp", parallel))
        if name != "ngd":  # whose directions depend on rounding where gradients have a low rank
            assert_close(whole_parameters(shards), whole_parameters(copies))
        assert_close(shards.sums.values, copies.sums.values)
        held = sum(parameter.to_local().numel() for parameter in shards.parallel.parameters)
        assert (
            held
            <= sum(parameter.numel() for parameter in shards.parallel.parameters) / local_size * 1.1
        )
        assert [fsdp.is_sharded(each.model) for each in (copies, shards)] == [False, True]
    owners_step_as_one_process_does(world, parallel)


def owners_step_as_one_process_does(world, parallel):
    """Parameters and state, also where a rank has no row, and a step is skipped."""
    mesh = fsdp.device_mesh(world, parallel)
    shapes = [(40, 30), (40, 30), (20, 50), (20, 10, 3, 3), (3, 70), (90, 80), (7,), (1,)]
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(tensor, mesh, [Replicate(), Shard(0)][-mesh.ndim :])

    alone = [nn.Parameter(draw(shape)) for shape in shapes]
    shards = [nn.Parameter(cut(p.detach())) for p in alone]
    optimizers = [NGD(parameters, lr=0.1) for parameters in (alone, shards)]
    for step in range(6):
        for p, shard in zip(alone, shards):
            p.grad = draw(p.shape)
            shard.grad = cut(p.grad)
        for optimizer in optimizers:
            optimizer.found_inf = torch.tensor(float(step == 3))
            optimizer.step()
    one, several = (each.state_dict()["state"] for each in optimizers)
    for p, shard in zip(alone, shards):
        assert_close(whole(shard.detach()), p.detach())
    torch.testing.assert_close(fsdp.gather(several, keep=True), one, rtol=1e-9, atol=1e-11)
    owned = sum(p.numel() for batch in optimizers[1].sharded[0].owned for p in batch.parameters)
    mean = sum(p.numel() for p in alone[:6]) // optimizers[1].sharded[0].ranks.size()
    assert max(world.all_gather(owned)) == max(90 * 80, mean), "the largest has an owner for itself"


@pytest.mark.parametrize(("parallel", "size", "local_size"), [("hsdp", 2, 1), ("hsdp", 4, 2)])
def test_shards_train_as_copies_do(parallel, size, local_size):
    ranks.run_ranks(shards_train_as_copies_do, size, parallel, local_size)


def shares_of_unequal_size_have_as_many_micro_batches(world):
    """Rank 0 has four rows and rank 1 has three, of which micro-batches hold three at most."""
    share, results = (4, 3)[world.rank], []
    for parallel in ("ddp", "fsdp"):
        trainer = trainer_of(world, parallel, micro_batch_size=3)
        trainer.wrap_model()
        inputs, labels = text_batch(6, seed=world.rank)
        planned = RankBatch(torch.arange(share), share * 2 / 7, 7)
        trainer.train_step(inputs[:share], labels[:share], planned)
        results.append(whole_parameters(trainer))
    assert_close(*results)


def gradients_travel_in_the_precision_of_the_wire(world):
    exact = whole_parameters(trained(world, "fsdp", accumulation_steps=2))
    rounded = whole_parameters(trained(world, "fsdp", accumulation_steps=2, wire="bf16"))
    assert 1e-7 < (rounded - exact).norm() / exact.norm() < 1e-2


def two_ranks(world, folder):
    shards_train_as_copies_do(world, "fsdp", 2)
    shares_of_unequal_size_have_as_many_micro_batches(world)
    gradients_travel_in_the_precision_of_the_wire(world)
    trainer = trained(world, "fsdp", "adamw")
    state, parameters = trainer.parts.state_dict(), whole_parameters(trainer)
    if world.is_main:
        torch.save((state, parameters), folder / "state.pt")


def a_checkpoint_fits_any_ranks(world, folder, parallel):
    """Weights and moments, bit for bit; they are of two ranks with shards."""
    trainer = trainer_of(world, parallel, "adamw")
    expected, parameters = torch.load(folder / "state.pt")
    trainer.parts.load_state_dict(copy.deepcopy(expected))
    assert torch.equal(whole_parameters(trainer), parameters)
    found = trainer.parts.state_dict()
    if world.is_main:
        torch.testing.assert_close(found["model"], expected["model"], rtol=0, atol=0)
        moments, before = (each["optimizer"]["state"] for each in (found, expected))
        torch.testing.assert_close(moments, before, rtol=0, atol=0)


def test_two_ranks_train_with_shards_and_their_checkpoint_fits_any_number(tmp_path):
    ranks.run_ranks(two_ranks, 2, tmp_path)
    a_checkpoint_fits_any_ranks(World(), tmp_path, "ddp")
    for size, parallel in ((3, "fsdp"), (2, "ddp")):
        ranks.run_ranks(a_checkpoint_fits_any_ranks, size, tmp_path, parallel)


def test_images_have_the_losses_of_data_parallelism(tmp_path):
    flags = "--dataset digits --arch resnet8 --bs 64 --epochs 1 --precision fp32 --threads 1"

    def losses(parallel: str, optimizer: str) -> list[float]:
        folder = tmp_path / f"{parallel} {optimizer}"
        words = f"resnet50_test.py {flags} --accumulate 2 --fuse --optimizer {optimizer}"
        ranks.run(f"{words} --parallel {parallel} --out run", folder, 2)
        ranks.run("resnet50_test.py --resume run --parallel ddp --epochs 2", folder, 2)
        return [row["train_loss"] for row in ranks.metrics(folder / "run")]

    for optimizer in ("ngd", "sgd --lr 0.01 --dynamic_batch increase --epochs 3"):
        assert losses("fsdp", optimizer) == pytest.approx(losses("ddp", optimizer), rel=1e-4)


def test_ranks_of_one_node_or_of_one_gpu_have_no_mesh():
    pair, more = [0, 1], [2]
    for nodes, shares_gpu, reason in (
        ([pair], 0, "several nodes"),
        ([pair, more], 0, "several"),
        ([pair, pair], 1, "a GPU"),
    ):
        with pytest.raises(InputError, match=reason):
            fsdp.device_mesh(World(size=9, nodes=nodes, shares_gpu=bool(shares_gpu)), "hsdp")


def test_inference_reads_shards_and_another_optimizer_is_refused(tmp_path, refused):
    words = """transformer_test.py --dataset headlines --subset 0.3 --bs 16 --epochs 1 --depth 1
        --width 32 --vocab_size 800 --threads 1 --parallel fsdp --precision fp32 --out run"""
    ranks.run(words, tmp_path, 2)
    accuracy = ranks.metrics(tmp_path / "run")[-1]["test_accuracy"]
    assert f"{100 * accuracy:.2f} %" in run("texts", "--resume run --evaluate")
    run("texts", "--resume run/best.pt --export model.safetensors")
    refused("texts", "--resume run --epochs 3 --optimizer sgd", "not SGD", "")
