"""Hyper-parameter search on a fraction of the training data: `bash tuning/resnet50_tuning.sh`."""

from __future__ import annotations

import importlib.util

from errors import InputError


def check_optuna() -> None:
    """Refuse a sweep where its library is not installed.

    Raises:
        InputError: Optuna is missing.
    """
    if importlib.util.find_spec("optuna") is None:
        raise InputError("a sweep needs Optuna: pip install 'optuna>=4'")
