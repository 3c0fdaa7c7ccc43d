"""Plans for JAX functions: XLA's own count of temporary memory, equal gradients, and nothing of torch."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.plan import Plan, RegionPlan, ValueDecision
from plimsoll.artifacts.store import load_plan
from plimsoll.errors import BudgetBelowFloor, InvalidOption, PlanMismatch

jax = pytest.importorskip("jax", reason="JAX is an extra: pip install torch-plimsoll[jax]")

import jax.numpy as jnp  # noqa: E402

from plimsoll.integrations import jax as pj  # noqa: E402
from plimsoll.integrations.jax.names import evaluate, naming  # noqa: E402
from plimsoll.integrations.jax.program import trace_program  # noqa: E402
from plimsoll.integrations.jax.regions import find_regions  # noqa: E402
from plimsoll.integrations.jax.trace import value_name  # noqa: E402

pytestmark = pytest.mark.long

WIDTH, LAYERS, ROWS = 32, 6, 256


def parameters(layers: int = LAYERS) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "up": jax.random.normal(keys[0], (layers, WIDTH, 4 * WIDTH)) * 0.1,
        "down": jax.random.normal(keys[1], (layers, 4 * WIDTH, WIDTH)) * 0.1,
        "head": jax.random.normal(keys[2], (WIDTH, 7)),
    }


def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return x + jax.nn.softmax(jnp.tanh(h @ up) * jnp.exp(-h @ up)) @ down


def scanned(params: dict[str, Any], x: jax.Array) -> jax.Array:
    y, _ = jax.lax.scan(lambda x, p: (block(x, *p), None), x, (params["up"], params["down"]))
    return jnp.mean(jax.nn.log_softmax(y @ params["head"])[:, 0])


def unrolled(params: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
    for up, down in params:
        x = block(x, up, down)
    return jnp.mean(x**2)


def layers() -> list[tuple[jax.Array, jax.Array]]:
    params = parameters(4)
    return list(zip(params["up"], params["down"], strict=True))


DEVICE = "laptop-CPU"
"""Of the catalogue: its roofline gives the same plan on every machine."""
BATCH = jnp.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)


def assert_equal_gradients(function: Any, managed: Any, *args: Any) -> None:
    wanted, found = (
        jax.jit(jax.value_and_grad(each), compiler_options=pj.compiler_options())(*args) for each in (function, managed)
    )
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        # XLA fuses what is computed again with other neighbours, so sums may be rounded elsewhere.
        assert jnp.abs(a - b).max() <= 1e-6 * jnp.abs(a).max()


@pytest.fixture(scope="module")
def unmanaged_bytes() -> int:
    return pj.temporary_bytes(scanned, parameters(), BATCH)


@pytest.fixture(scope="module")
def third(unmanaged_bytes: int) -> Plan:
    return pj.plan(scanned, parameters(), BATCH, budget=unmanaged_bytes // 3, device=DEVICE)


def test_a_scanned_function_is_compiled_within_its_budget(third: Plan, unmanaged_bytes: int):
    managed = pj.wrap(scanned, third)
    taken = pj.temporary_bytes(managed, parameters(), BATCH)
    assert taken == third.predicted_peak_bytes <= unmanaged_bytes // 3
    assert_equal_gradients(scanned, managed, parameters(), BATCH)


def test_of_two_equal_operations_one_is_held_and_the_other_runs_again():
    def twice(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w), None), x, w)[0] ** 2)

    weights = jnp.stack([jnp.eye(WIDTH)] * 3)
    plan = pj.plan(twice, weights, BATCH, budget=None, device=DEVICE)
    program, _ = trace_program(twice, weights, BATCH)
    loop = next(region for region in find_regions(program, [True, False]) if region.is_scan)
    first, second = (n.writes[0] for n in loop.part.nodes if n.name == "tanh")
    for kept, ran in (((first, second), 2), ((second,), 3), ((), 4)):
        decisions = tuple(
            ValueDecision(value=value_name(loop, value), decision=decision, bytes=0)
            for value in (first, second, loop.part.nodes[0].writes[0])
            for decision in [Decision.KEEP if value in kept else Decision.RECOMPUTE]
        )
        region = RegionPlan(name=loop.name, call=0, kind="", decisions=decisions, retained_bytes=0, replay_seconds=0.0)
        managed = pj.wrap(twice, msgspec.structs.replace(plan, regions=(region,)))
        assert str(jax.make_jaxpr(jax.grad(managed))(weights, BATCH)).count("= tanh") == ran


def test_the_derivative_of_an_exponential_reads_the_named_result():
    """JAX differentiates ``exp`` through its own result, which a name put behind it would miss."""
    program, _ = trace_program(jnp.exp, BATCH)
    [exp] = program.nodes

    def named(x: jax.Array) -> jax.Array:
        policy = jax.checkpoint_policies.save_only_these_names("it")
        run = lambda x: evaluate(program, [x], naming({exp.writes[0]: "it"}))[0]  # noqa: E731
        return jax.checkpoint(run, policy=policy)(x).sum()

    assert str(jax.make_jaxpr(jax.grad(named))(BATCH)).count("= exp") == 1


def placed(h: jax.Array, x: jax.Array, at: jax.Array) -> jax.Array:
    return jnp.sin(jax.lax.dynamic_update_slice(x, h[:100], (at[0] % 100, 0)))


def added(h: jax.Array, x: jax.Array, at: jax.Array) -> jax.Array:
    return jnp.sin(h.at[at, 0].add(x[:, 1]))


def sorted_with_numbers(h: jax.Array, x: jax.Array, at: jax.Array) -> jax.Array:
    numbers = jnp.broadcast_to(at[:, None], h.shape)
    values, order = jax.lax.sort((jnp.exp(h), numbers), num_keys=1, dimension=1)
    return jnp.sin(values) + (order % 2) * x


def in_frequencies(h: jax.Array, x: jax.Array, at: jax.Array) -> jax.Array:
    return jnp.real(jnp.fft.ifft(jnp.fft.fft(h) * jnp.exp(1j * h * 0.1)))


@pytest.mark.parametrize("operation", [placed, added, sorted_with_numbers, in_frequencies])
@pytest.mark.parametrize("share", [0.8, None])
def test_operations_on_integers_and_complex_numbers_follow_a_plan(operation: Any, share: float | None):
    def loss(weights: jax.Array, x: jax.Array, at: jax.Array) -> jax.Array:
        for weight in weights:
            x = x + operation(jnp.tanh(x @ weight), x, at)
        return jnp.mean(x**2)

    weights = jax.random.normal(jax.random.key(1), (4, WIDTH, WIDTH)) * 0.1
    args = (weights, BATCH, jax.random.randint(jax.random.key(2), (ROWS,), 0, ROWS))
    budget = None if share is None else int(share * pj.temporary_bytes(loss, *args))
    plan = pj.plan(loss, *args, budget=budget, device=DEVICE)
    assert any(each.decision is Decision.KEEP for region in plan.regions for each in region.decisions)
    assert_equal_gradients(loss, pj.wrap(loss, plan), *args)


def test_blocks_without_a_loop_are_regions_and_are_computed_again():
    budget = pj.temporary_bytes(unrolled, layers(), BATCH) // 2
    plan = pj.plan(unrolled, layers(), BATCH, budget=budget, device=DEVICE)
    managed = pj.wrap(unrolled, plan)
    assert len({region.kind for region in plan.regions}) < len(plan.regions) >= 4
    assert pj.temporary_bytes(managed, layers(), BATCH) <= budget
    assert_equal_gradients(unrolled, managed, layers(), BATCH)


def test_a_block_whose_plan_keeps_all_it_knows_of_holds_no_more_than_that():
    """Left to itself JAX holds what its derivative reads, which is more than any plan would."""

    def gelus(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = x + jax.nn.gelu(x @ w, approximate=False) @ w.T
        return jnp.mean(x**2)

    weights = [jnp.full((WIDTH, 4 * WIDTH), 0.01 * at) for at in range(4)]
    plan = pj.plan(gelus, weights, BATCH, budget=None, device=DEVICE)
    assert all(region.is_untouched for region in plan.regions)
    assert plan.predicted_peak_bytes < 0.8 * pj.temporary_bytes(gelus, weights, BATCH)
    assert_equal_gradients(gelus, pj.wrap(gelus, plan), weights, BATCH)


def test_a_loop_inside_of_a_loop_is_held_or_runs_again_as_a_whole():
    def nested(params: dict[str, Any], x: jax.Array) -> jax.Array:
        pairs = (params["up"], params["down"])
        inner = lambda x, _: (jax.lax.scan(lambda x, p: (block(x, *p), None), x, pairs)[0], None)  # noqa: E731
        return jnp.mean(jax.lax.scan(inner, x, None, length=3)[0] ** 2)

    unmanaged = pj.temporary_bytes(nested, parameters(), BATCH)
    plan = pj.plan(nested, parameters(), BATCH, budget=unmanaged // 2, device=DEVICE)
    assert [each.decision for each in plan.regions[0].decisions if each.value == "inside"] == [Decision.RECOMPUTE]
    assert plan.predicted_peak_bytes <= unmanaged // 2
    assert_equal_gradients(nested, pj.wrap(nested, plan), parameters(), BATCH)
    kept = [msgspec.structs.replace(each, decision=Decision.KEEP) for each in plan.regions[0].decisions]
    region = msgspec.structs.replace(plan.regions[0], decisions=tuple(kept))
    held = msgspec.structs.replace(plan, regions=(region, *plan.regions[1:]))
    assert pj.temporary_bytes(pj.wrap(nested, held), parameters(), BATCH) == unmanaged


def test_shards_on_two_devices_follow_a_plan():
    """Two devices of the host: sharded arguments, a constraint inside of the loop, and a plan inside of ``shard_map``."""
    code = """
