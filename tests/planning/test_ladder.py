"""What a plan takes at shapes that were never traced, held against the step really traced there: equal to the byte."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import zoo
from long_cases import all_but
from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.trace import Trace
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.roofline import roofline_costs
from plimsoll.planning.family import Family
from plimsoll.planning.ladder import Ladder, rungs_of
from plimsoll.planning.peaks import ShapedStep
from plimsoll.planning.simulate import choices_of, run_choices
from plimsoll.planning.solve import Planner
from plimsoll.planning.step import StepIndex
from plimsoll.tracing.trace import trace
from steps import Net


def messages() -> Net:
    """One layer of a graph network: every node adds up what its neighbours send."""

    def pass_on(net: Net, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        sent = torch.nn.functional.gelu(net.send(net.norm(nodes)))[edges[0]]
        return nodes + torch.nn.functional.gelu(net.take(torch.zeros_like(nodes).index_add(0, edges[1], sent)))

    return Net(pass_on, norm=nn.LayerNorm(8), send=nn.Linear(8, 8), take=nn.Linear(8, 8))


def graph() -> Net:
    def run(net: Net, nodes: torch.Tensor, edges: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in net.layers:
            nodes = layer(nodes, edges)
        return {"loss": nodes.square().mean()}

    return Net(run, layers=nn.ModuleList(messages() for _ in range(3)))


STREAMS = {
    "llama": (lambda: zoo.build("llama"), lambda s: zoo.words(tokens=s), [(9,), (17,), (26,)], [(40,), (12,)]),
    "rows": (lambda: zoo.build("llama"), zoo.words, [(2, 9), (3, 17), (5, 26)], [(4, 40), (7, 8)]),
    "two lengths": (
        lambda: zoo.build("t5", decoder_start_token_id=0, num_layers=1),
        lambda e, d: {"input_ids": zoo.words(tokens=e)["input_ids"], "labels": zoo.words(tokens=d)["labels"]},
        [(9, 30), (17, 12), (26, 20)],
        [(40, 33), (12, 50)],
    ),
    "graph": (
        graph,
        lambda nodes, edges: {"nodes": torch.randn(nodes, 8), "edges": torch.randint(0, nodes, (2, edges))},
        [(20, 50), (30, 240), (50, 150)],
        [(60, 400)],
    ),
}


def _costs(step: Trace) -> Costs:
    return roofline_costs(step, find_device("CPU"))


@pytest.fixture(scope="module", params=all_but(STREAMS, "graph"))
def stream(request) -> tuple[Ladder, dict[tuple[int, ...], Trace]]:
    """A ladder made of a few shapes, and the steps at these and at others."""
    build, batch, known, held_out = STREAMS[request.param]
    model = build()
    steps = {shape: trace(model, batch(*shape), device_name="CPU") for shape in (*known, *held_out)}
    family = Family({shape: steps[shape] for shape in known})
    assert not family.strays
    plans = rungs_of(Planner(StepIndex(steps[max(known)], _costs(steps[max(known)]))))
    return Ladder(ShapedStep(family, {shape: _costs(steps[shape]) for shape in known}), plans), steps


def test_the_peak_of_every_rung_at_a_held_out_shape_is_that_of_the_step_traced_there(stream):
    ladder, steps = stream
    assert len(ladder.rungs) > 3
    for shape, step in steps.items():
        assert ladder.step.family.knows(shape)
        index = StepIndex(step, _costs(step))
        for rung, forecast in zip(ladder.rungs, ladder.at(shape), strict=True):
            simulated = run_choices(index, choices_of(index, rung.plan.regions))
            assert forecast.peak_bytes == simulated.peak_bytes
            assert forecast.forward_bytes == simulated.curve[index.handover] - simulated.curve[0]
            assert forecast.seconds == pytest.approx(simulated.seconds, rel=0.2)


def test_a_batch_takes_the_cheapest_rung_that_fits_and_drops_more_as_room_shrinks(stream):
    ladder, steps = stream
    for shape in steps:
        peaks = sorted(each.peak_bytes for each in ladder.at(shape))
        assert ladder.lowest(shape)[1].peak_bytes == peaks[0]
        assert ladder.cheapest(shape, peaks[0] - 1) is None
        seconds = []
        for room in peaks:
            _, forecast = ladder.cheapest(shape, room)
            assert forecast.peak_bytes <= room
            seconds.append(forecast.seconds)
        assert all(a >= b for a, b in itertools.pairwise(seconds))
        assert ladder.cheapest(shape, peaks[-1])[0].regions == ladder.rungs[0].plan.regions
