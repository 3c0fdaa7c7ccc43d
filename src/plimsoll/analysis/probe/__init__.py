"""Trains with and without a plan, and judges the plan's effect on gradients, loss and speed."""
