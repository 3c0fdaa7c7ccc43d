"""The names of methods of gradient compression, and the caller's settings."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from plimsoll.errors import InvalidOption

Kind = Literal["none", "powersgd", "topk", "randomk", "sign", "int8"]

SIGN_BLOCK = 1024
INT8_BLOCK = 256
_FORMS = (
    '"none", "powersgd:RANK" (powersgd:4), "topk:SHARE" (topk:1%), "randomk:SHARE" (randomk:1%), '
    '"sign" or "sign:BLOCK" (sign:1024), "int8" or "int8:BLOCK" (int8:256)'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method of gradient compression; only the field for its kind is set.

    Attributes:
        rank: columns of each factor of ``powersgd``.
        share: the share of elements that ``topk`` and ``randomk`` send, above 0 and at most 1.
        block: elements that share one scale, for ``sign`` and ``int8``.
    """

    kind: Kind
    rank: int = 0
    share: float = 0.0
    block: int = 0

    def __str__(self) -> str:
        if self.kind == "powersgd":
            return f"powersgd:{self.rank}"
        if self.kind in ("topk", "randomk"):
            return f"{self.kind}:{self.share * 100:g}%"
        return f"{self.kind}:{self.block}" if self.block else self.kind

    @property
    def is_sparse(self) -> bool:
        """True if it sends some elements unchanged and omits the others."""
        return self.kind in ("topk", "randomk")

    def elements_sent(self, elements: int) -> int:
        """The number of elements that ``topk`` and ``randomk`` send of ``elements``: at least one."""
        return min(elements, max(1, round(self.share * elements)))


def parse_method(text: str) -> Method:
    """Parse a method's name and parameter.

    Args:
        text: ``"none"``, ``"powersgd:4"``, ``"topk:1%"``, ``"randomk:0.01"``, ``"sign"``, ``"int8:256"``.

    Raises:
        InvalidOption: the method does not exist, or its parameter is not valid.

    Example:
        >>> parse_method("topk:1%").share
        0.01
        >>> str(parse_method("sign"))
        'sign:1024'
    """
    name, colon, parameter = str(text).strip().lower().partition(":")
    if name == "none" and not colon:
        return Method(kind="none")
    if name == "powersgd":
        return Method(kind="powersgd", rank=_whole(text, parameter, "the rank"))
    if name == "topk":
        return Method(kind="topk", share=_share(text, parameter))
    if name == "randomk":
        return Method(kind="randomk", share=_share(text, parameter))
    if name == "sign":
        return Method(kind="sign", block=_whole(text, parameter, "the block") if colon else SIGN_BLOCK)
    if name == "int8":
        return Method(kind="int8", block=_whole(text, parameter, "the block") if colon else INT8_BLOCK)
    raise InvalidOption(
        f"{text!r} is no method of gradient compression.",
        why=f"the methods are {_FORMS}",
        next="choose one of them",
    )


def _whole(text: str, parameter: str, what: str) -> int:
    if not re.fullmatch(r"[0-9]+", parameter) or int(parameter) < 1:
        raise InvalidOption(
            f"{text!r}: {what} is {parameter or 'missing'}.",
            why=f"{what} is a whole number of at least 1",
            next=f"write it after the colon, as in {_FORMS}",
        )
    return int(parameter)


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
"""Not compressed by default: norms and biases are small, and few rows of an embedding have a gradient in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionSettings:
    """The settings of gradient compression.

    Attributes:
        method: how a parameter's gradient is compressed.
        exclude: patterns (``fnmatch``) of names of parameters that are not compressed.
        momentum: decay of the momentum before compression; 0 for none.
        warmup_steps: a parameter's number of uncompressed reductions at the start.
        seed: seed of random places and of the first factors of ``powersgd``.
        min_ratio: compress a parameter if this divides its bytes by at least this number.
        min_elements: do not compress a parameter with fewer elements.
    """

    method: Method
    exclude: tuple[str, ...] = EXCLUDED
    momentum: float = 0.0
    warmup_steps: int = 0
    seed: int = 0
    min_ratio: float = 1.5
    min_elements: int = 1024

    def __post_init__(self) -> None:
        _check_between("momentum", self.momentum, 0.0, 1.0, "it is a decay: 0 is none, 0.9 is usual")
        _check_between(
            "min_ratio", self.min_ratio, 0.0, math.inf, "1.5 asks for two thirds of the bytes, 0 takes everything"
        )
        for name, value in (("warmup_steps", self.warmup_steps), ("min_elements", self.min_elements)):
            _check_whole(name, value, 2**63, "it is a count; 0 is none")
        _check_whole("seed", self.seed, 2**63, "it is a number that all ranks share")
        if self.momentum and not self.method.is_sparse:
            raise InvalidOption(
                f"momentum={self.momentum:g} with {str(self.method)!r}.",
                why="momentum correction is about elements that wait for many steps, as those of topk and randomk do",
                next='leave momentum= out and keep the momentum of the optimizer, or choose "topk" or "randomk"',
            )

    def as_text(self) -> dict[str, Any]:
        """Everything that must be equal on all ranks and in a saved state."""
        return {**asdict(self), "method": str(self.method), "exclude": list(self.exclude)}


def _check_between(name: str, value: float, least: float, limit: float, advice: str) -> None:
    if not least <= value < limit:
        raise InvalidOption(
            f"{name}={value:g}.",
            why=f"{name} is at least {least:g}" + ("" if math.isinf(limit) else f" and below {limit:g}"),
            next=advice,
        )


def _check_whole(name: str, value: int, limit: int, advice: str) -> None:
    if type(value) is not int or not 0 <= value < limit:
        raise InvalidOption(f"{name}={value!r}.", why=f"{name} is a whole number from 0 to {limit - 1}", next=advice)
