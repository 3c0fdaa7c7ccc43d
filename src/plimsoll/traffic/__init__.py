"""Measured links, steps and methods in; what a data-parallel step takes with each, and what pays, out. No torch."""
