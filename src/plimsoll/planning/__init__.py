"""Decides what to keep, recompute, compress and offload under a budget in bytes. Does not import torch."""
