"""Measures what the exchange of gradients costs a step, and which method of gradient compression is fastest."""
