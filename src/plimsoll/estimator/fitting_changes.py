"""Finds the cheapest changes of a job that make it fit: a plan, a chunked loss, an optimizer of 8 bits, offloading, shards.

Each change is estimated. Changes of one thing are tried first. Only if fewer than three of them fit, several things are changed
together, and the job is sharded over more ranks. The price of a change is the time of all ranks per sample, so more ranks are
not cheaper because a step is shorter.

Known weakness: a change that needs another trace (a smaller micro-batch, adapters) takes as long as the first estimate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from plimsoll.artifacts.estimate import Estimate, FittingChange
from plimsoll.artifacts.job import read_techniques
from plimsoll.artifacts.progress import Progress, part_of, silent
from plimsoll.errors import PlimsollError
from plimsoll.estimator.optimizers import known_optimizers
from plimsoll.estimator.parallelism.layouts import layout_entries
from plimsoll.estimator.setting import AUTO, EVERYTHING
from plimsoll.units import MIB

SHOWN = 3
_RANKS = (8, 16, 32, 64, 128, 256, 512)
"""The numbers of ranks to shard over, from one node of most accelerators up."""
_DIVISORS = (4, 16, 64, 256)
"""If half of the micro-batch does not fit, the micro-batch is divided by these numbers."""
_ADAPTER_RANK = 16
_SURE = 0.99
"""The share of the device's memory that the highest prediction of a planned job may fill."""
Options = Mapping[str, str]
"""The options of ``plimsoll estimate`` by name: batch, layout, optimizer, strategy, budget and techniques, as typed."""


class _Change(NamedTuple):
    name: str
    options: dict[str, str]
    is_other_training: bool = False
    is_planned: bool = False
    """Whether a plan for the device's memory is part of the change. Its budget may be lowered until the job fits for sure."""


_PLANNED = _Change("plan recomputation for the device's memory", {"budget": AUTO, "strategy": ""}, is_planned=True)


def find_fitting_changes(
    found: Estimate, options: Options, ask: Callable[[Options], Estimate], progress: Progress = silent
) -> tuple[FittingChange, ...]:
    """Return up to three changes that make the job fit for sure, the cheapest first. If it fits already, return none.

    Changes that train something else (adapters instead of all weights) come last.

    Args:
        found: the estimate of the unchanged job.
        options: the options of that estimate. Options that are empty are not given.
        ask: makes the estimate under other options. It may raise ``PlimsollError``; that change is then left out.
        progress: a function that receives the name of the current change and the share of the work that is done.
    """
    if (found.does_fit is not False and found.device_bytes is None) or found.does_fit:
        return ()
    alone = list(_single(found, options))
    fitting: list[tuple[_Change, Estimate]] = []
    for number, change in enumerate(alone):
        progress(f"trying to {change.name}", number / (len(alone) + 1))
        fitting += _tried(change, options, ask)
    for alternatives in _joined(found, options):
        if len(fitting) < SHOWN:
            fitting += _first_that_fits(
                alternatives, options, ask, part_of(progress, len(alone) / (len(alone) + 1), 1.0)
            )
    fitting.sort(key=lambda each: (each[0].is_other_training, _price(each[1])))
    return tuple(_described(change, estimate) for change, estimate in fitting[:SHOWN])


def _tried(change: _Change, options: Options, ask: Callable[[Options], Estimate]) -> list[tuple[_Change, Estimate]]:
    """Return a list with the change and its estimate if the changed job fits the device; otherwise an empty list."""
    try:
        estimate = ask({**options, **change.options})
        if change.is_planned and not estimate.does_fit and estimate.device_bytes is not None:
            # A plan fills the device, so the error bar reaches beyond it. Leave as much free as the bar is wide.
            change = change._replace(
                options={**change.options, "budget": _surely_fitting(estimate, estimate.device_bytes)}
            )
            estimate = ask({**options, **change.options})
    except PlimsollError:  # such as a device without links, or an optimizer that does not work with other options
        return []
    return [(change, estimate)] if estimate.does_fit else []