import jax, test_jax as t
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from plimsoll.integrations import jax as pj
mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
x = jax.device_put(t.BATCH, NamedSharding(mesh, P("d")))
params = jax.device_put(t.parameters(), NamedSharding(mesh, P()))
limit = pj.temporary_bytes(t.scanned, params, x) // 2
plan = pj.plan(t.scanned, params, x, budget=limit, device=t.DEVICE)
step = jax.jit(jax.value_and_grad(pj.wrap(t.scanned, plan)))
assert step.lower(params, x).compile().memory_analysis().temp_size_in_bytes <= limit
t.assert_equal_gradients(t.scanned, pj.wrap(t.scanned, plan), params, x)
def mapped(loss):
    mean = lambda params, x: jax.lax.pmean(loss(params, x), "d")
    return jax.shard_map(mean, mesh=mesh, in_specs=(P(), P("d")), out_specs=P(), check_vma=False)
local = pj.plan(t.scanned, params, jax.ShapeDtypeStruct((t.ROWS // 2, t.WIDTH), "float32"), budget=limit, device=t.DEVICE)
assert any(not region.is_untouched for region in local.regions)
t.assert_equal_gradients(mapped(t.scanned), mapped(pj.wrap(t.scanned, local)), params, x)
"""
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=environment)


def test_what_is_no_plan_is_refused_in_words():
    with pytest.raises(InvalidOption, match="plan= has the type str, which is not a Plan"):
        pj.wrap(scanned, "plan.json")


def test_all_operations_belong_to_exactly_one_region():
    for function, params in ((scanned, parameters()), (unrolled, layers())):
        leaves, tree = jax.tree.flatten(params)
        program, _ = trace_program(lambda *p, f=function, t=tree: f(jax.tree.unflatten(t, p), BATCH), *leaves)
        regions = find_regions(program, [True] * len(leaves))
        places = [region.first for region in regions] + [regions[-1].stop]
        assert places == sorted(set(places))
        assert (places[0], places[-1]) == (0, len(program.nodes))
        assert all(a.stop == b.first for a, b in itertools.pairwise(regions))


def test_a_budget_below_the_floor_is_refused_with_the_smallest_that_was_reached():
    with pytest.raises(BudgetBelowFloor, match="smallest peak that XLA reached"):
        pj.plan(scanned, parameters(), BATCH, budget="10KiB", device=DEVICE)


def test_a_saved_plan_comes_back_and_is_followed(third: Plan, tmp_path: Path):
    third.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == third
    assert loaded.framework == "jax"
    assert pj.temporary_bytes(pj.wrap(scanned, loaded), parameters(), BATCH) == third.predicted_peak_bytes


def test_a_plan_for_another_function_or_framework_is_refused_in_words(third: Plan):
    with pytest.raises(PlanMismatch, match="another function"):
        pj.wrap(unrolled, third)(layers(), BATCH)
    import torch

    from plimsoll.session.manage import refuse_other_model

    with pytest.raises(PlanMismatch, match="was made for jax, not for PyTorch"):
        refuse_other_model(torch.nn.Linear(1, 1), third)
    with pytest.raises(PlanMismatch, match="was made for torch, not for JAX"):
        pj.wrap(scanned, msgspec.structs.replace(third, framework="torch"))


def test_other_sizes_and_vectorised_calls_follow_the_same_decisions(third: Plan):
    managed, smaller = pj.wrap(scanned, third), BATCH[:64]
    assert_equal_gradients(scanned, managed, parameters(), smaller)
    pairs = jnp.stack([smaller, -smaller])
    wanted, found = (jax.jit(jax.vmap(each, (None, 0)))(parameters(), pairs) for each in (scanned, managed))
    assert jnp.allclose(wanted, found, rtol=1e-6)


def test_a_function_without_floats_to_differentiate_is_refused():
    with pytest.raises(InvalidOption, match="not differentiated with respect to any argument"):
        pj.plan(lambda n: n + 1, jnp.arange(3), budget="1MiB", device=DEVICE)


def test_nothing_of_torch_is_imported():
    code = (
        "import sys, jax.numpy as jnp; from plimsoll.integrations import jax as pj;"
        "f = lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2);"
        "w = jnp.ones((4, 4)); p = pj.plan(f, w, jnp.ones((8, 4)), budget='1MiB'); str(p); pj.wrap(f, p)(w, w);"
        "str(pj.estimate(f, w, w)); str(pj.compare(f, w, w, ways={'plan': pj.wrap(f, p)}));"
        "assert not [m for m in sys.modules if m.split('.')[0] == 'torch']"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_modules_of_equinox_and_nnx_are_planned_as_they_are():
    eqx = pytest.importorskip("equinox", reason="equinox is no dependency")
    nnx = pytest.importorskip("flax.nnx", reason="flax is no dependency")

    def loss(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(model)(x) ** 2)

    mlp = eqx.nn.MLP(WIDTH, 3, 4 * WIDTH, 3, key=jax.random.key(0))
    plan = pj.plan(loss, mlp, BATCH, budget="1MiB", device=DEVICE)
    wanted, found = (eqx.filter_value_and_grad(each)(mlp, BATCH) for each in (loss, pj.wrap(loss, plan)))
    assert jnp.allclose(wanted[0], found[0], rtol=1e-6)
    linear = nnx.Linear(WIDTH, 3, rngs=nnx.Rngs(0))
    plan = pj.plan(loss, linear, BATCH, budget="1MiB", device=DEVICE)
    wanted, found = (nnx.value_and_grad(each)(linear, BATCH) for each in (loss, pj.wrap(loss, plan)))
    assert jnp.allclose(wanted[0], found[0], rtol=1e-6)


def test_what_a_module_of_nnx_counts_and_averages_is_written_back():
    nnx = pytest.importorskip("flax.nnx", reason="flax is no dependency")

    class Net(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.up, self.drop = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
            self.average, self.tied = nnx.BatchNorm(WIDTH, rngs=rngs), self.up

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.tied(self.drop(jnp.tanh(self.average(self.up(x)))))

    def loss(net: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(net(x) ** 2)

    plain, managed = Net(), Net()
    step = pj.wrap(loss, pj.plan(loss, managed, BATCH, budget=None, device=DEVICE))
    for _ in range(2):
        wanted, found = nnx.value_and_grad(loss)(plain, BATCH), nnx.value_and_grad(step)(managed, BATCH)
        # Equal losses: dropout drew the same numbers, and others than in the step before.
        for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
            assert jnp.allclose(a, b, rtol=1e-5, atol=1e-7)
    states = zip(jax.tree.leaves(nnx.state(plain)), jax.tree.leaves(nnx.state(managed)), strict=True)
    assert all(jnp.allclose(a, b, rtol=1e-6) for a, b in states)
    assert jnp.abs(managed.average.mean[...]).max() > 0


def test_a_module_that_gets_new_variables_in_a_call_is_refused_in_words():
    nnx = pytest.importorskip("flax.nnx", reason="flax is no dependency")

    class Noting(nnx.Linear):
        def __call__(self, x: jax.Array) -> jax.Array:
            self.seen = nnx.Intermediate(x)
            return super().__call__(x)

    net = Noting(WIDTH, 3, rngs=nnx.Rngs(0))
    with pytest.raises(InvalidOption, match="restructures variables of a Noting"):
        pj.plan(lambda net, x: net(x).mean(), net, BATCH, budget="1MiB", device=DEVICE)


def test_arguments_count_from_the_end_and_what_is_no_function_is_refused():
    def turned(x: jax.Array, params: dict[str, Any]) -> jax.Array:
        return scanned(params, x)

    plan = pj.plan(turned, BATCH, parameters(), budget=None, argnums=-1, device=DEVICE)
    assert_equal_gradients(
        lambda params, x: turned(x, params),
        lambda params, x: pj.wrap(turned, plan, argnums=-1)(x, params),
        parameters(),
        BATCH,
    )
    with pytest.raises(InvalidOption, match="The first argument has the type dict, which is not a function"):
        pj.plan(parameters(), scanned, budget="1MiB", device=DEVICE)


def test_what_a_plan_offloads_goes_to_the_hosts_memory_in_the_jaxpr():
    """XLA for CPUs holds it all the same; the decision, its way into the policy and the gradients are tested."""
    plan = pj.plan(scanned, parameters(), BATCH, budget=None, device=DEVICE, offload=("*tanh", "*dot_general"))
    managed = pj.wrap(scanned, plan)
    decisions = [each for region in plan.regions for each in region.decisions]
    assert {each.decision for each in decisions if each.value.endswith(("tanh", "dot_general"))} == {Decision.OFFLOAD}
    assert plan.link == "host"
    assert plan.offloaded_bytes > 0
    text = str(jax.make_jaxpr(jax.grad(managed))(parameters(), BATCH))
    assert "host" in text.lower()
    assert "host" not in str(jax.make_jaxpr(jax.grad(scanned))(parameters(), BATCH)).lower()
    assert_equal_gradients(scanned, managed, parameters(), BATCH)


def test_an_estimate_counts_arguments_and_the_optimizers_state_exactly_and_plans_within_a_budget(unmanaged_bytes: int):
    optax = pytest.importorskip("optax", reason="optax is no dependency")
    whole = pj.estimate(scanned, parameters(), BATCH, device=DEVICE, optimizer=optax.adam(1e-3))
    weights = sum(each.nbytes for each in parameters().values())
    items = {item.name: item.bytes for item in whole.stages[0].items}
    assert items["parameters"] == items["gradients"] == weights
    assert items["optimizer state"] == 2 * weights + 4  # Adam's count of steps
    assert items["batch"] == BATCH.nbytes
    assert items["temporaries"] == unmanaged_bytes
    limit = whole.stages[0].allocated_bytes // 2
    planned = pj.estimate(scanned, parameters(), BATCH, device=DEVICE, optimizer=optax.adam(1e-3), budget=limit)
    assert planned.stages[0].allocated_bytes <= limit
    assert "scanned" in str(planned)
    with pytest.raises(BudgetBelowFloor, match="what a plan cannot reduce"):
        pj.estimate(scanned, parameters(), BATCH, device=DEVICE, budget=weights)


def test_fit_finds_a_larger_batch_with_a_plan_than_without():
    def args_of(rows: int) -> tuple[Any, Any]:
        return parameters(), jax.ShapeDtypeStruct((64 * rows, WIDTH), "float32")

    found = pj.fit(scanned, args_of, "1400KiB", device=DEVICE, most_batch=8)
    assert found.best_point is not None
    assert found.plan is not None
    assert found.best_point.predicted_peak_bytes <= found.budget_bytes < found.best_point.unmanaged_peak_bytes
    assert [point.micro_batch for point in found.points] == sorted(point.micro_batch for point in found.points)
    assert str(found)


def test_compare_measures_plans_and_policies_beside_the_function(third: Plan, unmanaged_bytes: int):
    def wrong(params: dict[str, Any], x: jax.Array) -> jax.Array:
        return 2 * scanned(params, x)

    ways = {"plan": pj.wrap(scanned, third), "checkpoint": jax.checkpoint(scanned), "another": wrong}
    found = pj.compare(scanned, parameters(), BATCH, ways=ways, steps=2)
    rows = {row.strategy: row for row in found.rows}
    assert found.baseline_peak_bytes == unmanaged_bytes
    assert rows["plan"].measured_peak_bytes == third.predicted_peak_bytes
    assert not rows["plan"].is_wrong
    assert not rows["checkpoint"].is_wrong
    assert rows["another"].is_wrong
