"""State on a link between steps: equal bits, whole tensors for whoever reads them, and no half step after a failure."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn

from plimsoll.engine.offload.disk import DiskLink
from plimsoll.engine.optimizer_state.offload import StateOffload
from plimsoll.errors import InvalidOption, OffloadFailed

SHAPES = [(64, 64), (64, 32), (64,), (48, 48)]
ADAM_BYTES = 2 * 4 * (64 * 64 + 64 * 32)
"""The state of the first two parameters under Adam, without its step counters."""


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def set_gradients(*lists, seed):
    generator = torch.Generator().manual_seed(seed)
    for each in zip(*lists, strict=True):
        gradient = torch.randn(each[0].shape, generator=generator)
        for parameter in each:
            parameter.grad = gradient.clone()


def snapshot(optimizer):
    """Copies of all parameters, and of the optimizer's whole state."""
    weights = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    return weights, copy.deepcopy(optimizer.state_dict())


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


class Link(DiskLink):
    """A disk link that can be made to fail."""

    def __init__(self):
        super().__init__("/var/tmp")
        self.refuses = lambda tensor: False
        self.sent = 0

    def store(self, tensor):
        self.sent += 1
        if self.refuses(tensor):
            raise OffloadFailed("The link is full.", why="a test filled it", next="empty it")
        return super().store(tensor)


class Pair:
    """The same optimizer twice: as it is, and with its state offloaded."""

    def __init__(self, make=torch.optim.AdamW, **options):
        self.plain_parameters, self.parameters = parameters(), parameters()
        self.plain, self.optimizer = make(self.plain_parameters, **options), make(self.parameters, **options)
        self.link = Link()
        self.offload = self.offloading(self.optimizer)

    def offloading(self, optimizer):
        held = [each for group in optimizer.param_groups for each in group["params"]]
        return StateOffload(optimizer, [[held[0]], [held[1]]], self.link)

    def step(self, seed):
        set_gradients(self.plain_parameters, self.parameters, seed=seed)
        self.plain.step()
        self.optimizer.step()

    def is_equal(self):
        return same(snapshot(self.plain), snapshot(self.optimizer))


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.offload.remove()


def test_steps_in_chunks_give_equal_bits_and_leave_no_state_of_the_chunks_on_the_device(pair):
    for seed in range(4):
        pair.step(seed)
        assert pair.offload.away_bytes == ADAM_BYTES
        assert pair.is_equal()
    assert pair.offload.away_bytes == ADAM_BYTES


def test_chunks_in_another_order_leave_the_entries_in_the_order_of_the_groups():
    held = parameters()
    optimizer = torch.optim.AdamW(held)
    offload = StateOffload(optimizer, [[held[1]], [held[0]]], Link())
    for parameter in held:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    offload.remove()
    assert [*map(id, optimizer.state)] == [*map(id, held)]


def test_an_entry_that_is_read_between_steps_is_whole_and_leaves_again(pair):
    pair.step(0)
    first, plain = pair.parameters[0], pair.plain_parameters[0]

    assert same(pair.optimizer.state[first], pair.plain.state[plain])
    assert pair.offload.away_bytes == 2 * 4 * 64 * 32
    pair.offload.leave()
    assert pair.offload.away_bytes == ADAM_BYTES
    pair.optimizer.state[first]["exp_avg"].zero_()
    pair.plain.state[plain]["exp_avg"].zero_()
    pair.step(1)
    assert pair.is_equal()


def test_a_tensor_that_other_code_holds_stays_and_shows_later_steps(pair):
    pair.step(0)
    held = pair.optimizer.state[pair.parameters[0]]["exp_avg"]
    view = pair.optimizer.state[pair.parameters[1]]["exp_avg_sq"].detach()[:1]

    pair.step(1)

    assert torch.equal(held, pair.plain.state[pair.plain_parameters[0]]["exp_avg"])
    assert torch.equal(view, pair.plain.state[pair.plain_parameters[1]]["exp_avg_sq"][:1])
    del held, view
    pair.step(2)
    assert pair.offload.away_bytes == ADAM_BYTES


def test_an_entry_that_was_read_before_its_tensors_left_refuses_to_give_values(pair):
    pair.step(0)
    entry = pair.optimizer.state[pair.parameters[0]]
    pair.offload.leave()

    assert entry["exp_avg"].shape == (64, 64)
    with pytest.raises(OffloadFailed, match="not on the device now"):
        entry["exp_avg"].sum()
    assert "not on the device" in repr(entry["exp_avg"])
    assert pair.optimizer.state[pair.parameters[0]] is entry
    assert entry["exp_avg"].sum() == entry["exp_avg"].sum()


def test_saved_copied_and_pickled_optimizers_have_whole_state_and_nothing_comes_back(pair):
    pair.step(0)
    away_bytes = pair.offload.away_bytes

    saved = pair.optimizer.state_dict()
    copied, pickled = copy.deepcopy(pair.optimizer), pickle.loads(pickle.dumps(pair.optimizer))

    assert pair.offload.away_bytes == away_bytes
    assert same(saved, pair.plain.state_dict())
    for other in (copied, pickled):
        assert same(other.state_dict(), pair.plain.state_dict())
        assert "step" not in vars(other)
        other.step()


