"""What the caller asked for, checked: one object that every part of a compressed reduction reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from plimsoll.distributed.gradient_compression.method import Method
from plimsoll.errors import InvalidOption

EXCLUDED = ("*norm*", "*bias*", "*embed*", "*lm_head*")
"""Not compressed by default: norms and biases are small; few rows of an embedding have a gradient in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
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
        return {
            "method": str(self.method),
            "exclude": list(self.exclude),
            "momentum": self.momentum,
            "warmup_steps": self.warmup_steps,
            "seed": self.seed,
            "min_ratio": self.min_ratio,
            "min_elements": self.min_elements,
        }


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
