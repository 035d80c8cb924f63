"""resnet50_test.py with a loss that is not finite in ten steps of the first epoch.

python tests/diverging_run.py --dataset digits --arch resnet8 ...    # PYTHONPATH is the repository
"""

from __future__ import annotations

import itertools
import math
import sys

import resnet50_test
from errors import exit_code
from training import losses

FIRST_BAD = 3


class Diverging(losses.CrossEntropy):
    """Cross-entropy whose calls number 3 to 12 return NaN."""

    def __init__(self, *arguments: float) -> None:
        super().__init__(*arguments)
        self.calls = itertools.count()

    def __call__(self, *batch):
        result = super().__call__(*batch)
        is_bad = FIRST_BAD <= next(self.calls) < FIRST_BAD + 10
        return result._replace(loss=result.loss * math.nan) if is_bad else result


if __name__ == "__main__":
    from cli import factory

    factory.CrossEntropy = Diverging
    sys.exit(exit_code(resnet50_test.main))
