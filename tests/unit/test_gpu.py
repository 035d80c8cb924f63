"""What only a GPU can show.

Beside these, test_graphs.py records CUDA graphs, and test_fake_cuda.py checks devices and waiting
on a GPU that is not there.
"""

import torch

import conftest
import mixup
import ranks
from backends.precision import Precision
from conftest import each_of, needs_gpu
from distributed.world import World
from input_pipeline.augmentation import Augmentation
from optimizer_cases import set_gradients
from trainers import build_optimizer, flat, image_network, make_trainer

GPU = torch.device("cuda", 0)
FP32 = Precision("fp32", "cuda")
OPTIMIZERS = ["sgd", "adamw", "ngd", "kaldi_ngd", "lamb", "lars", "slamb"]


@needs_gpu
@each_of("name", OPTIMIZERS)
def test_steps_do_not_wait_for_the_gpu(name):
    model = image_network().to(GPU)
    settings = {"precision": FP32, "max_grad_norm": 1.0, "accumulation_steps": 2}
    optimizer = build_optimizer(model, name, 0.01, 1e-3)
    trainer = make_trainer(model, optimizer, World(device=GPU), **settings)
    inputs = torch.randn(8, 3, 8, 8, device=GPU)
    labels = torch.randint(10, (8,), device=GPU)
    for _ in range(3):
        trainer.train_step(inputs, labels)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # torch raises where the host waits for the GPU
    try:
        for number in range(10):
            trainer.set_lr(0.01 / (1 + number))
            trainer.train_step(inputs, labels)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.sums.totals(World()).samples == 13 * 8


@needs_gpu
@each_of("name", OPTIMIZERS)
def test_an_optimizer_does_what_it_does_on_the_cpu(name):
    models = {"cpu": image_network(), "cuda": image_network().to(GPU)}
    for place, model in models.items():
        optimizer = build_optimizer(model, name, 0.01, 1e-3)
        for step in range(14):
            set_gradients(list(model.parameters()), step)
            optimizer.found_inf = torch.tensor(float(step == 5), device=place)
            optimizer.step()
    tolerance = 1e-2 if "ngd" in name else 1e-4
    found, expected = (flat(models[place].parameters()).cpu() for place in ("cuda", "cpu"))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance / 10)


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
        crops = Augmentation(2, True, fill="reflect" if reflect else "black")
        cropped = crops.crop(pixels.to(place), offsets.to(place), flips.to(place))
        mix = mixup.Mix(partner.to(place), torch.ones(16, device=place), box=(1, 5, 2, 7))
        images = cropped.permute(0, 3, 1, 2).float()
        results.append((cropped.cpu(), mixup.blend(images, mix).cpu()))
    for ours, theirs in zip(*results):
        assert torch.equal(ours, theirs)


@needs_gpu
def test_a_deterministic_run_gives_the_same_bits_when_resumed(tmp_path):
    words = "--dataset digits --arch resnet8 --subset 0.3 --bs 64 --precision fp32 --threads 1 "
    words += "--deterministic --lr 0.05 --lr_schedule constant --warmup 0"
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    starts = ((2, "--out", whole), (1, "--out", resumed), (2, "--resume", resumed))
    try:
        for epochs, where, folder in starts:
            flags = [*words.split(), "--epochs", str(epochs), where, str(folder)]
            assert conftest.call("images", flags) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    ranks.same_run(whole, resumed)
