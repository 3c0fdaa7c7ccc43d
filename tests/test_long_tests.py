"""Every test belongs to `make test` or to `make contracts`, and none is lost between them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from long_cases import all_but, has_long_tests, is_long, mostly_short, some

FILES = sorted(Path(__file__).parent.rglob("test_*.py"))
CASES = ["a", ("b", 1), pytest.param("c", id="see"), 4, 5]


def marks_long(node: ast.AST) -> bool:
    attributes = [ast.unparse(part) for part in ast.walk(node) if isinstance(part, ast.Attribute)]
    return any(name.endswith("mark.long") for name in attributes)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_passed_over_only_by_the_target_that_asks_for_none_of_its_tests(path: Path):
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    wholes = [node for node in tree.body if isinstance(node, ast.Assign) and marks_long(node)]
    assert [ast.unparse(node.targets[0]) for node in wholes] == ["pytestmark"] * is_long(text)
    assert has_long_tests(text) or not marks_long(tree)


@pytest.mark.parametrize(
    ("choose", "short"),
    [
        (lambda: some(CASES, 1), [0]),
        (lambda: some(CASES, 2), [0, 4]),
        (lambda: some(CASES, 3), [0, 2, 4]),
        (lambda: all_but(CASES, "a", 5), [0, 4]),
        (lambda: mostly_short(CASES, ("b", 1)), [0, 2, 3, 4]),
    ],
)
def test_all_cases_stay_in_their_order_and_those_that_are_not_short_are_marked(
    choose: Callable[[], list[Any]], short: list[int]
):
    chosen = choose()
    kind = type(pytest.param())
    is_marked = [isinstance(case, kind) and [mark.name for mark in case.marks] == ["long"] for case in chosen]
    assert [place for place, marked in enumerate(is_marked) if not marked] == short
    bare = [case.values if isinstance(case, kind) else case for case in chosen]
    assert [value if isinstance(value, tuple) else (value,) for value in bare] == [("a",), ("b", 1), ("c",), (4,), (5,)]
