"""The verifying recorder: an op is repeated later only if it was shown to give the same bits, and reports say why not."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

from contracts.harness import assert_unchanged, plain_step, stack_of
from engine.models import Inner, Lined
from plimsoll.artifacts.region import Origin
from plimsoll.engine.replay_rng import ENTRY, RandomPoints
from plimsoll.engine.verifying import VerifyingRecorder
from plimsoll.tracing.meters.memory import PeakMeter
from plimsoll.tracing.recorder.storages import same_bits, storage_fingerprint
from steps import Net

CALLS = itertools.count()


@pytest.fixture(scope="module")
def library():
    """Ops that misbehave in the ways in which real kernels do."""
    lib = torch.library.Library("plimsolltest", "DEF")

    def undeclared(x, y):
        result = x * y
        y.view(-1)[0] += 1.0
        return result

    def once(x):
        if next(CALLS) % 2:
            raise RuntimeError("only every second call works")
        return x * 2

    for schema, function in {
        "undeclared(Tensor x, Tensor y) -> Tensor": undeclared,
        "restless(Tensor x) -> Tensor": lambda x: x + 0.001 * next(CALLS),
        "secretly_random(Tensor x) -> Tensor": lambda x: x + torch.rand_like(x),
        "once(Tensor x) -> Tensor": once,
        "leftovers(Tensor x) -> Tensor": lambda x: torch.empty_like(x).copy_(x),
        "alias(Tensor x) -> Tensor": lambda x: x,
        "with_workspace(Tensor x) -> (Tensor, Tensor, Tensor)": lambda x: (
            x.exp(),
            torch.full((64,), next(CALLS), dtype=torch.uint8),
            torch.tensor(1),
        ),
    }.items():
        lib.define(schema)
        lib.impl(schema.partition("(")[0], function, "CPU")
    yield torch.ops.plimsolltest
    lib._destroy()


@pytest.fixture(autouse=True)
def _count_from_zero():
    global CALLS
    CALLS = itertools.count()


class Opaque(torch.autograd.Function):
    """Runs an op without a formula; its gradient uses what the op made."""

    @staticmethod
    def forward(ctx, op, *args):
        result = op(*args)
        ctx.save_for_backward(result, *args)
        return result.clone()

    @staticmethod
    def backward(ctx, gradient):
        result, *args = ctx.saved_tensors
        return (None, *(gradient * result.sigmoid() * arg.tanh() for arg in args))


def record(function, *tensors):
    """The recorder after ``function(*tensors)`` ran under it; the tensors count as outside memory."""
    recorder = VerifyingRecorder(lambda: "", RandomPoints((torch.default_generator,)))
    for index, tensor in enumerate(tensors):
        recorder.add_leaf(tensor, Origin.INPUT, f"input:{index}")
    recorder.mark_outside()
    with torch.no_grad(), recorder:
        function(*tensors)
    return recorder


def obstacles(recorder):
    return {op.name: op.obstacle for op in recorder.ops}


def test_plain_ops_have_no_obstacle():
    recorder = record(lambda x: torch.softmax(x @ x.T, -1).exp(), torch.randn(4, 4))
    assert set(obstacles(recorder).values()) == {""}


def test_an_op_that_writes_to_outside_memory_without_declaring_it_is_never_repeated(library):
    recorder = record(lambda x, y: library.undeclared(x, y).exp(), torch.randn(4), torch.randn(4))
    found = obstacles(recorder)
    assert "without declaring it" in found["plimsolltest.undeclared"]
    assert found["exp"] == ""


def test_an_op_that_writes_to_memory_of_the_region_without_declaring_it_makes_a_new_version(library):
    recorder = record(lambda x: library.undeclared(x, x.exp()), torch.randn(4))
    write = next(op for op in recorder.ops if op.name == "plimsolltest.undeclared")
    assert "without declaring it" in write.obstacle
    made = next(op for op in recorder.ops if op.name == "exp")
    storages = [recorder.values[value].storage for value in write.writes]
    assert recorder.values[made.writes[0]].storage in storages


def test_outputs_that_an_op_leaves_unset_are_never_rebuilt_but_its_others_are(library):
    def uses(x):
        made, workspace, seed = library.with_workspace(x)
        return made.sin(), workspace + 1, seed * 2

    recorder = record(uses, torch.randn(64))
    by_name = {op.name: op for op in recorder.ops}
    op = by_name["plimsolltest.with_workspace"]
    assert op.obstacle == ""
    made, workspace, seed = (ref.value for ref in op.outputs)
    assert made not in recorder.not_rebuildable
    assert workspace in recorder.not_rebuildable
    assert seed not in recorder.not_rebuildable
    assert by_name["sin"].obstacle == by_name["mul"].obstacle == ""
    assert by_name["add"].obstacle == "reads memory that was only partly written"


def points(run):
    """The point of every random op, by name."""
    return {op.name: (op.is_random, op.random_point) for op in record(run, torch.rand(4)).ops if not op.obstacle}


def test_an_op_whose_dropout_is_0_needs_no_state_and_one_that_happens_to_draw_nothing_does():
    point = (True, (0, ENTRY))
    assert points(lambda x: torch.native_dropout(x, 0.5, True)[0])["native_dropout"] == point

    def attend(x):
        return nn.functional.scaled_dot_product_attention(*(x.view(1, 1, 2, 2) * scale for scale in (1, 2, 3)))

    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert torch.Tag.nondeterministic_seeded in getattr(torch.ops.aten, attention).default.tags
    assert points(attend)[attention] == (False, None)
    # Draws as many numbers as the data says: in another step some.
    assert points(lambda x: torch.binomial(torch.zeros(4), x))["binomial"] == point


def test_an_op_that_draws_without_saying_so_moves_the_generator_once(library):
    torch.manual_seed(3)
    x = torch.randn(4)
    state = torch.get_rng_state()
    library.secretly_random(x)
    expected = torch.get_rng_state()
    torch.set_rng_state(state)
    recorder = record(lambda x: library.secretly_random(x), x)
    assert torch.equal(torch.get_rng_state(), expected)
    assert "random" in obstacles(recorder)["plimsolltest.secretly_random"]


@pytest.mark.parametrize(("name", "why"), [("restless", "other bits"), ("once", "RuntimeError")])
def test_an_op_that_differs_or_fails_when_it_is_repeated_does_not_fail_the_forward_and_is_never_repeated(
    library, name, why
):
    recorder = record(lambda x: getattr(library, name)(x).exp(), torch.randn(4))
    assert why in obstacles(recorder)[f"plimsolltest.{name}"]


def test_what_is_read_from_memory_that_nobody_wrote_is_never_rebuilt():
    def reads_unset(x):
        half = torch.empty_like(x)
        half[:2] = x[:2]
        return (half * 2).nan_to_num(0.0)

    recorder = record(reads_unset, torch.randn(4))
    by_name = {op.name: op for op in recorder.ops}
    assert by_name["mul"].obstacle == "reads memory that was only partly written"
    unwritten = {recorder.values[value].name for value in recorder.not_rebuildable}
    assert {"empty_like#0", "copy_#0"} <= {name.removeprefix("::") for name in unwritten}


def test_leftovers_of_freed_memory_do_not_verify_by_accident():
    """The allocator hands the same memory out again, with the right contents already in it."""

    def lucky(x):
        for _ in range(3):
            made = torch.empty_like(x)
            made[: x.shape[0] // 2] = x[: x.shape[0] // 2]
            made = None
        made = torch.empty_like(x)
        made[: x.shape[0] // 2] = x[: x.shape[0] // 2]
        return made

    recorder = record(lucky, torch.randn(64, 64))
    writes = [op for op in recorder.ops if op.name == "copy_"]
    assert all(value in recorder.not_rebuildable for op in writes for value in op.writes)


def test_a_large_result_of_torchs_own_that_is_half_unset_is_not_taken_for_exact():
    """Its first run is known by checksums alone, and both later ones begin in memory that was soiled on purpose."""

    def half(x):
        made = torch.empty_like(x)
        made[: x.shape[0] // 2] = x[: x.shape[0] // 2]
        return made

    lib = torch.library.Library("aten", "FRAGMENT")
    lib.define("half_unset(Tensor x) -> Tensor")
    lib.impl("half_unset", half, "CPU")
    found = []
    try:
        for rows in (128, 160, 192):
            x, soiled = torch.randn(rows, 64), torch.full((rows, 64), 7.0)
            del (
                soiled
            )  # the first run begins in this memory, and not in new pages of zeros, which a later run may get too
            found.append(set(obstacles(record(torch.ops.aten.half_unset, x)).values()))
    finally:
        lib._destroy()
    # The C library may give a later run the memory of the first one, although other memory of this size was freed since.
    assert {"gives other bits when it runs again"} in found


def test_memory_that_is_wholly_written_in_parts_can_be_rebuilt():
    def parts(x):
        made = torch.empty_like(x)
        made[:2] = x[:2]
        made[2:] = x[2:] * 2
        return made.exp()

    recorder = record(parts, torch.randn(4))
    final = [op for op in recorder.ops if op.name == "copy_"][-1].writes[0]
    assert final not in recorder.not_rebuildable
    assert set(obstacles(recorder).values()) == {""}


def test_recording_moves_the_generator_as_the_plain_ops_do():
    def draws(x):
        return torch.nn.functional.dropout(x, 0.3) + torch.rand_like(x).bernoulli_()

    x = torch.randn(8, 8)
    torch.manual_seed(5)
    expected = draws(x)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    results = []
    record(lambda x: results.append(draws(x)), x)
    assert torch.equal(results[0], expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_inputs_are_the_same_bits_after_recording():
    x = torch.randn(8, 8)
    before = x.clone()
    record(lambda x: torch.nn.functional.batch_norm(x, torch.zeros(8), torch.ones(8), training=True).exp_(), x)
    assert torch.equal(x, before)


@pytest.mark.parametrize(("op", "count"), [("undeclared", 2), ("secretly_random", 1), ("leftovers", 1), ("alias", 1)])
def test_training_with_a_misbehaving_op_keeps_every_bit(library, op, count):
    def uses(x):
        return Opaque.apply(getattr(library, op), *(x.sin(), x.cos())[:count]).tanh() * x

    report = assert_unchanged(stack_of(lambda: Inner(uses)), plain_step)
    if op in ("undeclared", "secretly_random"):
        assert any(op in why for found in report.obstacles.values() for why in found.values())


def test_an_undeclared_write_to_an_input_of_the_region_keeps_every_bit(library):
    def region(line, x, y):
        early = (y + 1).exp()
        made = Opaque.apply(torch.ops.plimsolltest.undeclared, x, y)
        return line(early * made.tanh()) * (y + 2).sigmoid()

    way = lambda net, x: net.block(net.entrance(x), net.entrance(x) * 2)  # noqa: E731
    build = lambda: Net(way, entrance=nn.Linear(8, 8), block=Lined(region))  # noqa: E731
    assert_unchanged(build, plain_step, regions=["block"], engine=None)


def test_same_bits_tells_zeros_apart_and_takes_any_nan_for_any_other():
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([float("nan"), 1.0]), torch.tensor([-float("nan"), 1.0]))
    assert not same_bits(torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64))
    assert not same_bits(torch.zeros(2, 3), torch.zeros(3, 2))
    assert same_bits(torch.zeros(0), torch.zeros(0))
    assert not same_bits(torch.zeros(2), None)
    assert same_bits(torch.tensor([1 + 2j]), torch.tensor([1 + 2j]))
    assert not same_bits(torch.tensor([1 + 2j]), torch.tensor([1 - 2j]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int8])
def test_a_fingerprint_changes_with_any_element(dtype):
    tensor = torch.ones(7, 3).to(dtype)
    before = storage_fingerprint(tensor)
    assert storage_fingerprint(tensor.clone()) == before
    tensor[5, 1] = 0
    assert storage_fingerprint(tensor) != before


@pytest.mark.parametrize("count", [80_000, 80_001, 80_004])
def test_a_fingerprint_takes_little_memory_whatever_the_size_is(count):
    tensor = torch.ones(count, dtype=torch.uint8)
    with PeakMeter() as meter:
        storage_fingerprint(tensor)
    assert meter.peak_bytes < count / 2


def test_a_fingerprint_changes_when_elements_change_places():
    for count in (2, 64, 100_000, 300_001):
        tensor = torch.randn(count, dtype=torch.float64)
        swapped = tensor.clone()
        swapped[[0, count - 1]] = tensor[[count - 1, 0]]
        assert storage_fingerprint(tensor) != storage_fingerprint(swapped)
        assert storage_fingerprint(tensor) != storage_fingerprint(tensor.flip(0))
    assert storage_fingerprint(torch.zeros(0)) == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float32])
def test_permutation_matrices_have_different_fingerprints(dtype):
    """Their rows and columns have equal sums."""
    eye = torch.eye(512, dtype=dtype)
    assert storage_fingerprint(eye) != storage_fingerprint(eye[torch.randperm(512)])


@torch.library.custom_op("plimsollhost::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Draws from Python's generator and from numpy's."""
    return x * torch.from_numpy(np.random.rand(*x.shape).astype("float32")) * random.random()


noisy.register_autograd(lambda ctx, gradient: gradient)


@pytest.mark.parametrize("around", [lambda x: x, lambda x: torch.tanh(x), lambda x: torch.sin(x) * 2])
def test_an_operator_that_draws_on_the_host_draws_the_same_numbers_under_a_plan(around):
    def step(model, index):
        random.seed(index // 2)
        np.random.seed(index // 2)
        return plain_step(model, index)

    class Noisy(nn.Module):
        def forward(self, x):
            return around(noisy(x))

    assert_unchanged(stack_of(Noisy), step, steps=4)
