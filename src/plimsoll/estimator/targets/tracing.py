"""Traces one rank's step of a target (a model with its batch) with fake tensors, or takes an earlier trace from the cache.

An answer from the cache does not import torch or transformers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from plimsoll.artifacts.job import ModelFacts, Precision, Techniques
from plimsoll.artifacts.progress import Progress, silent
from plimsoll.artifacts.trace import runs_gpu_kernels
from plimsoll.errors import InvalidTarget
from plimsoll.estimator.targets.recipe import Recipe, facts_of, find_recipe
from plimsoll.estimator.targets.target import Target, TargetOptions, load_target
from plimsoll.estimator.trace_cache import AnswerCache, TracedTarget

if TYPE_CHECKING:
    import torch

_BALANCED = (
    "experts: every token goes to experts_per_token experts in one grouped product, and no token is dropped; "
    "the estimate assumes that all experts get the same number of tokens"
)


_ANY_GPU = "GPU"
"""The device name for traces of all GPUs, because one trace serves them all.

Its attention is FlashAttention, as in the published runs that estimates are compared with. A technique may change that
(Transformer Engine uses cuDNN's).
"""


_TRACED_TILES = 2
"""The number of tiles of a call that are traced. All tiles after the second need the same memory as the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """Says what to trace, as data: which model, which batch, and which part of the model one rank has.

    ``target`` is text as on the command line, or a loaded ``Target``: a model and its batch. ``batch`` is in samples,
    ``sequence`` in tokens per sample as one rank sees it; For ``batch`` and ``sequence``, ``None`` means the target's own.
    ``device_name`` chooses GPU or CPU kernels. ``tp``, ``ep`` and ``sequence_parallel`` say which part of the model the rank
    has.
    """

    target: str | Target
    device_name: str
    batch: int | None = None
    sequence: int | None = None
    precision: Precision | None = None
    tp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    is_tiled: bool = False
    """Whether module calls that work row by row run in as many tiles as possible. Only two tiles of each call are traced: the
    trace has the memory of all tiles, but not their seconds."""
    how: Techniques = field(default_factory=Techniques)
    """The techniques of the job. Only techniques that change the model itself matter here: adapters, kernels of experts."""


def target_facts(request: TraceRequest) -> ModelFacts | None:
    """Return the model's sizes as its configuration tells them, before a model is built.

    Return ``None`` if the target is a function.

    Raises:
        InvalidTarget: the target's name is unknown.
    """
    recipe = find_recipe(request.target) if isinstance(request.target, str) else None
    return None if recipe is None else facts_of(recipe, batch=request.batch, sequence=request.sequence)


def trace_target(
    request: TraceRequest, *, cache: AnswerCache[TracedTarget] | None = None, progress: Progress = silent
) -> TracedTarget:
    """Trace one rank's step of a target (a model with its batch) with fake tensors, or return the cached trace of an earlier
    run.

    Only traces of configurations are cached; with ``cache=None`` the step is always traced. Facts describe the whole model.

    Raises:
        InvalidTarget: the target cannot be loaded, or a given size does not apply to it.
        InvalidLayout: the model cannot be divided as requested.
        PlimsollError: any error of tracing itself.
    """
    recipe = find_recipe(request.target) if isinstance(request.target, str) else None
    if cache is None or recipe is None:
        return _trace(request, recipe, progress)
    question = _question(request, recipe)
    kept = cache.get(question)
    if kept is not None:
        return replace(kept, trace=replace(kept.trace, device=request.device_name))
    made = _trace(request, recipe, progress)
    cache.put(question, made)
    return made


def _question(request: TraceRequest, recipe: Recipe) -> dict[str, Any]:
    """Return the cache's key for a trace: a mapping with everything that the trace depends on, except the versions of
    libraries.
    """
    return {
        "name": recipe.name,
        "library": recipe.library,
        "architecture": recipe.architecture,
        "fields": dict(recipe.fields),
        "notes": recipe.notes,
        "batch": request.batch or recipe.batch,
        "sequence": request.sequence,
        "default_sequence": recipe.sequence,
        "precision": None if request.precision is None else request.precision.value,
        "has_gpu_kernels": runs_gpu_kernels(request.device_name),
        "tp": request.tp,
        "ep": request.ep,
        "sequence_parallel": request.sequence_parallel,
        "moe": request.how.moe,
        "is_tiled": request.is_tiled,
        "adapters": [request.how.lora, request.how.qlora, request.how.lora_on, request.how.adapters],
    }


def _trace(request: TraceRequest, recipe: Recipe | None, progress: Progress) -> TracedTarget:
    from plimsoll.tracing.trace import trace

    target = _load(request, progress)
    facts = _facts(request, recipe, target)
    with _adapted(target.model, request) as changes, _one_rank_of(target.model, request) as division, target.autocast():
        device_name = _ANY_GPU if runs_gpu_kernels(request.device_name) else request.device_name
        with _in_tiles(target, device_name) if request.is_tiled else contextlib.nullcontext():
            made = trace(target.model, target.batch, loss=target.loss, device_name=device_name, progress=progress)
    made = replace(made, device=request.device_name)
    notes = (*made.notes, *target.notes, *changes, *division, *((_BALANCED,) if facts.experts else ()))
    return TracedTarget(trace=replace(made, notes=notes), facts=facts)


def _load(request: TraceRequest, progress: Progress) -> Target:
    if isinstance(request.target, Target):
        if request.batch is not None or request.sequence is not None:
            raise InvalidTarget(
                "batch and sequence would not have an effect on a model that is already built.",
                why="the model comes with its own batch",
                next="leave batch and sequence out, or pass a catalogue name or a config.json",
            )
        return request.target
    progress(f"building {request.target}", 0.0)
    options = TargetOptions(batch=request.batch, sequence=request.sequence, is_meta=True, precision=request.precision)
    return load_target(request.target, options)


def _adapted(model: torch.nn.Module, request: TraceRequest) -> contextlib.AbstractContextManager[tuple[str, ...]]:
    """Return a context that adds the requested adapters to the model while it is active."""
    if not request.how.is_adapting:
        return contextlib.nullcontext(())
    from plimsoll.estimator.targets.adapters import adapted

    return adapted(model, request.how)


@contextlib.contextmanager
def _in_tiles(target: Target, device_name: str) -> Iterator[None]:
    """Run the model's row-wise calls in tiles inside the ``with`` statement, two tiles of each."""
    from plimsoll.engine.tiles import in_tiles
    from plimsoll.session.tiling import most_tiles, worth_tiling
    from plimsoll.tracing.rows import find_rowwise_calls

    calls = worth_tiling(find_rowwise_calls(target.model, target.batch, device_name=device_name))
    with in_tiles(target.model, most_tiles(calls), only_first=_TRACED_TILES):
        yield


@contextlib.contextmanager
def _one_rank_of(model: torch.nn.Module, request: TraceRequest) -> Iterator[tuple[str, ...]]:
    """Reduce the model to the part that one rank has, inside the ``with`` statement.

    It yields notes about the division for the user.
    """
    if request.tp == 1 and request.ep == 1 and not request.sequence_parallel and not request.how.moe:
        yield ()
        return
    from plimsoll.estimator.local_rank.local import localised

    with localised(
        model, tp=request.tp, ep=request.ep, sequence_parallel=request.sequence_parallel, moe=request.how.moe
    ) as local:
        yield local.notes


def _facts(request: TraceRequest, recipe: Recipe | None, target: Target) -> ModelFacts:
    """Return the sizes of the model from its configuration, completed with the built model's number of parameters."""
    if recipe is None:
        facts = described(target)
    else:
        facts = facts_of(recipe, batch=request.batch, sequence=request.sequence)
    total, active = count_parameters(target.model, facts)
    return replace(facts, parameters=total, active_parameters=active)


def count_parameters(model: torch.nn.Module, facts: ModelFacts) -> tuple[int, int | None]:
    """Return two numbers: how many parameters the model has, and how many of them one token passes through.

    The second count is ``None`` if the model has experts but does not say how many a token uses. Stacked experts are recognised
    by their first dimension, which equals the number of experts. Tied parameters count once.
    """
    total = active = 0
    for name, parameter in model.named_parameters():
        count = parameter.numel()
        total += count
        is_stacked = parameter.dim() == 3 and ".experts." in name and parameter.shape[0] == facts.experts
        active += count * (facts.experts_per_token or 0) // parameter.shape[0] if is_stacked else count
    if facts.experts and not facts.experts_per_token:
        return total, None
    return total, active


def described(target: Target) -> ModelFacts:
    """Return the sizes of a model that a function built.

    They come from the model's configuration if it has one, otherwise from its batch.
    """
    model = target.model
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    to_dict = getattr(config, "to_dict", None)
    fields = to_dict() if callable(to_dict) else {}
    samples, sequence = _sizes(target.batch)
    known = fields if isinstance(fields, Mapping) else {}
    recipe = Recipe(name=name, architecture=name, fields=known, batch=samples or 1, sequence=sequence)
    return replace(facts_of(recipe), batch=samples)


def _sizes(batch: Any) -> tuple[int | None, int | None]:
    """Return the number of samples and the number of text tokens per sample. Each is ``None`` if the batch does not show it."""
    import torch

    if isinstance(batch, Mapping):
        tokens = batch.get("input_ids")
        if isinstance(tokens, torch.Tensor) and tokens.dim() == 2:
            return tokens.shape[0], tokens.shape[1]
        tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    elif isinstance(batch, torch.Tensor):
        tensors = [batch]
    else:
        tensors = [value for value in batch if isinstance(value, torch.Tensor)] if isinstance(batch, tuple) else []
    return next((tensor.shape[0] for tensor in tensors if tensor.dim() > 0), None), None
