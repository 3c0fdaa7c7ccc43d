"""Plans that may tile: a lower floor, gradients within rounding, and the same verbs as for any plan."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import plimsoll
from plimsoll.artifacts.receipt import ReceiptVerdict
from plimsoll.engine import tiles
from plimsoll.engine.tiles import TiledForward
from plimsoll.errors import BudgetBelowFloor, InvalidOption, InvalidStrategy
from plimsoll.session import plan as plan_module
from plimsoll.session.tiling import candidates, find_tileable

BOTH = ("recompute", "tile")
ROWS, WIDTH = 2048, 16


class Mixer(nn.Module):
    """Mixes positions as attention does, and then runs a wide MLP on each position."""

    def __init__(self, dropout):
        super().__init__()
        self.mix, self.mlp = nn.Linear(WIDTH, WIDTH), Mlp(dropout)

    def forward(self, x):
        x = x + self.mix(x).cumsum(1) / x.shape[1]
        return x + self.mlp(x)


class Mlp(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(16 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.down(self.dropout(F.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self, dropout=0.0, blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList(Mixer(dropout) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(output):
    return output.square().mean()


def named_floor(refusal):
    """The budget in bytes that a refusal names."""
    return int(refusal.next.partition("(")[2].partition(" bytes")[0])


def refused(model, batch, allow):
    with pytest.raises(BudgetBelowFloor) as refusal:
        plimsoll.plan(model, batch, budget="64KiB", loss=loss_of, allow=allow)
    return refusal.value


@pytest.fixture(scope="module")
def batch():
    return torch.randn(1, ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def without_tiles(batch):
    """The refusal of a hopeless budget where tiles are not allowed."""
    return refused(Model(), batch, ("recompute",))


@pytest.fixture(scope="module")
def budget(without_tiles):
    """A budget that only a plan in tiles keeps to."""
    return int(0.6 * named_floor(without_tiles))


@pytest.fixture(scope="module")
def plan(batch, budget):
    return plimsoll.plan(Model(), batch, budget=budget, loss=loss_of, allow=BOTH)


def is_tiled(module):
    return isinstance(module.__dict__.get("forward"), TiledForward)


def test_a_budget_below_the_floor_without_tiles_is_kept_in_tiles(batch, budget, plan):
    model = Model()

    receipt = plimsoll.verify(model, batch, plan, loss=loss_of, steps=2)

    assert [tile.path for tile in plan.tiles] == ["blocks.0.mlp", "blocks.1.mlp"]
    assert receipt.verdict is ReceiptVerdict.WITHIN_ROUNDING
    assert receipt.measured_peak_bytes <= budget
    assert receipt.tile_rounding.compared == 12
    assert receipt.baseline_losses == receipt.plan_losses
    assert not any(map(is_tiled, model.modules()))


@pytest.mark.long
def test_more_tiles_are_tried_if_those_chosen_were_measured_to_need_more(batch, monkeypatch):
    budget = named_floor(refused(Model(), batch, BOTH))

    def too_few(whole, task, planner_of):
        return planner_of(dataclasses.replace(whole.options, tiles=candidates(find_tileable(task, whole))[0]))

    monkeypatch.setattr(plan_module, "with_best_tiles", too_few)
    made = plimsoll.plan(Model(), batch, budget=budget, loss=loss_of, allow=BOTH)

    assert made.predicted_peak_bytes <= budget
    assert {tile.count for tile in made.tiles} == {8}


def test_dropout_in_tiles_is_planned_and_verified(batch, budget):
    model = Model(dropout=0.2)

    plan = plimsoll.plan(model, batch, budget=int(1.5 * budget), loss=loss_of, allow=BOTH)
    receipt = plimsoll.verify(model, batch, plan, loss=loss_of, steps=2)

    assert all(tile.is_random for tile in plan.tiles)
    assert receipt.verdict is ReceiptVerdict.WITHIN_ROUNDING
    assert receipt.tile_rounding.is_without_dropout
    assert receipt.measured_peak_bytes <= 1.5 * budget


@pytest.mark.long
def test_a_refusal_says_how_far_tiles_lower_the_floor_and_it_is_true(batch, without_tiles):
    within = refused(Model(), batch, BOTH)

    assert "allow=('recompute', 'tile'): with tiles the smallest peak is about" in without_tiles.next
    assert named_floor(within) < 0.6 * named_floor(without_tiles)
    assert plimsoll.plan(Model(), batch, budget=named_floor(within), loss=loss_of, allow=BOTH).tiles


def test_nothing_is_tiled_where_it_is_not_allowed_or_not_needed(batch, without_tiles):
    loose = plimsoll.plan(Model(), batch, budget="1GiB", loss=loss_of, allow=BOTH)
    exact = plimsoll.plan(Model(), batch, budget=int(1.05 * named_floor(without_tiles)), loss=loss_of)

    assert loose.tiles == exact.tiles == ()


def test_a_saved_plan_runs_its_tiles_and_its_table_names_them(plan, tmp_path):
    model = Model()
    plan.save(tmp_path / "plan.json")

    loaded = plimsoll.load(tmp_path / "plan.json")
    with plimsoll.apply(model, loaded):
        tiled = [name for name, module in model.named_modules() if is_tiled(module)]

    tile = plan.tiles[0]
    assert loaded.tiles == plan.tiles
    assert tiled == [tile.path for tile in plan.tiles]
    assert f"blocks.0–1.mlp: {tile.count} tiles of {tile.rows_per_tile} rows" in str(plan)


def test_attach_tiles_keeps_the_budget_and_leaves_nothing_behind(batch, budget):
    torch.manual_seed(0)
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())

    def train(each):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        losses = []
        for step in range(6):
            value = loss_of(each(batch[:, : ROWS - 64 * step]))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
        return losses

    handle = plimsoll.attach(model, budget=int(1.2 * budget), allow=BOTH)
    losses = train(model)
    plan = handle.plan
    handle.remove()

    assert plan.tiles
    assert plan.predicted_peak_bytes <= 1.2 * budget
    assert losses == pytest.approx(train(plain), rel=1e-5)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_plan_in_tiles_is_compared_with_the_whole_step(batch, plan):
    none = plimsoll.plan(Model(), batch, strategy="none", loss=loss_of)

    assert plan.baseline_peak_bytes == none.baseline_peak_bytes
    assert plan.activation_bytes == none.activation_bytes
    assert plan.baseline_peak == none.baseline_peak


def test_a_wrong_gradient_in_tiles_is_found(batch, plan, monkeypatch):
    take = tiles._Sums.take
    monkeypatch.setattr(
        tiles._Sums, "take", lambda sums, leaves, start, count: take(sums, leaves, max(0, start - 1), count)
    )

    receipt = plimsoll.verify(Model(), batch, plan, loss=loss_of, steps=1)

    assert receipt.verdict is ReceiptVerdict.GRADIENTS_DIFFER
    assert receipt.tile_rounding.exceeding


class Filtered(Model):
    """Multiplies the spectrum of the rows by complex weights before the blocks."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.ones(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x):
        return super().forward(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH))


