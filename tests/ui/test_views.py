"""Whatever a view says of an artifact stands in every rendering of it: text, terminal, page."""

from __future__ import annotations

import html
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from rich.console import Console

from plimsoll.artifacts.advice import CompilerCoverage, Recommendation
from plimsoll.artifacts.store import Artifact, Reportable
from plimsoll.ui.document import (
    Check,
    Checks,
    Document,
    Element,
    Fold,
    NamedFigures,
    Paragraph,
    ShellCommand,
    Table,
    opened,
)
from plimsoll.ui.html.page import build_html
from plimsoll.ui.plain import align, render_plain
from plimsoll.ui.terminal import render_artifact, render_elements
from plimsoll.ui.views import view
from plimsoll.ui.views.plan import group_regions
from samples import make_comparison, make_mismatch, make_plan, make_receipt, make_region
from ui.view_samples import ARTIFACTS, make_advice, make_finding

MANY_TIMES = 1000


def on_a_terminal(artifact: Artifact, width: int = 1000) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render_artifact(artifact))
    return console.file.getvalue()


def on_a_page(artifact: Artifact) -> str:
    page = re.sub(r"<(style|script)\b.*?</\1>", "", build_html([artifact]), flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", " ", page))


def words(text: str) -> str:
    return " ".join(text.split())


def texts_of(elements: Sequence[Element], *, with_details: bool, times: int) -> Iterator[str]:
    """Everything that elements say in words."""
    for element in opened(elements, with_details=with_details):
        match element:
            case Paragraph():
                yield element.text
            case NamedFigures():
                yield from (text for row in element.rows for text in row)
            case Table():
                rows = element.shown_rows(times)
                yield from [element.title] if rows else []
                yield from (cell for row in [element.header, *rows] for cell in row if rows)
            case Checks():
                for check in element.checks:
                    assert isinstance(check, Check)
                    yield from (check.mark, check.title, check.detail, check.next)
            case Fold():
                inner = list(texts_of(element.elements, with_details=with_details, times=times))
                yield from [element.title, *inner] if inner else []


def missing_in(text: str, document: Document, *, with_details: bool = False, times: int = 1) -> list[str]:
    shown = words(text)
    said = [word for s in document.sections for word in texts_of(s.elements, with_details=with_details, times=times)]
    return [word for word in [*said, *document.notes] if words(word) not in shown]


@pytest.mark.parametrize("artifact", ARTIFACTS.values(), ids=ARTIFACTS)
def test_everything_in_a_document_stands_in_every_rendering(artifact: Artifact):
    document = view(artifact)
    assert not missing_in(str(artifact), document)
    assert not missing_in(on_a_terminal(artifact), document)
    assert not missing_in(render_plain(document, with_details=True), document, with_details=True)
    for text in (str(artifact), on_a_terminal(artifact)):
        assert words(text).startswith(words(document.headline))
        assert all(words(line) in words(text) for line in document.lines)
    if isinstance(artifact, Reportable):
        page = on_a_page(artifact)
        assert not missing_in(page, document, with_details=True, times=MANY_TIMES)
        assert words(document.statement) in words(page)
        assert artifact.model in page


@pytest.mark.parametrize("artifact", ARTIFACTS.values(), ids=ARTIFACTS)
def test_no_line_of_a_narrow_terminal_is_cut(artifact: Artifact):
    for width in (80, 120):
        shown = on_a_terminal(artifact, width)
        assert "…" not in shown.replace(" … ", "")
        assert all(len(line.rstrip()) <= width for line in shown.splitlines())


@pytest.mark.parametrize("artifact", ARTIFACTS.values(), ids=ARTIFACTS)
def test_every_number_and_every_part_of_a_name_is_whole_on_80_columns(artifact: Artifact):
    shown = on_a_terminal(artifact, 80)
    for section in view(artifact).sections:
        for table in opened(section.elements, with_details=False):
            if isinstance(table, Table):
                assert all(row[column] in shown for row in table.shown_rows() for column in table.numbers)
                cells = [cell for row in table.shown_rows() for cell in row]
                assert all(part in shown for cell in cells for part in re.split(r"[\s./_,:|=]", cell))


def test_text_needs_neither_torch_nor_rich():
    script = "import sys; from samples import make_plan; str(make_plan()); make_plan().explain(); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    loaded = done.stdout.decode().split()
    assert "plimsoll.ui.plain" in loaded
    assert not {"torch", "rich", "jinja2"} & set(loaded)


def test_names_with_brackets_are_shown_as_they_are():
    assert "[bold]model[/bold]" in on_a_terminal(make_plan(model="[bold]model[/bold]"))
    assert "[red]" in on_a_terminal(make_plan(classes={"[red]": 1}))


def test_a_plan_prints_as_a_table():
    text = str(make_plan())
    for part in (
        "OPTIMAL",
        "64.0 MiB (floor 40.0 MiB)",
        "60.0 MiB, 60% of the unmanaged 100.0 MiB",
        "+3.0%",
        "RECOMPUTE 1 of 2 values",
        "KEEP everything",
        "3 others",
        "to keep everything would save 3.0 ms a step",
    ):
        assert part in text
    assert "buffer" not in text
    assert "▲ peak" in on_a_terminal(make_plan())
    assert "would not make this step faster" in str(make_plan(price_seconds_per_byte=0.0))


def test_a_plan_explains_every_value():
    text = make_plan().explain()
    assert "recompute costs 0.1 ms/MiB, memory is worth 0.3 ms/MiB here" in text
    assert "(3 with the same decisions, figures for one)" in text
    assert "Without a plan the peak is 100.0 MiB, in forward of the loss" in text
    assert "What other budgets cost" in text
    assert "attn.out" not in str(make_plan())
    assert "but not the peak" in make_plan(predicted_peak_bytes=100 * 2**20).explain()


def test_identical_regions_share_a_group():
    groups = group_regions(make_plan().regions)
    assert [group.label for group in groups] == ["model.layers.0–2", "model.layers.3"]
    assert groups[0].replay_seconds == pytest.approx(0.003)
    dropped = msgspec.structs.replace(make_region(1), is_boundary_dropped=True)
    assert len(group_regions([make_region(0), dropped])) == 2


def test_a_receipt_shows_claim_beside_evidence_and_what_differs():
    text = str(make_receipt())
    assert "predicted 60.0 MiB, measured 61.0 MiB (-1.6%)" in text
    assert "identical over 2 steps" in text
    wrong = make_receipt(gradient_mismatches=(make_mismatch(),) * 12, plan_losses=(1.25, 1.0))
    for text in (str(wrong), on_a_terminal(wrong)):
        assert "GRADIENTS_DIFFER" in text
        assert "and 2 more" in text
        assert "differ from step 2 on" in text


def test_a_comparison_marks_gradients_that_differ():
    first, second = make_comparison().rows
    wrong = make_comparison(rows=(msgspec.structs.replace(first, is_bit_equal=False), second))
    assert "DIFFER" in str(wrong).splitlines()[0]
    assert "1.310 [1.300, 1.330]" in str(make_comparison())


@pytest.mark.parametrize("show", [str, on_a_terminal])
def test_advice_begins_with_what_to_do_and_names_each_next_step(show):
    text = show(make_advice())
    assert "recompute some activations" in text.splitlines()[0]
    positions = [text.index(word) for word in ("--budget 64MiB", "Where the memory is", "full", "Checklist", "Failure")]
    assert positions == sorted(positions)
    for part in ("not checked", "plimsoll verify TARGET -o receipt.json", "print(x)", "model.layers.0–3"):
        assert part in text
    compiler = CompilerCoverage(is_measured=False, note="the model is on the meta device")
    assert "not checked: the model is on the meta device" in show(make_advice(compiler=compiler))
    recommendation = Recommendation(kind=make_advice().recommendation.kind, headline="do nothing")
    assert "plimsoll plan" not in show(make_advice(recommendation=recommendation))


def test_a_diagnosis_names_no_largest_part_where_nothing_takes_more_time():
    finding = make_finding()
    assert "The largest part is" in view(finding).statement
    gains = tuple(msgspec.structs.replace(part, seconds=-abs(part.seconds)) for part in finding.parts)
    assert "The largest part is" not in view(msgspec.structs.replace(finding, parts=gains)).statement


@pytest.mark.parametrize("width", [30, 60, 200])
def test_a_command_that_is_pasted_from_a_terminal_has_the_same_words(width: int):
    command = (
        "plimsoll plan 'a folder/my big model/config.json' --budget '70 GiB' --regions 'model.layers.*' -o plan.json"
    )
    console = Console(file=io.StringIO(), width=width)
    for part in render_elements([ShellCommand(command)]):
        console.print(part, crop=False)
    pasted = console.file.getvalue().replace("\\\n", "")
    assert shlex.split(pasted) == shlex.split(command)


def test_columns_line_up():
    assert align([["a", "1"], ["bb", "22"]], right=[1]) == ["a    1", "bb  22"]
    assert align([]) == []
