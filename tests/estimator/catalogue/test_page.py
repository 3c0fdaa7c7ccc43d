"""The table in docs/estimate.md is the catalogue. ``PLIMSOLL_WRITE_GOLDEN=1`` rewrites it."""

from __future__ import annotations

import os
from pathlib import Path

from plimsoll.artifacts.job import Precision, parse_precision
from plimsoll.estimator.catalogue.models import known_models
from plimsoll.estimator.targets.tracing import TraceRequest, target_facts

PAGE = Path(__file__).parents[3] / "docs" / "estimate.md"
START = "<!-- table: made by tests/estimator/catalogue/test_page.py -->\n"
END = "<!-- end of table -->\n"
HEADER = "| class | names, with type and batch × sequence |\n|---|---|\n"


def table() -> str:
    """One row per class of models, in the order of the catalogue; names with one type and one batch stand together."""
    rows: dict[str, dict[str, list[str]]] = {}
    for name, model in known_models().items():
        facts = target_facts(TraceRequest(target=name, device_name="H100-SXM"))
        precision = parse_precision(str(model.config.get("torch_dtype", "float32")))
        defaults = f"{precision.value}, " + " × ".join(filter(None, (number(model.batch), number(model.sequence))))
        rows.setdefault(facts.architecture, {}).setdefault(defaults, []).append(f"`{name}`")
    lines = {
        architecture: "; ".join(f"{', '.join(names)} ({defaults})" for defaults, names in groups.items())
        for architecture, groups in rows.items()
    }
    return HEADER + "".join(f"| {architecture} | {line} |\n" for architecture, line in lines.items())


def number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def test_the_table_of_models_is_the_catalogue():
    made = table()
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    old, _, after = rest.partition(END)
    if os.environ.get("PLIMSOLL_WRITE_GOLDEN"):
        PAGE.write_text(before + START + made + END + after, encoding="utf-8")
        old = made
    assert old == made


def test_every_precision_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    assert not [precision for precision in Precision if f"`{precision.value}`" not in page]
