"""What a method of gradient compression is called, and how the caller wants it done."""

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
    """How gradients are compressed; only the field that its kind has is set.

    Attributes:
        rank: columns of each factor of ``powersgd``.
        share: of the elements that ``topk`` and ``randomk`` send, above 0 and at most 1.
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
        """Whether it sends some elements as they are, and of the others nothing."""
        return self.kind in ("topk", "randomk")

    def elements_sent(self, elements: int) -> int:
        """How many of so many elements ``topk`` and ``randomk`` send: at least one."""
        return min(elements, max(1, round(self.share * elements)))


def parse_method(text: str) -> Method:
    """What a method's name and parameter mean.

    Args:
        text: ``"none"``, ``"powersgd:4"``, ``"topk:1%"``, ``"randomk:0.01"``, ``"sign"``, ``"int8:256"``.

    Raises:
        InvalidOption: no such method, or not with this parameter.

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
"""Not compressed by default: norms and biases are small; few rows of an embedding have a gradient in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionSettings:
    """How gradients are compressed.

    Attributes:
        method: what is done to a parameter's gradient.
        exclude: patterns (``fnmatch``) of parameter names that are not compressed.
        momentum: factor of the momentum that is applied before compression, 0 for none.
        warmup_steps: reductions of a parameter before the first compressed one.
        seed: of random places and of the first factors of ``powersgd``.
        min_ratio: a parameter is compressed if that divides its bytes by at least so much.
        min_elements: a parameter with fewer elements is not compressed.
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
        """Everything that ranks, and a saved state, have to agree on."""
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