def _surely_fitting(estimate: Estimate, device_bytes: int) -> str:
    """Return the budget, as text, that makes the largest plausible total of a planned job as large as the device."""
    tightest = estimate.tightest
    share = _SURE * device_bytes / (tightest.total_bytes + tightest.error_bytes)
    return f"{max(1, int(share * tightest.allocated_bytes / MIB))}MiB"


def _first_that_fits(
    alternatives: list[_Change], options: Options, ask: Callable[[Options], Estimate], progress: Progress
) -> list[tuple[_Change, Estimate]]:
    for number, change in enumerate(alternatives):
        progress(f"trying to {change.name}", number / len(alternatives))
        if found := _tried(change, options, ask):
            return found
    return []


def _price(estimate: Estimate) -> float:
    return estimate.layout.ranks / estimate.throughput.samples_per_second


def _described(change: _Change, estimate: Estimate) -> FittingChange:
    tightest = estimate.tightest
    return FittingChange(
        name=change.name,
        options=change.options,
        ranks=estimate.layout.ranks,
        total_bytes=tightest.total_bytes,
        error_bytes=tightest.error_bytes,
        step_seconds=estimate.throughput.step_seconds,
        rank_seconds_per_sample=_price(estimate),
        tokens_per_second=estimate.throughput.tokens_per_second,
    )


def _single(found: Estimate, options: Options) -> Iterator[_Change]:
    """Yield the changes that change one thing about the job, such as recomputing."""
    is_planned = bool(options.get("budget"))
    if not is_planned and found.strategy != EVERYTHING:
        yield _PLANNED
        yield _Change("recompute every block", {"strategy": EVERYTHING})
    if found.tightest.reserved_bytes is not None and not found.techniques.expandable_segments:
        techniques = _with_technique(options, "expandable-segments")
        yield _Change("let the allocator extend its segments", {"techniques": techniques})
    yield from _chunked(found, options)
    yield from _narrow(options)
    yield from _smaller(found, options, 2)
    if found.layout.ranks == 1:
        yield _Change(f"shard over {_RANKS[0]} ranks", {"layout": _with_entries(options, dp=_RANKS[0], zero=3)})
    elif found.layout.dp > 1 and found.layout.pp == 1 and found.layout.zero < 3:
        yield _Change("shard parameters over the ranks", {"layout": _with_entries(options, zero=3)})
    if not found.techniques.is_adapting:
        techniques = _with_technique(options, f"lora={_ADAPTER_RANK}")
        yield _Change(
            f"train adapters of rank {_ADAPTER_RANK} only", {"techniques": techniques}, is_other_training=True
        )


def _joined(found: Estimate, options: Options) -> Iterator[list[_Change]]:
    """Yield changes of several things at once.

    Each list has alternatives, the mildest first. Only the first alternative that fits counts.
    """
    recompute = {} if options.get("budget") else {"strategy": EVERYTHING}
    chunked = next((change.options for change in _chunked(found, options)), {})
    narrow = next((change.options for change in _narrow(options)), {})
    words = ["recompute every block"] if recompute else []
    with_loss = [*words, "compute the loss in chunks"] if chunked else words
    alone: list[_Change] = []
    if recompute and chunked:
        alone.append(_Change(_list(with_loss), {**recompute, **chunked}))
    if narrow and (recompute or chunked):
        with_all = [*with_loss, "hold the optimizer in 8 bits"]
        alone.append(_Change(_list(with_all), {**recompute, **chunked, **narrow}))
    yield alone
    yield list(_offloaded(found, options, words, recompute, chunked))
    yield list(_narrow_base(found, options, with_loss, {**recompute, **chunked}))
    yield [change for divisor in _DIVISORS for change in _smaller(found, options, divisor)]
    others = [_Change(_list(words), recompute), _Change(_list(with_loss), {**recompute, **chunked})]
    if recompute:
        others.insert(0, _PLANNED)
    yield list(_sharded(found, options, others))
    if recompute and not found.techniques.is_adapting:
        techniques = _with_technique(options, f"lora={_ADAPTER_RANK}")
        name = _list([*words, f"train adapters of rank {_ADAPTER_RANK} only"])
        yield [_Change(name, {**recompute, "techniques": techniques}, is_other_training=True)]


