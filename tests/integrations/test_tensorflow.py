"""Plans for TensorFlow: what the graph says a layer holds, what a run allocates, and equal gradients."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# TensorFlow imports Keras, which takes its backend then; tests of Keras in the same process want JAX.
os.environ.setdefault("KERAS_BACKEND", "jax")
tf = pytest.importorskip("tensorflow", reason="TensorFlow is an extra: pip install torch-plimsoll[tensorflow]")

tf.config.threading.set_inter_op_parallelism_threads(1)

from plimsoll.artifacts.store import load_plan  # noqa: E402
from plimsoll.errors import BudgetBelowFloor, InvalidOption, PlanMismatch  # noqa: E402
from plimsoll.integrations import tensorflow as ptf  # noqa: E402
from plimsoll.integrations.layers_in_graph import bytes_in_any_state, peak_bytes, rates_of, read_layers  # noqa: E402

pytestmark = pytest.mark.long

ROWS, WIDTH, WIDER, BLOCKS = 512, 64, 512, 6


class Block(tf.Module):
    """A residual block of two matrix products."""

    def __init__(self, number: int) -> None:
        super().__init__(name=f"block_{number}")
        draw = tf.random.Generator.from_seed(number)
        self.up = tf.Variable(draw.normal((WIDTH, WIDER)) * 0.05)
        self.down = tf.Variable(draw.normal((WIDER, WIDTH)) * 0.05)

    def __call__(self, x: Any, *, scale: float = 1.0) -> Any:
        return x + scale * tf.matmul(tf.tanh(tf.matmul(x, self.up)), self.down)


class Noisy(Block):
    """A block that draws random numbers."""

    def __call__(self, x: Any, *, scale: float = 1.0) -> Any:
        return super().__call__(x + tf.random.normal(x.shape), scale=scale)


LAYERS = [Block(number) for number in range(BLOCKS)]
X = tf.reshape(tf.linspace(-1.0, 1.0, ROWS * WIDTH), (ROWS, WIDTH))


def loss(x: Any) -> Any:
    for layer in LAYERS:
        x = layer(x, scale=0.5)
    return tf.reduce_mean(x**2)


def gradients(step: Any) -> list[Any]:
    def run(x: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            value = step(x)
        return tape.gradient(value, [each for layer in LAYERS for each in layer.trainable_variables])

    return tf.function(run)(X)


@pytest.fixture(scope="module")
def unmanaged_bytes() -> int:
    return ptf.allocated_bytes(loss, X)


@pytest.fixture(scope="module")
def plan(unmanaged_bytes: int) -> Any:
    return ptf.plan(loss, X, layers=LAYERS, budget=int(0.8 * unmanaged_bytes))


def test_the_graph_says_what_a_layer_holds_inside():
    costs = read_layers(loss, (X,), LAYERS, rates_of(None))[0].layers
    assert [each.name for each in costs] == [layer.name for layer in LAYERS]
    # Of tanh and of the matrix product before it the gradient reads the result of tanh alone.
    assert {each.saved_bytes for each in costs} == {4 * ROWS * WIDER}
    assert not any(each.obstacle for each in costs)


def test_other_traces_allocate_no_more_than_the_budget_and_gradients_have_equal_bits(plan: Any, unmanaged_bytes: int):
    managed = ptf.wrap(loss, plan, layers=LAYERS)
    assert plan.predicted_peak_bytes <= 0.8 * unmanaged_bytes
    beside = []
    for number in range(3):
        beside.append(tf.zeros([number * 123_456 + 300_000]))
        assert ptf.allocated_bytes(managed, X) <= plan.predicted_peak_bytes
    assert 0 < sum(not region.is_untouched for region in plan.regions) < BLOCKS
    for a, b in zip(gradients(loss), gradients(managed), strict=True):
        assert tf.reduce_all(a == b)


def counted(monkeypatch: pytest.MonkeyPatch, peaks: list[int]) -> Any:
    """A run, of which TensorFlow says these peaks; the first run is not looked at."""
    left = iter([0, *peaks])
    info = {"current": 0, "peak": 0}
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda device: dict(info))
    monkeypatch.setattr(tf.config.experimental, "reset_memory_stats", lambda device: None)
    run = lambda: info.update(peak=next(left))  # noqa: E731
    monkeypatch.setattr(ptf, "gradient_run", lambda step, *args: run)
    return run


@pytest.mark.parametrize(
    ("peaks", "most"),
    [([7, 7, 7, 9], 7), ([7, 6, 7, 9, 6, 6, 6, 6, 10], 9), (list(range(1, 40)), 16)],
    ids=["alike", "one higher", "rising"],
)
def test_a_run_is_repeated_until_its_peak_rises_no_more(monkeypatch: pytest.MonkeyPatch, peaks: list[int], most: int):
    """Operations run in whatever order they become ready in, so the peaks of runs differ."""
    counted(monkeypatch, peaks)
    assert ptf.allocated_bytes(loss, X) == most


def test_what_is_promised_lies_two_standard_deviations_above_the_most_of_runs(monkeypatch: pytest.MonkeyPatch):
    assert bytes_in_any_state(counted(monkeypatch, [100] * 5)) == 100
    # The squares of the distances from 120 come to 8000, and a fourth of that is 2000.
    assert bytes_in_any_state(counted(monkeypatch, [100] * 4 + [200])) == 200 + int(2 * 2000**0.5)


def test_what_else_the_process_holds_moves_the_peak_of_one_trace():
    """The allocator hands free chunks of up to twice the size out whole: why plans are counted in several states."""
    run = ptf.gradient_run(loss, X)
    run()
    size, found = 4 * ROWS * WIDER, set()
    for share in (1.0, 1.3, 1.6, 1.9):
        beside = [tf.zeros([int(share * size)], tf.int8) for _ in range(12)]
        del beside[::2]
        found.add(peak_bytes(run))
    assert len(found) > 1


def test_afterwards_the_layers_are_what_they_were(plan: Any):
    gradients(ptf.wrap(loss, plan, layers=LAYERS))
    assert all(type(layer) is Block for layer in LAYERS)


def test_a_layer_that_draws_random_numbers_is_kept():
    noisy = Noisy(0)
    [cost] = read_layers(lambda x: tf.reduce_sum(noisy(x)), (X,), [noisy], rates_of(None))[0].layers
    assert "twice" in cost.obstacle


class Gated(Block):
    """A block with a gate that it is given by name, or reads from itself, and a switch."""

    gate: Any = None

    def __call__(self, x: Any, is_on: bool = True, *, gate: Any = None, scale: float = 1.0) -> Any:
        return x + (self.gate if gate is None else gate) * super().__call__(x, scale=scale) if is_on else x


def test_gradients_go_through_tensors_by_name_and_switches_stay_python():
    layers = [Gated(number) for number in range(3)]

    def step(x: Any) -> Any:
        gate = tf.reduce_mean(x @ layers[0].up, -1, keepdims=True)
        for number, layer in enumerate(layers):
            x = layer(x, number != 1, gate=gate)
        return tf.reduce_mean(x**2)

    def found(each: Any) -> list[Any]:
        run = ptf.gradient_run(each, X)
        return run()[1]

    for a, b in zip(found(step), found(ptf._rerunning(step, {layer.name for layer in layers}, layers)), strict=True):
        assert (a is None) == (b is None)
        assert a is None or tf.reduce_all(a == b)


def test_a_layer_that_reads_a_tensor_beside_its_arguments_is_kept():
    """Its gradient would be lost without a word."""
    gated = Gated(0)

    def step(x: Any) -> Any:
        gated.gate = tf.reduce_mean(x @ LAYERS[0].up, -1, keepdims=True)
        return tf.reduce_mean(gated(x))

    [cost] = read_layers(step, (X,), [gated], rates_of(None))[0].layers
    assert "which is not an argument" in cost.obstacle


def test_a_budget_that_no_run_keeps_is_refused():
    with pytest.raises(BudgetBelowFloor, match="smallest peak that TensorFlow reached"):
        ptf.plan(loss, X, layers=LAYERS, budget="10KiB")


def test_layers_that_the_step_does_not_call_are_refused():
    with pytest.raises(InvalidOption, match="block_9"):
        ptf.plan(loss, X, layers=[*LAYERS, Block(9)], budget=None)


def test_a_saved_plan_comes_back_and_is_refused_elsewhere(plan: Any, tmp_path: Path):
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    with pytest.raises(PlanMismatch, match="other layers"):
        ptf.wrap(loss, plan, layers=LAYERS[:3])
    with pytest.raises(PlanMismatch, match="was made for jax"):
        ptf.wrap(loss, msgspec.structs.replace(plan, framework="jax"), layers=LAYERS)


def test_nothing_of_torch_is_imported():
    code = (
        "import sys, tensorflow as tf; from plimsoll.integrations import tensorflow as ptf;"
        "layer = tf.Module('it'); w = tf.Variable(tf.ones((512, 512)));"
        "type(layer).__call__ = lambda self, x: tf.tanh(x @ w);"
        "str(ptf.plan(lambda x: tf.reduce_sum(layer(x)), tf.ones((512, 512)), layers=[layer], budget=None));"
        "assert not [m for m in sys.modules if m.split('.')[0] == 'torch']"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
