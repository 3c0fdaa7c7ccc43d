"""Estimates the memory and speed of a whole training job before it runs: estimate and fit."""
