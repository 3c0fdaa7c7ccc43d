"""Comparisons that wait for the end of backward, as on a GPU, driven here on a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from contracts.harness import Stack, manage, plain_step
from plimsoll.engine.sampling import DeferredChecks, SamplePlaces, must_defer, sentinel_slots
from plimsoll.tracing.recorder.storages import Geometry


class Checked(torch.autograd.Function):
    """Adds flags to deferred checks while backward runs, then goes on."""

    @staticmethod
    def forward(ctx, tensor, checks, flags, log):
        ctx.work = checks, flags, log
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        checks, flags, log = ctx.work

        def fail():
            raise RuntimeError("the second value differs")

        for position, flag in enumerate(flags):
            checks.add(torch.tensor(flag), fail if position == 1 else lambda: log.append("wrong one"))
        log.append("backward went on")
        return gradient, None, None, None


def run(flags: list[bool], checks: DeferredChecks) -> list[str]:
    log: list[str] = []
    leaf = torch.ones(3, requires_grad=True)
    Checked.apply(leaf * 2, checks, flags, log).sum().backward()
    return log


def test_a_set_flag_stops_the_step_when_backward_ends_and_names_the_right_value():
    with pytest.raises(RuntimeError, match="the second value differs"):
        run([False, True], DeferredChecks())


def test_clear_flags_let_the_step_go_on():
    assert run([False, False], DeferredChecks()) == ["backward went on"]


def test_checks_start_anew_after_a_step_that_failed():
    checks = DeferredChecks()
    with pytest.raises(RuntimeError):
        run([False, True], checks)
    assert run([False, False], checks) == ["backward went on"]


def test_only_a_gpu_in_backward_defers():
    assert not must_defer("cpu")
    assert not must_defer("cuda")


@pytest.mark.parametrize("size", [(4, 16, 64), (512, 8), (3, 5, 7), (1, 1024, 1), (9,)])
@pytest.mark.parametrize("is_dense", [True, False])
def test_samples_come_to_every_element_and_lie_at_many_features_at_once(size, is_dense):
    tensor = torch.arange(2 * torch.Size(size).numel()).view(*size, 2)[..., 0]
    tensor = tensor.contiguous() if is_dense else tensor
    places = SamplePlaces.of(Geometry.of(tensor))
    taken = [places.at(places.offset(number), tensor) for number in range(1, 9000)]
    assert all(places.peek(places.offset(number), tensor) == taken[number - 1].tolist() for number in range(1, 200))
    assert places.peek(tensor.untyped_storage().nbytes(), tensor) == []  # never past the end
    assert set(torch.cat(taken).tolist()) == set(tensor.flatten().tolist())
    positions = taken[0] // 2 % size[-1]
    assert len(set(positions.tolist())) >= min(len(taken[0]), size[-1]) or not is_dense


SINKS = {
    "nothing after it": (lambda x: x.sin().tanh(), {"tanh"}),
    "a dropout at the end": (lambda x: F.dropout(x.sin().tanh(), 0.2), {"tanh", "div_"}),
    "a dropout in one op": (lambda x: torch.native_dropout(x.sin().tanh(), 0.2, True)[0], {"tanh", "native_dropout"}),
    "a dropout that is read on": (lambda x: F.dropout(x.tanh(), 0.2).sin().exp(), {"exp"}),
    "a mask of the values": (
        lambda x: x.exp() + x.tanh().masked_fill(x.exp() > 1, 0.0).square(),
        {"exp", "masked_fill"},
    ),
    "a part alone": (lambda x: F.pad(x.tanh()[..., :4].exp(), (0, 12)), {"tanh", "exp"}),
    "both halves": (lambda x: torch.cat([part.exp() for part in x.tanh().chunk(2, -1)], -1), {"exp"}),
    "rounded": (lambda x: x.tanh().mul(8).round().exp(), {"tanh", "exp"}),
    "the greatest": (lambda x: x.tanh().exp().amax(-1, keepdim=True).expand(5, 16), {"amax", "exp"}),
    "complex numbers": (lambda x: torch.fft.ifft(torch.fft.fft(x.tanh()).exp()).real, {"exp"}),
}


class Tail(nn.Module):
    """A block whose last ops are the given ones."""

    def __init__(self, compute):
        super().__init__()
        self.up = nn.Linear(16, 16)
        self.compute = compute

    def forward(self, x):
        return x + self.compute(self.up(x))


@pytest.mark.parametrize("kind", SINKS)
def test_every_dropped_value_is_sampled_or_shows_in_one_that_is(kind):
    compute, expected = SINKS[kind]
    torch.manual_seed(0)
    model = Stack(Tail(compute))
    with manage(model) as handle:
        plain_step(model, 0)
        (service,) = handle.regions["blocks.0"].services.values()
    plan = service.program.plan
    values = [plan.graph.values[plan.graph.slots[slot].value] for slot in sentinel_slots(plan, plan.dropped_slots)]
    assert {plan.graph.ops[value.producer].name for value in values} == expected


@pytest.mark.parametrize("rows", [1, 4, 31, 40])
def test_the_sample_of_an_expanded_tensor_is_of_its_own_elements(rows):
    """As ``normalize`` saves: one norm for each row, expanded over 32 columns."""
    tensor = torch.randn(rows, 1).expand(rows, 32)
    places = SamplePlaces.of(Geometry.of(tensor))
    own = set(tensor[:, 0].contiguous().view(torch.int32).tolist())
    for number in range(5):
        found = places.peek(places.offset(number), tensor)
        assert found == places.at(places.offset(number), tensor).tolist()
        assert len(found) == min(rows, 16)
        assert set(found) <= own


def test_a_number_that_is_expanded_has_a_sample_of_one_element():
    tensor = torch.randn(1).expand(7, 5)
    places = SamplePlaces.of(Geometry.of(tensor))
    assert places.peek(places.offset(3), tensor) == tensor[0, :1].contiguous().view(torch.int32).tolist()
