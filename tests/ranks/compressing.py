"""What ranks do in ``test_gradient_compression.py``: every scenario of one launch, in the same order on every rank."""

from __future__ import annotations

import contextlib
import io
import itertools
import threading
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from plimsoll.distributed import CompressionHandle, compress_gradients
from plimsoll.distributed.gradient_compression import meaning
from plimsoll.errors import PlimsollError

EVERYTHING: dict[str, Any] = {"exclude": (), "min_elements": 0, "min_ratio": 0}
"""Compress every parameter, whether it pays or not."""
METHODS = ("topk:10%", "randomk:10%", "sign:16", "int8:16", "powersgd:1", "powersgd:3")
SHAPES = ((12, 10), (10, 12), (12, 10), (7,), (3, 2, 5))


class Given(nn.Module):
    """A model whose gradients are what it is called with; a parameter that is given ``None`` is not used."""

    def __init__(self, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> None:
        super().__init__()
        for number, shape in enumerate(SHAPES):
            self.register_parameter(f"p{number}", nn.Parameter(torch.zeros(shape, dtype=dtypes[number % len(dtypes)])))

    def forward(self, gradients: list[torch.Tensor | None]) -> torch.Tensor:
        used = [
            (p * g.to(p.dtype)).sum().float()
            for p, g in zip(self.parameters(), gradients, strict=True)
            if g is not None
        ]
        return torch.stack(used).sum()


def whole_numbers(rank: int) -> Iterator[list[torch.Tensor]]:
    """Gradients of one rank for ever: small whole numbers, whose sums and halves are exact."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield [torch.randint(-64, 65, shape, generator=generator).float() for shape in SHAPES]


def replicated(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Given(), bucket_cap_mb=0.0005, **options)


def step(model: nn.Module, gradients: list[torch.Tensor | None]) -> torch.Tensor:
    """One backward; all averaged gradients in one row."""
    model.zero_grad(set_to_none=True)
    model(gradients).backward()
    return flat(model)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.detach().float().reshape(-1) for p in model.parameters() if p.grad is not None])


def are_same(row: torch.Tensor) -> bool:
    """Whether all ranks have the same bits."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row.contiguous())
    return all(torch.equal(each.view(torch.int32), rows[0].view(torch.int32)) for each in rows)


def mean_of(row: torch.Tensor) -> torch.Tensor:
    total = row.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def refused(call: Callable[[], object]) -> tuple[str, str, str]:
    try:
        call()
    except PlimsollError as error:
        return type(error).__name__, error.found, error.next
    raise AssertionError("nothing was refused")


def residuals(handle: CompressionHandle) -> torch.Tensor:
    """What this rank has not sent, and its part of what the second pass has not; zeros where nothing was kept yet."""
    state = handle.state_dict()
    rows = []
    for name, shape in state["shapes"].items():
        elements = torch.Size(shape).numel()
        row = state["residual"].get(name, torch.zeros(elements)).reshape(-1).clone()
        if name in state["owned"]:
            chunk, ranks = state["owned"][name], state["ranks"]
            padded = torch.zeros(ranks, len(chunk))
            padded[state["rank"]] = (
                chunk * ranks
            )  # what one rank keeps of the mean is `ranks` times that of one gradient
            row += padded.view(-1)[:elements]
        rows.append(row)
    return torch.cat(rows)


def on_two_ranks() -> dict[str, Any]:
    return {
        "fidelity": fidelity(),
        "sums": {method: sums(method) for method in METHODS},
        "zeros": {method: zeros(method) for method in METHODS},
        "nonfinite": {method: nonfinite(method) for method in METHODS},
        "scaler": scaler(),
        "unused": {method: unused(method) for method in METHODS},
        "accumulation": accumulation(),
        "variants": variants(),
        "dtypes": dtypes(),
        "sparse": sparse(),
        "resumed": {method: resumed(method) for method in (*METHODS, "momentum")},
        "mismatches": mismatches(),
        "removed": removed(),
        "refusals": refusals(),
        "broken": broken(),
        "warmup": warmup(),
        "late": late(),
        "momentum": momentum(),
    }


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=2, use_cache=False, **sizes))


def train_llama(method: str | None, **options: Any) -> tuple[dict[str, torch.Tensor], str]:
    model = DistributedDataParallel(llama(), bucket_cap_mb=0.02)
    handle = compress_gradients(model, method, **options) if method else None
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        ids = torch.randint(128, (2, 16), generator=generator)
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()
    gradients = {name: each.grad.clone() for name, each in model.module.named_parameters()}
    described = handle.describe() if handle else ""
    if handle:
        handle.remove()
    return gradients, described


