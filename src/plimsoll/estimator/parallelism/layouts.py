"""Parses a layout such as ``dp=8,tp=8,sp,pp=16``, and refuses one that contradicts itself or the model, without torch.

A vocabulary may be divided unevenly: the first rank has the largest part, and the estimate uses it for all ranks.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from plimsoll.artifacts.job import Layout, ModelFacts, PipelineSchedule, StageRule
from plimsoll.errors import InvalidLayout
from plimsoll.estimator.pipeline_schedule.orders import check_rounds

_FIELDS = {
    "dp": "dp",
    "tp": "tp",
    "cp": "cp",
    "pp": "pp",
    "ep": "ep",
    "zero": "zero",
    "replicas": "replicas",
    "virtual": "virtual_stages",
    "micro-batches": "micro_batches",
}
"""A mapping from each key whose value is a whole number to the field of ``Layout`` that the key sets."""
_KEYS = (*_FIELDS, "schedule", "stages", "sp")
_SPELLINGS = {
    "micro_batches": "micro-batches",
    "microbatches": "micro-batches",
    "fsdp": "dp",
    "hsdp": "replicas",
    "zero-stage": "zero",
}
"""A mapping from other common spellings of a key to the key, which the error suggests."""
_HIGHEST_ZERO = 3
_MOST = 10**9
_Name = TypeVar("_Name", PipelineSchedule, StageRule)


def read_layout(layout: str | Layout) -> Layout:
    """Parse a layout from text. A ``Layout`` is only checked and returned.

    Keys with a number: ``dp``, ``tp``, ``cp``, ``pp``, ``ep``, ``zero``, ``replicas``, ``virtual``, ``micro-batches``.
    ``schedule`` takes a name, ``stages`` a rule or the blocks of every stage (``stages=9,8,8,7``). ``sp`` does not take a
    value. Keys may be in any order, separated by commas. Omitted keys are 1 (``zero``: 0).

    Raises:
        InvalidLayout: an unknown key, a value that is not a degree, or parts that contradict each other.

    Example:
        >>> layout = read_layout("pp=16, tp=8, sp, dp=8, schedule=interleaved, virtual=2, micro-batches=64")
        >>> layout.ranks, layout.stages
        (1024, 32)
    """
    if isinstance(layout, Layout):
        _check(layout)
        return layout
    values: dict[str, int | bool | PipelineSchedule | StageRule | tuple[int, ...]] = {}
    for key, text in layout_entries(layout):
        if key == "sp":
            values["sequence_parallel"] = _flag(text)
        elif key == "schedule":
            values["schedule"] = _named(PipelineSchedule, "schedule", text)
        elif key == "stages":
            is_list = all(part.isdecimal() for part in text.split(","))
            values["cut"] = tuple(map(int, text.split(","))) if is_list else _named(StageRule, "rule for stages", text)
        else:
            values[_FIELDS[key]] = _degree(key, text)
    if "schedule" in values and values.get("pp", 1) == 1:
        raise InvalidLayout(
            f"schedule={values['schedule']} needs a pipeline.",
            why="a schedule orders the micro-batches of several stages, but pp is 1",
            next="set pp= to the number of pipeline ranks, or leave schedule= out",
        )
    found = msgspec.convert(values, Layout)
    _check(found)
    return found


def layout_notes(layout: Layout) -> tuple[str, ...]:
    """Return notes about effects of a valid layout that the user may not want."""
    notes = []
    if layout.zero and layout.shards == 1:
        notes.append(
            f"zero={layout.zero} does not shard anything, because there is one data-parallel rank (dp x cp is 1)"
        )
    elif layout.zero == _HIGHEST_ZERO and layout.pp > 1:
        notes.append(
            f"zero=3 with pp={layout.pp} gathers the parameters for every micro-batch, {layout.micro_batches} times a step"
        )
    if layout.pp > layout.micro_batches:
        notes.append(
            f"pp={layout.pp} with micro-batches={layout.micro_batches}: at most {layout.micro_batches} of the {layout.pp} "
            "pipeline ranks compute at the same time"
        )
    return tuple(notes)


def layout_entries(text: str, also: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield each key of a layout's text with its value. Keys in ``also`` are allowed in addition to a layout's own keys.

    Raises:
        InvalidLayout: an unknown key, or a key given twice.

    Example:
        >>> dict(layout_entries("pp=4, stages=9,8,8,7, sp"))
        {'pp': '4', 'stages': '9,8,8,7', 'sp': ''}
    """
    seen: set[str] = set()
    for part in re.split(r",(?!\s*\d+\s*(?:,|$))", text):
        key, _, value = (re.sub(r"\s*,\s*", ",", piece.strip()) for piece in part.strip().partition("="))
        if not key and not value and not text.strip():
            return
        if key not in (*_KEYS, *also):
            raise _unknown_key(key, (*_KEYS, *also))
        if key in seen:
            raise InvalidLayout(
                f"{key} occurs twice in {text!r}.", why="it can have only one value", next=f"write {key} once"
            )
        seen.add(key)
        yield key, value


