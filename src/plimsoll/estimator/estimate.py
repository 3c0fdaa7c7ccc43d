"""``plimsoll.estimate``: the whole training budget of every rank of a job, without a GPU or weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from plimsoll.artifacts.decision import Status
from plimsoll.artifacts.estimate import Estimate, LayoutChoice
from plimsoll.artifacts.job import Layout, ModelFacts, Precision, Techniques, parse_precision, read_techniques
from plimsoll.artifacts.progress import Progress, part_of, silent
from plimsoll.artifacts.trace import Trace
from plimsoll.errors import InvalidBudget, InvalidLayout, InvalidOption
from plimsoll.estimator.budget import tensor_room
from plimsoll.estimator.estimate_job import EstimateJob
from plimsoll.estimator.layout_search import LayoutSearch, MakeJob
from plimsoll.estimator.layout_space import LayoutSpace
from plimsoll.estimator.lowering import check_framework, lowering_notes
from plimsoll.estimator.parallelism.context import with_context_parallel
from plimsoll.estimator.parallelism.layouts import check_layout, read_layout
from plimsoll.estimator.setting import AUTO, NOTHING, Setting
from plimsoll.estimator.setting_checks import check_auto, check_gradients, check_setting
from plimsoll.estimator.targets.recipe import find_recipe
from plimsoll.estimator.targets.target import Target, check_precision
from plimsoll.estimator.targets.tracing import TraceRequest, target_facts, trace_target
from plimsoll.estimator.techniques import with_techniques
from plimsoll.estimator.trace_cache import AnswerCache, TracedTarget
from plimsoll.planning.costing.devices import Device, find_device
from plimsoll.session.options import AUTO_MARGIN, Budget, check_text
from plimsoll.units import check_count, format_bytes

if TYPE_CHECKING:
    import torch

TraceKey = tuple[int, int, int, bool, int | None]


def estimate(
    target: str | torch.nn.Module,
    batch: Any = None,
    *,
    device: str = "H100-SXM",
    sequence: int | None = None,
    precision: str | Precision | None = None,
    optimizer: str = "adamw",
    has_master_weights: bool = False,
    layout: str | Layout = "",
    strategy: str | None = None,
    budget: int | str | None = None,
    export: str | None = None,
    techniques: str | Techniques = "",
    loss: Callable[[Any], torch.Tensor] | None = None,
    progress: Progress | None = None,
) -> Estimate:
    """Estimate what training needs on devices that this machine lacks: memory by item, the moment of the peak, and speed.

    One rank's step is traced with fake tensors and the device's kernels, then cut into pipeline stages and sharded. It does not
    need weights or a GPU. The answer for a catalogue name or a ``config.json`` is stored in the user's cache directory, so the
    next question about the same model takes seconds.

    Args:
        target: a catalogue name (``"llama-3-70b"``), the path of a Hugging Face ``config.json``, ``package.module:function``,
            or a model, which may be on the meta device.
        batch: samples per micro-batch and rank; for a model, the batch itself. Under ``cp`` (context parallelism) the batch has
            one rank's part of the sequence.
        device: a name from the catalogue of devices.
        sequence: tokens per sample, before context parallelism splits them; by default the target's own.
        precision: ``fp32``, ``bf16``, ``fp16``, ``bf16-mixed``, ``fp16-mixed`` or ``fsdp-bf16``; by default the dtypes of the
            model itself. A model that is already built must have the dtype that it names (``bf16`` for ``fsdp-bf16``).
        optimizer: a name (``"adamw"``, ``"adamw-8bit"``, ``"sgd"``, ``"adafactor"``, ``"muon"`` …), or ``"none"``.
        has_master_weights: whether the optimizer keeps a copy in float32 of weights that have a narrower dtype.
        layout: how the job is spread over ranks: ``"dp=8,tp=8,sp,pp=16,zero=1,schedule=1f1b,micro-batches=64"``; by default one
            rank. With ``"ranks=64,samples=512"`` the fastest layout of 64 ranks is chosen, and the micro-batch size if
            ``batch`` is not given; ``layouts`` of the result has the runners-up.
        strategy: ``none`` (the default without a budget), ``full``, ``every:k``, ``sqrt``, ``selective:…``, or ``auto``: the
            fastest plan that fits within ``budget`` (the default with a budget).
        budget: bytes for the tensors of one rank, or ``"auto"``: the device's memory minus the framework's, minus the bytes
            that published runs held and that the other items do not explain, minus 8%.
        export: the framework whose own switches must keep within ``budget`` (by default ``"auto"``): ``megatron``,
            ``torchtitan`` or ``transformers``. Settings that offload are tried if the device has a link to its host. The
            estimate is for the best setting; ``switches`` also lists the settings with the closest peaks.
        techniques: other things that the run does: ``"gradients=fp32,loss=fused,optimizer-in-backward"``
            (``docs/estimate.md``).
        loss: a function from the model's output to a scalar, for a model that does not return its loss.
        progress: a function that is called with the name of the current stage and the share of the work that is done.

    Returns:
        The estimate, which can be printed and saved; every figure has an error and a basis, or is marked unsupported.

    Raises:
        InvalidTarget, InvalidLayout, UnknownDevice, UnknownOptimizer, InvalidStrategy, InvalidBudget, InvalidOption: as named.
        TracingFailed: the model cannot be traced without data.

    Example:
        >>> found = plimsoll.estimate("llama-tiny", device="A100", layout="dp=8,zero=3")  # doctest: +SKIP
        >>> found.does_fit  # doctest: +SKIP
        True

    Known weakness: these estimates have not been compared with a GPU; peaks on CPUs have been (``docs/estimate.md``).
    """
    started = time.monotonic()
    report = progress or silent
    check_words(
        precision=precision, layout=layout, techniques=techniques, optimizer=optimizer, strategy=strategy, export=export
    )
    refuse_loss(target, loss)
    if sequence is not None:
        check_count("sequence", sequence, least=1)
    asked = find_device(device)
    space = LayoutSpace.read(layout)
    if space is None and export is None:
        check_auto(strategy, budget)
    spread = read_layout(layout) if space is None else Layout()
    budget = AUTO if budget is None and (space is not None or export is not None) else budget
    setting = Setting(
        device=asked,
        layout=spread,
        optimizer=None if optimizer == "none" else optimizer,
        has_master_weights=has_master_weights,
        strategy=(AUTO if budget is not None else NOTHING) if strategy is None else strategy,
        budget_bytes=read_budget(budget, asked, spread),
        precision=parse_precision(precision),
        how=read_techniques(techniques),
    )
    question = _question(target, setting, batch=batch, sequence=sequence, layout=layout, budget=budget, export=export)
    if (kept := _kept(question)) is not None:
        return msgspec.structs.replace(kept, total_seconds=time.monotonic() - started)
    traces: dict[TraceKey, tuple[TracedTarget, Trace]] = {}

    def make(at: Layout, samples: Any) -> EstimateJob:
        there = replace(setting, layout=at)
        request = _request(target, samples, sequence, loss, there)
        check_setting(there)
        job = _job(request, there, traces, part_of(report, 0.0, 0.8))
        # DeepEP's buffers follow from the model's width, which is known now.
        room = read_budget(budget, asked, at, job.exchanged_bytes)
        job.setting = replace(there, budget_bytes=room)
        return job

    setting = setting if export is None else _without_strategy(setting, export, strategy)
    asked_first = _request(target, batch, sequence, loss, setting)
    job, layouts = _search(space, make, asked_first, batch, setting, part_of(report, 0.0, 0.9), budget)
    trace_seconds = time.monotonic() - started
    report("simulating every rank", 0.9)
    job, switches = job.lower(export)
    found = job.run(_name(target), trace_seconds, started)
    notes = (*found.notes, *lowering_notes(asked, export))
    found = msgspec.structs.replace(found, framework=export or "", switches=switches, layouts=layouts, notes=notes)
    return _keep(question, found)


def _search(
    space: LayoutSpace | None,
    make: MakeJob,
    first: TraceRequest,
    batch: Any,
    setting: Setting,
    progress: Progress,
    budget: int | str | None,
) -> tuple[EstimateJob, tuple[LayoutChoice, ...]]:
    """Return the job that computes the estimate, and the fastest layouts in order. The job is for the given layout, or for the
    fastest layout of ``space``. Without a space the list of layouts is empty.

    A target that is a function or a model brings its own batch, which does not change from layout to layout. If ``budget`` is
    the device's memory, the layout must fit it together with its error.
    """
    if space is None:
        return make(setting.layout, batch), ()
    strategy, is_for_device = setting.strategy, budget == AUTO
    facts = target_facts(first) if isinstance(first.target, str) else None
    if facts is not None:
        return LayoutSearch(space, make, strategy, facts, is_for_device=is_for_device).run(batch, progress)
    facts = make(Layout(), batch).facts
    search = LayoutSearch(space, lambda at, _: make(at, batch), strategy, facts, is_for_device=is_for_device)
    return search.run(facts.batch, progress)


def _question(target: str | torch.nn.Module, setting: Setting, **sizes: Any) -> dict[str, Any] | None:
    """Return the cache's key for an estimate: a mapping with everything that the estimate depends on, except the versions of
    libraries.

    Return ``None`` for a model or a function, which could do anything.
    """
    recipe = find_recipe(target) if isinstance(target, str) else None
    if recipe is None or not all(isinstance(size, int | str | Layout | None) for size in sizes.values()):
        return None
    return {"target": target, "recipe": recipe, "setting": setting, **sizes}


def _kept(question: dict[str, Any] | None) -> Estimate | None:
    """Return the estimate that the cache has for this key, or ``None``. Its ``trace_seconds`` are 0, because nothing was traced
    now.
    """
    kept = None if question is None else AnswerCache(Estimate).get(question)
    return None if kept is None else msgspec.structs.replace(kept, trace_seconds=0.0)


def _keep(question: dict[str, Any] | None, found: Estimate) -> Estimate:
    """Store the estimate in the cache under this key, and return the estimate. An estimate with a plan whose search timed out
    is not stored.
    """
    statuses = {plan.status for stage in found.stages for plan in stage.plans}
    if question is not None and Status.TIMED_OUT not in statuses:
        AnswerCache(Estimate).put(question, found)
    return found


def _name(target: str | torch.nn.Module) -> str:
    return target if isinstance(target, str) else type(target).__name__


def _job(
    request: TraceRequest, setting: Setting, traces: dict[TraceKey, tuple[TracedTarget, Trace]], progress: Progress
) -> EstimateJob:
    """Make the estimate's job for one layout. Layouts that give a rank the same step share one trace."""
    layout = setting.layout
    key = (layout.tp, layout.ep, layout.cp, layout.sequence_parallel, request.batch)
    if key not in traces:
        traced = _traced(request, layout, progress)
        check_gradients(setting, traced.trace)
        whole = None if traced.facts.sequence is None else traced.facts.sequence * layout.cp
        reads_both_ways = "mxf8" in setting.device.peak_flops_per_second
        step = with_techniques(traced.trace, setting.how, whole, reads_both_ways=reads_both_ways)
        traces[key] = traced, with_context_parallel(step, layout.cp)
    traced, step = traces[key]
    return EstimateJob(setting, traced, step)


