"""Bytes of a message and a number of ranks in, bytes that one rank sends in a ring out.

All-reduce passes every byte twice around the ring, reduce-scatter and all-gather once. Sending and receiving are symmetric, so
these are the bytes that each rank's link carries in each direction; what a library does on other topologies may differ.

Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
"""

from __future__ import annotations


def all_reduce_bytes(message_bytes: int, ranks: int) -> int:
    """Sent by one rank to reduce a message that all have.

    Example:
        >>> all_reduce_bytes(1000, 4)
        1500
    """
    return 2 * message_bytes * (ranks - 1) // ranks


def reduce_scatter_bytes(message_bytes: int, ranks: int) -> int:
    """Sent by one rank to reduce a message of which each rank gets a part; an all-to-all sends as much."""
    return message_bytes * (ranks - 1) // ranks


def all_gather_bytes(part_bytes: int, ranks: int) -> int:
    """Sent by one rank to give its part to all others, and to pass theirs on."""
    return part_bytes * (ranks - 1)
