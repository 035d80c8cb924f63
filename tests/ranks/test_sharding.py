"""Sharded weights: equal to data parallelism; checkpoints for any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

import conftest
import ranks
import transformer_test
from backends.precision import Precision
from distributed import comm_hooks, fsdp, sharded_checkpoint
from distributed.world import World
from errors import InputError
from models.residual import residual_blocks
from models.transformer import Transformer
from trainers import build_optimizer, make_trainer
from training.losses import BatchLoss, CrossEntropy
from training.trainer import Trainer

FP32 = Precision("fp32", "cpu")


def model() -> Transformer:
    torch.manual_seed(1)
    return Transformer(
        50, 4, width=16, depth=2, heads=2, mlp_width=32, max_len=16, dropout=0.0
    ).double()


def batch(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + number)
    return torch.randint(3, 50, (6, 12), generator=generator), torch.randint(
        4, (6,), generator=generator
    )


def cut(net: torch.nn.Module, world: World, parallel: str, wire: str = "none") -> None:
    wire_dtype = comm_hooks.WIRE_DTYPES.get(wire)
    blocks = residual_blocks(net)
    fsdp.shard(net, world, kind=parallel, blocks=blocks, wire_dtype=wire_dtype)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return fsdp.unshard(tensor) if isinstance(tensor, DTensor) else tensor


def trained(
    world: World, parallel: str, name: str, accumulate: int, clip: float, wire: str = "none"
) -> Trainer:
    """Five steps; the third of them has a gradient that is not finite on one rank."""
    net = model()
    if parallel != "ddp":
        cut(net, world, parallel, wire)
    optimizer = build_optimizer(net, name, 0.05 if name == "sgd" else 1e-2, weight_decay=0.01)
    trainer = make_trainer(
        net,
        optimizer,
        world,
        comm_hook=comm_hooks.AllReduceHook(world, wire),
        accumulation_steps=accumulate,
        max_grad_norm=clip,
    )
    trainer.wrap_model()
    net.train()
    for number in range(5):
        inputs, labels = batch(world.rank, number)
        trainer.loss_fn = not_a_number if number == 2 and world.rank == 1 else CrossEntropy()
        trainer.train_step(inputs, labels)
    return trainer


def not_a_number(net, inputs, labels):
    return BatchLoss(CrossEntropy()(net, inputs, labels).loss * float("nan"), torch.zeros(()))


def whole_parameters(trainer: Trainer) -> torch.Tensor:
    return torch.cat([whole(parameter.detach()).flatten() for parameter in trainer.parameters])


def shards_train_as_copies_do(world, parallel, local_size):
    world.local_size = local_size
    for name, accumulate, clip in (
        ("sgd", 1, 0.0),
        ("sgd", 3, 0.1),
        ("adamw", 1, 0.1),
        ("adamw", 2, 0.0),
    ):
        whole, cut = (trained(world, kind, name, accumulate, clip) for kind in ("ddp", parallel))
        torch.testing.assert_close(
            whole_parameters(cut), whole_parameters(whole), rtol=1e-9, atol=1e-12
        )
        torch.testing.assert_close(cut.sums.values, whole.sums.values, rtol=1e-9, atol=1e-12)
        held = sum(parameter.to_local().numel() for parameter in cut.parameters)
        assert held <= sum(parameter.numel() for parameter in cut.parameters) / local_size * 1.1
        assert fsdp.is_sharded(cut.model)
        assert not fsdp.is_sharded(whole.model)


@pytest.mark.parametrize(
    ("parallel", "size", "local_size"), [("fsdp", 2, 2), ("hsdp", 2, 1), ("hsdp", 4, 2)]
)
def test_shards_train_as_copies_do(parallel, size, local_size):
    ranks.run_ranks(shards_train_as_copies_do, size, parallel, local_size)


def shares_of_unequal_size_have_as_many_micro_batches(world):
    """Rank 0 has four rows and rank 1 has three, of which micro-batches hold three at most."""
    share = (4, 3)[world.rank]
    results = []
    for parallel in ("ddp", "fsdp"):
        net = model()
        if parallel != "ddp":
            cut(net, world, parallel)
        optimizer = build_optimizer(net, "sgd", 0.05)
        trainer = make_trainer(net, optimizer, world, micro_batch_size=3)
        trainer.wrap_model()
        inputs, labels = batch(world.rank, 0)
        trainer.train_step(inputs[:share], labels[:share], share * 2 / 7, samples=7)
        results.append(whole_parameters(trainer))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-12)


def test_shares_of_unequal_size_have_as_many_micro_batches():
    ranks.run_ranks(shares_of_unequal_size_have_as_many_micro_batches, 2)


def bytes_and_precision_of_the_wire(world):
    every = sum(parameter.numel() for parameter in model().parameters())
    blocks = sum(parameter.numel() for parameter in model().blocks.parameters())
    exact, rounded = (
        trained(world, "fsdp", "sgd", 2, 0.0),
        trained(world, "fsdp", "sgd", 2, 0.0, "bf16"),
    )
    assert exact.world.bytes_sent == 2 * 5 * 8 * (2 * (every + blocks) + every)
    replicas_diverge = (
        whole_parameters(rounded) - whole_parameters(exact)
    ).norm() / whole_parameters(exact).norm()
    assert 1e-7 < replicas_diverge < 1e-2


def test_bytes_and_precision_of_the_wire():
    ranks.run_ranks(bytes_and_precision_of_the_wire, 2)


def test_images_have_the_losses_of_data_parallelism(tmp_path):
    flags = "--dataset digits --arch resnet8 --bs 64 --lr 0.01 --epochs 1 --precision fp32"
    flags = f"{flags} --threads 1 --accumulate 2 --fuse".split()
    found = []
    for parallel in ("ddp", "fsdp"):
        folder = tmp_path / parallel
        command = ranks.torchrun(
            "resnet50_test.py", *flags, "--parallel", parallel, "--out", folder / "run"
        )
        ranks.finish(ranks.start(command, folder, NGPU="2"), folder)
        found.append([row["train_loss"] for row in ranks.metrics(folder / "run")])
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_two_nodes_share_out_what_one_node_holds(tmp_path):
    with pytest.raises(InputError, match="several nodes"):
        fsdp.device_mesh(World(size=2, local_size=2), "hsdp")
    with pytest.raises(InputError, match="several nodes"):
        fsdp.device_mesh(World(size=5, local_size=2), "hsdp")


def a_checkpoint_fits_any_ranks(world, folder, parallel):
    """Weights and moments, bit for bit; `folder` holds shards and the whole tensors."""
    net = model()
    if parallel != "ddp":
        cut(net, world, parallel)
    trainer = make_trainer(net, build_optimizer(net, "adamw", 1e-2, 0.01), world)
    sharded_checkpoint.load(Path(folder) / "shards-1", net, trainer.optimizer, world)
    assert same_tensors(trainer, torch.load(Path(folder) / "whole.pt"))


def same_tensors(trainer: Trainer, expected: dict[str, torch.Tensor]) -> bool:
    found = {
        name: whole(value)
        for name, value in sharded_checkpoint.named_tensors(
            trainer.model, trainer.optimizer
        ).items()
    }
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def write_both_kinds(world, folder):
    trainer = trained(world, "fsdp", "adamw", 1, 0.0)
    sharded_checkpoint.save(Path(folder) / "shards-1", trainer.model, trainer.optimizer, world)
    found = {
        name: whole(value)
        for name, value in sharded_checkpoint.named_tensors(
            trainer.model, trainer.optimizer
        ).items()
    }
    if world.is_main:
        torch.save(found, Path(folder) / "whole.pt")


def test_a_checkpoint_fits_any_ranks(tmp_path):
    ranks.run_ranks(write_both_kinds, 2, str(tmp_path))
    a_checkpoint_fits_any_ranks(World(), str(tmp_path), "ddp")
    for size, parallel in ((3, "fsdp"), (2, "ddp")):
        ranks.run_ranks(a_checkpoint_fits_any_ranks, size, str(tmp_path), parallel)


def test_inference_reads_shards_and_another_optimizer_is_refused(tmp_path, refused, capsys):
    flags = """--dataset headlines --subset 0.3 --bs 16 --epochs 1 --depth 1 --width 32
        --vocab_size 800 --threads 1 --parallel fsdp --precision fp32 --out run""".split()
    command = ranks.torchrun("transformer_test.py", *flags)
    ranks.finish(ranks.start(command, tmp_path, NGPU="2"), tmp_path)
    run = tmp_path / "run"
    assert conftest.call(transformer_test, ["--resume", str(run), "--evaluate"]) == 0
    accuracy = ranks.metrics(run)[-1]["test_accuracy"]
    assert f"{100 * accuracy:.2f} %" in capsys.readouterr().out
    export = ["--resume", f"{run}/best.pt", "--export", str(tmp_path / "model.safetensors")]
    assert conftest.call(transformer_test, export) == 0
    refused("texts", f"--resume {run} --epochs 3 --optimizer sgd", "not SGD", "")


def test_a_full_disk_keeps_the_previous_shards(tmp_path):
    ranks.run_ranks(a_full_disk_keeps_the_previous_shards, 2, str(tmp_path))


def a_full_disk_keeps_the_previous_shards(world, folder):
    trainer = trained(world, "fsdp", "adamw", 1, 0.0)
    sharded_checkpoint.save(Path(folder) / "shards-1", trainer.model, trainer.optimizer, world)
    before = whole_parameters(trainer)
    trainer.train_step(*batch(world.rank, 9))
    (Path(folder) / "shards-2").mkdir(exist_ok=True)
    if world.is_main:
        (Path(folder) / "shards-2" / "__1_0.distcp").mkdir()  # rank 1 cannot write there
    world.max_over_ranks(0)
    with pytest.raises(OSError, match="could not be written"):
        sharded_checkpoint.save(Path(folder) / "shards-2", trainer.model, trainer.optimizer, world)
    assert not torch.equal(whole_parameters(trainer), before)
    sharded_checkpoint.load(Path(folder) / "shards-1", trainer.model, trainer.optimizer, world)
    assert torch.equal(whole_parameters(trainer), before)
    assert {float(state["step"]) for state in trainer.optimizer.state.values()} == {4.0}
