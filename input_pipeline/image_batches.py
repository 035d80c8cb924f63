"""Batches of images: gathered, cropped, flipped and normalised where the pixels live, or streamed from files.

    train = ImageSet(images, DATASETS["cifar10"], mean, std, device=torch.device("cpu"))
    for pixels, labels in train.batches(plan, epoch=0): ...             # (batch, channels, height, width), channels_last

Augmentation of sample i in epoch e is a function of (seed, e, i): it does not depend on batch size or world size.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from errors import InputError
from input_pipeline.image_datasets import ImageSplit
from input_pipeline.sampler import epoch_generator

STATISTICS_ROWS = 10_000  # images used for the mean and deviation of each channel


@dataclass(frozen=True)
class Augmentation:
    """Random crop out of the image padded by `pad` zero pixels, and a horizontal flip of every second image."""

    pad: int
    flip: bool


DATASETS = {
    "cifar10": Augmentation(pad=4, flip=True),
    "mnist": Augmentation(pad=2, flip=False),
    "digits": Augmentation(pad=1, flip=False),
    "folder": Augmentation(pad=4, flip=True),
}


class ImageDataset:
    """Batches of one split, resident on the device or streamed by worker processes.

    Args:
        images: the split.
        augmentation: used where an epoch is given.
        mean, std: of each channel, pixels in 0..1.
        device: where batches, and resident pixels, live.
        seed: of the augmentation.
        workers: processes that decode files.
        resident: keep all pixels on the device; otherwise files are decoded each time.
    """

    lengths: Tensor | None = None

    def __init__(
        self,
        images: ImageSplit,
        augmentation: Augmentation,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        seed: int = 0,
        workers: int = 2,
        resident: bool = True,
    ) -> None:
        self.images, self.augmentation, self.device, self.seed, self.workers = (
            images,
            augmentation,
            device,
            seed,
            workers,
        )
        self.pixels: Tensor | None = None
        if resident:
            source = images.pixels if images.pixels is not None else decode_all(images, workers)
            self.pixels = source.to(device)
        self.labels = images.labels.to(device)
        self.mean, self.std = (
            torch.tensor(list(mean), device=device),
            torch.tensor(list(std), device=device),
        )

    def __len__(self) -> int:
        return len(self.labels)

    def batches(
        self, plan: Sequence[Tensor], epoch: int | None = None
    ) -> Generator[tuple[Tensor, Tensor]]:
        """(images (batch, channels, height, width) fp32 in channels_last, labels) for each tensor of row numbers."""
        moves = self.draw(epoch) if epoch is not None else None
        raw = (
            self.resident_batches(plan) if self.pixels is not None else self.streamed_batches(plan)
        )
        for rows, pixels, labels in raw:
            if moves is not None:
                pixels = crop_flip(pixels, moves[rows], self.augmentation.pad)
            yield normalise(pixels, self.mean, self.std), labels

    def draw(self, epoch: int) -> Tensor:
        """(rows, 3) uint8 on the device: vertical and horizontal offset of the crop, and whether to flip."""
        generator = epoch_generator(self.seed + 1, epoch)
        shape, pad = (len(self), 1), self.augmentation.pad
        offsets = torch.randint(2 * pad + 1, (len(self), 2), generator=generator, dtype=torch.uint8)
        flips = torch.randint(2, shape, generator=generator, dtype=torch.uint8) * int(
            self.augmentation.flip
        )
        return torch.cat([offsets, flips], dim=1).to(self.device)

    def resident_batches(self, plan: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(rows, pixels, labels), gathered on the device."""
        assert self.pixels is not None
        for rows in plan:
            rows = rows.to(self.device, non_blocking=True)
            yield rows, self.pixels.index_select(0, rows), self.labels.index_select(0, rows)

    def streamed_batches(self, plan: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(rows, pixels, labels), decoded by worker processes; on a GPU one batch ahead, copied on a side stream."""
        loader = DataLoader(
            DecodedBatches(self.images, plan),
            batch_size=None,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
        )
        if self.device.type != "cuda":
            for rows, pixels in checked(loader):
                yield rows, pixels, self.labels[rows]
            return
        stream, ahead = torch.cuda.Stream(self.device), None
        for rows, pixels in checked(loader):
            with torch.cuda.stream(stream):
                on_device = (
                    rows.to(self.device, non_blocking=True),
                    pixels.to(self.device, non_blocking=True),
                )
            if ahead is not None:
                yield self.arrived(stream, ahead)
            ahead = on_device
        if ahead is not None:
            yield self.arrived(stream, ahead)

    def arrived(
        self, stream: torch.cuda.Stream, batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A batch copied on `stream`, made safe for the current stream."""
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(stream)
        for tensor in batch:
            tensor.record_stream(current)
        rows, pixels = batch
        return rows, pixels, self.labels[rows]


def channel_statistics(images: ImageSplit) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, of pixels in 0..1, over up to 10,000 images spread over the set."""
    rows = torch.linspace(0, len(images) - 1, min(len(images), STATISTICS_ROWS)).long().unique()
    pixels = images.decode(rows).flatten(0, 2)  # (pixels, channels)
    totals = torch.zeros(2, pixels.shape[1], dtype=torch.float64)
    for part in pixels.split(1 << 22):
        values = part.double() / 255
        totals += torch.stack([values.sum(0), values.square().sum(0)])
    mean, square = totals / len(pixels)
    return mean.tolist(), (square - mean.square()).clamp(min=1e-8).sqrt().tolist()


class DecodedBatches(Dataset):
    """Item i is (rows, pixels) of the i-th batch of a plan, or the InputError that stopped it."""

    def __init__(self, images: ImageSplit, plan: Sequence[Tensor]) -> None:
        self.images, self.plan = images, list(plan)

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> Any:
        rows = self.plan[index]
        try:
            return rows, self.images.decode(rows)
        except InputError as error:  # a worker would wrap it in a traceback: hand it over as it is
            return error


def checked(loader: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """The loader's batches; raises the error that a worker handed over."""
    for item in loader:
        if isinstance(item, InputError):
            raise item
        yield item


def decode_all(images: ImageSplit, workers: int) -> Tensor:
    """All files decoded once, in parallel: (rows, height, width, channels) uint8."""
    pixels = torch.empty(len(images), images.size, images.size, images.channels, dtype=torch.uint8)
    plan = torch.arange(len(images)).split(256)
    loader = DataLoader(DecodedBatches(images, plan), batch_size=None, num_workers=workers)
    for rows, part in checked(loader):
        pixels[rows] = part
    return pixels


def fits_in_memory(images: ImageSplit, device: torch.device) -> bool:
    """Whether the split takes less than a quarter of the memory that is free where it would live."""
    if images.pixels is not None and device.type == "cpu":
        return True
    wanted = len(images) * images.size**2 * images.channels
    if device.type == "cuda":
        return wanted < torch.cuda.mem_get_info(device)[0] / 4
    return wanted < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 4


def normalise(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(batch, height, width, channels) uint8 to (batch, channels, height, width) fp32, channels_last: (x / 255 - mean) / std."""
    width = pixels.shape[2]  # whole image rows: broadcasting over a last dimension of 3 is slow
    means, scales = (255 * mean).repeat(width), (1 / (255 * std)).repeat(width)
    rows = (pixels.float().flatten(2) - means).mul_(scales)
    return rows.view(pixels.shape).permute(0, 3, 1, 2)


def crop_flip(pixels: Tensor, moves: Tensor, pad: int) -> Tensor:
    """Shift each image within `pad` zero pixels and mirror some: one gather of whole image rows.

    Args:
        pixels: (batch, height, width, channels) uint8.
        moves: (batch, 3) uint8: offsets 0..2 pad down and right, flip 0 or 1.
        pad: pixels.
    """
    batch, height, width, channels = pixels.shape
    down, right, flip = moves.long().unbind(1)
    padded = F.pad(pixels, (0, 0, pad, pad, pad, pad))
    stride = (width + 2 * pad) * channels  # bytes of a padded image row
    image = torch.arange(batch, device=pixels.device) * (height + 2 * pad)
    first = (image + down) * stride + right * channels
    start = first[:, None] + torch.arange(height, device=pixels.device) * stride  # (batch, height)
    length = width * channels
    every_row = padded.flatten().as_strided(
        (padded.numel() - length + 1, length), (1, 1)
    )  # a row from every byte on
    cropped = every_row.index_select(0, start.flatten()).view(pixels.shape)
    return torch.where(flip.bool()[:, None, None, None], cropped.flip(2), cropped)
