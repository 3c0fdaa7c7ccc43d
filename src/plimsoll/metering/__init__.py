"""Ranks that train together in; what their links, steps and ways to send gradients take, by the clock, out."""