def fidelity() -> dict[str, Any]:
    expected, _ = train_llama(None)
    found: dict[str, Any] = {}
    cases = {
        "none": {},
        "topk:100%": EVERYTHING,
        "randomk:100%": EVERYTHING,
        "powersgd:1000": EVERYTHING,
        "topk:5%": {},
    }
    for method, options in cases.items():
        gradients, described = train_llama(method, **options)
        row, reference = (torch.cat([each.reshape(-1) for each in all_.values()]) for all_ in (gradients, expected))
        found[method] = {
            "same": are_same(row),
            "equal": [name for name, each in gradients.items() if torch.equal(each, expected[name])],
            "names": list(gradients),
            "error": float((row - reference).norm() / reference.norm()),
            "described": described,
        }
    return found


def sums(method: str) -> dict[str, Any]:
    model, given_ = replicated(), whole_numbers(dist.get_rank())
    row = torch.zeros(sum(torch.Size(shape).numel() for shape in SHAPES))
    expected, sent, same = row.double(), row.double(), []
    with compress_gradients(model, method, **EVERYTHING) as handle:
        for _ in range(20):
            gradients = next(given_)
            averaged = step(model, gradients)
            same.append(are_same(averaged))
            sent += averaged
            expected += mean_of(torch.cat([each.reshape(-1) for each in gradients]))
        kept = mean_of(residuals(handle))
    return {"same": all(same), "off": float((sent + kept - expected).abs().max()), "moved": float(sent.abs().max())}


def zeros(method: str) -> dict[str, Any]:
    model, given_ = replicated(), whole_numbers(dist.get_rank())
    with compress_gradients(model, method, **EVERYTHING):
        first = step(model, [torch.zeros(shape) for shape in SHAPES])
        errors = [first]
        for _ in range(3):
            gradients = next(given_)
            averaged = step(model, gradients)
            errors.append(averaged)
    return {"zero": not first.any(), "moves": [float(each.abs().sum()) for each in errors[1:]]}


def nonfinite(method: str) -> dict[str, Any]:
    model, given_ = replicated(), whole_numbers(dist.get_rank())
    with compress_gradients(model, method, **EVERYTHING) as handle:
        step(model, next(given_))
        before = handle.state_dict()
        gradients = next(given_)
        if dist.get_rank() == 1:
            gradients[2][3, 4] = torch.inf
        step(model, gradients)
        after = handle.state_dict()
        seen = [bool(p.grad.isnan().all()) if p.grad.isnan().any() else None for p in model.parameters()]
        kept = all(
            torch.equal(before[kind]["p2"], after[kind]["p2"])
            for kind in ("residual", "owned", "factor")
            if "p2" in before[kind]
        )
        finite = bool(step(model, next(given_)).isfinite().all())
        return {"seen": seen, "kept": kept, "next_is_finite": finite, "counted": handle.counters.nonfinite_steps}


