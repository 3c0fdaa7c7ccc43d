"""Traces of one model at a few batch sizes and sequences in, the micro-batch and the plan with the most throughput out."""
