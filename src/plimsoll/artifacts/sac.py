"""Writes decisions down as a policy of torch's selective activation checkpointing, for those who may not add a dependency.

The file is a copy of ``integrations/sac_policy.py`` with the decisions in it: it needs torch alone. The package's ``__init__``
hands its text over, as it does with the renderer.
"""

from __future__ import annotations

import pprint
import re
from collections.abc import Iterable, Mapping

_OUTPUT = re.compile(r"(?P<op>[^#]*#\d+)(?:\.(?P<position>\d+))?")
"""The name of a value: ``module::op#occurrence``, and which output where the op has several."""


def saved_ops(kept: Iterable[str], dropped: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Which outputs are kept of ops of which nothing is dropped, for a policy saves all outputs of an op or none.

    Example:
        >>> saved_ops(["input:0", "mlp::mm#0", "topk#0.1", "norm#0.1"], ["norm#0.0"])
        {'mlp::mm#0': (0,), '::topk#0': (1,)}
    """
    never = {op for op, _ in map(_split, dropped)}
    found: dict[str, list[int]] = {}
    for op, position in map(_split, kept):
        if op and op not in never:
            found.setdefault(op, []).append(position)
    return {op: tuple(sorted(positions)) for op, positions in found.items()}


def policy_file(text: str, headline: str, regions: Mapping[tuple[str, int], Mapping[str, tuple[int, ...]]]) -> str:
    """The policy's text with the decisions: by path of a region and number of its call, the ops whose outputs are saved."""
    saved: list[Mapping[str, tuple[int, ...]]] = []
    calls: dict[str, dict[int, int]] = {}
    for (path, call), ops in regions.items():
        if ops not in saved:
            saved.append(ops)
        calls.setdefault(path, {})[call] = saved.index(ops)
    for name, value in (("PLAN", headline), ("SAVED", tuple(saved)), ("REGIONS", calls)):
        head, declared, tail = re.split(rf"^({name}\b.*) = .*$", text, flags=re.MULTILINE)
        text = f"{head}{declared} = {pprint.pformat(value, width=120, compact=True)}{tail}"
    return text


def _split(value: str) -> tuple[str, int]:
    """The op that makes a value and which of its outputs it is; no op for what comes from outside."""
    found = _OUTPUT.fullmatch(value)
    if found is None:
        return "", 0
    return (found["op"] if "::" in found["op"] else f"::{found['op']}"), int(found["position"] or 0)