_TAKEN = {"precision": Precision | None, "layout": Layout, "techniques": Techniques, "optimizer": str}
"""The type that an option of an estimate may have instead of text. Options that are not listed may be ``None`` instead."""


def check_words(**given: object) -> None:
    """Raise an error for an option of an estimate that is neither text nor of another type that the option may have.

    Raises:
        InvalidOption: names the option.
    """
    for name, value in given.items():
        if not isinstance(value, _TAKEN.get(name, type(None))):
            check_text(name, value)


def _request(
    target: str | torch.nn.Module,
    batch: Any,
    sequence: int | None,
    loss: Callable[[Any], torch.Tensor] | None,
    setting: Setting,
) -> TraceRequest:
    """Return the request to trace one rank's step: which model, which batch, and which part of the model the layout gives a
    rank.
    """
    layout = setting.layout
    precision = None if setting.precision is None else setting.precision.traced
    request = TraceRequest(
        target=target if isinstance(target, str) else _given(target, batch, sequence, loss, precision),
        device_name=setting.device.name,
        precision=precision,
        tp=layout.tp,
        ep=layout.ep,
        sequence_parallel=layout.sequence_parallel,
        how=setting.how,
    )
    return _with_sizes(request, batch, sequence, layout) if isinstance(target, str) else request


