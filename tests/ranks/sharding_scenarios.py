"""What ranks do in ``test_sharded_data_parallel.py``: real layouts of small transformers, with and without a plan."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

import plimsoll
from launching import refused
from plimsoll.artifacts.plan import Plan
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.roofline import roofline_costs
from plimsoll.planning.decisions import decide
from plimsoll.planning.simulate import run_choices
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import strategy_choices
from plimsoll.session.training_step import TrainingStep
from plimsoll.tracing.fsdp2 import groups_of, holds_gradients_back, waiting_gradients
from plimsoll.tracing.local_tensors import dense_parts
from plimsoll.tracing.meters.memory import PeakMeter, storage_bytes
from plimsoll.tracing.recorder.untouched import untouched
from plimsoll.tracing.trace import trace
from ranks import small_models
from samples import make_plan

BATCH, SEQUENCE = 4, 32
Batch = dict[str, torch.Tensor]


llama = functools.partial(
    small_models.llama, vocab_size=256, hidden_size=64, intermediate_size=160, num_attention_heads=4
)


def gpt2() -> nn.Module:
    """With dropout, and an embedding that is also the head."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=SEQUENCE, n_embd=64, n_layer=2, n_head=4, use_cache=False)
    )


def text(sequence: int = SEQUENCE) -> Batch:
    """Bytes of Python's own source, others on every rank."""
    source = Path(contextlib.__file__).read_bytes()
    ids = torch.tensor(list(source[4096 * dist.get_rank() :][: BATCH * sequence])).reshape(BATCH, sequence)
    return {"input_ids": ids, "labels": ids}


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """``fully_shard`` on every block and on the root."""
    blocks = model.model.layers if isinstance(model, LlamaForCausalLM) else model.transformer.h
    mesh = options.pop("mesh", None) or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def sharded_inside(model: nn.Module) -> nn.Module:
    """``fully_shard`` on the parts of every block and on the root, not on the blocks."""
    for block in model.model.layers:
        fully_shard(block.self_attn)
        fully_shard(block.mlp)
    return fully_shard(model)


def prefetching(model: nn.Module) -> nn.Module:
    """Two blocks ahead in both directions, as a user sets it."""
    blocks = list(model.model.layers)
    for position, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[position + 1 : position + 3])
        block.set_modules_to_backward_prefetch(blocks[max(0, position - 2) : position][::-1])
    return model


LAYOUTS: dict[str, Callable[[], nn.Module]] = {
    "fsdp2": lambda: sharded(llama()),
    "fsdp2, kept after forward": lambda: sharded(llama(), reshard_after_forward=False),
    "fsdp2, bf16": lambda: sharded(
        llama(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ),
    "fsdp2, prefetching": lambda: prefetching(sharded(llama())),
    "fsdp2, inside the blocks": lambda: sharded_inside(llama()),
    "fsdp2, gpt2": lambda: sharded(gpt2()),
    "ddp": lambda: DistributedDataParallel(llama()),
    "ddp, views": lambda: DistributedDataParallel(llama(), gradient_as_bucket_view=True),
}
HYBRID: dict[str, Callable[[], nn.Module]] = {
    "hsdp": lambda: sharded(llama(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))),
    "fsdp2, to pairs": lambda: sharded(llama(), reshard_after_forward=2),
}


def quick_plan(
    model: nn.Module, batch: Batch, strategy: str = "full", optimizer: torch.optim.Optimizer | None = None
) -> Plan:
    """A strategy's plan by the tracer, the simulator and nothing else: no search for the floor, no trial runs."""
    step = trace(model, batch, optimizer=optimizer, repeats=1)
    index = StepIndex(step, roofline_costs(step, find_device("CPU")))
    simulation, baseline = (run_choices(index, strategy_choices(index, name)) for name in (strategy, "none"))
    return make_plan(
        strategy=strategy,
        fingerprint=step.fingerprint,
        signature=step.signature,
        budget_bytes=None,
        regions=decide(simulation, [0.0] * len(step.regions)),
        predicted_peak_bytes=simulation.peak_bytes,
        baseline_peak_bytes=baseline.peak_bytes,
    )


