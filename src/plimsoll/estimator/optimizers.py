"""The optimizers that estimates know by name, and the memory and work of each for given parameters.

Everything is computed from shapes, so an estimate from a stored trace does not need torch; ``optimizer_steps`` describes each
step. The tests compare the figures with torch 2.13's own optimizers, 8-bit AdamW with bitsandbytes 0.50, and Lion with
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
    r"(^|[._])(embed\w*|wte|wpe|\w*embeddings?|shared|lm_head|head|heads|classifier|score)(\.|$)"
    r"|^\D*(^|[._])output(\.|$)"
)
"""Names of weights that Muon leaves to AdamW. ``output`` is a head only outside of numbered blocks: BERT and ViT have an
``attention.output.dense`` in each block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """How the figures of one optimizer are computed: the bytes of its state per parameter, what its step does in each form
    (loop, multi-tensor, fused), and how these figures were checked.
    """

    name: str
    steps: Mapping[StepForm, OptimizerStep]
    state_bytes: Callable[[Tensor], int]
    has_counters: bool = True
    leaves_rest_to: str = ""
    basis: Basis = Basis.EXACT
    aliases: tuple[str, ...] = ()
    is_paged: bool = False
    """Whether the state of large tensors is in memory that the device and the host share."""
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
    """Return the bytes that an optimizer holds and the work of its step, in the steady state (not in the first step, which
    makes the state).

    Gradients have their parameter's dtype; options are torch's defaults. With master weights, every parameter that is not in
    float32 has a float32 copy, which the optimizer updates instead; its gradient is cast to float32 for the step.

    Args:
        name: ``adamw``, ``sgd-momentum``, ``adamw-8bit``, …; case and dashes are ignored, as are torch's module names and
            transformers' spellings (``adamw_torch_fused``, ``adamw_bnb_8bit``).
        parameters: the rank's parameters; under ZeRO, its shards.
        form: how the step iterates over the parameters (one at a time, in groups, or fused), if the name does not say so; by
            default torch's choice on a GPU.
        has_master_weights: whether parameters in a narrower dtype have float32 copies.
        gradient_item_bytes: bytes of one element of a gradient; 0 for the parameter's own dtype.
        is_flat: whether gradients are cast as one flat tensor, as in DeepSpeed's and Megatron's ZeRO-1.

    Raises:
        UnknownOptimizer: the catalogue does not have it; the error lists the closest names.
        InvalidOption: the optimizer does not have this form.

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
    # A model's optimizers step one after the other: their states add up, but only the largest set of temporaries is alive.
    highest = max(ledgers, key=lambda ledger: ledger.highest_bytes)
    is_cast = gradient_item_bytes != _MASTER_ITEM_BYTES
    casts = _casts({"all": sum(masters.values())} if is_flat and masters else masters, form) if is_cast else ()
    is_fused = form is StepForm.FUSED
    counters = sum(_COUNTER_BYTES * len(updated) for part, updated in parts if part.has_counters)
    state_bytes = {  # a fused step keeps its counters on the device too
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
    # With master weights, a 16-bit gradient is read and written in float32, the master read and the 16-bit weight written.
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
    """Return the names of all optimizers in the catalogue."""
    return tuple(recipe.name for recipe in _RECIPES)


def is_paged(name: str) -> bool:
    """Whether an optimizer holds the state of large tensors in memory that the device and the host share.

    Raises:
        UnknownOptimizer: the catalogue does not have it.
    """
    return _find(name)[0].is_paged


def has_fused_form(name: str) -> bool:
    """Whether an optimizer can run its step in one kernel per parameter, under a name that leaves the form open or names it.

    Example:
        >>> [has_fused_form(name) for name in ("adamw", "adamw-foreach", "lion")]
        [True, False, False]

    Raises:
        UnknownOptimizer: the catalogue does not have it.
    """
    recipe, named_form = _find(name)
    return StepForm.FUSED in recipe.steps and named_form in (None, StepForm.FUSED)


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
        f"The optimizer {name!r} is not known.",
        why=f"the catalogue has {', '.join(known_optimizers())}",
        next=f"try {' or '.join(repr(each) for each in close)}"
        if close
        else "use one of these, or trace the step with the optimizer itself: plimsoll.plan(..., optimizer=)",
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
    # An optimizer without a multi-tensor form loops even when torch's choice for a GPU is requested.
    if form is not StepForm.FUSED and len(forms) == 1:
        return forms[0]
    raise InvalidOption(
        f"The optimizer {recipe.name} does not have a {form.value} implementation.",
        why=f"it is implemented as {' or '.join(each.value for each in forms)}",
        next="leave the implementation out of the name",
    )


def _master_bytes(parameter: TraceParameter) -> int:
    """Return the bytes of a float32 copy (master weight) of the parameter. They are 0 if the parameter itself is in float32 or
    wider.
    """
    bytes_ = prod(parameter.shape) * _MASTER_ITEM_BYTES
    return bytes_ if parameter.bytes < bytes_ else 0


def _parts(recipe: _Recipe, tensors: Sequence[Tensor]) -> list[tuple[_Recipe, list[Tensor]]]:
    """Split the parameters into groups by the optimizer that updates them. Muon updates only hidden matrices itself, and AdamW
    updates the rest.
    """
    if not recipe.leaves_rest_to:
        return [(recipe, list(tensors))]
    matrices = [each for each in tensors if _is_hidden_matrix(each)]
    others = [each for each in tensors if not _is_hidden_matrix(each)]
    return [(recipe, matrices), (_BY_KEY[recipe.leaves_rest_to], others)]


def _is_hidden_matrix(tensor: Tensor) -> bool:
    return len(tensor.shape) == 2 and not _EMBEDDING_OR_HEAD.search(tensor.name)


def _casts(masters: dict[str, int], form: StepForm) -> tuple[Temporary, ...]:
    """Return the bytes of gradients that are cast to float32 for the optimizer's step and are alive at one time.

    A step over all parameters together has all casts alive; a loop has one at a time, and the largest counts.
    """
    sizes = sorted(masters.values())[-1:] if form is StepForm.LOOP else masters.values()
    return tuple(Temporary(label="gradients in f32", bytes=size) for size in sizes)


def _reliability(recipe: _Recipe, casts: Sequence[Temporary], held_bytes: int) -> tuple[Basis, float]:
    """Return where the figures of an optimizer come from (their basis, such as exact or assumed) and their relative error.

    That mixed-precision optimizers cast all gradients at once is only a convention; the error covers optimizers that do not.
    """
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
    """Return the bytes of two optimizer states of a parameter in 8 bits: one byte per element, and a float32 maximum per block.

    Small tensors stay in float32.
    """
    if tensor.elements < _FEWEST_8BIT_ELEMENTS:
        return 2 * tensor.elements * 4
    return 2 * (tensor.elements + -(-tensor.elements // _BLOCK_ELEMENTS) * 4)


# One kernel per parameter reads and writes the weight, reads the gradient, and reads and writes both states.
_STEP_8BIT = OptimizerStep(3, 8, besides=lambda each: (2 * _two_in_8bit(each), 0))
_8BIT_NOTES = (
    "bitsandbytes' block-wise form: states of fewer than 4096 elements stay in f32; not counted: embeddings registered to "
    "stay in f32 (transformers' Trainer does that), and 2 KiB of tables that all parameters share",
)


def _two_by_torchao(bits: int, block: int) -> Callable[[Tensor], int]:
    """Return a function from a parameter to the bytes of its two optimizer states in torchao: codes of ``bits`` bits, and a
    float32 scale per block.

    Small or indivisible tensors keep the parameter's dtype.
    """

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
        notes=("as in torchao.optim, compiled per parameter",),
    )


_PAGED_NOTE = (
    "bitsandbytes' paged state is counted as host memory that crosses the link twice a step; as long as the device has room, "
    "the state stays on the device and this cost does not arise"
)
_MUON_NOTES = (
    "Muon updates matrices; AdamW updates embeddings, heads (recognised by their names) and all other shapes",
)
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
        notes=("as in lion-pytorch",),
    ),
    _Recipe(
        name="lamb",
        steps={StepForm.FUSED: OptimizerStep(13, 12)},
        state_bytes=lambda each: 2 * each.bytes,
        has_counters=False,
        basis=Basis.MODELLED,
        aliases=("fusedlamb",),
        notes=("as apex's FusedLAMB: the update takes the gradient's memory",),
    ),
    _Recipe(name="rmsprop", steps=steps.RMSPROP, state_bytes=lambda each: each.bytes),
    _Recipe(name="adagrad", steps=steps.ADAGRAD, state_bytes=lambda each: each.bytes),
)
_BY_KEY = {_key(name): recipe for recipe in _RECIPES for name in (recipe.name, *recipe.aliases)}
