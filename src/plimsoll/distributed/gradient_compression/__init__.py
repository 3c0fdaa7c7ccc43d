"""Lets the ranks that train a replicated or sharded model exchange fewer bytes of gradients.

What is compressed is each rank's *local* gradient, after what earlier steps left unsent (the residual) was added to it; what
comes out is the mean over ranks of what they sent, the same bits on every rank. The residual belongs to a parameter and a rank.
"""
