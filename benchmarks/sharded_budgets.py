"""What ranks hold under FSDP2, HSDP and DDP: predicted against measured peaks without a plan and under budgets, and traffic.

    python -m benchmarks.sharded_budgets [--layouts fsdp2 hsdp ddp ...] [--shares 0.25 0.5 0.75]

Real processes under torchrun's agent with gloo, on this machine; a Llama with random weights on Python's own source text.
A budget lies at a share of the way from the smallest reachable peak to that without a plan. Peaks are allocator events of a
real training step, with all that is there before it; collectives, gatherings and reshards are compared by name and in order.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.launching import launch
from benchmarks.machine import device_name, versions

_HIDDEN, _LAYERS, _LENGTH, _BATCH = 64, 4, 128, 2
_RANKS = {"hsdp": 4, "fsdp2, to pairs": 4}


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=_HIDDEN,
        intermediate_size=5 * _HIDDEN // 2,
        num_hidden_layers=_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_LENGTH,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def _sharded(**options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model: Any = _llama()
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    made: nn.Module = model
    return made


def _hybrid() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    return _sharded(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def _narrow() -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return _sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def _offloaded() -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return _sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))


def _replicated(**options: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(_llama(), **options)


LAYOUTS: dict[str, Callable[[], nn.Module]] = {
    "fsdp2": _sharded,
    "fsdp2, kept after forward": lambda: _sharded(reshard_after_forward=False),
    "fsdp2, bf16 and fp32 reduction": _narrow,
    "fsdp2, CPU offload": _offloaded,
    "fsdp2, to pairs": lambda: _sharded(reshard_after_forward=2),
    "hsdp": _hybrid,
    "ddp": _replicated,
    "ddp, gradients as views": lambda: _replicated(gradient_as_bucket_view=True),
    "ddp, static graph": lambda: _replicated(static_graph=True),
}


def study(payload: dict[str, Any]) -> dict[str, Any]:
    """On a rank: one layout without a plan and under every budget."""
    import torch.distributed as dist

    import plimsoll

    rank = dist.get_rank()
    source = Path(argparse.__file__).read_bytes()[rank * 4096 :]
    ids = torch.tensor(list(source[: _BATCH * _LENGTH])).reshape(_BATCH, _LENGTH)
    batch = {"input_ids": ids, "labels": ids}
    model = LAYOUTS[payload["layout"]]()
    free = plimsoll.plan(model, batch, strategy="none")
    found = {"none": {"budget": None, "predicted": free.predicted_peak_bytes, **_observed(model, batch)}}
    for share in payload["shares"]:
        budget_bytes = int(free.floor_bytes + share * (free.predicted_peak_bytes - free.floor_bytes))
        made = plimsoll.plan(model, batch, budget_bytes)
        with plimsoll.apply(model, made):
            seen = _observed(model, batch)
        found[f"{share:.0%}"] = {"budget": budget_bytes, "predicted": made.predicted_peak_bytes, **seen}
    return found


def _observed(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Peak, gradients and traffic of a real step, once lazy state is there."""
    from plimsoll.tracing.ddp import bucket_bytes
    from plimsoll.tracing.local_tensors import dense_parts
    from plimsoll.tracing.meters.memory import PeakMeter, storage_bytes

    for _ in range(3):
        _step(model, batch)
    model.zero_grad(set_to_none=True)
    static_bytes = storage_bytes([*model.parameters(), *model.buffers(), *batch.values()]) + bucket_bytes(model)
    peaks = []
    for _ in range(
        3
    ):  # gloo's threads hold the tensors of a collective until they run again: the lowest is the step's own
        with PeakMeter("cpu") as meter:
            _step(model, batch)
        peaks.append(meter.peak_bytes)
        model.zero_grad(set_to_none=True)
    _step(model, batch)
    gradients = [dense_parts(p.grad)[0].clone() for p in model.parameters() if p.grad is not None]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        _step(model, batch)
    model.zero_grad(set_to_none=True)
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    sent = [event.name for event in events if event.name.startswith(("c10d::", "FSDP::"))]
    return {"measured": static_bytes + min(peaks), "gradients": gradients, "sent": sent}


def _step(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    model.zero_grad(set_to_none=True)
    output = model(**batch)
    output.loss.backward()


def _row(layout: str, name: str, ranks: list[dict[str, Any]]) -> str:
    """The rank on which prediction and measurement are furthest apart."""
    worst = max((rank[name] for rank in ranks), key=lambda one: abs(one["predicted"] / one["measured"] - 1))
    off = worst["predicted"] / worst["measured"] - 1
    kept = "" if worst["budget"] is None else str(all(r[name]["measured"] <= r[name]["budget"] for r in ranks))
    equal = all(
        torch.equal(one, other)
        for r in ranks
        for one, other in zip(r[name]["gradients"], r["none"]["gradients"], strict=True)
    )
    alike = all(r[name]["sent"] == r["none"]["sent"] for r in ranks)
    collectives = sum(event.startswith("c10d::") for event in worst["sent"])
    figures = (
        worst["budget"] or "",
        worst["predicted"],
        worst["measured"],
        f"{off:+.2%}",
        kept,
        equal,
        collectives,
        alike,
    )
    return " | ".join(["", layout, name, *map(str, figures), ""]).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--shares", nargs="+", type=float, default=[0.25, 0.5, 0.75])
    chosen = parser.parse_args()
    device = device_name(torch.device("cpu"))
    print(f"{device}, {versions()}, Llama {_LAYERS} × {_HIDDEN}, batch {_BATCH} × {_LENGTH} on each rank\n")
    print("| layout | budget at | budget | predicted | measured | off | kept | bit-equal | collectives | same order |")
    print("|---|--:|--:|--:|--:|--:|---|---|--:|---|")
    for layout in chosen.layouts:
        payload = {"layout": layout, "shares": chosen.shares}
        ranks = launch(_RANKS.get(layout, 2), "benchmarks.sharded_budgets:study", payload)
        for name in ranks[0]:
            print(_row(layout, name, ranks), flush=True)


if __name__ == "__main__":
    main()