def agreed(plan: Plan) -> Plan:
    """The first rank's plan, as ``plimsoll.plan`` gives it to all; what each predicts for itself may differ by a few bytes."""
    plans = [plan]
    dist.broadcast_object_list(plans)
    return plans[0]


def train_step(model: nn.Module, batch: Batch) -> None:
    """One step of the usual loop, without the optimizer; dropout draws the same numbers every time."""
    torch.manual_seed(1 + dist.get_rank())
    model.zero_grad(set_to_none=True)
    output = model(**batch)  # held through backward, as in the usual loop
    output.loss.backward()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Local shards of all gradients, copied."""
    return {
        name.removeprefix("module."): dense_parts(parameter.grad)[0].clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def trained(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """What one step makes of the gradients, which are let go."""
    train_step(model, batch)
    found = gradients(model)
    model.zero_grad(set_to_none=True)
    return found


def local_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: dense_parts(parameter)[0].detach().clone() for name, parameter in model.named_parameters()}


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def traffic(model: nn.Module, batch: Batch) -> list[str]:
    """Every collective, and everything that FSDP2 does, in the order in which a step does it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train_step(model, batch)
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    found: list[str] = []
    ends_us: dict[str, float] = {}
    for event in events:
        # In a managed region, which watches its calls, the profiler shows a collective twice, one within the other.
        is_inside = event.time_range.start < ends_us.get(event.name, 0.0)
        if event.name.startswith("FSDP::") or (event.name.startswith("c10d::") and not is_inside):
            found.append(event.name)
            ends_us[event.name] = event.time_range.end
    return found


def reducer_bytes(model: nn.Module) -> int:
    """What the reducer itself says that its buckets hold."""
    is_replicated = isinstance(model, DistributedDataParallel)
    return sum(map(int, model._get_ddp_logging_data()["bucket_sizes"].split(", "))) if is_replicated else 0


def measured_peak(model: nn.Module, batch: Batch) -> int:
    """The peak of a real step, all that is there before it included; the lowest of some.

    Gloo's threads hold the tensors of a collective until they get to run again: on a busy machine, some steps read higher.
    """
    for _ in range(2):  # so that lazy state is there, and buckets are in their final order
        train_step(model, batch)
    model.zero_grad(set_to_none=True)
    return min(step_peak(model, batch, lambda: train_step(model, batch)) for _ in range(3))


def step_peak(model: nn.Module, batch: Batch, step: Callable[[], None], state: Sequence[torch.Tensor] = ()) -> int:
    """The peak of one step, and of what is there before it."""
    there = [*model.parameters(), *model.buffers(), *batch.values(), *state]
    static_bytes = storage_bytes(there) + reducer_bytes(model)
    with PeakMeter("cpu") as meter:
        step()
    model.zero_grad(set_to_none=True)
    return static_bytes + meter.peak_bytes


@contextlib.contextmanager
def nothing_changed(model: nn.Module) -> Iterator[None]:
    """The block leaves parameters, gradients, random state and FSDP2's states as it found them."""
    before, random = local_parameters(model), torch.get_rng_state()
    assert not gradients(model)
    yield
    assert are_equal(before, local_parameters(model))
    assert not gradients(model)
    assert torch.equal(random, torch.get_rng_state())
    for module in (module for module in model.modules() if isinstance(module, FSDPModule)):
        assert module._get_fsdp_state()._training_state == TrainingState.IDLE
        for group in groups_of(module):
            assert group._training_state == TrainingState.IDLE
            assert group.is_sharded


def study(make: Callable[[], nn.Module], shares: Sequence[float]) -> dict[str, Any]:
    """One layout: without a plan, under a plan that recomputes all it can, and under budgets.

    ``shares``: where the budgets lie between the peak of recomputing all (0) and the peak without a plan (1).
    """
    batch, model = text(), make()
    with nothing_changed(model):
        full = quick_plan(model, batch)
    peak_bytes = measured_peak(model, batch)
    expected, sent = trained(model, batch), traffic(model, batch)
    model.zero_grad(set_to_none=True)
    found = {
        "predicted": full.baseline_peak_bytes,
        "measured": peak_bytes,
        "collectives": sum(name.startswith("c10d::") for name in sent),
        "plans": {"full": under(model, batch, full, expected, sent)},
    }
    for share in shares:
        low_bytes, high_bytes = full.predicted_peak_bytes, full.baseline_peak_bytes
        budget_bytes = int(low_bytes + share * (high_bytes - low_bytes))
        with nothing_changed(model):
            plan = plimsoll.plan(model, batch, budget=budget_bytes)
        found["plans"][f"{share:.0%}"] = under(model, batch, plan, expected, sent)
    return found


