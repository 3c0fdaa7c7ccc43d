"""A codec's name in, the codec out: ``bits``, ``int8``, ``int8:block=64``, ``int4:block=32:symmetric:stochastic``."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from plimsoll.engine.codecs.bf16 import BFloat16
from plimsoll.engine.codecs.bits import Bits
from plimsoll.engine.codecs.fp8 import Float8
from plimsoll.engine.codecs.int4 import Int4
from plimsoll.engine.codecs.int8 import Int8
from plimsoll.engine.codecs.narrow import Narrow
from plimsoll.engine.codecs.options import parse
from plimsoll.engine.codecs.sign import Sign
from plimsoll.engine.codecs.topk import TopK
from plimsoll.engine.codecs.zeros import Zeros
from plimsoll.errors import InvalidCodec

if TYPE_CHECKING:
    from plimsoll.engine.codecs.protocol import Codec

_FAMILIES: dict[str, Callable[[str], Codec]] = {
    "bits": partial(parse, Bits),
    "narrow": partial(parse, Narrow),
    "sign": partial(parse, Sign),
    "zeros": partial(parse, Zeros),
    "bf16": partial(parse, BFloat16),
    "fp8": partial(parse, Float8),
    "int8": partial(parse, Int8),
    "int4": partial(parse, Int4),
    "topk": partial(parse, TopK),
}


def find_codec(name: str) -> Codec:
    """The codec called ``name``: a family, and parameters where they differ from its defaults.

    Raises:
        InvalidCodec: no such family, or not with these parameters.

    Example:
        >>> import torch
        >>> find_codec("int8:block=64").payload_bytes(1024, torch.float32)
        1056
    """
    family = name.split(":")[0]
    if family not in _FAMILIES:
        closest = difflib.get_close_matches(family, _FAMILIES, n=3, cutoff=0.4) or list(_FAMILIES)
        raise InvalidCodec(
            f"{name!r} is not a codec.",
            why=f"there is no family called {family!r}; closest: {', '.join(closest)}",
            next=f"use one of {', '.join(_FAMILIES)}",
        )
    return _FAMILIES[family](name)


def lossless_codecs() -> tuple[Codec, ...]:
    """One of each family that gives back what backward would have read, with its defaults."""
    return tuple(codec for codec in _defaults() if codec.is_lossless)


def lossy_codecs() -> tuple[Codec, ...]:
    """One of each family that rounds or leaves out, with its defaults."""
    return tuple(codec for codec in _defaults() if not codec.is_lossless)


def _defaults() -> tuple[Codec, ...]:
    return tuple(find_codec(family) for family in _FAMILIES)
