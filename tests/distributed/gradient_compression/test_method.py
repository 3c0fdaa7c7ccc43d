"""Names of methods and numbers that mean nothing are refused, with what to write instead."""

from __future__ import annotations

import pytest

from plimsoll.distributed.gradient_compression.method import CompressionSettings, parse_method
from plimsoll.errors import InvalidOption


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("none", "none"),
        ("powersgd:4", "powersgd:4"),
        ("topk:1%", "topk:1%"),
        ("topk:0.01", "topk:1%"),
        ("TopK:100%", "topk:100%"),
    ],
)
def test_a_method_reads_back_as_it_is_written(text: str, canonical: str):
    assert str(parse_method(text)) == canonical
    assert parse_method(canonical) == parse_method(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("topk:0%", "0%"),
        ("topk:101%", "101%"),
        ("topk:1.5", "1.5"),
        ("topk:-1%", "-1%"),
        ("topk", "missing"),
        ("topk:nan", "nan"),
        ("powersgd:0", "the rank is 0"),
        ("powersgd", "the rank is missing"),
        ("powersgd:2.5", "2.5"),
        ("int8", "'int8' is not a method"),
        ("sign", "'sign' is not a method"),
        ("randomk:1%", "'randomk:1%' is not a method"),
        ("none:1", "'none:1' is not a method"),
        ("top-k:1%", "'top-k:1%' is not a method"),
        ("", "'' is not a method"),
        (None, "None is not a method"),
    ],
)
def test_a_method_that_means_nothing_is_refused_and_says_how_to_write_one(text: str, said: str):
    with pytest.raises(InvalidOption) as caught:
        parse_method(text)
    assert said in caught.value.found
    assert caught.value.next


def test_at_least_one_element_is_sent_and_never_more_than_there_are():
    method = parse_method("topk:1%")
    assert [method.elements_sent(n) for n in (1, 50, 100, 1000)] == [1, 1, 1, 10]
    assert parse_method("topk:100%").elements_sent(7) == 7


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [
        ("topk:1%", "momentum", 1.0),
        ("topk:1%", "momentum", -0.1),
        ("powersgd:4", "momentum", 0.9),
        ("topk:1%", "warmup_steps", -1),
        ("topk:1%", "min_ratio", -1.0),
        ("topk:1%", "min_elements", -1),
        ("topk:1%", "seed", -1),
        ("topk:1%", "seed", 1.5),
        ("topk:1%", "warmup_steps", 0.1),
    ],
)
def test_an_option_out_of_range_is_refused(method: str, option: str, value: float):
    with pytest.raises(InvalidOption) as caught:
        CompressionSettings(method=parse_method(method), **{option: value})
    assert option in caught.value.found
