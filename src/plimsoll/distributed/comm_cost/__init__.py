"""Measures the cost of exchanging gradients, and judges whether compressing them saves time."""
