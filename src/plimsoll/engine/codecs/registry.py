"""Find a codec by its name: ``bits``, ``int8``, ``int8:block=64``, ``int4:block=32:symmetric:stochastic``.

A new codec is a class with its own family name and a line in the list of classes here.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from plimsoll.engine.codecs.floats import BFloat16, Float8
from plimsoll.engine.codecs.integers import Int4, Int8
from plimsoll.engine.codecs.lossless import Bits, Narrow, Sign
from plimsoll.engine.codecs.sparse import TopK, Zeros
from plimsoll.errors import InvalidCodec

if TYPE_CHECKING:
    from plimsoll.engine.codecs.protocol import Codec


def _parse(cls: type[Codec], name: str) -> Codec:
    """Return the codec called ``name``, which is of the class ``cls``.

    Raises:
        InvalidCodec: a parameter is unknown to the family, occurs twice, or has a value that is not allowed.
    """
    values: dict[str, Any] = {}
    for text in name.split(":")[1:]:
        key, value = _parameter(cls, text)
        if value is None or key in values:
            raise InvalidCodec(
                f"The codec name {name!r} is not valid: its part {text!r} is not allowed.",
                why=_allowed(cls) if value is None else "it sets the same parameter twice",
                next=f'write "{cls.family}" to use the defaults of this codec',
            )
        values[key] = value
    return cls(**values)


def _parameter(cls: type[Codec], text: str) -> tuple[str, float | str | None]:
    """Parse one parameter of a codec's name: return the field of the codec that ``text`` sets, and its value. The value is None
    if the field or the value does not exist.
    """
    key, is_number, value = text.partition("=")
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # a protocol cannot say that it is a dataclass
        if is_number and key == field.name and "numbers" in field.metadata:
            return key, field.metadata["numbers"].read(value)
        if not is_number and text in field.metadata.get("words", ()):
            return field.name, text
    return key, None


def _allowed(cls: type[Codec]) -> str:
    """Return a text, for errors, that lists the parameters that may follow the family in a codec's name."""
    texts = [
        " or ".join(field.metadata["words"])
        if "words" in field.metadata
        else f"{field.name}={field.metadata['numbers']}"
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]  # as above
    ]
    return f"{cls.family} accepts " + ("; ".join(texts) or "no parameters")


FAMILIES: dict[str, Callable[[str], Codec]] = {
    cls.family: partial(_parse, cls) for cls in (Bits, Narrow, Sign, Zeros, BFloat16, Float8, Int8, Int4, TopK)
}
"""A mapping from family name to a function that makes a codec from its full name.

A new codec needs a class and an entry here.
"""


def find_codec(name: str) -> Codec:
    """Return the codec called ``name``. The name is a family, followed by the parameters that differ from the family's
    defaults.

    Raises:
        InvalidCodec: the family does not exist, or it does not have these parameters.

    Example:
        >>> import torch
        >>> find_codec("int8:block=64").payload_bytes(1024, torch.float32)
        1056
    """
    family = name.split(":")[0]
    if family not in FAMILIES:
        closest = difflib.get_close_matches(family, FAMILIES, n=3, cutoff=0.4) or list(FAMILIES)
        raise InvalidCodec(
            f"The codec name {name!r} is not known.",
            why=f"no codec is called {family!r}; the closest names are {', '.join(closest)}",
            next=f"use one of {', '.join(FAMILIES)}",
        )
    return FAMILIES[family](name)


def lossless_codecs() -> tuple[Codec, ...]:
    """Return one codec of each lossless family, with its default parameters."""
    return tuple(codec for codec in map(find_codec, FAMILIES) if codec.is_lossless)
