"""Lets the ranks that train a replicated or sharded model exchange fewer bytes of gradients.

Each rank adds the residual (what earlier steps did not send) to its *local* gradient and compresses the sum. The result is
the mean over ranks of the values sent, with the same bits on every rank. A residual belongs to one parameter on one rank.
"""
