"""Whatever a user gets wrong: one error that says what was found, why, and what to do, and nothing of theirs is changed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import plimsoll
from plimsoll import errors
from plimsoll.artifacts.plan import Plan
from plimsoll.planning.strategies import refuse_unknown_ops
from plimsoll.tracing.torch_internals import existing_ops
from plimsoll.units import GIB, MIB
from steps import CheckpointedStack, Stack, Step, llama, mean_square, stack
from unchanged import unchanged


def trained(model: nn.Module, batch: Any, loss: Any) -> torch.optim.Optimizer:
    """An optimizer that has state, and a model that has gradients: as in the middle of a training."""
    optimizer = torch.optim.AdamW(model.parameters())
    output = model(**batch) if isinstance(batch, dict) else model(batch)
    (output.loss if loss is None else loss(output)).backward()
    optimizer.step()
    return optimizer


def assert_refused(error: errors.PlimsollError, *parts: str) -> None:
    """Found, why and next are each there and say something; ``parts`` are in the text."""
    for text in (error.found, error.why, error.next):
        assert text
        assert "\n" not in text
    for part in parts:
        assert part in str(error)


@pytest.fixture(scope="module")
def plan() -> Plan:
    model, batch, loss = stack()
    return plimsoll.plan(model, batch, loss=loss, strategy="full")


Options = dict[str, Any]
OPTIONS: dict[type[errors.PlimsollError], list[tuple[Options, str]]] = {
    errors.InvalidBudget: [
        ({"budget": budget}, part)
        for budget, part in (
            ("24G", "24GiB"),
            ("abc", "not a number"),
            ("24", "does not have a unit"),
            (0, "positive"),
            (-5, "positive"),
            (2.5, "float"),
            (True, "bool"),
        )
    ],
    errors.BudgetAboveDevice: [({"budget": 10**6 * GIB}, 'budget="auto"')],
    errors.BudgetBelowFloor: [({"budget": 100_000}, "an optimizer with less state (SGD, an 8-bit Adam)")],
    errors.InvalidRegions: [
        ({"regions": patterns}, "") for patterns in (["layers.*"], "layers.*", [], ["blocks.0", "blocks.7"])
    ],
    errors.InvalidStrategy: [
        *(({"strategy": strategy}, "every:2") for strategy in ("best", "every:0", "every:x", "")),
        *(({"strategy": strategy}, "attention") for strategy in ("selective:", "selective:sorcery")),
    ],
    errors.UnknownDevice: [({"device_profile": "H900"}, "H100-SXM")],
    errors.InvalidModel: [
        ({"optimizer": optimizer}, "optimizer")
        for optimizer in ("adamw", torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    ],
}


@pytest.mark.parametrize(("kind", "options", "part"), [(kind, *row) for kind, rows in OPTIONS.items() for row in rows])
def test_an_option_that_cannot_be_is_refused_with_the_model_unchanged(kind: type, options: Options, part: str):
    model, batch, loss = stack()
    optimizer = trained(model, batch, loss)
    with unchanged(model, optimizer), pytest.raises(kind) as caught:
        plimsoll.plan(model, batch, loss=loss, **{"optimizer": optimizer} | options)
    assert_refused(caught.value, part)


class Untraceable(nn.Sequential):
    """Fails if it is run."""

    def forward(self, *_: Any) -> torch.Tensor:
        raise AssertionError("the model ran")


NAMES = [
    ({"strategy": "selective:sorcery"}, "not an op of torch"),
    ({"strategy": "selective:core+sorcery"}, "not an op of torch"),
    ({"strategy": "selective:mm,sorcery"}, "not an op of torch"),
    ({"overrides": ["sorcery.*=keep"]}, "'sorcery.'"),
    ({"overrides": ["*.sorcery::mm=keep"]}, "'sorcery'"),
    ({"overrides": ["0.*.sorcery.*=keep"]}, "'sorcery'"),
]


@pytest.mark.parametrize(("options", "part"), NAMES)
def test_a_name_that_no_trace_could_contain_is_refused_before_the_model_runs(options: Options, part: str):
    model, batch = Untraceable(nn.Linear(2, 2)), torch.ones(2, 2)
    verbs = [lambda: plimsoll.plan(model, batch, **options)]
    if "overrides" in options:
        verbs.append(lambda: plimsoll.attach(model, "1GiB", **options))
    else:
        verbs += [
            lambda: plimsoll.compare(model, batch, [options["strategy"]]),
            lambda: plimsoll.explain(model, batch, strategy=options["strategy"]),
        ]
    for verb in verbs:
        with pytest.raises(errors.InvalidStrategy) as caught:
            verb()
        assert_refused(caught.value, part)


def test_ops_of_other_libraries_and_short_names_are_not_refused_before_the_trace():
    for strategy in ("selective:sdpa", "selective:mylib.scan", "selective:mm/2,addmm", "selective:core+mlp", "every:2"):
        refuse_unknown_ops(strategy, existing_ops())


@pytest.mark.long
def test_a_budget_below_the_floor_names_a_budget_that_works():
    """What the plan with the lowest peak takes beyond its prediction is known before it is named."""
    model, batch, loss = stack()
    with pytest.raises(errors.BudgetBelowFloor) as caught:
        plimsoll.plan(model, batch, 100_000, loss=loss)
    assert caught.value.exit_code == 3
    made = plimsoll.plan(model, batch, caught.value.next.split('"')[1], loss=loss)
    receipt = plimsoll.verify(model, batch, made, loss=loss, steps=1)
    assert receipt.verdict.is_pass
    assert not receipt.is_over_budget


def raising(output: Any) -> torch.Tensor:
    raise KeyError("labels")


def none(*_: Any) -> None:
    return None


STEPS: dict[str, tuple[Callable[[], Step], type[errors.PlimsollError], str]] = {
    "no parameters": (lambda: (nn.ReLU(), torch.ones(2), torch.sum), errors.InvalidModel, "does not have parameters"),
    "no module": (lambda: (len, torch.ones(2), torch.sum), errors.InvalidModel, "not a torch.nn.Module"),
    "frozen": (
        lambda: (stack()[0].requires_grad_(False), torch.ones(2, 32), torch.sum),
        errors.InvalidModel,
        "unfreeze",
    ),
    "no scalar, no loss": (lambda: (*stack()[:2], None), errors.InvalidLoss, "(48, 32)"),
    "a loss that is no scalar": (lambda: (*stack()[:2], torch.abs), errors.InvalidLoss, "loss= returned"),
    "a loss that returns nothing": (lambda: (*stack()[:2], none), errors.InvalidLoss, "NoneType"),
    "a loss that raises": (lambda: (*stack()[:2], raising), errors.InvalidLoss, "KeyError: 'labels'"),
    "a loss that is no function": (lambda: (*stack()[:2], 3), errors.InvalidLoss, "int"),
    "a loss without gradient": (lambda: (*stack()[:2], lambda y: y.detach().sum()), errors.InvalidLoss, "gradient"),
    "a batch elsewhere": (
        lambda: (stack()[0], torch.ones(2, 32, device="meta"), mean_square),
        errors.InvalidBatch,
        "batch.to('cpu')",
    ),
    "a batch of another width": (lambda: (stack()[0], torch.ones(2, 31), mean_square), errors.InvalidBatch, "31"),
    "a batch of another dtype": (
        lambda: (stack()[0], torch.ones(2, 32, dtype=torch.bfloat16), mean_square),
        errors.InvalidBatch,
        "dtype",
    ),
    "a batch in a list": (lambda: (stack()[0], [torch.ones(2, 32)], mean_square), errors.InvalidBatch, "a tuple"),
    "a word too many": (lambda: (stack()[0], {"y": torch.ones(2, 32)}, mean_square), errors.InvalidBatch, "'y'"),
}


@pytest.mark.parametrize("what", STEPS)
def test_a_step_that_cannot_run_is_refused_with_the_model_unchanged(what: str):
    build, kind, part = STEPS[what]
    model, batch, loss = build()
    watched = model if isinstance(model, nn.Module) else nn.Linear(1, 1)
    watched.register_buffer("mark", torch.ones(1))
    for parameter in watched.parameters():
        parameter.grad = torch.ones_like(parameter)
    with unchanged(watched), pytest.raises(kind) as caught:
        plimsoll.plan(model, batch, loss=loss)
    assert_refused(caught.value, part)
    with unchanged(watched), pytest.raises(kind):
        plimsoll.compare(model, batch, loss=loss)


def test_a_model_without_repeated_blocks_is_planned_as_a_whole():
    model = nn.Linear(16, 16)
    made = plimsoll.plan(model, torch.ones(4, 16), "1MiB", loss=mean_square)
    assert made.status.is_usable
    assert plimsoll.verify(model, torch.ones(4, 16), made, loss=mean_square, steps=1).verdict.is_pass


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_model_that_checkpoints_by_hand_is_refused(is_reentrant: bool):
    model = CheckpointedStack()
    model.is_reentrant = is_reentrant
    with unchanged(model), pytest.raises(errors.InvalidModel) as caught:
        plimsoll.plan(model, torch.ones(4, 32, requires_grad=True), loss=mean_square)
    assert_refused(caught.value, "already checkpoints blocks.", "torch.utils.checkpoint")


def test_a_transformers_model_that_checkpoints_is_refused():
    model, batch, _ = llama()
    enable_checkpointing(model)
    with unchanged(model), pytest.raises(errors.InvalidModel) as caught:
        plimsoll.plan(model, batch)
    assert_refused(caught.value, "already checkpoints model.layers.0", "gradient_checkpointing_disable")


def enable_checkpointing(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.gradient_checkpointing_enable()


def gradients(model: nn.Module, batch: Any, loss: Any) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model.zero_grad()
    output = model(**batch) if isinstance(batch, dict) else model(batch)
    (output.loss if loss is None else loss(output)).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_checkpointing_switched_on_after_planning_leaves_gradients_right():
    model = CheckpointedStack()
    model.is_on = False
    batch = torch.randn(8, 32, requires_grad=True)
    made = plimsoll.plan(model, batch, loss=mean_square, strategy="full")
    expected = gradients(model, batch, mean_square)
    for is_reentrant in (False, True):
        model.is_reentrant = is_reentrant
        with plimsoll.apply(model, made):
            for is_on in (False, True, True, False):
                model.is_on = is_on
                assert all(map(torch.equal, expected, gradients(model, batch, mean_square)))


def test_checkpointing_of_transformers_after_planning_leaves_gradients_right():
    model, batch, loss = llama()
    made = plimsoll.plan(model, batch, strategy="full")
    expected = gradients(model, batch, loss)
    enable_checkpointing(model)
    with plimsoll.apply(model, made):
        for _ in range(2):
            assert all(map(torch.equal, expected, gradients(model, batch, loss)))


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "more blocks": lambda: Stack(4),
    "another width": lambda: Stack(3, 16),
    "another dtype": lambda: Stack().bfloat16(),
    "another class": lambda: nn.Linear(32, 32),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_plan_for_another_model_is_refused(what: str, plan: Plan):
    model = OTHERS[what]()
    with unchanged(model), pytest.raises(errors.PlanMismatch) as caught:
        plimsoll.apply(model, plan)
    assert_refused(caught.value, plan.fingerprint, "plan this model")


def test_a_plan_for_another_step_is_not_verified(plan: Plan):
    model, batch, loss = stack()
    steps: list[tuple[Any, Any, bool]] = [(batch[:5], loss, True), (batch, torch.sum, True), (batch, loss, False)]
    for other, its_loss, is_training in steps:
        model.train(is_training)
        with unchanged(model), pytest.raises(errors.PlanMismatch) as caught:
            plimsoll.verify(model, other, plan, loss=its_loss)
        assert_refused(caught.value, plan.signature)
    with torch.autocast("cpu"), pytest.raises(errors.PlanMismatch, match="autocast"):
        plimsoll.verify(model.train(), batch, plan, loss=loss)


@pytest.mark.parametrize("written", ["ds_id", "_hp_mapping"])
def test_what_deepspeed_trains_without_an_engine_in_view_is_refused(written: str):
    model, batch, loss = stack()
    setattr(next(model.parameters()), written, 0)
    with pytest.raises(errors.InvalidModel, match="ZeRO"):
        plimsoll.plan(model, batch, loss=loss)
    with plimsoll.attach(model, MIB), pytest.raises(errors.InvalidModel, match="ZeRO"):
        model(batch)


def test_what_is_no_plan_cannot_be_applied(plan: Plan):
    model, batch, loss = stack()
    for thing in ("plan.json", None, 3):
        with unchanged(model), pytest.raises(errors.PlanNotUsable) as caught:
            plimsoll.apply(model, thing)
        assert_refused(caught.value, "plimsoll.")
    for thing in ("plan.json", 3):  # without a plan, what the model does by itself is verified
        with unchanged(model), pytest.raises(errors.PlanNotUsable):
            plimsoll.verify(model, batch, thing, loss=loss)


def test_a_managed_model_is_neither_planned_nor_managed_again(plan: Plan):
    model, batch, loss = stack()
    with plimsoll.apply(model, plan), unchanged(model):
        with pytest.raises(errors.PlanMismatch, match="A plan already manages"):
            plimsoll.apply(model, plan)
        for attempt in (
            lambda: plimsoll.plan(model, batch, loss=loss),
            lambda: plimsoll.compare(model, batch, loss=loss),
            lambda: plimsoll.verify(model, batch, plan, loss=loss),
            lambda: plimsoll.attach(model, MIB),
        ):
            with pytest.raises(errors.InvalidModel, match=r"handle\.remove"):
                attempt()


def test_planning_where_gradients_are_off_is_refused():
    model, batch, loss = stack()
    with torch.no_grad(), unchanged(model), pytest.raises(errors.TracingFailed) as caught:
        plimsoll.plan(model, batch, loss=loss)
    assert_refused(caught.value)


def test_nothing_can_be_measured_on_the_meta_device(plan: Plan):
    model = Stack().to("meta")
    batch = torch.ones(48, 32, device="meta")
    assert plimsoll.plan(model, batch, MIB, loss=mean_square).status.is_usable
    for attempt in (
        lambda: plimsoll.verify(model, batch, plan, loss=mean_square),
        lambda: plimsoll.compare(model, batch, loss=mean_square),
    ):
        with pytest.raises(errors.InvalidModel) as caught:
            attempt()
        assert_refused(caught.value, "meta")


def test_measuring_inside_a_profiler_is_refused_and_the_profile_kept(plan: Plan):
    model, batch, loss = stack()
    with torch.profiler.profile() as profiler:
        for attempt in (
            lambda: plimsoll.plan(model, batch, loss=loss),
            lambda: plimsoll.compare(model, batch, loss=loss),
            lambda: plimsoll.verify(model, batch, plan, loss=loss),
        ):
            with pytest.raises(errors.TracingFailed, match="profiler"):
                attempt()
        model(batch)
    assert any("mm" in event.key for event in profiler.key_averages())


def test_a_batch_with_a_past_is_not_run_back_into():
    model, _, loss = stack()
    encoder = nn.Linear(8, 32)
    batch = encoder(torch.randn(48, 8))
    with unchanged(encoder):
        made = plimsoll.plan(model, batch, MIB, loss=loss)
        assert plimsoll.verify(model, batch, made, loss=loss, steps=1).verdict.is_pass
        assert plimsoll.compare(model, batch, "full", loss=loss, steps=1).exit_code == 0
    loss(model(batch)).backward()
    assert encoder.weight.grad is not None


@pytest.mark.long
def test_right_input_leaves_everything_unchanged_too(plan: Plan):
    model, batch, loss = stack()
    optimizer = trained(model, batch, loss)
    kept = copy.deepcopy(batch)
    stepped: list[torch.Tensor] = []  # by an optimizer that steps in backward
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(stepped.append)
    with unchanged(model, optimizer):
        made = plimsoll.plan(model, batch, "auto", loss=loss, optimizer=optimizer, regions="blocks.*")
        plimsoll.verify(model, batch, made, loss=loss, optimizer=optimizer, steps=1)
        plimsoll.compare(model, batch, ["full", "auto", "full"], budget=MIB, loss=loss, optimizer=optimizer, steps=1)
        with plimsoll.apply(model, plan):
            pass
        handle = plimsoll.attach(model, "8MiB")
        handle.remove()
        handle.remove()
    assert torch.equal(kept, batch)
    assert not stepped
    loss(model(batch)).backward()
    assert len(stepped) == len(list(model.parameters()))
