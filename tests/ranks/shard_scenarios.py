"""What ranks do in ``test_tensor_parallel.py``: models split over a mesh, without a plan and with one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import plimsoll
from launching import Refusal, refused
from plimsoll.errors import RanksDiffer
from plimsoll.session.manage import agree_on_service
from ranks.small_models import llama

LAYERS = 2
SEQUENCE = 32
VOCABULARY = 128


def everything() -> dict[str, Any]:
    """All scenarios of one launch, in the same order on every rank."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    split = _llama(_tensor_parallel(), mesh)
    sequence = _llama(_sequence_parallel(), mesh)
    of_split = _full(split, _text())
    routed, ids = _Routed(), torch.randint(VOCABULARY, (2, SEQUENCE))
    of_routed = _full(routed, ids, loss=_routed_loss)
    return {
        "whole": _full(_llama({}, mesh), _text()),
        "tensor parallel": of_split,
        "sequence parallel": _full(sequence, _text()),
        "sequence parallel, repeated": _full(sequence, _text(), allow=("recompute", "collectives")),
        "loss parallel": _loss_parallel(mesh),
        "expert parallel": of_routed,
        "under a budget": _equal_under(split, _text(), budget=of_split["budget"]),
        "experts under a budget": _equal_under(routed, ids, loss=_routed_loss, budget=of_routed["budget"]),
        "offloaded": _equal_under(split, _text(), strategy="offload", allow=("recompute", "offload")),
        "misfit": _misfit_on_one_rank(split),
        "disagreement": refused(
            lambda: agree_on_service("blocks.0", (0, 1), f"recipe {'all_reduce ' * dist.get_rank()}")
        ),
        "written in place": _written_in_place(mesh),
    }