def _unknown_key(key: str, known: tuple[str, ...]) -> InvalidLayout:
    meant = _SPELLINGS.get(key.lower())
    close = [meant] if meant else difflib.get_close_matches(key.lower(), known, n=3, cutoff=0.5)
    return InvalidLayout(
        f"The layout contains {key!r}, which is not known." if key else "The layout contains an empty entry.",
        why=f"the entries of a layout are {', '.join(known)}",
        next=f"try {' or '.join(close)}" if close else 'write for example "dp=8,tp=2,sp,zero=3"',
    )


def _flag(text: str) -> bool:
    if text not in ("", "1", "true"):
        raise InvalidLayout(
            f"sp={text} is not valid.", why="sequence parallelism is on or off", next="write sp, or leave it out"
        )
    return True


def _named(kind: type[_Name], what: str, text: str) -> _Name:
    names = [each.value for each in kind]
    if text in names:
        return kind(text)
    close = difflib.get_close_matches(text.lower(), names, n=2, cutoff=0.3)
    raise InvalidLayout(
        f"The {what} {text!r} is not known.",
        why=f"the known names are {', '.join(names)}",
        next=f"try {' or '.join(close)}" if close else "use one of these",
    )


def _degree(key: str, text: str) -> int:
    if not text.isdecimal() or len(text) > len(str(_MOST)):
        raise _no_degree(key, text[:20])
    return int(text)


def _no_degree(key: str, found: str) -> InvalidLayout:
    return InvalidLayout(
        f"{key}={found} is not a valid degree.",
        why=f"a degree is a whole number of ranks, stages or micro-batches, at most {_MOST:,}",
        next=f"write {key}=2, or leave it out",
    )


def read_degree(key: str, text: str) -> int:
    """Return the number that the text of one entry of a layout gives, such as ``8`` for ``tp``.

    Raises:
        InvalidLayout: it is not a number, too small or too large.
    """
    value = _degree(key, text)
    _check_degree(key, value)
    return value


def _check_degree(key: str, value: int) -> None:
    least = 0 if key == "zero" else 1
    if value < least:
        raise InvalidLayout(
            f"{key}={value} is too small.",
            why=f"the smallest valid value is {least}",
            next=f"write {key}={least}, or leave it out",
        )
    if value > _MOST:
        raise _no_degree(key, f"{value:,}" if value < 10**18 else "…")


def _check(layout: Layout) -> None:
    for key, name in _FIELDS.items():
        _check_degree(key, getattr(layout, name))
    _check_pipeline(layout)
    _check_sharding(layout)


def _check_pipeline(layout: Layout) -> None:
    if layout.pp == 1 and (layout.schedule is not PipelineSchedule.ONE_F_ONE_B or layout.virtual_stages > 1):
        raise InvalidLayout(
            f"schedule={layout.schedule} and virtual={layout.virtual_stages} need a pipeline.",
            why="pp is 1, so the model is not divided into stages",
            next="set pp= to the number of pipeline ranks, or leave schedule= and virtual= out",
        )
    if layout.schedule is PipelineSchedule.INTERLEAVED and layout.virtual_stages == 1:
        raise InvalidLayout(
            "schedule=interleaved needs several stages per rank.",
            why="with one stage per rank it is the same as 1f1b",
            next="set virtual=2 or more, or write schedule=1f1b",
        )
    check_rounds(layout)
    if layout.pp == 1 and layout.cut is not StageRule.BLOCKS:
        raise InvalidLayout(
            "stages= needs a pipeline.",
            why="pp is 1, so one stage holds all blocks",
            next="set pp= to the number of pipeline ranks, or leave stages= out",
        )
    if isinstance(layout.cut, tuple) and len(layout.cut) != layout.stages:
        raise InvalidLayout(
            f"stages={','.join(map(str, layout.cut))} lists the blocks of {len(layout.cut)} stages.",
            why=f"the pipeline has {layout.stages} stages (pp={layout.pp} x virtual={layout.virtual_stages})",
            next=f"give {layout.stages} numbers, first stage to last",
        )


