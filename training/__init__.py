"""The training loop, and what it stands on: checkpoints, evaluation, recovery, the run's log."""
