"""Comparisons with named peers, both sides interleaved in one run: `python -m benchmarks.NAME [--quick]`."""
