"""Checks a plan, or a model's own checkpointing, against the same step with everything kept."""
