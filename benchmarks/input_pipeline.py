"""How fast a folder of JPEGs becomes batches: beside torchvision's ImageFolder and timm's loader.

python -m benchmarks.input_pipeline --quick                       # 2,000 files in a new folder
python -m benchmarks.input_pipeline --folder DIR --json FILE      # 20,000, kept in DIR

The files have 500 x 375 pixels. All sides scale the shorter side to 224, cut the centre out, move
it by up to 4 pixels, mirror half of the images and normalise; a batch has 128, and there are as
many workers as cores. In each round each side has a fresh process, whose clock starts when it opens
the folder. Ours then measures mean and standard deviation, which the others are given. Memory is
the proportional set size of all processes of a side, and shared memory that none has mapped.
"""

import importlib.util
import io
import itertools
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

from backends.device import keep_freed_memory, num_cores
from benchmarks import bench
from cli.flag_parser import file_path
from errors import InputError, exit_code
from input_pipeline import image_batches
from input_pipeline.augmentation import AUGMENTATIONS
from input_pipeline.image_datasets import read_image_splits
from input_pipeline.sampler import Sampler, batch_sizes

FILES = {True: 2_000, False: 20_000}  # with --quick and without, as the rounds
ROUNDS = {True: 3, False: 7}
SECONDS = {True: 6.0, False: 30.0}  # of a side in a round, after its first batch
CLASSES, PICTURES = 10, 200  # pictures that differ, of which the files are copies
SIZE, BATCH = 224, 128
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FIRST_BATCH_SECONDS = 10.0


