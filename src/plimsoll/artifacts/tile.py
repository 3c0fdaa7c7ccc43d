"""A tile decision: a module call runs in several parts (tiles), each with some of the rows."""

from __future__ import annotations

import msgspec


class Tile(msgspec.Struct, frozen=True, kw_only=True):
    """Data: a decision that all calls of the module ``path`` run in ``count`` parts (tiles), each with some of the rows.

    ``inputs`` maps the place of each argument that has rows (a position or a keyword, as text) to the dimension of its rows,
    and ``outputs`` has the dimension of the rows in each returned tensor. ``rows`` is the number of rows in the planned step.
    If ``is_random``, the call draws random numbers (dropout), and each tile draws the same numbers again in backward.
    """

    path: str
    count: int
    rows: int
    inputs: dict[str, int]
    outputs: tuple[int, ...]
    is_random: bool = False

    @property
    def rows_per_tile(self) -> int:
        """How many rows a tile has in the planned step; the last tile may have fewer.

        Example:
            >>> Tile(path="mlp", count=8, rows=100, inputs={"0": 1}, outputs=(1,)).rows_per_tile
            13
        """
        return -(-self.rows // self.count)
