"""TensorFlow at shares of its memory: which blocks run again, beside hand-written ``recompute_grad`` of every block.

    PYTHONPATH=src:tests/support python -m benchmarks.tensorflow_budgets [vit | convolutional | decoder]

Networks are residual blocks of ``tf.Module``. Budgets lie between every block run again and unmanaged, both counted as plans
are: the most of runs of two traces beside other tensors, and twice their deviation. The first row of a table is the plan at
the memory that every block run again takes so. Memory is the most that TensorFlow counts in three traces of the plan, one of
them the one that is timed, gradients included. Seconds are the process's CPU time per gradient on one thread; all ways of a
table run in turns. A ratio to unmanaged is the median over the rounds' ratios, one to every block that of the medians.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
import torch

from benchmarks.machine import device_name, page_head
from benchmarks.page import format_table
from plimsoll.errors import BudgetBelowFloor
from plimsoll.integrations import tensorflow as ptf
from plimsoll.integrations.layers_in_graph import bytes_in_any_state
from plimsoll.units import MIB

_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)
_BLOCKS, _ROUNDS, _TRACES = 6, 9, 2


class Block(tf.Module):
    """A residual block with weights of these shapes."""

    def __init__(self, name: str, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__(name=name)
        draw = tf.random.Generator.from_seed(len(name))
        for key, shape in shapes.items():
            setattr(self, key, tf.Variable(0.05 * draw.normal(shape), name=key))

    def __call__(self, x: Any) -> Any:
        return x + self.inside(_normalised(x))


def _normalised(x: Any) -> Any:
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-6)


class Attention(Block):
    """Four heads; ``is_causal`` for a decoder."""

    def __init__(self, name: str, width: int, *, is_causal: bool) -> None:
        super().__init__(name, {"qkv": (width, 3 * width), "out": (width, width)})
        self.is_causal = is_causal

    def inside(self, x: Any) -> Any:
        rows, length, width = x.shape
        parts = tf.transpose(tf.reshape(x @ self.qkv, (rows, length, 3, 4, width // 4)), (2, 0, 3, 1, 4))
        scores = tf.matmul(parts[0], parts[1], transpose_b=True) / (width // 4) ** 0.5
        if self.is_causal:
            scores += tf.linalg.band_part(tf.fill((length, length), -1e9), 0, -1) - tf.linalg.diag([-1e9] * length)
        mixed = tf.nn.softmax(scores) @ parts[2]
        return tf.reshape(tf.transpose(mixed, (0, 2, 1, 3)), (rows, length, width)) @ self.out


class Perceptron(Block):
    """Two products with a gelu between them."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__(name, {"up": (width, 4 * width), "down": (4 * width, width)})

    def inside(self, x: Any) -> Any:
        return tf.nn.gelu(x @ self.up) @ self.down


