"""ResNets for small images (He et al., arXiv:1512.03385), with torchvision's parameter names, and any torchvision model.

    model = build_model("resnet50", classes=10, channels=3, image_size=32)

resnet18, 34, 50, 101, 152 take a 3x3 stem without max-pooling below 65 pixels; resnet8, 20, 32, 44, 56, 110 are the 6n+2
family of section 4.2 of the paper. Every other name is looked up in torchvision.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from errors import InputError

STAGES = {
    "resnet18": ("basic", [2, 2, 2, 2]),
    "resnet34": ("basic", [3, 4, 6, 3]),
    "resnet50": ("bottleneck", [3, 4, 6, 3]),
    "resnet101": ("bottleneck", [3, 4, 23, 3]),
    "resnet152": ("bottleneck", [3, 8, 36, 3]),
    **{f"resnet{6 * n + 2}": ("basic", [n, n, n]) for n in (1, 3, 5, 7, 9, 18)},
}
SMALL_IMAGE = 64  # pixels: up to here the stem does not shrink the image


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Convolution without bias that keeps height and width at stride 1."""
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def in_turn(x: Tensor, conv: nn.Module, norm: nn.Module, relu: bool = False) -> Tensor:
    """relu(norm(conv(x)))."""
    y = norm(conv(x))
    return F.relu(y, inplace=True) if relu else y


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    residual, expansion = True, 1
    join = staticmethod(
        in_turn
    )  # how convolution, normalisation and activation are computed; fusion.py has another way

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(inputs, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.join(x, self.conv1, self.bn1, relu=True)
        y = self.join(y, self.conv2, self.bn2)
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride, as in torchvision), 1x1 to four times the width, and a shortcut."""

    residual, expansion = True, 4
    join = staticmethod(in_turn)

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, width * 4, 1), nn.BatchNorm2d(width * 4)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(inputs, width * 4, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.join(x, self.conv1, self.bn1, relu=True)
        y = self.join(y, self.conv2, self.bn2, relu=True)
        y = self.join(y, self.conv3, self.bn3)
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class Projection(nn.Sequential):
    """1x1 convolution and normalisation."""

    join = staticmethod(in_turn)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(x, self[0], self[1])


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module | None:
    """Projection (option B of the paper) where the shape changes, else None for the identity."""
    if stride == 1 and inputs == outputs:
        return None
    return Projection(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """Residual network.

    Args:
        block: `BasicBlock` or `Bottleneck`.
        stages: blocks in each stage; the first stage keeps the resolution, each later one halves it.
        classes, channels: of the output and the input.
        width: channels of the first stage: 64, or 16 in the 6n+2 family.
        small_stem: 3x3 stem at stride 1 instead of 7x7 at stride 2 and max-pooling.
    """

    join = staticmethod(in_turn)

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        stages: list[int],
        classes: int,
        channels: int = 3,
        width: int = 64,
        small_stem: bool = True,
    ) -> None:
        super().__init__()
        self.conv1 = conv(channels, width, 3) if small_stem else conv(channels, width, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.Identity() if small_stem else nn.MaxPool2d(3, stride=2, padding=1)
        inputs, layers = width, []
        for stage, blocks in enumerate(stages):
            outputs = width * 2**stage
            layers.append(nn.Sequential())
            for index in range(blocks):
                layers[-1].append(block(inputs, outputs, stride=2 if stage and index == 0 else 1))
                inputs = outputs * block.expansion
        self.stages = len(layers)
        for number, layer in enumerate(layers, 1):
            self.add_module(f"layer{number}", layer)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, channels, height, width) -> logits (batch, classes)."""
        x = self.maxpool(self.join(x, self.conv1, self.bn1, relu=True))
        for number in range(1, self.stages + 1):
            x = getattr(self, f"layer{number}")(x)
        return self.fc(self.avgpool(x).flatten(1))


def create_model(arch: str, classes: int, channels: int, image_size: int) -> nn.Module:
    """The model of that name for `image_size` x `image_size` images.

    Raises:
        InputError: no such model, or it cannot take images of that size.
    """
    if arch in STAGES:
        kind, stages = STAGES[arch]
        family = len(stages) == 3
        return ResNet(
            BasicBlock if kind == "basic" else Bottleneck,
            stages,
            classes,
            channels,
            width=16 if family else 64,
            small_stem=family or image_size <= SMALL_IMAGE,
        )
    from torchvision import models  # only for a model that is not ours

    known = models.list_models(module=models)
    if arch not in known:
        raise InputError(
            f"--arch {arch}: unknown model; choose one of {', '.join(STAGES)} or a torchvision model such as swin_t"
        )
    options = {"aux_logits": False} if arch in ("googlenet", "inception_v3") else {}
    model = models.get_model(arch, weights=None, num_classes=classes, **options)
    wrapped = model if channels == 3 else nn.Sequential(GreyToColour(), model)
    try:
        with torch.no_grad():
            wrapped.eval()(torch.zeros(2, channels, image_size, image_size))
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"--arch {arch} cannot take {image_size}x{image_size} images ({str(error).splitlines()[0]}); try --image_size 64 or 224"
        ) from None
    return wrapped.train()


class GreyToColour(nn.Module):
    """Repeats one channel three times, for torchvision's models."""

    def forward(self, x: Tensor) -> Tensor:
        return x.expand(-1, 3, -1, -1)
