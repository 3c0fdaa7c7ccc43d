"""Wrong words and wrong values are refused in words: some of those in ``tests/support/wrong_inputs.py``, which tries all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import wrong_inputs
from long_cases import some

pytest.importorskip("transformers")

EVERY = 13
COMMANDS = list(wrong_inputs.wrong_commands())
CALLS = list(wrong_inputs.wrong_calls())


def test_there_are_more_than_three_hundred():
    assert len(COMMANDS) + len(CALLS) > 300


@pytest.mark.parametrize("words", some(COMMANDS[::EVERY], 60), ids=lambda words: " ".join(words)[:60])
def test_a_wrong_word_is_refused_and_leaves_every_file_as_it_was(words: list[str], run: object, tmp_path: Path):
    wrong_inputs.prepare(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert wrong_inputs.fault_of_command(words)[0] == ""
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.parametrize(("verb", "name", "value"), CALLS[::EVERY])
def test_a_wrong_value_is_refused_and_leaves_the_model_as_it_was(verb: str, name: str, value: Any, run: object):
    assert wrong_inputs.fault_of_call(verb, name, value)[0] == ""