class Convolution(Block):
    """A block of ConvNeXt."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__(name, {"deep": (7, 7, width, 1), "up": (width, 4 * width), "down": (4 * width, width)})

    def inside(self, x: Any) -> Any:
        deep = tf.nn.depthwise_conv2d(x, self.deep, (1, 1, 1, 1), "SAME")
        return tf.nn.gelu(_normalised(deep) @ self.up) @ self.down


Network = tuple[list[Block], Any]


def _halves(*, is_causal: bool) -> list[Block]:
    return [
        each
        for at in range(_BLOCKS)
        for each in (Attention(f"attention_{at}", 128, is_causal=is_causal), Perceptron(f"perceptron_{at}", 128))
    ]


def vit() -> Network:
    """A ViT of 6 blocks, each half a layer: width 128, 64 patches, 16 images."""
    return _halves(is_causal=False), tf.random.Generator.from_seed(0).normal((16, 64, 128))


def convolutional() -> Network:
    """A ConvNeXt of 6 blocks: width 64, 16 × 16 pixels, 8 images."""
    images = tf.random.Generator.from_seed(0).normal((8, 16, 16, 64))
    return [Convolution(f"block_{at}", 64) for at in range(_BLOCKS)], images


def decoder() -> Network:
    """A decoder of 6 blocks, each half a layer: width 128, 8 × 128 words, scores of 2048."""
    return _halves(is_causal=True), tf.random.Generator.from_seed(0).normal((8, 128, 128))


def _loss(blocks: list[Block], run: Callable[[Block, Any], Any], head: Any) -> Callable[[Any], Any]:
    def loss(x: Any) -> Any:
        for each in blocks:
            x = run(each, x)
        return tf.reduce_mean(x**2 if head is None else tf.nn.log_softmax(x @ head)[..., 0])

    return loss


def table(make: Callable[[], Network]) -> list[str]:
    """Every share beside unmanaged and beside every block run again."""
    blocks, x = make()
    words = tf.Variable(0.05 * tf.random.Generator.from_seed(9).normal((128, 2048))) if make is decoder else None
    loss = _loss(blocks, lambda block, x: block(x), words)
    every = _loss(blocks, lambda block, x: tf.recompute_grad(block)(x), words)
    unmanaged, least = (bytes_in_any_state(*(ptf.gradient_run(each, x) for _ in range(2))) for each in (loss, every))
    ways, planned = {"every block": every}, {}
    for share in _SHARES:
        budget, began = int(least + share * (unmanaged - least)), time.process_time()
        try:
            plan = ptf.plan(loss, x, layers=blocks, budget=budget)
        except BudgetBelowFloor as refused:
            planned[share] = (budget, None, refused.found)
            continue
        planned[share] = (budget, plan, f"{time.process_time() - began:.1f} s")
        ways[f"{share:.0%}"] = ptf.wrap(loss, plan, layers=blocks)
    compared = ptf.compare(loss, x, ways=ways, steps=_ROUNDS)
    found = {row.strategy: row for row in compared.rows}
    hand = found["every block"]
    rows = []
    for share, (budget, plan, seconds) in planned.items():
        if plan is None:
            rows.append([f"{share:.0%}", mib(budget), seconds, *[""] * 6])
            continue
        row = found[f"{share:.0%}"]
        taken = [ptf.allocated_bytes(ways[row.strategy], x) for _ in range(_TRACES)]
        again = sum(not region.is_untouched for region in plan.regions)
        gradient = "equal bits" if row.is_bit_equal else f"{row.gradient_error:.1g}"
        ratios = [f"{row.measured_ratio:.3f}", f"{row.measured_seconds / hand.measured_seconds:.3f}"]
        rows.append(
            [
                row.strategy,
                mib(budget),
                mib(plan.predicted_peak_bytes),
                mib(max(*taken, row.measured_peak_bytes or 0)),
                f"{again} of {len(blocks)}",
                *ratios,
                gradient,
                seconds,
            ]
        )
    head = [
        "budget",
        "",
        "promised",
        "TensorFlow",
        "run again",
        "seconds / unmanaged",
        "seconds / every block",
        "gradient",
        "planning",
    ]
    told = (
        f"Every block by hand takes up to {mib(least)}, unmanaged up to {mib(unmanaged)}; in the state of this process "
        f"{mib(hand.measured_peak_bytes or 0)} and {mib(compared.baseline_peak_bytes or 0)}. By hand a gradient "
        f"takes {hand.measured_ratio:.3f} of the unmanaged time."
    )
    return [f"## {make.__name__}", "", str(make.__doc__), "", told, "", *format_table(head, rows), ""]


def mib(bytes_: int) -> str:
    """With one decimal."""
    return f"{bytes_ / MIB:.1f} MiB"


def main() -> int:
    """Print the page."""
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    command = "PYTHONPATH=src:tests/support python -m benchmarks.tensorflow_budgets"
    device = f"{device_name(torch.device('cpu'))}, one thread, load {os.getloadavg()[0]:.1f}"
    print(
        "\n".join(
            [
                *page_head(
                    "TensorFlow at shares of its memory",
                    command,
                    device=device,
                    versions={"tensorflow": tf.__version__},
                ),
                "",
            ]
        )
    )
    for make in (vit, convolutional, decoder):
        if not sys.argv[1:] or make.__name__ in sys.argv[1:]:
            print("\n".join(table(make)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
