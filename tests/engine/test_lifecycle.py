"""Applying, copying, saving and removing: the model is the user's, and afterwards it is what it was."""

from __future__ import annotations

import copy
import io
import types

import pytest
import torch
from torch import nn

import plimsoll
from contracts.harness import Block, Drops, Stack, batch, differences, manage, plain_step, stack_of, train
from engine.models import Through, region_plan, step_on
from plimsoll.engine.apply import apply_plan
from plimsoll.engine.region import ManagedRegion
from plimsoll.errors import PlanMismatch
from samples import make_plan


def build():
    torch.manual_seed(0)
    return stack_of(lambda: nn.Dropout(0.2))()


def snapshot(model):
    """The instance dictionary of every module, with the contents of the dictionaries in it."""
    return {
        name: {key: (value, dict(value) if isinstance(value, dict) else None) for key, value in module.__dict__.items()}
        for name, module in model.named_modules()
    }


def assert_same_dictionaries(before, after):
    assert before.keys() == after.keys()
    for name in before:
        assert list(before[name]) == list(after[name]), name
        for key, (value, contents) in before[name].items():
            found, found_contents = after[name][key]
            assert found is value, f"{name}.{key}"
            assert contents is None or found_contents.keys() == contents.keys(), f"{name}.{key}"
            assert contents is None or all(found_contents[k] is v for k, v in contents.items()), f"{name}.{key}"


def test_removing_restores_every_instance_dictionary_exactly():
    model = build()
    own = model.blocks[1].forward
    model.blocks[1].forward = own
    model.blocks[2].register_forward_hook(lambda module, args, output: output)
    before = snapshot(model)
    handle = manage(model, boundaries=(1,))
    plain_step(model, 0)
    assert isinstance(model.blocks[0].__dict__["forward"], ManagedRegion)
    handle.remove()
    model.zero_grad()
    assert_same_dictionaries(before, snapshot(model))
    assert model.blocks[1].__dict__["forward"] is own
    handle.remove()
    assert_same_dictionaries(before, snapshot(model))


def test_an_error_inside_the_block_restores_everything_too():
    model = build()
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError), manage(model):
        raise ZeroDivisionError
    assert_same_dictionaries(before, snapshot(model))


def test_a_wrapper_that_somebody_put_around_ours_survives_removal_and_runs_the_plain_forward():
    model, plain = build(), build()
    handle = manage(model)
    managed = model.blocks[0].forward
    calls = []

    def wrapper(*args, **kwargs):
        calls.append(1)
        return managed(*args, **kwargs)

    model.blocks[0].forward = wrapper
    train(model, plain_step, 1)
    handle.remove()
    assert model.blocks[0].forward is wrapper
    services = dict(managed.services)
    found = train(model, plain_step, 1)
    assert managed.services == services
    train(plain, plain_step, 1)
    assert differences(train(plain, plain_step, 1), found) == []
    assert len(calls) == 2


def test_pausing_runs_the_plain_model_and_resuming_does_not_record_again():
    model, plain = build(), build()
    with manage(model) as handle:
        found = train(model, plain_step, 1)
        before = [id(s.program) for region in handle.regions.values() for s in region.services.values()]
        with handle.paused():
            assert all("forward" not in block.__dict__ for block in model.blocks)
            found += train(model, plain_step, 1)
        found += train(model, plain_step, 1)
        after = [id(s.program) for region in handle.regions.values() for s in region.services.values()]
    expected = [record for _ in range(3) for record in train(plain, plain_step, 1)]
    assert differences(expected, found) == []
    assert before == after


def test_a_deep_copy_of_a_managed_model_is_a_plain_model_with_the_same_results():
    model, plain = build(), build()
    with manage(model, boundaries=(1,)):
        train(model, plain_step, 1)
        copied = copy.deepcopy(model)
        expected = train(model, plain_step, 2)
        assert not any(isinstance(block.forward, ManagedRegion) for block in copied.blocks)
        assert all(block.forward.__self__ is block for block in copied.blocks)
        assert copied.blocks[0].up.weight is not model.blocks[0].up.weight
        found = train(copied, plain_step, 2)
        twice = copy.deepcopy(copied)
        assert all(block.forward.__self__ is block for block in twice.blocks)
    assert differences(expected, found) == []
    train(plain, plain_step, 1)
    assert differences(train(plain, plain_step, 2), found) == []


