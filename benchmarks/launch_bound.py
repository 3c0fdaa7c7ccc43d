"""48 blocks of width 16, every block recomputed: how much time each engine adds where arithmetic is nothing.

python -m benchmarks.launch_bound
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from torch import nn

from benchmarks import peers
from benchmarks.machine import device_name, versions
from benchmarks.measure import prepare
from benchmarks.models import build
from benchmarks.peers_table import apply_plan
from plimsoll.tracing.meters.timing import one_thread, paired_ratio, time_in_turns


@contextlib.contextmanager
def identity_hooks(model: nn.Module) -> Iterator[nn.Module]:
    """A pair of Python hooks that do nothing, around every forward: what no engine of this kind can be faster than."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield model


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launch_bound", description=__doc__)
    parser.add_argument("--repeats", type=int, default=50, metavar="N", help="timed steps per variant (default 50)")
    parser.add_argument("--peers-only", action="store_true", help="leave Plimsoll out")
    options = parser.parse_args()
    with one_thread():
        return _compare(options)


def _compare(options: argparse.Namespace) -> int:
    case = build("launch_bound", "cpu")
    ways = [(peer.name, peer.apply) for peer in (peers.NONE, *peers.EAGER)]
    ways.insert(1, ("identity hooks", identity_hooks))
    if not options.peers_only:
        import plimsoll

        for strategy in ("none", "full", "input-only"):
            plan = plimsoll.plan(case.model, case.batch, strategy=strategy, loss=case.loss)
            ways.append((f"plimsoll {strategy}", apply_plan(plan)))
    with contextlib.ExitStack() as stack:
        # Hooks are global while they are entered, so that one is entered around its own steps only.
        baseline = prepare(stack, "none", case, peers.NONE.apply)
        variants = {
            name: prepare(stack, name, case, way, baseline) for name, way in ways[1:] if way is not identity_hooks
        }
        variants["none"] = baseline
        steps = {name: variant.step for name, variant in variants.items()}
        steps["identity hooks"] = identity_hooks(baseline.case.model)(baseline.step)
        timings = time_in_turns(steps, rounds=options.repeats, warmups=5)
    print(f"{device_name(case.device)}; " + ", ".join(f"{name} {each}" for name, each in versions().items()))
    print(f"unmanaged step {timings['none'].median_seconds * 1e3:.2f} ms of CPU time")
    for name, _ in ways:
        equal = name not in variants or variants[name].is_bit_equal
        print(
            f"{name:40s} {paired_ratio(timings[name], timings['none'])} ×, gradients {'equal' if equal else 'DIFFER'}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
