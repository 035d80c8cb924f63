"""A small network for processes of which one is slow, wherever they run: what balance gains.

NGPU=4 bash run_distributed.sh resnet50_test.py --arch benchmarks.slow_worker:build --dataset digits

A process takes a millisecond for each sample that it trains on, the one of the highest rank more:
it sleeps, so that processes that share cores do not slow each other down.
"""

import os
import time

from torch import Tensor, nn

from models.resnet import create_resnet


class Sleeping(nn.Module):
    """A network whose forward pass takes some seconds for each sample of training."""

    def __init__(self, network: nn.Module, seconds: float) -> None:
        super().__init__()
        self.network, self.seconds = network, seconds

    def forward(self, images: Tensor) -> Tensor:
        time.sleep(self.seconds * len(images) * self.training)
        return self.network(images)


def build(classes: int, channels: int, image_size: int, slowness: float = 2.0) -> nn.Module:
    """Make a ResNet-8.

    Args:
        slowness: how many times as long as in others a sample takes in the process that is slow.
    """
    is_slow = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1
    network = create_resnet("resnet8", classes=classes, channels=channels, image_size=image_size)
    return Sleeping(network, 1e-3 * (slowness if is_slow else 1.0))