def under(
    model: nn.Module, batch: Batch, plan: Plan, expected: dict[str, torch.Tensor], sent: list[str]
) -> dict[str, Any]:
    """What a plan does to real steps of a model."""
    with plimsoll.apply(model, agreed(plan)) as handle:
        recording = are_equal(expected, trained(model, batch))
        peak_bytes = measured_peak(model, batch)
        steady = are_equal(expected, trained(model, batch))
        is_alike = traffic(model, batch) == sent
        dropped_bytes = sum(outcome.dropped_bytes for outcome in handle.outcomes())
    model.zero_grad(set_to_none=True)
    return {
        "budget": plan.budget_bytes,
        "predicted": plan.predicted_peak_bytes,
        "measured": peak_bytes,
        "is_bit_equal": recording and steady,
        "sends_the_same": is_alike,
        "dropped_bytes": dropped_bytes,
    }


def studies(payload: dict[str, Any]) -> dict[str, Any]:
    """Layouts by name, under budgets at the given shares."""
    layouts = LAYOUTS | HYBRID
    return {name: study(layouts[name], shares) for name, shares in payload.items()}


def on_a_pair(payload: dict[str, Any]) -> dict[str, Any]:
    """All that two ranks do, in one launch."""
    return {"studies": studies(payload), "habits": habits()}


def on_four(payload: dict[str, Any]) -> dict[str, Any]:
    """All that four ranks do, in one launch."""
    return {"studies": studies(payload), "micro-batches": budgeted_micro_batches(HYBRID["hsdp"])}


def habits() -> dict[str, Any]:
    """What planning leaves behind, and what training does under a plan."""
    return {
        "reducer": {name: reducer_is_not_taught(options) for name, options in REDUCERS.items()},
        "ddp_names": ddp_is_named_like_the_model_inside(),
        "ddp_accumulation": accumulates_like_without(LAYOUTS["ddp"], DistributedDataParallel.no_sync),
        "fsdp_accumulation": accumulates_like_without(LAYOUTS["fsdp2"], without_reduction),
        "waiting": [a_waiting_gradient_survives_planning(q) for q in (without_reduction, without_reduction_or_freeing)],
        "failure": a_failed_step_leaves_the_model_ready(),
        "flat": refused(lambda: trace(FullyShardedDataParallel(llama(), device_id=torch.device("cpu")), text())),
        "boundaries": {str(reshard): dropped_boundaries(reshard) for reshard in (True, False)},
        "receipts": {name: receipt_of(LAYOUTS[name]) for name in ("fsdp2", "ddp, views")},
        "optimizer": {name: step_with_optimizer(LAYOUTS[name]) for name in ("fsdp2", "ddp")},
        "beside": {name: planned_beside(install) for name, install in REDUCTIONS.items()},
        "micro-batches": budgeted_micro_batches(LAYOUTS["fsdp2"]),
    }


REDUCERS = {
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
}
_LOGGED = ("bucket_sizes", "rebuilt_bucket_sizes", "has_rebuilt_buckets", "num_buckets_reduced", "iteration")


def reducer_is_not_taught(options: dict[str, bool]) -> dict[str, Any]:
    """Two models train alike; one of them is planned before the first step and after it."""
    batch = text()
    models = [DistributedDataParallel(llama(), bucket_cap_mb=0.1, **options) for _ in range(2)]
    told, is_equal = [], []
    for step in range(4):
        if step < 2:
            models[0].zero_grad(set_to_none=True)
            with nothing_changed(models[0]):
                quick_plan(models[0], batch)
        for model in models:
            train_step(model, batch)
        is_equal.append(are_equal(gradients(models[0]), gradients(models[1])))
        told.append([{key: log.get(key) for key in _LOGGED} for log in (m._get_ddp_logging_data() for m in models)])
        for model in models:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
    return {"is_equal": all(is_equal), "is_told_the_same": all(one == other for one, other in told), "log": told[-1][0]}


