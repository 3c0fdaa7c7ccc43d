"""Host time that each engine adds to one Llama block, in forward and in backward, where arithmetic takes next to nothing.

python -m benchmarks.host_time
python -m benchmarks.host_time --rounds 100 --blocks 16

On a GPU the host issues kernels ahead of the device. Once a block's host time exceeds the time of its kernels, the host is the
bottleneck. The model here is so small that the process's CPU time is the host's time: each figure is the difference to the
unmanaged model in the same round, divided by the number of blocks.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import time

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import peers
from benchmarks.machine import device_name, versions
from benchmarks.measure import Variant, prepare
from benchmarks.models import Case
from benchmarks.peers_table import apply_plan
from plimsoll.tracing.meters.timing import Timing, median_interval, one_thread


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, metavar="N", help="timed steps per variant (default 60)")
    parser.add_argument("--blocks", type=int, default=16, metavar="N", help="blocks of the Llama (default 16)")
    options = parser.parse_args()
    with one_thread():
        _compare(options.blocks, options.rounds)
    return 0


def tiny_llama(blocks: int) -> Case:
    """A Llama whose blocks make the same torch calls as a large one's, with 8 tokens of width 16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=blocks,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
        max_position_embeddings=8,
        use_cache=False,
    )
    ids = torch.randint(0, 32, (1, 8))
    model = LlamaForCausalLM(config).train()
    return Case("llama", f"{blocks} blocks", model, {"input_ids": ids, "labels": ids}, lambda output: output.loss)


def _compare(blocks: int, rounds: int) -> None:
    import plimsoll

    case = tiny_llama(blocks)
    chosen = (peers.EAGER[0], peers.EAGER[3])
    with contextlib.ExitStack() as stack:
        none = prepare(stack, "none", case, peers.NONE.apply)
        variants = {"none": none}
        variants |= {peer.name: prepare(stack, peer.name, case, peer.apply, none) for peer in chosen}
        for strategy in ("selective:attention", "selective:mlp", "full"):
            plan = plimsoll.plan(case.model, case.batch, strategy=strategy, loss=case.loss)
            variants[f"plimsoll {strategy}"] = prepare(stack, strategy, case, apply_plan(plan), none)
        timings = _forward_and_backward(variants, rounds)
    print(f"{device_name(case.device)}; " + ", ".join(f"{name} {each}" for name, each in versions().items()))
    print(f"Llama of {blocks} blocks, {rounds} rounds, load {os.getloadavg()[0]:.1f}; CPU time per block, microseconds")
    plain = timings["none"]
    for half, index in (("forward", 0), ("backward", 1)):
        print(f"  unmanaged {half}: {plain[index].median_seconds / blocks * 1e6:.0f}")
    for name, (forward, backward) in timings.items():
        if name == "none":
            continue
        added = [_added(each, base, blocks) for each, base in zip((forward, backward), plain, strict=True)]
        equal = "equal" if variants[name].is_bit_equal else "DIFFER"
        print(f"  {name:38s} forward adds {added[0]}, backward adds {added[1]}; gradients {equal}")


def _added(ours: Timing, plain: Timing, blocks: int) -> str:
    """The paired difference per block in microseconds, with its 95% interval."""
    difference = median_interval([a - b for a, b in zip(ours.seconds, plain.seconds, strict=True)])
    median, low, high = (each / blocks * 1e6 for each in (difference.median, difference.low, difference.high))
    return f"{median:5.0f} ({low:.0f} to {high:.0f})"


def _forward_and_backward(variants: dict[str, Variant], rounds: int) -> dict[str, tuple[Timing, Timing]]:
    """Time both halves of every variant's step once per round, in an order that turns around."""
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in variants}
    for turn in range(rounds + 3):
        for name in variants if turn % 2 else reversed(list(variants)):
            gc.collect()  # garbage of the step before must not be collected in this one's time
            times = _step_halves(variants[name])
            if turn >= 3:
                for kept, new in zip(seconds[name], times, strict=True):
                    kept.append(new)
    return {name: (Timing(name, tuple(one)), Timing(name, tuple(other))) for name, (one, other) in seconds.items()}


def _step_halves(variant: Variant) -> tuple[float, float]:
    """CPU seconds of forward with the loss, and of backward."""
    case, clock = variant.case, time.process_time
    begun = clock()
    output = variant.forward(**case.batch)
    loss = case.loss(output)
    middle = clock()
    loss.backward()
    ended = clock()
    case.model.zero_grad(set_to_none=True)
    return middle - begun, ended - middle


if __name__ == "__main__":
    raise SystemExit(main())
