"""Plans that step parameters in backward: a lower floor, the same weights, and words for loops that need all gradients."""

from __future__ import annotations

import copy
import logging
import re

import msgspec
import pytest
import torch
from torch import nn

import plimsoll
from plimsoll.artifacts.backward_steps import BackwardSteps
from plimsoll.artifacts.plan import Plan
from plimsoll.errors import (
    BudgetBelowFloor,
    InvalidOption,
    InvalidStrategy,
    PlanMismatch,
    PlanNotUsable,
    ReplayMismatch,
    SavedTensorModified,
)
from plimsoll.session.backward_steps import BackwardStepsAtWork
from plimsoll.session.options import PlanOptions
from plimsoll.session.step_planner import trace_task
from plimsoll.session.task import TrainingTask
from plimsoll.tracing.backward_steps import steppable_parameters
from plimsoll.tracing.meters.memory import PeakMeter, storage_bytes
from plimsoll.tracing.optimizer import present_states
from plimsoll.tracing.recorder.calling import output_tensors
from plimsoll.tracing.stepped_gradients import SteppedGradient

BOTH = ("recompute", "step-in-backward")
WIDTH, ROWS = 128, 192


class Model(nn.Module):
    """Blocks with a weight that the first and the last of them share (``is_tied``), and a part that odd batches skip."""

    def __init__(self, *, is_tied=False, skips=False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)
        )
        self.extra = nn.Linear(WIDTH, WIDTH) if skips else None
        if is_tied:
            self.blocks[3][0].weight = self.blocks[0][0].weight

    def forward(self, x, *, is_odd=False):
        for block in self.blocks:
            x = x + block(x)
        if self.extra is not None and not is_odd:
            x = x + self.extra(x)
        return x


def loss_of(output):
    return output.square().mean()


def batch(seed=0):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, lr=1e-3, **options)


def named_floor(refusal):
    """The budget in bytes that a refusal names."""
    return int(refusal.next.partition("(")[2].partition(" bytes")[0])


def refusal_of(make, allow, model=None):
    model = model or Model()
    with pytest.raises(BudgetBelowFloor) as refusal:
        plimsoll.plan(model, batch(), budget="64KiB", loss=loss_of, optimizer=make(model.parameters()), allow=allow)
    return refusal.value


def planned(make, share=1.02, model=None):
    """A plan for a budget little above the floor that needs steps in backward."""
    model = model or Model()
    floor = named_floor(refusal_of(make, BOTH, model))
    optimizer = make(model.parameters())
    return plimsoll.plan(model, batch(), int(share * floor), loss=loss_of, optimizer=optimizer, allow=BOTH)


def train(model, optimizer, steps, *, first=0, after_step=lambda: None):
    """Train as loops do, without a meter."""
    for step in range(first, first + steps):
        output = model(batch(step))
        loss_of(output).backward()
        del output
        optimizer.step()
        after_step()
        optimizer.zero_grad()


def measured_peak(model, optimizer, steps):
    """Train, and return the highest peak of all steps but the first, which is watched, and the second, which records."""
    peaks = []
    for step in range(steps):
        x = batch(step)
        held = [*model.parameters(), x, *output_tensors([list(present_states(optimizer).values())])]
        with PeakMeter(torch.device("cpu"), held=held) as meter:
            output = model(x)
            loss_of(output).backward()
            del output
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(storage_bytes(held, "cpu") + meter.peak_bytes)
    return max(peaks[2:])


def assert_same_training(model, optimizer, other, other_optimizer):
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        mine, theirs = optimizer.state.get(one, {}), other_optimizer.state.get(two, {})
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    places = {each: at for at, each in enumerate(model.parameters())}
    other_places = {each: at for at, each in enumerate(other.parameters())}
    assert [places[each] for each in optimizer.state] == [other_places[each] for each in other_optimizer.state]


@pytest.fixture(scope="module")
def floors():
    return named_floor(refusal_of(adamw, ("recompute",))), named_floor(refusal_of(adamw, BOTH))


@pytest.fixture(scope="module")
def plan(floors):
    model = Model()
    optimizer = adamw(model.parameters())
    return plimsoll.plan(model, batch(), int(1.02 * floors[1]), loss=loss_of, optimizer=optimizer, allow=BOTH)


# Planning


def test_the_floor_falls_by_nearly_half_of_the_gradients(floors):
    gradient_bytes = sum(each.nbytes for each in Model().parameters())
    assert floors[0] - floors[1] > 0.45 * gradient_bytes  # 128 KiB of them, and two temporaries of this size, stay


