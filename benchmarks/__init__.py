"""Plimsoll beside its peers, measured. ``python -m benchmarks --help``."""
