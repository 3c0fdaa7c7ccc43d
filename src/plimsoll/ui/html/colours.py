"""Names of categories and decisions in, colours out: told apart by colour-blind readers, on white and on black.

Source: Okabe and Ito (2008), "Color Universal Design", without their yellow and black, which vanish on one of both grounds.
"""

from __future__ import annotations

from plimsoll.artifacts.decision import Decision

BLUE = "#0072b2"
SKY = "#56b4e9"
GREEN = "#009e73"
ORANGE = "#e69f00"
VERMILION = "#d55e00"
PINK = "#cc79a7"
GREY = "#8a9099"
LINE = "#3a8fd0"
"""The blue of thin lines, which need more contrast on black than areas do."""

CATEGORIES = {
    "parameter": BLUE,
    "optimizer state": SKY,
    "buffer": GREY,
    "input": PINK,
    "gradient": GREEN,
    "activation": ORANGE,
    "temporary": VERMILION,
    "communication": LINE,
}
"""torch's memory categories, what stays longest first: the order in which they are stacked."""

DECISIONS = {
    Decision.KEEP: GREY,
    Decision.RECOMPUTE: "#4a9bd9",
    Decision.COMPRESS: ORANGE,
    Decision.OFFLOAD: GREEN,
}
"""Light enough for black letters on them."""


def category_order(names: set[str]) -> list[str]:
    """Known categories in their order of stacking, then others by name."""
    return [*(name for name in CATEGORIES if name in names), *sorted(names - CATEGORIES.keys())]


def category_colour(name: str) -> str:
    """The category's colour; one for all that are not known."""
    return CATEGORIES.get(name, PINK)
