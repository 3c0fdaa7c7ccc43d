"""``int8:block=64:stochastic`` in, a codec out, and back: the parameters of a codec are the fields of its dataclass.

A field made by ``word`` is written as its value, one made by ``number`` as ``field=value``. Names are spelled with the
fields that differ from their defaults, in the order of the class.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from plimsoll.errors import InvalidCodec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    C = TypeVar("C", bound=DataclassInstance)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What a number may be; powers of two only where they are whole."""

    kind: type[int] | type[float]
    least: float
    most: float

    def read(self, text: str) -> float | None:
        try:
            value = self.kind(text)
        except ValueError:
            return None
        is_allowed = self.least <= value <= self.most and (self.kind is float or math.log2(value).is_integer())
        return value if is_allowed else None

    def __str__(self) -> str:
        what = "a power of two" if self.kind is int else "a number"
        return f"{what} from {self.least} to {self.most}"


def word(default: str, *others: str) -> Any:
    """A field that is one of these words."""
    return dataclasses.field(default=default, metadata={"words": (default, *others)})


def number(default: float, *, least: float, most: float) -> Any:
    """A field that is a number: a power of two where ``default`` is an int."""
    return dataclasses.field(default=default, metadata={"numbers": _Numbers(type(default), least, most)})


def spell(family: str, codec: DataclassInstance) -> str:
    """The canonical name of a codec of ``family``."""
    parts = [family]
    for field in dataclasses.fields(codec):
        value = getattr(codec, field.name)
        if value != field.default:
            parts.append(value if "words" in field.metadata else f"{field.name}={value}")
    return ":".join(parts)


def parse(cls: type[C], name: str) -> C:
    """The codec called ``name``, whose family is that of ``cls``.

    Raises:
        InvalidCodec: a parameter that the family does not have, twice the same, or with a value that it cannot have.
    """
    family, *texts = name.split(":")
    fields = dataclasses.fields(cls)
    values: dict[str, float | str] = {}
    for text in texts:
        key, is_number, value_text = text.partition("=")
        found: tuple[str, float | str | None] | None = None
        for field in fields:
            if is_number and key == field.name and "numbers" in field.metadata:
                found = field.name, field.metadata["numbers"].read(value_text)
            elif not is_number and text in field.metadata.get("words", ()):
                found = field.name, text
        if found is None or found[1] is None or found[0] in values:
            why = "it says so twice" if found and found[1] is not None else _allowed(family, cls)
            raise InvalidCodec(
                f"{name!r} is not a codec: {text!r} does not fit.", why=why, next=f'write "{family}" for its defaults'
            )
        values[found[0]] = found[1]
    return cls(**values)


def _allowed(family: str, cls: type[DataclassInstance]) -> str:
    """What may follow the family's name."""
    texts = [
        " or ".join(field.metadata["words"])
        if "words" in field.metadata
        else f"{field.name}={field.metadata['numbers']}"
        for field in dataclasses.fields(cls)
    ]
    return f"{family} takes " + "; ".join(texts) if texts else f"{family} takes no parameters"
