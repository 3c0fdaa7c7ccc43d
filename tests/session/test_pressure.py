"""Where other things on the device come and go, the plan follows: tighter at once, looser after a while, to and fro never."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch

import plimsoll
from metering import LiveStorages
from plimsoll.errors import InvalidOption
from plimsoll.session.pressure import Pressure
from plimsoll.units import GIB, MIB
from steps import Stack, mean_square

BUDGET = 6_400
"""Of which a rung of the ladder is 100."""


def limits(rooms: list[int], needed: Callable[[int], int] = lambda limit: limit) -> list[int]:
    """The limit in every step, with so much room in each; a plan takes all of its limit unless ``needed`` says less."""
    room = iter(rooms)
    pressure, limit, found = Pressure(lambda: next(room)), BUDGET, []
    for _ in rooms:
        if pressure.changes(BUDGET, needed(limit)):
            limit = BUDGET - pressure.withheld_bytes(BUDGET)
        found.append(limit)
    return found


def changes(found: list[int]) -> int:
    return sum(one != other for one, other in zip([BUDGET, *found], found, strict=False))


def test_the_limit_falls_at_once_and_rises_within_ten_steps():
    found = limits([9_000] * 5 + [4_450] * 50 + [9_000] * 20)
    assert found == [BUDGET] * 5 + [4_400] * 53 + [BUDGET] * 17


@pytest.mark.parametrize("period", [1, 2, 3, 5, 8, 20])
def test_room_that_comes_and_goes_changes_the_limit_ever_more_seldom(period: int):
    rooms = [4_400 if step // period % 2 else 9_000 for step in range(1_000)]
    found = limits(rooms)
    assert all(limit <= room for limit, room in zip(found, rooms, strict=True))
    assert changes(found) <= 7
    assert changes(found[500:]) <= 1


def test_small_changes_and_room_that_no_plan_needs_change_nothing():
    assert changes(limits([6_400 - step % 2 for step in range(50)], lambda limit: limit - 100)) == 0
    assert changes(limits([3_000] * 50, lambda limit: 2_000)) == 0


def test_after_an_out_of_memory_the_limit_rises_only_where_somebody_knows_of_room():
    for room, rises in ((None, False), (lambda: 9_000, True)):
        pressure = Pressure(room)
        pressure.lower(3_000)
        for _ in range(10):
            pressure.changes(BUDGET, 3_000)
        assert (pressure.withheld_bytes(BUDGET) == 0) is rises


def test_on_cuda_the_room_is_what_is_free_and_what_is_ours():
    device, pressure = torch.device("cuda"), Pressure(None)
    with (
        mock.patch("torch.cuda.memory_allocated", return_value=2_000),
        mock.patch("torch.cuda.memory_reserved", return_value=3_500),
        mock.patch("torch.cuda.mem_get_info", side_effect=[(3_000, 9_000), (1_000, 9_000)]),
    ):
        pressure.watch(device, beside_bytes=500)  # room: 3,000 + 3,500 - 500
        assert not pressure.changes(BUDGET, 6_000)
        assert pressure.changes(BUDGET, 6_000)
        assert BUDGET - pressure.withheld_bytes(BUDGET) == 4_000


@pytest.mark.parametrize("clears", ["after the update", "after forward"])
def test_training_follows_the_room_with_the_same_weights(clears: str, caplog: pytest.LogCaptureFixture):
    def run(budget: int | None) -> tuple[list[torch.Tensor], list[int]]:
        with LiveStorages() as live:
            torch.manual_seed(0)
            model = Stack(6)
            optimizer = torch.optim.AdamW(model.parameters())
            room = GIB
            handle = None if budget is None else plimsoll.attach(model, budget, room=lambda: room)
            live.watch(model)
            for step in range(20):
                if budget is not None:
                    room = budget * 7 // 10 if 5 <= step < 10 else GIB
                torch.manual_seed(step)
                loss = mean_square(model(torch.randn(1024, 32)))
                if clears == "after forward":
                    optimizer.zero_grad()
                loss.backward()
                del loss
                optimizer.step()
                if clears == "after the update":
                    optimizer.zero_grad()
            if handle is not None:
                handle.remove()
        return [parameter.detach() for parameter in model.parameters()], live.peaks

    expected, unmanaged = run(None)
    budget = max(unmanaged)
    found, peaks = run(budget)
    assert all(map(torch.equal, expected, found))
    assert max(peaks[5:10]) <= budget * 7 // 10 < max(peaks[15:])
    assert [record.message.split(";")[0] for record in caplog.records if "the room is" in record.message] == [
        f"plimsoll: the room is {share / MIB:.1f} MiB (budget {budget / MIB:.1f} MiB)"
        for share in (budget * 0.7, budget)
    ]


def test_a_new_shape_is_not_refused_because_something_else_takes_memory():
    torch.manual_seed(0)
    model, room = Stack(6), GIB
    with plimsoll.attach(model, "2MiB", room=lambda: room) as handle:
        for rows in (256, 256, 256, 320, 320):
            mean_square(model(torch.randn(rows, 32))).backward()
            model.zero_grad()
        room = MIB // 2
        for rows in (320, 480, 480):
            mean_square(model(torch.randn(rows, 32))).backward()
            model.zero_grad()
        assert handle._known.room.account.withheld
        assert handle._known.shaped.is_below_floor


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(InvalidOption, match="room= has the type int"):
        plimsoll.attach(Stack(), "1GiB", room=5)  # type: ignore[arg-type]
