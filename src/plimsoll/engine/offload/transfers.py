"""When transfers over a link (to host memory or disk) are waited for, and when they are fetched back. Plans assume these
moments.

A region is a module that the plan decides about. Its offloads must be finished, and their memory free, when the forward of the
*next* region ends. When the backward of that next region begins, the offloaded values are fetched again. So transfers can run
during one region's compute in both directions, and at most two regions' tensors are in transfer at any time. The bytes at each
moment do not depend on the link's speed: a slow disk makes the step slower, but not larger.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from plimsoll.engine.hooks import Readable
from plimsoll.engine.stored_forms import Sent
from plimsoll.tracing.recorder.calling import output_tensors


class TransfersUnderWay:
    """The transfers over the link that one managed model has begun and not yet waited for.

    References are weak, because tensors that autograd's graph has freed need not arrive.
    """

    def __init__(self) -> None:
        self._under_way: list[weakref.ref[Sent]] = []

    def send(self, packed: Iterable[Readable]) -> None:
        """Note the tensors that a region (a module that the plan decides about) has offloaded. Their transfers may last until
        the next region returns.
        """
        self._under_way.extend(weakref.ref(one) for one in packed if isinstance(one, Sent))

    def leave(self, output: Any) -> None:
        """Note that the forward of a region has returned: wait for the offloads of the region that ran before it.

        A hook is registered that fetches these tensors back when this region's backward begins.

        Raises:
            OffloadFailed: a copy to the link failed. The original tensor is still held.
        """
        if not self._under_way:
            return
        under_way, self._under_way = self._under_way, []
        # Wait here and not later: then the bytes at each moment do not depend on the link's speed, and windows of different
        # regions do not overlap (docs/project/design/one-window-per-transfer.md).
        for sent in _alive(under_way):
            sent.settle()
        node = next((t.grad_fn for t in output_tensors(output) if t.grad_fn is not None), None)
        if node is not None:
            node.register_prehook(functools.partial(_fetch, under_way))

    def clear(self) -> None:
        """Forget the transfers of a step that failed, because a new step begins."""
        self._under_way = []


def _fetch(sent: list[weakref.ref[Sent]], _: Any) -> None:
    """Autograd hook: begin to fetch back the offloaded tensors that backward still needs."""
    for each in _alive(sent):
        each.prefetch()


def _alive(references: Iterable[weakref.ref[Sent]]) -> Iterator[Sent]:
    for reference in references:
        sent = reference()
        if sent is not None:
            yield sent
