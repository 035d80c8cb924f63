"""The number of CPU threads, in processes of their own, as OpenMP reads its settings once; MPS."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch

import ranks
from backends import device
from backends.precision import choose_precision
from cli.compatibility import first_conflict
from conftest import parsed
from errors import InputError

CPU = torch.device("cpu")

CODE = """import torch; from backends import device
device.set_num_threads(0, sharers=1)
print(torch.get_num_threads())"""


@pytest.fixture(autouse=True)
def one_thread():
    """These tests count all cores."""


def test_all_cores_are_used_unless_openmp_is_told_otherwise():
    bare = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    command, cores = [sys.executable, "-c", CODE], len(os.sched_getaffinity(0))
    torchrun, three = {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "3", "OMP_PROC_BIND": "false"}
    for settings, threads in (({"OMP_PROC_BIND": "close"}, cores), (torchrun, cores), (three, 3)):
        printed = subprocess.check_output(command, env=bare | settings, cwd=ranks.ROOT, text=True)
        assert int(printed) == threads, settings


def test_the_gpu_of_apple_computes_in_fp32_alone(monkeypatch):
    """There is none here: nothing but the choice is tested."""
    mps = torch.device("mps")
    for is_there in (False, True):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda is_there=is_there: is_there)
        assert device.is_here("mps") is is_there
        with contextlib.nullcontext() if is_there else pytest.raises(InputError, match="no GPU of"):
            assert device.choose_device("mps", 0) == mps
    assert choose_precision("auto", mps).name == "fp32"
    assert (device.widest_float(mps), device.widest_float(CPU)) == (torch.float32, torch.float64)
    with pytest.raises(InputError, match="use fp32"):
        choose_precision("bf16", mps)
    flags = vars(parsed("images", "--device mps --optimizer sgd"))
    for more in ({"optimizer": "ngd"}, {"mixup": "cutmix"}, {"arch": "vgg8"}):
        assert "no float64" in first_conflict(flags | more)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "one process" in first_conflict(flags)
