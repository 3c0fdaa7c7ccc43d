"""``longest_sequence``: how many tokens a sample may have on a device, without memory-saving decisions, and with one more of
them in each row.

The step is traced at two lengths. Every size in it is an expression in the length, so the trace of any other length follows
(`plimsoll.planning.family`). A length fits if the estimate of its step fits. The longest one is searched between a length that
fits and one that does not, until they differ by 1 to 2%.

Rows that cut calls into tiles need traces of their own. In these, each call runs two of its tiles, with the memory of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from plimsoll.artifacts.estimate import StageEstimate
from plimsoll.artifacts.job import Layout, ModelFacts, Precision, Techniques, parse_precision, read_techniques
from plimsoll.artifacts.lengths import LengthRow, SequenceLengths
from plimsoll.artifacts.progress import Progress, part_of, silent
from plimsoll.artifacts.trace import Trace
from plimsoll.errors import InvalidOption, PlimsollError
from plimsoll.estimator.budget import TENSOR_ITEMS, has_caching_allocator
from plimsoll.estimator.estimate import check_words, read_budget, refuse_loss
from plimsoll.estimator.estimate_job import EstimateJob
from plimsoll.estimator.parallelism.layouts import check_layout, read_layout
from plimsoll.estimator.rank_estimates import StageOfRank
from plimsoll.estimator.setting import EVERYTHING, NOTHING, Setting
from plimsoll.estimator.setting_checks import check_gradients, check_longest, check_setting
from plimsoll.estimator.targets.recipe import find_recipe
from plimsoll.estimator.targets.target import Target, TargetOptions, check_precision, load_target
from plimsoll.estimator.targets.tracing import TraceRequest, target_facts, trace_target
from plimsoll.estimator.techniques import with_techniques
from plimsoll.estimator.trace_cache import AnswerCache, TracedTarget
from plimsoll.planning.choice import Choice
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.family import Family, find_difference
from plimsoll.planning.simulate import Simulation, run_choices
from plimsoll.planning.solve import Planner
from plimsoll.planning.strategies import send_kept
from plimsoll.units import check_count, format_bytes

if TYPE_CHECKING:
    import torch

Excess = Callable[[int], tuple[int, int]]
"""A function from a length to the bytes over the limit (negative if the step fits) and their error in bytes."""

_TRACED = (32_768, 65_536)
"""The lengths in tokens at which the step is traced. A trace of a long sequence takes as long as one of a short sequence."""
_FIRST_TRIED = 8_192
_LEAST_TRACED = 4
_MOST_TOKENS = 2**24
_FINE, _COARSE, _COARSE_FROM = 128, 1_024, 65_536
"""Lengths are multiples of 128 tokens, and of 1,024 from 65,536 tokens on."""
_STRAIGHT_TRIES = 6
"""How many lengths are tried where a straight line meets the limit, before the interval is halved instead. Memory is nearly
linear in the length.
"""
_ROPE = ("rope_theta", "rope_parameters", "rope_scaling")
"""Fields of model configurations that say that positions are rotary, so that they do not limit the length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """Data: one row of the answer: which memory-saving decisions it allows."""

    name: str
    may_recompute: bool = True
    is_planned: bool = True
    is_tiled: bool = False
    is_sending: bool = False
    is_chunked: bool = False


_LEVELS = (
    _Level(name="keep everything", may_recompute=False, is_planned=False),
    _Level(name="checkpoint every block", is_planned=False),
    _Level(name="recompute by plan"),
    _Level(name="+ tiles", is_tiled=True),
    _Level(name="+ offloaded inputs", is_tiled=True, is_sending=True),
    _Level(name="+ loss in chunks", is_tiled=True, is_sending=True, is_chunked=True),
)