def ddp_is_named_like_the_model_inside() -> dict[str, Any]:
    batch = text()
    bare, wrapped = llama(), DistributedDataParallel(llama())
    one, other = (quick_plan(model, batch) for model in (bare, wrapped))
    with plimsoll.apply(wrapped, agreed(one)):
        train_step(wrapped, batch)
    return {
        "fingerprints": [one.fingerprint, other.fingerprint],
        "regions": [[region.name for region in plan.regions] for plan in (one, other)],
        "extra": other.baseline_peak_bytes - one.baseline_peak_bytes - reducer_bytes(wrapped),
    }


@contextlib.contextmanager
def without_reduction(model: nn.Module) -> Iterator[None]:
    """FSDP2's way to leave gradients unreduced."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


@contextlib.contextmanager
def without_reduction_or_freeing(model: nn.Module) -> Iterator[None]:
    """The same, and the gathered parameters stay until the next micro-batch."""
    model.set_reshard_after_backward(False)
    with without_reduction(model):
        yield
    model.set_reshard_after_backward(True)


Quiet = Callable[[nn.Module], contextlib.AbstractContextManager[object]]


def accumulate(model: nn.Module, batch: Batch, quiet: Quiet) -> dict[str, torch.Tensor]:
    """Two micro-batches of which only the second one reduces."""
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    with quiet(model):
        model(**batch).loss.backward()
    model(**batch).loss.backward()
    return gradients(model)


def accumulates_like_without(make: Callable[[], nn.Module], quiet: Quiet) -> bool:
    batch, model = text(), make()
    expected = accumulate(model, batch, quiet)
    model.zero_grad(set_to_none=True)
    with plimsoll.apply(model, agreed(quick_plan(model, batch))):
        return all(are_equal(expected, accumulate(model, batch, quiet)) for _ in range(2))


def a_waiting_gradient_survives_planning(quiet: Quiet) -> bool:
    """A plan is made between two micro-batches, while FSDP2 holds what the first one left unreduced."""
    batch = text()
    model = sharded(llama(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters())
    expected = accumulate(model, batch, quiet)
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    with quiet(model):
        model(**batch).loss.backward()
    quick_plan(model, batch, optimizer=optimizer)
    model(**batch).loss.backward()
    return are_equal(expected, gradients(model))


def a_failed_step_leaves_the_model_ready() -> list[str]:
    """The traced step fails in forward, in the loss and in backward; each time training goes on as if nothing was."""
    batch, model = text(), sharded(llama())
    expected = trained(model, batch)
    mlp = model.model.layers[1].mlp
    places = {
        "in the second block": mlp.register_forward_pre_hook,
        "in the loss": contextlib.nullcontext,
        "in backward of the second block": lambda fail: mlp.register_forward_hook(
            lambda module, args, output: output.register_hook(fail) and None
        ),
    }
    found = []
    for where, install in places.items():
        fail = functools.partial(_break, where)
        loss = fail if where == "in the loss" else None
        with nothing_changed(model), install(fail):
            found.append(refused(lambda loss=loss: trace(model, batch, loss=loss, repeats=1)).found)
        assert are_equal(expected, trained(model, batch))
    return found


class _Broken(Exception):
    """What no code but the tests' own raises."""


def _break(where: str, *_: Any) -> None:
    raise _Broken(where)


def dropped_boundaries(reshard: bool) -> dict[str, Any]:
    """Pairs of blocks that hold one input between them, where that can be."""
    batch, model = text(), sharded(llama(), reshard_after_forward=reshard)
    expected = trained(model, batch)
    plan = quick_plan(model, batch, "every:2")
    with plimsoll.apply(model, agreed(plan)):
        train_step(model, batch)
        is_equal = are_equal(expected, trained(model, batch))
    return {"dropped": [region.is_boundary_dropped for region in plan.regions], "is_equal": is_equal}