def make_files(folder: Path, files: int) -> None:
    """Write JPEGs of 500 x 375 pixels as FOLDER/CLASS/NUMBER.jpg, spread over the classes."""
    generator = np.random.default_rng(0)
    for picture in range(PICTURES):
        coarse = Image.fromarray(generator.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC))
        noisy = (smooth + generator.normal(0, 8, smooth.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(buffer := io.BytesIO(), "JPEG", quality=90)
        for number in range(picture, files, PICTURES):
            path = folder / str(number % CLASSES) / f"{number:06}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(buffer.getvalue())


# -------------------------------------------------------------------- the sides


def ours(folder: str, workers: int) -> Iterator[int]:
    keep_freed_memory()  # as the entry scripts do
    splits, _ = read_image_splits("folder", folder, image_size=SIZE, enough=["train"])
    train, decoder = splits["train"], image_batches.FileDecoder(workers)
    mean, std = image_batches.channel_statistics(train, decoder)
    augmentation = AUGMENTATIONS["folder"]
    data = image_batches.ImageDataset(
        train,
        augmentation,
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


def peer(name: str, folder: str, workers: int) -> Iterator[int]:
    from torchvision import datasets, transforms

    crop = [transforms.CenterCrop(SIZE), transforms.RandomCrop(SIZE, padding=4)]
    geometry = [transforms.Resize(SIZE), *crop, transforms.RandomHorizontalFlip()]
    floats = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    if name == "timm":
        import timm.data

    def batches() -> Iterator[int]:
        if name == "timm":  # which normalises batches of bytes, as ours does
            data = timm.data.create_dataset("", root=folder)
            loader = timm.data.create_loader(
                data,
                (3, SIZE, SIZE),
                BATCH,
                device=torch.device("cpu"),
                is_training=True,
                num_workers=workers,
                mean=MEAN,
                std=STD,
            )
            data.transform = transforms.Compose([*geometry, timm.data.transforms.ToNumpy()])
        else:
            data = datasets.ImageFolder(folder, transforms.Compose([*geometry, *floats]))
            loader = DataLoader(
                data, BATCH, shuffle=True, num_workers=workers, persistent_workers=True
            )
        for _, labels in itertools.chain.from_iterable(itertools.repeat(loader)):
            yield len(labels)

    return batches()  # what is imported does not count


def opened(side: Callable[..., Iterator[int]], folder: str, workers: int) -> Iterator[int]:
    """Start a side whose workers are forked, as a script's are, and not spawned as this process."""
    torch.multiprocessing.set_start_method("fork", force=True)
    return side(folder, workers)


SIDES: dict[str, Callable[..., Iterator[int]]] = {
    "ours": ours,
    "torchvision": partial(peer, "torchvision"),
    "timm": partial(peer, "timm"),
}
if importlib.util.find_spec("timm") is None:
    del SIDES["timm"]


# -------------------------------------------------------------------- measuring


def memory(process: int, counted: set[int]) -> int:
    """Bytes of a process and all below it; `counted` are the numbers of files of shared memory."""
    proc = Path(f"/proc/{process}")
    lines = (proc / "smaps_rollup").read_text().splitlines()
    total = 1024 * sum(int(x.split()[1]) for x in lines if x.startswith(("Pss_Anon", "Pss_File")))
    for link in [*(proc / "fd").iterdir(), *(proc / "map_files").iterdir()]:
        try:
            status = link.stat()
        except PermissionError:
            raise InputError("only root may read which memory processes share") from None
        if "/dev/shm/" in os.readlink(link) and status.st_ino not in counted:
            counted.add(status.st_ino)
            total += 512 * status.st_blocks
    children = (proc / "task" / str(process) / "children").read_text().split()
    return total + sum(memory(int(child), counted) for child in children)


def turn(side: Callable, folder: str, seconds: float) -> tuple[float, float, float]:
    """Return seconds to the first batch, images/s after it, and MiB of memory."""
    remote = bench.Remote(opened, side, folder, num_cores())
    assert remote.process.pid is not None
    try:
        first = BATCH / remote.ask("rate", 0.0)  # one step
        rate = remote.ask("rate", seconds)
        return first, rate, memory(remote.process.pid, set()) / 2**20
    finally:
        # Workers of a DataLoader that ends within an epoch report an abort.
        os.killpg(remote.process.pid, signal.SIGKILL)
        remote.process.join()


def main() -> int:
    parser = bench.parser(__doc__)
    parser.add_argument("--folder", type=file_path, help="where files are made once (temporary)")
    args = parser.parse_args()
    missing = "" if "timm" in SIDES else "; timm is not installed"
    machine = bench.machine(torch.device("cpu"), ["torch", "pillow", *[*SIDES][1:]]) + missing
    print(machine)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)) / str(FILES[args.quick])
        if not folder.is_dir():
            make_files(begun := folder.with_name(f"{folder.name}-begun"), FILES[args.quick])
            begun.rename(folder)
        turns = {
            name: partial(turn, side, str(folder), SECONDS[args.quick])
            for name, side in SIDES.items()
        }
        deadline = bench.Budget(args.quick, 1).next_deadline()
        measured = bench.take_turns(turns, ROUNDS[args.quick], deadline=deadline)
    values = {name: [list(each) for each in zip(*rounds)] for name, rounds in measured.items()}
    lines = [["side", "first batch, s", "images/s", "memory, MiB", "rounds"]]
    for name, each in values.items():
        medians = [f"{statistics.median(figures):.1f}" for figures in each]
        lines.append([name, *medians, str(len(each[0]))])
    print(bench.aligned(lines))
    first, rates, mebibytes = values["ours"]
    rows, bars = [], []
    for name in [*SIDES][1:]:
        rows.append(bench.Row(f"images/s over {name}", rates, values[name][1]))
        bars.append(bench.Bar(rows[-1].name, rows[-1].ratio, 1.0))
        share = statistics.median(a / b for a, b in zip(mebibytes, values[name][2]))
        bars.append(bench.Bar(f"memory over {name}", share, 1.0, at_most=True))
    seconds = statistics.median(first)
    bars.append(bench.Bar("seconds to first batch", seconds, FIRST_BATCH_SECONDS, at_most=True))
    return bench.finish(args, bars, rows=rows, machine=machine, sides=values)


if __name__ == "__main__":
    sys.exit(exit_code(main))
