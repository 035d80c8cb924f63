"""The package faster_training: what it offers, and how it is built."""