def _traced(request: TraceRequest, layout: Layout, progress: Progress) -> TracedTarget:
    """Check that the layout divides the model, then trace the step.

    Raises:
        InvalidLayout: the layout does not divide the model.
    """
    facts = target_facts(request)
    if facts is not None:
        whole = None if facts.sequence is None else facts.sequence * layout.cp
        check_layout(layout, msgspec.structs.replace(facts, sequence=whole))
    return trace_target(request, cache=AnswerCache(TracedTarget), progress=progress)


def _without_strategy(setting: Setting, framework: str, strategy: str | None) -> Setting:
    """Return the options of an estimate that chooses among the memory-saving switches of a training framework, with
    ``strategy`` left open.

    Raise an error if the user gave ``strategy=``, because each setting of the switches is itself a strategy.
    """
    check_framework(framework, setting.how)
    if strategy is not None:
        raise InvalidOption(
            f"strategy={strategy!r} cannot be combined with export={framework!r}.",
            why="export= chooses the framework's switches, and each setting of the switches is itself a strategy",
            next="leave out strategy= or export=",
        )
    return replace(setting, strategy=NOTHING)


def _given(
    model: torch.nn.Module,
    batch: Any,
    sequence: int | None,
    loss: Callable[[Any], torch.Tensor] | None,
    precision: Precision | None,
) -> Target:
    """Make a target (a model with its batch and loss) of a model that the caller passed. The batch is one rank's batch, so a
    sequence length cannot be chosen here.
    """
    from plimsoll.session.task import check_model, explained_loss

    check_model(model)
    if sequence is not None:
        raise InvalidOption(
            f"sequence={sequence} would not have an effect, because the model comes with its batch.",
            why="the batch sets the sequence length",
            next="leave sequence= out, or pass a batch of that length",
        )
    check_precision(model, precision, type(model).__name__)
    return Target(model=model, batch=batch, loss=explained_loss(loss), precision=precision)