def _offloaded(
    found: Estimate, options: Options, words: list[str], recompute: dict[str, str], chunked: dict[str, str]
) -> Iterator[_Change]:
    """Yield the job whose blocks' inputs wait on the host until backward, as in training on very long sequences."""
    if options.get("budget") or found.techniques.on_host:
        return
    added = ["offload=activations", *([] if found.techniques.expandable_segments else ["expandable-segments"])]
    techniques = ",".join([chunked.get("techniques") or options.get("techniques", ""), *added]).strip(",")
    loss = ["compute the loss in chunks"] if chunked else []
    yield _Change(_list([*words, *loss, "offload the blocks' inputs"]), {**recompute, "techniques": techniques})


def _narrow_base(found: Estimate, options: Options, words: list[str], changed: dict[str, str]) -> Iterator[_Change]:
    """Yield the job with adapters on frozen weights in 4 bits, if its adapters are on weights in 16 bits."""
    if not found.techniques.lora:
        return
    for name, others in (([], {}), (words, changed)):
        techniques = others.get("techniques") or options.get("techniques", "")
        narrow = {**others, "techniques": re.sub(r"(?<![\w-])lora(?==|,|$)", "qlora", techniques)}
        yield _Change(_list([*name, "hold the frozen weights in 4 bits"]), narrow, is_other_training=True)


def _sharded(found: Estimate, options: Options, others: Sequence[_Change]) -> Iterator[_Change]:
    """Yield the job on more and more ranks, together with each of the other changes. One of these may change nothing."""
    if found.layout.pp > 1:
        return
    for ranks in _RANKS:
        dp, rest = divmod(ranks, found.layout.tp * found.layout.cp)
        if not rest and dp > found.layout.dp:
            for other in others:
                name = " and ".join(filter(None, [other.name.replace(" and ", ", "), f"shard over {ranks} ranks"]))
                layout = {"layout": _with_entries(options, dp=dp, zero=3)}
                yield other._replace(name=name, options={**other.options, **layout})


def _list(words: list[str]) -> str:
    """Return the words as an enumeration, or an empty text."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def _chunked(found: Estimate, options: Options) -> Iterator[_Change]:
    if found.facts.tokens is not None and not found.techniques.loss and found.layout.tp == 1:
        yield _Change("compute the loss in chunks", {"techniques": _with_technique(options, "loss=chunked")})


def _narrow(options: Options) -> Iterator[_Change]:
    narrow = f"{options.get('optimizer', '').removesuffix('-fused')}-8bit"
    if narrow in known_optimizers() and "offload" not in options.get("techniques", ""):
        yield _Change("hold the optimizer in 8 bits", {"optimizer": narrow})


def _smaller(found: Estimate, options: Options, divisor: int) -> Iterator[_Change]:
    """Yield the job with a smaller micro-batch and more accumulation, if the batch size can be chosen for this target and
    divided.
    """
    batch, layout = found.facts.batch, found.layout
    if batch is None or batch % divisor or ":" in found.target or layout.pp > 1:
        return
    entries = _with_entries(options, **{"micro-batches": divisor * layout.micro_batches})
    name = f"accumulate {divisor} micro-batches of 1/{divisor} of the samples"
    yield _Change(name, {"batch": str(batch // divisor), "layout": entries})


def _with_entries(options: Options, **entries: int) -> str:
    """Return the text of a layout with other values for some of its entries, such as ``zero=3``."""
    merged = {**dict(layout_entries(options.get("layout", ""))), **{key: str(value) for key, value in entries.items()}}
    return ",".join(f"{key}={value}" if value else key for key, value in merged.items())


def _with_technique(options: Options, word: str) -> str:
    joined = ",".join(filter(None, [options.get("techniques", ""), word]))
    read_techniques(joined)
    return joined
