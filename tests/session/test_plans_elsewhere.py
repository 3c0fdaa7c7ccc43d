"""A plan warns once, with numbers, on another device or another step than its own. On its own it does not."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import plimsoll
from plimsoll.artifacts.plan import Plan
from plimsoll.engine.unmet_names import UnmetNames
from steps import Net, Stack, mean_square
from tracing import zoo

DEVICE, NAMES = "was made for H100", "decides about"


def said(run: Callable[[], Any]) -> list[str]:
    """What ``run`` has warned of plans."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught if "plimsoll: th" in str(each.message)]


def train(model: nn.Module, plan: Plan, batch: Any, steps: int = 3) -> list[str]:
    """What is said when the plan is applied and the model trained."""

    def run() -> None:
        with plimsoll.apply(model, plan):
            for _ in range(steps):
                out = model(**batch).loss if isinstance(batch, dict) else mean_square(model(batch))
                out.backward()
                model.zero_grad()

    return said(run)


@pytest.mark.long
def test_a_gpus_plan_on_a_cpu_warns_of_the_device_and_then_of_its_names_once_each():
    model, batch = zoo.ALL["llama"]()
    plan = plimsoll.plan(model, batch, strategy="full", device_profile="H100-SXM")
    first, second = train(model, msgspec.structs.replace(plan, budget_bytes=31_981_568), batch)
    assert "this plan was made for H100-SXM, and the model is on cpu" in first
    assert "budget of 30.5 MiB" in first
    assert "tensors that this step does not save" in second
    assert "more than the budget of 30.5 MiB" in second
    assert re.search(r"[0-9.]+ KiB under other names", second)


@pytest.mark.long
def test_a_plan_on_its_own_device_and_step_says_nothing():
    for name in ("llama", "gpt2", "vit", "t5"):
        model, batch = zoo.ALL[name]()
        assert train(model, plimsoll.plan(model, batch, strategy="full"), batch) == []


def test_a_plan_for_another_gpu_of_the_catalogue_warns_and_one_for_the_same_does_not(monkeypatch):
    from plimsoll.session import manage

    plan = plimsoll.plan(Stack(1), torch.randn(4, 32), strategy="full", loss=mean_square, device_profile="H100-SXM")
    model = Net(lambda net, x: x)
    model.parameters = lambda: iter([type("Parameter", (), {"device": torch.device("cuda", 0)})])  # type: ignore[assignment]
    for name, count in (("NVIDIA H100 80GB HBM3", 0), ("NVIDIA A100-SXM4-80GB", 1), ("A card of tomorrow", 0)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        found = said(lambda: manage.warn_of_other_device(model, plan))
        assert len(found) == count, (name, found)
    measured = msgspec.structs.replace(plan, device="cuda:0")
    assert said(lambda: manage.warn_of_other_device(model, measured)) == []


class Switched(nn.Module):
    """A block whose Python takes another way from the outside."""

    way = "full"

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.line(x)
        if self.way == "skip":
            return x + y
        if self.way == "other":
            return x + y.sigmoid().square().cos()
        return x + y.tanh().exp().sin()


@pytest.fixture
def switched() -> Any:
    torch.manual_seed(0)
    model = Stack(0)
    model.blocks = nn.ModuleList(Switched() for _ in range(2))
    yield model
    Switched.way = "full"


def test_a_call_that_makes_other_values_warns_and_one_that_makes_fewer_does_not(switched):
    batch = torch.randn(64, 32)
    plan = plimsoll.plan(switched, batch, strategy="full", loss=mean_square)
    assert train(switched, plan, batch) == []
    Switched.way = "skip"
    assert train(switched, plan, batch) == []
    Switched.way = "other"
    (found,) = train(switched, plan, batch)
    assert "'tanh#0' of region 'blocks.0'" in found or "'exp#0' of region 'blocks.0'" in found
    assert "32.0 KiB under other names" in found  # two of 8 KiB in either block
    assert "f32[64x32]" in found


def test_evaluation_and_smaller_batches_are_no_cause_for_a_warning(switched):
    batch = torch.randn(64, 32)
    plan = plimsoll.plan(switched, batch, strategy="full", loss=mean_square)

    def run() -> None:
        with plimsoll.apply(switched, plan):
            for rows in (64, 32, 16):
                mean_square(switched(batch[:rows])).backward()
            with torch.no_grad():
                switched(batch)
            mean_square(switched.eval()(batch)).backward()

    assert said(run) == []


def test_what_was_said_once_is_not_noted_again(switched):
    batch = torch.randn(64, 32)
    plan = plimsoll.plan(switched, batch, strategy="full", loss=mean_square)
    graph = None
    unmet = UnmetNames()
    with plimsoll.apply(switched, plan) as handle:
        Switched.way = "other"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mean_square(switched(batch)).backward()
        service = next(iter(handle.regions["blocks.0"].services.values()))
        graph = service.program.plan.graph
    for _ in range(2):
        unmet.note(plan.regions[0], graph)
    assert len(said(lambda: unmet.say(plan))) == 1
    unmet.note(plan.regions[1], graph)
    assert said(lambda: unmet.say(plan)) == []
