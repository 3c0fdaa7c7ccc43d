"""A page shows everything that its artifacts hold, as text where it is text, and needs nothing but itself."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

from plimsoll.artifacts.decision import Status
from plimsoll.artifacts.receipt import Slope, TileRounding
from plimsoll.artifacts.verdict import Ruling
from plimsoll.errors import InvalidReport, PlanMismatch
from plimsoll.ui.html.page import build_html
from plimsoll.units import GIB
from samples import make_comparison, make_mismatch, make_plan, make_receipt
from ui.pages.page_samples import (
    HOSTILE,
    HOSTILE_QUOTES,
    HOSTILE_TAGS,
    MODEL,
    full_page,
    make_finding,
    make_full_plan,
    make_verdict,
)
from ui.view_samples import make_estimate


class Parsed(HTMLParser):
    """A page as a browser reads it: elements, visible text, contents of scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.texts: list[str] = []
        self._inside: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag in ("script", "style"):
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.texts.append(data)
        elif self._inside[-1] == "script":
            attributes, before = self.scripts[-1]
            self.scripts[-1] = (attributes, before + data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    @property
    def programs(self) -> list[str]:
        return [content for attributes, content in self.scripts if attributes.get("type") != "application/json"]


@pytest.fixture(scope="module")
def html() -> str:
    return build_html(full_page())


@pytest.fixture(scope="module")
def page(html: str) -> Parsed:
    return Parsed(html)


def test_a_page_begins_with_what_each_artifact_comes_to_and_has_a_section_for_everything(page: Parsed):
    began = (
        "Plan: FEASIBLE, : WITHIN_ERROR, Comparison: MEASURED, Probe: GOOD, Diagnosis: +12.0%, "
        "Advice: recompute some activations"
    )
    sections = (
        "Memory over the step, What happens to each value, Time against memory, Measured against the unmanaged step, "
        "Training with and without the plan, Where the overhead goes, Checklist, Decisions, Notes, Machine and versions"
    )
    assert not [words for words in [*began.split(", "), *sections.split(", ")] if words not in page.text]
    assert "instead of 100.0 MiB, for 3.0% more time a step" in page.text


def test_every_decision_can_be_read_without_pointing_at_anything(page: Parsed):
    for region in make_full_plan().regions:
        assert region.name in page.text
        for decision in region.decisions:
            assert decision.value in page.text
            assert decision.reason in page.text


def test_a_page_has_a_picture_of_each_kind_that_needs_no_script(page: Parsed):
    charts = [value for name, value in page.attributes if name == "id" and re.fullmatch(r"[a-z]+-\d", value or "")]
    names = "curves-0 curves-1 curves-2 frontier-0 map-0 memory-0 norms-0 overhead-0"
    assert sorted(str(name) for name in charts if not str(name).startswith("part-")) == names.split()
    assert page.tags.count("svg") == 2 * len(names.split())


def test_a_page_of_a_plan_begins_with_four_numbers_and_a_list_of_contents():
    page = Parsed(build_html([make_plan(), make_receipt()]))
    peaks = "101.0 MiB → 61.0 MiB measured"
    for words in (peaks, "equal bit for bit from the receipt", "budget 64.0 MiB"):
        assert words in page.text
    assert page.text.index(peaks) < page.text.index("Plan: OPTIMAL")
    assert "not verified" in Parsed(build_html([make_plan()])).text
    targets = [value for name, value in page.attributes if name == "href"]
    assert targets
    assert {f"#{value}" for name, value in page.attributes if name == "id"} >= set(targets)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slope": Slope(expected=1.0, measured=0.5, measured_error=1e-6)}, "gradients differ from the receipt"),
        (
            {"tile_rounding": TileRounding(compared=3, difference=1e-7, worst_tensor="w", worst_ratio=1.1)},
            "within rounding from the receipt",
        ),
    ],
    ids=["slope", "tiles"],
)
def test_a_page_calls_gradients_equal_only_where_the_receipt_does(changes: dict[str, Any], words: str):
    page = Parsed(build_html([make_plan(), make_receipt(**changes)])).text
    assert words in page
    assert "equal bit for bit from the receipt" not in page


def test_a_receipt_of_another_plan_is_set_apart_in_no_colour():
    other = make_receipt(budget_bytes=GIB)
    html = build_html([make_plan(), other])
    assert '<p class="statement neutral"><strong>Receipt of another plan (auto, budget 1.0 GiB): VERIFIED' in html
    assert "not verified" in html
    assert "of another plan" not in build_html([make_plan(), make_receipt()])
    assert "of another plan" not in build_html([other])


def test_columns_are_explained_below_their_table(page: Parsed):
    assert "replay : seconds that backward spends on recomputing operations" in page.text


def test_a_page_loads_nothing(html: str, page: Parsed):
    for words in ("http://", "https://", "@import", "url("):
        assert words not in html
    assert not {"link", "img", "iframe", "object", "base"} & set(page.tags)
    assert not {"src", "srcset", "action"} & {name for name, _ in page.attributes}
    assert all(str(value).startswith("#") for name, value in page.attributes if name == "href")