def longest_sequence(
    target: str | torch.nn.Module,
    batch: Any = None,
    *,
    device: str = "H100-SXM",
    budget: int | str | None = None,
    precision: str | Precision | None = None,
    optimizer: str = "adamw",
    has_master_weights: bool = False,
    layout: str | Layout = "",
    techniques: str | Techniques = "",
    loss: Callable[[Any], torch.Tensor] | None = None,
    progress: Progress | None = None,
) -> SequenceLengths:
    """Find the longest sequence that fits on a device, without decisions and with one more decision in each row.

    The rows are: keep everything; checkpoint every block; recompute by plan; also run calls in tiles; also offload what is kept
    for backward, such as the inputs of blocks; also compute the loss in chunks. It needs neither weights nor a GPU. The first
    question about a model takes a minute or two, the next ones some seconds.

    Args:
        target: a catalogue name, the path of a ``config.json``, ``package.module:function``, or a model.
        batch: samples per step (1 by default). For a model: a sample batch whose token dimension can be cut and repeated, or a
            function ``(samples, tokens) -> batch``. A target function brings its own sample batch.
        device: a name from the catalogue of devices.
        budget: bytes for the tensors of one rank, or ``"auto"``, as for ``plimsoll.estimate``. Without it, a step
            must fit the device together with the memory of the framework and the allocator.
        precision: as for ``plimsoll.estimate``.
        optimizer: as for ``plimsoll.estimate``.
        has_master_weights: as for ``plimsoll.estimate``.
        layout: data-parallel ranks and shards only, such as ``"dp=8,zero=3"``.
        techniques: as for ``plimsoll.estimate``, such as ``"lora=16"``.
        loss: a function from the model's output to a scalar, for a model that does not return its loss.
        progress: a function that is called with the name of the current stage and the share of the work that is done.

    Returns:
        The lengths, which can be printed and saved. Lengths are multiples of 128 tokens, or of 1,024 from 65,536 on.

    Raises:
        InvalidTarget, UnknownDevice, UnknownOptimizer, InvalidBudget: as named.
        InvalidOption: the target does not have a sequence, or a technique is one that the rows add.
        InvalidLayout: the layout divides a sample or the model over ranks.
        TracingFailed: the model cannot be traced without data.

    Example:
        >>> found = longest_sequence("llama-tiny", device="H100", budget="200MiB", precision="bf16")
        >>> [row.name for row in found.rows][:3]
        ['keep everything', 'checkpoint every block', 'recompute by plan']
        >>> found.rows[0].tokens < found.rows[1].tokens <= found.longest
        True

    Known weakness: tiles are traced with their memory only, so the result does not have seconds. If one kernel computes the
    attention, ``attention`` names the kernel that is assumed.
    """
    started = time.monotonic()
    report = progress or silent
    check_words(precision=precision, layout=layout, techniques=techniques, optimizer=optimizer)
    refuse_loss(target, loss)
    asked = find_device(device)
    spread = read_layout(layout)
    setting = Setting(
        device=asked,
        layout=spread,
        optimizer=None if optimizer == "none" else optimizer,
        has_master_weights=has_master_weights,
        strategy=NOTHING,
        budget_bytes=read_budget(budget, asked, spread),
        precision=parse_precision(precision),
        how=read_techniques(techniques),
    )
    check_longest(spread, setting.how)
    check_setting(setting)
    if setting.budget_bytes is None and asked.memory_bytes is None:
        raise InvalidOption(
            f"The memory of {asked.name} is unknown.",
            why="without a budget, the longest sequence fills the device",
            next="pass a budget in bytes",
        )
    steps = _Steps.read(target, batch, setting, loss, part_of(report, 0.0, 0.6))
    check_gradients(setting, steps.traced.trace)
    rows, notes = _find_rows(steps, setting, part_of(report, 0.6, 1.0))
    whole = steps.family(is_tiled=False)
    return SequenceLengths(
        target=target if isinstance(target, str) else type(target).__name__,
        model=steps.traced.trace.model,
        device=asked.name,
        device_bytes=asked.memory_bytes,
        budget_bytes=setting.budget_bytes,
        precision="the model's own types" if setting.precision is None else setting.precision.value,
        optimizer=optimizer,
        layout=spread,
        techniques=setting.how,
        facts=msgspec.structs.replace(steps.traced.facts, sequence=None),
        batch=steps.samples,
        attention=_attention_of(steps.traced.trace),
        limit_tokens=steps.most_tokens,
        rows=tuple(rows),
        traced_tokens=tuple(sequence for _, sequence in whole.shapes),
        notes=(*steps.traced.trace.notes, *steps.notes(rows), *notes),
        trace_seconds=steps.trace_seconds,
        total_seconds=time.monotonic() - started,
    )


