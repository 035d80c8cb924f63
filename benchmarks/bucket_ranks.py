"""One rank of `accelerators --buckets`: steps of ResNet-50 with several sizes of DDP's buckets.

`slow_network.run` starts `python -m benchmarks.bucket_ranks DATA_DIR TURNS STEPS MIB... DEVICE`
with torchrun's environment; rank 0 prints the samples per second of each turn by size, as JSON. The
images have 16 pixels, so that forward and backward take about as long as sending the gradients.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import resnet50_test
from backends.device import keep_freed_memory
from benchmarks import bench, throughput
from benchmarks.training_rates import samples_per_second
from distributed import ddp
from distributed.world import init_world
from errors import exit_code

FLAGS = "--device cpu --image_size 16 --bs 32 --optimizer sgd --threads 1 --workers 0"
WARM_UP = 2  # steps: DDP lays its buckets out anew after the first


def main() -> None:
    """Measure as one of the ranks."""
    data_dir, turns, steps, *sizes = sys.argv[1:-1]  # the last one is the network device
    keep_freed_memory()
    with init_world("cpu") as world, tempfile.TemporaryDirectory() as folder:
        sides = {}
        for size in sizes:
            out = str(Path(folder) / size)
            arguments = ["--data_dir", data_dir, "--out", out, *FLAGS.split()]
            with mock.patch.object(ddp, "BUCKET_MIB", int(size)):
                trainer = throughput.open_script(resnet50_test, arguments, world).trainer
            samples_per_second(trainer, WARM_UP)
            sides[size] = partial(samples_per_second, trainer, int(steps))
        rates = bench.take_turns(sides, int(turns))
        if world.is_main:
            print(json.dumps(rates), flush=True)


if __name__ == "__main__":
    sys.exit(exit_code(main))
