"""Verification without a plan: other people's checkpointing, and what verify looks at besides gradients."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction, CheckpointPolicy, create_selective_checkpoint_contexts

import plimsoll
from plimsoll.analysis.verify.intermediates import mismatches
from plimsoll.analysis.verify.repeated_ops import RepeatedOps
from plimsoll.artifacts.base import to_json
from plimsoll.artifacts.fault import Cause
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.receipt import OWN, ReceiptVerdict
from plimsoll.artifacts.store import from_json
from plimsoll.errors import InvalidModel, InvalidOption, InvalidRegions
from plimsoll.tracing.recorder.calling import ModuleStack
from plimsoll.tracing.torch_internals import current_graph_task
from steps import CheckpointedStack, Stack, mean_square


@dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


def seeded(make: Callable[[], nn.Module], rows: int = 16) -> tuple[Any, torch.Tensor]:
    """A model and a batch, the same in every run."""
    torch.manual_seed(0)
    return make(), torch.randn(rows, 32)


@pytest.fixture
def checkpointed():
    return seeded(CheckpointedStack, 64)


def step_of_two() -> tuple[Stack, torch.Tensor]:
    return seeded(lambda: Stack(2))


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Every block of ``step_of_two`` recomputed."""
    model, batch = step_of_two()
    return plimsoll.plan(model, batch, strategy="full", loss=mean_square)


def test_the_receipt_says_what_was_found_at_work_and_what_it_saves(checkpointed):
    model, batch = checkpointed
    receipt = plimsoll.verify(model, batch, loss=mean_square, steps=2)
    assert receipt.strategy == OWN
    assert receipt.method == "torch.utils.checkpoint (3 times a step)"
    assert receipt.verdict is ReceiptVerdict.VERIFIED
    assert receipt.measured_peak_bytes < receipt.measured_baseline_peak_bytes
    assert receipt.predicted_peak_bytes is None
    assert receipt.slope.is_conclusive
    assert receipt.slope.measured == pytest.approx(receipt.slope.expected, rel=1e-3)
    assert "Receipt for torch.utils.checkpoint (3 times a step)" in str(receipt)
    assert from_json(to_json(receipt)) == receipt


def test_parameters_that_forward_writes_are_restored_and_accuse_no_checkpoint():
    class Shrinking(CheckpointedStack):
        def forward(self, x):
            with torch.no_grad():
                self.blocks[0].up.weight.mul_(0.5)
            return super().forward(x)

    model, batch = seeded(Shrinking)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    receipt = plimsoll.verify(model, batch, loss=mean_square, steps=2)
    assert receipt.verdict is ReceiptVerdict.VERIFIED
    assert not receipt.slope.disagrees
    assert all(map(torch.equal, model.parameters(), before))


def test_everything_that_was_patched_is_put_back_and_the_model_is_as_it_was(checkpointed):
    model, batch = checkpointed
    before = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    plimsoll.verify(model, batch, loss=mean_square, steps=1, intermediates="blocks.*", curve_steps=2)
    assert (saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__) == before
    assert torch.utils.checkpoint.CheckpointFunction is CheckpointFunction
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_step_that_fails_is_put_back_too():
    model, batch = seeded(lambda: Stack(1))
    before = saved_tensors_hooks.__enter__

    def broken(packed):
        raise RuntimeError("lost")

    with pytest.raises(plimsoll.PlimsollError) as caught:
        plimsoll.verify(model, batch, loss=mean_square, context=lambda: saved_tensors_hooks(lambda t: None, broken))
    assert "RuntimeError: lost" in caught.value.found
    assert "with everything kept the step runs" in caught.value.why
    assert saved_tensors_hooks.__enter__ is before


@pytest.mark.parametrize("is_training", [True, False])
def test_a_model_that_saves_nothing_has_nothing_to_verify(is_training):
    with pytest.raises(plimsoll.PlimsollError) as caught:
        plimsoll.verify(Stack(1).train(is_training), torch.randn(4, 32), loss=mean_square)
    assert "does not save memory by itself" in caught.value.found
    assert "gradient_checkpointing_enable" in caught.value.next
    assert ("evaluation mode" in caught.value.why) is not is_training
    assert ("model.train()" in caught.value.next) is not is_training


