"""What a checkpoint keeps can be read back, and what differs between ranks is found."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from plimsoll.errors import InvalidOption
from plimsoll.resuming.own import differing, digests
from plimsoll.resuming.plain import check_plain, read_plain, write_plain


class Position(NamedTuple):
    epoch: int
    batch: int


class Marked(torch.Tensor):
    pass


PLAIN: list[Any] = [
    {"lr": 0.1, 3: [None, True, (1, 2), {"a"}], "dtype": torch.float32, "size": torch.Size([2])},
    OrderedDict(milestones=Counter([30, 60])),
    [torch.ones(2), torch.nn.Parameter(torch.ones(2)), b"bytes", 1j],
]


@pytest.mark.parametrize("value", PLAIN, ids=["dict", "ordered", "tensors"])
def test_what_passes_the_check_can_be_read_back(value: Any, tmp_path: Path):
    check_plain("extra=", value)
    write_plain(value, tmp_path / "value.pt")
    assert repr(read_plain(tmp_path / "value.pt")) == repr(value)


@pytest.mark.parametrize(
    "value",
    [Position(1, 2), defaultdict(int), torch.ones(2).as_subclass(Marked), range(3)],
    ids=lambda v: type(v).__name__,
)
def test_what_could_not_be_read_back_is_refused_when_it_is_saved(value: Any):
    with pytest.raises(InvalidOption) as refused:
        check_plain("extra=", {"deep": [value]})
    assert type(value).__name__ in refused.value.found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.eye(4)[0], torch.eye(4)[1]),
        (torch.arange(6), torch.arange(6).roll(1)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2).half()),
        ([torch.arange(5000.0)], [torch.arange(5000.0).flip(0)]),
        ({"lr": torch.tensor(0.1)}, {"lr": torch.tensor(0.2)}),
    ],
    ids=["one-hot", "permuted", "shape", "dtype", "list", "dict"],
)
def test_values_that_differ_in_bits_or_in_their_order_are_each_ranks_own(one: Any, other: Any):
    assert differing([digests({"x": one}), digests({"x": other})]) == {"x"}
    assert differing([digests({"x": one}), digests({"x": one})]) == frozenset()


def test_values_of_many_chunks_differ_where_two_neighbours_change_places():
    one = torch.arange(3_000_000, dtype=torch.int32)
    other = one.clone()
    other[2_000_000], other[2_000_001] = one[2_000_001].clone(), one[2_000_000].clone()
    assert differing([digests({"x": one}), digests({"x": other})]) == {"x"}