def test_a_copy_can_be_managed_itself():
    model = build()
    with manage(model):
        train(model, plain_step, 1)
        copied = copy.deepcopy(model)
        with manage(copied) as handle:
            found = train(copied, plain_step, 2)
            assert all(outcome.dropped_bytes for outcome in handle.outcomes())
    assert differences(train(model, plain_step, 2), found) == []


def copy_of_parts(model, copier):
    """A copy made as ``nn.DataParallel`` makes replicas: every module is copied shallowly, and given other weights."""
    copies = {module: copier(module) for module in model.modules()}
    for module, made in copies.items():
        made._modules = {name: copies[child] for name, child in module._modules.items()}
        made._parameters = {
            name: parameter if parameter is None else nn.Parameter(parameter.detach() * 2)
            for name, parameter in module._parameters.items()
        }
    return copies[model]


@pytest.mark.parametrize("verb", [manage, lambda model: plimsoll.attach(model, "1GiB")], ids=["apply", "attach"])
@pytest.mark.parametrize(
    "copied",
    [
        lambda model: copy_of_parts(model, copy.copy),
        lambda model: copy_of_parts(model, lambda module: module._replicate_for_data_parallel()),
        lambda model: copy_of_parts(copy.deepcopy(model), copy.copy),
    ],
    ids=["shallow", "replica", "shallow copy of a deep copy"],
)
def test_a_shallow_copy_runs_its_own_weights_also_after_removal(copied, verb):
    model, plain = build(), copy_of_parts(build(), copy.copy)
    handle = verb(model)
    if verb is manage:
        train(model, plain_step, 1)
    made = copied(model)
    reference = copy_of_parts(copy.deepcopy(model), copy.copy) if verb is manage else plain
    state = {name: value.clone() for name, value in made.state_dict().items()}
    reference.load_state_dict(state)
    expected = train(reference, plain_step, 2)
    assert differences(expected, train(made, plain_step, 2)) == []
    if verb is not manage:
        assert handle.plan is None, "a call of a copy is no training step of the model"
    handle.remove()
    made.load_state_dict(state)
    assert differences(expected, train(made, plain_step, 2)) == []
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_shallow_copy_of_the_whole_model_shares_its_managed_blocks():
    model, plain = build(), build()
    with manage(model) as handle:
        outer = copy.copy(model)
        expected = train(plain, plain_step, 3)
        assert differences(expected, train(outer, plain_step, 3)) == []
        assert all(outcome.dropped_bytes for outcome in handle.outcomes())
    assert not outer._forward_pre_hooks
    assert differences(train(plain, plain_step, 3), train(outer, plain_step, 3)) == []


def test_a_saved_module_loads_as_a_plain_module_with_the_same_results():
    model = build()
    with manage(model, boundaries=(1,)):
        train(model, plain_step, 1)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        expected = train(model, plain_step, 2)
    assert not any(isinstance(block.forward, ManagedRegion) for block in loaded.blocks)
    assert differences(expected, train(loaded, plain_step, 2)) == []


def test_what_is_saved_or_copied_under_a_plan_keeps_nothing_of_it():
    model = build()
    with plimsoll.attach(model, "1GiB") as attachment:
        train(model, plain_step, 3)
        for made in (model, copy.deepcopy(model)):
            file = io.BytesIO()
            torch.save(made, file)
            assert b"plimsoll" not in file.getvalue()
        copied = copy.deepcopy(model)
        train(copied, plain_step, 1)
        assert [name for name, module in copied.named_modules() if hooks_of(module) or "forward" in vars(module)] == []
        model.blocks = copy.deepcopy(model.blocks)
        train(model, plain_step, 3)
        assert attachment.plan is not None
    assert [name for name, module in model.named_modules() if hooks_of(module) or "forward" in vars(module)] == []


def hooks_of(module):
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def test_a_forward_of_the_instance_survives_copying():
    model = build()
    model.blocks[0].forward = types.MethodType(lambda self, x: Block.forward(self, x) * 2, model.blocks[0])
    plain = copy.deepcopy(model)
    with manage(model):
        found = train(model, plain_step, 2)
        copied = copy.deepcopy(model)
        later = train(copied, plain_step, 2)
    assert differences(train(plain, plain_step, 2) + train(plain, plain_step, 2), found + later) == []