def test_a_page_forbids_itself_the_network_and_foreign_scripts(page: Parsed):
    policy = next(text for name, text in page.attributes if name == "content" and text and "default-src" in text)
    assert policy.startswith("default-src 'none'")
    assert "unsafe-eval" not in policy
    allowed = re.findall(r"'sha256-([^']+)'", policy)
    assert allowed == [base64.b64encode(hashlib.sha256(p.encode()).digest()).decode() for p in page.programs]


def test_a_page_is_small_and_has_a_script_only_where_there_is_a_chart(html: str):
    assert len(html) < 1_000_000
    bare = build_html([make_receipt(baseline_losses=(1.0,), plan_losses=(1.0,))])
    assert len(bare) < 30_000
    assert "<script" not in bare


def test_names_from_a_model_are_text_and_nothing_else(page: Parsed):
    for name in (HOSTILE, HOSTILE_TAGS, HOSTILE_QUOTES, MODEL):
        assert name in page.text
    assert "img" not in page.tags
    assert "onerror" not in {name for name, _ in page.attributes}
    assert len(page.programs) == 1
    assert "alert(" not in page.programs[0]


def test_what_does_not_hold_is_said_first():
    failed = build_html([make_receipt(gradient_mismatches=(make_mismatch(),))])
    assert '<p class="statement bad"><strong>Receipt: GRADIENTS_DIFFER</strong>' in failed
    rows = (msgspec.structs.replace(make_comparison().rows[0], is_bit_equal=False),)
    assert "Gradients differ under full" in build_html([make_comparison(rows=rows)])
    open_ = build_html([make_verdict(ruling=Ruling.UNDECIDED, missing=("more steps",))])
    assert '<p class="statement neutral"><strong>Probe: UNDECIDED</strong>' in open_
    assert "Missing: more steps" in open_
    assert '<p class="statement bad"><strong>Plan: INFEASIBLE</strong>' in build_html(
        [make_plan(status=Status.INFEASIBLE)]
    )


def test_a_long_list_of_mismatches_says_how_many_it_leaves_out():
    assert "and 10 more" in build_html([make_receipt(gradient_mismatches=(make_mismatch(),) * 210)])


def test_several_plans_are_told_apart_by_their_budgets():
    page = Parsed(build_html([make_plan(), make_plan(budget_bytes=GIB)]))
    assert "Decisions, 1 of 2 (auto, 64.0 MiB)" in page.text
    assert "Decisions, 2 of 2 (auto, 1.0 GiB)" in page.text
    assert "plan auto, 64.0 MiB" in page.text


def test_artifacts_of_different_models_are_refused_with_both_shown():
    with pytest.raises(PlanMismatch) as caught:
        build_html([make_plan(), make_receipt(fingerprint="e" * 16)], ["plan.json", "receipt.json"])
    assert "plan.json and receipt.json are about different models" in caught.value.found
    assert "f" * 16 in caught.value.why
    assert "e" * 16 in caught.value.why
    with pytest.raises(PlanMismatch) as caught:
        build_html([make_comparison(model="Other"), make_plan()])
    assert "the comparison: Other; the plan: TinyModel" in caught.value.why


def test_artifacts_of_different_batches_are_refused_with_both_shown():
    with pytest.raises(PlanMismatch) as caught:
        build_html([make_plan(), make_comparison(signature="x: float32[4, 8]")])
    assert "x: float32[2, 8]" in caught.value.why
    assert "x: float32[4, 8]" in caught.value.why


def test_a_diagnosis_of_a_model_without_a_name_goes_with_any_model():
    finding = make_finding(model="", device="")
    assert "A model without a name" in Parsed(build_html([finding])).text
    assert MODEL in Parsed(build_html([finding, make_full_plan()])).text
    with pytest.raises(PlanMismatch):
        build_html([make_finding(), make_plan()])


def test_a_page_of_several_devices_begins_with_one_card_for_each():
    estimates = [msgspec.structs.replace(make_estimate(1), device=name) for name in ("H100-SXM", "A100-80GB")]
    text = Parsed(build_html(estimates)).text
    cards = text[: text.index("Memory")] if "Memory" in text else text
    for estimate in estimates:
        assert re.search(rf"{estimate.device} (does not fit|fits|may or may not fit)", cards)
    assert "40,000 tokens/s" in cards


def test_an_estimate_has_a_page_of_its_own_with_every_stage_and_no_other_files():
    page = Parsed(build_html([make_estimate()]))
    for words in (
        "tightest rank 3.0 GiB ± 204.8 MiB",
        "Items of stage 1-3",
        "± 204.8 MiB",
        "micro-batch 2 x 512 tokens",
    ):
        assert words in page.text
    assert page.tags.count("svg") == 2 * 3
    with pytest.raises(InvalidReport) as caught:
        build_html([make_estimate(), make_plan()])
    assert "two pages" in caught.value.next


def test_a_page_of_nothing_is_refused():
    with pytest.raises(InvalidReport):
        build_html([])