def test_a_memory_budget_of_the_compiler_does_not_apply_to_a_model_that_is_not_compiled(checkpointed):
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        with pytest.raises(plimsoll.PlimsollError, match="nothing to verify"):
            plimsoll.verify(*step_of_two(), loss=mean_square, steps=1)
        model, batch = checkpointed
        receipt = plimsoll.verify(model, batch, loss=mean_square, steps=1)
    assert receipt.method == "torch.utils.checkpoint (3 times a step)"
    assert receipt.rounding_tolerance == 0


def test_lossy_hooks_may_be_allowed_their_error():
    model, batch = step_of_two()

    def context():
        return saved_tensors_hooks(lambda t: (t.detach().bfloat16(), t.dtype), lambda packed: packed[0].to(packed[1]))

    strict = plimsoll.verify(model, batch, loss=mean_square, context=context, steps=1)
    assert strict.verdict is ReceiptVerdict.GRADIENTS_DIFFER
    assert strict.faults[0].cause is Cause.TRANSFER
    allowed = plimsoll.verify(model, batch, loss=mean_square, context=context, steps=1, max_error="2%")
    assert allowed.verdict is ReceiptVerdict.WITHIN_ERROR
    assert 0 < allowed.gradient_error <= 0.02


def test_a_model_that_replaces_gradients_on_purpose_raises_no_alarm():
    class StraightThrough(CheckpointedStack):
        def forward(self, x):
            y = super().forward(x)
            return y + (2 * y).detach()

    receipt = plimsoll.verify(*seeded(StraightThrough), loss=mean_square, steps=1)
    assert receipt.verdict is ReceiptVerdict.VERIFIED
    assert receipt.slope is None
    assert "straight-through" in receipt.notes[0]


def test_an_allowed_error_is_not_held_against_the_slope():
    shrinking = functools.partial(saved_tensors_hooks, lambda t: t.detach() * 0.95, lambda packed: packed)
    receipt = plimsoll.verify(*step_of_two(), loss=mean_square, context=shrinking, steps=1, max_error="50%")
    assert receipt.slope.disagrees
    assert receipt.verdict is ReceiptVerdict.WITHIN_ERROR


def test_a_slope_in_low_precision_is_not_conclusive():
    torch.manual_seed(0)
    model, batch = CheckpointedStack().half(), torch.randn(16, 32).half()
    receipt = plimsoll.verify(model, batch, loss=mean_square, steps=1)
    assert not receipt.slope.is_conclusive
    assert receipt.verdict is ReceiptVerdict.VERIFIED


def test_the_slope_of_complex_parameters_counts_imaginary_parts():
    class Filter(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32, dtype=torch.complex64) / 8)

        def filtered(self, x):
            return torch.fft.ifft(torch.fft.fft(x) @ self.weight).real.tanh()

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.filtered, x, use_reentrant=False)

    receipt = plimsoll.verify(*seeded(Filter), loss=mean_square, steps=1)
    assert receipt.verdict is ReceiptVerdict.VERIFIED
    assert receipt.slope.is_conclusive
    assert not receipt.slope.disagrees
    assert receipt.notes == ()


