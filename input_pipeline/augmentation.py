"""What happens to training images: crops, flips, policies of torchvision, and smaller sizes.

    augmentation = Augmentation(pad=4, flip=True, policy="trivial", erasing=0.25)
    pixels = augmentation.crop(pixels, offsets, flips)      # of many images, on their device

Crops by some pixels and flips are drawn for all rows of an epoch, and done to many images at once.
The other changes are torchvision.transforms.v2, done to one image after the other by the worker
that reads it. All of them are functions of (seed, epoch, row).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from input_pipeline.sampler import epoch_generator

LARGEST_PAD = 127  # pixels; the offset of a crop is kept in a byte
MOST_SMALL_STAGES = 4  # a model is compiled for each size of images, and torch limits how often
POLICIES = ("trivial", "rand", "auto")
# Of the area, and of width to height, of a part that is cut out, as in the paper.
SHARES, RATIOS = [0.08, 1.0], [3 / 4, 4 / 3]


@dataclass(frozen=True)
class Augmentation:
    """Random changes of training images, and smaller images in the first epochs."""

    pad: int  # pixels added to each side of an image, out of which its own size is cropped
    flip: bool  # whether to mirror each image horizontally with probability 1/2
    # What `pad` adds, 'black' or the image's own, reflected at its edges ('reflect').
    fill: str = "black"
    # Mirror a random half of the images in even epochs and the other half in odd ones, so that two
    # epochs show each image both ways (arXiv:2404.00498, section 3.6).
    alternate: bool = False
    # Cut a part of random size and shape out of each image, and scale it (arXiv:1409.4842).
    resized: bool = False
    # A name of `POLICIES`: TrivialAugment (arXiv:2103.10158), RandAugment (arXiv:1909.13719) or
    # AutoAugment (arXiv:1805.09501); '' is none.
    policy: str = ""
    learned_on: str = "cifar10"  # of AutoAugment's policies: 'cifar10', 'imagenet' or 'svhn'
    # Brightness, contrast and saturation are multiplied by 1 - jitter to 1 + jitter.
    jitter: float = 0.0
    # Probability that a rectangle gets the mean colour (arXiv:1708.04896).
    erasing: float = 0.0
    small_epochs: int = 0  # number of first epochs, in which images are scaled down
    small_size: int = 24  # side of these images in the first stage, in pixels
    # Number of stages of these epochs. From stage to stage the side grows evenly; after the last
    # stage images have their own size. Where there are more stages than epochs, some are left out.
    small_stages: int = 1

    def __post_init__(self) -> None:
        if self.fill not in ("black", "reflect"):
            raise ValueError(f"fill={self.fill} must be black or reflect")
        if not (isinstance(self.pad, int) and 0 <= self.pad <= LARGEST_PAD):
            raise ValueError(f"pad={self.pad} must be a whole number up to {LARGEST_PAD}")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter={self.jitter} must be from 0 to 1")
        if self.small_size < 1 or not 1 <= self.small_stages <= MOST_SMALL_STAGES:
            raise ValueError(
                f"small_size={self.small_size} must be at least 1, and "
                f"small_stages={self.small_stages} from 1 to {MOST_SMALL_STAGES}"
            )
        if self.small_epochs % 1:
            raise ValueError(f"small_epochs={self.small_epochs} must be whole, or below 1")

    @property
    def by_row(self) -> bool:
        """Whether images are changed one after the other, by workers: see `RowChanges`."""
        return bool(self.resized or self.policy or self.jitter or self.erasing)

    def crop(self, pixels: Tensor, offsets: Tensor, flips: Tensor) -> Tensor:
        """Crop each image out of its padded self or that one's mirror image, by a gather of rows.

        Args:
            pixels: (batch, height, width, channels) uint8, larger than `pad` if it is reflected.
            offsets: (batch, 2) uint8, place of the crop from the top and the left, in 0..2 pad.
            flips: (batch,) uint8, 1 where the image is mirrored horizontally.
        Returns:
            (batch, height, width, channels) uint8.
        """
        pad, (batch, height, width, channels) = self.pad, pixels.shape
        if self.fill == "reflect":
            rows, columns = (
                last - (last - torch.arange(-pad, last + pad + 1, device=pixels.device).abs()).abs()
                for last in (height - 1, width - 1)
            )
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
        starts = first_byte[:, None] + row_offsets  # (batch, height), first byte of each row
        row_bytes = width * channels
        # A view whose i-th entry is the `row_bytes` bytes that start at byte i.
        windows = both.flatten().as_strided((both.numel() - row_bytes + 1, row_bytes), (1, 1))
        return windows.index_select(0, starts.flatten()).view(pixels.shape)

    def check_size(self, size: int) -> None:
        """Raise ValueError where images of `size` pixels a side are too small for the settings."""
        if self.fill == "reflect" and not 0 < self.pad < size:
            raise ValueError(f"fill=reflect: pad={self.pad} must be from 1 to {size - 1}")
        if self.small_epochs and self.small_size > size:
            raise ValueError(f"small_size={self.small_size} must be at most {size}")

    def size_of_epoch(self, epoch: int, full_size: int) -> int:
        """Return the pixels a side that training images of `full_size` have in an epoch, from 0."""
        if epoch >= self.small_epochs:
            return full_size
        stage = epoch * self.small_stages // self.small_epochs
        return self.small_size + (full_size - self.small_size) * stage // self.small_stages


AUGMENTATIONS = {
    "cifar10": Augmentation(pad=4, flip=True),
    "mnist": Augmentation(pad=2, flip=False, learned_on="svhn"),
    "digits": Augmentation(pad=1, flip=False, learned_on="svhn"),
    "folder": Augmentation(pad=4, flip=True),
}
"""The standard augmentation of each data set, by the name of --dataset."""


@lru_cache(maxsize=2)
def draw_crops(
    augmentation: Augmentation, rows: int, *, seed: int, epoch: int
) -> tuple[Tensor, Tensor]:
    """Draw the crop offsets and flips of all rows for one epoch.

    Returns:
        offsets: (rows, 2) uint8, vertical and horizontal, in 0..2 pad.
        flips: (rows,) uint8, 1 where the image is mirrored.
    """
    generator = epoch_generator(seed + 1, epoch)
    num_offsets = 2 * augmentation.pad + 1
    offsets = torch.randint(num_offsets, (rows, 2), generator=generator, dtype=torch.uint8)
    flips = torch.randint(2, (rows,), generator=generator, dtype=torch.uint8)
    if augmentation.alternate:
        first = epoch_generator(seed + 2, 0)
        flips = torch.randint(2, (rows,), generator=first, dtype=torch.uint8) ^ epoch % 2
    if not augmentation.flip:
        flips.zero_()
    return offsets, flips


@dataclass(frozen=True)
class RowChanges:
    """The random changes of training images in an epoch, for the workers that read them."""

    augmentation: Augmentation  # which changes
    num_rows: int  # of the training set
    seed: int  # of this and the next: on which random numbers depend, beside the row
    epoch: int
    erased: Sequence[int]  # colour of an erased rectangle, (channels,) in 0..255

    def read(self, row: int, read_image: Callable[..., Image.Image]) -> Image.Image:
        """Read and change the image of a row; torch's own generator stays as it was.

        Args:
            read_image: called with None, or with a function of the image that draws the (left, top,
                right, bottom) of the part to be read.
        """
        if not self.augmentation.by_row:
            return self._crop(row, read_image(None))
        seed = np.random.SeedSequence((self.seed, self.epoch, row)).generate_state(1)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(seed[0]))
            image = read_image(self._draw_part if self.augmentation.resized else None)
            image = self._crop(row, image)
            for transform in self._transforms:
                image = transform(image)
        return image

    def _crop(self, row: int, image: Image.Image) -> Image.Image:
        """Crop and flip an image as `Augmentation.crop` does."""
        crops = draw_crops(self.augmentation, self.num_rows, seed=self.seed, epoch=self.epoch)
        pixels = torch.from_numpy(np.array(image))
        batch = pixels.view(1, *pixels.shape[:2], -1)
        changed = self.augmentation.crop(batch, *(each[row : row + 1] for each in crops))
        return Image.fromarray(changed.view(pixels.shape).numpy())

    def _draw_part(self, image: Image.Image) -> tuple[int, int, int, int]:
        from torchvision.transforms import v2

        top, left, height, width = v2.RandomResizedCrop.get_params(image, SHARES, RATIOS)
        return left, top, left + width, top + height

    @cached_property
    def _transforms(self) -> Sequence[Callable[[Image.Image], Image.Image]]:
        from torchvision.transforms import v2  # takes a second: imported where it is used

        policies = {
            "trivial": v2.TrivialAugmentWide,
            "rand": v2.RandAugment,
            "auto": partial(v2.AutoAugment, v2.AutoAugmentPolicy(self.augmentation.learned_on)),
        }
        transforms = [policies[policy]()] if (policy := self.augmentation.policy) else []
        if jitter := self.augmentation.jitter:
            transforms.append(v2.ColorJitter(jitter, jitter, jitter))
        if probability := self.augmentation.erasing:
            erasing = v2.RandomErasing(probability, value=list(self.erased))
            transforms.append(v2.Compose([v2.PILToTensor(), erasing, v2.ToPILImage()]))
        return transforms


def scale_down(images: Tensor, size: int) -> Tensor:
    """Return (batch, channels, height, width) images with `size` pixels a side, smoothed before."""
    return F.interpolate(images, size=(size, size), mode="bilinear", antialias=True)
