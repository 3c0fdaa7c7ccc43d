"""A fault: a saved tensor whose contents changed before backward read it, with its place and likely cause."""

from __future__ import annotations

import msgspec

from plimsoll.artifacts.base import AdvisedEnum


class Cause(AdvisedEnum):
    """Why a tensor was restored wrongly: the usual causes, each with its cure."""

    RANDOM_STATE = (
        "RANDOM_STATE",
        "A random op drew other numbers the second time: its generator's state was not put back "
        "(preserve_rng_state=True, or keep what the op made).",
    )
    NON_DETERMINISTIC = (
        "NON_DETERMINISTIC",
        "The op gives other bits each time it runs on the same input: keep what it makes, or ask for "
        "torch.use_deterministic_algorithms(True).",
    )
    IN_PLACE_WRITE = (
        "IN_PLACE_WRITE",
        "Something wrote in place to what the op reads, between forward and backward: x += y becomes "
        "x = x + y, and parameters change after backward only.",
    )
    CHANGED_BUFFER = (
        "CHANGED_BUFFER",
        "A buffer that the region reads or writes had other contents the second time: keep the region, or "
        "update the buffer after backward.",
    )
    CHANGED_CONTROL_FLOW = (
        "CHANGED_CONTROL_FLOW",
        "The region took another path the second time (a counter, a Python random number, a branch on "
        "something that changed): do not recompute it, or make the path depend on its inputs alone.",
    )
    CHANGED_CONTEXT = (
        "CHANGED_CONTEXT",
        "The region ran under another setting the second time (training flag, autocast, precision): "
        "backward has to run under the one that forward had.",
    )
    CHANGED_LAYOUT = (
        "CHANGED_LAYOUT",
        "The tensor came back with another shape, stride or dtype; autograd does not notice as long as the "
        "result broadcasts.",
    )
    TRANSFER = (
        "TRANSFER",
        "What held the bytes meanwhile (a codec, a link, a hook) gave back others: a copy that was not complete, "
        "an address that was used again, or a lossy form that nobody allowed.",
    )
    COMPILED_RANDOMNESS = (
        "COMPILED_RANDOMNESS",
        "A compiled region drew its random numbers again in backward: below 1.0 "
        "torch._functorch.config.activation_memory_budget may recompute dropout with another mask; set it to 1.0.",
    )
    UNKNOWN = "UNKNOWN", "The op or one before it got other constants or data than in forward."


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that backward would have read with other bits than forward saved.

    ``value`` and ``op`` are the earliest ones in forward order that differ, as far as saved tensors show it.
    ``differing_elements`` of ``elements`` have other bits (a NaN equals a NaN), by at most ``max_absolute_difference``
    (``None`` if it is not finite, or if layouts differ). ``step`` counts training calls of the model, from 1.
    """

    step: int
    region: str
    call: int = 0
    value: str
    op: str
    cause: Cause
    elements: int
    differing_elements: int
    max_absolute_difference: float | None = None
    detail: str = ""

    def __str__(self) -> str:
        place = (
            f"{self.value!r} of region {self.region!r} (op {self.op!r})"
            if self.region
            else f"{self.value!r} (op {self.op!r})"
        )
        detail = f" ({self.detail})" if self.detail else ""
        return f"{place} came back {self._how} in step {self.step}: {self.cause}. {self.cause.advice}{detail}"

    @property
    def _how(self) -> str:
        if not self.elements:
            return "as something else"
        if not self.differing_elements:
            return "with another layout"
        return f"with {self.differing_elements} of {self.elements} elements changed"
