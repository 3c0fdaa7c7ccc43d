"""The host's spans in; for each the phase of the step and the module that it belongs to out.

A forward op carries autograd's sequence number, and the node that backward runs later carries the same: so backward work
gets the module of its forward op. Ops that carry a number of their own *inside* a node of backward run with gradients
enabled: that is somebody recomputing (``torch.utils.checkpoint``). Plimsoll's own recomputation is a range with a name.

Known weakness: a backward that builds a graph itself (``create_graph=True``) also numbers its ops, and looks recomputed.
"""

from __future__ import annotations

import re

import msgspec

from plimsoll.analysis.diagnose.nesting import Nesting
from plimsoll.analysis.diagnose.profile import (
    MODULE_PREFIX,
    RECOMPUTE_PREFIX,
    TORCH_MODULE_PREFIX,
    HostKind,
    HostSpan,
    Profile,
)
from plimsoll.artifacts.finding import WorkPhase

NODE_PREFIX = "autograd::engine::evaluate_function: "
_ACCUMULATE = "AccumulateGrad"
_PHASE_NAME = re.compile(
    r"\W*(?:(forward|fwd)|(backward|bwd)|(optimi[sz]er(?:[ _.]?step)?)|(recompute|recomputation))(?:[ _]?pass)?\W*",
    re.IGNORECASE,
)
_OPTIMIZER_RANGE = re.compile(r"Optimizer\.(?:step|zero_grad)#")
_PHASES: tuple[WorkPhase, ...] = (WorkPhase.FORWARD, WorkPhase.BACKWARD, WorkPhase.OPTIMIZER, WorkPhase.RECOMPUTE)


class Label(msgspec.Struct, frozen=True, gc=False):
    """What a span belongs to. ``is_in_node``: below a node of backward; ``is_engine``: part of autograd's machinery."""

    phase: WorkPhase | None = None
    module: str = ""
    is_in_node: bool = False
    is_engine: bool = False


_NOTHING = Label()


def label_spans(nesting: Nesting, profile: Profile) -> list[Label]:
    """A label per span of ``nesting``, in its order."""
    is_below = _below_nodes(nesting)
    forward = _ForwardOps(nesting, profile, is_below)
    recomputed = _recomputed_windows(nesting, is_below)
    first_backward = _first_backward_by_step(nesting, profile)
    labels: list[Label] = []
    previous_module: dict[str, str] = {}
    for index, span in enumerate(nesting.spans):
        parent = nesting.parents[index]
        above = labels[parent] if parent >= 0 else _NOTHING
        label = _label(span, above, nesting.spans[parent] if parent >= 0 else None)
        if span.name.startswith(NODE_PREFIX) or (span.node_thread > 0 and not above.is_in_node):
            module = forward.module_of(span, labels, is_nested=above.is_in_node)
            if not module and _ACCUMULATE in span.name:
                module = previous_module.get(span.thread, "")
            previous_module[span.thread] = module
            label = Label(WorkPhase.BACKWARD, module, is_in_node=True, is_engine=True)
        elif parent in recomputed and above.phase is WorkPhase.BACKWARD:
            low, high = recomputed[parent]
            if low <= span.start_ns < high:
                label = Label(WorkPhase.RECOMPUTE, label.module, is_in_node=True)
        elif label.phase is None and span.kind is not HostKind.RANGE:
            is_before = span.start_ns < first_backward.get(_step_of(span.start_ns, profile), span.start_ns + 1)
            label = Label(WorkPhase.FORWARD if span.sequence >= 0 or is_before else WorkPhase.OTHER, label.module)
        labels.append(label)
    return labels