class _Collectives(TorchDispatchMode):
    """Counts collectives; ops on DTensors turn into those on local tensors first."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | funcol.AsyncCollectiveTensor) for kind in types):
            return NotImplemented
        is_collective = func.namespace in {"_c10d_functional", "c10d", "_dtensor"}
        self.count += is_collective and "wait" not in str(func) and "_wrap" not in str(func)
        return func(*args, **(kwargs or {}))


def _llama(styles: dict[str, ParallelStyle], mesh: Any) -> nn.Module:
    model = llama(intermediate_size=88, num_attention_heads=4, num_key_value_heads=4)
    return parallelize_module(model, mesh, styles) if styles else model


def _tensor_parallel() -> dict[str, ParallelStyle]:
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    styles: dict[str, ParallelStyle] = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    styles.update({f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")})
    return styles


def _sequence_parallel() -> dict[str, ParallelStyle]:
    styles = _tensor_parallel()
    whole, split = {"hidden_states": Replicate()}, {"hidden_states": Shard(1)}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        styles[f"model.layers.*.{name}"] = RowwiseParallel(output_layouts=Shard(1))
    for name in ("input_layernorm", "post_attention_layernorm"):
        styles[f"model.layers.*.{name}"] = SequenceParallel()
    styles["model.layers.*.self_attn"] = PrepareModuleInput(
        input_kwarg_layouts=split, desired_input_kwarg_layouts=whole
    )
    styles["model.layers.*.mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    styles["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    styles["model.norm"] = SequenceParallel()
    styles["lm_head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return styles


def _text() -> dict[str, torch.Tensor]:
    ids = torch.arange(2 * SEQUENCE).view(2, SEQUENCE) % VOCABULARY
    return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(SEQUENCE)[None]}


def _step(model: nn.Module, batch: Any, loss: Any = None) -> dict[str, torch.Tensor]:
    """One step's gradients: this rank's shards."""
    model.zero_grad()
    output = model(**batch) if isinstance(batch, dict) else model(batch)
    (output.loss if loss is None else loss(output)).backward()
    return {
        name: (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return bool(one) and one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _full(model: nn.Module, batch: Any, *, loss: Any = None, allow: tuple[str, ...] = ("recompute",)) -> dict[str, Any]:
    """Gradients, collectives and dropped bytes with the first block given up: the second one is like it."""
    with _Collectives() as without:
        expected = _step(model, batch, loss)
    first = "blocks.0" if isinstance(model, _Routed) else "model.layers.0"
    plan = plimsoll.plan(model, batch, strategy="full", regions=[first], loss=loss, allow=allow)
    with plimsoll.apply(model, plan, verify_every=1) as handle:
        equal = [_same(expected, _step(model, batch, loss)) for _ in range(2)]
        with _Collectives() as managed:
            equal.append(_same(expected, _step(model, batch, loss)))
        outcomes = handle.outcomes()
    return {
        "equal": equal,
        "equal after": _same(expected, _step(model, batch, loss)),
        "fingerprint": plan.fingerprint,
        "budget": plan.predicted_peak_bytes + (plan.baseline_peak_bytes - plan.predicted_peak_bytes) // 2,
        "inspected": (handle.inspected_tensors, len(handle.faults)),
        "engines": sorted({str(outcome.engine) for outcome in outcomes}),
        "shares": [outcome.dropped_bytes / max(1, outcome.activation_bytes) for outcome in outcomes],
        "collectives": (without.count, managed.count),
        "obstacles": sorted(
            {d.reason for region in plan.regions for d in region.decisions if "cannot be recomputed" in d.reason}
        ),
    }


def _equal_under(model: nn.Module, batch: Any, *, loss: Any = None, **options: Any) -> bool:
    expected = _step(model, batch, loss)
    plan = plimsoll.plan(model, batch, loss=loss, **options)
    with plimsoll.apply(model, plan):
        return all(_same(expected, _step(model, batch, loss)) for _ in range(2))


def _loss_parallel(mesh: Any) -> bool:
    """The logits stay split over the vocabulary until the loss."""
    styles = _tensor_parallel()
    styles["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    model = _llama(styles, mesh)
    ids = _text()["input_ids"]

    def loss(output: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(output.logits.flatten(0, 1), ids.flatten())

    def step() -> dict[str, torch.Tensor]:
        with loss_parallel():
            return _step(model, {"input_ids": ids}, loss)

    expected = step()
    with loss_parallel():
        plan = plimsoll.plan(model, {"input_ids": ids}, strategy="full", regions=["model.layers.0"], loss=loss)
    with plimsoll.apply(model, plan):
        return all(_same(expected, step()) for _ in range(2))


class _Experts(nn.Module):
    """Two experts on each rank; every expert takes so many tokens, which travel there and back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.count = 2 * dist.get_world_size()
        self.router = nn.Linear(width, self.count, bias=False)
        self.up = nn.Parameter(torch.randn(2, width, 2 * width) * 0.1)
        self.down = nn.Parameter(torch.randn(2, 2 * width, width) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        capacity = 2 * tokens.shape[0] // self.count
        weight, expert = self.router(tokens).softmax(-1).topk(1)
        chosen = (expert == torch.arange(self.count)).long()
        position = (chosen.cumsum(0) * chosen).sum(-1) - 1
        last = self.count * capacity
        place = torch.where(position < capacity, expert[:, 0] * capacity + position, last)
        sent = tokens.new_zeros(last + 1, tokens.shape[1]).index_add(0, place, tokens)[:last]
        here = funcol.all_to_all_single_autograd(sent, None, None, dist.group.WORLD)
        here = here.view(-1, 2, capacity, tokens.shape[1]).transpose(0, 1).flatten(1, 2)
        made = torch.bmm(nn.functional.silu(torch.bmm(here, self.up)), self.down)
        made = made.view(2, -1, capacity, tokens.shape[1]).transpose(0, 1).flatten(0, 2).contiguous()
        back = funcol.all_to_all_single_autograd(made, None, None, dist.group.WORLD)
        back = torch.cat([back, back.new_zeros(1, tokens.shape[1])])
        return (back[place] * weight).view_as(x)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.experts = _Experts(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dense(self.norm(x))
        out: torch.Tensor = x + self.experts(x)
        return out


class _Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(_Block(32) for _ in range(LAYERS))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def _routed_loss(logits: torch.Tensor) -> torch.Tensor:
    return logits.logsumexp(-1).mean()


def _misfit_on_one_rank(model: nn.Module) -> str:
    """Rank 1 alone saves other tensors than it recorded, where recipes repeat collectives."""
    last = [f"model.layers.{LAYERS - 1}"]
    plan = plimsoll.plan(model, _text(), strategy="full", regions=last, allow=("recompute", "collectives"))
    found = ""
    with plimsoll.apply(model, plan) as handle:
        _step(model, _text())
        layer = model.model.layers[LAYERS - 1]  # behind it nobody waits for this rank
        hook = None
        if dist.get_rank() == 1:
            hook = layer.mlp.act_fn.register_forward_hook(lambda module, args, output: output * 1)
        try:
            model(**_text())
        except RanksDiffer as error:
            found = error.found
        if hook is not None:
            hook.remove()
        assert handle.regions
    dist.barrier()
    return found


def _written_in_place(mesh: Any) -> Refusal:
    """A DTensor that a recipe starts from is written between forward and backward."""
    kept: list[torch.Tensor] = []

    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(x)
            return (x * self.scale).sin()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Squares(), nn.Linear(8, 8))
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()})
    model[1].scale = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Shard(0)], run_check=False))
    x = torch.randn(4, 8)
    plan = plimsoll.plan(model, x, strategy="full", regions=["1"], loss=torch.sum)
    with plimsoll.apply(model, plan):
        model(x).sum().backward()
        loss = model(x).sum()
        with torch.no_grad():
            kept[-1].add_(1.0)
        return refused(loss.backward)
