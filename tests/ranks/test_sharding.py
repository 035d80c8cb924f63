"""Sharded weights: equal to data parallelism; checkpoints for any number of ranks."""

from __future__ import annotations

import shutil
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

TEXTS = "--dataset headlines --bs 16 --lr 4e-4 --epochs 2 --depth 2 --width 32 --vocab_size 800"
TEXTS = f"{TEXTS} --precision fp32 --threads 1".split()
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
    ("parallel", "size", "local_size"),
    [
        ("fsdp", 2, 2),
        pytest.param("fsdp", 3, 3, marks=pytest.mark.process),
        pytest.param("hsdp", 2, 1, marks=pytest.mark.process),
        pytest.param("hsdp", 4, 2, marks=pytest.mark.process),
    ],
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


@pytest.mark.process
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


@pytest.mark.process
def test_texts_have_the_losses_of_data_parallelism(runs):
    cut, copied = (ranks.metrics(runs / name) for name in ("cut", "copied"))
    for name in ("train_loss", "test_loss"):
        assert [row[name] for row in cut] == pytest.approx([row[name] for row in copied], rel=1e-4)


def test_two_nodes_share_out_what_one_node_holds(tmp_path):
    with pytest.raises(InputError, match="several nodes"):
        fsdp.device_mesh(World(size=2, local_size=2), "hsdp")
    with pytest.raises(InputError, match="several nodes"):
        fsdp.device_mesh(World(size=5, local_size=2), "hsdp")


def whole_weights(run: Path, name: str = "last") -> dict[str, torch.Tensor]:
    state = torch.load(run / f"{name}.pt", weights_only=True)
    assert not state["model"]
    return sharded_checkpoint.load_whole_model(run / state["shards"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs on two ranks: 'cut', in shards, and 'copied', data-parallel."""
    folder = tmp_path_factory.mktemp("shards")
    for name, parallel in (("cut", "fsdp"), ("copied", "ddp")):
        command = ranks.torchrun(
            "transformer_test.py",
            *TEXTS,
            "--save_every",
            5,
            "--parallel",
            parallel,
            "--out",
            folder / name,
        )
        ranks.finish(ranks.start(command, folder, NGPU="2"), folder)
    return folder


@pytest.mark.process
def test_only_the_shards_of_checkpoints_stay(runs):
    kept = {
        torch.load(runs / "cut" / f"{name}.pt", weights_only=True)["shards"]
        for name in ("last", "last-1", "best")
    }
    assert {path.name for path in (runs / "cut").glob("shards-*")} == kept


@pytest.mark.process
def test_sigkill_then_resume_in_shards(runs, tmp_path):
    run, flags = tmp_path / "run", [*TEXTS, "--save_every", "5", "--parallel", "fsdp"]
    process = ranks.start(
        ranks.torchrun("transformer_test.py", *flags, "--out", run), tmp_path, NGPU="2"
    )
    ranks.wait_for(
        lambda: len(ranks.metrics(run)) == 1 if (run / "metrics.jsonl").exists() else False, process
    )
    ranks.kill(process)
    ranks.finish(
        ranks.start(
            ranks.torchrun("transformer_test.py", *flags, "--out", run, "--resume"),
            tmp_path,
            NGPU="2",
        ),
        tmp_path,
    )
    assert ranks.metrics(run) == ranks.metrics(runs / "cut")
    whole, resumed = whole_weights(runs / "cut"), whole_weights(run)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.process
@pytest.mark.parametrize(
    ("run", "size", "parallel"), [("cut", 1, "fsdp"), ("cut", 3, "fsdp"), ("copied", 2, "fsdp")]
)
def test_a_run_goes_on_with_other_ranks_and_other_ways(runs, tmp_path, run, size, parallel):
    """The third epoch is as good as the second; wrong weights or moments would not be."""
    shutil.copytree(runs / run, tmp_path / "run")
    flags = [
        "--epochs",
        "3",
        "--lr_schedule",
        "constant",
        "--resume",
        tmp_path / "run",
        "--bs",
        32 // size,
        "--parallel",
        parallel,
    ]
    ranks.finish(
        ranks.start(ranks.torchrun("transformer_test.py", *flags), tmp_path, NGPU=str(size)),
        tmp_path,
    )
    rows = ranks.metrics(tmp_path / "run")
    assert rows[2]["train_loss"] < rows[1]["train_loss"] < rows[0]["train_loss"]
    assert rows[2]["world_size"] == size
    states = [
        torch.load(tmp_path / "run" / f"{name}.pt", weights_only=True)
        for name in ("last", "last-1", "best")
    ]
    assert bool(states[0]["shards"]) == (size > 1)
    assert {path.name for path in (tmp_path / "run").glob("shards-*")} == {
        state["shards"] for state in states
    } - {""}


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


@pytest.mark.process
def test_a_checkpoint_fits_any_ranks(tmp_path):
    ranks.run_ranks(write_both_kinds, 2, str(tmp_path))
    a_checkpoint_fits_any_ranks(World(), str(tmp_path), "ddp")
    for size, parallel in ((3, "fsdp"), (2, "ddp")):
        ranks.run_ranks(a_checkpoint_fits_any_ranks, size, str(tmp_path), parallel)


@pytest.mark.process
def test_evaluate_predict_and_export_read_shards(runs, tmp_path, capsys):
    run = str(runs / "cut")
    assert conftest.call(transformer_test, ["--resume", run, "--evaluate"]) == 0
    accuracy = ranks.metrics(runs / "cut")[-1]["test_accuracy"]
    assert f"{100 * accuracy:.2f} %" in capsys.readouterr().out
    assert (
        conftest.call(
            transformer_test,
            ["--resume", f"{run}/best.pt", "--export", str(tmp_path / "model.pt2")],
        )
        == 0
    )


@pytest.mark.process
def test_broken_shards_are_one_line(runs, tmp_path, refused):
    run = tmp_path / "run"
    shutil.copytree(runs / "cut", run)
    (run / "last-1.pt").unlink()
    folder = run / torch.load(run / "last.pt", weights_only=True)["shards"]
    part = next(folder.glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:100])
    refused("texts", f"--resume {run} --evaluate", "damaged", "")
    refused("texts", f"--resume {run} --epochs 3", "damaged", "")
    shutil.rmtree(folder)
    refused("texts", f"--resume {run} --evaluate", "missing", "")


@pytest.mark.process
def test_another_optimizer_is_refused(runs, tmp_path, refused):
    shutil.copytree(runs / "cut", tmp_path / "run")
    refused("texts", f"--resume {tmp_path / 'run'} --epochs 3 --optimizer sgd", "not SGD", "")


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
