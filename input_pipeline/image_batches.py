"""Batches of images: gathered, randomly cropped and flipped, and normalised on the training device.

    decoder = FileDecoder(workers=2)
    mean, std = channel_statistics(split, decoder)
    train = ImageDataset(
        split, AUGMENTATIONS["folder"], mean=mean, std=std, device=device, decoder=decoder
    )
    for images, labels in train.batches(row_batches, epoch=0): ...    # (batch, 3, 32, 32), (batch,)

Pixels are kept on the device if they fit, and otherwise decoded from files by worker processes. The
augmentation of a row is a function of (seed, epoch, row): it does not depend on the batch size or
on the number of ranks.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from distributed.agreement import node_memory, raise_together
from distributed.world import World
from errors import InputError
from input_pipeline.image_datasets import ImageSplit
from input_pipeline.sampler import epoch_generator

STATISTICS_ROWS = 10_000  # images used for the mean and standard deviation of each channel
STATISTICS_FILES = 2_000  # of files, which take long to decode
STATISTICS_PIXELS = 1 << 22  # pixels summed at a time, to keep memory low
DECODE_ROWS = 256  # images that the workers decode at a time when all are made resident
CACHE_BYTES = 1 << 20  # of pixels that are cropped and normalised at a time on a CPU
MEMORY_FRACTION = 4  # a split may take a quarter of the free memory
LARGEST_PAD = 127  # pixels; the offset of a crop is kept in a byte
MOST_SMALL_STAGES = 4  # a model is compiled for each size of images, and torch limits how often


@dataclass(frozen=True)
class Augmentation:
    """Random crops and flips, and smaller images in the first epochs.

    Attributes:
        pad: pixels added to each side of an image, out of which its own size is cropped.
        fill: what those are, 'black' or the image's own, reflected at its edges ('reflect').
        flip: whether to mirror each image horizontally with probability 1/2.
        alternate: mirror a random half of the images in even epochs and the other half in odd ones,
            so that two epochs show each image both ways (arXiv:2404.00498, section 3.6).
        small_epochs: in so many first epochs images are scaled down.
        small_size: pixels a side of those.
        small_stages: those epochs are divided into so many stages, whose images grow evenly from
            `small_size` towards their own size, which they have after the last stage.
    """

    pad: int
    flip: bool
    fill: str = "black"
    alternate: bool = False
    small_epochs: int = 0
    small_size: int = 24
    small_stages: int = 1

    def __post_init__(self) -> None:
        if self.fill not in ("black", "reflect"):
            raise ValueError(f"fill={self.fill} must be black or reflect")
        if not 0 <= self.pad <= LARGEST_PAD:
            raise ValueError(f"pad={self.pad} must be from 0 to {LARGEST_PAD}")
        if self.small_size < 1 or not 1 <= self.small_stages <= MOST_SMALL_STAGES:
            raise ValueError(
                f"small_size={self.small_size} must be at least 1, and "
                f"small_stages={self.small_stages} from 1 to {MOST_SMALL_STAGES}"
            )

    def check_size(self, size: int) -> None:
        """Raise ValueError where images of so many pixels a side are too small for the settings."""
        if self.fill == "reflect" and not 0 < self.pad < size:
            raise ValueError(f"fill=reflect: pad={self.pad} must be from 1 to {size - 1}")
        if self.small_epochs and self.small_size > size:
            raise ValueError(f"small_size={self.small_size} must be at most {size}")
        if self.small_epochs and self.small_stages > self.small_epochs:
            raise ValueError(
                f"small_stages={self.small_stages} must be at most the {self.small_epochs} epochs"
            )

    def size_of_epoch(self, epoch: int, full_size: int) -> int:
        """Return the pixels a side that training images of `full_size` have in an epoch, from 0."""
        if epoch >= self.small_epochs:
            return full_size
        stage = epoch * self.small_stages // self.small_epochs
        return self.small_size + (full_size - self.small_size) * stage // self.small_stages


AUGMENTATIONS = {
    "cifar10": Augmentation(pad=4, flip=True),
    "mnist": Augmentation(pad=2, flip=False),
    "digits": Augmentation(pad=1, flip=False),
    "folder": Augmentation(pad=4, flip=True),
}
"""The standard augmentation of each data set, by the name of --dataset."""


class ImageDataset:
    """The images of one split, resident on the device or streamed from files by worker processes.

    Args:
        images: the split.
        augmentation: applied to batches of a training epoch.
        mean: mean of each channel, of pixel values in 0..1.
        std: standard deviation of each channel, of pixel values in 0..1.
        device: where batches, and resident pixels, live.
        seed: seed of the augmentation.
        decoder: decodes files; None decodes them in this process.
        resident: keep all pixels on the device; otherwise files are decoded in every epoch.
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
        self.mean = torch.tensor(list(mean), device=device)
        self.std = torch.tensor(list(std), device=device)
        self.device = device
        self.seed = seed
        self.decoder = decoder or FileDecoder(workers=0)
        self.labels = images.labels.to(device)
        self.pixels: Tensor | None = None
        if resident:
            images = decode_on_node(images, self.decoder, World())
            assert images.pixels is not None
            self.pixels = images.pixels.to(device)
            images = dataclasses.replace(images, pixels=self.pixels)  # not on the host as well
        self.images = images

    def __len__(self) -> int:
        return len(self.labels)

    def batches(
        self, row_batches: Sequence[Tensor], epoch: int | None = None
    ) -> Generator[tuple[Tensor, Tensor]]:
        """Yield (images, labels) for each entry of `row_batches`, see `BatchedDataset`.

        Args:
            row_batches: row numbers of each batch.
            epoch: number of the training epoch; None gives images without augmentation.
        Yields:
            images: (batch, channels, height, width) fp32 in channels_last.
            labels: (batch,) int64.
        """
        crops = self.draw_crops(epoch) if epoch is not None else None
        full_size = self.images.size
        size = full_size if epoch is None else self.augmentation.size_of_epoch(epoch, full_size)
        if self.pixels is not None:
            decoded = self._resident_batches(self.pixels, row_batches)
        else:
            decoded = self._streamed_batches(row_batches)
        for rows, pixels in decoded:
            at_once = len(rows)
            if self.device.type == "cpu":  # what fits into a cache, and leaves no holes in the heap
                at_once = max(1, CACHE_BYTES // (full_size**2 * self.images.channels))
            parts = zip(rows.split(at_once), pixels.split(at_once))
            prepared = [self._prepare(part, of_part, crops) for part, of_part in parts]
            images = prepared[0] if len(prepared) == 1 else torch.cat(prepared)
            yield scale_down(images, size) if size < full_size else images, self.labels[rows]

    def _prepare(self, rows: Tensor, pixels: Tensor, crops: tuple[Tensor, Tensor] | None) -> Tensor:
        """Crop, flip and normalise (rows, height, width, channels) pixels."""
        if crops is not None:
            offsets, flips = crops
            pixels = crop_flip(
                pixels,
                offsets[rows],
                flips=flips[rows],
                pad=self.augmentation.pad,
                reflect=self.augmentation.fill == "reflect",
            )
        return normalise(pixels, self.mean, std=self.std)

    def draw_crops(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Draw the crop offsets and flips of all rows for one epoch.

        Returns:
            offsets: (rows, 2) uint8 on the device, vertical and horizontal, in 0..2 pad.
            flips: (rows,) uint8 on the device, 1 where the image is mirrored.
        """
        generator = epoch_generator(self.seed + 1, epoch)
        num_offsets = 2 * self.augmentation.pad + 1
        offsets = torch.randint(num_offsets, (len(self), 2), generator=generator, dtype=torch.uint8)
        flips = torch.randint(2, (len(self),), generator=generator, dtype=torch.uint8)
        if self.augmentation.alternate:
            first = epoch_generator(self.seed + 2, 0)
            flips = torch.randint(2, (len(self),), generator=first, dtype=torch.uint8) ^ epoch % 2
        if not self.augmentation.flip:
            flips.zero_()
        return offsets.to(self.device), flips.to(self.device)

    def _resident_batches(
        self, all_pixels: Tensor, row_batches: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (rows, pixels) on the device, gathered from the resident pixels."""
        for rows in row_batches:
            device_rows = rows.to(self.device, non_blocking=True)
            yield device_rows, all_pixels.index_select(0, device_rows)

    def _streamed_batches(self, row_batches: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (rows, pixels) on the device, decoded from files by worker processes."""
        on_gpu = self.device.type == "cuda"
        for rows, pixels in self.decoder.batches(self.images, row_batches, pinned=on_gpu):
            yield (
                rows.to(self.device, non_blocking=True),
                pixels.to(self.device, non_blocking=True),
            )


def normalise(pixels: Tensor, mean: Tensor, *, std: Tensor) -> Tensor:
    """Convert uint8 pixels to normalised floats: (pixel / 255 - mean) / std.

    Args:
        pixels: (batch, height, width, channels) uint8.
        mean: (channels,), of pixel values in 0..1.
        std: (channels,), of pixel values in 0..1.
    Returns:
        (batch, channels, height, width) fp32 in channels_last.
    """
    width = pixels.shape[2]  # whole image rows: broadcasting over a last dimension of 3 is slow
    means, scales = (255 * mean).repeat(width), (1 / (255 * std)).repeat(width)
    image_rows = pixels.float().flatten(2).sub_(means).mul_(scales)
    return image_rows.view(pixels.shape).permute(0, 3, 1, 2)


def scale_down(images: Tensor, size: int) -> Tensor:
    """Return (batch, channels, height, width) images with `size` pixels a side, smoothed before."""
    return F.interpolate(images, size=(size, size), mode="bilinear", antialias=True)


def crop_flip(
    pixels: Tensor, offsets: Tensor, *, flips: Tensor, pad: int, reflect: bool = False
) -> Tensor:
    """Crop each image out of its padded self or that one's mirror image, by a gather of rows.

    Args:
        pixels: (batch, height, width, channels) uint8.
        offsets: (batch, 2) uint8, position of the crop from the top and from the left, in 0..2 pad.
        flips: (batch,) uint8, 1 where the image is mirrored horizontally.
        pad: pixels added on each side; fewer than the image has, if they are reflected.
        reflect: whether the added pixels are the image's own, reflected at its edges without
            repeating them, instead of zeros.
    Returns:
        (batch, height, width, channels) uint8.
    """
    batch, height, width, channels = pixels.shape
    if reflect:
        rows, columns = (reflected_indices(size, pad, pixels.device) for size in (height, width))
        padded = pixels.index_select(1, rows).index_select(2, columns)
    else:
        padded = F.pad(pixels, (0, 0, pad, pad, pad, pad))
    both = torch.stack([padded, padded.flip(2)])
    flip = flips.long()
    top, left = offsets.long().unbind(1)
    left = left + flip * (2 * pad - 2 * left)  # as far from the right as it was from the left
    row_stride = (width + 2 * pad) * channels  # bytes of a padded image row
    image = flip * batch + torch.arange(batch, device=pixels.device)
    first_byte = (image * (height + 2 * pad) + top) * row_stride + left * channels
    row_offsets = torch.arange(height, device=pixels.device) * row_stride
    starts = first_byte[:, None] + row_offsets  # (batch, height), first byte of each cropped row
    row_bytes = width * channels
    # A view whose i-th entry is the `row_bytes` bytes that start at byte i.
    windows = both.flatten().as_strided((both.numel() - row_bytes + 1, row_bytes), (1, 1))
    return windows.index_select(0, starts.flatten()).view(pixels.shape)


def reflected_indices(size: int, pad: int, device: torch.device) -> Tensor:
    """Return pad, ..., 1, 0, 1, ..., size - 1, size - 2, ..., size - 1 - pad: int64."""
    position = torch.arange(-pad, size + pad, device=device).abs()
    return torch.where(position < size, position, 2 * (size - 1) - position)


def channel_statistics(
    images: ImageSplit, decoder: FileDecoder | None = None
) -> tuple[list[float], list[float]]:
    """Return the mean and standard deviation of each channel, of pixel values in 0..1.

    They are computed from up to 10,000 images, or 2,000 files, spread evenly over the split.

    Args:
        images: the split.
        decoder: decodes files; None decodes them in this process.
    """
    most = STATISTICS_ROWS if images.files is None else STATISTICS_FILES
    rows = torch.linspace(0, len(images) - 1, min(len(images), most)).long().unique()
    at_once = len(rows) if images.files is None else max(1, STATISTICS_PIXELS // images.size**2)
    sums, count = torch.zeros(2, images.channels, dtype=torch.float64), 0
    for _, pixels in (decoder or FileDecoder(workers=0)).batches(images, rows.split(at_once)):
        for chunk in pixels.flatten(0, 2).split(STATISTICS_PIXELS):  # (pixels, channels)
            values = chunk.double().div_(255)
            sums += torch.stack([values.sum(0), values.square_().sum(0)])
            count += len(chunk)
    mean, mean_square = sums / count
    std = (mean_square - mean.square()).clamp(min=1e-8).sqrt()
    return mean.tolist(), std.tolist()


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
    """Worker processes that decode image files, for all data sets and epochs.

    They start here, while this process is small, and end with this object. Each batch is divided
    among them, so that two batches are decoded ahead, however many workers there are.

    Args:
        workers: number of processes; 0 decodes in this process, None is one for each thread of
            torch.
    """

    def __init__(self, workers: int | None) -> None:
        self.workers = torch.get_num_threads() if workers is None else workers
        self.idle = [self._start()]

    def _start(self) -> tuple[Tasks, DataLoader]:
        """A loader with workers of its own, and what hands them their tasks."""
        tasks = Tasks()
        loader = DataLoader(
            tasks,
            sampler=tasks,
            batch_size=None,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            worker_init_fn=obey_parent_alone,
            generator=torch.Generator(),  # torch's own would give the model other weights
        )
        iter(loader)
        return tasks, loader

    def batches(
        self, images: ImageSplit, row_batches: Sequence[Tensor], *, pinned: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (rows, pixels) for each entry of `row_batches`, in the same order.

        Args:
            images: the split.
            row_batches: row numbers of each batch.
            pinned: copy decoded pixels into pinned memory.
        Raises:
            InputError: a file cannot be read.
        """
        if images.pixels is not None:
            yield from ((rows, images.pixels[rows]) for rows in row_batches)
            return
        parts = max(1, self.workers)
        # Two data sets may be read in turns, and then each has workers.
        tasks, loader = self.idle.pop() if self.idle else self._start()
        tasks.coming = (images.reader(part) for rows in row_batches for part in rows.chunk(parts))
        stream = iter(loader)
        try:
            for rows in row_batches:
                decoded = [next(stream) for _ in rows.chunk(parts)]
                for part in decoded:
                    if isinstance(part, InputError):
                        raise part
                shape = len(rows), *decoded[0].shape[1:]
                pixels = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
                yield rows, torch.cat(decoded, out=pixels)
        finally:
            self.idle.append((tasks, loader))  # the next call drops what was decoded ahead


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


def obey_parent_alone(worker: int) -> None:
    """Let a worker go on after SIGINT and SIGTERM, which reach all processes of a job.

    The training process finishes its step, writes a checkpoint and then ends its workers; where it
    ends otherwise, multiprocessing sends them a SIGTERM from there, and waits.
    """

    def end_with_parent() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=end_with_parent, daemon=True).start()


def decode_on_node(
    images: ImageSplit, decoder: FileDecoder, world: World, *, keep: bool = True
) -> ImageSplit:
    """Decode all files into memory that the processes of a node share, each a part; collective.

    Args:
        images: the split; where its pixels are in memory, nothing is done.
        decoder: decodes this process's part.
        world: the ranks.
        keep: whether it is to be done; the node's first process decides.
    Returns:
        The split with its pixels, or as it is.
    Raises:
        InputError: a file cannot be read; on every rank.
    """
    shape = len(images), images.size, images.size, images.channels
    wanted = keep and images.pixels is None
    pixels = node_memory(world, math.prod(shape) if wanted else 0)
    chunks = torch.arange(len(images)).split(DECODE_ROWS)[world.local_rank :: world.local_size]
    with raise_together(world):
        for rows, decoded in decoder.batches(images, chunks if len(pixels) else []):
            pixels.view(shape)[rows] = decoded
    return dataclasses.replace(images, pixels=pixels.view(shape)) if len(pixels) else images
