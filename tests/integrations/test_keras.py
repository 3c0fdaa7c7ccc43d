"""Keras 3: its JAX trainer under a plan, and its torch backend as any other module."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is an extra: pip install torch-plimsoll[jax]")
os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras", reason="Keras is an extra: pip install torch-plimsoll[keras]")

from plimsoll.errors import InvalidModel, InvalidOption, PlanMismatch  # noqa: E402
from plimsoll.integrations import keras as pk  # noqa: E402

pytestmark = pytest.mark.long

ROWS, WIDTH, BLOCKS = 256, 16, 4


def network(width: int = WIDTH) -> Any:
    """Residual blocks with batch normalisation and dropout, compiled."""
    keras.utils.set_random_seed(0)
    given = x = keras.Input((width,))
    for _ in range(BLOCKS):
        h = keras.layers.Dense(4 * width, activation="gelu")(keras.layers.BatchNormalization()(x))
        x = x + keras.layers.Dense(width)(keras.layers.Dropout(0.1)(h))
    model = keras.Model(given, keras.layers.Dense(1)(x))
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    return model


def batch() -> tuple[np.ndarray, np.ndarray]:
    x = np.linspace(-1, 1, ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
    return x, x.sum(1, keepdims=True)


@pytest.fixture(scope="module")
def plan() -> Any:
    return pk.plan(network(), *batch(), budget="1100KiB", device="laptop-CPU")


def test_fit_follows_a_plan_and_ends_with_the_same_weights(plan: Any):
    plain, managed = network(), network()
    plain.fit(*batch(), batch_size=ROWS, epochs=2, verbose=0, shuffle=False)
    with pk.apply(managed, plan):
        managed.fit(*batch(), batch_size=ROWS, epochs=2, verbose=0, shuffle=False)
    assert plan.predicted_peak_bytes <= 1100 * 1024
    assert any(not region.is_untouched for region in plan.regions)
    for a, b in zip(plain.get_weights(), managed.get_weights(), strict=True):
        # Dropout and moving averages included: their state goes through the step.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_afterwards_the_model_is_as_it_was(plan: Any):
    model = network()
    with pk.apply(model, plan):
        assert "compute_loss_and_updates" in vars(model)
    assert "compute_loss_and_updates" not in vars(model)


def test_a_plan_for_another_model_is_refused_in_the_first_step(plan: Any):
    keras.utils.set_random_seed(0)
    other = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)])
    other.compile(loss="mse")
    with pk.apply(other, plan), pytest.raises(PlanMismatch):
        other.fit(*batch(), verbose=0)


def test_evaluation_and_validation_run_without_the_plan(plan: Any):
    plain, managed = network(), network()
    options = {"batch_size": ROWS, "verbose": 0, "shuffle": False, "validation_data": batch()}
    wanted = plain.fit(*batch(), **options).history["val_loss"]
    with pk.apply(managed, plan):
        found = managed.fit(*batch(), **options).history["val_loss"]
        managed.evaluate(*batch(), verbose=0)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_a_refused_step_leaves_the_trained_weights(plan: Any):
    model = network()
    with pk.apply(model, plan):
        model.fit(*batch(), batch_size=ROWS, verbose=0)
        trained = model.get_weights()
        with pytest.raises(PlanMismatch):
            model.fit(*batch(), sample_weight=np.ones(ROWS, np.float32), batch_size=ROWS, verbose=0)
    for a, b in zip(model.get_weights(), trained, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_second_plan_on_the_same_model_is_refused(plan: Any):
    model = network()
    with pk.apply(model, plan):
        with pytest.raises(InvalidModel, match="already runs under a plan"), pk.apply(model, plan):
            pass
        assert "compute_loss_and_updates" in vars(model)


def test_a_model_without_a_loss_is_refused():
    bare = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)])
    with pytest.raises(InvalidOption, match="does not have a jax training step"):
        pk.plan(bare, *batch(), budget="1MiB")


def test_an_estimate_counts_variables_exactly_and_plans_within_a_budget():
    model = network()
    whole = pk.estimate(model, *batch(), device="laptop-CPU")
    items = {item.name: item.bytes for item in whole.stages[0].items}
    trainable, every = (
        4 * sum(int(np.prod(v.shape)) for v in each) for each in (model.trainable_variables, model.variables)
    )
    assert items["gradients"] == trainable
    assert every <= items["parameters"] <= every + 64  # the loss' own average is there as well
    assert items["batch"] == sum(each.nbytes for each in batch())
    assert whole.facts.batch == ROWS
    limit = whole.stages[0].allocated_bytes * 3 // 4
    planned = pk.estimate(model, *batch(), device="laptop-CPU", budget=limit)
    assert planned.stages[0].allocated_bytes <= limit
    assert planned.stages[0].plans[0].framework == "jax"
    assert model.name in str(planned)


def test_fit_finds_a_larger_batch_with_a_plan_than_without():
    def shapes(rows: int) -> tuple[Any, Any]:
        return tuple(jax.ShapeDtypeStruct((128 * rows, width), "float32") for width in (WIDTH, 1))

    found = pk.fit(network(), shapes, "1100KiB", device="laptop-CPU", most_batch=2)
    assert found.best_point is not None
    assert found.best_point.predicted_peak_bytes <= found.budget_bytes < found.best_point.unmanaged_peak_bytes
    assert str(found)


ON_TORCH = """
import torch, keras, plimsoll
keras.utils.set_random_seed(0)
given = x = keras.Input((64,))
for _ in range(2):
    x = x + keras.layers.Dense(64)(keras.layers.Dense(256, activation="gelu")(keras.layers.LayerNormalization()(x)))