def test_every_way_to_read_the_mapping_gives_whole_state(pair):
    pair.step(0)
    expected = list(pair.plain.state.values())
    states = pair.optimizer.state

    reads = (
        lambda: list(states.values()),
        lambda: [pair[1] for pair in states.items()],
        lambda: [states[key] for key in states],
        lambda: [states.get(key) for key in states],
        lambda: list(dict(states).values()),
        lambda: list(states.copy().values()),
        lambda: list(copy.copy(states).values()),
    )
    for read in reads:
        pair.offload.leave()
        assert pair.offload.away_bytes == ADAM_BYTES
        assert same(read(), expected)


def test_a_loaded_state_leaves_and_training_resumes_with_equal_bits(pair):
    pair.step(0)
    saved = copy.deepcopy(pair.plain.state_dict())
    pair.step(1)

    pair.plain.load_state_dict(copy.deepcopy(saved))
    pair.optimizer.load_state_dict(saved)  # torch does not copy tensors that fit as they are

    assert pair.offload.away_bytes == 0
    del saved
    pair.offload.leave()
    assert pair.offload.away_bytes == ADAM_BYTES
    pair.step(2)
    assert pair.is_equal()


def test_a_mapping_that_is_replaced_or_cleared_begins_anew(pair):
    pair.step(0)
    for each in (pair.plain, pair.optimizer):
        each.state.clear()
    pair.step(1)
    assert pair.is_equal()
    for each in (pair.plain, pair.optimizer):
        each.state = type(pair.plain.state)(dict)
    pair.step(2)
    assert pair.is_equal()
    assert pair.offload.away_bytes == ADAM_BYTES


@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_made_before_or_after_see_the_steps(when):
    def schedulers(optimizers):
        return [torch.optim.lr_scheduler.LinearLR(each, 0.1, 1.0, 4) for each in optimizers]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair = Pair(torch.optim.SGD, lr=0.1, momentum=0.9)
        if when == "before":
            pair.offload.remove()
            pair.link = Link()
            made = schedulers([pair.plain, pair.optimizer])
            pair.offload = pair.offloading(pair.optimizer)
        else:
            made = schedulers([pair.plain, pair.optimizer])
        for seed in range(5):
            pair.step(seed)
            for scheduler in made:
                scheduler.step()
        assert pair.offload.away_bytes
        assert pair.is_equal()
        pair.offload.remove()
        pair.step(6)
        for scheduler in made:
            scheduler.step()
    assert pair.is_equal()
    assert type(pair.optimizer.state) is type(pair.plain.state)


def test_hooks_and_closures_run_once_a_step_and_hooks_see_all_parameters(pair):
    seen = []
    pair.optimizer.register_step_pre_hook(lambda one, *_: seen.append(len(one.param_groups[0]["params"])))
    pair.optimizer.register_step_post_hook(lambda one, *_: seen.append(-len(one.param_groups[0]["params"])))
    pair.step(0)

    def closure():
        seen.append(torch.is_grad_enabled())
        return torch.tensor(3.0)

    with torch.no_grad():
        assert pair.optimizer.step(closure) == 3.0
    assert pair.optimizer.step(closure=closure) == 3.0
    assert seen == [4, -4, 4, True, -4, 4, True, -4]


def test_code_that_runs_the_step_of_the_class_gets_all_state_and_one_warning(pair):
    pair.step(0)
    for seed in (1, 2):
        set_gradients(pair.plain_parameters, pair.parameters, seed=seed)
        pair.plain.step()
        if seed == 1:
            with pytest.warns(UserWarning, match="without optimizer.step"):
                torch.optim.AdamW.step(pair.optimizer)
        else:
            torch.optim.AdamW.step(pair.optimizer)
    assert pair.is_equal()
    pair.step(3)
    assert pair.offload.away_bytes == ADAM_BYTES
    assert pair.is_equal()


def test_parameters_without_gradients_are_not_fetched_and_added_groups_are_stepped(pair):
    pair.step(0)
    set_gradients(pair.plain_parameters, pair.parameters, seed=1)
    for each in (pair.plain_parameters, pair.parameters):
        each[0].grad = None
    sent = pair.link.sent
    pair.plain.step()
    pair.optimizer.step()
    assert pair.link.sent - sent == 3  # two tensors of state, and the parameter from before the step
    assert pair.is_equal()

    for optimizer, held in ((pair.plain, pair.plain_parameters), (pair.optimizer, pair.parameters)):
        added = nn.Parameter(torch.ones(64, 64))
        optimizer.add_param_group({"params": [added], "lr": 0.5})
        held.append(added)
    pair.step(2)
    assert pair.is_equal()


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_steps_and_skips_as_without(fused):
    pair = Pair(torch.optim.AdamW, fused=fused)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    for seed in range(4):
        set_gradients(pair.plain_parameters, pair.parameters, seed=seed)
        for parameters_, optimizer, scaler in zip(
            (pair.plain_parameters, pair.parameters), (pair.plain, pair.optimizer), scalers, strict=True
        ):
            scaler.scale(torch.zeros(1))
            if seed == 2:
                parameters_[1].grad[0, 0] = float("inf")
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters_, 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert pair.is_equal()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 4.0
    pair.offload.remove()


