"""What a GPU does in a step of ResNet-50 on random pixels.

python -m benchmarks.gpu_probe step --json step.json --more --bs 256 --backend compile
python -m benchmarks.gpu_probe plain --more --bs 128

gpu_evidence.sh calls it. `step` takes the flags of resnet50_test.py and needs no data set. `plain`
is the same model and batch in fp32 and NCHW, with torch's own defaults and SGD, and without an
input pipeline of its own. With --quick all sizes are tiny, to try it on a CPU.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import bench, plain_training, trainers
from errors import exit_code
from input_pipeline import image_datasets
from input_pipeline.image_datasets import ImageSplit

CIFAR_ROWS = 50_000  # of an epoch
# Steps before the clock starts: in the first ten KaldiNGD updates all estimates, and a CUDA graph
# is recorded in the fourth.
WARM_UP = 12
STEPS = 20  # of a block: whole periods of KaldiNGD's updates
BLOCKS = 5


def random_pixels(name: str, data_dir: str) -> tuple[dict[str, ImageSplit], list[str]]:
    """Take the place of `image_datasets.read_torchvision`: CIFAR-10's shapes, random contents."""
    splits = {}
    for part, rows in (("train", CIFAR_ROWS), ("test", CIFAR_ROWS // 5)):
        pixels = torch.randint(256, (rows, 32, 32, 3), dtype=torch.uint8)
        splits[part] = ImageSplit(torch.randint(10, (rows,)), pixels)
    return splits, [str(label) for label in range(10)]


def measure_steps(what: str, flags: list[str], quick: bool) -> dict[str, Any]:
    """Measure steps with these flags of resnet50_test.py, or those of the plain recipe."""
    image_datasets.read_torchvision = random_pixels
    with trainers.ready("resnet50", flags) as opened:
        steps = plain_steps(opened) if what == "plain" else trainers.steps_of(opened.trainer)
        return time_steps(steps, *((2, 4, 2) if quick else (WARM_UP, STEPS, BLOCKS)))


def plain_steps(opened: trainers.Opened) -> Iterator[int]:
    """Take steps in fp32 and NCHW with torch's defaults; yield the number of samples of each."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = False
    every = trainers.all_batches(opened.trainer)
    batches = ((inputs.contiguous(), labels) for _, inputs, labels in every)
    return plain_training.train(plain_training.Recipe.of(opened), batches)


def time_steps(steps: Iterator[int], warm_up: int, block: int, blocks: int) -> dict[str, Any]:
    """Time blocks of steps, after a warm-up in which kernels are chosen and compiled.

    Returns:
        Milliseconds of a step on the device and of its launch by the host (medians of the blocks),
        samples/s, seconds of 50,000 samples, peak memory, and the seconds of the warm-up.
    """

    def take(count: int) -> tuple[float, float]:
        """Seconds until steps are launched, and until they are done."""
        start = time.perf_counter()
        for _ in range(count):
            next(steps)
        launched = time.perf_counter()
        bench.wait_for_device()
        return launched - start, time.perf_counter() - start

    _, warm_up_seconds = take(warm_up)
    host, device = zip(*(take(block) for _ in range(blocks)))
    step_seconds, samples = statistics.median(device) / block, next(steps)
    return {
        "step_ms": step_seconds * 1e3,
        "host_ms": statistics.median(host) / block * 1e3,
        "samples_per_s": samples / step_seconds,
        "s_per_epoch": CIFAR_ROWS / samples * step_seconds,
        "peak_gib": bench.peak_memory(bench.DEVICE) / 2**30,
        "warm_up_s": warm_up_seconds,
        "batch": samples,
    }


def show(result: dict[str, Any]) -> str:
    """Write a result on one line, numbers with three digits."""
    words = []
    for name, value in result.items():
        if isinstance(value, float):
            value = f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
        words.append(f"{name} {value}")
    return ", ".join(words)


def main() -> int:
    parser = bench.parser(__doc__)
    parser.add_argument("what", choices=["step", "plain"])
    parser.add_argument(
        "--more",
        nargs="...",
        default=[],
        metavar="FLAG",
        help="flags of resnet50_test.py for step and plain; must come last",
    )
    args = parser.parse_args()
    machine = bench.machine(bench.DEVICE, ("torch", "torchvision"))
    print(machine, flush=True)
    result = measure_steps(args.what, args.more, args.quick)
    code = bench.finish(args, [], machine=machine, flags=args.more, results=[result])
    print(show(result), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(exit_code(main))
