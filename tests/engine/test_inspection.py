"""One region, every n steps, is compared bit for bit: what it finds, what it names, and that the step's gradients are right."""

from __future__ import annotations

import gc
import random
import warnings

import pytest
import torch
from torch import nn

from contracts.harness import manage
from engine.models import scaled
from engine.offload.simulated import SimulatedLink
from plimsoll.artifacts.fault import Cause
from plimsoll.artifacts.receipt import Engine
from plimsoll.engine import inspection
from plimsoll.engine.hooks import Cell
from plimsoll.engine.inspection import PIECE_BYTES, ReferenceCopy, piece_bytes, pieces
from plimsoll.engine.replay import CallReplay
from plimsoll.errors import OffloadFailed
from plimsoll.tracing.recorder.storages import same_bits
from steps import Block, Net, Stack


class Dial:
    """Holds a number where no guard looks."""

    def __init__(self) -> None:
        self.number = 2.0


def scaled_block() -> Net:
    """A block whose op gets a constant that no guard sees."""

    def scale(net: Net, x: torch.Tensor) -> torch.Tensor:
        y = scaled(torch.sin(net.inner(x)), net.dial.number)
        return torch.tanh(y) * torch.cos(y)

    return Net(scale, inner=Block(32, dropout=0.0), dial=Dial())


def model_of(*blocks: nn.Module) -> Stack:
    model = Stack(0)
    model.blocks = nn.ModuleList(blocks)
    return model


def gradients(model: nn.Module, seed: int = 3) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    model(torch.randn(16, 32)).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def test_regions_take_turns_and_clean_training_shows_no_fault():
    torch.manual_seed(0)
    model = Stack()
    expected = gradients(model)
    with warnings.catch_warnings(), manage(model, verify_every=2) as handle:
        warnings.simplefilter("error")
        for step in range(1, 9):
            assert equal(expected, gradients(model))
            assert handle.inspected_calls == step // 2
        assert handle.faults == ()


@pytest.mark.parametrize(("settings", "inspected"), [({}, 0), ({"verify_every": 2}, 2)])
def test_nothing_is_inspected_unless_asked_for_and_an_evaluation_in_between_is_no_step(settings, inspected):
    torch.manual_seed(0)
    model = Stack()
    with manage(model, **settings) as handle:
        for _ in range(4):
            gradients(model)
            with torch.no_grad():
                model(torch.randn(4, 32))
        assert handle.inspected_calls == inspected


def test_a_changed_constant_is_named_and_training_goes_on_with_right_gradients():
    torch.manual_seed(0)
    model = model_of(scaled_block(), scaled_block())
    with manage(model) as handle:
        gradients(model)
        model.blocks[1].dial.number = 3.0
        with handle.paused():
            expected = gradients(model)
        with handle.inspecting(), pytest.warns(UserWarning, match=r"region 'blocks.1' \(op 'mul'\)"):
            found = gradients(model)
        assert equal(expected, found)
        (fault,) = handle.faults
        assert (fault.region, fault.op, fault.cause) == ("blocks.1", "mul", Cause.UNKNOWN)
        assert fault.differing_elements > 0
        assert fault.max_absolute_difference > 0
        assert equal(expected, gradients(model))
        served = {outcome.name: outcome.engine for outcome in handle.outcomes()}
        assert (served["blocks.0"], served["blocks.1"]) == (Engine.RECIPE, Engine.KEEP)


def noisy() -> Net:
    return Net(lambda net, x: torch.tanh(net.inner(x) * torch.rand(16, 32)), inner=Block(32, dropout=0.0))


