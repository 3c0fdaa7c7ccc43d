"""What a method sends on a group that sends nothing is what it is said to send; a step is predicted from its parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.distributed.comm_cost.cost_meter import SilentAverages, predict_step_seconds
from plimsoll.distributed.comm_cost.silent_group import SilentGroup
from plimsoll.distributed.gradient_compression.averaging import SplitGradients
from plimsoll.distributed.gradient_compression.method import CompressionSettings, parse_method
from plimsoll.distributed.gradient_compression.slots import Form, GradientPart, make_slots

SHAPES = {"up.weight": (96, 64), "norm.weight": (96,), "down.weight": (64, 96)}
FLAGS_BYTES = 64
"""The most that flags of gradients that are not finite take."""

seconds = st.floats(min_value=0.01, max_value=10)


class CountingGroup(SilentGroup):
    """Counts the bytes that a rank of a ring sends, as the textbook has them."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.sent_bytes = 0.0

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        self.sent_bytes += sum(2 * each.nbytes * (self.size() - 1) / self.size() for each in tensors)
        return super().allreduce(tensors, opts)

    def _allgather_base(self, output: torch.Tensor, given_: torch.Tensor, opts: Any = None) -> dist.Work:
        self.sent_bytes += given_.nbytes * (self.size() - 1)
        return super()._allgather_base(output, given_, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, given_: torch.Tensor, opts: Any = None) -> dist.Work:
        self.sent_bytes += output.nbytes * (self.size() - 1)
        return super()._reduce_scatter_base(output, given_, opts)

    def alltoall_base(self, output: torch.Tensor, given_: torch.Tensor, *sizes: Any, **named: Any) -> dist.Work:
        self.sent_bytes += given_.nbytes * (self.size() - 1) / self.size()
        return super().alltoall_base(output, given_, *sizes, **named)

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base


def averaged(method: str, ranks: int, form: Form) -> tuple[SilentAverages, torch.Tensor, torch.Tensor, int]:
    """Exchange random gradients once; return the averages, the gradients, the mean and the announced bytes."""
    settings = CompressionSettings(method=parse_method(method))
    shapes = {n: (ranks, -(-torch.Size(s).numel() // ranks)) if form == "shard" else s for n, s in SHAPES.items()}
    slots = make_slots(
        [GradientPart(name, shape, torch.float32) for name, shape in shapes.items()], settings, ranks=ranks, form=form
    )
    averages = SilentAverages(settings, form, ranks)
    averages.group = CountingGroup(ranks)
    rows = torch.randn(
        ranks if form == "shard" else 1, sum(slot.elements for slot in slots) // (ranks if form == "shard" else 1)
    )
    before = rows.clone()
    if form == "shard":
        mean = torch.empty(rows.shape[1])
        gradients = SplitGradients.of_shard(rows, mean, slots)
    else:
        mean = rows.view(-1)
        views = [
            each.view(slot.shape) for slot, each in zip(slots, mean.split([s.elements for s in slots]), strict=True)
        ]
        gradients = SplitGradients.of_mean(mean, views)
    averages.average(gradients, slots, averages.group)
    return averages, before, mean, sum(slot.sent_bytes(settings) for slot in slots)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(
    ("method", "form"),
    [("powersgd:4", "mean"), ("topk:1%", "mean"), ("topk:1%", "shard"), ("none", "mean"), ("none", "shard")],
)
def test_what_passes_is_what_the_mechanism_says_that_it_sends(method: str, form: Form, ranks: int):
    averages, _, _, announced_bytes = averaged(method, ranks, form)
    flags_bytes = 0 if method == "none" else FLAGS_BYTES
    assert announced_bytes <= averages.group.sent_bytes <= announced_bytes + flags_bytes
    assert averages.exchanges == 1
    assert averages.local_seconds > 0


@pytest.mark.parametrize("form", ["mean", "shard"])
def test_uncompressed_gradients_pass_in_one_collective_and_stay_the_mean_of_equal_ones(form: Form):
    averages, before, mean, _ = averaged("none", 4, form)
    assert averages.group.transfers == 1
    assert torch.equal(mean, before[0])


def test_collectives_come_back_as_if_all_ranks_had_the_same():
    group = SilentGroup(3)
    total = torch.ones(2)
    dist.all_reduce(total, group=group)
    highest = torch.ones(2)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    gathered = torch.empty(3, 2)
    group.all_gather_single(gathered, torch.tensor([1.0, 2.0]))
    exchanged = torch.empty(3)
    dist.all_to_all_single(exchanged, torch.full((3,), 5.0), group=group)
    scattered = torch.empty(1)
    group.reduce_scatter_single(scattered, torch.tensor([2.0, 3.0, 4.0]))
    assert total.tolist() == [3.0, 3.0]
    assert highest.tolist() == [1.0, 1.0]
    assert gathered.tolist() == [[1.0, 2.0]] * 3
    assert exchanged.tolist() == [5.0] * 3
    assert scattered.tolist() == [6.0]
    assert group.transfers == 5


def test_transfers_hide_behind_backward_but_for_the_last_part():
    # A second of forward, two of backward in four parts: three parts have 1.5 s of backward to hide behind.
    assert predict_step_seconds(1.0, 3.0, 0.0, 1.0, parts=4) == 3.25
    assert predict_step_seconds(1.0, 3.0, 0.0, 8.0, parts=4) == 3.0 + 8.0 - 1.5


@given(forward=seconds, backward=seconds, local=seconds, transfer=seconds, parts=st.integers(1, 50))
def test_a_step_is_no_shorter_than_its_work_and_no_longer_than_everything_in_a_row(
    forward: float, backward: float, local: float, transfer: float, parts: int
):
    predicted = predict_step_seconds(forward, forward + backward, local, transfer, parts=parts)
    in_a_row = predict_step_seconds(forward, forward + backward, local, transfer, parts=1)
    assert forward + backward + local <= predicted <= in_a_row + 1e-9
    assert in_a_row == pytest.approx(forward + backward + local + transfer)
