"""Artifacts round-trip exactly, and files that hold none are refused with a reason."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import plimsoll
from plimsoll.artifacts.base import to_json
from plimsoll.artifacts.files import write_whole
from plimsoll.artifacts.store import Artifact, from_json, is_saved, load_any, load_plan
from plimsoll.errors import PlanFileError
from samples import make_mismatch, make_plan, make_receipt
from ui.view_samples import ARTIFACTS

MORE = {
    "numbers that are not finite": make_plan(gap_of_overhead=float("inf"), price_seconds_per_byte=float("-inf")),
    "losses that are not known": make_receipt(plan_losses=(None, 1.125)),
    "a loss that diverges": make_receipt(plan_losses=(3e38, -9.8e35)),
    "a spread that is not finite": make_receipt(gradient_mismatches=(make_mismatch(spread=float("inf")),)),
}


@pytest.mark.parametrize("artifact", (ARTIFACTS | MORE).values(), ids=ARTIFACTS | MORE)
def test_an_artifact_comes_back_exactly_as_it_was_saved(artifact: Artifact, tmp_path: Path):
    path = tmp_path / "artifact.json"
    artifact.save(path)
    assert load_any(path) == artifact


@given(
    seconds=st.floats(min_value=0, max_value=1e6),
    bytes_=st.integers(min_value=0, max_value=2**62),
    name=st.text(max_size=20),
)
def test_every_number_and_name_survives_the_round_trip(seconds: float, bytes_: int, name: str):
    plan = make_plan(predicted_seconds=seconds, predicted_peak_bytes=bytes_, model=name)
    assert from_json(to_json(plan)) == plan


def test_a_number_that_json_lacks_is_still_valid_json():
    text = to_json(make_plan(gap_of_overhead=float("nan")))
    json.loads(text, parse_constant=pytest.fail)
    back = from_json(text)
    assert isinstance(back, plimsoll.Plan)
    assert math.isnan(back.gap_of_overhead)


def test_the_file_says_what_it_is(tmp_path: Path):
    make_plan().save(tmp_path / "plan.json")
    fields = json.loads((tmp_path / "plan.json").read_text())
    assert next(iter(fields.items())) == ("plimsoll", "plan")
    assert fields["schema_version"] == 6


def test_a_plan_of_the_first_schema_is_read_without_what_came_later():
    fields = json.loads(to_json(make_plan())) | {"schema_version": 1}
    for region in fields["regions"]:
        del region["price_seconds_per_byte"]
    for point in fields["timeline"]:
        del point["unmanaged_seconds"], point["unmanaged_bytes"]
    old = from_json(json.dumps(fields))
    assert isinstance(old, plimsoll.Plan)
    assert {region.price_seconds_per_byte for region in old.regions} == {None}
    assert {point.unmanaged_seconds for point in old.timeline} == {None}


def test_saving_leaves_nothing_but_the_file(tmp_path: Path):
    make_plan().save(tmp_path / "plan.json")
    make_plan().save(tmp_path / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "plan.json"
    make_plan().save(path)
    before = path.read_bytes()

    def fail(self: Path, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(PlanFileError) as caught:
        make_plan(model="other").save(path)
    assert "No space left" in caught.value.why
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["plan.json"]


def test_saving_into_a_missing_directory_says_so(tmp_path: Path):
    with pytest.raises(PlanFileError) as caught:
        make_plan().save(tmp_path / "nowhere" / "plan.json")
    assert "cannot be written" in caught.value.found


def test_two_processes_of_one_id_may_write_one_file_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, replace = tmp_path / "page.html", Path.replace

    def replace_late(part: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        write_whole("of the other", path)
        return replace(part, target)

    monkeypatch.setattr(Path, "replace", replace_late)
    write_whole("of this one", path)
    assert path.read_text() == "of this one"
    assert list(tmp_path.iterdir()) == [path]


WHOLE = to_json(make_plan())
FIELDS = json.loads(WHOLE)
WITHOUT_SCHEMA = {name: value for name, value in FIELDS.items() if name != "schema_version"}
REFUSED: list[tuple[bytes | str | dict[str, object], str]] = [
    *((WHOLE[: int(len(WHOLE) * share)], "not complete JSON") for share in (0.1, 0.5, 0.99)),
    ("", "not complete JSON"),
    (b'\xff\xfe\x00"plimsoll', "not complete JSON"),
    (FIELDS | {"schema_version": 7}, "schema 7"),
    (FIELDS | {"schema_version": 7}, "schema 6"),
    (WITHOUT_SCHEMA, "schema"),
    *((text, "not a file of Plimsoll") for text in ("{}", "[1, 2]", "3", '{"model_type": "llama"}')),
    *((f'{{"plimsoll": {kind}, "schema_version": 1}}', "does not know") for kind in ('"diagnosis"', "3", "[]", "null")),
    (FIELDS | {"regions": 3}, "regions"),
    (FIELDS | {"status": "GREAT"}, "status"),
    (FIELDS | {"budget_bytes": "64MiB"}, "budget_bytes"),
    (to_json(make_receipt()), "holds a receipt"),
]


@pytest.mark.parametrize(("content", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_is_no_whole_plan_is_refused_with_its_file_and_what_was_found(
    content: bytes | str | dict[str, object], words: str, tmp_path: Path
):
    path = tmp_path / "plan.json"
    text = json.dumps(content) if isinstance(content, dict) else content
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PlanFileError) as caught:
        load_plan(path)
    assert str(path) in caught.value.found
    assert words in caught.value.found + caught.value.why


@pytest.mark.parametrize("tolerance", [-1e-9, -1.0, float("nan")])
def test_a_receipt_with_an_error_below_zero_is_refused(tolerance: float, tmp_path: Path):
    fields = json.loads(to_json(make_receipt())) | {"rounding_tolerance": tolerance if tolerance < 0 else "NaN"}
    (tmp_path / "receipt.json").write_text(json.dumps(fields))
    with pytest.raises(PlanFileError, match="rounding_tolerance"):
        load_any(tmp_path / "receipt.json")
    with pytest.raises(ValueError, match="never below 0"):
        make_receipt(rounding_tolerance=tolerance)


def test_a_missing_file_is_a_plan_file_error(tmp_path: Path):
    with pytest.raises(PlanFileError) as caught:
        load_plan(tmp_path / "none.json")
    assert isinstance(caught.value, plimsoll.PlimsollError)
    assert caught.value.exit_code == 2


def test_a_saved_file_is_known_by_its_first_key(tmp_path: Path):
    plan, packed, model = tmp_path / "plan", tmp_path / "plan.json.gz", tmp_path / "config.json"
    make_plan().save(plan)
    packed.write_bytes(gzip.compress(plan.read_bytes()))
    model.write_text('{"_name_or_path": "plimsoll", "model_type": "llama"}')
    assert [is_saved(path) for path in (plan, packed, model, tmp_path / "none")] == [True, True, False, False]


def test_a_file_is_written_under_any_name_that_the_disk_takes(tmp_path: Path):
    path = tmp_path / f"{'計' * 78}.json"  # 239 bytes
    write_whole("of a long name", path)
    assert path.read_text() == "of a long name"
