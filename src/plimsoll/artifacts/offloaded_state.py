"""A decision about optimizer state: which parameters have their state on a link (in host memory or on disk) between steps, and
how these parameters are divided into chunks. The optimizer steps one chunk at a time.
"""

from __future__ import annotations

import msgspec

LEAST_STATE_BYTES = 4096
"""The smallest tensor of optimizer state, in bytes, that is offloaded.

Smaller tensors, such as step counters, stay on the device: a transfer takes longer than the memory is worth.
"""


class OffloadedState(msgspec.Struct, frozen=True, kw_only=True):
    """Data: optimizer state that is offloaded between steps. The state of the parameters in ``chunks`` (names) is on ``link``
    (in host memory or on disk), and the optimizer steps one chunk at a time.

    ``state_bytes`` is all state of the optimizer, and ``offloaded_bytes`` the part on the link. While the optimizer steps, two
    chunks may be on the device. ``seconds`` is how long each step waits for the link; no other work hides this time.
    """

    optimizer: str
    link: str
    chunks: tuple[tuple[str, ...], ...]
    state_bytes: int
    offloaded_bytes: int
    link_bytes: int
    """The most bytes that the link (host memory or disk) has to hold. During a step, these are two copies of the offloaded
    state (from before the step and after it) and the old values of the chunks' parameters.
    """
    seconds: float = 0.0

    @property
    def resident_bytes(self) -> int:
        """The bytes of state that are on the device between steps.

        Example:
            >>> sizes = {"state_bytes": 10, "offloaded_bytes": 8, "link_bytes": 20}
            >>> OffloadedState(optimizer="SGD", link="disk", chunks=(("weight",),), **sizes).resident_bytes
            2
        """
        return self.state_bytes - self.offloaded_bytes
