"""Searches for the micro-batch, sequence and plan with the highest throughput under a budget."""
