"""What each named precision means for parameters and for arithmetic. No torch here.

``bf16`` and ``fp16`` hold parameters, gradients and activations in the narrow type. ``bf16-mixed`` and ``fp16-mixed`` hold
parameters in float32 and run the forward pass under autocast (Micikevicius et al. 2018, Mixed Precision Training).
"""

from __future__ import annotations

import difflib
import enum

from plimsoll.errors import InvalidOption


class Precision(enum.StrEnum):
    """The floating-point types of a training step.

    Example:
        >>> Precision.BF16_MIXED.parameter_dtype, Precision.BF16_MIXED.autocast_dtype
        ('float32', 'bfloat16')
    """

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    BF16_MIXED = "bf16-mixed"
    FP16_MIXED = "fp16-mixed"

    @property
    def is_mixed(self) -> bool:
        """Whether the forward pass runs under autocast."""
        return self in (Precision.BF16_MIXED, Precision.FP16_MIXED)

    @property
    def parameter_dtype(self) -> str:
        """The name in torch of the type that parameters are stored in."""
        return {Precision.BF16: "bfloat16", Precision.FP16: "float16"}.get(self, "float32")

    @property
    def autocast_dtype(self) -> str | None:
        """The name in torch of autocast's type, ``None`` where autocast is off."""
        return {Precision.BF16_MIXED: "bfloat16", Precision.FP16_MIXED: "float16"}.get(self)


_ALIASES = {
    "float32": Precision.FP32,
    "f32": Precision.FP32,
    "32-true": Precision.FP32,
    "bfloat16": Precision.BF16,
    "bf16-true": Precision.BF16,
    "float16": Precision.FP16,
    "half": Precision.FP16,
    "16-true": Precision.FP16,
    "amp": Precision.FP16_MIXED,
    "16-mixed": Precision.FP16_MIXED,
}
"""What torch and trainers call them."""


def parse_precision(text: str | Precision | None) -> Precision | None:
    """The precision called ``text``; ``None`` stays ``None``: the model's own.

    Raises:
        InvalidOption: unknown, or a type that steps are not traced in (fp8, int8, tf32).

    Example:
        >>> parse_precision("BF16-mixed").value
        'bf16-mixed'
    """
    if text is None or isinstance(text, Precision):
        return text
    name = text.strip().lower().replace("_", "-").removeprefix("torch.")
    if name in _ALIASES:
        return _ALIASES[name]
    known = [precision.value for precision in Precision]
    if name in known:
        return Precision(name)
    if name.startswith(("fp8", "float8", "fp4", "mxfp", "nvfp", "int", "tf32")):
        raise InvalidOption(
            f"precision {text!r} is unsupported.",
            why="torch trains in it through kernels of other libraries, or not at all, and they are not traced here",
            next=f"take one of {', '.join(known)}",
        )
    close = difflib.get_close_matches(name, [*known, *_ALIASES], n=2, cutoff=0.5)
    raise InvalidOption(
        f"no precision is called {text!r}.",
        why=f"known are {', '.join(known)}",
        next=f"try {' or '.join(map(repr, close))}" if close else "take one of these",
    )