def test_every_step_runs_in_a_context_of_its_own():
    alive, made = [], []

    class Once(saved_tensors_hooks):
        def __init__(self):
            super().__init__(lambda tensor: tensor.detach(), lambda packed: packed)

        def __enter__(self):
            alive.append(self)
            made.append(self)
            assert alive == [self]
            return super().__enter__()

        def __exit__(self, *args):
            alive.remove(self)
            return super().__exit__(*args)

    receipt = plimsoll.verify(*seeded(lambda: Stack(1)), loss=mean_square, context=Once, steps=2)
    assert receipt.verdict is ReceiptVerdict.VERIFIED
    assert len(made) == len(set(made)) > 10


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"context": saved_tensors_hooks(lambda t: t, lambda t: t)}, "context= has the type saved_tensors_hooks"),
        ({"context": lambda: 3}, "context= returned a int"),
        ({"steps": 0}, "steps=0"),
        ({"curve_steps": -1}, "curve_steps=-1"),
        ({"curve_steps": 1.5}, "curve_steps=1.5"),
        ({"intermediates": 3}, "intermediates=3"),
        ({"intermediates": ["blocks.0", None]}, "is not a pattern of module names"),
        ({"intermediates": "layers.*"}, "blocks"),
    ],
)
def test_an_option_that_means_nothing_is_refused(checkpointed, options, found):
    model, batch = checkpointed
    with pytest.raises(plimsoll.PlimsollError) as caught:
        plimsoll.verify(model, batch, loss=mean_square, **{"steps": 1, **options})
    assert found in caught.value.found + caught.value.why


@pytest.mark.parametrize("options", [{"verify_every": -1}, {"verify_every": "10"}, {"sentinel_every": 0}])
def test_apply_refuses_numbers_of_steps_that_mean_nothing(options, plan):
    model, _ = step_of_two()
    with pytest.raises(InvalidOption, match="is not a valid count"):
        plimsoll.apply(model, plan, **options)
    assert "forward" not in model.blocks[0].__dict__
    with pytest.raises(InvalidOption, match="verify_every=-1"):
        plimsoll.attach(Stack(1), "1GiB", verify_every=-1)


def test_a_curve_refuses_an_optimizer_that_runs_the_step_itself(checkpointed):
    model, batch = checkpointed
    given = {"loss": mean_square, "optimizer": torch.optim.LBFGS(model.parameters()), "steps": 1}
    with pytest.raises(InvalidOption, match="LBFGS"):
        plimsoll.verify(model, batch, curve_steps=2, **given)
    assert plimsoll.verify(model, batch, **given).verdict is ReceiptVerdict.VERIFIED


@pytest.mark.parametrize("option", [{"context": save_on_cpu}, {"max_error": 0.1}])
def test_what_has_no_effect_on_a_plan_is_refused(option, plan):
    model, batch = step_of_two()
    with pytest.raises(plimsoll.PlimsollError, match="does not have an effect if a plan is verified"):
        plimsoll.verify(model, batch, plan, loss=mean_square, **option)


def test_intermediates_of_both_runs_are_compared_bit_for_bit(plan):
    model, batch = step_of_two()
    receipt = plimsoll.verify(
        model, batch, plan, loss=mean_square, steps=1, intermediates=("blocks.*.up", "blocks.1.norm")
    )
    names = {(each.module, each.is_gradient) for each in receipt.intermediates}
    assert names == {
        (name, is_gradient) for name in ("blocks.0.up", "blocks.1.up", "blocks.1.norm") for is_gradient in (False, True)
    }
    assert all(each.is_bit_equal for each in receipt.intermediates)
    assert receipt.compared_tensors > 0
    assert "gradient of blocks.1.up" in str(receipt)


def test_an_intermediate_that_differs_is_named_with_its_distance():
    class Bad(Stack):
        def forward(self, x):
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            return x

    receipt = plimsoll.verify(*seeded(Bad), loss=mean_square, steps=1, intermediates="blocks.0")
    output, gradient = receipt.intermediates
    assert output.is_bit_equal
    assert not gradient.is_bit_equal
    assert gradient.max_relative_difference > 0.01


