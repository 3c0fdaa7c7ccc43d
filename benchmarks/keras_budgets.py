"""Keras models at shares of their memory: planned value by value (on JAX), and layer by layer under ``RematScope``.

    PYTHONPATH=src:tests/support python -m benchmarks.keras_budgets [vit | convolutional]
    KERAS_BACKEND=tensorflow PYTHONPATH=src:tests/support python -m benchmarks.keras_budgets [vit | convolutional]

A model is a functional one of residual blocks, each a layer of its own. Budgets lie between all blocks run again and
unmanaged. Memory is XLA's figure for the compiled gradient, or the most that TensorFlow counts in three traces. Seconds are
the process's CPU time per gradient on one thread; plan and unmanaged run in turns, and a ratio is the median over the pairs'
ratios.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import keras
import numpy as np

from benchmarks.machine import page_head, versions
from benchmarks.page import format_table
from plimsoll.errors import BudgetBelowFloor
from plimsoll.integrations import jax as pj
from plimsoll.integrations import keras as pk
from plimsoll.integrations.keras.steps import constructed, jax_step, tensorflow_step
from plimsoll.units import MIB

_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
_BLOCKS, _STEPS = 6, 7
layers = keras.layers


class Parts(layers.Layer):
    """A residual block: what ``parts`` builds, run one after the other."""

    def build(self, shape: Any) -> None:
        self.own = self.parts(shape[-1])
        for part in self.own:
            part.build(shape)
            shape = part.compute_output_shape(shape)

    def call(self, x: Any) -> Any:
        h = x
        for part in self.own:
            h = part(h)
        return x + h


@keras.saving.register_keras_serializable("benchmarks")
class Attention(Parts):
    """The first half of a block of a vision transformer."""

    def build(self, shape: Any) -> None:
        self.norm, self.heads = layers.LayerNormalization(), layers.MultiHeadAttention(4, shape[-1] // 4)
        self.norm.build(shape)
        self.heads.build(shape, shape)

    def call(self, x: Any) -> Any:
        h = self.norm(x)
        return x + self.heads(h, h)


@keras.saving.register_keras_serializable("benchmarks")
class Perceptron(Parts):
    """The second half of a block of a vision transformer."""

    def parts(self, width: int) -> list[Any]:
        return [layers.LayerNormalization(), layers.Dense(4 * width, activation="gelu"), layers.Dense(width)]


@keras.saving.register_keras_serializable("benchmarks")
class Convolutions(Parts):
    """A block of ConvNeXt."""

    def parts(self, width: int) -> list[Any]:
        depthwise = layers.DepthwiseConv2D(7, padding="same")
        return [depthwise, layers.LayerNormalization(), layers.Dense(4 * width, activation="gelu"), layers.Dense(width)]


def vit() -> tuple[Any, tuple[np.ndarray, np.ndarray]]:
    """Images of 32 × 32, patches of 4 × 4, width 128, 16 images."""
    given = keras.Input((32, 32, 3))
    x = layers.Reshape((64, 128))(layers.Conv2D(128, 4, 4)(given))
    for number in range(_BLOCKS):
        x = Perceptron(name=f"perceptron_{number}")(Attention(name=f"attention_{number}")(x))
    return _model(given, layers.GlobalAveragePooling1D()(x), 16)


def convolutional() -> tuple[Any, tuple[np.ndarray, np.ndarray]]:
    """Images of 32 × 32, width 48, 8 images."""
    given = keras.Input((32, 32, 3))
    x = layers.Conv2D(48, 2, 2)(given)
    for number in range(_BLOCKS):
        x = Convolutions(name=f"convolutions_{number}")(x)
    return _model(given, layers.GlobalAveragePooling2D()(x), 8)


def _model(given: Any, x: Any, rows: int) -> tuple[Any, tuple[np.ndarray, np.ndarray]]:
    model = keras.Model(given, layers.Dense(10)(x))
    model.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random = np.random.default_rng(0)
    return model, (random.random((rows, 32, 32, 3), np.float32), random.integers(0, 10, rows))


def mib(bytes_: int | None) -> str:
    """With one decimal."""
    return f"{(bytes_ or 0) / MIB:.1f} MiB"


def table(make: Any) -> list[str]:
    """All kinds of plan at every share."""
    keras.utils.set_random_seed(0)
    model, batch = make()
    names = {each.name for each in model.layers if isinstance(each, Parts)}
    least, unmanaged = taken_bytes(constructed(model, names), batch), taken_bytes(model, batch)
    rows = []
    for share in _SHARES:
        budget = int(least + share * (unmanaged - least))
        for kind in ("values", "layers") if is_on_jax() else ("layers",):
            began = time.process_time()
            try:
                plan = (pk.plan if kind == "values" else pk.plan_layers)(model, *batch, budget=budget)
            except BudgetBelowFloor as refused:
                rows.append([f"{share:.0%}", mib(budget), kind, "refused", str(refused.found)[-40:], "", "", ""])
                continue
            seconds = time.process_time() - began
            [row] = pk.compare(model, *batch, plans={kind: plan}, steps=_STEPS).rows
            most = row.measured_peak_bytes or 0
            if not is_on_jax():
                most = max(most, *(counted_bytes(pk.rebuild(model, plan), batch) for _ in range(2)))
            figures = [mib(most), f"{row.measured_ratio:.3f}", f"{row.gradient_error:.1g}"]
            rows.append(
                [f"{share:.0%}", mib(budget), kind, mib(plan.predicted_peak_bytes), *figures, f"{seconds:.1f} s"]
            )
            print(rows[-1], file=sys.stderr, flush=True)
    counter = "XLA" if is_on_jax() else "TensorFlow"
    head = ["budget", "", "planned by", "promised", counter, "seconds / unmanaged", "gradient", "planning"]
    told = f"Between {mib(least)} with every block run again and {mib(unmanaged)} unmanaged:"
    return [f"## {make.__name__}: {make.__doc__.rstrip('.')}", "", told, "", *format_table(head, rows), ""]


def is_on_jax() -> bool:
    """Whether Keras runs on JAX; on TensorFlow otherwise."""
    return bool(keras.backend.backend() == "jax")


def taken_bytes(model: Any, batch: Any) -> int:
    """What a step takes, as plans are counted."""
    if is_on_jax():
        loss, args = jax_step(model, *batch)
        return pj.temporary_bytes(loss, *args)
    from plimsoll.integrations import tensorflow as ptf
    from plimsoll.integrations.layers_in_graph import bytes_in_any_state

    return bytes_in_any_state(*(ptf.gradient_run(tensorflow_step(model), *batch) for _ in range(2)))


def counted_bytes(model: Any, batch: Any) -> int:
    """What TensorFlow counts in a trace of its own."""
    from plimsoll.integrations import tensorflow as ptf

    return ptf.allocated_bytes(tensorflow_step(model), *batch)


def main() -> int:
    """Print the page."""
    command = "PYTHONPATH=src:tests/support python -m benchmarks.keras_budgets"
    packages = versions() | {"keras": keras.__version__}
    if is_on_jax():
        packages["jax"] = jax.__version__
    else:
        import tensorflow as tf

        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.threading.set_intra_op_parallelism_threads(1)
        command = f"KERAS_BACKEND=tensorflow {command}"
        packages["tensorflow"] = tf.__version__
    device = f"{jax.devices()[0].device_kind}, one thread, load {os.getloadavg()[0]:.1f}"
    print("\n".join([*page_head("Keras at shares of its memory", command, device=device, versions=packages), ""]))
    for make in (vit, convolutional):
        if not sys.argv[1:] or make.__name__ in sys.argv[1:]:
            print("\n".join(table(make)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
