"""Measures what exchanging gradients costs, and which method of compression is fastest."""
