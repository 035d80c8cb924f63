"""Batches of images: gathered, randomly cropped and flipped, and normalised on the training device.

    decoder = FileDecoder(workers=2)
    mean, std = channel_statistics(split, decoder)
    train = ImageDataset(
        split, AUGMENTATIONS["folder"], mean=mean, std=std, device=device, decoder=decoder
    )
    for images, labels in train.batches(row_batches, epoch=0): ...    # (batch, 3, 32, 32), (batch,)

Pixels are kept on the device if they fit. Otherwise worker processes decode, crop and flip images,
and do so as well where images are changed one after the other. The augmentation of a row is a
function of (seed, epoch, row): it does not depend on the batch size or on the number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import multiprocessing
import multiprocessing.util
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from distributed.agreement import node_memory, raise_together
from distributed.waiting import named_stalls
from distributed.worker import end_with_parent
from distributed.world import World
from errors import STOP_SIGNALS, InputError, in_one_line
from input_pipeline.augmentation import Augmentation, RowChanges, draw_crops, scale_down
from input_pipeline.image_datasets import ImageSplit, describe_damage
from input_pipeline.sampler import spread

STATISTICS_ROWS = 10_000  # images used for the mean and standard deviation of each channel
STATISTICS_FILES = 2_000  # of files, which take long to decode
STATISTICS_PIXELS = 1 << 20  # pixels that a worker reads at a time
DECODE_ROWS = 256  # images that the workers decode at a time when all are made resident
CACHE_BYTES = 1 << 20  # of resident pixels that are cropped at a time on a CPU
SERIAL_VALUES = 32_767  # of which torch's threads, which wait actively, do not divide the work
STATES = {"D": " (waits for a disk)", "T": " (is stopped)"}  # as in proc(5)
MEMORY_FRACTION = 4  # a split may take a quarter of the free memory


class ImageDataset:
    """The images of one split, resident on the device or streamed from files by worker processes.

    Args:
        augmentation: applied to batches of a training epoch.
        mean, std: mean and standard deviation of each channel, of pixel values in 0..1.
        device: where batches, and resident pixels, live.
        decoder: decodes files; None decodes them in this process.
        resident: keep pixels that are decoded on the device.
    """

    lengths: Tensor | None = None

    def __init__(
        self,
        images: ImageSplit,
        augmentation: Augmentation,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        seed: int = 0,
        decoder: FileDecoder | None = None,
        resident: bool = True,
    ) -> None:
        self.augmentation = augmentation
        self.mean_colour = [round(255 * value) for value in mean]
        self.mean = torch.tensor(list(mean), device=device)
        self.std = torch.tensor(list(std), device=device)
        self.device = device
        self.seed = seed
        self.decoder = decoder or FileDecoder(workers=0)
        self.labels = images.labels.to(device)
        if resident and images.pixels is not None:
            images = dataclasses.replace(images, pixels=images.pixels.to(device))
        self.images = images

    def __len__(self) -> int:
        return len(self.labels)

    def batches(
        self, row_batches: Sequence[Tensor], epoch: int | None = None
    ) -> Generator[tuple[Tensor, Tensor]]:
        """Yield (images, labels) for each entry of `row_batches`, see `BatchedDataset`.

        Args:
            epoch: number of the training epoch; None gives images without augmentation.
        Yields:
            images: (batch, channels, height, width) fp32 in channels_last.
            labels: (batch,) int64.
        """
        full_size = self.images.size
        size = full_size if epoch is None else self.augmentation.size_of_epoch(epoch, full_size)
        if self.images.pixels is None or (epoch is not None and self.augmentation.by_row):
            read = self._streamed_batches(row_batches, epoch)
        else:
            read = self._gathered_batches(self.images.pixels, row_batches, epoch)
        for rows, parts in read:
            shape = len(rows), full_size, full_size, self.images.channels
            if self.device.type == "cpu":
                # glibc reuses this block; torch's aligned ones leave holes
                images = torch.from_numpy(np.empty(shape, dtype=np.float32))
            else:
                images = torch.empty(shape, device=self.device)
            done = 0
            for pixels in parts:
                normalise(pixels, self.mean, std=self.std, out=images[done : done + len(pixels)])
                done += len(pixels)
            batch = images.permute(0, 3, 1, 2)
            yield scale_down(batch, size) if size < full_size else batch, self.labels[rows]

    def _gathered_batches(
        self, all_pixels: Tensor, row_batches: Sequence[Tensor], epoch: int | None
    ) -> Iterator[tuple[Tensor, Iterable[Tensor]]]:
        """Yield (rows, parts of their pixels) on the device, where they are cropped and flipped."""
        crops = None
        if epoch is not None:
            offsets, flips = draw_crops(self.augmentation, len(self), seed=self.seed, epoch=epoch)
            crops = offsets.to(self.device), flips.to(self.device)

        def gather(rows: Tensor, device_rows: Tensor) -> Tensor:
            pixels = all_pixels.index_select(0, rows).to(self.device, non_blocking=True)
            if crops is None:
                return pixels
            return self.augmentation.crop(pixels, *(each[device_rows] for each in crops))

        in_cache = max(1, CACHE_BYTES // (self.images.size**2 * self.images.channels))
        for rows in row_batches:
            at_once = in_cache if self.device.type == "cpu" else len(rows)
            rows = rows.to(all_pixels.device, non_blocking=True)
            device_rows = rows.to(self.device, non_blocking=True)
            yield device_rows, map(gather, rows.split(at_once), device_rows.split(at_once))

    def _streamed_batches(
        self, row_batches: Sequence[Tensor], epoch: int | None
    ) -> Iterator[tuple[Tensor, Iterable[Tensor]]]:
        """Yield (rows, parts of their pixels) on the device, read and augmented by the workers."""
        changes = None
        if epoch is not None:
            changes = RowChanges(self.augmentation, len(self), self.seed, epoch, self.mean_colour)
        for rows, parts in self.decoder.batches(self.images, row_batches, changes):
            if self.device.type == "cuda":
                shape = len(rows), *parts[0].shape[1:]
                pinned = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
                parts = [torch.cat(parts, out=pinned).to(self.device, non_blocking=True)]
            yield rows.to(self.device, non_blocking=True), parts


def normalise(pixels: Tensor, mean: Tensor, *, std: Tensor, out: Tensor) -> None:
    """Convert uint8 pixels to normalised floats: (pixel / 255 - mean) / std.

    Args:
        pixels: (batch, height, width, channels) uint8.
        mean, std: (channels,), of pixel values in 0..1.
        out: of the same shape as the pixels, fp32; is written.
    """
    width = pixels.shape[2]  # whole image rows: broadcasting over a last dimension of 3 is slow
    means, scales = (255 * mean).repeat(width), (1 / (255 * std)).repeat(width)
    given, wanted = (each.flatten(2).flatten(0, 1) for each in (pixels, out))
    at_once = len(given) if pixels.is_cuda else max(1, SERIAL_VALUES // len(means))
    for values, image_rows in zip(given.split(at_once), wanted.split(at_once)):
        image_rows.copy_(values).sub_(means).mul_(scales)


def channel_statistics(images: ImageSplit, decoder: FileDecoder) -> tuple[list[float], list[float]]:
    """Return the mean and standard deviation of each channel, of pixel values in 0..1.

    They are computed from up to 10,000 images, or 2,000 files, spread evenly over the split.
    """
    most = STATISTICS_ROWS if images.files is None else STATISTICS_FILES
    rows = spread(len(images), most)
    parts = rows.split(max(1, STATISTICS_PIXELS // images.size**2))
    tasks = (partial(count_values, images.reader(part)) for part in parts)
    counts = sum(decoder.run(tasks), torch.tensor(0)).double()
    values = torch.arange(256, dtype=torch.float64) / 255
    mean, mean_square = (counts @ each / counts.sum(1) for each in (values, values.square()))
    std = (mean_square - mean.square()).clamp(min=1e-8).sqrt()
    return mean.tolist(), std.tolist()


def count_values(read: Callable[[], Tensor]) -> Tensor:
    """Read images, and count the pixels of each channel and value: (channels, 256) int64."""
    return torch.stack([one.flatten().bincount(minlength=256) for one in read().unbind(3)])


def fits_in_memory(images: ImageSplit, device: torch.device) -> bool:
    """Return whether the pixels take less than a quarter of the free memory of the device."""
    if images.pixels is not None and device.type == "cpu":
        return True
    needed = len(images) * images.size**2 * images.channels
    if device.type == "cuda":
        return needed < torch.cuda.mem_get_info(device)[0] / MEMORY_FRACTION
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return needed < free / MEMORY_FRACTION


# -------------------------------------------------------------------- decoding of image files


class FileDecoder:
    """Worker processes that read and augment images, for all data sets and epochs.

    They start here, while this process is small, and end with this object. Each batch is divided
    among them, so that two batches are decoded ahead, however many workers there are.

    Args:
        workers: number of processes; 0 decodes in this process, None is one for each thread of
            torch.
        seconds: after which the process ends where none of them computes, nor has an image.
        splits: of the run, which are searched for further images where one cannot be read.
    """

    def __init__(
        self, workers: int | None, *, seconds: float = math.inf, splits: Iterable[ImageSplit] = ()
    ) -> None:
        self.workers = torch.get_num_threads() if workers is None else workers
        self.seconds = seconds
        self.splits = [split for split in splits if split.files is not None]
        self.idle = [self._start()]

    def _start(self) -> tuple[Tasks, DataLoader, list[int]]:
        """Make a loader with workers of its own, what hands them their tasks, and their numbers.

        Raises:
            InputError: the workers cannot be started.
        """
        tasks = Tasks()
        # The kernel takes the end of the thread that forks for that of its process.
        is_main = threading.current_thread() is threading.main_thread()
        loader = DataLoader(
            tasks,
            sampler=tasks,
            batch_size=None,
            num_workers=self.workers,
            # Shares what is imported; Python 3.14 would start a server, which is then the parent.
            multiprocessing_context="fork" if self.workers else None,
            persistent_workers=self.workers > 0,
            worker_init_fn=partial(obey_parent_alone, dies=is_main),
            generator=torch.Generator(),  # torch's own would give the model other weights
        )
        # Blocked before the fork, so that threads which a library starts at it inherit the mask.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        others = multiprocessing.active_children()
        problem = "the processes that read images cannot be started"
        try:
            with in_one_line(problem, ": make room in /dev/shm, or read without them", (OSError,)):
                iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        own = set(multiprocessing.active_children()).difference(others)
        return tasks, loader, sorted(process.pid or 0 for process in own)

    def run(self, tasks: Iterator[Callable[[], Tensor]]) -> Generator[Tensor]:
        """Let the workers call functions, and yield what each returns, in the same order.

        Raises:
            InputError: a file cannot be read.
        """
        # Two data sets may be read in turns, and then each has workers.
        queue, loader, readers = self.idle.pop() if self.idle else self._start()
        queue.coming = tasks
        received, is_waiting = 0, True
        readers = readers or [threading.get_native_id()]

        def stage() -> tuple[int, ...] | None:
            spent = (ticks for each in readers for ticks in read_status(each)[1:])
            return (received, *map(int, spent)) if is_waiting else None

        try:
            with named_stalls(lambda: describe_readers(readers), self.seconds, stage):
                for result in loader:
                    received, is_waiting = received + 1, False
                    if isinstance(result, InputError):
                        raise InputError(f"{result}{describe_damage(self.splits)}")
                    yield result
                    is_waiting = True
        finally:
            self.idle.append((queue, loader, readers))  # the next call drops what is decoded

    def batches(
        self, images: ImageSplit, row_batches: Sequence[Tensor], changes: RowChanges | None = None
    ) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield (rows, parts of their pixels) for each entry of `row_batches`, in the same order.

        Args:
            changes: random ones of the images, by the workers.
        Raises:
            InputError: a file cannot be read.
        """
        parts = [rows.chunk(max(1, self.workers)) for rows in row_batches]
        tasks = (images.reader(part, changes) for of_rows in parts for part in of_rows)
        with contextlib.closing(self.run(tasks)) as results:
            for rows, of_rows in zip(row_batches, parts):
                yield rows, list(itertools.islice(results, len(of_rows)))


