"""How torch's optimizers run one step: the temporaries that each allocates and frees in order, bytes moved, and FLOPs.

The tables follow torch 2.13 in eager mode with default options; the tests trace torch's own optimizers and compare. Estimates
do not trace them: that takes 1.6 s for AdamW on the 291 parameters of an 8B Llama, against 1 ms for the table, and a traced
multi-tensor op does not show what it writes (``docs/project/design/optimizer-steps-are-written-down.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

from plimsoll.artifacts.memory_use import StepForm, Temporary

_BF16_BYTES = 2
_NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True, slots=True)
class Tensor:
    """Data: the shape and dtype of one parameter for its optimizer. A parameter with a master copy counts in float32."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.elements * self.item_bytes

    @property
    def factor_bytes(self) -> int:
        """The bytes of the row means and column means that Adafactor holds for this parameter. They are 0 for a vector."""
        return _BYTES["row means"](self) + _BYTES["column means"](self)

    def means_bytes(self, *shape: int) -> int:
        """Return the bytes of a tensor of means, with one mean for each index of the dimensions ``shape``. They are 0 for a
        vector.
        """
        return prod(shape) * self.item_bytes if len(self.shape) > 1 else 0


_BYTES: dict[str, Callable[[Tensor], int]] = {
    "norm": lambda each: each.item_bytes,
    "row means": lambda each: each.means_bytes(*each.shape[:-1]),
    "column means": lambda each: each.means_bytes(*each.shape[:-2], *each.shape[-1:]),
    "means of rows": lambda each: each.means_bytes(*each.shape[:-2]),
    "squared gradients": lambda each: 0 if len(each.shape) > 1 else each.bytes,
    "in bf16": lambda each: each.elements * _BF16_BYTES if each.item_bytes != _BF16_BYTES else 0,
    "next": lambda each: each.elements * _BF16_BYTES,
    "Gram matrix": lambda each: min(each.shape) ** 2 * _BF16_BYTES,
    "Gram update": lambda each: min(each.shape) ** 2 * _BF16_BYTES,
}
"""A mapping from the name of a tensor that an optimizer's step makes to a function, which returns the bytes of that tensor for
a given parameter.

A tensor without an entry is as large as the parameter. A tensor of 0 bytes is not made.
"""


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Data: one form (loop, multi-tensor or fused) of an optimizer's step: the tensors that it makes, in order, and its work.

    Args:
        passes: how often the bytes of a parameter are read or written, in total.
        flops: the FLOPs per element of a parameter.
        names: the step's actions in order: ``"a"`` makes a new result a, ``"a = b"`` renames b to a, ``"del a"`` frees a.
        besides: a function from a parameter to the extra bytes that are moved and the extra FLOPs.
        is_loop: whether all forms of this step handle one parameter after the other.
    """

    passes: int
    flops: int
    names: tuple[str, ...] = ()
    besides: Callable[[Tensor], tuple[int, int]] = lambda _: (0, 0)
    is_loop: bool = False

    def groups(self, parameters: Sequence[Tensor], form: StepForm) -> Iterable[list[Tensor]]:
        """Return the groups of parameters that one op handles together.

        In a loop a group has one parameter. Otherwise a group has the parameters with equal dtype and equal results.
        """
        if self.is_loop or form is StepForm.LOOP:
            return [[parameter] for parameter in parameters]
        groups: dict[int, dict[tuple[str, ...], list[Tensor]]] = {}
        for each in parameters:
            made = tuple(name for name in self.names if name in _BYTES and _BYTES[name](each))
            groups.setdefault(each.item_bytes, {}).setdefault(made, []).append(each)
        # torch handles first the dtype that it met last.
        return [group for of_dtype in reversed(groups.values()) for group in of_dtype.values()]


@dataclass(slots=True)
class StepLedger:
    """Runs an optimizer's step symbolically: it tracks which results are alive, by name, one tensor per parameter, and records
    their peak.

    A name that is assigned again keeps its old result until the new one exists. A loop therefore holds the leftovers of one
    parameter together with the results of the next, and a multi-tensor form those of one group together with the next.
    """

    moved_bytes: int = 0
    flops: int = 0
    highest: tuple[tuple[str, tuple[int, ...]], ...] = ()
    highest_bytes: int = 0
    _alive: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def temporaries(self) -> tuple[Temporary, ...]:
        """The tensors that are alive when the results of the optimizer's step take the most bytes."""
        return tuple(Temporary(label=label, bytes=size) for label, sizes in self.highest for size in sizes)

    def run(self, step: OptimizerStep, parameters: Sequence[Tensor], form: StepForm) -> StepLedger:
        """Run one step over the parameters, and return the ledger itself."""
        for each in parameters:
            moved_bytes, flops = step.besides(each)
            self.moved_bytes += step.passes * each.bytes + moved_bytes
            self.flops += step.flops * each.elements + flops
        for group in step.groups(parameters, form):
            for name in step.names:
                self._follow(name, group)
        return self

    def _follow(self, name: str, group: Sequence[Tensor]) -> None:
        target, _, source = name.partition(" = ")
        if source:
            self._alive[target] = self._alive.pop(source)
        elif name.startswith("del "):
            self._alive.pop(name.removeprefix("del "), None)
        else:
            made = group[:1] if name == "norm" else group
            sizes = tuple(size for each in made if (size := _BYTES[name](each) if name in _BYTES else each.bytes))
            if sizes:
                self._make(name, sizes)

    def _make(self, name: str, sizes: tuple[int, ...]) -> None:
        old = self._alive.pop(name, ())
        self._alive[name] = sizes
        alive = (*self._alive.items(), (f"{name} before", old))
        total = sum(sum(each) for _, each in alive)
        if total > self.highest_bytes:
            self.highest, self.highest_bytes = alive, total