@pytest.mark.long
def test_a_refusal_names_the_floor_that_steps_in_backward_would_give(floors):
    refusal = refusal_of(adamw, ("recompute",))
    assert "allow=('recompute', 'step-in-backward')" in refusal.next
    assert "step-in-backward" not in refusal_of(adamw, BOTH).next


@pytest.mark.long
def test_the_predicted_peak_is_the_measured_one(plan):
    model = Model()
    optimizer = adamw(model.parameters())
    with plimsoll.apply(model, plan):
        peak_bytes = measured_peak(model, optimizer, 5)
    assert peak_bytes <= plan.budget_bytes
    assert abs(plan.predicted_peak_bytes - peak_bytes) <= 0.02 * peak_bytes


@pytest.mark.long
def test_nothing_is_stepped_in_backward_where_the_budget_does_not_need_it(floors):
    model = Model()
    optimizer = adamw(model.parameters())
    whole = plimsoll.plan(model, batch(), 2 * floors[0], loss=loss_of, optimizer=optimizer, allow=BOTH)
    assert whole.backward_steps is None


def test_plans_say_what_is_stepped_in_backward_and_survive_files(tmp_path, plan):
    steps = plan.backward_steps
    assert set(steps.parameters) == {name for name, _ in Model().named_parameters()}
    assert steps.parameters[0].startswith("blocks.3.2.")
    assert len(steps.temporary_bytes) == len(steps.parameters)
    assert steps.freed_bytes == steps.gradient_bytes == sum(each.nbytes for each in Model().parameters())
    assert "AdamW steps 16 parameters in backward" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert plimsoll.load(tmp_path / "plan.json") == plan
    assert msgspec.structs.replace(plan, backward_steps=None).effect != plan.effect
    fields = msgspec.to_builtins(plan)
    fields.pop("backward_steps")
    assert msgspec.convert(fields, Plan).backward_steps is None


@pytest.mark.long
def test_a_plan_that_steps_in_backward_is_verified(plan):
    model = Model()
    optimizer = adamw(model.parameters())
    receipt = plimsoll.verify(model, batch(), plan, loss=loss_of, optimizer=optimizer, steps=2)
    assert receipt.exit_code == 0
    assert abs(receipt.measured_peak_bytes - plan.predicted_peak_bytes) <= 0.02 * plan.predicted_peak_bytes


class Routed(nn.Module):
    """Picks columns by a weight, without a gradient through the choice, and adds what the same weight gives.

    Backward completes the weight's gradient before it needs the choice.
    """

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.no_grad():
            order = self.gate(x).argsort(dim=-1)
        picked = self.lift(x).gather(-1, order)
        return picked + self.gate(x) + x


def routed():
    torch.manual_seed(0)
    return nn.Sequential(Routed(), Routed())


@pytest.fixture(scope="module")
def routed_plan():
    """A plan with the lowest peak of activations, and the names of the parameters that can be stepped in backward."""
    model = routed()
    floor = named_floor(refusal_of(sgd, ("recompute",), routed()))
    made = plimsoll.plan(model, batch(), floor, loss=loss_of, optimizer=sgd(model.parameters()))
    task = TrainingTask(model=model, batch=batch(), loss=loss_of)
    names = [name for name, _ in model.named_parameters()]
    return made, tuple(steppable_parameters(trace_task(task, PlanOptions(), repeats=0), names))


def stepping(plan, parameters):
    sizes = {"temporary_bytes": (0,) * len(parameters), "gradient_bytes": 1, "freed_bytes": 1}
    steps = BackwardSteps(optimizer="SGD", parameters=parameters, **sizes)
    return msgspec.structs.replace(plan, backward_steps=steps)


@pytest.mark.long
def test_a_weight_that_a_recomputation_reads_after_its_gradient_is_complete_is_stepped_at_the_end(routed_plan):
    made, possible = routed_plan
    assert any("sort" in value for region in made.regions for value in region.dropped)
    assert {name.partition(".")[2] for name in possible} == {"lift.weight", "lift.bias"}
    model, plain = routed(), routed()
    optimizer, plain_optimizer = sgd(model.parameters()), sgd(plain.parameters())
    with plimsoll.apply(model, stepping(made, possible)):
        train(model, optimizer, 6)
    train(plain, plain_optimizer, 6)
    assert_same_training(model, optimizer, plain, plain_optimizer)


@pytest.mark.long
def test_a_recomputation_that_would_read_a_stepped_weight_raises(routed_plan):
    made, _ = routed_plan
    model = routed()
    optimizer = sgd(model.parameters())
    names = tuple(name for name, _ in model.named_parameters())
    with plimsoll.apply(model, stepping(made, names)), pytest.raises(ReplayMismatch, match="modified"):
        train(model, optimizer, 6)


