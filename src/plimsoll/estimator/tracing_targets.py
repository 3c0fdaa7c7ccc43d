"""A target with its sizes in, the trace of one rank's step and the facts of the model out: fake tensors, cached by question.

An answer from the cache loads neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from plimsoll.artifacts.kernels import runs_gpu_kernels
from plimsoll.artifacts.model_facts import ModelFacts
from plimsoll.artifacts.precision import Precision
from plimsoll.artifacts.progress import Progress
from plimsoll.artifacts.trace import Trace
from plimsoll.errors import InvalidTarget
from plimsoll.estimator.caching.traces import KeptTrace, TraceCache
from plimsoll.estimator.targets.facts import facts_of
from plimsoll.estimator.targets.recipe import Recipe, find_recipe
from plimsoll.estimator.targets.target import Target, TargetOptions, load_target

if TYPE_CHECKING:
    import torch


_BALANCED = (
    "experts: every token goes to experts_per_token of them in one grouped product, none is dropped; "
    "that all experts get equally many is assumed"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """What is asked of one rank's step.

    ``target`` is what the command line takes, or a loaded ``Target``: a model and its batch. ``batch`` is in samples,
    ``sequence`` in tokens per sample as one rank sees it; ``None`` for the target's own. ``device_name`` chooses GPU or CPU
    kernels. ``tp``, ``ep`` and ``sequence_parallel`` say which part of the model the rank has.
    """

    target: str | Target
    device_name: str
    batch: int | None = None
    sequence: int | None = None
    precision: Precision | None = None
    tp: int = 1
    ep: int = 1
    sequence_parallel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTarget:
    """The trace of one rank's step, and the facts of the whole model."""

    trace: Trace
    facts: ModelFacts


def target_facts(request: TraceRequest) -> ModelFacts | None:
    """What a configuration says about the request, before anything is built; ``None`` where the target is a function.

    Raises:
        InvalidTarget: the target names nothing.
    """
    recipe = find_recipe(request.target) if isinstance(request.target, str) else None
    return None if recipe is None else facts_of(recipe, batch=request.batch, sequence=request.sequence)


def trace_target(
    request: TraceRequest, *, cache: TraceCache | None = None, progress: Progress | None = None
) -> TracedTarget:
    """Trace the step of one rank with fake tensors, or take the answer of an earlier run.

    Args:
        request: the target and what one rank has of it.
        cache: where answers for configurations are kept; ``None`` traces anew. Functions and loaded targets are not cached.
        progress: is told the stage and the share of it that is done.

    Returns:
        The trace, whose ``device`` is the request's, and the facts of the whole model.

    Raises:
        InvalidTarget: the target does not load, or a size means nothing for it.
        InvalidLayout: the model cannot be divided as asked.
        PlimsollError: whatever tracing refuses.
    """
    recipe = find_recipe(request.target) if isinstance(request.target, str) else None
    question = None if recipe is None or cache is None else _question(request, recipe)
    if cache is not None and question is not None:
        kept = cache.get(question)
        if kept is not None:
            return TracedTarget(trace=_for_device(kept.trace, request.device_name), facts=kept.facts)
    made = _trace(request, recipe, progress)
    if cache is not None and question is not None:
        cache.put(question, KeptTrace(trace=made.trace, facts=made.facts))
    return made


def _question(request: TraceRequest, recipe: Recipe) -> dict[str, Any]:
    """Everything that the answer depends on, but for versions."""
    return {
        "name": recipe.name,
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
    }


def _for_device(trace: Trace, device_name: str) -> Trace:
    return msgspec.structs.replace(trace, device=device_name)


def _trace(request: TraceRequest, recipe: Recipe | None, progress: Progress | None) -> TracedTarget:
    from plimsoll.tracing.trace import trace

    target = _load(request, progress)
    facts = _facts(request, recipe, target)
    with _one_rank_of(target.model, request) as division, target.autocast():
        made = trace(target.model, target.batch, loss=target.loss, device_name=request.device_name, progress=progress)
    notes = (*made.notes, *target.notes, *division, *((_BALANCED,) if facts.experts else ()))
    return TracedTarget(trace=msgspec.structs.replace(made, notes=notes), facts=facts)


def _load(request: TraceRequest, progress: Progress | None) -> Target:
    if isinstance(request.target, Target):
        if request.batch is not None or request.sequence is not None:
            raise InvalidTarget(
                "batch and sequence would have no effect on a model that is built already.",
                why="its batch is given with it",
                next="leave them out, or give a catalogue name or a config.json",
            )
        return request.target
    if progress is not None:
        progress(f"building {request.target}", 0.0)
    options = TargetOptions(batch=request.batch, sequence=request.sequence, is_meta=True, precision=request.precision)
    return load_target(request.target, options)


@contextlib.contextmanager
def _one_rank_of(model: torch.nn.Module, request: TraceRequest) -> Iterator[tuple[str, ...]]:
    """Let the model be what one rank has of it; yields what is to be said about the division."""
    if request.tp == 1 and request.ep == 1 and not request.sequence_parallel:
        yield ()
        return
    from plimsoll.estimator.local_rank.local import localised

    with localised(model, tp=request.tp, ep=request.ep, sequence_parallel=request.sequence_parallel) as local:
        yield local.notes


def _facts(request: TraceRequest, recipe: Recipe | None, target: Target) -> ModelFacts:
    """The configuration's facts with what only the built model knows: its parameters."""
    from plimsoll.estimator.targets.counting import count_parameters, described

    if recipe is None:
        facts = described(target)
    else:
        facts = facts_of(recipe, batch=request.batch, sequence=request.sequence)
    total, active = count_parameters(target.model, facts)
    return msgspec.structs.replace(facts, parameters=total, active_parameters=active)
