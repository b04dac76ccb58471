"""Measurements against named peers, as ratios within one run. `python -m benchmarks --help`."""
