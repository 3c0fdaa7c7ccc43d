"""Watches one training step: its ops, its memory, its seconds, the values that autograd saves."""