class Failing(torch.optim.AdamW):
    """AdamW that raises after it has stepped a parameter of a shape."""

    shape = None

    def step(self, closure=None):
        super().step(closure)
        if any(p.shape == self.shape for group in self.param_groups for p in group["params"]):
            raise RuntimeError("no")


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("chunk", [0, 1])
def test_an_optimizer_that_fails_in_a_chunk_leaves_everything_as_before_the_step(steps_before, chunk):
    pair = Pair(Failing)
    for seed in range(steps_before):
        pair.step(seed)
    before = snapshot(pair.optimizer)

    Failing.shape = torch.Size(SHAPES[chunk])
    try:
        set_gradients(pair.plain_parameters, pair.parameters, seed=7)
        with pytest.raises(RuntimeError, match="no") as failure:
            pair.optimizer.step()
    finally:
        Failing.shape = None

    assert "as before the step" in failure.value.__notes__[0]
    assert same(snapshot(pair.optimizer), before)
    pair.step(8)
    assert pair.is_equal()
    pair.offload.remove()


def test_an_optimizer_that_fails_after_the_chunks_says_which_parameters_may_be_stepped():
    pair = Pair(Failing)
    pair.step(0)
    before = snapshot(pair.optimizer)
    Failing.shape = torch.Size(SHAPES[2])
    try:
        set_gradients(pair.plain_parameters, pair.parameters, seed=7)
        with pytest.raises(RuntimeError, match="no") as failure:
            pair.optimizer.step()
    finally:
        Failing.shape = None
    assert "for the parameters outside of all chunks; these are as the optimizer has left" in failure.value.__notes__[0]
    assert same(snapshot(pair.optimizer)[0][:2], before[0][:2])
    pair.offload.remove()


def test_a_saved_state_stays_whole_when_entries_that_were_read_before_leave_again(pair):
    pair.step(0)
    assert pair.optimizer.state[pair.parameters[0]]
    saved, copied, shallow = pair.optimizer.state_dict(), pair.optimizer.state.copy(), copy.copy(pair.optimizer.state)
    expected = copy.deepcopy(pair.plain.state_dict())
    pair.offload.leave()
    assert same(saved, expected)
    for each in (copied, shallow):
        assert same([each[one] for one in pair.parameters], [pair.plain.state[one] for one in pair.plain_parameters])


def test_a_tensor_that_cannot_be_read_ends_the_step_before_it_has_changed_anything(pair):
    pair.step(0)
    before = snapshot(pair.optimizer)
    [away, *_] = pair.offload._away[pair.parameters[1]]
    read, away.ticket.read = away.ticket.read, lambda: (_ for _ in ()).throw(OffloadFailed("x.", why="y", next="z"))

    set_gradients(pair.plain_parameters, pair.parameters, seed=1)
    with pytest.raises(OffloadFailed):
        pair.optimizer.step()

    away.ticket.read = read
    assert same(snapshot(pair.optimizer), before)
    pair.step(1)
    assert pair.is_equal()


def test_a_full_link_keeps_state_on_the_device_and_the_step_ends(pair):
    pair.step(0)
    pair.link.refuses = lambda tensor: True
    with pytest.warns(UserWarning, match="stays on the device"):
        pair.step(1)
    assert pair.offload.away_bytes == 0
    assert pair.is_equal()
    pair.link.refuses = lambda tensor: False
    pair.step(2)
    assert pair.offload.away_bytes == ADAM_BYTES
    assert pair.is_equal()


def test_removal_restores_the_optimizer_and_the_offload_is_not_kept_alive(pair):
    pair.step(0)
    names = vars(pair.plain).keys() - {"_opt_called"}
    pair.offload.remove()
    pair.offload.remove()

    assert vars(pair.optimizer).keys() - {"_opt_called"} == names
    assert type(pair.optimizer.state) is type(pair.plain.state)
    assert not any(hooks for name, hooks in vars(pair.optimizer).items() if name.endswith("hooks"))
    pair.step(1)
    assert pair.is_equal()


def test_an_optimizer_with_offloaded_state_can_be_freed():
    pair = Pair()
    pair.step(0)
    gone = weakref.ref(pair.optimizer)
    pair.optimizer = None
    gc.collect()
    assert gone() is None
    pair.offload.remove()


def test_an_optimizer_whose_step_was_replaced_or_that_is_offloaded_already_is_refused(pair):
    with pytest.raises(InvalidOption, match=r"replaced optimizer\.step"):
        StateOffload(pair.optimizer, [], Link())
    other = torch.optim.SGD(parameters(), lr=0.1)
    other.step = lambda: None
    with pytest.raises(InvalidOption, match=r"replaced optimizer\.step"):
        StateOffload(other, [], Link())