@pytest.mark.long
def test_a_gradient_that_is_wrong_only_in_its_imaginary_part_in_tiles_is_found(batch, monkeypatch):
    plan = plimsoll.plan(Filtered(), batch, named_floor(refused(Filtered(), batch, BOTH)), loss=loss_of, allow=BOTH)
    right = plimsoll.verify(Filtered(), batch, plan, loss=loss_of, steps=1)
    take, taken = tiles._Sums.take, []
    monkeypatch.setattr(tiles._Sums, "take", lambda *a: taken.append(take(*a)))
    model = Filtered()
    model.filter.register_hook(lambda gradient: gradient if not taken or taken.clear() else gradient.conj())

    wrong = plimsoll.verify(model, batch, plan, loss=loss_of, steps=1)

    assert right.verdict is ReceiptVerdict.WITHIN_ROUNDING
    assert right.tile_rounding.compared == 13
    assert wrong.verdict is ReceiptVerdict.GRADIENTS_DIFFER
    assert wrong.tile_rounding.exceeding == ("filter",)


def test_tile_without_recompute_is_refused(batch):
    with pytest.raises(InvalidStrategy, match="'tile' without 'recompute'"):
        plimsoll.plan(Model(), batch, budget="1MiB", loss=loss_of, allow=("tile",))


@pytest.mark.long
def test_a_device_that_is_not_here_is_planned_in_tiles(batch, budget):
    with torch.device("meta"):
        model = Model()

    plan = plimsoll.plan(model, batch, loss=loss_of, budget=budget, device_profile="H100-SXM", allow=BOTH)

    assert plan.tiles
    assert plan.predicted_peak_bytes <= budget


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        (
            lambda model, batch: plimsoll.compare(model, batch, loss=loss_of, strategies=["full"], allow=BOTH),
            "in tiles",
        ),
        (lambda model, batch: plimsoll.advise(model, batch, budget="1GiB", loss=loss_of, allow=BOTH), "in tiles"),
        (
            lambda model, batch: plimsoll.plan(model, batch, "1GiB", loss=loss_of, allow=BOTH, compile=True),
            "not supported with torch.compile",
        ),
        (
            lambda model, batch: plimsoll.attach(torch.compile(model), budget="1GiB", allow=BOTH),
            "not supported with torch.compile",
        ),
    ],
    ids=["compare", "advise", "plan of a compiled model", "attach to a compiled model"],
)
def test_where_tiles_are_not_decided_they_are_refused_in_words(verb, words, batch):
    with pytest.raises((InvalidStrategy, InvalidOption), match=words):
        verb(Model(), batch)


def test_a_region_that_is_tiled_itself_runs_its_tiles(batch, without_tiles):
    model = Model()
    budget = int(0.7 * named_floor(without_tiles))

    plan = plimsoll.plan(model, batch, budget=budget, loss=loss_of, allow=BOTH, regions=["blocks.*.mlp"])
    receipt = plimsoll.verify(model, batch, plan, loss=loss_of, steps=1)

    assert {tile.path for tile in plan.tiles} == {region.name for region in plan.regions}
    assert receipt.verdict is ReceiptVerdict.WITHIN_ROUNDING
    assert receipt.measured_peak_bytes <= budget
    assert not any("forward" in module.__dict__ for module in model.modules())