@pytest.mark.parametrize(
    ("build", "ops"),
    [(lambda: Stack(1), ("bernoulli", "dropout", "div_")), (lambda: model_of(noisy()), ("rand", "uniform_"))],
    ids=["dropout", "random numbers themselves, not what they are made into"],
)
def test_random_state_that_was_not_put_back_is_named(build, ops: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model = build()
    expected = gradients(model)
    with manage(model, verify_every=1) as handle:
        gradients(model)
        start = CallReplay._start

        def forgetful(self: CallReplay, task: int) -> None:
            self._states = {point: torch.Generator().manual_seed(99) for point in self._states}
            start(self, task)

        monkeypatch.setattr(CallReplay, "_start", forgetful)
        with pytest.warns(UserWarning, match="RANDOM_STATE"):
            assert equal(expected, gradients(model))
        assert handle.faults[0].cause is Cause.RANDOM_STATE
        op = handle.faults[0].op
        assert op in ops or ("bernoulli" in ops and ("bernoulli" in op or "dropout" in op))


def test_an_op_that_never_repeats_itself_is_named(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model = model_of(Block(32, dropout=0.0))
    expected = gradients(model)
    run = CallReplay._run

    def noisy(self: CallReplay, segment, leaves, env):
        value = run(self, segment, leaves, env)
        return value + random.random() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    with manage(model, verify_every=1) as handle:
        gradients(model)
        monkeypatch.setattr(CallReplay, "_run", noisy)
        with pytest.warns(UserWarning, match="NON_DETERMINISTIC"):
            assert equal(expected, gradients(model))
        assert handle.faults[0].cause is Cause.NON_DETERMINISTIC


def test_a_write_behind_autograds_back_is_named():
    torch.manual_seed(0)
    model = model_of(scaled_block())
    with manage(model, kept=("sin",), verify_every=1) as handle:
        gradients(model)
        torch.manual_seed(3)
        loss = model(torch.randn(16, 32)).square().sum()
        for cell in gc.get_objects():
            if type(cell) is Cell and getattr(cell, "tensor", None) is not None:
                cell.tensor.data.add_(1.0)
        with pytest.warns(UserWarning, match="IN_PLACE_WRITE"):
            loss.backward()
        assert handle.faults[0].cause is Cause.IN_PLACE_WRITE


def test_a_full_link_leaves_the_call_uninspected_with_a_warning(monkeypatch: pytest.MonkeyPatch):
    def full(*args, **kwargs):
        raise OffloadFailed("The disk is full.", why="no space", next="make room")

    monkeypatch.setattr(inspection, "open_link", full)
    torch.manual_seed(0)
    model = Stack(1)
    expected = gradients(model)
    with manage(model, verify_every=1) as handle:
        gradients(model)
        with pytest.warns(UserWarning, match="could not be inspected: The disk is full"):
            assert equal(expected, gradients(model))
        assert handle.faults == ()
        assert handle.inspected_calls == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(7, 5),
        torch.randn(6, 4).t(),
        torch.randn(3, 1).expand(3, 4),
        torch.randn(2, PIECE_BYTES // 2),
        torch.randn(2, PIECE_BYTES // 2).t(),
        torch.zeros(0, 3),
        torch.tensor(4.0),
        torch.tensor([True, False]),
        torch.arange(5),
        torch.tensor([float("nan"), float("inf"), -0.0]),
        torch.randn(9).to(torch.bfloat16),
        torch.randn(4, dtype=torch.complex64),
    ],
    ids=lambda t: f"{tuple(t.shape)}-{t.dtype}",
)
def test_a_reference_copy_knows_the_tensor_and_brings_it_back(tensor: torch.Tensor):
    with SimulatedLink() as link:
        copy = ReferenceCopy(tensor, link)
        assert copy.compare(tensor) is None
        back = copy.bring_back()
        assert back.dtype is tensor.dtype
        assert same_bits(back.contiguous(), tensor.contiguous())


def test_a_large_region_is_inspected_in_as_many_pieces_as_a_smaller_one():
    assert piece_bytes(3 * PIECE_BYTES) == PIECE_BYTES
    tensors = [torch.empty(rows, PIECE_BYTES // 4, device="meta") for rows in (1, 100, 274)]
    most_bytes = piece_bytes(sum(tensor.numel() * 4 for tensor in tensors))
    cut = [list(pieces(tensor, most_bytes)) for tensor in tensors]
    assert sum(map(len, cut)) <= 64 + 2 * len(tensors)
    assert max(piece.numel() * 4 for of_one in cut for piece in of_one) <= most_bytes
    assert most_bytes <= 6 * PIECE_BYTES


def test_a_reference_copy_counts_elements_with_other_bits_and_how_far_they_are():
    tensor = torch.randn(300, PIECE_BYTES // 512)
    other = tensor.clone()
    other[0, 0] += 2.0
    other[299, 7] = -0.0
    other[150, 3] += 0.5
    tensor[150, 4] = other[150, 4] = float("nan")
    with SimulatedLink() as link:
        difference = ReferenceCopy(tensor, link).compare(other)
    assert difference.differing_elements == 3
    assert difference.elements == tensor.numel()
    assert difference.max_absolute == pytest.approx(max(2.0, float(tensor[299, 7].abs())))


def test_a_reference_copy_sees_another_layout():
    tensor = torch.randn(4, 4)
    with SimulatedLink() as link:
        difference = ReferenceCopy(tensor, link).compare(tensor.t().contiguous().t())
    assert difference.differing_elements == 0
