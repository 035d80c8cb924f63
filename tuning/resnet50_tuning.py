"""Tune resnet50_test.py with --optimizer sgd on a tenth of the training set, five epochs a trial.

python -m tuning.resnet50_tuning --trials 40 --jobs 4     # all flags: see tuning/sweep.py
"""

import sys

from errors import exit_code
from tuning import check_optuna


def main() -> None:
    """Run the sweep with these defaults; flags of the command line override them."""
    check_optuna()
    from tuning import sweep  # imports Optuna

    sweep.main(
        script="resnet50_test.py",
        script_arguments=("--subset", "0.1", "--epoch", "5"),
        optimizer="sgd",
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
