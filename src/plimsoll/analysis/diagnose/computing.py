"""Ops of the host in; those that compute something, rather than look at tensors or call other ops, out."""

from __future__ import annotations

import re

from plimsoll.analysis.diagnose.nesting import Nesting
from plimsoll.analysis.diagnose.profile import HostKind

_MOVES_NOTHING = re.compile(
    r"(?:aten::)?(?:view|as_strided|expand|reshape|t|transpose|permute|unsqueeze|squeeze|slice|select|narrow|detach|alias"
    r"|empty|empty_like|empty_strided|empty_permuted|resolve_conj|resolve_neg|result_type|_unsafe_view|unbind|chunk|split"
    r"|to|resize_|unflatten|flatten|contiguous|item|_local_scalar_dense|is_nonzero|movedim|diagonal|_reshape_alias"
    r"|lift_fresh|set_|view_as|expand_as|unfold|split_with_sizes|new_empty|new_empty_strided)"
)
"""Ops that only look at a tensor or make room for one."""


def computing_ops(nesting: Nesting) -> list[bool]:
    """The innermost ops that compute something, rather than look at tensors or make room for them."""
    is_computing = [False] * len(nesting.spans)
    has_computing = [False] * len(nesting.spans)
    for index in range(len(nesting.spans) - 1, -1, -1):
        span, parent = nesting.spans[index], nesting.parents[index]
        if span.kind is HostKind.OP and not has_computing[index]:
            is_computing[index] = not _MOVES_NOTHING.fullmatch(span.name)
        if parent >= 0 and (is_computing[index] or has_computing[index]):
            has_computing[parent] = True
    return is_computing
