"""Assigns pieces of work to a phase of the step, a module and a layer.

A forward op has autograd's sequence number, and the node that backward runs later has the same number. So backward work gets
the module of its forward op. Ops *inside* a node of backward that have their own sequence number run with gradients enabled:
they are recomputation (``torch.utils.checkpoint``). Plimsoll's own recomputation is a named range.

Known weakness: a backward that builds a graph itself (``create_graph=True``) also numbers its ops, so it looks recomputed.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec

from plimsoll.analysis.diagnose.ledger import Ledger
from plimsoll.analysis.diagnose.profile import (
    MODULE_PREFIX,
    RECOMPUTE_PREFIX,
    TORCH_MODULE_PREFIX,
    HostKind,
    HostSpan,
    Nesting,
    Profile,
)
from plimsoll.artifacts.finding import Layer, WorkPhase

_NODE_PREFIX = "autograd::engine::evaluate_function: "
_ACCUMULATE = "AccumulateGrad"
_PHASE_NAME = re.compile(
    r"\W*(?:(forward|fwd)|(backward|bwd)|(optimi[sz]er(?:[ _.]?step)?)|(recompute|recomputation))(?:[ _]?pass)?\W*",
    re.IGNORECASE,
)
_OPTIMIZER_RANGE = re.compile(r"Optimizer\.(?:step|zero_grad)#")
_PHASES: tuple[WorkPhase, ...] = (WorkPhase.FORWARD, WorkPhase.BACKWARD, WorkPhase.OPTIMIZER, WorkPhase.RECOMPUTE)
_MOST_OPERATIONS = 12
_DIGITS = "0123456789"


class Label(msgspec.Struct, frozen=True, gc=False):
    """Data: the phase of the step and the module that a span (a named interval on a thread) belongs to.

    ``is_in_node`` is True if the span is a node of backward or inside one. ``is_engine`` is True for spans of autograd's engine
    itself.
    """

    phase: WorkPhase | None = None
    module: str = ""
    is_in_node: bool = False
    is_engine: bool = False


_NOTHING = Label()


def label_spans(nesting: Nesting, profile: Profile) -> list[Label]:
    """Return the phase and module of each span (a named interval on a thread) of ``nesting``, in the same order."""
    autograd = _Autograd(nesting, profile)
    labels: list[Label] = []
    previous_module: dict[str, str] = {}
    for index, span in enumerate(nesting.spans):
        parent = nesting.parents[index]
        above = labels[parent] if parent >= 0 else _NOTHING
        label = _label(span, above, nesting.spans[parent] if parent >= 0 else None)
        if span.name.startswith(_NODE_PREFIX) or (span.node_thread > 0 and not above.is_in_node):
            module = autograd.module_of(span, labels, is_nested=above.is_in_node)
            if not module and _ACCUMULATE in span.name:  # not made by an op; it runs right after its gradient's node
                module = previous_module.get(span.thread, "")
            previous_module[span.thread] = module
            label = Label(WorkPhase.BACKWARD, module, is_in_node=True, is_engine=True)
        elif parent in autograd.recomputed and above.phase is WorkPhase.BACKWARD:
            low, high = autograd.recomputed[parent]
            if low <= span.start_ns < high:
                label = Label(WorkPhase.RECOMPUTE, label.module, is_in_node=True)
        elif label.phase is None and span.kind is not HostKind.RANGE:
            is_forward = span.sequence >= 0 or autograd.is_before_backward(span)
            label = Label(WorkPhase.FORWARD if is_forward else WorkPhase.OTHER, label.module)
        labels.append(label)
    return labels


def _label(span: HostSpan, above: Label, parent: HostSpan | None) -> Label:
    """Return the phase and module of one span (a named interval on a thread), from the span's own name.

    If the name does not tell them, take them from the enclosing span's label.
    """
    name, module = span.name, ""
    if span.kind is not HostKind.RANGE:
        is_engine = parent is not None and above.is_engine and name == parent.name.removeprefix(_NODE_PREFIX)
        return Label(above.phase, span.module or above.module, above.is_in_node, is_engine)
    if name.startswith(RECOMPUTE_PREFIX):
        return Label(WorkPhase.RECOMPUTE, name.removeprefix(RECOMPUTE_PREFIX), is_in_node=True)
    if name.startswith(MODULE_PREFIX):
        module = name.removeprefix(MODULE_PREFIX)
    elif name.startswith(TORCH_MODULE_PREFIX):  # the profiler gives the class and a number, not the whole path
        module = ".".join(filter(None, (above.module, name.removeprefix(TORCH_MODULE_PREFIX))))
    if module:
        phase = WorkPhase.RECOMPUTE if above.is_in_node else (above.phase or WorkPhase.FORWARD)
        return Label(phase, module, above.is_in_node)
    return Label(above.phase or _phase_of_range(name), above.module, above.is_in_node)


def _phase_of_range(name: str) -> WorkPhase | None:
    if _OPTIMIZER_RANGE.match(name):
        return WorkPhase.OPTIMIZER
    match = _PHASE_NAME.fullmatch(name)
    return None if match is None or match.lastindex is None else _PHASES[match.lastindex - 1]


class _Autograd:
    """Facts about autograd in a profile: which forward op made a node, when backward starts, and what a node recomputes.

    Sequence numbers count per thread, so numbers of a recomputation on backward's thread are stored separately.
    """

    def __init__(self, nesting: Nesting, profile: Profile) -> None:
        self.recomputed: dict[int, tuple[int, int]] = {}
        """A mapping from each node of backward, by its index, to the interval from its first to its last child op that runs
        with gradients enabled.

        Such child ops are recomputation.
        """
        self._links = profile.forward_links
        self._by_sequence: dict[tuple[bool, int], int] = {}
        self._by_start: dict[tuple[str, int], int] = {}
        self._step_starts = profile.step_starts
        self._first_backward: dict[int, int] = {}
        is_below: list[bool] = []  # whether each span is a node of backward, or runs inside one
        for index, (span, parent) in enumerate(zip(nesting.spans, nesting.parents, strict=True)):
            is_nested = parent >= 0 and is_below[parent]
            is_node = span.node_thread > 0 or span.name.startswith(_NODE_PREFIX)
            is_below.append(is_node or is_nested)
            if is_node:
                self._first_backward.setdefault(self._step_of(span), span.start_ns)
            elif span.kind is HostKind.OP:
                if self._links:
                    self._by_start[span.thread, span.start_ns] = index
                if span.sequence >= 0:  # several ops have one number; the last, innermost one makes the node
                    self._by_sequence[is_nested, span.sequence] = index
                    if is_nested:
                        low, high = self.recomputed.get(parent, (span.start_ns, 0))
                        self.recomputed[parent] = (min(low, span.start_ns), max(high, nesting.ends[index]))

    def module_of(self, node: HostSpan, labels: list[Label], *, is_nested: bool) -> str:
        """Return the path of the module whose forward made a node of backward; empty if the trace does not link the two."""
        index = self._by_sequence.get((is_nested, node.sequence), -1) if node.sequence >= 0 else -1
        if index < 0:
            index = self._by_start.get(self._links.get((node.thread, node.start_ns), ("", -1)), -1)
        return labels[index].module if 0 <= index < len(labels) else ""

    def is_before_backward(self, span: HostSpan) -> bool:
        """Whether the span starts before the first node of backward of the same step."""
        return span.start_ns < self._first_backward.get(self._step_of(span), span.start_ns + 1)

    def _step_of(self, span: HostSpan) -> int:
        return bisect_right(self._step_starts, span.start_ns)


def find_layers(modules: Iterable[str]) -> dict[str, str]:
    """Return a mapping from each module's path to the path of the layer that contains the module.

    The layer is the path's shortest prefix that has numbered siblings; it is ``""`` if no prefix has siblings.

    Example:
        >>> find_layers(["model.norm", "model.layers.0.mlp", "model.layers.1"])
        {'model.norm': '', 'model.layers.0.mlp': 'model.layers.0', 'model.layers.1': 'model.layers.1'}
    """
    paths = list(dict.fromkeys(modules))
    members: defaultdict[str, set[str]] = defaultdict(set)
    for path in paths:
        for prefix in _prefixes(path):
            if prefix[-1:].isdigit():
                members[prefix.rstrip(_DIGITS)].add(prefix)
    return {
        path: next((p for p in _prefixes(path) if len(members.get(p.rstrip(_DIGITS), ())) > 1), "") for path in paths
    }


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def tabulate_layers(baseline: Ledger, plan: Ledger) -> tuple[tuple[Layer, ...], bool]:
    """Return a table of the time without and with the plan, with one row for each layer.

    If a trace lacks modules, the rows are operations. The second result says whether the rows are modules.
    """
    are_modules = baseline.has_modules and plan.has_modules
    layer_of = find_layers(work.module for each in (baseline, plan) for work in each.work) if are_modules else {}
    counts, busy_ns = [Counter[str](), Counter[str]()], [Counter[str](), Counter[str]()]
    recompute_ns = Counter[str]()
    for side, ledger in enumerate((baseline, plan)):
        for work in ledger.work:
            module = are_modules and (layer_of[work.module] or work.module or "(outside modules)")
            name = module or work.operation or work.name
            counts[side][name] += work.is_counted
            busy_ns[side][name] += work.own_ns
            recompute_ns[name] += work.own_ns if side and work.phase is WorkPhase.RECOMPUTE else 0
    rows = [
        Layer(
            name=name,
            baseline_count=counts[0][name] / baseline.steps,
            plan_count=counts[1][name] / plan.steps,
            baseline_seconds=busy_ns[0][name] / baseline.steps * 1e-9,
            plan_seconds=busy_ns[1][name] / plan.steps * 1e-9,
            recompute_seconds=recompute_ns[name] / plan.steps * 1e-9,
        )
        for name in recompute_ns
    ]
    if not are_modules:
        rows = sorted(rows, key=lambda row: -max(row.plan_seconds, row.baseline_seconds))[:_MOST_OPERATIONS]
    return tuple(rows), are_modules
