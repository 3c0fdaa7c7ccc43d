"""Streams: the same batches every time, some set apart, and clear words where there are too few."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from plimsoll.analysis.probe.stream import Call, Stream, checksum, held_out_calls
from plimsoll.errors import InvalidBatch, InvalidProbe


def numbered(count: int) -> list[torch.Tensor]:
    return [torch.full((2,), float(i)) for i in range(count)]


def numbers(calls: list[Call]) -> list[int]:
    return [int(call.args[0][0]) for call in calls]


def test_a_list_is_passed_through_again_without_its_last_batches():
    stream = Stream(numbered(5), set_apart=2, seed=0)
    assert numbers(stream.held_out()) == [3, 4]
    assert numbers(stream.draw(7)) == [0, 1, 2, 0, 1, 2, 0]
    assert stream.drawn == 7


def test_a_tenth_is_set_apart_by_default_and_at_most_eight():
    assert Stream(numbered(9), set_apart=None, seed=0).set_apart == 0
    assert Stream(numbered(30), set_apart=None, seed=0).set_apart == 3
    assert Stream(numbered(300), set_apart=None, seed=0).set_apart == 8


def test_a_shuffling_loader_gives_every_pass_in_one_order_trains_on_no_held_out_example_and_moves_no_generator():
    loader = DataLoader(TensorDataset(torch.arange(12.0)), shuffle=True, collate_fn=lambda rows: (rows[0][0][None],))
    before = torch.get_rng_state()
    stream = Stream(loader, set_apart=4, seed=3)
    held_out = numbers(stream.held_out())
    trained = numbers(stream.draw(16))
    assert trained[:8] == trained[8:]
    assert not set(held_out) & set(trained)
    assert set(held_out) | set(trained) == set(range(12))
    assert torch.equal(torch.get_rng_state(), before)


def test_held_out_data_that_a_loader_shuffles_is_the_same_for_a_seed_and_moves_no_generator():
    loader = DataLoader(TensorDataset(torch.arange(12.0)), shuffle=True, collate_fn=lambda rows: (rows[0][0][None],))
    before = torch.get_rng_state()
    once, again, other = (numbers(held_out_calls(loader, seed=seed)) for seed in (3, 3, 4))
    assert once == again != other
    assert torch.equal(torch.get_rng_state(), before)


class Endless(IterableDataset[torch.Tensor]):
    """Data that is streamed: the loader's `len` raises TypeError."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((2,), float(i)) for i in itertools.count())


def test_a_loader_of_streamed_data_has_an_unknown_length():
    stream = Stream(DataLoader(Endless(), batch_size=None), set_apart=None, seed=0)
    assert (stream.set_apart, stream.description) == (0, "a stream")
    assert numbers(stream.draw(3)) == [0, 1, 2]


def test_a_skipped_stream_goes_on_as_if_it_had_been_drawn():
    one, other = (Stream(numbered(7), set_apart=0, seed=0) for _ in range(2))
    one.draw(9)
    other.skip(9)
    assert one.checksum == other.checksum
    assert numbers(one.draw(3)) == numbers(other.draw(3))


def test_one_bit_changes_the_checksum():
    one, other = numbered(3), numbered(3)
    other[2][1] = torch.nextafter(other[2][1], torch.tensor(9.0))
    drawn = []
    for batches in (one, other):
        stream = Stream(batches, set_apart=0, seed=0)
        stream.draw(3)
        drawn.append(stream.checksum)
    assert drawn[0] != drawn[1]


@pytest.mark.filterwarnings("ignore:Sparse")
def test_the_checksum_covers_indices_and_values_of_sparse_tensors_and_lazy_conjugates():
    moved = [torch.sparse_coo_tensor([[0, 1], [0, place]], [1.0, 2.0], (2, 3)) for place in (1, 2)]
    waves = torch.tensor([1 + 2j])
    kinds = [*moved, moved[0] * 2, moved[0].to_sparse_csr(), waves, waves.conj()]
    assert len({checksum(Call((each,), {})) for each in kinds}) == len(kinds)
    assert checksum(Call((waves.conj(),), {})) == checksum(Call((waves.conj().resolve_conj(),), {}))


def test_looking_at_the_first_batch_does_not_draw_it():
    stream = Stream(iter(numbered(4)), set_apart=0, seed=0)
    assert numbers([stream.first()]) == [0]
    assert stream.drawn == 0
    assert numbers(stream.draw(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("batch", [torch.ones(2), (torch.ones(2),), {"x": torch.ones(2)}])
def test_one_batch_is_given_again_and_again(batch: Any):
    stream = Stream(batch, set_apart=None, seed=0)
    assert stream.is_fixed
    assert len(stream.draw(3)) == 3
    assert stream.held_out() == []


def failing() -> Iterator[torch.Tensor]:
    yield from numbered(2)
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("source", "set_apart", "found"),
    [
        ([], 0, "The stream of batches is empty."),
        (numbered(3), 3, "3 of 3 batches cannot be held out."),
        (numbered(3), 9, "9 of 3 batches cannot be held out."),
        (numbered(3), -1, "-1 of 3 batches cannot be held out."),
        (torch.ones(2), 1, "The last 1 batches cannot be held out."),
        (iter(numbered(3)), 1, "The last 1 batches cannot be held out."),
        (iter(numbered(3)), 0, "The stream of batches ended after 3 batches."),
        (failing(), 0, "The stream failed after 2 batches: OSError: the disk is gone"),
        (7, 0, "A int is neither a batch nor a stream of batches."),
    ],
)
def test_a_stream_that_cannot_be_used_says_so(source: Any, set_apart: int, found: str):
    with pytest.raises(InvalidProbe) as caught:
        Stream(source, set_apart=set_apart, seed=0).skip(5)
    assert caught.value.found == found


def test_held_out_data_without_batches_and_what_is_no_batch_are_refused():
    with pytest.raises(InvalidProbe, match="held_out= is empty"):
        held_out_calls([], seed=0)
    assert len(held_out_calls(itertools.islice(numbered(9), 4), seed=0)) == 4
    with pytest.raises(InvalidBatch):
        Stream([object()], set_apart=0, seed=0).draw(1)
