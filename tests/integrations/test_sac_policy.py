"""A plan as a policy of torch's selective activation checkpointing: the same bits, about the planned peak, torch alone."""

from __future__ import annotations

import ast
import copy
import importlib.util
import io
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import plimsoll
import zoo
from long_cases import some
from metering import LiveStorages
from plimsoll.artifacts.decision import Decision, Status
from plimsoll.artifacts.plan import CompiledUnit, Plan, ValueDecision
from plimsoll.artifacts.tile import Tile
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


def python_values() -> Net:
    """Reads Python's and numpy's random numbers, a counter and a tensor that it moves, and makes a table in its first call."""

    def scale(net: Net, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(net, "table"):
            net.table = torch.arange(32.0).cos()
        net.count += 1
        net.memory.add_(1.0)
        factor = random.random() + np.random.rand() + net.count
        return torch.tanh(net.first(x) * factor * net.memory.clone() * net.table).sin()

    return Net(scale, first=nn.Linear(32, 32), count=0, memory=torch.ones(()))


def reading() -> nn.Module:
    torch.manual_seed(0)
    way = lambda net, x: {"loss": net.blocks(x).square().mean()}  # noqa: E731
    return Net(way, blocks=nn.Sequential(*[python_values() for _ in range(3)]))


CASES = {
    "dropout, budget": (lambda: zoo.build("gpt2"), lambda: zoo.words(4, 32), None),
    "llama": (lambda: zoo.build("llama"), lambda: zoo.words(4, 32), "selective:mm"),
    "experts": (lambda: zoo.build("mixtral"), lambda: zoo.words(4, 32), "selective:attention"),
    "batch norm": (lambda: zoo.build("resnet"), lambda: zoo.pictures(4, 32), "selective:convolution"),
    "draws are kept": (drawing, lambda: {"x": torch.randn(16, 32)}, "selective:rand_like,tanh"),
    "all again": (drawing, lambda: {"x": torch.randn(16, 32)}, "full"),
    "python values": (reading, lambda: {"x": torch.randn(16, 32)}, "full"),
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
    random.seed(3)
    np.random.seed(3)
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


def shifted(net: Net, x: torch.Tensor, shift: Any = 0.0) -> torch.Tensor:
    return torch.tanh(net.first(x) + (shift[0] if isinstance(shift, list) else shift)).sin()


def chain(way: Any, tmp_path: Path) -> tuple[nn.Module, ModuleType]:
    """A model of three blocks that forward calls by ``way``, and the policy that runs all of them again."""
    model = Net(way, blocks=nn.ModuleList(Net(shifted, first=nn.Linear(8, 8)) for _ in range(3)))
    plimsoll.plan(model, {"x": torch.randn(4, 8)}, strategy="full").export("sac", tmp_path / "policy.py")
    return model, load(tmp_path / "policy.py")


def plainly(net: Net, x: torch.Tensor) -> dict[str, torch.Tensor]:
    for each in net.blocks:
        x = each(x)
    return {"loss": x.sum()}


def with_a_written_argument(net: Net, x: torch.Tensor) -> dict[str, torch.Tensor]:
    shift = torch.zeros(())
    for each in net.blocks:
        x = each(x, shift=shift)
        shift += 1.0
    return {"loss": x.sum()}


def with_a_written_list(net: Net, x: torch.Tensor) -> dict[str, torch.Tensor]:
    numbers = [0.0]
    for each in net.blocks:
        x = each(x, numbers)
        numbers[0] += 1.0
    return {"loss": x.sum()}


WRONG = {
    "an argument by name": (with_a_written_argument, "was written after the call"),
    "a number in a list": (with_a_written_list, r"aten\.add\.\w+ got .* in forward, and gets .* now"),
}


@pytest.mark.parametrize(("way", "words"), WRONG.values(), ids=WRONG)
def test_a_region_that_cannot_run_again_as_it_did_raises_instead_of_giving_wrong_gradients(way, words, tmp_path):
    model, policy = chain(way, tmp_path)
    policy.apply(model)
    loss = model(x=torch.randn(4, 8))["loss"]
    with pytest.raises(RuntimeError, match=words):
        loss.backward()


def test_copies_and_files_of_a_model_under_a_policy_train_as_it_does(tmp_path, monkeypatch):
    model, policy = chain(plainly, tmp_path)
    batch = {"x": torch.randn(4, 8)}
    wanted = trained(copy.deepcopy(model), batch)
    policy.apply(model)
    monkeypatch.setitem(sys.modules, "policy", policy)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for each in (
        copy.deepcopy(model),
        torch.optim.swa_utils.AveragedModel(model).module,
        torch.load(file, weights_only=False),
    ):
        own = list(each.modules())
        regions = [inner.forward.__self__ for inner in own if "forward" in vars(inner)]
        assert len(regions) == 3
        assert all(any(region.module is inner for inner in own) for region in regions)
        assert all(map(torch.equal, trained(each, batch), wanted))
        assert [region.count for region in regions] == [1, 1, 1]


def test_a_policy_that_does_not_fit_the_model_leaves_it_as_it_was(tmp_path):
    model, policy = chain(plainly, tmp_path)
    del model.blocks[2]
    before = structure(model)
    with pytest.raises(AttributeError, match="2"):
        policy.apply(model)
    assert structure(model) == before


def changed(**changes: Any) -> Plan:
    plan = make_plan()
    return msgspec.structs.replace(plan, regions=(msgspec.structs.replace(plan.regions[0], **changes),))


PACKED = ValueDecision(value="mlp::mm#0", decision=Decision.COMPRESS, bytes=64, form="int8")
TILE = Tile(path="model.layers.0.mlp", count=8, rows=1024, inputs={"0": 1}, outputs=(1,))
REFUSED = {
    "tiled": (make_plan(tiles=(TILE,)), "sac", PlanNotUsable, "runs model.layers.0.mlp in 8 tiles"),
    "of another framework": (make_plan(framework="jax"), "sac", PlanNotUsable, "the plan is for jax"),
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
