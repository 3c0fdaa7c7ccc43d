"""Splits the time that a plan adds to a training step into causes, from profiles without and with the plan."""
