"""Trains with and without a plan and judges what the plan does to gradients, loss and speed."""
