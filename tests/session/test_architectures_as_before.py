"""The law of trial steps: planning, verifying, applying, attaching and removing leave every module of any model unchanged.

Compared over the zoo, over extra outputs (states, attentions, router logits, caches) and over what users
put on modules (hooks of every kind, weight norm, parametrizations), before or by the model's first call. Afterwards every
attribute, part, hook and class is the same object, and the next step equals an untouched twin's in every bit.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import plimsoll
import zoo
from as_before import Step, changed, differing, outline, read, stepped, structure
from fittings import ALL, FITTINGS, fit, fit_in_first_call
from long_cases import some
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.receipt import ReceiptVerdict
from plimsoll.errors import BudgetBelowFloor

pytestmark = pytest.mark.filterwarnings("ignore")

EVERY_CASE = "PLIMSOLL_EVERY_SHAPE" in os.environ
"""The whole product, which takes hours. By default each architecture has one case of each test, and another than the others."""
ARCHITECTURES = (*zoo.SPECIES, *zoo.OTHERS)
STEPS, RATE = 3, 1e-3
PLACED = {"before": fit, "in the first call": fit_in_first_call}


class Case(NamedTuple):
    """An architecture, what its call asks for, what users have put on it and when."""

    name: str
    extras: tuple[str, ...]
    fitting: str | None
    placed: str

    def __str__(self) -> str:
        fitted = "bare" if self.fitting is None else f"{self.fitting} {self.placed}"
        return f"{self.name}, {' and '.join(self.extras) or 'nothing more'}, {fitted}"

    def make(self) -> tuple[nn.Module, dict[str, Any]]:
        """A new model that was never called, and its call."""
        model, call = zoo.sample(self.name, self.extras)
        if self.fitting is not None:
            PLACED[self.placed](model, self.fitting)
        return model, call


def asked(name: str) -> list[tuple[str, ...]]:
    """No extra output, each extra output that the architecture has, and all of them."""
    extras = zoo.extras(name)
    return [(), *((each,) for each in extras), *((extras,) if len(extras) > 1 else ())]


def cases_of(name: str) -> list[Case]:
    """All that a call can ask for, bare and with everything on; and each single thing, where the call asks for all."""
    found = [Case(name, extras, None, "before") for extras in asked(name)]
    for placed in PLACED:
        found += [Case(name, extras, ALL, placed) for extras in asked(name)]
        found += [Case(name, asked(name)[-1], fitting, placed) for fitting in FITTINGS]
    return found


@functools.lru_cache(maxsize=2)
def plan_of(case: Case) -> Plan:
    """Made with a twin."""
    model, call = case.make()
    return plimsoll.plan(model, call, strategy="full", loss=read)


def plans(case: Case, model: nn.Module, call: dict[str, Any]) -> None:
    plimsoll.plan(model, call, strategy="full", loss=read)


def fails_to_plan(case: Case, model: nn.Module, call: dict[str, Any]) -> None:
    with pytest.raises(BudgetBelowFloor):
        plimsoll.plan(model, call, "1KiB", loss=read)


def applies(case: Case, model: nn.Module, call: dict[str, Any]) -> None:
    plimsoll.apply(model, plan_of(case)).remove()


def verifies(case: Case, model: nn.Module, call: dict[str, Any]) -> None:
    receipt = plimsoll.verify(model, call, plan_of(case), loss=read)
    assert receipt.verdict in (ReceiptVerdict.VERIFIED, ReceiptVerdict.OVER_PREDICTION)  # these models are tiny


def attaches(case: Case, model: nn.Module, call: dict[str, Any]) -> None:
    plimsoll.attach(model, "1GiB").remove()


def trains_applied(case: Case, model: nn.Module, call: dict[str, Any]) -> list[Step]:
    with plimsoll.apply(model, plan_of(case)):
        return [stepped(model, call, read, rate=RATE) for _ in range(STEPS)]


def trains_attached(case: Case, model: nn.Module, call: dict[str, Any]) -> list[Step]:
    with plimsoll.attach(model, "1GiB"):
        return [stepped(model, call, read, rate=RATE) for _ in range(STEPS)]


QUIET: tuple[Callable[[Case, nn.Module, dict[str, Any]], None], ...] = (
    plans,
    fails_to_plan,
    applies,
    verifies,
    attaches,
)
"""What leaves a model as if it had not been called."""
TRAINING = (trains_applied, trains_attached)


@pytest.fixture(autouse=True, scope="module")
def _without_what_was_imported() -> None:
    """Meters look through all objects in every plan, and need not see half a million of the architectures' modules."""
    for name in ARCHITECTURES:
        zoo.build(name)
    gc.collect()
    gc.freeze()


def samples(works: tuple[Any, ...], first: int) -> list[Any]:
    """Pairs of a case and what is done with it: all of them, or one for each architecture whose call asks for everything.

    By default two tests together meet everything that users put on, each in both ways.
    """
    found = []
    for place, name in enumerate(ARCHITECTURES, first):
        cases, done = cases_of(name), works
        if not EVERY_CASE:
            rich = [case for case in cases if case.extras == asked(name)[-1]]
            cases, done = [rich[5 * place % len(rich)]], (works[place % len(works)],)
        found += [pytest.param(case, work, id=f"{case}, {work.__name__}") for case in cases for work in done]
    return found


@pytest.mark.parametrize(("case", "work"), some(samples(QUIET, 0), 2))
def test_a_model_is_as_before(case: Case, work: Callable[..., None]) -> None:
    (plain, call), (model, _) = case.make(), case.make()
    before = structure(model)
    work(case, model, call)
    assert changed(before, structure(model)) == []
    expected = [stepped(plain, call, read, rate=RATE) for _ in range(2)]
    assert [differing(stepped(model, call, read, rate=RATE), each) for each in expected] == [[], []]
    assert changed(outline(plain), outline(model)) == []


@pytest.mark.parametrize(("case", "work"), some(samples(TRAINING, len(ARCHITECTURES)), 2))
def test_managed_steps_are_those_of_a_plain_model_and_leave_the_same_behind(
    case: Case, work: Callable[..., list[Step]]
) -> None:
    (plain, call), (model, _) = case.make(), case.make()
    expected = [stepped(plain, call, read, rate=RATE) for _ in range(STEPS + 1)]
    found = [*work(case, model, call), stepped(model, call, read, rate=RATE)]
    assert [differing(one, other) for one, other in zip(found, expected, strict=True)] == [[]] * len(found)
    assert changed(outline(plain), outline(model)) == []
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("name", some(ARCHITECTURES, 9))
def test_the_zoo_knows_what_an_architecture_can_return(name: str) -> None:
    def counts(*extras: str) -> Any:
        model, call = zoo.sample(name, extras)
        return stepped(model, call, read)[1]

    plain = counts()
    known = {extra for extra in zoo.EXTRAS if counts(extra) != plain}
    assert known == set(zoo.extras(name))
