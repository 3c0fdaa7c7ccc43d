"""Training under a budget on several ranks: gradients, peaks and collectives of every layout, with and without a plan.

    python -m benchmarks.layouts [LAYOUT …] [--ranks 2 4] [--size tiny|cpu]

Every rank is a process of torchrun's agent, with gloo. On each, the same training runs twice from the same weights: as it is,
and under ``plimsoll.attach`` (pipelines: ``plimsoll.distributed.attach_schedule``) with a budget between the lowest peak and
the unmanaged one. Peaks are allocator events, collectives the sequence numbers of torch's process groups.
"""

from __future__ import annotations

import argparse
import hashlib
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import plimsoll
from benchmarks.launching import launch
from benchmarks.machine import device_name, page_head, page_stem, versions
from benchmarks.models.data import text_ids
from benchmarks.page import format_mib, format_table
from benchmarks.stages import SCHEDULES, StageTraining
from plimsoll.artifacts.plan import Plan
from plimsoll.distributed.pipelines.pipeline_stages import ScheduleAttachment, attach_schedule
from plimsoll.session.attachment import Attachment
from plimsoll.tracing.ddp import bucket_bytes
from plimsoll.tracing.meters.memory import PeakMeter, storage_bytes

_RESULTS = Path(__file__).parent / "results"
_SIZES = {
    "test": ({"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}, 2, 64),
    "tiny": ({"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 256}, 2, 64),
    "cpu": ({"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 8, "vocab_size": 512}, 2, 128),
}
_SETTLED, _SETTLED_STAGES = 5, 6
"""Steps until the plan for the budget stands, and until a schedule's do."""
_MEASURED = 2
"""Steps after these."""
_SHARE_OF_STAGES = 0.85
"""Of what a pipeline's rank takes without a plan: its lowest peak shows only when the schedule first runs."""


@dataclass(frozen=True, slots=True)
class Case:
    """One layout on so many ranks, and the share of the way from the lowest peak to the unmanaged one.

    For pipelines it is the share of the unmanaged peak.
    """

    layout: str
    ranks: int
    size: str
    share: float


@dataclass(frozen=True, slots=True)
class Facts:
    """What one rank saw."""

    rank: int
    unmanaged_peak_bytes: int
    floor_bytes: int
    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    collectives_without: int
    collectives_with: int
    compared: int
    differing: tuple[str, ...]
    """Steps and parameters whose gradients, or weights at the end, are not equal bit for bit."""
    dropped: int
    """Values that the plan makes again."""


class Training(Protocol):
    """A model on its layout, on this rank, and what a step is: forward and backward, without the optimizer's."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def there_before(self) -> Iterable[torch.Tensor]:
        """What a step finds on the device besides parameters and buffers."""
        ...

    def step(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WholeTraining:
    """A model that is called with a batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Mapping[str, torch.Tensor]

    def there_before(self) -> Iterable[torch.Tensor]:
        return self.batch.values()

    def step(self) -> None:
        self.model(**self.batch).loss.backward()


def _config(size: str) -> LlamaConfig:
    shape, _, length = _SIZES[size]
    return LlamaConfig(
        **shape,
        num_attention_heads=shape["hidden_size"] // 16,
        num_key_value_heads=shape["hidden_size"] // 16,
        max_position_embeddings=length,
        attn_implementation="sdpa",
        attention_dropout=0.1,
        use_cache=False,
    )


def _ddp(model: LlamaForCausalLM, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model)


def _fsdp2(model: LlamaForCausalLM, mesh: DeviceMesh) -> nn.Module:
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _tensor_parallel(model: LlamaForCausalLM, mesh: DeviceMesh) -> nn.Module:
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {f"self_attn.{name}_proj": columns for name in "qkv"} | {"self_attn.o_proj": rows}
    plan |= {"mlp.gate_proj": columns, "mlp.up_proj": columns, "mlp.down_proj": rows}
    for block in model.model.layers:
        parallelize_module(block, mesh, plan)
    return model


def _fsdp2_of_tensor_parallel(model: LlamaForCausalLM, mesh: DeviceMesh) -> nn.Module:
    return _fsdp2(_tensor_parallel(model, mesh["tp"]), mesh["dp"])


_BUILD: Mapping[str, Callable[[LlamaForCausalLM, DeviceMesh], nn.Module]] = {
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "tp": _tensor_parallel,
    "fsdp2 x tp": _fsdp2_of_tensor_parallel,
}
_LAYOUTS = (*_BUILD, *SCHEDULES)


def _mesh(layout: str, ranks: int) -> DeviceMesh:
    if layout == "fsdp2 x tp":
        return init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    return init_device_mesh("cpu", (ranks,))


def _whole(case: Case) -> WholeTraining:
    torch.manual_seed(0)
    _, batch, length = _SIZES[case.size]
    mesh = _mesh(case.layout, case.ranks)
    replicas = mesh["dp"].size() if case.layout == "fsdp2 x tp" else 1 if case.layout == "tp" else case.ranks
    replica = dist.get_rank() * replicas // case.ranks
    ids = text_ids(batch * replicas, length)[replica * batch : (replica + 1) * batch]
    spread = _BUILD[case.layout](LlamaForCausalLM(_config(case.size)), mesh)
    return WholeTraining(
        spread, torch.optim.SGD(spread.parameters(), lr=0.1), {"input_ids": ids, "labels": ids.clone()}
    )


def _stage(case: Case) -> StageTraining:
    _, batch, length = _SIZES[case.size]
    return StageTraining(case.layout, _config(case.size), text_ids(batch, length))


def measure(case: Case) -> Facts:
    """Train without and with a budget on this rank, and compare."""
    warnings.simplefilter("ignore")
    make = _stage if case.layout in SCHEDULES else _whole
    expected, found = _Run(make(case)), _Run(make(case))
    expected.go()
    budget = _of_stages if case.layout in SCHEDULES else _of_a_model
    budget_bytes, floor_bytes, attach = budget(found.training, case.share, expected.peak_bytes)
    with attach() as attachment:
        found.go()
        predicted_bytes, plans = _plans_of(attachment)
    return Facts(
        rank=dist.get_rank(),
        unmanaged_peak_bytes=expected.peak_bytes,
        floor_bytes=floor_bytes,
        budget_bytes=budget_bytes,
        predicted_peak_bytes=predicted_bytes,
        measured_peak_bytes=found.peak_bytes,
        collectives_without=expected.collectives,
        collectives_with=found.collectives,
        compared=len(expected.seen),
        differing=tuple(name for name, value in expected.seen.items() if value != found.seen[name]),
        dropped=sum(len(region.dropped) for plan in plans for region in plan.regions),
    )


_Budget = tuple[int, int, Callable[[], "Attachment | ScheduleAttachment"]]


def _of_a_model(training: WholeTraining, share: float, unmanaged_peak_bytes: int) -> _Budget:
    """A budget between the lowest peak and the unmanaged one."""
    none = plimsoll.plan(training.model, dict(training.batch), strategy="none")
    budget_bytes = none.floor_bytes + round(share * (none.predicted_peak_bytes - none.floor_bytes))
    return (
        budget_bytes,
        none.floor_bytes,
        lambda: plimsoll.attach(training.model, budget_bytes, optimizer=training.optimizer),
    )


def _of_stages(training: StageTraining, share: float, unmanaged_peak_bytes: int) -> _Budget:
    """A share of the unmanaged peak: what the lowest one is shows when the schedule first runs."""
    budget_bytes = round(share * unmanaged_peak_bytes)
    return budget_bytes, 0, lambda: attach_schedule(training.schedule, budget_bytes, optimizer=training.optimizer)


def _plans_of(attachment: Attachment | ScheduleAttachment) -> tuple[int, tuple[Plan, ...]]:
    """The predicted peak of what settled, and the plans."""
    if isinstance(attachment, ScheduleAttachment):
        return attachment.report.predicted_peak_bytes, tuple(attachment.plans.values())
    assert attachment.plan is not None
    return attachment.plan.predicted_peak_bytes, (attachment.plan,)


class _Run:
    """Some steps of training: every gradient, the weights at the end, and peak and collectives of a settled step."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.seen: dict[str, bytes] = {}
        self.peak_bytes = 0
        self.collectives = 0

    def go(self) -> None:
        training = self.training
        torch.manual_seed(0)
        settled = _SETTLED_STAGES if isinstance(training, StageTraining) else _SETTLED
        for step in range(settled + _MEASURED):
            if step < settled:
                training.step()
            else:
                self._measured()
            self._note(f"step {step}, gradient of", {n: p.grad for n, p in training.model.named_parameters()})
            training.optimizer.step()
            training.optimizer.zero_grad()
        self._note("weight", dict(training.model.named_parameters()))

    def _measured(self) -> None:
        held = [*self.training.model.parameters(), *self.training.model.buffers(), *self.training.there_before()]
        static_bytes = storage_bytes(map(_local, held)) + bucket_bytes(self.training.model)
        before = _collectives()
        with PeakMeter("cpu") as meter:
            self.training.step()
        self.collectives = _collectives() - before
        self.peak_bytes = max(self.peak_bytes, static_bytes + meter.peak_bytes)

    def _note(self, what: str, tensors: Mapping[str, torch.Tensor | None]) -> None:
        for name, tensor in tensors.items():
            if tensor is not None:
                self.seen[f"{what} {name}"] = _digest(_local(tensor))


def _digest(tensor: torch.Tensor) -> bytes:
    """Of the tensor's bits: copies of gradients would be memory that the steps leave behind."""
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy()).digest()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _collectives() -> int:
    """Collectives and transfers that this rank has started so far, in all groups."""
    return sum(group._get_sequence_number_for_group() for group in _world.pg_map)


def run(case: Case) -> list[Facts]:
    """Measure a case on its ranks."""
    return launch(case.ranks, "benchmarks.layouts:measure", case)


def is_kept(facts: Facts) -> bool:
    """Whether everything that is promised held on this rank."""
    return (
        not facts.differing
        and facts.measured_peak_bytes <= facts.budget_bytes
        and facts.collectives_with == facts.collectives_without
    )


def page_lines(found: Sequence[tuple[Case, list[Facts]]], command: str) -> Iterator[str]:
    """The page of results."""
    yield from page_head(
        "Layouts under a budget", command, device=device_name(torch.device("cpu")), versions=versions()
    )
    yield (
        "transformers' Llama with attention dropout on the standard library's source, gloo, one thread a rank. "
        f"{_SETTLED + _MEASURED} steps of training (pipelines {_SETTLED_STAGES + _MEASURED}) without a plan and the same under "
        "`attach`; every gradient of every step and the weights at the end are compared bit for bit on every rank. Peaks and "
        f"collectives are those of the last {_MEASURED} steps. Of each case the rank with the largest measured peak is shown; "
        "*equal* and *kept* hold on all."
    )
    yield ""
    head = ("layout", "ranks", "share", "floor MiB", "budget MiB", "unmanaged MiB", "predicted MiB", "measured MiB", "kept",
            "equal tensors", "collectives without", "with")  # fmt: skip
    yield from format_table(head, [_cells(case, facts) for case, facts in found])


def _cells(case: Case, facts: Sequence[Facts]) -> list[str]:
    top = max(facts, key=lambda one: one.measured_peak_bytes)
    equal = sum(one.compared - len(one.differing) for one in facts)
    compared = sum(one.compared for one in facts)
    return [
        case.layout,
        str(case.ranks),
        f"{case.share:.0%}",
        format_mib(top.floor_bytes) if top.floor_bytes else "",
        format_mib(top.budget_bytes),
        format_mib(top.unmanaged_peak_bytes),
        format_mib(top.predicted_peak_bytes),
        format_mib(top.measured_peak_bytes),
        "yes" if all(one.measured_peak_bytes <= one.budget_bytes for one in facts) else "**no**",
        f"{equal} of {compared}",
        str(top.collectives_without),
        str(top.collectives_with),
    ]


def main() -> int:
    """Measure every case and write the page; 1 where something promised did not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layouts")
    parser.add_argument("layouts", nargs="*", default=list(_LAYOUTS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--size", choices=["tiny", "cpu"], default="cpu")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.75])
    chosen = parser.parse_args()
    found = []
    for layout in chosen.layouts:
        for ranks in chosen.ranks:
            if layout == "fsdp2 x tp" and ranks < 4:
                continue
            for share in [_SHARE_OF_STAGES] if layout in SCHEDULES else chosen.shares:
                case = Case(layout, ranks, chosen.size, share)
                found.append((case, run(case)))
                print(*_cells(*found[-1]), file=sys.stderr, flush=True)
    lines = list(page_lines(found, f"python -m benchmarks.layouts {shlex.join(sys.argv[1:])}".strip()))
    stem = page_stem(torch.device("cpu"), "layouts")
    (_RESULTS / f"{stem}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    return 0 if all(is_kept(one) for _, facts in found for one in facts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
