"""Defaults of the sweep of resnet50_test.py: a tenth of the training set, five epochs. See sweep.py."""

import sys

from tuning import sweep

if __name__ == "__main__":
    sys.exit(
        sweep.errors.exit_code(
            lambda: sweep.main(script="resnet50_test.py", words=["--subset", "0.1", "--epoch", "5"])
        )
    )
