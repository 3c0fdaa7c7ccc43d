"""A layout and a model's sizes in; nothing out if they go together, else an error with the degrees that would do. No torch.

A vocabulary need not divide: it is divided unevenly, and the first rank, which has most of it, stands for all.
"""

from __future__ import annotations

from plimsoll.artifacts.layout import Layout
from plimsoll.artifacts.model_facts import ModelFacts
from plimsoll.errors import InvalidLayout

_MOST_DEGREES = 8


def check_layout(layout: Layout, facts: ModelFacts) -> None:
    """Refuse a layout that the model's sizes rule out, before anything is traced.

    Args:
        layout: without contradictions of its own (``read_layout``).
        facts: of the whole model, with the whole sequence; a size that is ``None`` rules nothing out.

    Raises:
        InvalidLayout: more stages than blocks; heads, feed-forward width or experts that do not divide; a sequence
            that context and sequence parallelism cannot split evenly.

    Example:
        >>> from plimsoll.estimator.parallelism.read import read_layout
        >>> facts = ModelFacts(name="llama-3-8b", architecture="LlamaForCausalLM", layers=32, heads=32, kv_heads=8)
        >>> check_layout(read_layout("tp=8,pp=4"), facts)
    """
    if facts.layers is not None and layout.stages > facts.layers:
        stages = f"{layout.stages} stages (pp={layout.pp}" + (
            f" x virtual={layout.virtual_stages})" if layout.virtual_stages > 1 else ")"
        )
        raise InvalidLayout(
            f"{stages}, but {facts.name} has {facts.layers} blocks.",
            why="a stage holds at least one block",
            next=f"use {facts.layers} stages or fewer: pp={facts.layers // layout.virtual_stages or 1}",
        )
    divided = {"attention heads": facts.heads, "feed-forward width": facts.intermediate}
    for what, size in divided.items():
        _check_divides(
            size, layout.tp, f"tp={layout.tp}", what, facts.name, "tensor parallelism gives every rank as much"
        )
    _check_key_heads(layout, facts)
    _check_divides(
        facts.experts,
        layout.ep,
        f"ep={layout.ep}",
        "experts",
        facts.name,
        "expert parallelism gives every rank as many experts",
    )
    if layout.ep > 1 and facts.experts is None and facts.layers is not None:
        raise InvalidLayout(
            f"ep={layout.ep}, but {facts.name} has no experts.",
            why="its configuration names none",
            next="leave ep= out, or use dp= for more ranks",
        )
    split = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    degrees = f"cp={layout.cp}" + (f" x tp={layout.tp} (sp)" if layout.sequence_parallel else "")
    _check_divides(facts.sequence, split, degrees, "sequence", facts.name, "every rank takes as many tokens")


def _check_key_heads(layout: Layout, facts: ModelFacts) -> None:
    """Key heads divide by the ranks, or the ranks by the key heads, which are then replicated."""
    heads = facts.kv_heads
    if heads is None or heads % layout.tp == 0 or layout.tp % heads == 0:
        return
    raise InvalidLayout(
        f"tp={layout.tp} and the {heads} key-value heads of {facts.name} do not divide each other.",
        why="key-value heads are split evenly among ranks, or each is copied to as many ranks",
        next=f"use tp={_degrees(heads)}",
    )


def _check_divides(size: int | None, degree: int, given: str, what: str, name: str, why: str) -> None:
    if size is None or size % degree == 0:
        return
    raise InvalidLayout(
        f"{given} does not divide the {what} of {name}, {size}.",
        why=why,
        next=f"{size} divides by {_degrees(size)}",
    )


def _degrees(size: int) -> str:
    """The degrees that divide a size, smallest first, those above one."""
    found = [str(each) for each in range(2, min(size, 4096) + 1) if size % each == 0]
    shown = ", ".join(found[:_MOST_DEGREES]) or "1 alone"
    return f"{shown}, …" if len(found) > _MOST_DEGREES else shown
