"""The table in docs/catalogue.md is the catalogue. ``PLIMSOLL_WRITE_GOLDEN=1`` rewrites it."""

from __future__ import annotations

import os
from pathlib import Path

from plimsoll.artifacts.job import Precision, parse_precision
from plimsoll.estimator.catalogue.models import known_models
from plimsoll.estimator.targets.tracing import TraceRequest, target_facts

PAGE = Path(__file__).parents[3] / "docs" / "catalogue.md"
START = "<!-- table: made by tests/estimator/catalogue/test_page.py -->\n"
END = "<!-- end of table -->\n"
HEADER = (
    "| name | class | layers | hidden | heads | key-value heads | experts | vocabulary | type | batch | sequence |\n"
    "|---|---|--:|--:|--:|--:|--:|--:|---|--:|--:|\n"
)


def row(name: str) -> str:
    facts = target_facts(TraceRequest(target=name, device_name="H100-SXM"))
    model = known_models()[name]
    precision = parse_precision(str(model.config.get("torch_dtype", "float32")))
    experts = "" if facts.experts is None else f"{facts.experts_per_token} of {facts.experts}"
    sizes = (facts.layers, facts.hidden, facts.heads, facts.kv_heads)
    cells = (
        f"`{name}`",
        facts.architecture,
        *map(number, sizes),
        experts,
        number(facts.vocabulary),
        precision.value,
        number(model.batch),
        number(model.sequence),
    )
    return "| " + " | ".join(cells) + " |\n"


def number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def test_the_table_of_models_is_the_catalogue():
    table = HEADER + "".join(map(row, known_models()))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    old, _, after = rest.partition(END)
    if os.environ.get("PLIMSOLL_WRITE_GOLDEN"):
        PAGE.write_text(before + START + table + END + after, encoding="utf-8")
        old = table
    assert old == table


def test_every_precision_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    assert not [precision for precision in Precision if f"`{precision.value}`" not in page]