def test_all_tensors_that_a_module_returns_are_compared_also_in_an_object():
    class Paired(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x):
            return Pair(self.up(x).relu(), self.down(x).tanh())

    class Adding(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair, self.unused = Paired(32), nn.Identity()

        def forward(self, x):
            pair = torch.utils.checkpoint.checkpoint(self.pair, x, use_reentrant=False)
            return pair.first + pair.second

    receipt = plimsoll.verify(*seeded(Adding), loss=mean_square, steps=1, intermediates="pair")
    found = {(each.output, each.is_gradient): each for each in receipt.intermediates}
    assert found.keys() == {(0, False), (1, False), (0, True), (1, True)}
    assert all(each.is_bit_equal for each in found.values())
    assert "output 1 of pair" in str(receipt)
    with pytest.raises(InvalidRegions, match="returned no tensors"):
        plimsoll.verify(*seeded(Adding), loss=mean_square, steps=1, intermediates="unused")


def test_a_plan_of_another_module_in_the_loss_is_not_the_models_own_method():
    model, batch = seeded(CheckpointedStack)
    teacher, _ = seeded(Stack)
    plan = plimsoll.plan(teacher, batch, loss=mean_square, strategy="full")

    def loss(output: torch.Tensor) -> torch.Tensor:
        return teacher(output).square().mean()

    with plimsoll.apply(teacher, plan):
        receipt = plimsoll.verify(model, batch, loss=loss, steps=1)
        assert "plimsoll" not in receipt.method
        assert receipt.verdict is ReceiptVerdict.VERIFIED
        with pytest.raises(InvalidModel, match="there is nothing to verify"):
            plimsoll.verify(*seeded(Stack), loss=loss, steps=1)


def test_a_gradient_that_is_wrong_only_in_its_imaginary_part_is_found():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, dtype=torch.complex64))

        def forward(self, x):
            return x * self.weight

    turning = functools.partial(saved_tensors_hooks, lambda t: t, lambda t: t + 1j)
    waves = torch.arange(1, 9).to(torch.complex64)
    receipt = plimsoll.verify(Scaled(), waves, loss=lambda y: y.real.sum(), context=turning, steps=1)
    assert receipt.verdict is ReceiptVerdict.GRADIENTS_DIFFER
    (mismatch,) = receipt.gradient_mismatches
    assert mismatch.max_absolute_difference == 1.0
    assert mismatch.max_relative_difference == 1 / 8


@pytest.mark.parametrize(
    ("first", "second", "apart"),
    [
        (torch.tensor([2**60, 0]), torch.tensor([2**60 + 7, 0]), 7.0),
        (torch.tensor([-(2**62)]), torch.tensor([2**62 - 1]), 2.0**63),
        (torch.tensor([True, False]), torch.tensor([False, False]), 1.0),
        (torch.tensor([0, 255], dtype=torch.uint8), torch.tensor([255, 255], dtype=torch.uint8), 255.0),
        (torch.tensor([2.0]).to_sparse(), torch.tensor([3.0]).to_sparse(), 1.0),
        (torch.ones(2), torch.ones(2, dtype=torch.complex64), None),
    ],
)
def test_a_difference_counts_every_digit(first: torch.Tensor, second: torch.Tensor, apart: float | None):
    (mismatch,) = mismatches({"seen": first}, {"seen": second}, {})
    assert mismatch.max_absolute_difference == apart
    assert not mismatch.is_within_spread


def test_gradients_that_reentrant_checkpointing_hides_are_left_out():
    class Reentrant(CheckpointedStack):
        is_reentrant = True

        def forward(self, x):
            return super().forward(x.clone().requires_grad_())

    receipt = plimsoll.verify(*seeded(Reentrant), loss=mean_square, steps=1, intermediates="blocks.*")
    assert receipt.verdict is ReceiptVerdict.VERIFIED
    assert {each.is_gradient for each in receipt.intermediates if each.module == "blocks.0"} == {False}


SEEN: list[object] = []
"""A global, because verify restores what closures hold."""


def test_selective_checkpointing_does_not_meet_the_ops_of_the_watch():
    def policy(ctx, op, *args, **kwargs):
        SEEN.append(op)
        return CheckpointPolicy.PREFER_SAVE

    class Selective(Stack):
        def forward(self, x):
            for block in self.blocks:
                contexts = functools.partial(create_selective_checkpoint_contexts, policy)
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            return x

    SEEN.clear()
    torch.manual_seed(0)
    model, batch = Selective(1), torch.randn(16, 32)
    model.blocks[0].dropout.p = 0.0
    model(batch).sum().backward()
    own = set(SEEN)
    SEEN.clear()
    receipt = plimsoll.verify(model, batch, loss=mean_square, steps=1)
    assert receipt.verdict is ReceiptVerdict.VERIFIED
    assert receipt.compared_tensors > 0
    assert set(SEEN) == own