class _Steps:
    """The step of one model at any length of its sequence, whole or in tiles."""

    def __init__(self, request: TraceRequest, most_tokens: int, traced: tuple[int, int], resize: Any) -> None:
        self._request = request
        self._resize = resize
        self._lengths = traced
        self._families: dict[bool, Family[tuple[int, int]]] = {}
        self.most_tokens = most_tokens
        self.samples = 1
        self.traced: TracedTarget
        self.trace_seconds = 0.0

    @classmethod
    def read(cls, target: str | torch.nn.Module, batch: Any, setting: Setting, loss: Any, progress: Progress) -> _Steps:
        """Read the target (a model with its batch), and trace its whole step.

        Raises:
            InvalidOption: the target does not have a sequence.
        """
        precision = None if setting.precision is None else setting.precision.traced
        request = TraceRequest(target="", device_name=setting.device.name, precision=precision, how=setting.how)
        if isinstance(target, str) and (recipe := find_recipe(target)) is not None:
            samples = 1 if batch is None else batch
            check_count("batch", samples, least=1)
            request = replace(request, target=target, batch=samples)
            facts = target_facts(request)
            if facts is None or facts.sequence is None:
                raise _without_sequence(target, "the configuration is not one of a model that reads tokens")
            most = _MOST_TOKENS
            if not any(recipe.fields.get(key) for key in _ROPE):
                loaded = load_target(target, TargetOptions(batch=1, sequence=None, is_meta=True, precision=precision))
                most = _positions_of(loaded.model)
            check_layout(setting.layout, facts)
            made = cls(request, most, _between(most), None)
            made.samples = samples
        else:
            made = cls._of_model(target, batch, request, loss)
        made._trace(is_tiled=False, progress=progress)
        return made

    @classmethod
    def _of_model(cls, target: str | torch.nn.Module, batch: Any, request: TraceRequest, loss: Any) -> _Steps:
        """Return the steps at any length for a model that the caller, or a function that the target names, made together with a
        sample batch.
        """
        from plimsoll.estimator.fit.search import Shape
        from plimsoll.estimator.fit.single_device import MicroBatches
        from plimsoll.session.task import check_model, explained_loss

        if isinstance(target, str):
            loaded = load_target(target, TargetOptions(batch=batch, precision=request.precision))
        else:
            check_model(target)
            check_precision(target, request.precision, type(target).__name__)
            loaded = Target(model=target, batch=batch, loss=explained_loss(loss), precision=request.precision)
        is_made = callable(loaded.batch) and not hasattr(loaded.batch, "shape")
        batches = MicroBatches(loaded.batch, _TRACED if is_made else None)
        most = _positions_of(loaded.model)
        longest = _TRACED[1] if is_made else batches.sequences[0]
        if not is_made and (batches.items_name != "tokens" or longest < _LEAST_TRACED):
            raise _without_sequence(
                target if isinstance(target, str) else type(target).__name__,
                f"a batch with token ids is needed: a tensor of samples × at least {_LEAST_TRACED} positions",
            )

        def resize(sequence: int) -> Target:
            return replace(loaded, batch=batches.of(Shape(1, sequence)), batches=None)

        return cls(request, most, _between(min(most, longest)), resize)

    def family(self, *, is_tiled: bool) -> Family[tuple[int, int]]:
        """Return what the traces of the whole step, or of the step in tiles, have in common. Steps of other lengths are derived
        from it.

        The step must be traced already.
        """
        return self._families[is_tiled]

    def at(self, sequence: int, *, is_tiled: bool) -> Trace:
        """Return the step's trace at this length."""
        return self._families[is_tiled].at((self.samples, sequence))

    def trace_tiles(self, progress: Progress) -> str:
        """Trace the step in tiles too. Return why tiles cannot be used in this model, or an empty text."""
        try:
            self._trace(is_tiled=True, progress=progress)
        except (RuntimeError, PlimsollError) as error:  # the model's own code may refuse to run a part of its rows
            return f"nothing runs in tiles: {str(error).partition(chr(10))[0]}"
        shape = self._families[False].shapes[-1]
        if find_difference(self._families[True].at(shape), self._families[False].at(shape)):
            return ""
        return "nothing runs in tiles: no call of the model works row by row and makes enough bytes"

    def _trace(self, *, is_tiled: bool, progress: Progress) -> None:
        started = time.monotonic()
        traces: dict[tuple[int, int], Trace] = {}
        for place, sequence in enumerate(self._lengths):
            request = replace(self._request, is_tiled=is_tiled)
            if self._resize is None:
                request = replace(request, sequence=sequence)
            else:
                request = replace(request, target=self._resize(sequence))
            share = part_of(progress, place / len(self._lengths), (place + 1) / len(self._lengths))
            traced = trace_target(request, cache=AnswerCache(TracedTarget), progress=share)
            traces[self.samples, sequence] = traced.trace
            if not is_tiled:
                self.traced = traced
        self._families[is_tiled] = family = Family(traces)
        self.trace_seconds += time.monotonic() - started
        if family.strays:
            shape, why = next(iter(family.strays.items()))
            raise InvalidOption(
                f"The longest sequence cannot be searched for {self.traced.trace.model}.",
                why=f"its step runs other operations at {shape[1]:,} tokens than at {family.shapes[-1][1]:,}: {why}",
                next="estimate the lengths that you need one by one: plimsoll estimate TARGET --seq 128k",
            )

    def notes(self, rows: list[LengthRow]) -> Iterator[str]:
        """Yield a note for the user if sizes at the longest found length may be wrong by 0.1% or more."""
        longest = max((row.tokens or 0 for row in rows), default=0)
        if not longest:
            return
        inexact = self._families[False].inexact_bytes((self.samples, longest))
        if inexact > max(row.allocated_bytes for row in rows) // 1000:
            yield f"tensors of {format_bytes(inexact)} are estimated from above at {longest:,} tokens; the others are exact"


