"""ResNets for small images (He et al., arXiv:1512.03385).

    model = create_resnet("resnet50", classes=10, channels=3, image_size=32)

resnet18, 34, 50, 101 and 152 have the parameter names of torchvision, and up to 64 pixels a 3x3
stem without max-pooling; resnet8, 20, 32, 44, 56 and 110 are the 6n + 2 family of section 4.2 of
the paper.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from models.residual import ResidualBlock

STAGES = {  # kind of block, and number of blocks in each stage
    "resnet18": ("basic", [2, 2, 2, 2]),
    "resnet34": ("basic", [3, 4, 6, 3]),
    "resnet50": ("bottleneck", [3, 4, 6, 3]),
    "resnet101": ("bottleneck", [3, 4, 23, 3]),
    "resnet152": ("bottleneck", [3, 8, 36, 3]),
    **{f"resnet{6 * n + 2}": ("basic", [n, n, n]) for n in (1, 3, 5, 7, 9, 18)},
}
SMALL_IMAGE = 64  # pixels: up to this size the stem does not shrink the image


# -------------------------------------------------------------------- blocks


def apply_conv_norm(x: Tensor, conv: nn.Module, *, norm: nn.Module, relu: bool = False) -> Tensor:
    """Compute relu(norm(conv(x))), or norm(conv(x)) without `relu`."""
    y = norm(conv(x))
    return F.relu(y, inplace=True) if relu else y


class ConvNormModule(nn.Module):
    """A module in which every convolution is followed by the normalisation that is registered next.

    Attributes:
        conv_norm: how the two are computed, with the signature of `apply_conv_norm`; fusion.py has
            a function that needs less memory.
    """

    conv_norm: Callable[..., Tensor] = staticmethod(apply_conv_norm)


def conv(inputs: int, outputs: int, *, size: int, stride: int = 1) -> nn.Conv2d:
    """Create a convolution without bias that keeps height and width at stride 1."""
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class BasicBlock(ResidualBlock, ConvNormModule):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(inputs, width, size=3, stride=stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, size=3)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(inputs, width * self.expansion, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv_norm(x, self.conv1, norm=self.bn1, relu=True)
        y = self.conv_norm(y, self.conv2, norm=self.bn2)
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(ResidualBlock, ConvNormModule):
    """Convolutions 1x1, 3x3 and 1x1 and a shortcut; the last has four times the width.

    The 3x3 convolution has the stride, as in torchvision.
    """

    expansion = 4

    def __init__(self, inputs: int, width: int, *, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = conv(inputs, width, size=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, size=3, stride=stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = conv(width, outputs, size=1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(inputs, outputs, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv_norm(x, self.conv1, norm=self.bn1, relu=True)
        y = self.conv_norm(y, self.conv2, norm=self.bn2, relu=True)
        y = self.conv_norm(y, self.conv3, norm=self.bn3)
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class Projection(nn.Sequential, ConvNormModule):
    """A 1x1 convolution and a normalisation."""

    def forward(self, x: Tensor) -> Tensor:
        return self.conv_norm(x, self[0], norm=self[1])


def shortcut(inputs: int, outputs: int, *, stride: int) -> nn.Module | None:
    """Create a projection (option B of the paper) where the shape changes; None is the identity."""
    if stride == 1 and inputs == outputs:
        return None
    return Projection(conv(inputs, outputs, size=1, stride=stride), nn.BatchNorm2d(outputs))


# -------------------------------------------------------------------- networks


class ResNet(ConvNormModule):
    """Residual network for classification.

    Args:
        block: `BasicBlock` or `Bottleneck`.
        stages: blocks in each stage; the first keeps the resolution, each later one halves it.
        classes: number of outputs.
        channels: number of input channels.
        width: channels of the first stage: 64, or 16 in the 6n + 2 family.
        small_stem: 3x3 stem at stride 1 instead of 7x7 at stride 2 and max-pooling.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        stages: list[int],
        *,
        classes: int,
        channels: int = 3,
        width: int = 64,
        small_stem: bool = True,
    ) -> None:
        super().__init__()
        size, stride = (3, 1) if small_stem else (7, 2)
        self.conv1 = conv(channels, width, size=size, stride=stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.Identity() if small_stem else nn.MaxPool2d(3, stride=2, padding=1)
        inputs, self.stages = width, len(stages)
        for stage, blocks in enumerate(stages):
            outputs, layer = width * 2**stage, nn.Sequential()
            for index in range(blocks):
                stride = 2 if stage and index == 0 else 1
                layer.append(block(inputs, outputs, stride=stride))
                inputs = outputs * block.expansion
            self.add_module(f"layer{stage + 1}", layer)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, channels, height, width) to logits (batch, classes)."""
        x = self.maxpool(self.conv_norm(x, self.conv1, norm=self.bn1, relu=True))
        for number in range(1, self.stages + 1):
            x = getattr(self, f"layer{number}")(x)
        return self.fc(self.avgpool(x).flatten(1))


def create_resnet(arch: str, *, classes: int, channels: int, image_size: int) -> ResNet:
    """Create the ResNet of a key of `STAGES`, as `image_models.create_model` does."""
    kind, stages = STAGES[arch]
    is_family = len(stages) == 3  # 6n + 2
    return ResNet(
        BasicBlock if kind == "basic" else Bottleneck,
        stages,
        classes=classes,
        channels=channels,
        width=16 if is_family else 64,
        small_stem=is_family or image_size <= SMALL_IMAGE,
    )