def test_curves_of_both_runs_agree_and_the_optimizer_is_left_as_it_was():
    model, batch = step_of_two()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = {p: {k: v.clone() for k, v in of_one.items()} for p, of_one in optimizer.state.items()}
    plan = plimsoll.plan(model, batch, strategy="full", loss=mean_square, optimizer=optimizer)
    receipt = plimsoll.verify(model, batch, plan, loss=mean_square, optimizer=optimizer, steps=1, curve_steps=6)
    assert any(
        "for the optimizer's step; measured seconds include only forward and backward" in n for n in receipt.notes
    )
    assert receipt.baseline_curve == receipt.plan_curve
    assert len(receipt.plan_curve) == 6
    assert receipt.plan_curve[-1] < receipt.plan_curve[0]
    for parameter, of_one in optimizer.state.items():
        assert all(torch.equal(of_one[key], state[parameter][key]) for key in of_one)


def test_a_curve_leaves_the_parameters_of_a_loss_and_the_state_tensors_themselves():
    torch.manual_seed(0)
    model, batch, scale = CheckpointedStack(), torch.randn(16, 32), torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.AdamW([*model.parameters(), scale], lr=1e-2)

    def loss(output):
        return (output * scale).square().mean()

    loss(model(batch)).backward()
    optimizer.step()
    optimizer.zero_grad()
    moments = {parameter: of_one["exp_avg"] for parameter, of_one in optimizer.state.items()}
    before, copies = scale.detach().clone(), {parameter: moment.clone() for parameter, moment in moments.items()}
    plimsoll.verify(model, batch, loss=loss, optimizer=optimizer, steps=1, curve_steps=2)
    assert torch.equal(scale, before)
    for parameter, moment in moments.items():
        assert optimizer.state[parameter]["exp_avg"] is moment
        assert torch.equal(moment, copies[parameter])