def _without_sequence(target: str, why: str) -> InvalidOption:
    return InvalidOption(
        f"{target} does not have a sequence whose length could be searched.",
        why=why,
        next="name a text model, or pass a model with a batch of token ids, or with a function (samples, tokens) -> batch",
    )


def _between(most: int) -> tuple[int, int]:
    """Return the two sequence lengths at which to trace, if no length may exceed ``most``."""
    longest = min(_TRACED[1], most)
    return longest // 2, longest // 2 * 2


def _positions_of(model: torch.nn.Module) -> int:
    """Return the longest sequence that the model accepts: the number of positions that it has learned, if it learns them."""
    from plimsoll.estimator.targets.models import learned_positions

    return min((count for _, count in learned_positions(model)), default=_MOST_TOKENS)


def _attention_of(trace: Trace) -> str:
    """Return what the step's attention is assumed to be, in words."""
    names = {spec.name for spec in trace.specs.values() if "scaled_dot_product" in spec.name}
    kinds = {"flash": "FlashAttention", "efficient": "memory-efficient attention", "cudnn": "cuDNN's attention"}
    found = [words for part, words in kinds.items() if any(part in name for name in names)]
    if found:
        return f"{' and '.join(found)}, which never holds all scores"
    return "attention that holds the scores of all pairs of positions" if _is_quadratic(trace) else "none with scores"


def _is_quadratic(trace: Trace) -> bool:
    return any("softmax" in op.name and op.region >= 0 for op in trace.ops)