# Equal weights under attach


def groups_of(model):
    blocks = [{"params": block.parameters(), "lr": 1e-3 * (1 + at)} for at, block in enumerate(model.blocks)]
    return torch.optim.AdamW(blocks, weight_decay=0.1)


OPTIMIZERS = {
    "SGD": lambda model: sgd(model.parameters()),
    "AdamW": lambda model: adamw(model.parameters(), foreach=False),
    "foreach": lambda model: adamw(model.parameters(), foreach=True),
    "fused": lambda model: adamw(model.parameters(), fused=True),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    "groups": groups_of,
}


def attached_training(model, optimizer_of, loop, steps=22, share=1.03):
    """Train one copy of a model under attach, and another one without, by the same loop. Return both with the handle."""
    plain = copy.deepcopy(model)
    floor = named_floor(refusal_of_model(copy.deepcopy(model), optimizer_of))
    optimizer, plain_optimizer = optimizer_of(model), optimizer_of(plain)
    handle = plimsoll.attach(model, int(share * floor), allow=BOTH, optimizer=optimizer)
    loop(model, optimizer, steps)
    loop(plain, plain_optimizer, steps)
    return handle, (model, optimizer, plain, plain_optimizer)


def refusal_of_model(model, optimizer_of):
    with pytest.raises(BudgetBelowFloor) as refusal:
        plimsoll.plan(model, batch(), "64KiB", loss=loss_of, optimizer=optimizer_of(model), allow=BOTH)
    return refusal.value


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_attached_loop_trains_equal_weights_and_state(name):
    def loop(model, optimizer, steps):
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 10)
        train(model, optimizer, steps, after_step=schedule.step)

    handle, trainings = attached_training(Model(), OPTIMIZERS[name], loop)
    with handle:
        assert handle.plan.backward_steps is not None
        assert 0 < handle.peak_bytes <= handle.plan.budget_bytes
        assert abs(handle.plan.predicted_peak_bytes - handle.peak_bytes) <= 0.02 * handle.peak_bytes
    assert_same_training(*trainings)


def skipping(model, optimizer, steps):
    for step in range(steps):
        loss_of(model(batch(step), is_odd=step % 3 == 2)).backward()
        optimizer.step()
        optimizer.zero_grad()


def frozen():
    model = Model()
    model.blocks[1].requires_grad_(False)
    return model


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "loop"),
    [
        (Model(is_tied=True), train),
        (frozen(), train),
        (Model(skips=True), skipping),
    ],
    ids=["tied", "frozen", "skipped"],
)
def test_tied_frozen_and_skipped_parameters_are_trained_as_without(model, loop):
    handle, trainings = attached_training(model, OPTIMIZERS["AdamW"], loop)
    with handle:
        assert handle.plan.backward_steps is not None
    assert_same_training(*trainings)


@pytest.mark.long
def test_gradients_that_the_loop_clears_after_forward_are_freed_as_well(floors):
    def loop(model, optimizer, steps):
        for step in range(steps):
            output = model(batch(step))
            optimizer.zero_grad()
            loss_of(output).backward()
            del output
            optimizer.step()

    handle, trainings = attached_training(Model(), OPTIMIZERS["AdamW"], loop)
    with handle:
        assert handle.plan.backward_steps is not None
        assert 0 < handle.peak_bytes <= handle.plan.budget_bytes
        assert isinstance(trainings[0].blocks[0][0].weight.grad, SteppedGradient)
    assert trainings[0].blocks[0][0].weight.grad is None
    assert_same_training(*trainings)


# Loops that need all gradients


