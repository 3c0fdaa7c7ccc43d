"""Measures what exchanging gradients costs, and judges whether compressing them pays."""