class Tasks(Dataset):
    """Functions that the workers of a DataLoader call: its data set, and its sampler.

    They are replaced for each epoch, so that the workers, which know nothing of the data, stay.
    """

    coming: Iterator[Callable[[], Tensor]] = iter(())

    def __iter__(self) -> Iterator[Callable[[], Tensor]]:
        return self.coming

    def __getitem__(self, task: Callable[[], Tensor]) -> Tensor | InputError:
        try:
            return task()
        except InputError as error:  # raised by the training process, without a worker's traceback
            return error


def read_status(task: int) -> tuple[str, ...]:
    """The state of a process or thread, a letter of proc(5), and the clock ticks that it ran."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{task}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return words[0], *words[11:13]
    return ("",)


def describe_readers(readers: Sequence[int]) -> str:
    """Say what reads images, and what of it is stopped or waits for a disk."""
    states = {each: STATES.get(read_status(each)[0], "") for each in readers}
    named = {each: state for each, state in states.items() if state} or states
    return f"images of process {', '.join(f'{each}{state}' for each, state in named.items())}"


def obey_parent_alone(worker: int, *, dies: bool) -> None:
    """Let a worker, whose stop signals are blocked, go on after those that reach a whole job.

    The training process finishes its step, writes a checkpoint and then ends its workers; where it
    ends otherwise, multiprocessing sends them a SIGTERM from there, and waits.

    Args:
        dies: whether one that hangs is killed with the training process; else a thread forked it.
    """
    parent = multiprocessing.parent_process()  # also where it has ended by now
    if dies:
        end_with_parent(signal.SIGKILL, str(parent.pid) if parent else "")
    else:  # Python's end of it would join the pool of that thread, fail, and be an error of torch
        multiprocessing.util.Finalize(None, os._exit, args=(0,), exitpriority=-100)

    def end_with_it() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=end_with_it, daemon=True).start()


def decode_on_node(
    images: ImageSplit, decoder: FileDecoder, world: World, *, keep: bool = True
) -> ImageSplit:
    """Decode all files into memory that the processes of a node share, each a part; collective.

    Args:
        images: the split; pixels that are in memory already are left alone.
        decoder: decodes this process's part.
        keep: whether to decode; the value of the node's first process counts.
    Returns:
        The split, with its pixels if they were decoded.
    Raises:
        InputError: a file cannot be read; on every rank.
    """
    shape = len(images), images.size, images.size, images.channels
    wanted = keep and images.pixels is None
    pixels = node_memory(world, math.prod(shape) if wanted else 0)
    chunks = torch.arange(len(images)).split(DECODE_ROWS)[world.local_rank :: len(world.node)]
    with raise_together(world):
        for rows, parts in decoder.batches(images, chunks if len(pixels) else []):
            pixels.view(shape)[rows] = torch.cat(parts)
    return dataclasses.replace(images, pixels=pixels.view(shape)) if len(pixels) else images
