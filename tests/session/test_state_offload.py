"""Plans that offload optimizer state: a lower floor, the same weights, and refusals in words."""

from __future__ import annotations

import pickle

import msgspec
import pytest
import torch
from torch import nn

import plimsoll
from plimsoll.artifacts.plan import Plan
from plimsoll.engine.optimizer_state.away import OffloadedStates
from plimsoll.errors import BudgetBelowFloor, InvalidOption, InvalidStrategy, PlanMismatch, PlanNotUsable
from plimsoll.session.state_offload import StateAtWork
from plimsoll.tracing.meters.memory import PeakMeter, storage_bytes
from plimsoll.tracing.optimizer import present_states
from plimsoll.tracing.recorder.calling import output_tensors

BOTH = ("recompute", "offload-state")
WIDTH, ROWS = 128, 64


class Model(nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(blocks)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def loss_of(output):
    return output.square().mean()


def batch(seed=0):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def named_floor(refusal):
    """The budget in bytes that a refusal names."""
    return int(refusal.next.partition("(")[2].partition(" bytes")[0])


def refused(make, allow):
    model = Model()
    with pytest.raises(BudgetBelowFloor) as refusal:
        plimsoll.plan(model, batch(), budget="64KiB", loss=loss_of, optimizer=make(model.parameters()), allow=allow)
    return named_floor(refusal.value)


def train(model, optimizer, steps, *, first=0):
    """Train as loops do, and return the highest measured peak of all steps but the first two."""
    peaks = []
    for step in range(first, first + steps):
        states = output_tensors([list(present_states(optimizer).values())])
        x = batch(step)
        held = [*model.parameters(), x, *states]
        with PeakMeter(torch.device("cpu"), held=held) as meter:
            output = model(x)
            loss_of(output).backward()
            del output
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(storage_bytes(held, "cpu") + meter.peak_bytes)
    return max(peaks[2:], default=0)


def assert_same_training(model, optimizer, other, other_optimizer):
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        mine, theirs = optimizer.state[one], other_optimizer.state[two]
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


@pytest.fixture(scope="module")
def floors():
    return refused(adamw, ("recompute",)), refused(adamw, BOTH)


@pytest.fixture(scope="module")
def plan(floors):
    model = Model()
    budget = int(1.05 * floors[1])
    return plimsoll.plan(model, batch(), budget, loss=loss_of, optimizer=adamw(model.parameters()), allow=BOTH)


def test_the_floor_falls_by_nearly_all_of_the_state(floors):
    assert floors[1] < 0.6 * floors[0]


@pytest.mark.long
def test_the_state_of_sgd_is_offloaded_as_well():
    assert refused(sgd, BOTH) < 0.75 * refused(sgd, ("recompute",))


@pytest.mark.long
def test_a_hundred_steps_under_the_plan_keep_the_budget_and_give_equal_bits(plan):
    model, plain = Model(), Model()
    optimizer, plain_optimizer = adamw(model.parameters()), adamw(plain.parameters())

    with plimsoll.apply(model, plan):
        peak_bytes = train(model, optimizer, 100)
        assert isinstance(optimizer.state, OffloadedStates)
    train(plain, plain_optimizer, 100)

    assert peak_bytes <= plan.budget_bytes
    assert abs(plan.predicted_peak_bytes - peak_bytes) <= 0.02 * peak_bytes
    assert_same_training(model, optimizer, plain, plain_optimizer)
    assert type(optimizer.state) is type(plain_optimizer.state)


def test_no_more_is_offloaded_than_the_budget_needs(floors, plan):
    model = Model()
    optimizer = adamw(model.parameters())
    most = plan.state.offloaded_bytes
    roomy = plimsoll.plan(model, batch(), int(0.97 * floors[0]), loss=loss_of, optimizer=optimizer, allow=BOTH)
    assert 0 < roomy.state.offloaded_bytes < most
    whole = plimsoll.plan(model, batch(), 2 * floors[0], loss=loss_of, optimizer=optimizer, allow=BOTH)
    assert whole.state is None


def test_plans_say_what_happens_to_state_and_survive_files(tmp_path, plan):
    state = plan.state
    assert state.resident_bytes == state.state_bytes - state.offloaded_bytes < 20_000
    assert {name for chunk in state.chunks for name in chunk} == {
        f"blocks.{block}.{layer}.weight" for block in range(4) for layer in (0, 2)
    }
    text = f"of AdamW's state on disk, {state.seconds / plan.baseline_seconds:+.1%} a step"
    assert text in str(plan)
    plan.save(tmp_path / "plan.json")
    assert plimsoll.load(tmp_path / "plan.json") == plan
    assert msgspec.structs.replace(plan, state=None).effect != plan.effect


def test_plans_of_older_versions_offload_no_state(tmp_path, plan):
    fields = msgspec.to_builtins(msgspec.structs.replace(plan, state=None))
    fields.pop("state")
    assert msgspec.convert(fields, Plan).state is None


def run(model, optimizer, steps, *, first=0):
    """Train without a meter: attach measures the steps itself."""
    for step in range(first, first + steps):
        output = model(batch(step))
        loss_of(output).backward()
        del output
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def test_an_attached_loop_trains_equal_weights_within_its_budget(floors):
    model, plain = Model(), Model()
    optimizer, plain_optimizer = adamw(model.parameters()), adamw(plain.parameters())
    budget = int(1.1 * floors[1])

    handle = plimsoll.attach(model, budget, allow=BOTH)
    schedules = [torch.optim.lr_scheduler.LinearLR(each, 0.5, 1.0, 3) for each in (optimizer, plain_optimizer)]
    for steps in (8, 4):
        for each, each_optimizer in ((model, optimizer), (plain, plain_optimizer)):
            run(each, each_optimizer, steps)
        for schedule in schedules:
            schedule.step()
        assert [len(each) for each in optimizer.state_dict()["state"].values()] == [3] * 16
        assert isinstance(optimizer.state, OffloadedStates)

    assert 0 < handle.peak_bytes <= budget
    assert handle.plan.state.optimizer == "AdamW"
    handle.remove()
    assert_same_training(model, optimizer, plain, plain_optimizer)
    assert type(optimizer.state) is type(plain_optimizer.state)


def test_state_that_the_loop_reads_between_steps_is_not_counted_in_the_next_one(floors):
    model = Model()
    optimizer = adamw(model.parameters())
    handle = plimsoll.attach(model, int(1.1 * floors[1]), allow=BOTH, optimizer=optimizer)
    with handle:
        for step in range(6):
            loss_of(model(batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step > 1:  # a loop that reads from the start needs, and gets, room for the state after each step
                norms = [each["exp_avg"].norm() for each in optimizer.state.values()]
            held = [
                model(batch()).detach() for _ in range(2 * step)
            ]  # so that the next step searches the tensors of the loop
        del norms, held
        assert 0 < handle.plan.state.resident_bytes < handle.plan.state.state_bytes
        assert handle._steps.held.state_bytes <= handle.plan.state.resident_bytes
        assert handle._known.room.account.optimizer_state == 0


def test_the_model_can_be_pickled_while_its_state_is_offloaded(plan):
    model = Model()
    with plimsoll.apply(model, plan, optimizer=adamw(model.parameters())):
        again = pickle.loads(pickle.dumps(model))
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    loss_of(again(batch())).backward()


def test_a_loop_with_closures_trains_equal_weights(plan):
    model, plain = Model(), Model()
    optimizer, plain_optimizer = adamw(model.parameters()), adamw(plain.parameters())

    def closure(one, optimizer_, step):
        optimizer_.zero_grad()
        loss = loss_of(one(batch(step)))
        loss.backward()
        return loss

    with plimsoll.apply(model, plan):
        for step in range(5):
            losses = [
                each_optimizer.step(lambda each=each, its=each_optimizer, step=step: closure(each, its, step))
                for each, each_optimizer in ((model, optimizer), (plain, plain_optimizer))
            ]
            assert torch.equal(*losses)
            assert isinstance(optimizer.state, OffloadedStates)
    assert_same_training(model, optimizer, plain, plain_optimizer)


@pytest.mark.long
def test_an_attached_loop_whose_own_step_needs_more_offloads_more(floors):
    model, plain = Model(), Model()
    optimizer, plain_optimizer = sgd(model.parameters()), sgd(plain.parameters())
    waste = []

    def step(one, optimizer_):
        output = one(batch())
        waste.append(torch.zeros(50_000))  # as a loss outside of the model
        loss_of(output).backward()
        waste.clear()
        optimizer_.step()
        optimizer_.zero_grad()

    floor = refused(sgd, ("recompute",))
    handle = plimsoll.attach(model, int(1.05 * floor), allow=BOTH)
    for _ in range(5):
        step(model, optimizer)
        step(plain, plain_optimizer)
    assert handle.plan.state.offloaded_bytes > 0
    assert handle.peak_bytes <= 1.05 * floor
    handle.remove()
    assert_same_training(model, optimizer, plain, plain_optimizer)


def test_a_plan_that_offloads_state_is_verified(plan):
    model = Model()
    optimizer = adamw(model.parameters())
    receipt = plimsoll.verify(model, batch(), plan, loss=loss_of, optimizer=optimizer, steps=2)
    assert receipt.exit_code == 0
    assert receipt.measured_peak_bytes <= plan.budget_bytes


@pytest.mark.long
def test_a_resumed_optimizer_has_its_state_counted_once(floors):
    model = Model()
    optimizer = adamw(model.parameters())
    train(model, optimizer, 2)
    resumed = plimsoll.plan(model, batch(), int(1.05 * floors[1]), loss=loss_of, optimizer=optimizer, allow=BOTH)
    with plimsoll.apply(model, resumed):
        assert train(model, optimizer, 4, first=2) <= resumed.budget_bytes


def test_a_step_that_ran_out_of_memory_after_the_optimizer_is_not_run_again(plan):
    model = Model()
    optimizer = adamw(model.parameters())
    with plimsoll.apply(model, plan) as handle:

        def failing():
            train(model, optimizer, 1)
            raise torch.OutOfMemoryError("a test")

        with pytest.raises(torch.OutOfMemoryError) as failure:
            handle.step(failing)
    assert any("state is offloaded" in note for note in failure.value.__notes__)


def test_a_link_that_is_too_small_lowers_what_is_offloaded(floors, plan):
    model = Model()
    optimizer = adamw(model.parameters())
    limit = plan.state.link_bytes // 2
    made = plimsoll.plan(
        model, batch(), int(0.9 * floors[0]), loss=loss_of, optimizer=optimizer, allow=BOTH, host_budget=limit
    )
    assert 0 < made.state.link_bytes <= limit


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"budget": "1MiB", "strategy": "full"}, "cannot offload optimizer state"),
        ({"budget": "1MiB", "optimizer": None}, "no optimizer is known"),
    ],
)
def test_plans_without_an_optimizer_or_a_free_choice_are_refused(options, found):
    model = Model()
    with pytest.raises((InvalidStrategy, InvalidOption), match=found):
        plimsoll.plan(model, batch(), loss=loss_of, allow=BOTH, **({"optimizer": adamw(model.parameters())} | options))


