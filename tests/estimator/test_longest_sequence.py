"""The longest sequence that fits: against steps traced at that length, against a scan, and what is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import plimsoll
from plimsoll.artifacts.base import to_json
from plimsoll.artifacts.store import from_json
from plimsoll.errors import InvalidLayout, InvalidOption
from plimsoll.estimator.longest_sequence import error_range, find_longest
from plimsoll.lengths import longest_sequence

BUDGET = 24 * 2**20
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 512,
}


def make_model():
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**SIZES))


def batch_of(samples, tokens):
    ids = torch.zeros(samples, tokens, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module")
def found():
    return longest_sequence(make_model(), batch_of, budget=BUDGET)


def test_each_row_fits_at_least_as_much_as_the_row_above(found):
    tokens = [row.tokens for row in found.rows]
    assert [row.name for row in found.rows] == [
        "keep everything",
        "checkpoint every block",
        "recompute by plan",
        "+ tiles",
        "+ offloaded inputs",
        "+ loss in chunks",
    ]
    assert tokens == sorted(tokens)
    assert found.longest == tokens[-1] > 2 * tokens[1] > 2 * tokens[0]
    assert found.attention == "memory-efficient attention, which never holds all scores"


@pytest.mark.long
@pytest.mark.parametrize(("row", "strategy"), [(0, "none"), (1, "full")])
def test_a_step_traced_at_the_found_length_fits_and_one_that_is_slightly_longer_does_not(found, row, strategy):
    # Given the longest sequence of a row, which was derived from traces of two other lengths
    tokens = found.rows[row].tokens
    # When the steps of this length and of 2% more are traced themselves
    fits, exceeds = (
        plimsoll.estimate(make_model(), batch_of(1, length), strategy=strategy).tightest.allocated_bytes
        for length in (tokens, tokens + max(128, tokens // 50))
    )
    # Then the first has the predicted bytes within the budget, and the second does not fit
    assert fits == pytest.approx(found.rows[row].allocated_bytes, rel=1e-3)
    assert fits <= BUDGET < exceeds


def test_the_lengths_by_the_error_enclose_the_length(found):
    for row in found.rows:
        assert row.least_tokens <= row.tokens <= row.most_tokens
        assert row.error_tokens == max(row.tokens - row.least_tokens, row.most_tokens - row.tokens) > 0


@pytest.mark.long
def test_documents_that_are_longer_than_a_tried_length_do_not_end_the_search(found):
    packed = longest_sequence(make_model(), batch_of, budget=BUDGET, techniques="packed=4096")
    assert [row.tokens for row in packed.rows] == [row.tokens for row in found.rows]


@pytest.mark.long
def test_the_state_of_a_paged_optimizer_counts_on_the_host():
    plain, paged = (
        longest_sequence("llama-tiny", device="H100", budget="200MiB", precision="bf16", optimizer=name).rows[0]
        for name in ("adamw", "paged-adamw")
    )
    assert plain.host_bytes == 0
    parameter_bytes = plimsoll.estimate("llama-tiny", precision="bf16", strategy="full").facts.parameters * 2
    assert parameter_bytes < paged.host_bytes < 2 * parameter_bytes, "tensors below 100,000 elements stay on the device"


def test_the_result_survives_its_file_and_can_be_shown(found):
    assert from_json(to_json(found)) == found
    assert f"{found.longest:,} tokens" in str(found)


@pytest.mark.long
def test_a_sample_batch_is_cut_and_repeated_along_its_tokens(found):
    # When a sample batch is given instead of a function
    other = longest_sequence(make_model(), batch_of(1, 4096), budget=BUDGET)
    # Then the lengths are the same as with the function
    assert [row.tokens for row in other.rows] == [row.tokens for row in found.rows]


@pytest.mark.long
def test_learned_positions_limit_the_length_and_code_that_refuses_tiles_leaves_that_row_out():
    # When a device has room for far more tokens than the model has positions, and the model's code needs whole samples
    found = longest_sequence("gpt2-tiny", 4, device="H100")
    # Then its positions are the longest length, the rows after the first gain nothing, and a note names the obstacle
    assert {row.tokens for row in found.rows} == {found.limit_tokens}
    assert "+ tiles" not in [row.name for row in found.rows]
    assert any("nothing runs in tiles: GPT2LMHeadModel" in note for note in found.notes)
    assert found.limit_tokens < 2048
    assert not any(row.is_gaining for row in found.rows[1:])


@pytest.mark.long
def test_nothing_fits_a_budget_below_the_weights_and_the_users_loss_leaves_no_row_for_another():
    found = longest_sequence(make_model(), batch_of, budget="100KiB", techniques="loss=fused")
    assert found.longest is None
    assert found.exit_code == 3
    assert [row.name for row in found.rows][-1] == "+ offloaded inputs"


@pytest.mark.parametrize("slope", [3, 700, 50_000])
@pytest.mark.parametrize("curve", [0.0, 1e-3])
@pytest.mark.parametrize("room", [10_000, 10**7, 10**10])
def test_the_search_finds_the_length_of_a_scan(slope, curve, room):
    def excess(tokens):
        return int(slope * tokens + curve * tokens**2) - room, 0

    # When a length is searched
    most, tried = 2**20, {}
    found = find_longest(excess, most, tried)
    # Then it is a multiple of the unit, it fits, and the next one does not; few lengths are tried
    unit = 1024 if (found or 0) >= 65_536 else 128
    assert (found or 0) % unit == 0
    assert found is None or excess(found)[0] <= 0
    assert found == most or excess((found or 0) + unit)[0] > 0
    assert len(tried) < 16


def test_the_range_by_the_error_is_where_the_memory_with_its_error_meets_the_limit():
    tried = {1_000: (-200, 50), 2_000: (200, 50)}
    assert error_range(tried, 1_408, 2**20) == (1_375, 1_625)


def test_the_range_by_the_error_does_not_exceed_what_was_searched():
    assert error_range({1_000: (-200, 50), 2_000: (200, 50)}, 1_408, 1_500)[1] == 1_500


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"layout": "tp=2"}, InvalidLayout),
        ({"layout": "cp=2"}, InvalidLayout),
        ({"techniques": "offload=activations"}, InvalidOption),
        ({"batch": 0}, InvalidOption),
    ],
)
def test_options_that_the_search_cannot_use_are_refused(options, error):
    with pytest.raises(error):
        longest_sequence("llama-tiny", **options)


def test_a_batch_without_tokens_is_refused():
    with pytest.raises(InvalidOption, match="does not have a sequence"):
        longest_sequence(torch.nn.Linear(8, 1), torch.ones(4, 8), loss=torch.sum)
