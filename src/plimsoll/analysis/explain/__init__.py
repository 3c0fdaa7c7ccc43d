"""Explains what holds memory at a step's peak, and which changes would lower the peak."""
