"""Recorded allocator snapshots in, how the simulated allocator compares with them out.

``python -m benchmarks.allocator_snapshots snapshot.pickle ...`` with files that ``torch.cuda.memory._dump_snapshot`` wrote
while history was recorded. The state of the allocator when the recording began is rebuilt from the final one by walking the
history backward; then every recorded request and release is made again, and the address of every block and every request to
the device is compared. Segments get the addresses that the driver gave them, so that ties fall alike.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plimsoll.estimator.allocator_sim.allocator import AllocatorSettings, CachingAllocator
from plimsoll.estimator.allocator_sim.blocks import SMALL_BYTES, SMALLEST_BYTES, Block, Pool, round_up

_MIB = 1024**2


class _DataOnly(pickle.Unpickler):
    """A snapshot is dicts, lists, texts and numbers; anything else is not loaded."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a snapshot has no {module}.{name}")


@dataclass
class State:
    """Segments (address → bytes, pool) and live blocks (address → bytes) at one moment."""

    segments: dict[int, tuple[int, int, bool]] = field(default_factory=dict)
    live: dict[int, int] = field(default_factory=dict)


@dataclass
class Comparison:
    """What was made again, and what came out differently."""

    requests: int = 0
    other_addresses: int = 0
    recorded_segments: int = 0
    predicted_segments: int = 0
    recorded_peak_bytes: int = 0
    predicted_peak_bytes: int = 0


def load(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        snapshot: dict[str, Any] = _DataOnly(file).load()
    return snapshot


def state_at_start(snapshot: dict[str, Any], device: int) -> State:
    """The allocator's state before the first recorded event."""
    state = State()
    for segment in snapshot["segments"]:
        if segment["device"] != device:
            continue
        is_small = segment["segment_type"] == "small"
        state.segments[segment["address"]] = (segment["total_size"], segment["stream"], is_small)
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                state.live[address] = block["size"]
            address += block["size"]
    for event in reversed(snapshot["device_traces"][device]):
        address, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            state.live.pop(address, None)
        elif event["action"] == "free_completed":
            state.live[address] = round_up(size, SMALLEST_BYTES)
        elif event["action"] == "segment_alloc":
            del state.segments[address]
        elif event["action"] == "segment_free":
            # A segment in small pieces is one of 2 MiB; all others belong to the large pool.
            state.segments[address] = (size, event["stream"], size == 2 * _MIB)
    return state


def restore(state: State, settings: AllocatorSettings) -> tuple[CachingAllocator, dict[int, Block]]:
    """An allocator in this state, and its live blocks by address."""
    allocator = CachingAllocator(settings)
    out: dict[int, Block] = {}
    live = sorted(state.live.items())
    at = 0
    for start, (length, stream, is_small) in sorted(state.segments.items()):
        pool = allocator.pools.setdefault((stream, is_small), Pool(is_small=is_small))
        allocator.reserved_bytes += length
        allocator.segments += 1
        rest: Block | None = Block(start, length, pool)
        while at < len(live) and live[at][0] < start + length:
            address, size = live[at]
            at += 1
            assert rest is not None
            if address > rest.address:
                block = rest.cut(address - rest.address)
                pool.free.add(rest)
                rest = block
            left = rest.size - size
            following = live[at][0] if at < len(live) and live[at][0] < start + length else start + length
            gap = following - address - size
            is_whole = left == 0 or (not is_small and 0 < gap <= SMALL_BYTES)
            cut = None if is_whole and gap == left else rest.cut(size + gap if is_whole else size)
            rest.is_allocated = True
            allocator.allocated_bytes += rest.size
            out[address] = rest
            rest = cut
        if rest is not None:
            pool.free.add(rest)
    return allocator, out


def compare(snapshot: dict[str, Any], device: int) -> Comparison:
    """Make everything again that was recorded."""
    state = state_at_start(snapshot, device)
    configured = snapshot.get("allocator_settings", {})
    most = configured.get("max_split_size", -1)
    allocator, out = restore(state, AllocatorSettings(max_split_bytes=most if most > 0 else None))
    recorded_bytes = allocator.reserved_bytes
    result = Comparison(recorded_peak_bytes=recorded_bytes, predicted_peak_bytes=recorded_bytes)
    was_freeing = False
    for event in snapshot["device_traces"][device]:
        action, address, size = event["action"], event["addr"], event["size"]
        if action == "segment_free":
            recorded_bytes -= size
            if not was_freeing:
                allocator.give_back()
        elif action == "segment_alloc":
            result.recorded_segments += 1
            recorded_bytes += size
            allocator.next_address = address
        elif action == "alloc":
            before = allocator.device_allocations
            out[address] = allocator.allocate(size, stream=event["stream"])
            result.predicted_segments += allocator.device_allocations - before
            result.requests += 1
            result.other_addresses += out[address].address != address
        elif action == "free_completed":
            allocator.release(out.pop(address))
        was_freeing = action == "segment_free"
        result.recorded_peak_bytes = max(result.recorded_peak_bytes, recorded_bytes)
        result.predicted_peak_bytes = max(result.predicted_peak_bytes, allocator.reserved_bytes)
    return result


def main(paths: Iterable[str]) -> None:
    print("| snapshot | requests | other addresses | segments asked for: recorded, simulated | reserved at most, MiB |")
    print("|---|--:|--:|--:|--:|")
    for path in map(Path, paths):
        snapshot = load(path)
        for device, events in enumerate(snapshot["device_traces"]):
            if events:
                found = compare(snapshot, device)
                print(
                    f"| {path.stem} | {found.requests} | {found.other_addresses} | {found.recorded_segments}, "
                    f"{found.predicted_segments} | {found.recorded_peak_bytes / _MIB:.0f}, "
                    f"{found.predicted_peak_bytes / _MIB:.0f} |"
                )


if __name__ == "__main__":
    main(sys.argv[1:])