def receipt_of(make: Callable[[], nn.Module]) -> dict[str, Any]:
    batch, model = text(), make()
    plan = agreed(quick_plan(model, batch))
    with nothing_changed(model):
        receipt = plimsoll.verify(model, batch, plan, steps=1)
    return {
        "verdict": receipt.verdict.value,
        "is_bit_equal": receipt.is_bit_equal,
        "predicted": receipt.predicted_peak_bytes,
        "measured": receipt.measured_peak_bytes,
    }


def step_with_optimizer(make: Callable[[], nn.Module]) -> dict[str, Any]:
    """Forward, backward and a step of AdamW, whose state is there."""
    batch, model = text(), make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = quick_plan(model, batch, "full", optimizer)
    for _ in range(3):
        train_step(model, batch)
        optimizer.step()
    model.zero_grad(set_to_none=True)
    state = [value for entry in optimizer.state.values() for value in entry.values()]

    def step() -> None:
        train_step(model, batch)
        optimizer.step()

    measured_bytes = min(step_peak(model, batch, step, state) for _ in range(3))
    return {"predicted": plan.baseline_peak_bytes, "measured": measured_bytes}


class _CountingScatter(DefaultReduceScatter):
    """A reduce-scatter with a state of its own."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self._note = note

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._note()
        return super().__call__(*args, **kwargs)


def _bucket_hook(note, bucket):  # DDP compares annotations with classes, not with names
    note()
    return allreduce_hook(dist.group.WORLD, bucket)


Note = Callable[[], None]
REDUCTIONS: dict[str, tuple[str, Callable[[Any, Note], object]]] = {
    "a reduce-scatter": ("fsdp2", lambda model, note: model.set_custom_reduce_scatter(_CountingScatter(note))),
    "an all-reduce hook": ("fsdp2", lambda model, note: model.set_all_reduce_hook(lambda reduced: note())),
    "a communication hook": ("ddp", lambda model, note: model.register_comm_hook(note, _bucket_hook)),
    "a parameter's hook": (
        "fsdp2",
        lambda model, note: next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: note()),
    ),
}


def planned_beside(reduction: tuple[str, Callable[[Any, Note], object]]) -> dict[str, Any]:
    """What reduces gradients in the user's way, and how often it runs while a plan is made and in the step after it."""
    layout, install = reduction
    runs: list[int] = []
    model = LAYOUTS[layout]()
    install(model, lambda: runs.append(1))
    plan = plimsoll.plan(model, text(), "1GiB", strategy="full")
    planning = len(runs)
    train_step(model, text())
    return {"planning": planning, "training": len(runs) - planning, "notes": plan.notes}


def budgeted_micro_batches(make: Callable[[], nn.Module]) -> dict[str, Any]:
    """Three micro-batches of which the last one reduces, under a budget by ``attach``, and under a plan for one of them."""
    batch, model = text(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for number in range(3):
            model.set_requires_gradient_sync(number == 2)
            output = model(**batch)
            output.loss.backward()
            del output
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(2):
        step()
    budget_bytes = int(0.85 * step_peak(model, batch, step))
    with plimsoll.attach(model, budget_bytes, optimizer=optimizer) as attachment:
        for _ in range(4):
            step()
        found: dict[str, Any] = {
            "budget": budget_bytes,
            "metered": {situation.turn for situation in attachment._known.metered._known},
            "measured": min(step_peak(model, batch, step) for _ in range(2)),
        }
    model.set_requires_gradient_sync(False)
    with untouched(model):
        trial = TrainingStep(model, (), batch)
        found["trial"] = [trial.measure_peak() for _ in range(2)]
    found["as before"] = holds_gradients_back(model) and not any(True for _ in waiting_gradients(model))
    model.set_requires_gradient_sync(True)
    plan = agreed(quick_plan(model, batch))
    tight = msgspec.structs.replace(plan, budget_bytes=plan.predicted_peak_bytes)
    with warnings.catch_warnings(record=True) as caught, plimsoll.apply(model, tight):
        warnings.simplefilter("always")
        for _ in range(3):
            step()
    return found | {"said": [str(entry.message) for entry in caught]}
