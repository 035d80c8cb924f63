"""Comparisons with named peers: `python -m benchmarks.NAME [--quick] [--json FILE]`."""
