"""How fast a folder of JPEGs becomes batches: beside torchvision's ImageFolder and timm's loader.

python -m benchmarks.input_pipeline --quick                       # 2,000 files in a new folder
python -m benchmarks.input_pipeline --folder DIR --json FILE      # 20,000, kept in DIR

The files are made from a seed, 500 x 375 pixels; 224 x 224 come out: the shorter side scaled, the
centre cut out, moved by up to 4 pixels, mirrored and normalised, in batches of 128, with as many
workers as cores. timm's loader normalises whole batches of bytes, as ours does. Ours has the
allocator setting of the entry scripts. In each round each side has a fresh process, whose clock
starts when it opens the folder; ours then measures the mean and standard deviation of the channels,
which the others are given. Memory is the proportional set size of the process and its workers at
the end of its turn.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from backends.device import keep_freed_memory, num_cores
from benchmarks import bench
from cli.flag_parser import file_path
from errors import exit_code
from input_pipeline import image_batches
from input_pipeline.image_datasets import read_image_splits
from input_pipeline.sampler import Sampler, batch_sizes

FILES = {True: 2_000, False: 20_000}  # with --quick and without, as the rounds
ROUNDS = {True: 3, False: 7}
SECONDS = {True: 6.0, False: 30.0}  # of a side in a round, after its first batch
CLASSES, PICTURES = 10, 200  # different ones, of which the files are copies
WIDTH, HEIGHT, SIZE, BATCH, SHIFT = 500, 375, 224, 128, 4
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FIRST_BATCH_SECONDS = 10.0


def make_files(folder: Path, files: int) -> Path:
    """Make folder/FILES/CLASS/*.jpg where it is not there; return folder/FILES."""
    made, begun = folder / str(files), folder / f"{files}-begun"
    if made.is_dir():
        return made
    generator = np.random.default_rng(0)
    pictures = []
    for _ in range(PICTURES):
        coarse = Image.fromarray(generator.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC))
        noisy = smooth + generator.normal(0, 8, smooth.shape)
        buffer = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
        pictures.append(buffer.getvalue())
    for number in range(files):
        path = begun / str(number % CLASSES) / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pictures[number % PICTURES])
    return begun.rename(made)


# -------------------------------------------------------------------- the sides


# Each imports what it needs, so that no side has the memory of another, and returns a generator,
# whose first step opens the data.


def endless(loader: Iterable[tuple[Tensor, Tensor]]) -> Iterator[int]:
    """Yield the sizes of the batches of all epochs."""
    for _, labels in itertools.chain.from_iterable(itertools.repeat(loader)):
        yield len(labels)


def ours(folder: str, workers: int) -> Iterator[int]:
    keep_freed_memory()
    splits, _ = read_image_splits("folder", folder, image_size=SIZE, train_is_enough=True)
    train, decoder = splits["train"], image_batches.FileDecoder(workers)
    mean, std = image_batches.channel_statistics(train, decoder)
    data = image_batches.ImageDataset(
        train,
        image_batches.AUGMENTATIONS["folder"],
        mean=mean,
        std=std,
        device=torch.device("cpu"),
        decoder=decoder,
        resident=False,
    )
    sampler, sizes = Sampler(len(data), seed=0), batch_sizes(len(data), BATCH)
    for epoch in itertools.count():
        for _, labels in data.batches(sampler.epoch(epoch, sizes), epoch):
            yield len(labels)


def standard_transform(*to_tensor: Callable) -> Callable:
    from torchvision import transforms

    geometry = [
        transforms.Resize(SIZE),
        transforms.CenterCrop(SIZE),
        transforms.RandomCrop(SIZE, padding=SHIFT),
        transforms.RandomHorizontalFlip(),
    ]
    return transforms.Compose([*geometry, *to_tensor])


def of_torchvision(folder: str, workers: int) -> Iterator[int]:
    from torchvision import datasets, transforms

    def steps() -> Iterator[int]:
        transform = standard_transform(transforms.ToTensor(), transforms.Normalize(MEAN, STD))
        data = datasets.ImageFolder(folder, transform)
        yield from endless(
            DataLoader(data, BATCH, shuffle=True, num_workers=workers, persistent_workers=True)
        )

    return steps()


def of_timm(folder: str, workers: int) -> Iterator[int]:
    import timm.data
    from timm.data.transforms import ToNumpy

    def steps() -> Iterator[int]:
        data = timm.data.create_dataset("", root=folder)
        settings = {"is_training": True, "mean": MEAN, "std": STD, "num_workers": workers}
        loader = timm.data.create_loader(
            data, (3, SIZE, SIZE), BATCH, device=torch.device("cpu"), **settings
        )
        data.transform = standard_transform(ToNumpy())
        yield from endless(loader)

    return steps()


SIDES = {"ours": ours, "torchvision": of_torchvision, "timm": of_timm}
if importlib.util.find_spec("timm") is None:
    del SIDES["timm"]


# -------------------------------------------------------------------- measuring


def opened(side: Callable[..., Iterator[int]], folder: str, workers: int) -> Iterator[int]:
    """Start a side whose workers are forked, as a script's are, and not spawned as this process."""
    torch.multiprocessing.set_start_method("fork", force=True)
    return side(folder, workers)


def proportional_memory(process: int) -> int:
    """Bytes of a process and all below it; a page that several processes have counts in parts."""
    rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
    kibibytes = next(line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:"))
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return 1024 * int(kibibytes) + sum(proportional_memory(int(child)) for child in children)


def turn(
    side: Callable[..., Iterator[int]], folder: str, seconds: float
) -> tuple[float, float, float]:
    """Return seconds to the first batch, images/s after it, and bytes of memory."""
    remote = bench.Remote(opened, side, folder, num_cores())
    try:
        first = BATCH / remote.rate(0.0)  # one step
        rate = remote.rate(seconds)
        assert remote.process.pid is not None
        return first, rate, proportional_memory(remote.process.pid)
    finally:
        remote.kill()  # workers of a DataLoader that end in the midst of an epoch report an abort


def measure(folder: Path, quick: bool) -> tuple[list[bench.Row], list[bench.Bar]]:
    """Print a table and return rows of images/s and the bars."""
    deadline = bench.Budget(quick, 1).next_deadline()
    turns = {name: partial(turn, side, str(folder), SECONDS[quick]) for name, side in SIDES.items()}
    measured = bench.take_turns(turns, ROUNDS[quick], deadline=deadline)
    first, rates, memory = (
        {name: [values[i] for values in rounds] for name, rounds in measured.items()}
        for i in range(3)
    )
    lines = [["side", "first batch, s", "images/s", "spread", "memory, MiB", "rounds"]]
    for name, each in rates.items():
        seconds, mebibytes = statistics.median(first[name]), statistics.median(memory[name]) / 2**20
        cells = [f"{seconds:.2f}", f"{statistics.median(each):.1f}", bench.spread(each, 1)]
        lines.append([name, *cells, f"{mebibytes:.0f}", str(len(each))])
    print(bench.aligned(lines))
    peers = [name for name in SIDES if name != "ours"]
    rows = [bench.Row(f"images/s {peer}", rates["ours"], rates[peer]) for peer in peers]
    bars = [bench.Bar(f"images/s over {row.name.split()[1]}", row.ratio, 1.0) for row in rows]
    for peer in peers:
        share = statistics.median(a / b for a, b in zip(memory["ours"], memory[peer]))
        bars.append(bench.Bar(f"memory over {peer}", share, 1.0, at_most=True))
    seconds = statistics.median(first["ours"])
    bars.append(bench.Bar("first batch, seconds", seconds, FIRST_BATCH_SECONDS, at_most=True))
    return rows, bars


def main() -> int:
    parser = bench.parser(__doc__)
    parser.add_argument("--folder", type=file_path, help="where files are made once (temporary)")
    args = parser.parse_args()
    packages = ["torch", "pillow", *(name for name in SIDES if name != "ours")]
    machine = bench.machine(torch.device("cpu"), packages)
    if "timm" not in SIDES:
        machine += "; timm is not installed"
    print(machine)
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_files(args.folder or Path(temporary), FILES[args.quick])
        rows, bars = measure(folder, args.quick)
    return bench.finish(args, bars, rows=rows, machine=machine)


if __name__ == "__main__":
    sys.exit(exit_code(main))