def clip(model, optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def change_rate(model, optimizer):
    optimizer.param_groups[0]["lr"] *= 0.9


def evaluate(model, optimizer):
    with torch.no_grad():
        model(batch())


def accumulate(model, optimizer):
    loss_of(model(batch(1))).backward()


def decay(model, optimizer):
    with torch.no_grad():
        model.blocks[0][0].weight.mul_(0.9)


def replace(model, optimizer):
    for each in model.parameters():
        each.grad = torch.ones_like(each)


def clear(model, optimizer):
    optimizer.zero_grad()


BETWEEN = {
    clip: "uses",
    change_rate: "parameter groups",
    evaluate: "is called between backward",
    accumulate: "accumulate|called between backward",
    decay: "written between|change between",
    replace: "replace",
}


def between(what, first, steps=8):
    """A loop that does something between backward and ``optimizer.step()``, from step ``first`` on."""

    def loop(model, optimizer, steps=steps):
        for step in range(steps):
            loss_of(model(batch(step))).backward()
            if step >= first:
                what(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()

    return loop


@pytest.mark.long
@pytest.mark.parametrize("what", BETWEEN)
def test_loops_that_need_all_gradients_are_not_stepped_in_backward_and_a_line_says_why(floors, caplog, what):
    model, plain = Model(), Model()
    optimizer, plain_optimizer = adamw(model.parameters()), adamw(plain.parameters())
    loop = between(what, 0)
    with caplog.at_level(logging.INFO, "plimsoll"), plimsoll.attach(model, int(1.1 * floors[0]), allow=BOTH) as handle:
        loop(model, optimizer)
        assert handle.plan.backward_steps is None
    (line,) = [each.getMessage() for each in caplog.records if "not stepped in backward" in each.getMessage()]
    assert re.search(BETWEEN[what], line)
    loop(plain, plain_optimizer)
    assert_same_training(model, optimizer, plain, plain_optimizer)


@pytest.mark.parametrize("what", [*BETWEEN, clear])
def test_a_loop_that_begins_to_need_all_gradients_is_stopped_in_words(plan, what):
    model = Model()
    optimizer = adamw(model.parameters())
    found = {clear: "removed or replaced"} | BETWEEN
    with plimsoll.apply(model, plan), pytest.raises(PlanMismatch, match=found[what]) as refusal:
        between(what, 4)(model, optimizer)
    assert "checkpoint" in refusal.value.next


def test_a_loop_that_needs_all_gradients_keeps_its_weights_under_apply_and_is_warned(plan):
    model, plain = Model(), Model()
    optimizer, plain_optimizer = adamw(model.parameters()), adamw(plain.parameters())
    with plimsoll.apply(model, plan), pytest.warns(UserWarning, match="the loop does not allow that: the loop uses"):
        between(clip, 0)(model, optimizer)
    between(clip, 0)(plain, plain_optimizer)
    assert_same_training(model, optimizer, plain, plain_optimizer)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda model, optimizer: optimizer.zero_grad(set_to_none=False), "uses the gradient"),
        (lambda model, optimizer: optimizer.step(), "use an old gradient"),
        (lambda model, optimizer: model.blocks[0][0].weight.grad.norm(), "uses the gradient"),
        (lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()), ""),
    ],
    ids=["zeros", "twice", "read", "loaded"],
)
def test_what_a_loop_does_after_a_step_is_right_or_refused(plan, change, found):
    model = Model()
    optimizer = adamw(model.parameters())
    with plimsoll.apply(model, plan):
        train(model, optimizer, 4)
        loss_of(model(batch())).backward()
        optimizer.step()
        if not found:
            change(model, optimizer)
            return
        with pytest.raises(PlanMismatch, match=found):
            change(model, optimizer)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, optimizer, loss: (loss.backward(retain_graph=True), loss.backward()),
        lambda model, optimizer, loss: (loss.backward(), optimizer.zero_grad(), loss_of(model(batch())).backward()),
        lambda model, optimizer, loss: (loss.backward(), optimizer.load_state_dict(optimizer.state_dict())),
    ],
    ids=["retained", "no step", "loaded"],
)
def test_a_second_backward_and_a_step_that_does_not_come_are_refused(plan, change):
    model = Model()
    optimizer = adamw(model.parameters())
    with plimsoll.apply(model, plan):
        train(model, optimizer, 4)
        loss = loss_of(model(batch()))
        with pytest.raises(
            (PlanMismatch, SavedTensorModified), match=r"second backward|called between|load_state_dict|modified"
        ):
            change(model, optimizer, loss)


def test_closures_step_hooks_and_moves_of_the_model_work_as_before(plan):
    def loop(model, optimizer, steps=6):
        calls = []
        hooks = [
            optimizer.register_step_pre_hook(lambda *_: calls.append("before")),
            optimizer.register_step_post_hook(lambda *_: calls.append("after")),
        ]
        losses = []
        for step in range(steps):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(model(batch(step)))
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        for hook in hooks:
            hook.remove()
        model.double().float()
        return calls, losses

    model, plain = Model(), Model()
    optimizer, plain_optimizer = adamw(model.parameters()), adamw(plain.parameters())
    with plimsoll.apply(model, plan):
        assert loop(model, optimizer) == loop(plain, plain_optimizer)
    assert all(torch.equal(*both) for both in zip(model.parameters(), plain.parameters(), strict=True))


