"""The methods of gradient compression by name, and the settings that a caller chooses."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from plimsoll.errors import InvalidOption
from plimsoll.units import check_count

Kind = Literal["none", "powersgd", "topk"]
_FORMS = '"none", "powersgd:RANK" (powersgd:4), "topk:SHARE" (topk:1%)'


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """Data: a method of gradient compression with its parameter.

    Attributes:
        rank: columns of each factor of ``powersgd``; 0 for other methods.
        share: the share of elements that ``topk`` sends, above 0 and at most 1; 0 for other methods.
    """

    kind: Kind
    rank: int = 0
    share: float = 0.0

    def __str__(self) -> str:
        if self.kind == "powersgd":
            return f"powersgd:{self.rank}"
        return f"topk:{self.share * 100:g}%" if self.kind == "topk" else "none"

    def elements_sent(self, elements: int) -> int:
        """Return how many of ``elements`` elements ``topk`` sends: at least one."""
        return min(elements, max(1, round(self.share * elements)))


def parse_method(text: str) -> Method:
    """Read the name and the parameter of a method of gradient compression, and return the method.

    Args:
        text: ``"none"``, ``"powersgd:4"``, ``"topk:1%"``, ``"topk:0.01"``.

    Raises:
        InvalidOption: the method does not exist, or its parameter is not valid.

    Example:
        >>> parse_method("topk:1%").share
        0.01
        >>> str(parse_method("PowerSGD:4"))
        'powersgd:4'
    """
    if not isinstance(text, str):  # str(None) would mean no compression
        raise InvalidOption(
            f"{text!r} is not a method of gradient compression.",
            why=f"a method is a text; the methods are {_FORMS}",
            next='pass for example "powersgd:4"',
        )
    name, colon, parameter = text.strip().lower().partition(":")
    if name == "none" and not colon:
        return Method(kind="none")
    if name == "powersgd":
        if not re.fullmatch(r"[0-9]+", parameter) or int(parameter) < 1:
            raise InvalidOption(
                f"{text!r}: the rank is {parameter or 'missing'}.",
                why="the rank is a whole number of at least 1",
                next='write it after the colon, as in "powersgd:4"',
            )
        return Method(kind="powersgd", rank=int(parameter))
    if name == "topk":
        return Method(kind="topk", share=_share(text, parameter))
    raise InvalidOption(
        f"{text!r} is not a method of gradient compression.",
        why=f"the methods are {_FORMS}",
        next="choose one of them",
    )


def _share(text: str, parameter: str) -> float:
    number = re.fullmatch(r"([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)(%?)", parameter)
    share = float(number.group(1)) / (100 if number.group(2) else 1) if number else None
    if share is None or not 0 < share <= 1:
        raise InvalidOption(
            f"{text!r}: the share of elements is {parameter or 'missing'}.",
            why="it lies above 0% and is at most 100%; a number without a sign is a fraction (0.01 is 1%)",
            next='write it after the colon, as in "topk:1%"',
        )
    return share


EXCLUDED = ("*norm*", "*bias*", "*embed*", "*lm_head*")
"""Patterns of the parameters that are not compressed by default.

Norms and biases are small. In an embedding, only a few rows have a gradient in one step.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionSettings:
    """Data: the caller's settings, with the meanings that ``compress_gradients`` describes."""

    method: Method
    exclude: tuple[str, ...] = EXCLUDED
    momentum: float = 0.0
    warmup_steps: int = 0
    seed: int = 0
    min_ratio: float = 1.5
    min_elements: int = 1024

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "min_elements", "seed"):
            check_count(name, getattr(self, name), least=0)
        if not 0 <= self.momentum < 1:
            raise InvalidOption(
                f"momentum={self.momentum:g}.", why="it is a decay below 1", next="0 is none, 0.9 is usual"
            )
        if not 0 <= self.min_ratio < math.inf:
            raise InvalidOption(
                f"min_ratio={self.min_ratio:g}.",
                why="compression has to divide a parameter's bytes by at least this number",
                next="1.5 asks for two thirds of the bytes, 0 takes everything",
            )
        if self.momentum and self.method.kind != "topk":
            raise InvalidOption(
                f"momentum={self.momentum:g} with {str(self.method)!r}.",
                why="momentum correction is for elements that wait for many steps, as those of topk do",
                next='leave momentum= out and keep the momentum of the optimizer, or choose "topk"',
            )

    def as_text(self) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks and in a saved state, by name."""
        return {**asdict(self), "method": str(self.method), "exclude": list(self.exclude)}
