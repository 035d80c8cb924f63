"""What only a GPU can show.

Beside these, test_graphs.py records CUDA graphs, and test_fake_cuda.py checks devices and waiting
on a GPU that is not there.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conftest
import mixup
import ranks
import resnet50_test
from backends.device import make_deterministic
from backends.precision import Precision
from conftest import each_of, needs_gpu
from distributed.comm_hooks import AllReduceHook
from distributed.world import World
from input_pipeline.image_batches import Augmentation, ImageDataset, crop_flip
from input_pipeline.image_datasets import ImageSplit
from models import fusion
from models.image_models import create_model
from trainers import build_optimizer, make_trainer
from training.losses import CrossEntropy

GPU = torch.device("cuda", 0)
FP32 = Precision("fp32", "cuda")
OPTIMIZERS = ["sgd", "adamw", "ngd", "kaldi_ngd", "lamb", "lars", "slamb"]


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """torch raises where the host waits for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 18, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(72, 128),
        nn.Linear(128, 10),
    )


def batch(step: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(rows, 3, 8, 8, generator=generator)
    return images, torch.randint(10, (rows,), generator=generator)


def set_gradients(model: nn.Module, generator: torch.Generator, place: Any) -> None:
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to(place)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


# -------------------------------------------------------------------- steps


@needs_gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_do_not_wait_for_the_gpu(name):
    model = network().to(GPU)
    settings = {"precision": FP32, "max_grad_norm": 1.0, "accumulation_steps": 2}
    optimizer = build_optimizer(model, name, 0.01, 1e-3)
    trainer = make_trainer(model, optimizer, World(device=GPU), **settings)
    inputs, labels = (tensor.to(GPU) for tensor in batch(0))
    for _ in range(3):
        trainer.train_step(inputs, labels)
    with no_waiting():
        for number in range(10):
            trainer.set_lr(0.01 / (1 + number))
            trainer.train_step(inputs, labels)
    assert trainer.sums.totals(World()).samples == 13 * 8


@needs_gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_does_what_it_does_on_the_cpu(name):
    models = {"cpu": network(), "cuda": network().to(GPU)}
    for place, model in models.items():
        generator = torch.Generator().manual_seed(1)
        optimizer = build_optimizer(model, name, 0.01, 1e-3)
        for step in range(14):
            set_gradients(model, generator, place)
            optimizer.found_inf = torch.tensor(float(step == 5), device=place)
            optimizer.step()
    tolerance = 1e-2 if "ngd" in name else 1e-4
    torch.testing.assert_close(
        weights(models["cuda"]), weights(models["cpu"]), rtol=tolerance, atol=tolerance / 10
    )


class Hungry(nn.Module):
    """A linear model whose forward pass needs a twelfth of the memory for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * 8 * 8, 10)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.cuda.mem_get_info(x.device)[1]
        torch.empty(len(x) * (total // 12), dtype=torch.uint8, device=x.device)
        return self.linear(x.flatten(1))


@needs_gpu
def test_a_batch_that_does_not_fit_is_halved():
    learned = []
    for steps in (1, 2):  # halved, and cut in two from the start
        torch.manual_seed(0)
        model = Hungry().to(GPU)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = make_trainer(model, sgd, World(device=GPU), accumulation_steps=steps)
        trainer.train_step(*(tensor.to(GPU) for tensor in batch(0, rows=16)))
        assert trainer.micro_batches.number(16) == 2
        learned.append(weights(model))
    torch.testing.assert_close(*learned)


@needs_gpu
def test_fused_layers_learn_under_autocast():
    gradients = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = create_model("resnet8", classes=10, channels=3, image_size=8)
        if fused:
            assert fusion.fuse(model)
        model = model.to(GPU).train()
        images, labels = (tensor.to(GPU) for tensor in batch(0, rows=32))
        with Precision("bf16", "cuda", torch.bfloat16).autocast():
            loss = CrossEntropy()(model, images, labels).loss
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten().cpu() for p in model.parameters()]))
    plain, fused = gradients
    assert torch.isfinite(fused).all()
    assert torch.cosine_similarity(plain, fused, dim=0) > 0.9


# -------------------------------------------------------------------- data


def image_data(resident: bool) -> ImageDataset:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (40, 8, 8, 3), dtype=torch.uint8, generator=generator)
    split = ImageSplit(torch.arange(40) % 10, pixels, size=8)
    settings = {"mean": [0.5] * 3, "std": [0.2] * 3, "device": GPU}
    return ImageDataset(split, Augmentation(pad=2, flip=True), resident=resident, **settings)


@needs_gpu
@each_of("reflect", [False, True])
def test_crops_and_pasted_boxes_have_the_bytes_of_the_cpu(reflect):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (16, 8, 8, 3), dtype=torch.uint8, generator=generator)
    offsets = torch.randint(5, (16, 2), dtype=torch.uint8, generator=generator)
    flips = torch.randint(2, (16,), dtype=torch.uint8, generator=generator)
    partner = torch.randperm(16, generator=generator)
    results = []
    for place in ("cpu", GPU):
        settings = {"flips": flips.to(place), "pad": 2, "reflect": reflect}
        cropped = crop_flip(pixels.to(place), offsets.to(place), **settings)
        mix = mixup.Mix(partner.to(place), torch.ones(16, device=place), box=(1, 5, 2, 7))
        images = cropped.permute(0, 3, 1, 2).float()
        results.append((cropped.cpu(), mixup.blend(images, mix).cpu()))
    for ours, theirs in zip(*results):
        assert torch.equal(ours, theirs)


@needs_gpu
def test_streamed_batches_are_the_resident_ones():
    rows = torch.arange(40).split(8)
    resident, streamed = (image_data(resident).batches(rows, 0) for resident in (1, 0))
    for (images, labels), (others, other_labels) in zip(resident, streamed, strict=True):
        assert images.device == others.device == GPU
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)


# -------------------------------------------------------------------- ranks that share a GPU


def slamb_goes_on_after_its_dense_steps(world: World) -> None:
    model = network().to(world.device)
    optimizer = build_optimizer(model, "slamb", 0.01, 1e-3, dense_steps=3, local_steps=4)
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(12):
        set_gradients(model, generator, world.device)
        optimizer.step()
    ours = weights(model).double()
    assert torch.isfinite(ours).all()
    others = torch.tensor(world.all_gather(ours.tolist()))
    assert torch.equal(others[0], others[1])


@needs_gpu
def test_slamb_goes_on_after_its_dense_steps():
    ranks.run_ranks(slamb_goes_on_after_its_dense_steps, 2, device="cuda:0")


def two_ranks_do_what_one_does(world: World) -> None:
    for compression, tolerance in (("none", 1e-5), ("bf16", 2e-2)):
        shared, alone = network().to(world.device), network().to(world.device)
        sgd, alone_sgd = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (shared, alone))
        hook = AllReduceHook(world, compression)
        two = make_trainer(shared, sgd, world, precision=FP32, comm_hook=hook)
        two.wrap_model()
        one = make_trainer(alone, alone_sgd, World(device=world.device), precision=FP32)
        for step in range(4):
            images, labels = (tensor.to(world.device) for tensor in batch(step))
            mine = slice(4 * world.rank, 4 * world.rank + 4)
            two.train_step(images[mine], labels[mine])
            one.train_step(images, labels)
        torch.testing.assert_close(weights(shared), weights(alone), rtol=tolerance, atol=tolerance)


@needs_gpu
def test_two_ranks_do_what_one_does():
    ranks.run_ranks(two_ranks_do_what_one_does, 2, device="cuda:0")


# -------------------------------------------------------------------- runs

RUN = "--dataset digits --arch resnet8 --subset 0.3 --bs 64 --precision fp32 --threads 1"


def train(folder: Path, flags: str, resume: bool = False) -> list[dict[str, Any]]:
    """The rows of a run, from its start or resumed in its folder."""
    where = ["--resume" if resume else "--out", str(folder)]
    assert conftest.call(resnet50_test, [*RUN.split(), *flags.split(), *where]) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@needs_gpu
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_resumed_run_follows_its_schedule(name, tmp_path):
    # From the second epoch on the rate is next to 0, which a recorded step must read.
    flags = f"--backend cudagraph --optimizer {name} --lr 0.01 --warmup 0"
    flags += " --lr_schedule exponential --gamma 1e-30"
    train(tmp_path, f"{flags} --epochs 1")
    before = ranks.weights(tmp_path)
    rows = train(tmp_path, f"{flags} --epochs 3", resume=True)
    assert rows[0]["lr"] == pytest.approx(0.01)
    assert all(row["lr"] < 1e-20 for row in rows[1:])
    after = ranks.weights(tmp_path)
    for name, value in before.items():
        if value.is_floating_point() and "running" not in name:
            assert torch.equal(value, after[name]), name


@needs_gpu
@pytest.mark.parametrize("name", ["sgd", "adamw", "ngd"])
def test_a_run_goes_on_with_another_device(name, tmp_path):
    for epoch, place in enumerate(("cuda", "cpu", "cuda"), 1):
        flags = f"--optimizer {name} --lr 0.01 --epochs {epoch} --device {place}"
        rows = train(tmp_path, flags, resume=epoch > 1)
        assert len(rows) == epoch


@needs_gpu
def test_a_deterministic_run_gives_the_same_bits_when_resumed(tmp_path):
    flags = "--deterministic --lr 0.05 --lr_schedule constant --warmup 0 --epochs"
    try:
        train(tmp_path / "whole", f"{flags} 2")
        train(tmp_path / "resumed", f"{flags} 1")
        train(tmp_path / "resumed", f"{flags} 2", resume=True)
    finally:
        torch.use_deterministic_algorithms(False)
    ranks.same_run(tmp_path / "whole", tmp_path / "resumed")


def test_deterministic_kernels_are_asked_for_on_gpus_alone(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    try:
        make_deterministic(torch.device("cpu"))
        assert not torch.are_deterministic_algorithms_enabled()
        make_deterministic(torch.device("cuda"))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"]
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.compile
@needs_gpu
def test_nothing_is_compiled_after_the_first_epoch(tmp_path):
    torch._dynamo.reset()
    rows = train(tmp_path, "--backend compile --epochs 3")
    compiled = [row["compile_seconds"] for row in rows]
    assert 0 < compiled[0] == compiled[1] == compiled[2]
    assert all(row["compile_seconds"] < row["seconds"] for row in rows)
