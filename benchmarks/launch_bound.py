"""48 blocks of width 16, every block recomputed: how much time each engine adds where arithmetic is nothing.

python -m benchmarks.launch_bound
python -m benchmarks.launch_bound --guard llama gpt2 vit --size cpu --repeats 20

The second takes the same managed forward passes, where it is at work, in turns with and without the comparison of torch calls.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
from collections.abc import Callable, Iterator
from unittest import mock

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from torch import nn

from benchmarks import peers
from benchmarks.machine import device_name, versions
from benchmarks.measure import prepare
from benchmarks.models import FAMILIES, SIZES, build
from benchmarks.peers_table import apply_plan
from plimsoll.engine import region
from plimsoll.engine.call_stream import Junction
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
    parser.add_argument(
        "--guard",
        nargs="+",
        choices=FAMILIES,
        metavar="MODEL",
        help="what comparing the torch calls takes on these models",
    )
    parser.add_argument("--size", choices=SIZES, default="cpu", help="of the models of --guard (default cpu)")
    options = parser.parse_args()
    with one_thread():
        for name in options.guard or ():
            _weigh_guard(name, options.size, options.repeats)
        return 0 if options.guard else _compare(options)


def _compare(options: argparse.Namespace) -> int:
    case = build("launch_bound", "cpu")
    ways = [(peer.name, peer.apply) for peer in (peers.NONE, *peers.EAGER) if not peer.missing(case.device)]
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


def _weigh_guard(name: str, size: str, repeats: int) -> None:
    """Print the share of the unmanaged step that comparing the torch calls takes, and how much it lengthens a forward."""
    import plimsoll

    case = build(name, size)
    plan = plimsoll.plan(case.model, case.batch, strategy="full", loss=case.loss)
    with contextlib.ExitStack() as stack:
        baseline = prepare(stack, "none", case, peers.NONE.apply)
        managed = prepare(stack, "full", case, apply_plan(plan), baseline)

        def forward() -> object:
            return managed.case.loss(managed.forward(**managed.case.batch))

        steps = {"unmanaged": baseline.step, "on": forward, "off": _without_guard(forward)}
        timings = time_in_turns(steps, rounds=repeats, warmups=3)
    unmanaged, on, off = (timings[each].seconds for each in steps)
    shares = [(b - c) / a for a, b, c in zip(unmanaged, on, off, strict=True)]
    ratios = [b / c for b, c in zip(on, off, strict=True)]
    low, middle, high = statistics.quantiles(shares, n=4)
    print(
        f"{name} {size}: unmanaged step {timings['unmanaged'].median_seconds * 1e3:.1f} ms, the guard takes {middle:.2%} of it "
        f"(quartiles {low:.2%} to {high:.2%})",
        "managed forward with it by without {1:.4f} ({0:.4f} to {2:.4f})".format(*statistics.quantiles(ratios, n=4)),
        f"{repeats} rounds, load {os.getloadavg()[0]:.1f}",
        sep="; ",
        flush=True,
    )


def _without_guard(step: Callable[[], object]) -> Callable[[], None]:
    """The same step, in which calls are taken for the recorded ones without looking at them."""

    def unguarded() -> None:
        with mock.patch.multiple(region, StreamGuard=_Trusting, references=lambda tensors: []):
            step()

    return unguarded


class _Trusting(contextlib.nullcontext[None]):
    """Stands for the guard, and finds the one program that is known."""

    def __init__(self, root: Junction, known: object) -> None:
        super().__init__()
        while root.branches:
            root = root.branches[0][2]
        self.program = root.program


if __name__ == "__main__":
    raise SystemExit(main())
