"""The parameters of one optimizer in, the bytes that its step makes, moves and computes out, op by op as torch runs it.

Each step is written down as torch 2.13 runs it in eager mode, with default options: which results it makes, under which name
Python holds them, and when that name is bound anew. A name that a loop binds anew holds the old result until the new one is
there, so a loop holds the leftovers of one parameter beside the results of the next; the multi-tensor form does the same with
groups of one dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

from plimsoll.artifacts.optimizer_use import StepForm, Temporary

_BF16_BYTES = 2
_NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter as its optimizer sees it (in f32 where it has a master copy)."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """What it takes."""
        return self.elements * self.item_bytes

    @property
    def rows(self) -> int:
        """Elements without the last dimension."""
        return prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        """Elements without the last dimension but one."""
        return prod(self.shape[:-2]) * self.shape[-1]


@dataclass(slots=True)
class Ledger:
    """Results by the name that holds them, each a tensor or one per parameter, and what is held at the highest sum."""

    moved_bytes: int = 0
    flops: int = 0
    highest: tuple[tuple[str, tuple[int, ...]], ...] = ()
    highest_bytes: int = 0
    _alive: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def temporaries(self) -> tuple[Temporary, ...]:
        """The tensors that are held at the highest sum."""
        return tuple(Temporary(label=label, bytes=size) for label, sizes in self.highest for size in sizes if size)

    def run(self, moved_bytes: int, flops: int) -> None:
        """An op that makes nothing that lasts."""
        self.moved_bytes += moved_bytes
        self.flops += flops

    def make(self, name: str, *sizes: int, replaces: str = "") -> None:
        """A result under ``name``; what ``name`` or ``replaces`` held before is let go only when the result is there."""
        old = self._alive.pop(replaces or name, ())
        self._alive[name] = sizes
        alive = (*self._alive.items(), (f"{name} before", old))
        total = sum(sum(each) for _, each in alive)
        if total > self.highest_bytes:
            self.highest, self.highest_bytes = alive, total

    def rename(self, old: str, new: str) -> None:
        """``new`` now holds what ``old`` held, and what it held itself is let go."""
        self._alive[new] = self._alive.pop(old)

    def drop(self, *names: str) -> None:
        """Let go of what these names hold."""
        for name in names:
            self._alive.pop(name, None)


Step = Callable[[Ledger, Sequence[Tensor], StepForm], None]


def groups_of(parameters: Sequence[Tensor], form: StepForm) -> Iterable[list[Tensor]]:
    """What one op works on: one parameter in a loop, else all of one dtype (torch takes the dtype that it meets last first)."""
    if form is StepForm.LOOP:
        return [[parameter] for parameter in parameters]
    groups: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.item_bytes, []).append(parameter)
    return list(reversed(groups.values()))


def _sizes(group: Iterable[Tensor]) -> list[int]:
    return [each.bytes for each in group]


def _bytes(group: Iterable[Tensor]) -> int:
    return sum(_sizes(group))


def _elements(group: Iterable[Tensor]) -> int:
    return sum(each.elements for each in group)


def run_elementwise(
    ledger: Ledger, parameters: Sequence[Tensor], form: StepForm, *, fused_passes: int, passes: int, flops: int
) -> None:
    """A step that makes nothing: ``passes`` reads and writes of the parameters' size (``fused_passes`` in one kernel)."""
    for group in groups_of(parameters, form):
        ledger.run(_bytes(group) * (fused_passes if form is StepForm.FUSED else passes), _elements(group) * flops)


