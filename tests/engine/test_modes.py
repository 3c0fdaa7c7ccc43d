"""Everything that can be active around a managed model: autocast, functional calls, transforms, hooks, compilers, modes."""

from __future__ import annotations

import contextlib
import copy
import warnings

import msgspec
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import plimsoll
from contracts.harness import (
    Block,
    assert_unchanged,
    batch,
    differences,
    manage,
    plain_step,
    stack_of,
    train,
    weigh,
)
from engine.models import Inner, Through, attention, step_on, tied
from long_cases import some
from plimsoll.engine.apply import apply_plan
from plimsoll.errors import InvalidModel
from steps import Net


def attending():
    return attention(after=lambda y, x: y * x.exp(), dropout=0.1)


def under_autocast(loss_of, cache_enabled=lambda index: True):
    """A step whose forward runs under autocast."""

    def step(model, index):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled(index)):
            loss = loss_of(model, index)
        loss.backward()
        return loss

    return step


def once(model, index):
    return weigh(model(batch(index)))


def twice(model, index):
    return weigh(model(batch(index))) + weigh(model(batch(index + 50)))


def after_a_forward_that_fills_the_cache(model, index):
    if index == 0:
        with torch.no_grad():
            model(batch(index + 50))
    return once(model, index)


def backward_too(model, index):
    with torch.autocast("cpu", torch.bfloat16):
        return plain_step(model, index)


def backward_only(model, index):
    loss = once(model, index)
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    return loss


def test_autocast_keeps_every_bit_and_drops_weight_casts():
    report = assert_unchanged(stack_of(attending), under_autocast(once))
    assert report.dropped_share > 0.9, report.obstacles


@pytest.mark.parametrize(
    ("step", "settings"),
    [
        (under_autocast(twice), {}),
        (under_autocast(twice), {"boundaries": (1,)}),
        (under_autocast(after_a_forward_that_fills_the_cache), {"steps": 6, "engine": None}),
        (backward_too, {}),
        (backward_too, {"boundaries": (1, 2)}),
        (backward_only, {}),
    ],
    ids=["two calls", "two linked calls", "a warm cache", "backward too", "linked, backward too", "backward only"],
)
def test_autocast_around_more_or_less_than_one_forward_keeps_every_bit(step, settings):
    assert_unchanged(stack_of(attending), step, **settings)


