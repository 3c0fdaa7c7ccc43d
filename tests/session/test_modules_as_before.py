"""Trial steps leave every module unchanged: class, attributes, parts, hooks and parameters.

The first call of a model changes it where hooks are registered lazily behind a flag, as transformers does to collect hidden
states, attentions and router logits. If that first call is a trial step, flag and hooks must be put back together.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations, parametrize, weight_norm

import plimsoll
import zoo
from contracts.harness import Block, Stack, batch, plain_step, weigh
from plimsoll.artifacts.receipt import ReceiptVerdict
from plimsoll.errors import BudgetBelowFloor
from plimsoll.tracing.recorder.untouched import KeptState

pytestmark = pytest.mark.filterwarnings("ignore")

_TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_STATES = {"output_hidden_states": True}
_ALL = {"output_hidden_states": True, "output_attentions": True}
_EXPERTS = {
    **_TOWER,
    "vocab_size": zoo.VOCABULARY,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_EXPERTS |= {"moe_intermediate_size": 32, "use_cache": False, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}


def read(output):
    """A loss that reads all that a model returns: its own loss, and every state, attention, router logit and cache."""
    found = [output.loss]
    for name in ("hidden_states", "attentions", "decoder_hidden_states", "encoder_hidden_states", "router_logits"):
        found += [each.square().mean() for each in output.get(name) or () if each is not None]
    cache = output.get("past_key_values")
    for layer in () if cache is None else getattr(cache, "self_attention_cache", cache).layers:
        found += [layer.keys.square().mean(), layer.values.square().mean()]
    return sum(found)


def counts(output):
    return {name: len(output[name]) for name in ("hidden_states", "attentions", "router_logits") if output.get(name)}


def seen(name, *, call=_STATES, **changes):
    return lambda: (zoo.build(name, **changes), {**zoo.batch(name), **call})


def experts(kind, **fields):
    def make():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**_EXPERTS | fields)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).train()
        return model, {**zoo.words(), "output_router_logits": True}

    return make


def llava():
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(**_TOWER, image_size=16, patch_size=8, projection_dim=32)
    text = transformers.LlamaConfig(**_TOWER, vocab_size=zoo.VOCABULARY, num_key_value_heads=2, use_cache=False)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=1)
    ids = torch.randint(2, zoo.VOCABULARY, (2, 10))
    ids[:, 1:5] = 1
    call = {"input_ids": ids, "labels": ids, "pixel_values": torch.randn(2, 3, 16, 16)}
    return transformers.LlavaForConditionalGeneration(config).train(), call


def segformer():
    torch.manual_seed(0)
    config = transformers.SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16
    )
    model = transformers.SegformerForSemanticSegmentation(config).train()
    return model, {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 2, (2, 32, 32))}


TRANSFORMERS = {
    **{f"{name}, states": seen(name) for name in ("gpt2", "bert", "vit", "swin", "convnext", "resnet")},
    "llama, states and attentions": seen("llama", call=_ALL, attn_implementation="eager"),
    "t5, states": seen("t5"),
    "clip": seen("clip", call={}),
    "mixtral, router logits": seen("mixtral", call={"output_router_logits": True}),
    "qwen3-moe, router logits": experts("Qwen3Moe", head_dim=8),
    "olmoe, router logits": experts("Olmoe"),
    "llama, cache": seen("llama", call={}, use_cache=True),
    "t5, cache": seen("t5", call={}, use_cache=True),
    "llava": llava,
    "segformer": segformer,
}


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


def structure(model):
    """What every module and every parameter is, by identity and in order: two of these are equal, or something was changed."""
    found = {}
    for name, module in model.named_modules():
        found[name] = type(module), [(key, id(value)) for key, value in vars(module).items() if key != "training"]
        for key, table in vars(module).items():
            if isinstance(table, dict):
                found[f"{name}.{key}"] = [(entry, id(value)) for entry, value in table.items()]
    for name, parameter in model.named_parameters():
        tables = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        found[f"{name}, hooks"] = [table if table is None else list(table.items()) for table in tables]
        found[f"{name}, attributes"] = list(vars(parameter).items())
    return found


def outline(model):
    """What a model and a copy of it have in common: classes, names, numbers of hooks."""
    return {
        (name, key): (type(module).__name__, len(value) if isinstance(value, dict) else 0)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    }


def stepped(model, call, loss):
    """The gradients of one step, and how many states it collects."""
    model.zero_grad()
    torch.manual_seed(1)
    output = model(**call) if isinstance(call, dict) else model(call)
    loss(output).backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return gradients, counts(output) if isinstance(output, dict) else {}


def assert_same(found, expected):
    assert found[1] == expected[1]
    assert found[0].keys() == expected[0].keys()
    assert [name for name, each in expected[0].items() if not torch.equal(each, found[0][name])] == []


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
    after = structure(model)
    assert [name for name in {**before, **after} if before.get(name) != after.get(name)] == []
    expected = stepped(plain, call, loss)
    assert_same(stepped(model, call, loss), expected)
    assert outline(model) == outline(plain)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_model_whose_first_call_is_a_trial_step_is_left_as_it_was(name):
    check(TRANSFORMERS[name], read, plans)


@pytest.mark.parametrize("work", [verifies, fails, applies, attaches])
@pytest.mark.parametrize("name", ["llama, states and attentions", "qwen3-moe, router logits", "segformer"])
def test_whatever_runs_trial_steps_leaves_a_model_as_it_was(name, work):
    check(TRANSFORMERS[name], read, work)


@pytest.mark.parametrize("name", PUT)
def test_what_forward_registers_lazily_is_put_back_with_its_flag(name):
    check(lambda: (lazy(PUT[name]), batch(0)), weigh, plans)


@pytest.mark.parametrize("work", [verifies, fails])
@pytest.mark.parametrize("name", ["forward hook", "full backward hook", "hook of a parameter", "parametrization"])
def test_whatever_runs_trial_steps_puts_lazily_registered_things_back(name, work):
    check(lambda: (lazy(PUT[name]), batch(0)), weigh, work)


@pytest.mark.parametrize("work", WORK)
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
    for found, known in zip(attached(model, call, loss), expected, strict=True):
        assert_same(found, known)
    assert outline(model) == outline(plain)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_first_step_under_a_budget_registers_what_it_registers_without_one(name):
    check_attached(TRANSFORMERS[name], read)


@pytest.mark.parametrize("name", PUT)
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
