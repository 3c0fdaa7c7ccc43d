"""A fault: a saved tensor whose contents changed before backward read it. A fault names the place and the likely cause."""

from __future__ import annotations

import msgspec

from plimsoll.artifacts.base import AdvisedEnum


class Cause(AdvisedEnum):
    """The usual causes why a saved tensor comes back with other contents, each with advice on how to remove the cause."""

    RANDOM_STATE = (
        "RANDOM_STATE",
        "A random op drew other numbers when it was recomputed, because its generator's state was not restored: set "
        "preserve_rng_state=True, or keep the op's output.",
    )
    NON_DETERMINISTIC = (
        "NON_DETERMINISTIC",
        "The op gives different bits each time it runs on the same input: keep its output, or call "
        "torch.use_deterministic_algorithms(True).",
    )
    IN_PLACE_WRITE = (
        "IN_PLACE_WRITE",
        "A tensor that the op reads was written in place between forward and backward: write x = x + y instead of x += y, "
        "and change parameters only after backward.",
    )
    CHANGED_BUFFER = (
        "CHANGED_BUFFER",
        "A buffer that the region reads or writes had other contents when the region was recomputed: keep the region, or "
        "update the buffer after backward.",
    )
    CHANGED_CONTROL_FLOW = (
        "CHANGED_CONTROL_FLOW",
        "The region took another path when it was recomputed (a counter, a Python random number, a branch on a value that "
        "changed): do not recompute it, or make its path depend only on its inputs.",
    )
    CHANGED_CONTEXT = (
        "CHANGED_CONTEXT",
        "The region ran under another setting when it was recomputed (training flag, autocast, precision): run backward "
        "under the same setting as forward.",
    )
    CHANGED_LAYOUT = (
        "CHANGED_LAYOUT",
        "Backward got the tensor with another shape, stride or dtype; autograd does not notice this if the result broadcasts.",
    )
    TRANSFER = (
        "TRANSFER",
        "The codec, link or hook that stored the tensor returned other bytes: an incomplete copy, memory that was reused too "
        "early, or a lossy form that was not allowed.",
    )
    COMPILED_RANDOMNESS = (
        "COMPILED_RANDOMNESS",
        "A compiled region drew its random numbers again in backward: with "
        "torch._functorch.config.activation_memory_budget below 1.0, torch may recompute dropout with another mask; set it to "
        "1.0.",
    )
    UNKNOWN = "UNKNOWN", "This op, or an op before it, got other constants or data than in forward."


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one saved tensor that backward would have read with other bits than forward saved.

    ``value`` names the earliest tensor in forward order that differs, as far as saved tensors show it, and ``op`` the op that
    made it. Of ``elements``, ``differing_elements`` have other bits (two NaNs count as equal). ``max_absolute_difference`` is
    their largest difference (``None`` if it is not finite, or if layouts differ). ``step`` counts training calls of the model,
    from 1.
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
            return "with other contents"
        if not self.differing_elements:
            return "with another layout"
        return f"with {self.differing_elements} of {self.elements} elements changed"