def test_an_optimizer_that_cannot_step_in_chunks_is_refused():
    model = Model()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(InvalidOption, match="cannot run in chunks"):
        plimsoll.plan(model, batch(), budget="1MiB", loss=loss_of, optimizer=optimizer, allow=BOTH)


def test_other_verbs_and_compiled_models_refuse_it(floors, plan):
    with pytest.raises(PlanNotUsable, match="probe cannot run this plan"):
        plimsoll.probe(Model(), [batch()], plan, loss=loss_of)
    with pytest.raises(PlanNotUsable, match="diagnose cannot run this plan"):
        plimsoll.diagnose(Model(), batch(), plan, loss=loss_of)
    with pytest.raises(PlanNotUsable, match="cannot be written as a policy"):
        plan.export("sac", "policy.py")
    with pytest.raises(InvalidStrategy, match="cannot offload optimizer state"):
        plimsoll.compare(Model(), batch(), ["auto"], budget="8MiB", loss=loss_of, allow=BOTH)
    compiled = Model()
    compiled.compile()
    with pytest.raises(InvalidOption, match="offload-state"):
        plimsoll.plan(
            compiled, batch(), budget=floors[0], loss=loss_of, optimizer=adamw(compiled.parameters()), allow=BOTH
        )


def test_a_plan_is_refused_for_another_optimizer_or_none_and_leaves_the_model_alone(plan):
    model = Model()
    with pytest.raises(PlanMismatch, match="not known"):
        plimsoll.apply(model, plan)
    with pytest.raises(PlanMismatch, match="the optimizer is SGD"):
        plimsoll.apply(model, plan, optimizer=sgd(model.parameters()))
    part = adamw(model.blocks[0].parameters())
    with pytest.raises(PlanMismatch, match=r"does not hold blocks\.1"):
        plimsoll.apply(model, plan, optimizer=part)
    optimizer = adamw(model.parameters())
    with plimsoll.apply(model, plan, optimizer=optimizer):
        assert isinstance(optimizer.state, OffloadedStates)
        with pytest.raises(InvalidOption, match=r"replaced optimizer\.step"):
            StateAtWork(model, optimizer, plan.state)


def test_attach_without_an_optimizer_is_refused_in_the_first_call():
    model = Model()
    plimsoll.attach(model, "2MiB", allow=BOTH)
    with pytest.raises(InvalidOption, match="no optimizer is known"):
        model(batch())