model = keras.Model(given, keras.layers.Dense(1)(x))
batch = torch.randn(256, 64)
loss = lambda out: (out ** 2).mean()
plan = plimsoll.plan(model, batch, strategy="full", loss=loss)
loss(model(batch)).backward()
wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
model.zero_grad()
with plimsoll.apply(model, plan):
    loss(model(batch)).backward()
found = [p.grad for p in model.parameters() if p.grad is not None]
assert len(wanted) == len(found) > 8 and all(torch.equal(a, b) for a, b in zip(wanted, found))
assert any(not region.is_untouched for region in plan.regions), plan
"""


def test_on_the_torch_backend_the_engine_takes_a_keras_model_as_it_is():
    finished = subprocess.run(
        [sys.executable, "-c", ON_TORCH],
        env={**os.environ, "KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]


@keras.saving.register_keras_serializable("plimsoll")
class Block(keras.layers.Layer):
    """A residual block of one layer, without an argument ``training``."""

    def __init__(self, width: int = WIDTH, **options: Any) -> None:
        super().__init__(**options)
        self.width = width
        self.norm = keras.layers.LayerNormalization()
        self.up = keras.layers.Dense(8 * width, activation="tanh")
        self.down = keras.layers.Dense(width)

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.norm.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 8 * self.width))

    def call(self, x: Any) -> Any:
        return x + self.down(self.up(self.norm(x)))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "width": self.width}


def network_of_blocks() -> Any:
    keras.utils.set_random_seed(0)
    given = x = keras.Input((WIDTH,))
    for number in range(BLOCKS):
        x = Block(name=f"block_{number}")(x)
    x = keras.layers.Dropout(0.1, name="drops")(keras.layers.BatchNormalization(name="average")(x))
    model = keras.Model(given, keras.layers.Dense(1)(x))
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    return model


@pytest.fixture(scope="module")
def layer_plan() -> Any:
    everything = pk.plan_layers(network_of_blocks(), *batch(), budget=None)
    return pk.plan_layers(network_of_blocks(), *batch(), budget=int(0.6 * everything.predicted_peak_bytes))


def test_a_rebuilt_model_has_the_same_weights_and_trains_to_the_same(layer_plan: Any):
    plain = network_of_blocks()
    managed = pk.rebuild(plain, layer_plan)
    for a, b in zip(plain.variables, managed.variables, strict=True):
        np.testing.assert_array_equal(a, b)
    for model in (plain, managed):
        model.fit(*batch(), batch_size=ROWS, epochs=2, verbose=0, shuffle=False)
    for a, b in zip(plain.get_weights(), managed.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_rebuilt_model_keeps_frozen_layers_and_variables_frozen(layer_plan: Any):
    model = network_of_blocks()
    model.get_layer("block_0").trainable = False
    model.get_layer("block_1").up.trainable = False
    model.get_layer("block_2").down.kernel.trainable = False
    model.compile(optimizer="adam", loss="mse")
    managed = pk.rebuild(model, layer_plan)
    assert [each.trainable for each in managed.variables] == [each.trainable for each in model.variables]
    before = [np.asarray(each) for each in managed.variables]
    managed.fit(*batch(), batch_size=ROWS, verbose=0)
    for variable, value in zip(managed.variables, before, strict=True):
        if not variable.trainable and "moving" not in variable.path and "seed" not in variable.path:
            np.testing.assert_array_equal(variable, value)


class Forgetful(keras.layers.Layer):
    """Forgets in ``get_config`` how many layers it has."""

    def __init__(self, count: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self.parts = [keras.layers.Dense(WIDTH) for _ in range(count)]

    def call(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x

    def get_config(self) -> dict[str, Any]:
        return {name: value for name, value in super().get_config().items() if name != "count"}


def test_a_model_that_keras_clones_with_other_layers_is_refused():
    given = keras.Input((WIDTH,))
    model = keras.Model(given, keras.layers.Dense(1)(Forgetful(2)(given)))
    model.compile(loss="mse")
    with pytest.raises(InvalidModel) as caught:
        pk.plan_layers(model, *batch(), budget=None)
    assert "other layers" in caught.value.why


def test_a_layer_plan_names_blocks_and_keeps_what_writes_state(layer_plan: Any):
    again = {region.name for region in layer_plan.regions if not region.is_untouched}
    assert again
    assert again <= {f"block_{number}" for number in range(BLOCKS)}
    assert layer_plan.framework == "keras"
    assert str(layer_plan)


def test_layer_plans_and_value_plans_are_refused_in_each_others_place(layer_plan: Any, plan: Any):
    with pytest.raises(PlanMismatch, match="made for jax, not for layers of keras"):
        pk.rebuild(network_of_blocks(), plan)
    with pytest.raises(PlanMismatch, match="other layers"):
        pk.rebuild(network(), layer_plan)
    with pytest.raises(PlanMismatch, match="made for keras, not for JAX"), pk.apply(network_of_blocks(), layer_plan):
        pass


def test_compare_measures_plans_for_values_and_for_layers(layer_plan: Any):
    model = network_of_blocks()
    values = pk.plan(model, *batch(), budget=None, device="laptop-CPU")
    found = pk.compare(model, *batch(), plans={"values": values, "layers": layer_plan}, steps=1)
    rows = {row.strategy: row for row in found.rows}
    assert rows["layers"].measured_peak_bytes == layer_plan.predicted_peak_bytes < found.baseline_peak_bytes
    assert rows["values"].measured_peak_bytes == values.predicted_peak_bytes
    assert not any(row.is_wrong for row in found.rows)


ON_TENSORFLOW = """
import numpy as np, tensorflow as tf, test_keras as t
tf.config.threading.set_inter_op_parallelism_threads(1)
from plimsoll.integrations import keras as pk
t.ROWS = 2048
model = t.network_of_blocks()
everything = pk.plan_layers(model, *t.batch(), budget=None)
plan = pk.plan_layers(model, *t.batch(), budget=int(0.85 * everything.predicted_peak_bytes))
assert any(not region.is_untouched for region in plan.regions), plan
[row] = pk.compare(model, *t.batch(), plans={"it": plan}, steps=1).rows
assert row.is_bit_equal and row.measured_peak_bytes <= plan.predicted_peak_bytes, row
whole = pk.estimate(model, *t.batch(), device="laptop-CPU")
limit = whole.stages[0].allocated_bytes * 9 // 10
assert pk.estimate(model, *t.batch(), device="laptop-CPU", budget=limit).stages[0].allocated_bytes <= limit, str(whole)
fits = pk.fit(model, lambda rows: tuple(each[: 512 * rows] for each in t.batch()), limit, device="laptop-CPU", most_batch=4)
assert fits.best_point.predicted_peak_bytes <= limit, str(fits)
managed = pk.rebuild(model, plan)
for each in (model, managed):
    each.fit(*t.batch(), batch_size=t.ROWS, epochs=2, verbose=0, shuffle=False)
assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), managed.get_weights()))
"""


def test_on_the_tensorflow_backend_a_rebuilt_model_trains_to_equal_bits():
    pytest.importorskip("tensorflow", reason="TensorFlow is an extra: pip install torch-plimsoll[tensorflow]")
    here = os.path.dirname(__file__)
    finished = subprocess.run(
        [sys.executable, "-c", ON_TENSORFLOW],
        env={**os.environ, "KERAS_BACKEND": "tensorflow", "PYTHONPATH": os.pathsep.join([here, *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
