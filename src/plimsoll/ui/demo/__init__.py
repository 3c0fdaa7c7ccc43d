"""Trains a small Llama on real text with and without a memory budget, through the public interface."""
