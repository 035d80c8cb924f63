"""The number of CPU threads, in processes of their own, as OpenMP reads its settings once."""

import os
import subprocess
import sys

import pytest

import ranks

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