def _check_sharding(layout: Layout) -> None:
    if layout.sequence_parallel and layout.tp == 1:
        raise InvalidLayout(
            "sp (sequence parallelism) needs tp=2 or more.",
            why="it splits the sequence among the tensor-parallel ranks, and there is only one",
            next="set tp=2 or more, or use cp= to split the sequence without tensor parallelism",
        )
    if layout.zero > _HIGHEST_ZERO:
        raise InvalidLayout(
            f"zero={layout.zero} is not a stage of ZeRO.",
            why="stage 1 shards the optimizer state, stage 2 also gradients, stage 3 also parameters",
            next="write zero=1, zero=2 or zero=3",
        )
    if layout.replicas > 1 and (layout.zero < 2 or layout.dp % layout.replicas or layout.ep > 1):
        raise InvalidLayout(
            f"replicas={layout.replicas} cannot be combined with dp={layout.dp},zero={layout.zero},ep={layout.ep}.",
            why="replicas= divides the dp ranks into equal groups that each shard gradients or parameters (HSDP), and expert "
            "parallelism is not modelled with it",
            next="use zero=2 or 3, a dp that is a multiple of replicas, and no ep; or leave replicas= out",
        )
    if layout.replicas > 1 and layout.shards == 1:
        raise InvalidLayout(
            f"replicas={layout.replicas} leaves one rank in each group of dp={layout.dp}.",
            why="each group shards gradients or parameters among its ranks (HSDP), and one rank cannot shard them",
            next=f"leave replicas= and zero= out for plain data parallelism: dp={layout.dp}; or use fewer replicas",
        )
    if layout.shards % layout.ep:
        degrees = [each for each in range(2, min(layout.shards, _MOST_LISTED) + 1) if layout.shards % each == 0]
        raise InvalidLayout(
            f"ep={layout.ep} does not divide the {layout.shards} data-parallel ranks (dp={layout.dp} x cp={layout.cp}).",
            why="expert parallelism uses the data-parallel ranks and does not add ranks",
            next=f"write ep={' or '.join(map(str, degrees))}"
            if degrees
            else "set dp= to a multiple of ep, or leave ep= out",
        )


_MOST_DEGREES = 8
_MOST_LISTED = 4096
"""Errors list divisors up to this number."""


def check_layout(layout: Layout, facts: ModelFacts) -> None:
    """Raise if the model's sizes rule out the layout. This happens before the model is traced.

    ``facts`` describe the whole model and sequence; sizes that are ``None`` are not checked.

    Raises:
        InvalidLayout: more stages than blocks; heads, feed-forward width or experts that do not divide; a sequence
            that context and sequence parallelism cannot split evenly.

    Example:
        >>> from plimsoll.estimator.parallelism.layouts import read_layout
        >>> facts = ModelFacts(name="llama-3-8b", architecture="LlamaForCausalLM", layers=32, heads=32, kv_heads=8)
        >>> check_layout(read_layout("tp=8,pp=4"), facts)
    """
    if facts.layers is not None and layout.stages > facts.layers:
        stages = f"{layout.stages} stages (pp={layout.pp}" + (
            f" x virtual={layout.virtual_stages})" if layout.virtual_stages > 1 else ")"
        )
        raise InvalidLayout(
            f"The layout has {stages}, but {facts.name} has {facts.layers} blocks.",
            why="every stage needs at least one block",
            next=f"use {facts.layers} stages or fewer: pp={facts.layers // layout.virtual_stages or 1}",
        )
    divided = {"attention heads": facts.heads, "feed-forward width": facts.intermediate}
    for what, size in divided.items():
        _check_divides(
            size, layout.tp, f"tp={layout.tp}", what, facts.name, "tensor parallelism divides it evenly among the ranks"
        )
    _check_key_heads(layout, facts)
    _check_divides(
        facts.experts,
        layout.ep,
        f"ep={layout.ep}",
        "experts",
        facts.name,
        "expert parallelism gives every rank the same number of experts",
    )
    if layout.ep > 1 and facts.experts is None and facts.layers is not None:
        raise InvalidLayout(
            f"ep={layout.ep} needs a model with experts, and {facts.name} does not have any.",
            why="its configuration does not mention experts",
            next="leave ep= out, or use dp= for more ranks",
        )
    split = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    degrees = f"cp={layout.cp}" + (f" x tp={layout.tp} (sp)" if layout.sequence_parallel else "")
    _check_divides(
        facts.sequence, split, degrees, "sequence", facts.name, "every rank processes the same number of tokens"
    )


def _check_key_heads(layout: Layout, facts: ModelFacts) -> None:
    """Require that the ranks divide the key-value heads, or that the ranks are a multiple of these heads.

    In the second case, each head is copied to several ranks.
    """
    heads = facts.kv_heads
    if heads is None or heads % layout.tp == 0 or layout.tp % heads == 0:
        return
    raise InvalidLayout(
        f"Neither of tp={layout.tp} and the {heads} key-value heads of {facts.name} is a multiple of the other.",
        why="key-value heads are split evenly among the ranks, or each head is copied to the same number of ranks",
        next=f"use tp={_degrees(heads)}",
    )


def _check_divides(size: int | None, degree: int, given: str, what: str, name: str, why: str) -> None:
    if size is None or size % degree == 0:
        return
    raise InvalidLayout(
        f"{given} does not divide the {what} of {name}, {size}.",
        why=why,
        next=f"use a divisor of {size}: {_degrees(size)}",
    )


def _degrees(size: int) -> str:
    """List the divisors of a size above 1 as text, smallest first."""
    found = [str(each) for each in range(2, min(size, _MOST_LISTED) + 1) if size % each == 0]
    shown = ", ".join(found[:_MOST_DEGREES]) or "1 alone"
    return f"{shown}, …" if len(found) > _MOST_DEGREES else shown
