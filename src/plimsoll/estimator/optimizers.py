"""The optimizers that estimates know by name, and what each holds and does for given parameters.

Everything is counted from shapes, so that an estimate from a stored trace needs no torch; ``steps`` knows how each step runs.
What is counted is compared with torch 2.13's own optimizers in the tests, and 8-bit AdamW with bitsandbytes 0.50, Lion with
lion-pytorch 0.2.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from plimsoll.artifacts.costs import Basis
from plimsoll.artifacts.memory_use import OptimizerUse, StepForm, Temporary
from plimsoll.artifacts.trace import TraceParameter
from plimsoll.errors import InvalidOption, UnknownOptimizer
from plimsoll.estimator import optimizer_steps as steps
from plimsoll.estimator.optimizer_steps import OptimizerStep, StepLedger, Tensor

_FEWEST_PAGED_ELEMENTS = 100_000
_COUNTER_BYTES = 4
_MASTER_ITEM_BYTES = 4
_FEWEST_8BIT_ELEMENTS = 4096
_BLOCK_ELEMENTS = 256
_TABLE_BYTES = 2 * 256 * 4
_EMBEDDING_OR_HEAD = re.compile(
    r"(^|[._])(embed\w*|wte|wpe|\w*embeddings?|shared|lm_head|head|heads|classifier|output|score)(\.|$)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """One optimizer: what it keeps per parameter, how it steps, in which forms, and how it is checked."""

    name: str
    steps: Mapping[StepForm, OptimizerStep]
    state_bytes: Callable[[Tensor], int]
    has_counters: bool = True
    leaves_rest_to: str = ""
    basis: Basis = Basis.EXACT
    aliases: tuple[str, ...] = ()
    is_paged: bool = False
    """Whether state of large tensors lies in memory that the device and the host share."""
    notes: tuple[str, ...] = ()


def optimizer_use(
    name: str,
    parameters: Sequence[TraceParameter],
    *,
    form: StepForm | None = None,
    has_master_weights: bool = False,
    gradient_item_bytes: int = 0,
    is_flat: bool = False,
) -> OptimizerUse:
    """What an optimizer holds and what its step takes, in the steady state (not the first step, which makes the state).

    Gradients have their parameter's dtype, options are torch's defaults. With master weights every parameter that is not in
    f32 has a copy in f32 that the optimizer updates in its place; its gradient is cast to f32 for the step.

    Args:
        name: ``adamw``, ``sgd-momentum``, ``adamw-8bit``, …; case and dashes do not matter, nor torch's module names and
            transformers' spellings (``adamw_torch_fused``, ``adamw_bnb_8bit``).
        parameters: those of the rank; under ZeRO, its shards.
        form: how the step walks over them, where the name does not say; by default as torch does on a GPU.
        has_master_weights: whether there are copies in f32.
        gradient_item_bytes: bytes of one element of a gradient; 0 for the parameter's own.
        is_flat: whether gradients are cast as one flat tensor, as DeepSpeed's and Megatron's ZeRO-1 have them.

    Raises:
        UnknownOptimizer: the catalogue lacks it; the error shows the closest names.
        InvalidOption: the optimizer has no such form.

    Example:
        >>> weight = TraceParameter(name="w", shape=(64, 32), dtype="f32", bytes=8192, storage=0)
        >>> use = optimizer_use("AdamW", [weight])
        >>> use.total_state_bytes, use.temporary_bytes
        (16384, 8192)

    Source: torch/optim of torch 2.13, bitsandbytes/optim of 0.50, lion_pytorch of 0.2. torchao.optim of 0.14. Known weakness:
    sparse optimizers are not in the catalogue.
    """
    recipe, named_form = _find(name)
    form = _form(recipe, named_form or form)
    trained = [each for each in parameters if each.is_trainable and each.bytes]
    masters = {each.name: _master_bytes(each) for each in trained if has_master_weights and _master_bytes(each)}
    tensors = [
        Tensor(p.name, p.shape, _MASTER_ITEM_BYTES if p.name in masters else p.bytes // prod(p.shape)) for p in trained
    ]
    parts = _parts(recipe, tensors)
    ledgers = [StepLedger().run(part.steps[form], updated, form) for part, updated in parts]
    # A module's optimizers step one after the other: their states add up, of their temporaries the highest count.
    highest = max(ledgers, key=lambda ledger: ledger.highest_bytes)
    is_cast = gradient_item_bytes != _MASTER_ITEM_BYTES
    casts = _casts({"all": sum(masters.values())} if is_flat and masters else masters, form) if is_cast else ()
    is_fused = form is StepForm.FUSED
    counters = sum(_COUNTER_BYTES * len(updated) for part, updated in parts if part.has_counters)
    state_bytes = {  # a fused step has its counters on the device as well
        each.name: part.state_bytes(each) + _COUNTER_BYTES * (is_fused and part.has_counters)
        for part, updated in parts
        for each in updated
    }
    paged = {
        each.name: state_bytes.pop(each.name)
        for part, updated in parts
        for each in updated
        if part.is_paged and each.elements >= _FEWEST_PAGED_ELEMENTS
    }
    # With master weights a 16-bit gradient is read and written in f32, the master read and the 16-bit weight written.
    traffic = sum((size // 2 + size) * (1 + is_cast) for size in masters.values())
    basis, error = _reliability(recipe, casts, sum(state_bytes.values()) + sum(masters.values()))
    return OptimizerUse(
        name=recipe.name,
        form=form,
        state_bytes=state_bytes,
        host_state_bytes=sum(paged.values()) + (0 if is_fused else counters),
        link_bytes=2 * sum(paged.values()),
        master_bytes=masters,
        temporaries=(*highest.temporaries, *casts),
        moved_bytes=sum(ledger.moved_bytes for ledger in ledgers) + traffic,
        flops=sum(ledger.flops for ledger in ledgers),
        relative_error=error,
        basis=basis,
        notes=_notes(recipe, tensors),
    )


def known_optimizers() -> tuple[str, ...]:
    """The names of the catalogue."""
    return tuple(recipe.name for recipe in _RECIPES)


def _find(name: str) -> tuple[_Recipe, StepForm | None]:
    key = _key(name)
    found = _BY_KEY.get(key)
    if found is not None:
        return found, None
    for form in StepForm:
        if key.endswith(form.value) and key.removesuffix(form.value) in _BY_KEY:
            return _BY_KEY[key.removesuffix(form.value)], form
    closest = difflib.get_close_matches(key, _BY_KEY, n=3, cutoff=0.5)
    close = list(dict.fromkeys(_BY_KEY[each].name for each in closest))
    raise UnknownOptimizer(
        f"No optimizer is called {name!r}.",
        why=f"the catalogue has {', '.join(known_optimizers())}",
        next=f"try {' or '.join(repr(each) for each in close)}"
        if close
        else "pick one of these, or trace the step with the optimizer itself: plimsoll.plan(..., optimizer=)",
    )


def _key(name: str) -> str:
    words = re.split(r"[^a-z0-9]+", name.lower())
    return "".join(word for word in words if word not in {"torch", "optim", "bnb", "bitsandbytes"})


def _form(recipe: _Recipe, form: StepForm | None) -> StepForm:
    forms = list(recipe.steps)
    if form is None:
        return StepForm.FOREACH if StepForm.FOREACH in forms else forms[-1]
    if form in forms:
        return form
    # A loop is what an optimizer without a multi-tensor form does when it is asked for torch's choice on a GPU.
    if form is not StepForm.FUSED and len(forms) == 1:
        return forms[0]
    raise InvalidOption(
        f"{recipe.name} has no {form.value} form.",
        why=f"it steps as {' or '.join(each.value for each in forms)}",
        next="leave the form out",
    )


def _master_bytes(parameter: TraceParameter) -> int:
    """Bytes of a copy in f32; 0 for what is in f32 (or wider) already."""
    bytes_ = prod(parameter.shape) * _MASTER_ITEM_BYTES
    return bytes_ if parameter.bytes < bytes_ else 0


def _parts(recipe: _Recipe, tensors: Sequence[Tensor]) -> list[tuple[_Recipe, list[Tensor]]]:
    """What steps together: Muon leaves what is no hidden matrix to AdamW."""
    if not recipe.leaves_rest_to:
        return [(recipe, list(tensors))]
    matrices = [each for each in tensors if _is_hidden_matrix(each)]
    others = [each for each in tensors if not _is_hidden_matrix(each)]
    return [(recipe, matrices), (_BY_KEY[recipe.leaves_rest_to], others)]


def _is_hidden_matrix(tensor: Tensor) -> bool:
    return len(tensor.shape) == 2 and not _EMBEDDING_OR_HEAD.search(tensor.name)


def _casts(masters: dict[str, int], form: StepForm) -> tuple[Temporary, ...]:
    """Gradients in f32: all of them for a step over all parameters, one at a time in a loop."""
    sizes = sorted(masters.values())[-1:] if form is StepForm.LOOP else masters.values()
    return tuple(Temporary(label="gradients in f32", bytes=size) for size in sizes)


def _reliability(recipe: _Recipe, casts: Sequence[Temporary], held_bytes: int) -> tuple[Basis, float]:
    """That mixed-precision optimizers cast all gradients at once is a convention: the error is what it would be without."""
    cast_bytes = sum(each.bytes for each in casts)
    if cast_bytes:
        return Basis.ASSUMED, cast_bytes / (held_bytes + cast_bytes)
    if recipe.basis is not Basis.EXACT and held_bytes:
        return recipe.basis, _TABLE_BYTES / held_bytes
    return Basis.EXACT, 0.0


def _notes(recipe: _Recipe, tensors: Sequence[Tensor]) -> tuple[str, ...]:
    others = [each.name for each in tensors if recipe.leaves_rest_to and not _is_hidden_matrix(each)]
    if not others:
        return recipe.notes
    shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    return (*recipe.notes, f"AdamW updates {shown}")


def _two_in_8bit(tensor: Tensor) -> int:
    """A byte per element and an f32 maximum per block, twice; small tensors stay in f32."""
    if tensor.elements < _FEWEST_8BIT_ELEMENTS:
        return 2 * tensor.elements * 4
    return 2 * (tensor.elements + -(-tensor.elements // _BLOCK_ELEMENTS) * 4)


# One kernel per parameter: weight read and written, gradient read, both states read and written.
_STEP_8BIT = OptimizerStep(3, 8, besides=lambda each: (2 * _two_in_8bit(each), 0))
_8BIT_NOTES = (
    "bitsandbytes' block-wise form: states of fewer than 4096 elements stay in f32; embeddings too, if they were registered "
    "for it (transformers' Trainer does), which is not counted; nor are 2 KiB of tables that all parameters share",
)


def _two_by_torchao(bits: int, block: int) -> Callable[[Tensor], int]:
    """Codes and an f32 scale per block, twice; what is small or no multiple of the block stays as the parameter is."""

    def state_bytes(tensor: Tensor) -> int:
        if tensor.elements < _FEWEST_8BIT_ELEMENTS or tensor.elements % block:
            return 2 * tensor.bytes
        return 2 * (tensor.elements * bits // 8 + tensor.elements // block * 4 + (4 << bits if bits < 8 else 0))

    return state_bytes


def _torchao(name: str, bits: int, block: int) -> _Recipe:
    state_bytes = _two_by_torchao(bits, block)
    return _Recipe(
        name=name,
        steps={StepForm.FUSED: OptimizerStep(3, 8, besides=lambda each: (2 * state_bytes(each), 0))},
        state_bytes=state_bytes,
        has_counters=False,
        basis=Basis.MODELLED,
        notes=("as torchao.optim has it, compiled per parameter",),
    )


_PAGED_NOTE = (
    "bitsandbytes' paged state is counted on the host, its way over the link twice a step; while the device has room, it stays "
    "there and costs nothing"
)
_MUON_NOTES = ("Muon updates matrices; embeddings, heads (told by their names) and all other shapes are AdamW's",)
_RECIPES = (
    _Recipe(name="sgd", steps=steps.SGD, state_bytes=lambda _: 0, has_counters=False),
    _Recipe(
        name="sgd-momentum",
        steps=steps.SGD_MOMENTUM,
        state_bytes=lambda each: each.bytes,
        has_counters=False,
        aliases=("momentum",),
    ),
    _Recipe(name="adam", steps=steps.ADAM, state_bytes=lambda each: 2 * each.bytes),
    _Recipe(name="adamw", steps=steps.ADAMW, state_bytes=lambda each: 2 * each.bytes),
    _Recipe(
        name="adamw-8bit",
        steps={StepForm.FUSED: _STEP_8BIT},
        state_bytes=_two_in_8bit,
        has_counters=False,
        basis=Basis.MODELLED,
        aliases=("adam8bit", "8bitadamw", "8bitadam"),
        notes=_8BIT_NOTES,
    ),
    _torchao("adamw-4bit", bits=4, block=128),
    _torchao("adamw-fp8", bits=8, block=256),
    _Recipe(
        name="paged-adamw",
        steps={StepForm.FUSED: OptimizerStep(7, 8)},
        state_bytes=lambda each: 2 * each.bytes,
        has_counters=False,
        basis=Basis.MODELLED,
        is_paged=True,
        notes=(_PAGED_NOTE,),
    ),
    _Recipe(
        name="paged-adamw-8bit",
        steps={StepForm.FUSED: _STEP_8BIT},
        state_bytes=_two_in_8bit,
        has_counters=False,
        basis=Basis.MODELLED,
        aliases=("pagedadam8bit", "paged8bitadamw"),
        is_paged=True,
        notes=(*_8BIT_NOTES, _PAGED_NOTE),
    ),
    _Recipe(name="adafactor", steps=steps.ADAFACTOR, state_bytes=lambda each: each.factor_bytes or each.bytes),
    _Recipe(
        name="muon",
        steps=steps.MUON,
        state_bytes=lambda each: each.bytes,
        has_counters=False,
        leaves_rest_to="adamw",
        notes=_MUON_NOTES,
    ),
    _Recipe(
        name="lion",
        steps=steps.LION,
        state_bytes=lambda each: each.bytes,
        has_counters=False,
        notes=("as lion-pytorch runs it",),
    ),
    _Recipe(name="rmsprop", steps=steps.RMSPROP, state_bytes=lambda each: each.bytes),
    _Recipe(name="adagrad", steps=steps.ADAGRAD, state_bytes=lambda each: each.bytes),
)
_BY_KEY = {_key(name): recipe for recipe in _RECIPES for name in (recipe.name, *recipe.aliases)}
