"""Several views of each test image, whose outputs are averaged (test-time augmentation).

    model = AveragedViews(model, 6)
    logits = model(images)          # (batch, classes), of (batch, channels, height, width)

The six views and their weights are those of arXiv:2404.00498, section 3.1.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VIEWS = {"none": 1, "mirror": 2, "mirror_shift": 6}  # of a test image, by name
SHIFT = 1  # pixels


class AveragedViews(nn.Module):
    """Averages a model's outputs over views of each image.

    Args:
        model: maps images to logits.
        views: 1 is the image alone; 2 adds its mirror image; 6 adds both of these shifted by one
            pixel up and left, and down and right, edges reflected, which weigh half as much.
    """

    def __init__(self, model: nn.Module, views: int) -> None:
        super().__init__()
        self.model = model
        self.views = views

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, channels, height, width) to logits (batch, classes)."""
        if self.views == 1:
            return self.model(images)
        centre = self._with_mirror(images)
        if self.views == 2:
            return centre
        height, width = images.shape[2:]
        padded = F.pad(images, (SHIFT,) * 4, mode="reflect")
        shifted = [
            self._with_mirror(padded[:, :, start : start + height, start : start + width])
            for start in (0, 2 * SHIFT)
        ]
        return (centre + sum(shifted) / 2) / 2

    def _with_mirror(self, images: Tensor) -> Tensor:
        logits, mirrored = self.model(images), self.model(images.flip(3))
        return (logits.to(torch.promote_types(logits.dtype, torch.float32)) + mirrored) / 2