def test_the_state_of_a_managed_model_is_that_of_the_plain_one():
    model = build()
    names = list(model.state_dict())
    with manage(model):
        plain_step(model, 0)
        state = model.state_dict()
        assert list(state) == names
        fresh = build()
        fresh.load_state_dict(state)
        model.load_state_dict(fresh.state_dict())
        assert [name for name, _ in model.named_modules()] == [name for name, _ in build().named_modules()]


def test_moving_a_managed_model_to_another_dtype_keeps_it_managed_and_right():
    model, plain = build(), build()
    double_step = step_on(lambda index: batch(index).double())
    with manage(model) as handle:
        found = train(model, plain_step, 1)
        model.double()
        found += train(model, double_step, 2)
        assert all(outcome.dropped_bytes for outcome in handle.outcomes())
    expected = train(plain, plain_step, 1)
    plain.double()
    assert differences(expected + train(plain, double_step, 2), found) == []


def regions_that_keep(*names):
    return tuple(map(region_plan, names))


def test_a_plan_that_keeps_everything_installs_no_hook_and_no_wrapper():
    model = build()
    before = snapshot(model)
    plan = make_plan(regions=regions_that_keep("blocks.0", "blocks.1", "blocks.2"))
    handle = apply_plan(model, plan)
    assert_same_dictionaries(before, snapshot(model))
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    handle.remove()
    assert_same_dictionaries(before, snapshot(model))


def test_a_region_that_keeps_everything_beside_one_that_does_not_is_untouched():
    model = build()
    with manage(model, ["blocks.1"]):
        assert "forward" not in model.blocks[0].__dict__
        assert not model.blocks[0]._forward_hooks
        plain_step(model, 0)
        assert "forward" not in model.blocks[0].__dict__


def test_recording_leaves_no_hook_on_submodules():
    model = build()
    before = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.blocks.modules()]
    with manage(model):
        plain_step(model, 0)
        assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.blocks.modules()] == before


def test_a_region_that_the_model_does_not_have_is_refused_and_nothing_is_installed():
    model = build()
    before = snapshot(model)
    with pytest.raises(PlanMismatch, match=r"blocks\.7"):
        apply_plan(model, make_plan(regions=regions_that_keep("blocks.0", "blocks.7")))
    assert_same_dictionaries(before, snapshot(model))


def test_calls_of_one_region_follow_their_own_plans():
    """The k-th call within one forward of the model has the k-th plan, in every step."""
    torch.manual_seed(0)
    plain = Through(Block(nn.Tanh()), way=lambda blocks, x: blocks[0](blocks[0](x)))
    model = copy.deepcopy(plain)
    with manage(model, ["blocks.0"]) as handle:
        region = handle.regions["blocks.0"]
        region.use((Drops(region.name), Drops(region.name, is_left_alone=True, call=1)))
        found = train(model, plain_step, 3)
        assert [outcome.call for outcome in handle.outcomes()] == [0]
    assert differences(train(plain, plain_step, 3), found) == []


def test_the_signature_of_a_managed_forward_is_still_that_of_the_module():
    import inspect

    model = build()
    expected = inspect.signature(model.blocks[0].forward)
    with manage(model):
        assert inspect.signature(model.blocks[0].forward) == expected


@pytest.mark.parametrize("change", ["the class's forward", "the class"])
def test_another_forward_of_the_class_is_run_from_the_next_call_on(change):
    def build():
        class Own(Block):
            pass

        return Stack(*(Own(nn.Tanh()) for _ in range(2)))

    class Other(Block):
        def forward(self, x):
            return super().forward(x).sin() * 2

    def step(model, index):
        if index == 2:
            for block in model.blocks:
                if change == "the class":
                    block.__class__ = Other
                else:
                    type(block).forward = lambda self, x: Block.forward(self, x).sin() * 2
        return plain_step(model, index)

    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    managed = build()
    with manage(managed), pytest.warns(UserWarning, match="kept all its activations"):
        found = train(managed, step, 5)
    assert differences(train(plain, step, 5), found) == []