@dataclass(slots=True)
class _RowSearch:
    """Finds the longest sequence for one row of the answer (one set of memory-saving decisions)."""

    steps: _Steps
    setting: Setting
    level: _Level
    is_tiled: bool
    floor: tuple[Choice, ...] | None = None
    """The decisions of the plan with the lowest peak, at the length where it was last searched."""

    def run(self, name: str) -> LengthRow:
        """Find the longest sequence, and return the row of the answer with this name."""
        tried: dict[int, tuple[int, int]] = {}
        found = find_longest(self._excess, self.steps.most_tokens, tried)
        if self.level.is_planned and self._lower_floor(found or _FINE):
            tried.clear()
            found = find_longest(self._excess, self.steps.most_tokens, tried, first=found or _FIRST_TRIED)
        if found is None:
            return LengthRow(name=name, tokens=None)
        stage, host_bytes = self._measure(found)
        least, most = error_range(tried, found, self.steps.most_tokens)
        return LengthRow(
            name=name,
            tokens=found,
            least_tokens=least,
            most_tokens=most,
            allocated_bytes=stage.allocated_bytes,
            total_bytes=stage.total_bytes,
            error_bytes=stage.error_bytes,
            host_bytes=host_bytes,
            moment=stage.peak.moment,
        )

    def _job(self, sequence: int) -> EstimateJob:
        setting = self.setting
        trace = self.steps.at(sequence, is_tiled=self.is_tiled)
        reads_both_ways = "mxf8" in setting.device.peak_flops_per_second
        # A sample that is not longer than a document is one document, so packing does not change its step.
        how = setting.how if sequence > setting.how.packed else msgspec.structs.replace(setting.how, packed=0)
        step = with_techniques(trace, how, sequence, reads_both_ways=reads_both_ways)
        facts: ModelFacts = msgspec.structs.replace(self.steps.traced.facts, sequence=sequence)
        return EstimateJob(setting, TracedTarget(trace=trace, facts=facts), step)

    def _measure(self, sequence: int) -> tuple[StageEstimate, int]:
        """Return the memory of a rank at this length under the decisions with the lowest peak, and its bytes on the host."""
        return self._job(sequence).measure_rank(self._lowest)

    def _excess(self, sequence: int) -> tuple[int, int]:
        """Return by how many bytes the training step at this length exceeds its memory limit, and the error in bytes."""
        stage, _ = self._measure(sequence)
        setting, found = self.setting, []
        if setting.budget_bytes is not None:
            error = sum(item.error_bytes for item in stage.items if item.name in TENSOR_ITEMS)
            found.append((stage.allocated_bytes - setting.budget_bytes, error))
        if setting.device.memory_bytes is not None and (not found or has_caching_allocator(setting.device)):
            found.append((stage.total_bytes - setting.device.memory_bytes, stage.error_bytes))
        return max(found)

    def _lowest(self, stage: StageOfRank) -> Simulation:
        """Return the stage's step under the decisions with the lowest peak that this row's rules allow."""
        index, level = stage.index, self.level
        if not level.may_recompute:
            return run_choices(index, stage.named_choices(index, NOTHING))
        choices = [stage.named_choices(index, EVERYTHING)]
        if level.is_planned:
            choices.append(stage.named_choices(index, NOTHING))
            if self.floor is not None:  # inputs that may be offloaded count as kept only in a step with offloading
                views = zip(index.views, self.floor, strict=True)
                choices.append(tuple(Choice(view.nothing | choice.kept) for view, choice in views))
        if level.is_sending:
            choices += [send_kept(index, each) for each in choices]
        return min((run_choices(index, each) for each in choices), key=lambda each: each.peak_bytes)

    def _lower_floor(self, sequence: int) -> bool:
        """Search the plan with the lowest peak at this length. Return True if its peak is below all that were tried."""
        job = self._job(sequence)
        [[stage]] = job.stages_of_ranks
        lowest = self._lowest(stage)
        index = stage.index
        tick = min(lowest.peak_instant // 2, len(index.trace.ops) - 1)
        if index.trace.ops[tick].region < 0:
            # Outside of the blocks (head, loss, optimizer) a peak has only what blocks hold between forward and backward.
            # Checkpointing every block leaves the least of that.
            return False
        # Without offloading: a search with it takes much longer, and `_lowest` sends what the plan keeps.
        plain = replace(self.setting, how=msgspec.structs.replace(self.setting.how, offload=""))
        planned = Planner(StageOfRank(plain, stage.stage, stage.in_flight).index).floor
        self.floor = planned.choices
        return self._lowest(stage).peak_bytes < lowest.peak_bytes


def _find_rows(steps: _Steps, setting: Setting, progress: Progress) -> tuple[list[LengthRow], list[str]]:
    """Search the longest sequence of each row. Return the rows and notes about rows that are left out."""
    rows: list[LengthRow] = []
    notes: list[str] = []
    has_tiles = False
    for place, level in enumerate(_LEVELS):
        share = part_of(progress, place / len(_LEVELS), (place + 1) / len(_LEVELS))
        share(f"searching: {level.name}", 0.0)
        if level.is_tiled and not level.is_sending:
            obstacle = steps.trace_tiles(share)
            has_tiles = not obstacle
            if obstacle:
                notes.append(obstacle)
                continue
        if level.is_sending and not setting.device.host_link_bytes_per_second:
            if not level.is_chunked:
                notes.append(
                    f"nothing is offloaded: the catalogue does not have a link between {setting.device.name} and its host"
                )
                continue
            level = replace(level, is_sending=False)
        there = _with_level(setting, level)
        if there is None:
            continue
        search = _RowSearch(steps, there, level, is_tiled=has_tiles and level.is_tiled)
        try:
            row = search.run(level.name)
        except InvalidOption:
            if not level.is_chunked:
                raise
            notes.append("the loss is not computed in chunks: a head with a loss over classes was not found")
            continue
        rows.append(_at_least(row, rows))
    return rows, notes


def _with_level(setting: Setting, level: _Level) -> Setting | None:
    """Return the user's setting, extended by the techniques of one row of the table (offloading, a loss in chunks).

    Return ``None`` if the row computes the loss in chunks but the user has already chosen how it is computed (``loss=``).
    """
    how = setting.how
    if level.is_chunked and how.loss:
        return None
    if level.is_sending:
        how = msgspec.structs.replace(how, offload="+".join(sorted({*how.on_host, "activations"})))
    if level.is_chunked:
        how = msgspec.structs.replace(how, loss="chunked")
    found = replace(setting, how=how)
    check_setting(found)
    return found


def _at_least(row: LengthRow, rows: list[LengthRow]) -> LengthRow:
    """Return the row, or a copy of the row above it under the new name if the row above is longer: a plan may leave the new
    decision out.
    """
    above = rows[-1] if rows else None
    if above is None or (row.tokens or 0) > (above.tokens or 0):
        return row
    return msgspec.structs.replace(above, name=row.name, is_gaining=False)


def find_longest(
    excess: Excess, most_tokens: int, tried: dict[int, tuple[int, int]], *, first: int = _FIRST_TRIED
) -> int | None:
    """Return the longest sequence whose step does not exceed its limit, in multiples of 128 or 1,024 tokens.

    Return ``None`` if 128 tokens exceed it, and ``most_tokens`` if these fit. ``excess`` must grow with the length. Each length
    that is tried is added to ``tried``, with the function's value.

    Example:
        >>> find_longest(lambda tokens: (tokens * 3 - 300_000, 0), 2**20, {})
        99328
    """
    guess = min(first, most_tokens)
    low = 0
    high: int | None = None
    while True:
        tried[guess] = excess(guess)
        if tried[guess][0] <= 0:
            low = max(low, guess)
        else:
            high = guess if high is None else min(high, guess)
        if low >= most_tokens:
            return most_tokens
        if high is not None and high - low <= _unit_at(low):
            return low or None
        guess = _next_length(tried, low, high, most_tokens)


def _next_length(tried: dict[int, tuple[int, int]], low: int, high: int | None, most_tokens: int) -> int:
    """Return the next length to try: where a straight line through the two nearest lengths meets the limit."""
    nearest = sorted(tried, key=lambda tokens: abs(tried[tokens][0]))[:2]
    root = float(2 * low) if len(nearest) < 2 else _root(tried, nearest[0], nearest[1], 0)
    if high is not None and (len(tried) > _STRAIGHT_TRIES or not low < root < high):
        root = (low + high) / 2
    guess = max(int(root) // _unit_at(root) * _unit_at(root), low + _unit_at(low))
    if high is None:
        return min(guess, 16 * low, most_tokens)
    return min(guess, max(high - _unit_at(high), low + _unit_at(low)))


def _unit_at(tokens: float) -> int:
    return _COARSE if tokens >= _COARSE_FROM else _FINE


def _root(tried: dict[int, tuple[int, int]], one: int, other: int, sign: int) -> float:
    """Return where the line through two lengths meets the limit. ``sign`` times the error is added to the values."""
    at_one, at_other = (tried[each][0] + sign * tried[each][1] for each in (one, other))
    if at_one == at_other:
        return float(one)
    return one - at_one * (other - one) / (at_other - at_one)


def error_range(tried: dict[int, tuple[int, int]], found: int, most_tokens: int) -> tuple[int, int]:
    """Return two lengths: the longest that fits if the step takes more memory than estimated by its error, and the longest if
    it takes less by its error.

    Example:
        >>> tried = {1000: (-100, 10), 1128: (28, 12)}
        >>> error_range(tried, 1000, 2**20)
        (1000, 1111)
    """
    nearest = sorted(tried, key=lambda tokens: abs(tokens - found))[:2]
    if len(nearest) < 2:
        return found, found
    least, most = (int(_root(tried, nearest[0], nearest[1], sign)) for sign in (1, -1))
    return max(min(least, found), 0), min(max(most, found), most_tokens)
