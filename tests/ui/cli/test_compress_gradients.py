"""``plimsoll compress-gradients``: what it prints on two ranks, and how its file is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launching import launch
from plimsoll.artifacts.store import from_json, load_any
from plimsoll.artifacts.traffic import Traffic
from traffic_samples import make_method, make_traffic


def test_a_saved_traffic_comes_back_exactly_and_is_shown(run):
    traffic = make_traffic()
    traffic.save("traffic.json")
    assert load_any("traffic.json") == traffic
    shown = run("show", "traffic.json").out
    for part in (
        "powersgd:4 saves most time",
        "1 Gbit/s",
        "predicted for this link",
        "20.0% (19.0% to 21.0%)",
        "3 parts",
    ):
        assert part in shown
    [header] = [line.split("  ") for line in shown.splitlines() if line.split()[:1] == ["method"]]
    names = [name.strip() for name in header if name.strip()]
    assert names == ["method", "sent", "encode, decode", "predicted", "saves", "measured", "saves (95%)", "error"]


def test_the_method_that_saves_most_for_certain_is_the_fastest():
    slow, fast = make_method("topk:1%", saved=0.05), make_method("powersgd:4", saved=0.2)
    assert make_traffic(slow, fast).fastest == "powersgd:4"


def test_a_method_that_may_save_less_than_two_percent_is_not_taken():
    traffic = make_traffic(make_method("topk:1%", saved=0.025))  # 1.5% to 3.5%
    assert traffic.fastest == "none"
    assert "do not compress" in str(traffic)


def test_on_a_link_that_is_not_here_the_prediction_decides():
    method = make_method("topk:1%", saved=-0.5, predicted=0.4)
    assert make_traffic(method).fastest == "none"
    traffic = make_traffic(method, assumed_bytes_per_second=12.5e6)
    assert traffic.fastest == "topk:1%"
    assert "predicted for 100 Mbit/s" in str(traffic)


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


def test_what_it_saves_has_both_ways_to_send_on_the_given_link(told: Told):
    _, path = told
    found = from_json(path.read_bytes())
    assert isinstance(found, Traffic)
    assert [method.method for method in found.methods] == ["none", "topk:1%"]
    assert found.assumed_bytes_per_second == 1.25e6