def scaler() -> dict[str, Any]:
    model, given_ = replicated(), whole_numbers(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler_ = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    with compress_gradients(model, "topk:10%", **EVERYTHING) as handle:
        moved, scales = [], []
        for number in range(3):
            gradients = next(given_)
            if number == 1 and dist.get_rank() == 0:
                gradients[0][0, 0] = torch.inf
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad(set_to_none=True)
            scaler_.scale(model(gradients)).backward()
            scaler_.step(optimizer)
            old = scaler_.get_scale()
            scaler_.update()
            unsent = residuals(handle)
            handle.rescale(scaler_.get_scale() / old)
            scales.append((scaler_.get_scale(), torch.equal(residuals(handle), unsent * (scaler_.get_scale() / old))))
            moved.append(any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
        return {"moved": moved, "scales": scales, "counted": handle.counters.nonfinite_steps}


def unused(method: str) -> dict[str, Any]:
    model, given_ = replicated(find_unused_parameters=True), whole_numbers(dist.get_rank())
    with compress_gradients(model, method, **EVERYTHING) as handle:
        step(model, next(given_))
        before = handle.state_dict()
        gradients: list[torch.Tensor | None] = list(next(given_))
        gradients[0] = None  # on no rank
        if dist.get_rank() == 0:
            gradients[1] = None  # on rank 1 only
        step(model, gradients)
        after = handle.state_dict()
        grads = [p.grad for p in model.parameters()]
        same = are_same(torch.cat([each.reshape(-1) for each in grads[1:]]))
        kept = all(torch.equal(before[kind]["p0"], after[kind]["p0"]) for kind in ("residual", "owned") if before[kind])
        return {"none": grads[0] is None, "kept": kept, "same": same, "moved": bool(grads[1].any())}


def accumulation() -> bool:
    """Two micro-batches without synchronisation and one with, against DDP without compression."""

    def run(model: DistributedDataParallel) -> torch.Tensor:
        given_ = whole_numbers(dist.get_rank())
        model.zero_grad(set_to_none=True)
        with model.no_sync():
            model(next(given_)).backward()
            model(next(given_)).backward()
        model(next(given_)).backward()
        return flat(model)

    model = replicated()
    with compress_gradients(model, "topk:100%", **EVERYTHING) as handle:
        compressed = run(model)
        steps = handle.counters.steps
    return torch.equal(compressed, run(replicated())) and steps == 1


def variants() -> dict[str, bool]:
    found = {}
    for name, options in {
        "static_graph": {"static_graph": True},
        "bucket_view": {"gradient_as_bucket_view": True},
        "both": {"static_graph": True, "gradient_as_bucket_view": True},
        "find_unused": {"find_unused_parameters": True},
    }.items():
        rows = []
        for method in ("topk:100%", None):
            model, given_ = replicated(**options), whole_numbers(dist.get_rank())
            with compress_gradients(model, method, **EVERYTHING) if method else contextlib.nullcontext():
                rows.append([step(model, next(given_)) for _ in range(4)])
        found[name] = all(torch.equal(a, b) for a, b in zip(*rows, strict=True))
    return found


def dtypes() -> dict[str, Any]:
    kinds = (torch.bfloat16, torch.float32, torch.float64)
    rows, described = [], ""
    for method in ("topk:100%", None):
        model = DistributedDataParallel(Given(kinds), bucket_cap_mb=0.0005)
        given_ = whole_numbers(dist.get_rank())
        with compress_gradients(model, method, **EVERYTHING) if method else contextlib.nullcontext() as handle:
            rows.append([step(model, next(given_)) for _ in range(3)])
            described = handle.describe() if handle else described
    return {"equal": all(torch.equal(a, b) for a, b in zip(*rows, strict=True)), "described": described}


def sparse() -> bool:
    rows = []
    for method in ("topk:100%", None):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Embedding(30, 4, sparse=True), nn.Linear(4, 3)))
        with compress_gradients(model, method, **EVERYTHING) if method else contextlib.nullcontext():
            for number in range(3):
                model.zero_grad(set_to_none=True)
                model(torch.tensor([dist.get_rank() + number, 7])).sum().backward()
        rows.append([p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*rows, strict=True))


def resumed(method: str) -> dict[str, bool]:
    options = dict(EVERYTHING)
    if method == "momentum":
        method, options["momentum"] = "topk:10%", 0.9

    def run(model: nn.Module, given_: Iterator[list[torch.Tensor]], steps: int) -> list[torch.Tensor]:
        return [step(model, next(given_)) for _ in range(steps)]

    model = replicated()
    with compress_gradients(model, method, **options) as handle:
        first, counters = run(model, whole_numbers(dist.get_rank()), 6), handle.counters
    model, given_ = replicated(), whole_numbers(dist.get_rank())
    with compress_gradients(model, method, **options) as handle:
        again = run(model, given_, 3)
        saved = io.BytesIO()
        torch.save(handle.state_dict(), saved)
    model = replicated()
    with compress_gradients(model, method, **options) as handle:
        saved.seek(0)
        handle.load_state_dict(torch.load(saved))
        rest = run(model, given_, 3)
        continued = all(torch.equal(a, b) for a, b in zip(first[3:], rest, strict=True))
        return {
            "repeats": all(torch.equal(a, b) for a, b in zip(first[:3], again, strict=True)),
            "continues": continued,
            "counts": handle.counters == counters,
        }


def mismatches() -> dict[str, tuple[str, str, str]]:
    model = replicated()
    with compress_gradients(model, "topk:10%", **EVERYTHING) as handle:
        step(model, next(whole_numbers(dist.get_rank())))
        state = handle.state_dict()
        found = {
            "ranks": refused(lambda: handle.load_state_dict({**state, "ranks": 4})),
            "rank": refused(lambda: handle.load_state_dict({**state, "rank": 1 - state["rank"]})),
            "model": refused(lambda: handle.load_state_dict({**state, "shapes": {**state["shapes"], "p1": [3, 3]}})),
            "newer": refused(lambda: handle.load_state_dict({**state, "schema_version": 99})),
        }
        unchanged = torch.equal(residuals(handle), torch.cat([each.reshape(-1) for each in state["residual"].values()]))
        assert unchanged, "a refused state changed something"
    with compress_gradients(model, "topk:20%", **EVERYTHING) as handle:
        found["method"] = refused(lambda: handle.load_state_dict(state))
    return found


