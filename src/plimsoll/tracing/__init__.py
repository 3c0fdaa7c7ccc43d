"""Watches one training step: its ops, its memory, its seconds, and the values that autograd saves."""