def test_autocast_without_a_cache_and_switched_off_inside_keeps_every_bit():
    def careful(x):
        with torch.autocast("cpu", enabled=False):
            return (x.float() @ x.float().T).softmax(-1) @ x.float()

    step = under_autocast(once, cache_enabled=lambda index: index % 2 == 0)
    assert_unchanged(stack_of(lambda: Inner(careful)), step, steps=5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scaled_gradients_keep_every_bit(dtype):
    scalers = {}

    def step(model, index):
        scaler = scalers.setdefault(id(model), torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.autocast("cpu", dtype):
            loss = weigh(model(batch(index)))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return loss, torch.tensor(scaler.get_scale())

    assert_unchanged(stack_of(attending), step, steps=5)


def test_a_bfloat16_model_keeps_every_bit():
    assert_unchanged(lambda: stack_of(attending)().bfloat16(), step_on(lambda index: batch(index).bfloat16()))


@pytest.mark.parametrize("boundaries", [(), (1,)])
def test_functional_calls_with_other_parameters_keep_every_bit(boundaries):
    def step(model, index):
        others = {
            name: (parameter.detach() * (1 + 0.1 * index)).requires_grad_()
            for name, parameter in model.named_parameters()
        }
        loss = weigh(torch.func.functional_call(model, others, (batch(index),)))
        own = weigh(model(batch(index + 50)))
        (loss + own).backward()
        return loss, own, *(parameter.grad for parameter in others.values())

    assert_unchanged(stack_of(nn.Tanh), step, boundaries=boundaries)


def test_functional_calls_with_parameters_that_lie_otherwise_keep_every_bit():
    def step(model, index):
        others = {}
        for name, parameter in model.named_parameters():
            changed = parameter.detach()
            if index > 0 and parameter.dim() == 2:
                changed = changed.t().contiguous().t()
            if index > 0 and name.endswith("bias"):
                changed = changed[:1].expand(parameter.shape)
            others[name] = changed.clone(memory_format=torch.preserve_format) if index == 0 else changed
            others[name].requires_grad_()
        loss = weigh(torch.func.functional_call(model, others, (batch(index),)))
        gradients = torch.autograd.grad(loss, list(others.values()))
        plain_step(model, index)
        return loss, *gradients

    assert_unchanged(stack_of(nn.Tanh), step, steps=4, engine=None)


def test_untying_tied_parameters_in_a_functional_call_keeps_every_bit():
    def step(model, index):
        loss = plain_step(model, index)
        others = {
            name: (parameter.detach() * (0.5 + position / 10)).requires_grad_()
            for position, (name, parameter) in enumerate(model.named_parameters(remove_duplicate=False))
        }
        untied = weigh(torch.func.functional_call(model, others, (batch(index),), tie_weights=False))
        return loss, untied, *torch.autograd.grad(untied, list(others.values()))

    assert_unchanged(stack_of(tied, count=2), step, engine=None)


def test_parameters_that_are_replaced_between_steps_are_seen():
    def step(model, index):
        if index % 2:
            model.blocks[0].up = nn.utils.skip_init(nn.Linear, 16, 32)
            with torch.no_grad():
                for parameter in model.blocks[0].up.parameters():
                    parameter.copy_(torch.randn(parameter.shape))
            model.blocks[1].down.bias = nn.Parameter(torch.ones(16))
        return plain_step(model, index)

    assert_unchanged(stack_of(nn.Tanh), step, steps=4, engine=None)


def test_parametrised_weights_added_after_apply_keep_every_bit():
    def step(model, index):
        if index == 2:
            for block in model.blocks:
                nn.utils.parametrize.register_parametrization(block.up, "weight", nn.Tanh())
        return plain_step(model, index)

    assert_unchanged(stack_of(nn.Tanh), step, steps=5, engine=None)


def test_function_transforms_take_the_original_path():
    torch.manual_seed(0)
    model = stack_of(nn.Tanh)()
    parameters = dict(model.named_parameters())

    def loss_of(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    def everything():
        per_sample = torch.func.vmap(torch.func.grad(loss_of), (None, 0))(parameters, batch(0)[:, None])
        tangent = torch.func.jvp(model, (batch(1),), (batch(2),))[1]
        hessian = torch.func.jacrev(torch.func.jacfwd(lambda x: model(x).sum()))(batch(3)[0])
        return [*per_sample.values(), tangent, hessian]

    expected = everything()
    with manage(model):
        plain_step(model, 0)
        found = everything()
    assert all(torch.equal(first, second) for first, second in zip(expected, found, strict=True))


def test_forward_mode_derivatives_with_dual_numbers_keep_every_bit():
    forward_ad = torch.autograd.forward_ad

    def step(model, index):
        loss = plain_step(model, index)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(batch(index), batch(index + 50))
            tangent = forward_ad.unpack_dual(model(dual)).tangent
        return loss, tangent

    assert_unchanged(stack_of(nn.Tanh), step)


def test_hooks_of_the_user_around_a_managed_model_get_every_tensor():
    packed = []

    def step(model, index):
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
            loss = weigh(model(batch(index)))
        loss.backward()
        return loss, torch.tensor(len(packed))

    assert_unchanged(stack_of(nn.Tanh), step, engine=None)


@pytest.mark.parametrize(
    "around",
    [torch.autograd.graph.save_on_cpu, lambda: torch.autograd.graph.disable_saved_tensors_hooks("no hooks here")],
    ids=["saving on the CPU", "forbidding hooks"],
)
def test_other_hooks_or_none_around_forward_keep_every_bit(around):
    def step(model, index):
        if index == 1:
            plain_step(model, index + 50)
        with around():
            loss = weigh(model(batch(index)))
        loss.backward()
        return loss

    assert_unchanged(stack_of(lambda: nn.Dropout(0.2)), step, engine=None)


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_outer_checkpoint_around_managed_blocks_keeps_every_bit(reentrant):
    def checkpointed(blocks, x):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    build = lambda: Through(*(Block(nn.Dropout(0.3)) for _ in range(2)), way=checkpointed)  # noqa: E731
    assert_unchanged(build, plain_step, engine=None)


def test_an_inner_checkpoint_and_a_selective_one_keep_every_bit():
    def checkpoints(**settings):
        way = lambda net, x: checkpoint(net.inner, x, use_reentrant=False, **settings).exp().tanh()  # noqa: E731
        return Net(way, inner=attending())

    assert_unchanged(stack_of(checkpoints), plain_step, steps=4, engine=None)
    contexts = lambda: create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])  # noqa: E731
    assert_unchanged(stack_of(lambda: checkpoints(context_fn=contexts)), plain_step, steps=4, engine=None)


def test_a_checkpoint_around_the_whole_model_keeps_every_bit():
    def step(model, index):
        loss = weigh(checkpoint(model, batch(index), use_reentrant=False))
        loss.backward()
        return loss

    assert_unchanged(stack_of(lambda: nn.Dropout(0.3)), step, engine=None)


@pytest.mark.filterwarnings("ignore")
def test_a_branch_on_random_data_keeps_every_bit():
    def branch(x):
        y = nn.functional.dropout(x, 0.3)
        return y.exp() if float(y.sum()) > 0 else y.tanh()

    assert_unchanged(stack_of(lambda: Inner(branch)), plain_step, steps=6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("when", ["submodule", "block", "submodule after apply"])
def test_compiled_parts_keep_every_bit(backend, when):
    torch._dynamo.reset()

    def build():
        model = stack_of(nn.Tanh, count=2)()
        for block in model.blocks if when == "submodule" else ():
            block.inner = torch.compile(block.inner, backend=backend)
        if when == "block":
            model.blocks[0].compile(backend=backend)
        return model

    def step(model, index):
        if when == "submodule after apply" and index == 1:
            for block in model.blocks:
                block.up.compile(backend=backend)
        return plain_step(model, index)

    assert_unchanged(build, step, steps=5, engine=None)


COMPILED = {
    "the whole model": lambda model: torch.compile(model, backend="aot_eager"),
    "in place": lambda model: model.compile(backend="aot_eager") or model,
    "every block": lambda model: [block.compile(backend="aot_eager") for block in model.blocks] and model,
    "every block's part": lambda model: [block.up.compile(backend="aot_eager") for block in model.blocks] and model,
    "the step": lambda model: torch.compile(lambda x: model(x), backend="aot_eager"),
}


def attach(model):
    return plimsoll.attach(model, "1GiB")


def plan_of(model):
    return plimsoll.plan(model, batch(0), strategy="full", loss=weigh)


VERBS = {
    "plan": lambda model, plan: plan_of(model),
    "apply": apply_plan,
    "attach": lambda model, plan: attach(model) and plain_step(model, 0),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("how", some(["the whole model", "in place", "every block", "every block's part"], 2))
def test_a_model_that_is_compiled_before_is_refused(how, verb):
    torch._dynamo.reset()
    model = stack_of(nn.Tanh)()
    plan = plan_of(model)
    compiled = COMPILED[how](model)
    if how == "the whole model":  # whose names of regions are others, too
        plan = msgspec.structs.replace(plan, regions=())
    with pytest.raises(InvalidModel, match=r"compiled by torch\.compile"):
        VERBS[verb](compiled, plan)


@pytest.mark.parametrize("first", [True, False], ids=["at once", "after a step"])
@pytest.mark.parametrize(
    ("how", "verb"),
    some(
        [
            *((how, manage) for how in COMPILED if "part" not in how),
            *((how, attach) for how in COMPILED if "block" not in how),
        ],
        2,
    ),
)
def test_a_model_that_is_compiled_after_is_refused_when_it_trains(how, verb, first):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = stack_of(nn.Tanh)()
    expected = train(copy.deepcopy(model), plain_step, 1)
    handle = verb(model)
    if not first:
        plain_step(model, 0)
    compiled = COMPILED[how](model)
    with pytest.raises(InvalidModel, match="while a plan was managing it"):
        plain_step(compiled, 1)
    with torch.no_grad():
        assert compiled(batch(0)).shape == (5, 4)
    handle.remove()
    model.zero_grad()
    assert differences(expected, train(model, plain_step, 1)) == []


TRACERS = {
    "jit.trace": lambda model: torch.jit.trace(model, batch(1)),
    "make_fx": lambda model: make_fx(model)(batch(1)),
    "make_fx with symbols": lambda model: make_fx(model, tracing_mode="symbolic", _allow_non_fake_inputs=True)(
        batch(1)
    ),
    "export": lambda model: torch.export.export(model, (batch(1),), strict=False).module(),
    "strict export": lambda model: torch.export.export(model, (batch(1),), strict=True).module(),
    "symbolic_trace": torch.fx.symbolic_trace,
}


@pytest.mark.parametrize("verb", [manage, attach])
@pytest.mark.parametrize("name", some(TRACERS, 3))
def test_tracers_see_the_plain_model_and_leave_training_as_it_was(name, verb):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = stack_of(nn.Tanh, count=2)()
    plain = copy.deepcopy(model)
    with warnings.catch_warnings(), verb(model):
        warnings.simplefilter("ignore")
        for steps in (1, 2):
            traced = TRACERS[name](model)
            assert torch.equal(traced(batch(2)), plain(batch(2)))
            assert differences(train(plain, plain_step, steps), train(model, plain_step, steps)) == []


@pytest.mark.filterwarnings("ignore")
def test_scripting_is_refused_under_a_plan_and_for_copies_made_of_it_then():
    model = stack_of(nn.Tanh, count=2)()
    with manage(model):
        for subject in (model, copy.deepcopy(model)):
            with pytest.raises(InvalidModel, match=r"handle\.remove\(\)"):
                torch.jit.script(subject)
    assert torch.equal(torch.jit.script(model)(batch(0)), model(batch(0)))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_inside_a_region_keeps_every_bit():
    torch._dynamo.reset()
    function = torch.compile(lambda x: (x.exp() * x).tanh(), backend="aot_eager")

    class Compiled(nn.Module):
        def forward(self, x):
            return function(x) * x

    assert_unchanged(stack_of(Compiled), plain_step, steps=5, engine=None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["closure", "attribute", "method"])
def test_a_compiled_function_that_is_reached_through_another_one_keeps_every_bit(way):
    torch._dynamo.reset()
    function = torch.compile(lambda x: (x.exp() * x).tanh(), backend="aot_eager")

    def through(x):
        return function(x) * x

    class ByClosure(nn.Module):
        def forward(self, x):
            return through(x)

    class ByMethod(nn.Module):
        def forward(self, x):
            return self.inner(x)

        def inner(self, x):
            return through(x)

    ways = {"closure": ByClosure, "attribute": lambda: Inner(through), "method": ByMethod}
    assert_unchanged(stack_of(ways[way]), plain_step, steps=5, engine=None)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_that_is_not_found_is_not_compiled_with_the_guard():
    """The step that records runs it uncompiled, so bits may be others; the steps after it run it as the user does."""
    torch._dynamo.reset()
    held = {"function": torch.compile(lambda x: (x.exp() * x).tanh(), backend="aot_eager")}
    torch.manual_seed(0)
    plain = stack_of(lambda: Inner(lambda x: held["function"](x) * x))()
    model = copy.deepcopy(plain)
    with manage(model):
        found = train(model, plain_step, 5)
    for expected, step in zip(train(plain, plain_step, 5), found, strict=True):
        torch.testing.assert_close(step, expected)


def test_recording_does_not_make_the_compiler_skip_the_region_for_ever():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = stack_of(nn.Tanh, count=2)()
    with manage(model):
        plain_step(model, 0)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(batch(1)), model(batch(1)))


def test_counting_flops_around_a_managed_model_keeps_every_bit():
    def step(model, index):
        with FlopCounterMode(display=False) as count:
            loss = weigh(model(batch(index)))
        loss.backward()
        return loss, torch.tensor(count.get_total_flops() * (index > 0))

    assert_unchanged(stack_of(nn.Tanh), step)


def test_a_fake_run_of_a_managed_model_does_not_disturb_it():
    from torch._subclasses.fake_tensor import FakeTensorMode

    def step(model, index):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        if index != 1:
            with mode:
                assert model(torch.empty(5, 8)).shape == (5, 4)
        return plain_step(model, index)

    assert_unchanged(stack_of(nn.Tanh), step)


@pytest.mark.filterwarnings("ignore")
def test_flexible_attention_inside_a_region_keeps_every_bit():
    flex_attention = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention

    def flexible(x):
        q = x.detach().view(1, 2, -1, 16)  # it has no backward on a CPU
        return flex_attention(q, q, q.exp()).reshape(x.shape) * x.sigmoid()

    assert_unchanged(stack_of(lambda: Inner(flexible), count=2), plain_step, engine=None)


class Calls(TorchFunctionMode):
    """Notes the calls that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    """Notes the ops that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_function_mode_around_the_step_sees_what_it_sees_without_a_plan():
    build = stack_of(lambda: nn.Sequential(nn.Tanh(), nn.Dropout(0.2)), count=2)
    seen = {}

    def step(model, index):
        with Calls() as calls:
            loss = plain_step(model, index)
        # Attributes aside: backward asks kept tensors for their versions.
        seen.setdefault(id(model), []).append(
            [func for func in calls.seen if getattr(func, "__name__", "") != "__get__"]
        )
        return loss

    assert_unchanged(build, step, steps=4)
    plain, managed = seen.values()
    assert plain == managed


def test_a_dispatch_mode_around_forward_sees_every_op_once_while_a_region_is_recorded():
    seen = {}

    def step(model, index):
        with Ops() as ops:
            loss = weigh(model(batch(index)))
        seen.setdefault(id(model), []).append(ops.seen)
        loss.backward()
        return loss

    assert_unchanged(stack_of(nn.Tanh, count=2), step, steps=3)
    plain, managed = seen.values()
    for before, under in zip(plain, managed, strict=True):
        computing = {op for op in before if not op.is_view}
        assert [op for op in before if op in computing] == [op for op in under if op in computing]


@pytest.mark.parametrize("around", [lambda: torch.device("cpu"), lambda: Calls(), lambda: Ops()])
def test_a_mode_that_comes_and_goes_is_recorded_once(around, recwarn):
    def step(model, index):
        with around() if index % 2 else contextlib.nullcontext():
            return plain_step(model, index)

    torch.manual_seed(0)
    model = stack_of(lambda: nn.Sequential(nn.Tanh(), nn.Dropout(0.2)), count=2)()
    with manage(model) as handle:
        train(model, step, 6)
        assert all(len(region.services) == 2 for region in handle.regions.values())
        assert handle.regions["blocks.0"].calls == 1
    assert not [each for each in recwarn if "plimsoll" in str(each.message)]


REPLACED = {
    "a method": (torch.Tensor, "tanh", lambda x: x.tanh()),
    "a function of torch._C": (torch._C._nn, "softplus", lambda x: torch._C._nn.softplus(x)),
    "a function of linear algebra": (torch._C._linalg, "linalg_vector_norm", lambda x: x / torch.linalg.vector_norm(x)),
    "a function of torch": (torch, "sin", lambda x: torch.sin(x)),
}


@pytest.mark.parametrize("which", REPLACED)
def test_a_replaced_function_runs_once(which, monkeypatch):
    space, name, compute = REPLACED[which]
    original = getattr(space, name)
    monkeypatch.setattr(space, name, lambda *args, **kwargs: original(*args, **kwargs) * 1.5)
    assert_unchanged(stack_of(lambda: Inner(compute)), plain_step, steps=4)


class Doubled(torch.Tensor):
    """Doubles what ``tanh`` makes, and counts how often it is asked."""

    asked = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.asked += 1
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.tanh:
            return super().__torch_function__(torch.Tensor.mul, types, (result, 2.0 + cls.asked % 3), {})
        return result


def test_a_tensor_subclass_that_does_something_else_in_every_call_keeps_every_bit():
    def doubled(x):
        return x.sin().as_subclass(Doubled).tanh().as_subclass(torch.Tensor).exp()

    def step(model, index):
        Doubled.asked = index
        return plain_step(model, index)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_unchanged(stack_of(lambda: Inner(doubled)), step, steps=6)
