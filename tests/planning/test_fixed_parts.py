"""What every plan of a model keeps: its bytes, its place and the reason, said first if it is much."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plimsoll
from plimsoll.artifacts.plan import FixedPart, Plan, limits_of
from steps import mean_square

WIDTH, ROWS = 32, 64


class Drawing(nn.Module):
    """A block that draws from a generator of its own. No recipe can draw the same numbers again."""

    def __init__(self, *, draws: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.numbers = torch.Generator() if draws else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = F.gelu(self.up(x))
        if self.numbers is not None:
            for _ in range(8):
                wide = wide * torch.rand(wide.shape, generator=self.numbers)
        return x + self.down(wide)


class Model(nn.Module):
    def __init__(self, *, draws: bool = False, classes: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Drawing(draws=draws) for _ in range(3))
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return F.log_softmax(self.head(x), -1)


def planned(model: nn.Module) -> Plan:
    return plimsoll.plan(model, torch.randn(ROWS, WIDTH), loss=mean_square, strategy="full")


def test_what_cannot_be_recomputed_is_named_with_its_line():
    plan = planned(Model(draws=True))
    part = plan.fixed[0]
    assert part.where == "blocks.0–2"
    assert part.bytes == 3 * 8 * ROWS * 4 * WIDTH * 4
    line = Drawing.forward.__code__.co_firstlineno + 4
    assert (
        part.why == f"it cannot be recomputed: rand: draws from its own random generator (test_fixed_parts.py:{line})"
    )


def test_what_is_saved_outside_of_blocks_is_named_by_its_largest_value():
    plan = planned(Model(classes=4000))
    assert plan.fixed[0].where == "_log_softmax#0"
    assert plan.fixed[0].bytes >= ROWS * 4000 * 4
    assert plan.fixed[0].why == "no block that a plan manages saves it"


@pytest.mark.parametrize("model", [Model(draws=True), Model(classes=4000)])
def test_a_plan_that_drops_less_than_half_says_that_first(model: Model):
    plan = planned(model)
    first = str(plan).splitlines()[1]
    assert first.strip().startswith("Plans of this model can drop at most ")
    assert plan.fixed[0].why in " ".join(str(plan).split())
    assert plan.limits[0] in plimsoll.explain(model, torch.randn(ROWS, WIDTH), loss=mean_square).notes


def test_a_plan_that_drops_most_of_the_activations_does_not_mention_limits():
    plan = planned(Model())
    fixed_bytes = sum(part.bytes for part in plan.fixed)
    assert 0 < fixed_bytes < plan.activation_bytes / 2
    assert plan.limits == ()
    assert "can drop at most" not in str(plan)


def test_activations_are_those_that_the_unmanaged_step_holds_for_backward():
    model, x = Model(), torch.randn(ROWS, WIDTH)
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x)
        mean_square(output)
    for known in (x, *model.parameters()):
        saved.pop(known.untyped_storage().data_ptr(), None)
    assert planned(model).activation_bytes == pytest.approx(sum(saved.values()), abs=16)


def test_the_limit_is_half():
    part = FixedPart(where="here", bytes=50, why="so")
    assert limits_of(100, (part,)) == ()
    assert limits_of(99, (part,)) != ()
    assert limits_of(0, ()) == ()