def removed() -> dict[str, Any]:
    given_ = whole_numbers(dist.get_rank())
    before = _threads(), len(dist.distributed_c10d._world.pg_map)
    model, plain = replicated(), replicated()
    handle = compress_gradients(model, "sign:16", **EVERYTHING)
    gradients = next(given_)
    differs = not torch.equal(step(model, gradients), step(plain, gradients))
    kept = bool(residuals(handle).any())
    handle.remove()
    handle.remove()
    after = _threads(), len(dist.distributed_c10d._world.pg_map)
    gradients = next(given_)
    restored = torch.equal(step(model, gradients), step(plain, gradients))
    with compress_gradients(model, "sign:16", **EVERYTHING):
        again = not torch.equal(step(model, gradients), step(plain, gradients))
    return {
        "differs": differs,
        "restored": restored,
        "again": again,
        "leaves_nothing": before == after,
        "lets_go": kept and not handle.state_dict()["residual"],
        "inactive": not handle.is_active,
    }


def _threads() -> int:
    return sum(thread.name.startswith("gradient-compression") for thread in threading.enumerate())


def refusals() -> dict[str, tuple[str, str, str]]:
    model, foreign, one_sided = replicated(), replicated(), replicated()
    foreign.register_comm_hook(None, _somebody_elses)
    if dist.get_rank() == 1:
        one_sided.register_comm_hook(None, _somebody_elses)
    other = "topk:10%" if dist.get_rank() else "topk:20%"
    with compress_gradients(model, "topk:10%", **EVERYTHING):
        found = {"twice": refused(lambda: compress_gradients(model, "int8", **EVERYTHING))}
    return found | {
        "foreign": refused(lambda: compress_gradients(foreign, "topk:10%", **EVERYTHING)),
        "one-sided": refused(lambda: compress_gradients(one_sided, "topk:10%", **EVERYTHING)),
        "differ": refused(lambda: compress_gradients(model, other, **EVERYTHING)),
        "bare": refused(lambda: compress_gradients(nn.Linear(2, 2), "topk:10%")),
        "pattern": refused(lambda: compress_gradients(model, "topk:10%", exclude=("*attn*",))),
        "group": refused(lambda: compress_gradients(model, "topk:10%", replicate_group=dist.group.WORLD)),
    }


def broken() -> dict[str, str]:
    """What backward says of an error that was met beside it, on the thread that exchanges gradients; and the step after it.

    With several buckets, of which one rank fails at one and the other at two: neither may go on to exchange the others.
    """
    model, given_ = replicated(), whole_numbers(dist.get_rank())
    with compress_gradients(model, "sign:16", **EVERYTHING):
        for _ in range(2):  # DDP has one bucket at first
            step(model, next(given_))
        calls, offer = itertools.count(), meaning.offer

        def fail_at_first(*arguments: Any) -> Any:
            if next(calls) <= dist.get_rank():
                raise ValueError("the cause")
            return offer(*arguments)

        with unittest.mock.patch.object(meaning, "offer", fail_at_first):
            first = _error_of(lambda: step(model, next(given_)))
        return {"first": first, "next": _error_of(lambda: step(model, next(given_)))}


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def _somebody_elses(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def warmup() -> list[bool]:
    model, plain, given_ = replicated(), replicated(), whole_numbers(dist.get_rank())
    with compress_gradients(model, "sign:16", warmup_steps=2, **EVERYTHING):
        equal = []
        for _ in range(4):
            gradients = next(given_)
            equal.append(torch.equal(step(model, gradients), step(plain, gradients)))
    return equal


def late() -> bool:
    """Compression that begins when training is under way and DDP has rebuilt its buckets."""
    model, plain, given_ = replicated(), replicated(), whole_numbers(dist.get_rank())
    for _ in range(3):
        step(model, next(given_))
    with compress_gradients(model, "topk:100%", **EVERYTHING):
        step(plain, next(given_))
        rows = [(step(model, each), step(plain, each)) for each in (next(given_), next(given_))]
        return all(torch.equal(a, b) for a, b in rows)


def momentum() -> list[bool]:
    """Two steps of warm-up and two compressed ones; whether each gave what SGD's momentum gives."""
    model, plain, given_ = replicated(), replicated(), whole_numbers(dist.get_rank())
    velocity, equal = torch.zeros(()), []
    with compress_gradients(model, "topk:100%", warmup_steps=2, momentum=0.5, **EVERYTHING):
        for _ in range(4):
            gradients = next(given_)
            velocity = 0.5 * velocity + step(plain, gradients)
            equal.append(torch.equal(step(model, gradients), velocity))
    return equal
