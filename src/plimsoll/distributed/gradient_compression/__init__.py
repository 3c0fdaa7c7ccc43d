"""Lets the ranks that train a replicated or sharded model exchange fewer bytes of gradients.

Each rank adds its residual (the part of earlier gradients that it did not send) to its *local* gradient, and compresses the
sum. The result is the mean over ranks of the values that were sent. All ranks get the same bits. A residual belongs to one
parameter on one rank.
"""
