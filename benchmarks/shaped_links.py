"""A number of ranks and a rate in; one network namespace per rank, joined by links of that rate, out. Needs root and iproute2.

Every namespace has one end of a pair of virtual Ethernet devices; the other ends meet on a bridge in a namespace of their own.
A token bucket (``tc tbf``) limits what each rank sends, and what the bridge sends to it. Everything disappears on exit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

INTERFACE = "link0"
_NETWORK = "10.77.0"


@dataclass(frozen=True, slots=True)
class ShapedLinks:
    """Namespaces whose links can be set to a rate."""

    names: tuple[str, ...]
    hub: str

    @property
    def first_address(self) -> str:
        return f"{_NETWORK}.1"

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """The command inside a rank's namespace."""
        return ["ip", "netns", "exec", self.names[rank], *command]

    def set_rate(self, megabits_per_second: float) -> None:
        """Limit every rank's sending and receiving."""
        bytes_per_second = megabits_per_second * 1e6 / 8
        # What may pass at once after a pause: as little as the kernel's clock allows, or short messages would be free.
        burst_bytes = int(max(8 * 1024, bytes_per_second * 0.5e-3))
        shape = f"rate {megabits_per_second:g}mbit burst {burst_bytes} latency 100ms"
        for rank, name in enumerate(self.names):
            _tc(name, INTERFACE, shape)
            _tc(self.hub, f"port{rank}", shape)


@contextlib.contextmanager
def shaped_links(ranks: int) -> Iterator[ShapedLinks]:
    """Namespaces for so many ranks, not yet limited."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        raise SystemExit("shaped links need root, and `ip` and `tc` of iproute2")
    prefix = f"plimsoll-{os.getpid()}"
    links = ShapedLinks(tuple(f"{prefix}-{rank}" for rank in range(ranks)), f"{prefix}-hub")
    made: list[str] = []
    try:
        for name in (links.hub, *links.names):
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", links.hub, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", links.hub, "link", "set", "bridge0", "up")
        for rank, name in enumerate(links.names):
            _join(links.hub, name, rank)
        yield links
    finally:
        for name in made:
            _ip("netns", "delete", name)


def _join(hub: str, name: str, rank: int) -> None:
    port = f"port{rank}"
    _ip("link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", hub)
    _ip("-n", hub, "link", "set", port, "master", "bridge0", "up")
    _ip("-n", name, "address", "add", f"{_NETWORK}.{rank + 1}/24", "dev", INTERFACE)
    _ip("-n", name, "link", "set", INTERFACE, "up")


def _tc(name: str, device: str, shape: str) -> None:
    _run(["tc", "-n", name, "qdisc", "replace", "dev", device, "root", "tbf", *shape.split()])


def _ip(*words: str) -> None:
    _run(["ip", *words])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
