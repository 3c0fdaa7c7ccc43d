"""Decides what to keep, recompute, compress and offload under a budget in bytes. No torch in here."""