class Wrapping(torch.optim.Optimizer):
    """Passes everything on to another optimizer, as accelerate's wrapper does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


def test_a_curve_restores_the_state_of_an_optimizer_in_a_wrapper(plan):
    model, batch = step_of_two()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapper = Wrapping(optimizer)
    receipt = plimsoll.verify(model, batch, plan, loss=mean_square, optimizer=wrapper, steps=1, curve_steps=3)
    assert receipt.baseline_curve == receipt.plan_curve
    assert receipt.verdict is ReceiptVerdict.VERIFIED
    assert not optimizer.state


def test_repeated_ops_watch_nothing_in_a_step_that_recomputes_nothing():
    model = Stack(1)
    stack = ModuleStack()
    with stack.watch(model), RepeatedOps(model, stack) as ops:
        model(torch.randn(4, 32)).sum().backward()
    assert list(ops.faults()) == []


def test_a_buffer_that_is_bound_anew_in_every_step_is_put_back():
    class Counter(CheckpointedStack):
        def __init__(self):
            super().__init__(2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls = self.calls + 1
            return super().forward(x) * (1 + 0.1 * self.calls)

    torch.manual_seed(0)
    model = Counter()
    buffer = model.calls
    receipt = plimsoll.verify(model, torch.randn(16, 32), loss=mean_square, steps=1)
    assert receipt.verdict is ReceiptVerdict.VERIFIED
    assert model.calls is buffer
    assert buffer == 0


@pytest.fixture
def leaves_seed_unset() -> Iterator[Any]:
    """An op as fused attention without dropout: next to its result it returns a seed that it never writes."""
    contents = itertools.count()
    library = torch.library.Library("plimsoll_unset", "DEF")
    library.define("fused(Tensor x) -> (Tensor, Tensor)")
    library.impl("fused", lambda x: (x.sin(), torch.full((2,), next(contents))), "CPU")
    yield torch.ops.plimsoll_unset.fused.default
    library._destroy()


class Fused(torch.autograd.Function):
    """The op, which saves its seed for backward."""

    @staticmethod
    def forward(ctx: Any, op: Any, x: torch.Tensor) -> torch.Tensor:
        out, seed = op(x)
        ctx.save_for_backward(x, seed)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        x, _ = ctx.saved_tensors
        return None, gradient * x.cos()


class FusedBlock(nn.Module):
    """A block with such an op. Backward recomputes it with another scale, ``scale_again``."""

    def __init__(self, op: Any, scale_again: float) -> None:
        super().__init__()
        self.linear, self.op, self.scale_again = nn.Linear(32, 32), op, scale_again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1.0 if current_graph_task() == -1 else self.scale_again
        return x + torch.tanh(Fused.apply(self.op, self.linear(x)) * scale)


def fused(op: Any, *, is_checkpointed: bool, scale_again: float = 1.0) -> tuple[Any, torch.Tensor]:
    stack = CheckpointedStack if is_checkpointed else Stack

    def make() -> nn.Module:
        model = stack(0)
        model.blocks = nn.ModuleList(FusedBlock(op, scale_again) for _ in range(3))
        return model

    return seeded(make)


def test_memory_that_an_op_never_wrote_is_no_fault_of_checkpointing(leaves_seed_unset):
    model, batch = fused(leaves_seed_unset, is_checkpointed=True)
    state = torch.get_rng_state()
    receipt = plimsoll.verify(model, batch, loss=mean_square, steps=1)
    assert receipt.verdict is ReceiptVerdict.VERIFIED, str(receipt)
    assert receipt.faults == ()
    assert torch.equal(torch.get_rng_state(), state)


def test_memory_that_an_op_fills_by_out_counts_as_written():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(32, 32)

        def masked(self, x):
            return self.line(x) * torch.rand(x.shape, out=torch.empty(x.shape))

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.masked, x, use_reentrant=False, preserve_rng_state=False)

    receipt = plimsoll.verify(*seeded(Masked), loss=mean_square, steps=1)
    assert receipt.verdict is ReceiptVerdict.GRADIENTS_DIFFER
    assert [fault.cause for fault in receipt.faults] == [Cause.RANDOM_STATE]


def test_a_fault_next_to_memory_that_an_op_never_wrote_is_found(leaves_seed_unset):
    model, batch = fused(leaves_seed_unset, is_checkpointed=True, scale_again=2.0)
    receipt = plimsoll.verify(model, batch, loss=mean_square, steps=1)
    assert receipt.verdict is ReceiptVerdict.GRADIENTS_DIFFER
    assert {fault.op for fault in receipt.faults} == {"mul"}
    assert {fault.cause for fault in receipt.faults} == {Cause.CHANGED_CONTROL_FLOW}


def test_hooks_that_lose_what_an_op_wrote_are_found_next_to_memory_that_it_never_wrote(leaves_seed_unset):
    model, batch = fused(leaves_seed_unset, is_checkpointed=False)

    def half(tensor: torch.Tensor) -> torch.Tensor:
        is_number = tensor.is_floating_point() and not isinstance(tensor, nn.Parameter)
        return (
            tensor.detach() * 0.5 if is_number and tensor.shape == (16, 32) else torch.empty_like(tensor).copy_(tensor)
        )

    def context() -> Any:
        return saved_tensors_hooks(half, lambda packed: packed)

    receipt = plimsoll.verify(model, batch, loss=mean_square, steps=1, context=context)
    assert receipt.verdict is ReceiptVerdict.GRADIENTS_DIFFER
    assert receipt.faults
    assert not any("(2,)" in fault.value for fault in receipt.faults)


def test_a_plan_is_verified_where_an_op_leaves_memory_unset(leaves_seed_unset):
    model, batch = fused(leaves_seed_unset, is_checkpointed=False)
    plan = plimsoll.plan(model, batch, strategy="full", loss=mean_square)
    receipt = plimsoll.verify(model, batch, plan, loss=mean_square, steps=1)
    assert receipt.verdict is ReceiptVerdict.VERIFIED, str(receipt)
    assert any(region.dropped_bytes for region in receipt.regions)
