"""What only a GPU can show.

Beside these, test_graphs.py records CUDA graphs, and test_fake_cuda.py checks devices and waiting
on a GPU that is not there.
"""

import torch
from torch import Tensor, nn

import conftest
import ranks
import resnet50_test
from backends.precision import Precision
from conftest import each_of, needs_gpu
from optimizer_cases import set_gradients
from trainers import build_optimizer, flat, image_network

GPU = torch.device("cuda", 0)
FP32 = Precision("fp32", "cuda")
OPTIMIZERS = ["sgd", "adamw", "ngd", "kaldi_ngd", "lamb", "lars", "slamb"]


def weights(model: nn.Module) -> Tensor:
    return flat(model.parameters()).cpu()


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
    torch.testing.assert_close(
        weights(models["cuda"]), weights(models["cpu"]), rtol=tolerance, atol=tolerance / 10
    )


@needs_gpu
def test_a_deterministic_run_gives_the_same_bits_when_resumed(tmp_path):
    words = "--dataset digits --arch resnet8 --subset 0.3 --bs 64 --precision fp32 --threads 1 "
    words += "--deterministic --lr 0.05 --lr_schedule constant --warmup 0"
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    starts = ((2, "--out", whole), (1, "--out", resumed), (2, "--resume", resumed))
    try:
        for epochs, where, folder in starts:
            flags = [*words.split(), "--epochs", str(epochs), where, str(folder)]
            assert conftest.call(resnet50_test, flags) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    ranks.same_run(whole, resumed)
