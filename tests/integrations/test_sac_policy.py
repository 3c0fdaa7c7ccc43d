"""A plan as a policy of torch's selective activation checkpointing: the same bits, about the planned peak, torch alone."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import plimsoll
import zoo
from long_cases import some
from metering import LiveStorages
from plimsoll.artifacts.decision import Decision, Status
from plimsoll.artifacts.plan import CompiledUnit, Plan, ValueDecision
from plimsoll.errors import InvalidOption, PlanNotUsable
from plimsoll.integrations import sac_policy
from plimsoll.tracing.recorder.opkey import value_stem
from samples import make_plan
from steps import Net


def draws() -> Net:
    """Draws twice, and moves a buffer that it has read."""

    def draw(net: Net, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(net.first(x) * torch.rand_like(x)) * net.mean.exp()
        net.mean.lerp_(x.detach().mean(0), 0.1)
        return torch.tanh(net.norm(net.second(x)) * torch.rand_like(x))

    parts = {"first": nn.Linear(32, 32), "second": nn.Linear(32, 32), "norm": nn.BatchNorm1d(32)}
    return Net(draw, **parts, mean=nn.Buffer(torch.zeros(32)))


def drawing() -> nn.Module:
    torch.manual_seed(0)
    way = lambda net, x: {"loss": net.blocks(x).square().mean()}  # noqa: E731
    return Net(way, blocks=nn.Sequential(*[draws() for _ in range(3)]))


CASES = {
    "dropout, budget": (lambda: zoo.build("gpt2"), lambda: zoo.words(4, 32), None),
    "llama": (lambda: zoo.build("llama"), lambda: zoo.words(4, 32), "selective:mm"),
    "experts": (lambda: zoo.build("mixtral"), lambda: zoo.words(4, 32), "selective:attention"),
    "batch norm": (lambda: zoo.build("resnet"), lambda: zoo.pictures(4, 32), "selective:convolution"),
    "draws are kept": (drawing, lambda: {"x": torch.randn(16, 32)}, "selective:rand_like,tanh"),
    "all again": (drawing, lambda: {"x": torch.randn(16, 32)}, "full"),
}


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("policy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(model: nn.Module, batch: dict[str, Any]) -> list[Any]:
    """Losses, gradients and buffers of two steps of two micro-batches."""
    torch.manual_seed(3)
    losses = []
    for _ in range(2):
        model.zero_grad()
        for _ in range(2):
            loss = model(**batch)["loss"]
            loss.backward()
            losses.append(loss.detach())
    return [*losses, *[each.grad for each in model.parameters() if each.grad is not None], *model.buffers()]


@pytest.mark.parametrize(("make", "make_batch", "strategy"), some(CASES.values(), 2), ids=CASES)
def test_a_policy_keeps_every_bit_and_about_the_planned_peak(make, make_batch, strategy, tmp_path):
    batch = make_batch()
    wanted = trained(make(), batch)
    plan = plimsoll.plan(make(), batch, strategy=strategy or "full")
    if strategy is None:
        plan = plimsoll.plan(make(), batch, budget=(plan.predicted_peak_bytes + plan.baseline_peak_bytes) // 2)
    plan.export("sac", tmp_path / "policy.py")
    with LiveStorages() as meter:
        model, batch = make(), {name: tensor.clone() for name, tensor in batch.items()}
        load(tmp_path / "policy.py").apply(model)
        meter.watch(model)
        found = trained(model, batch)
    assert all(map(torch.equal, found, wanted))
    # Later micro-batches add to gradients that are there, which was not planned for. Checkpointing holds random states.
    states_bytes = len(plan.regions) * torch.get_rng_state().nbytes
    assert meter.peaks[0] <= 1.1 * plan.predicted_peak_bytes + states_bytes


def structure(model: nn.Module) -> list[Any]:
    return [(sorted(vars(each)), len(each._forward_pre_hooks), len(each._forward_hooks)) for each in model.modules()]


@pytest.fixture
def policy(tmp_path):
    plimsoll.plan(zoo.build("llama"), zoo.words(), strategy="selective:attention").export("sac", tmp_path / "policy.py")
    return tmp_path / "policy.py"


def test_a_policy_needs_torch_alone(policy):
    tree = ast.parse(policy.read_text())
    imported = {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} - sys.stdlib_module_names == {"torch"}


def test_a_policy_serves_other_sizes_and_leaves_the_model_as_it_was(policy):
    batch, model = zoo.words(3, 24), zoo.build("llama")
    undo = load(policy).apply(model)
    assert all(map(torch.equal, trained(model, batch), trained(zoo.build("llama"), batch)))
    with pytest.raises(RuntimeError, match="apply the policy only once"):
        load(policy).apply(model)
    undo()
    assert structure(model) == structure(zoo.build("llama"))


def changed(**changes: Any) -> Plan:
    plan = make_plan()
    return msgspec.structs.replace(plan, regions=(msgspec.structs.replace(plan.regions[0], **changes),))


PACKED = ValueDecision(value="mlp::mm#0", decision=Decision.COMPRESS, bytes=64, form="int8")
REFUSED = {
    "compressed": (changed(decisions=(PACKED,)), "sac", PlanNotUsable, "holds mlp::mm#0 of model.layers.0 as int8"),
    "boundary": (changed(is_boundary_dropped=True), "sac", PlanNotUsable, "drops the input of model.layers.0"),
    "compiled": (make_plan(compiled=(CompiledUnit(path="", regions=()),)), "sac", PlanNotUsable, "partitioner"),
    "no plan": (make_plan(status=Status.INFEASIBLE), "sac", PlanNotUsable, "INFEASIBLE"),
    "another kind": (make_plan(), "jax", InvalidOption, "sac"),
}


@pytest.mark.parametrize(("plan", "kind", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_a_policy_cannot_say_is_refused(plan, kind, error, words, tmp_path):
    with pytest.raises(error) as caught:
        plan.export(kind, tmp_path / "policy.py")
    assert words in caught.value.why
    assert not (tmp_path / "policy.py").exists()


def test_the_policy_names_attention_as_plans_do():
    names = {str(schema.name).removeprefix("aten::") for schema in torch._C._jit_get_all_schemas()}
    attention = [name for name in names if "scaled_dot_product" in name and not name.endswith("_backward")]
    assert len(attention) > 5
    for name in attention:
        assert sac_policy._ATTENTION.sub("scaled_dot_product_attention", name) == value_stem(name)
