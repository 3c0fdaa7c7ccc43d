"""``plimsoll compress-gradients``: what it prints on two ranks, and how its file is shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launching import launch
from plimsoll.artifacts.base import to_json
from plimsoll.artifacts.store import from_json, load_any
from plimsoll.artifacts.traffic import Traffic, TrafficRuling
from plimsoll.artifacts.verdict import Outcome
from traffic_samples import make_method, make_sharded_traffic, make_traffic, make_validation


@pytest.mark.parametrize("make", [make_traffic, make_sharded_traffic])
def test_a_saved_traffic_comes_back_exactly_and_is_shown(make: Callable[[], Traffic], run):
    traffic = make()
    traffic.save("traffic.json")
    assert load_any("traffic.json") == traffic
    shown = run("show", "traffic.json").out
    if traffic.sharded is None:
        for part in ("KEEP", "powersgd:4", "all_reduce", "2.0010", "a note", "below 160 Mbit/s"):
            assert part in shown
        return
    # No column of which nothing is known.
    [header] = [line.split() for line in shown.splitlines() if line.split()[:1] == ["method"]]
    assert header == ["method", "sent", "measured", "saved", "error", "ruling"]
    assert "5 units of FSDP2" in shown
    assert not [absent for absent in ("link", "pays", "hidden") if absent in shown]


def test_a_traffic_of_schema_1_is_read(tmp_path: Path):
    written = json.loads(to_json(make_traffic()))
    del written["sharded"]
    path = tmp_path / "traffic.json"
    path.write_text(json.dumps(written | {"schema_version": 1}))
    found = load_any(path)
    assert isinstance(found, Traffic)
    assert (found.sharded, found.step, found.links) == (None, make_traffic().step, make_traffic().links)


def test_its_text_says_what_is_missing_and_what_a_validation_came_to():
    broken = make_method(
        "sign", saved=0.2, ruling=TrafficRuling.REFUSE, validation=make_validation(outcome=Outcome.BROKEN)
    )
    plain = make_method("none", saved=0.0, ruling=TrafficRuling.UNDECIDED)
    text = str(make_traffic(ruling=TrafficRuling.UNDECIDED, missing=("more steps",), methods=(plain, broken)))
    assert "missing: more steps" in text
    assert "BROKEN" in text
    assert "if under 90% is hidden" in text


Told = tuple[list[dict[str, Any]], Path]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    path = tmp_path_factory.mktemp("traffic") / "traffic.json"
    return launch(2, "ranks.small_models:ask_for_traffic", str(path)), path


def test_one_rank_prints_for_all(told: Told):
    (first, second), _ = told
    assert (first["code"], second["code"]) == (0, 0), first["stderr"] + second["stderr"]
    assert first["stdout"].count("Gradient traffic of Sequential, 2 ranks on cpu (gloo)") == 1
    assert "a stream of 30 batches" in first["stdout"]
    assert second["stdout"] == ""


def test_what_it_saves_has_both_ways_to_send(told: Told):
    _, path = told
    found = from_json(path.read_bytes())
    assert isinstance(found, Traffic)
    assert [method.method for method in found.methods] == ["none", "topk:1%"]
    # Two steps are no training: a method that saves time is validated, whatever comes of it; one that saves none is refused.
    assert found.methods[1].validation is not None or found.methods[1].ruling is TrafficRuling.REFUSE
