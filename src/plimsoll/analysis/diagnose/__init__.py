"""Finds where the time of a training step goes, with a plan and without."""
