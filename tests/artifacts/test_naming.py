"""Names of many regions and calls stay short."""

from __future__ import annotations

import pytest

from plimsoll.artifacts.naming import compress_names, name_call


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["layers.0"], "layers.0"),
        (["layers.0", "layers.1", "layers.2"], "layers.0–2"),
        (["layers.0", "layers.2", "layers.3"], "layers.0,2–3"),
        (["h.0.attn", "h.1.attn", "head"], "h.0–1.attn, head"),
        (["enc.layers.0", "enc.layers.1", "dec.layers.0"], "enc.layers.0–1, dec.layers.0"),
        (["stage1.block0", "stage1.block1"], "stage1.block0–1"),
        ([], ""),
    ],
)
def test_names_that_differ_in_one_number_become_a_range(names: list[str], text: str):
    assert compress_names(names) == text


def test_later_calls_of_a_region_are_counted_from_one():
    assert name_call("block", 0) == "block"
    assert name_call("block", 1) == "block (call 2)"
    assert name_call("", 0) == "(the model)"