def _adafactor_besides(each: Tensor) -> tuple[int, int]:
    return (7 * each.factor_bytes, each.elements) if len(each.shape) > 1 else (3 * each.bytes, 0)


def _muon_besides(each: Tensor) -> tuple[int, int]:
    short, long_ = sorted(each.shape)
    cast, half, gram = (_BYTES[name](each) for name in ("in bf16", "next", "Gram matrix"))
    casting = each.bytes + cast if cast else 0
    moved_bytes = casting + 4 * half + _NEWTON_SCHULZ_STEPS * (5 * half + 6 * gram)
    return moved_bytes, _NEWTON_SCHULZ_STEPS * 2 * short * short * (2 * long_ + short)


def _same(step: OptimizerStep) -> dict[StepForm, OptimizerStep]:
    return {StepForm.LOOP: step, StepForm.FOREACH: step}


def _adam(*, decay: int) -> dict[StepForm, OptimizerStep]:
    """Return a mapping from each form (loop, multi-tensor, fused) to Adam's step in that form. ``decay`` is 1 for AdamW, which
    also runs ``param.mul_``, and 0 for Adam.

    Ops: lerp, mul, addcmul, then sqrt, div, add, addcdiv.
    """
    passes, flops = 19 + 2 * decay, 7 + decay
    return {
        StepForm.LOOP: OptimizerStep(passes, flops, ("square roots", "denominators", "del square roots")),
        StepForm.FOREACH: OptimizerStep(passes, flops, ("denominators",)),
        StepForm.FUSED: OptimizerStep(7, flops),
    }


SGD = {**_same(OptimizerStep(3, 1)), StepForm.FUSED: OptimizerStep(3, 1)}
SGD_MOMENTUM = {**_same(OptimizerStep(8, 3)), StepForm.FUSED: OptimizerStep(5, 3)}
ADAM, ADAMW = _adam(decay=0), _adam(decay=1)
# Ops: mul, addcmul, then sqrt, add, addcdiv.
RMSPROP = _same(OptimizerStep(14, 5, ("denominators",)))
# Ops: addcmul, sqrt, add, addcdiv; the multi-tensor form also allocates the scaled gradients.
ADAGRAD = {
    StepForm.LOOP: OptimizerStep(12, 4, ("denominators",)),
    StepForm.FOREACH: OptimizerStep(14, 5, ("denominators", "scaled gradients")),
    StepForm.FUSED: OptimizerStep(5, 4),
}
# Parameters with two or more dimensions have factors of the second moment, others the second moment itself.
_ESTIMATES = ("estimates", "means of rows", "del means of rows", "updates = estimates", "norm", "del norm")
_TOGETHER = ("norm", "del norm", "row means", "column means", "squared gradients")
_APART = tuple(word for name in _TOGETHER[2:] for word in (name, f"del {name}"))
ADAFACTOR = {
    StepForm.LOOP: OptimizerStep(17, 6, (*_TOGETHER, *_ESTIMATES), _adafactor_besides),
    StepForm.FOREACH: OptimizerStep(19, 7, (*_APART, *_ESTIMATES), _adafactor_besides),
}
# Newton-Schulz iterations in bf16 per matrix, always in a loop. Two are listed: later ones hold the same as the second.
_ITERATION = ("Gram matrix", "Gram update", "next", "in bf16 = next")
_ORTHOGONAL = ("update", "in bf16", *_ITERATION * 2, "del Gram matrix", "del Gram update")
MUON = _same(OptimizerStep(10, 7, (*_ORTHOGONAL, "update = in bf16"), _muon_besides, is_loop=True))
# As in lion-pytorch: a copy of the momentum, its blend with the gradient, and the sign of that.
LION = {StepForm.LOOP: OptimizerStep(19, 8, ("copy of momentum", "update", "del copy of momentum", "del update"))}