def _label(span: HostSpan, above: Label, parent: HostSpan | None) -> Label:
    """What a span's own name says, and otherwise what the enclosing span's label says."""
    name = span.name
    is_engine = parent is not None and above.is_engine and name == parent.name.removeprefix(NODE_PREFIX)
    if span.kind is not HostKind.RANGE:
        return Label(above.phase, span.module or above.module, above.is_in_node, is_engine)
    if name.startswith(RECOMPUTE_PREFIX):
        return Label(WorkPhase.RECOMPUTE, name.removeprefix(RECOMPUTE_PREFIX), is_in_node=True)
    module = _module_of_range(name, above)
    if module:
        phase = WorkPhase.RECOMPUTE if above.is_in_node else (above.phase or WorkPhase.FORWARD)
        return Label(phase, module, above.is_in_node)
    return Label(above.phase or _phase_of_range(name), above.module, above.is_in_node)


def _module_of_range(name: str, above: Label) -> str:
    if name.startswith(MODULE_PREFIX):
        return name.removeprefix(MODULE_PREFIX)
    if name.startswith(TORCH_MODULE_PREFIX):
        own = name.removeprefix(TORCH_MODULE_PREFIX)
        return f"{above.module}.{own}" if above.module else own
    return ""


def _phase_of_range(name: str) -> WorkPhase | None:
    if _OPTIMIZER_RANGE.match(name):
        return WorkPhase.OPTIMIZER
    match = _PHASE_NAME.fullmatch(name)
    return None if match is None or match.lastindex is None else _PHASES[match.lastindex - 1]


class _ForwardOps:
    """Which forward op made a node of backward.

    Numbers count per thread: what a recomputation numbers on backward's thread is kept apart from the forward pass.
    """

    def __init__(self, nesting: Nesting, profile: Profile, is_below: list[bool]) -> None:
        self._links = profile.forward_links
        self._by_sequence: dict[tuple[bool, int], int] = {}
        self._by_start: dict[tuple[str, int], int] = {}
        for index, span in enumerate(nesting.spans):
            if span.kind is HostKind.OP and not _is_node(span):
                if span.sequence >= 0:  # the last, innermost op before the number moves on makes the node
                    self._by_sequence[is_below[index], span.sequence] = index
                if self._links:
                    self._by_start[span.thread, span.start_ns] = index

    def module_of(self, node: HostSpan, labels: list[Label], *, is_nested: bool) -> str:
        """The module of the op that made the node; empty where the trace does not link them."""
        index = self._by_sequence.get((is_nested, node.sequence), -1) if node.sequence >= 0 else -1
        if index < 0:
            place = self._links.get((node.thread, node.start_ns))
            index = -1 if place is None else self._by_start.get(place, -1)
        return labels[index].module if 0 <= index < len(labels) else ""


def _is_node(span: HostSpan) -> bool:
    return span.node_thread > 0 or span.name.startswith(NODE_PREFIX)


def _below_nodes(nesting: Nesting) -> list[bool]:
    """Whether each span is a node of backward, or runs inside one."""
    is_below: list[bool] = []
    for span, parent in zip(nesting.spans, nesting.parents, strict=True):
        is_below.append(_is_node(span) or (parent >= 0 and is_below[parent]))
    return is_below


def _recomputed_windows(nesting: Nesting, is_below: list[bool]) -> dict[int, tuple[int, int]]:
    """By node of backward, from its first to its last child op that runs with gradients enabled."""
    windows: dict[int, tuple[int, int]] = {}
    for index, span in enumerate(nesting.spans):
        parent = nesting.parents[index]
        if span.kind is HostKind.OP and span.sequence >= 0 and not _is_node(span) and parent >= 0 and is_below[parent]:
            low, high = windows.get(parent, (span.start_ns, 0))
            windows[parent] = (min(low, span.start_ns), max(high, nesting.ends[index]))
    return windows


def _first_backward_by_step(nesting: Nesting, profile: Profile) -> dict[int, int]:
    firsts: dict[int, int] = {}
    for span in nesting.spans:
        if _is_node(span):
            firsts.setdefault(_step_of(span.start_ns, profile), span.start_ns)
    return firsts


def _step_of(at_ns: int, profile: Profile) -> int:
    """The step that was the last to start by then, -1 before the first."""
    low, high = 0, len(profile.steps)
    while low < high:
        middle = (low + high) // 2
        if profile.steps[middle].start_ns <= at_ns:
            low = middle + 1
        else:
            high = middle
    return low - 1
