"""A replicated or sharded model in, the same model whose ranks exchange fewer bytes of gradients out.

What is compressed is each rank's *local* gradient, after what earlier steps left unsent (the residual) was added to it; what
comes out is the mean over ranks of what they sent, the same bits on every rank. The residual belongs to a parameter and a rank.
"""