def run_adam(ledger: Ledger, parameters: Sequence[Tensor], form: StepForm, *, decay_passes: int) -> None:
    """Adam: lerp, mul, addcmul, then sqrt, div, add, addcdiv; ``decay_passes`` is 2 with AdamW's ``param.mul_``, else 0."""
    if form is StepForm.FUSED:
        run_elementwise(ledger, parameters, form, fused_passes=7, passes=0, flops=7 + decay_passes // 2)
        return
    for group in groups_of(parameters, form):
        size = _bytes(group)
        ledger.run(size * (19 + decay_passes), _elements(group) * (7 + decay_passes // 2))
        if form is StepForm.LOOP:
            ledger.make("square roots", size)
            ledger.make("denominators", size)
            ledger.drop("square roots")
        else:
            ledger.make("denominators", *_sizes(group))


def run_root(ledger: Ledger, parameters: Sequence[Tensor], form: StepForm) -> None:
    """RMSprop: mul, addcmul, then sqrt, add, addcdiv."""
    for group in groups_of(parameters, form):
        ledger.run(_bytes(group) * 14, _elements(group) * 5)
        ledger.make("denominators", *_sizes(group))


def run_adagrad(ledger: Ledger, parameters: Sequence[Tensor], form: StepForm) -> None:
    """Adagrad: addcmul, sqrt, add, addcdiv; the multi-tensor form also makes the scaled gradients."""
    if form is StepForm.FUSED:
        run_elementwise(ledger, parameters, form, fused_passes=5, passes=0, flops=4)
        return
    for group in groups_of(parameters, form):
        size = _bytes(group)
        ledger.run(size * 12, _elements(group) * 4)
        ledger.make("denominators", *_sizes(group))
        if form is StepForm.FOREACH:
            ledger.run(size * 2, _elements(group))
            ledger.make("scaled gradients", *_sizes(group))


def run_adafactor(ledger: Ledger, parameters: Sequence[Tensor], form: StepForm) -> None:
    """Adafactor: factors of the second moment for what has two dimensions or more, the second moment itself for the rest."""
    if form is StepForm.LOOP:
        for each in parameters:
            _adafactor_one(ledger, each)
        return
    for group in groups_of(parameters, form):
        is_matrix = {each: len(each.shape) > 1 for each in group}
        for kind in dict.fromkeys(is_matrix.values()):
            _adafactor_group(ledger, [each for each in group if is_matrix[each] is kind], is_factored=kind)


def _adafactor_one(ledger: Ledger, each: Tensor) -> None:
    item, size = each.item_bytes, each.bytes
    _adafactor_work(ledger, each)
    ledger.make("norm", item)
    ledger.drop("norm")
    if len(each.shape) > 1:
        ledger.make("row means", each.rows * item)
        ledger.make("column means", each.columns * item)
        ledger.make("estimates", size)
        ledger.make("means of rows", prod(each.shape[:-2]) * item)
        ledger.drop("means of rows")
    else:
        ledger.make("squared gradients", size)
        ledger.make("estimates", size)
    ledger.rename("estimates", "updates")
    ledger.make("norm", item)
    ledger.drop("norm")


def _adafactor_group(ledger: Ledger, group: Sequence[Tensor], *, is_factored: bool) -> None:
    for each in group:
        _adafactor_work(ledger, each)
    if is_factored:
        ledger.make("row means", *(each.rows * each.item_bytes for each in group))
        ledger.drop("row means")
        ledger.make("column means", *(each.columns * each.item_bytes for each in group))
        ledger.drop("column means")
        ledger.make("estimates", *_sizes(group))
        ledger.make("means of rows", *(prod(each.shape[:-2]) * each.item_bytes for each in group))
        ledger.drop("means of rows")
    else:
        ledger.make("squared gradients", *_sizes(group))
        ledger.drop("squared gradients")
        ledger.make("estimates", *_sizes(group))
    ledger.rename("estimates", "updates")
    ledger.make("norm", group[0].item_bytes)
    ledger.drop("norm")


def _adafactor_work(ledger: Ledger, each: Tensor) -> None:
    """Norms, the estimate with its element-wise ops, and the update."""
    if len(each.shape) > 1:
        ledger.run(each.bytes * 17 + (each.rows + each.columns) * each.item_bytes * 7, each.elements * 7)
    else:
        ledger.run(each.bytes * 20, each.elements * 6)


def run_muon(ledger: Ledger, parameters: Sequence[Tensor], _: StepForm) -> None:
    """Muon: five Newton-Schulz iterations in bf16 per matrix, always in a loop."""
    for each in parameters:
        short, long_ = sorted(each.shape)
        half = each.elements * _BF16_BYTES
        gram = short * short * _BF16_BYTES
        ledger.run(each.bytes * (3 + 3), each.elements * 2)
        ledger.make("update", each.bytes)
        if each.item_bytes != _BF16_BYTES:
            ledger.make("in bf16", half)
        ledger.run(each.bytes + 4 * half, each.elements * 3)
        for _iteration in range(_NEWTON_SCHULZ_STEPS):
            ledger.make("Gram matrix", gram)
            ledger.make("Gram update", gram)
            ledger.make("next", half, replaces="in bf16")
            ledger.rename("next", "in bf16")
            ledger.run(5 * half + 6 * gram, 2 * short * short * (2 * long_ + short))
        ledger.drop("Gram matrix", "Gram update")
        ledger.rename("in bf16", "update")
        ledger.run(each.bytes * (2 + 2) + half, each.elements * 2)


def run_lion(ledger: Ledger, parameters: Sequence[Tensor], _: StepForm) -> None:
    """Lion as lion-pytorch has it: a copy of the momentum, the blend with the gradient, its sign; always in a loop."""
    for each in parameters:
        ledger.run(each.bytes * 19, each.elements * 8)
        ledger.make("copy of momentum", each.bytes)
        ledger.make("update", each.bytes)
        ledger.drop("copy of momentum", "update")


ADAM: Step = partial(run_adam, decay_passes=0)
ADAMW: Step = partial(run_adam, decay_passes=2)
SGD: Step = partial(run_elementwise, fused_passes=3, passes=3, flops=1)
SGD_MOMENTUM: Step = partial(run_elementwise, fused_passes=5, passes=8, flops=3)
