"""Every wrong flag ends with exit code 2 and one line that names it; both scripts, in-process."""

import os
import subprocess

import pytest
import torch

import ranks
from conftest import SCRIPTS, for_each

BOTH = [
    ("--leraning_rate 1", "--leraning_rate: there is no such flag; did you mean --learning_rate?"),
    ("--epo 3", "did you mean --epoch or --epochs?"),
    ("--data_dir=", "--data_dir: the value is empty"),
    ("stray", "stray: this is neither a flag nor the value of one"),
    ("--optimizer sdg", "did you mean sgd?"),
    (f"--out {'x' * 300}", "File name too long"),
    ("--accumulate 99", "global batch"),
    ("--optimizer kaldi_ngd --opt_args eta=1", "--opt_args: KaldiNGD: eta=1"),
    ("--ngd --opt_args rank=x", "--opt_args rank=x: must be like 32"),
    ("--dynamic_batch increase --max_bs 16", "from 32 to 16 samples"),
    ("--dynamic_batch noise --batch_args factor=1.2", "factor=1.2 must be at least 1.25"),
    ("--dynamic_batch increase --replace_decay --batch_milestones 1", "choose one"),
    ("--dynamic_batch increase --replace_decay --batch_args lr=sqrt", "lr: replace_decay"),
    ("--sync diloco --precision fp16", "each process would skip steps of its own"),
    ("--grad_compress sign --precision fp16", "a loss scale that changes"),
    ("--noise_scale --grad_compress sign", "each step's own gradients"),
    ("--noise_scale --bs 3", "--bs 3: the noise scale needs 4 samples"),
    ("--mixup_args weight=0.8 --mixup meta", "it has held_out, end"),
    ("--no-test", "--val_fraction"),
    ("--checkpoint none/mine.pt --evaluate", "--checkpoint none/mine.pt: no such checkpoint"),
    ("--distributed", "torchrun"),
    ("--recipe fats94", "did you mean fast94?"),
    ("--predict a.png --evaluate", "--evaluate and --predict: one run of the script does one"),
    ("--out /dev/null/run", "/dev/null/run"),
    ("--timeout 1e10 1", "--timeout"),
    ("--bs 2000 --out made", "--bs 2000"),
]
IMAGES_ONLY = [
    ("--arch squeezenet1_1 --image_size 32 --fuse", "--fuse"),
    ("--precision apex_O1 --noise_scale", "loss scale"),
    ("--precision apex_O1 --dynamic_batch noise", "loss scale"),
    ("--backend ort --precision bf16", "fp32"),
    ("--backend ort --fuse", "--fuse"),
    ("--backend cudagraph --precision fp16", "--precision fp16"),
    ("--arch alexnet --image_size 32", "--arch alexnet cannot take 32x32"),
    ("--arch vit_b_16 --image_size 40", "--arch vit_b_16: Input shape indivisible by patch size"),
    ("--arch hf:any/model", "--arch hf:any/model: unknown model"),
    ("--arch resnet18 --bs 1", "a batch of 1"),  # BatchNorm has one value a channel to train on
    ("--test_views mirror", "mirror images"),
    ("--small_epochs 1 --small_size 9", "small_size=9 must be at most 8"),
    ("--crop_pad 8 --crop_fill reflect", "pad=8 must be from 1 to 7"),
    ("--arch vgg8 --image_size 12 --small_epochs 1 --small_size 4", "cannot take 4x4 images"),
    ("--dataset cifar10 --data_dir none", "none/cifar-10-batches-py is missing"),
    *[("--dataset mnist --data_dir none", "could not be downloaded")] * 2,  # nothing half is left
]
TEXTS_ONLY = [
    ("--mixup attention", "'attention' is not one of none, mixup"),  # which was one of images
    ("--dataset agnews --data_dir none", "none/ag_news_csv/train.csv is missing"),
    ("--heads 3 --out made", "width=8 must be divisible by heads=3"),
]
CASES = [(name, *case) for name in SCRIPTS for case in BOTH]
CASES += [("images", *case) for case in IMAGES_ONLY] + [("texts", *case) for case in TEXTS_ONLY]


def test_a_wrong_flag_is_named_in_one_line_and_nothing_is_written(refused, tmp_path):
    for_each(CASES, refused)
    assert not (tmp_path / "made").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gpu_that_is_not_there_is_named(refused):
    assert "use cpu" in refused("images", "--device cuda", "device cuda: torch")
    refused("images", "--backend cudagraph", "needs a GPU")


def test_a_data_set_is_not_downloaded_into_own_data(refused, tmp_path):
    (tmp_path / "mine" / "train").mkdir(parents=True)
    refused("images", "--dataset cifar10 --data_dir mine", "add --dataset folder")
    (tmp_path / "mine" / "train.jsonl").touch()
    refused("texts", "--dataset agnews --data_dir mine", "add --dataset csv")


def test_real_process_ends_with_two_and_one_line(tmp_path):
    for script, _ in SCRIPTS.values():
        command = ranks.script(f"{script.SCRIPT}.py", "--bs", "0")
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        message = "error: --bs/--batch_size/-b: must be at least 1, got 0 (see --help)\n"
        assert (run.returncode, run.stderr, run.stdout) == (2, message, "")
        assert os.listdir(tmp_path) == []
