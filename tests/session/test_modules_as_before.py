"""Trial steps leave every module unchanged where its first call registers something behind a flag, and the plan stays.

The flag and what was registered must be put back together. `test_architectures_as_before.py` does this with real models.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, weight_norm

import plimsoll
from as_before import changed, differing, outline, stepped, structure
from contracts.harness import Block, Stack, batch, plain_step, weigh
from long_cases import some
from plimsoll.artifacts.receipt import ReceiptVerdict
from plimsoll.errors import BudgetBelowFloor
from plimsoll.tracing.recorder.untouched import KeptState

pytestmark = pytest.mark.filterwarnings("ignore")


class Lazy(Block):
    """Puts something on a layer in its first call, behind a flag of its own."""

    def __init__(self, put):
        super().__init__(nn.Tanh())
        self.put, self.is_ready = put, False

    def forward(self, x):
        if not self.is_ready:
            self.put(next(each for each in self.modules() if isinstance(each, nn.Linear)))
            self.is_ready = True
        return super().forward(x)


class _Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def _one_shot(layer):
    handle = layer.register_forward_hook(lambda *_: handle.remove())


def _flag_on_a_parameter(layer):
    if not hasattr(layer.weight, "is_hooked"):
        layer.weight.register_hook(lambda gradient: 2 * gradient)
        layer.weight.is_hooked = True


def _other_class(layer):
    layer.__class__ = type("Another", (nn.Linear,), {})


def _other_parameter(layer):
    layer.bias = None


PUT = {
    "forward hook": lambda layer: layer.register_forward_hook(lambda module, given, output: 1.5 * output),
    "forward hooks with arguments, always called": lambda layer: layer.register_forward_hook(
        lambda module, args, kwargs, output: 1.5 * output, with_kwargs=True, always_call=True, prepend=True
    ),
    "forward pre-hook": lambda layer: layer.register_forward_pre_hook(
        lambda module, args, kwargs: ((1.5 * args[0],), kwargs), with_kwargs=True
    ),
    "full backward hook": lambda layer: layer.register_full_backward_hook(
        lambda module, given, returned: tuple(None if each is None else 2 * each for each in given)
    ),
    "full backward pre-hook": lambda layer: layer.register_full_backward_pre_hook(
        lambda module, returned: tuple(2 * each for each in returned)
    ),
    "hook of a parameter": lambda layer: layer.weight.register_hook(lambda gradient: 2 * gradient),
    "hook of a parameter, with its flag there": _flag_on_a_parameter,
    "hook after accumulating": lambda layer: layer.weight.register_post_accumulate_grad_hook(
        lambda parameter: setattr(parameter, "grad", 2 * parameter.grad)
    ),
    "state_dict hooks": lambda layer: layer.register_state_dict_pre_hook(lambda *_: None),
    "hook that takes itself off": _one_shot,
    "parametrization": lambda layer: parametrize.register_parametrization(layer, "weight", _Twice()),
    "weight norm": lambda layer: parametrizations.weight_norm(layer),
    "old weight norm": lambda layer: weight_norm(layer),
    "part": lambda layer: layer.add_module("late", nn.Identity()),
    "buffer": lambda layer: layer.register_buffer("late", torch.ones(2), persistent=False),
    "class": _other_class,
    "no bias any more": _other_parameter,
}


def lazy(put):
    torch.manual_seed(0)
    return Stack(Lazy(put), Lazy(put), Lazy(put))


def hooked():
    """Hooks of the user's own, weight norm and parametrizations, all there before."""
    torch.manual_seed(0)
    model = Stack(*(Block(nn.Tanh()) for _ in range(3)))
    first, second, third = (
        next(each for each in block.modules() if isinstance(each, nn.Linear)) for block in model.blocks
    )
    for name in ("forward hook", "full backward hook", "hook of a parameter", "parametrization"):
        PUT[name](first)
    PUT["weight norm"](second)
    PUT["old weight norm"](third)
    for _ in range(2):
        PUT["forward pre-hook"](model)
        PUT["forward hooks with arguments, always called"](model)
    return model


