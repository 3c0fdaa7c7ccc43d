"""Turns a model into one rank's part of it under tensor, sequence, context or expert parallelism."""