def _with_sizes(request: TraceRequest, batch: Any, sequence: int | None, layout: Layout) -> TraceRequest:
    """Return the request with its batch size and sequence length filled in, for a target (a model with its batch) that is given
    by name.

    The sequence is one rank's part of the whole sequence.
    """
    if batch is not None and (not isinstance(batch, int) or isinstance(batch, bool) or batch < 1):
        raise InvalidOption(
            f"batch={batch!r} is not a number of samples.",
            why=f"{request.target} makes its own random batch, and batch= is the number of samples in it",
            next="pass a number such as batch=1, or pass the model itself with its batch",
        )
    asked = target_facts(replace(request, batch=batch, sequence=sequence))
    if asked is not None and asked.sequence is None and layout.cp > 1:
        raise InvalidLayout(
            f"cp={layout.cp} is not supported for {request.target}, whose samples are not text.",
            why="context parallelism splits the tokens of a sample, and the configuration does not say how many there are",
            next="leave cp= out, or pass a model with the batch of one rank",
        )
    total = sequence or (None if asked is None else asked.sequence)
    local = None if total is None or (sequence is None and layout.cp == 1) else _share(total, layout)
    return replace(request, batch=batch, sequence=local)


def _share(sequence: int, layout: Layout) -> int:
    """Return the length of the sequence that one rank sees.

    Raises:
        InvalidLayout: context parallelism does not divide the sequence.
    """
    check_layout(layout, ModelFacts(name="the batch", architecture="", sequence=sequence))
    return sequence // layout.cp


def refuse_loss(target: str | torch.nn.Module, loss: object) -> None:
    """Raise an error if a loss is given together with a target by name.

    Raises:
        InvalidOption: the loss would not have an effect.
    """
    if isinstance(target, str) and loss is not None:
        raise InvalidOption(
            f"loss= would not have an effect on {target}.",
            why="a target given by name has its own batch and loss",
            next="leave loss= out, or pass the model itself with its batch",
        )


def read_budget(budget: int | str | None, device: Device, layout: Layout, token_bytes: int = 0) -> int | None:
    """Return the budget for the tensors of one rank in bytes, or ``None`` without a budget.

    For ``auto`` it is what the device has left after everything else, minus a margin. ``token_bytes`` is the size of a token
    that DeepEP sends, or 0 without DeepEP.

    Raises:
        InvalidBudget: nothing is left on the device, or the text is not an amount of bytes.
    """
    if budget == AUTO:
        room = int(tensor_room(device, layout, token_bytes) * (1 - AUTO_MARGIN))
        if room <= 0:
            raise InvalidBudget(
                f"budget='auto' leaves nothing for tensors on {device.name}.",
                why=f"context, kernels, workspaces and communication take all of its {format_bytes(device.memory_bytes)}",
                next="name a device with more memory, or pass a budget in bytes",
            )
        return room
    return Budget.read(budget).asked_bytes