def plans(model, call, loss, make):
    return plimsoll.plan(model, call, strategy="full", loss=loss)


def fails(model, call, loss, make):
    with pytest.raises(BudgetBelowFloor):
        plimsoll.plan(model, call, "1KiB", loss=loss)


def applies(model, call, loss, make):
    plan = plimsoll.plan(make()[0], call, strategy="full", loss=loss)
    plimsoll.apply(model, plan).remove()


def verifies(model, call, loss, make):
    plan = plimsoll.plan(make()[0], call, strategy="full", loss=loss)
    receipt = plimsoll.verify(model, call, plan, loss=loss)
    assert receipt.verdict in (ReceiptVerdict.VERIFIED, ReceiptVerdict.OVER_PREDICTION)  # these models are tiny


def attaches(model, call, loss, make):
    plimsoll.attach(model, "1GiB").remove()


WORK = (plans, fails, applies, verifies, attaches)


def check(make, loss, work):
    plain, call = make()
    model, _ = make()
    before = structure(model)
    work(model, call, loss, make)
    assert changed(before, structure(model)) == []
    expected = stepped(plain, call, loss)
    assert differing(stepped(model, call, loss), expected) == []
    assert changed(outline(plain), outline(model)) == []


@pytest.mark.parametrize("name", some(PUT, 4))
def test_what_forward_registers_lazily_is_put_back_with_its_flag(name):
    check(lambda: (lazy(PUT[name]), batch(0)), weigh, plans)


@pytest.mark.parametrize("work", [verifies, fails])
@pytest.mark.parametrize(
    "name", some(["forward hook", "full backward hook", "hook of a parameter", "parametrization"], 1)
)
def test_whatever_runs_trial_steps_puts_lazily_registered_things_back(name, work):
    check(lambda: (lazy(PUT[name]), batch(0)), weigh, work)


@pytest.mark.parametrize("work", some(WORK, 2))
def test_hooks_and_parametrizations_that_were_there_stay_in_their_order(work):
    check(lambda: (hooked(), batch(0)), weigh, work)


def attached(model, call, loss):
    """The gradients of a first and a second step under a budget, and after it."""
    with plimsoll.attach(model, "1GiB"):
        steps = [stepped(model, call, loss), stepped(model, call, loss)]
    return [*steps, stepped(model, call, loss)]


def check_attached(make, loss):
    plain, call = make()
    model, _ = make()
    expected = [stepped(plain, call, loss) for _ in range(3)]
    found = attached(model, call, loss)
    assert [differing(one, other) for one, other in zip(found, expected, strict=True)] == [[], [], []]
    assert changed(outline(plain), outline(model)) == []


@pytest.mark.parametrize("name", some(PUT, 4))
def test_a_block_registers_lazily_in_its_first_managed_step(name):
    check_attached(lambda: (lazy(PUT[name]), batch(0)), weigh)


def test_a_plan_at_work_stays_where_hooks_that_a_step_has_registered_are_taken_off():
    model = lazy(PUT["forward hook"])
    before, plan = structure(model), plimsoll.plan(model, batch(0), strategy="full", loss=weigh)
    kept = KeptState(model)
    handle = plimsoll.apply(model, plan)
    at_work = structure(model)
    assert at_work != before
    PUT["forward pre-hook"](model)
    plain_step(model, 0)
    model.zero_grad()
    kept.put_back()
    assert structure(model) == at_work
    handle.remove()
    assert structure(model) == before


def test_a_step_that_ran_out_of_memory_registers_its_hooks_once():
    def trained(*, fails):
        model, failures = lazy(PUT["forward hook"]), [None] if fails else []

        def step():
            model.zero_grad()
            loss = plain_step(model, 0)
            if failures:
                failures.pop()
                raise torch.OutOfMemoryError
            return loss.detach()

        with plimsoll.attach(model, "1GiB") as handle:
            return [handle.step(step) for _ in range(2)], outline(model).keys(), hooks(model)

    def hooks(model):
        return [len(module._forward_hooks) for module in model.blocks.modules()]

    assert trained(fails=True) == trained(fails=False)