def test_everything_is_as_before_once_the_plan_is_removed(plan):
    model = Model()
    optimizer = adamw(model.parameters())
    hooks = len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)
    with plimsoll.apply(model, plan):
        train(model, optimizer, 3)
        again = copy.deepcopy(model)
        loss_of(again(batch())).backward()
        loss_of(model(batch())).backward()
        optimizer.step()
        assert all(isinstance(each.grad, SteppedGradient) for each in model.parameters())
    assert all(each.grad is None and not each._post_accumulate_grad_hooks for each in model.parameters())
    assert (len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)) == hooks
    assert all(type(each.grad) is torch.Tensor for each in again.parameters())
    loss_of(model(batch())).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_a_step_that_ran_out_of_memory_after_parameters_were_stepped_is_not_run_again(plan):
    model = Model()
    optimizer = adamw(model.parameters())
    with plimsoll.apply(model, plan) as handle:
        train(model, optimizer, 3)

        def failing():
            loss_of(model(batch())).backward()
            raise torch.OutOfMemoryError("a test")

        with pytest.raises(torch.OutOfMemoryError) as failure:
            handle.step(failing)
    assert failure.value.__notes__


# Refusals


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"budget": "1MiB", "strategy": "full"}, "cannot offload optimizer state or step parameters in backward"),
        ({"budget": "1MiB", "optimizer": None}, "'step-in-backward', but no optimizer is known"),
        ({"budget": "1MiB", "allow": (*BOTH, "offload-state")}, "'step-in-backward' and 'offload-state'"),
        ({"budget": "1MiB", "allow": (*BOTH, "tile")}, "'step-in-backward' and 'tile'"),
    ],
)
def test_plans_that_cannot_step_in_backward_are_refused(options, found):
    model = Model()
    given = {"optimizer": adamw(model.parameters()), "allow": BOTH} | options
    with pytest.raises((InvalidStrategy, InvalidOption), match=found):
        plimsoll.plan(model, batch(), loss=loss_of, **given)


def test_an_optimizer_that_needs_all_parameters_at_once_is_refused():
    model = Model()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(InvalidOption, match=r"'step-in-backward', but the step of LBFGS cannot run"):
        plimsoll.plan(model, batch(), "1MiB", loss=loss_of, optimizer=optimizer, allow=BOTH)


@pytest.mark.long
def test_other_verbs_and_compiled_models_refuse_it(floors, plan):
    with pytest.raises(PlanNotUsable, match="probe cannot run this plan: it steps parameters"):
        plimsoll.probe(Model(), [batch()], plan, loss=loss_of)
    with pytest.raises(PlanNotUsable, match="diagnose cannot run this plan: it steps parameters"):
        plimsoll.diagnose(Model(), batch(), plan, loss=loss_of)
    with pytest.raises(PlanNotUsable, match="cannot be written as a policy"):
        plan.export("sac", "policy.py")
    with pytest.raises(InvalidStrategy, match="cannot step parameters in backward"):
        plimsoll.compare(Model(), batch(), ["auto"], budget="8MiB", loss=loss_of, allow=BOTH)
    compiled = Model()
    compiled.compile()
    with pytest.raises((InvalidOption, InvalidStrategy), match="step-in-backward"):
        plimsoll.plan(
            compiled, batch(), budget=floors[0], loss=loss_of, optimizer=adamw(compiled.parameters()), allow=BOTH
        )


def test_a_plan_is_refused_for_another_optimizer_or_a_replaced_step(plan):
    model = Model()
    with pytest.raises(PlanMismatch, match="not known"):
        plimsoll.apply(model, plan)
    with pytest.raises(PlanMismatch, match="steps parameters of AdamW in backward, but the optimizer is SGD"):
        plimsoll.apply(model, plan, optimizer=sgd(model.parameters()))
    optimizer = adamw(model.parameters())
    optimizer.step = lambda: None
    with pytest.raises(InvalidOption, match=r"replaced optimizer\.step"):
        BackwardStepsAtWork(model, optimizer, plan.backward_steps)


def test_attach_without_an_optimizer_is_refused_in_the_first_call():
    model = Model()
    plimsoll.attach(model, "2MiB", allow=BOTH)
    with pytest.raises(InvalidOption, match="no optimizer is known"):
        model(batch())


def test_a_loop_with_a_gradient_scaler_is_not_stepped_in_backward(plan):
    model, plain = Model(), Model()
    optimizer, plain_optimizer = adamw(model.parameters()), adamw(plain.parameters())

    def loop(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for step in range(4):
            scaler.scale(loss_of(model(batch(step)))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    with plimsoll.apply(model, plan), pytest.warns(UserWarning, match="the loop does not allow that"):
        loop(model, optimizer)
    loop(plain, plain_optimizer)
    assert_same_training(model, optimizer, plain, plain_optimizer)
