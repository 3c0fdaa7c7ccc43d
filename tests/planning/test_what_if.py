"""A step's events with the loss in chunks against the measured peak of that step, over dtypes and kinds of head."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import transformers
from torch import nn

import zoo
from long_cases import some
from metering import warm_peak
from plimsoll.artifacts.plan import Holder, Peak
from plimsoll.artifacts.trace import Trace
from plimsoll.chunked import chunk_loss
from plimsoll.errors import InvalidOption
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.roofline import roofline_costs
from plimsoll.planning.explain import floor_error
from plimsoll.planning.simulate import run_choices
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import choose_full
from plimsoll.planning.what_if import chunk_rows_for, find_head, peak_with_chunked_loss, with_chunked_loss
from plimsoll.tracing.trace import trace, watch

VOCABULARY, ROWS = 5000, 32


def llama(**options: Any) -> nn.Module:
    options |= {"max_position_embeddings": 96}
    return zoo.build("llama", num_hidden_layers=1, num_key_value_heads=4, vocab_size=VOCABULARY, **options)


def gemma2() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY, "use_cache": False}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, **heads))


class Autocast(nn.Module):
    """A model that computes in bfloat16 and keeps its weights in float32."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(**batch)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "float32": llama,
    "bfloat16": lambda: llama().to(torch.bfloat16),
    "autocast": lambda: Autocast(llama()),
    "tied": lambda: llama(tie_word_embeddings=True),
    "capped": gemma2,
}


def tokens() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return zoo.words(tokens=96, vocabulary=VOCABULARY)


def peak_bytes(traced: Trace) -> int:
    index = StepIndex(traced, roofline_costs(traced, find_device("CPU")))
    return int(index.fixed.max())


@pytest.fixture(scope="module")
def watched() -> Callable[[str], tuple[nn.Module, Trace]]:
    """Each model is watched once."""

    @functools.cache
    def find(name: str) -> tuple[nn.Module, Trace]:
        model = MODELS[name]().train()
        return model, watch(model, tokens()).trace

    return find


@pytest.mark.parametrize("name", some(MODELS, 3))
def test_events_with_a_chunked_loss_have_the_measured_peak(name: str, watched):
    model, traced = watched(name)
    head = find_head(traced)
    assert head is not None
    assert (head.classes, head.features, head.rows) == (VOCABULARY, 32, 192)
    plain = warm_peak(model, tokens())
    with chunk_loss(model, chunk_rows=ROWS):
        chunked = warm_peak(model, tokens())
    assert peak_bytes(traced) == pytest.approx(plain, rel=0.005)
    lowers = peak_bytes(traced) - peak_bytes(with_chunked_loss(traced, head, ROWS))
    assert lowers == pytest.approx(plain - chunked, rel=0.02)


def test_a_plan_for_the_floor_offers_the_chunked_loss_with_its_peak():
    model = llama().train()
    traced = trace(model, tokens(), repeats=1)
    index = StepIndex(traced, roofline_costs(traced, find_device("CPU")))
    full = run_choices(index, choose_full(index, ""))
    chunked_bytes = peak_with_chunked_loss(full)
    assert chunked_bytes is not None
    assert chunked_bytes < 0.6 * full.peak_bytes
    floor = Peak(moment="backward", bytes=full.peak_bytes, holders=(Holder(label="logits", bytes=full.peak_bytes),))
    error = floor_error(1000, floor, chunked_bytes=chunked_bytes, state_bytes=0)
    assert error.next.startswith("call plimsoll.chunked.chunk_loss(model) before planning (floor ")
    assert "chunk_loss" not in floor_error(1000, floor, chunked_bytes=int(0.99 * floor.bytes), state_bytes=0).next
    assert "chunk_loss" not in floor_error(1000, floor, state_bytes=0).next


@pytest.mark.parametrize(("share", "is_named"), [(0.5, True), (0.01, False)])
def test_a_smaller_optimizer_state_is_advised_only_if_it_is_a_part_of_the_floor(share: float, is_named: bool):
    floor = Peak(moment="backward", bytes=10**9, holders=(Holder(label="logits", bytes=10**9),))
    error = floor_error(1000, floor, 1000, state_bytes=int(share * floor.bytes))
    assert ("less state" in error.next) is is_named
    assert "real step" not in error.why  # 1,000 bytes are not worth a clause


@pytest.mark.parametrize(("classes", "rows"), [(2, 32), (4, 32), (1000, 8)])
def test_a_head_is_told_from_a_larger_matrix_with_the_same_arithmetic(classes: int, rows: int):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, classes))
    labels = torch.zeros(rows, dtype=torch.int64)
    step = watch(
        model.to("meta"), torch.randn(rows, 64), loss=lambda y: nn.functional.cross_entropy(y, labels.to(y.device))
    )
    head = find_head(step.trace)
    assert head is not None
    assert (head.weight, head.rows, head.classes) == ("2.weight", rows, classes)


def test_without_a_head_there_is_nothing_to_chunk(watched):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    step = watch(model, torch.randn(4, 8), loss=lambda y: y.square().mean())
    assert find_head(step.trace) is None
    older = msgspec.structs.replace(watched("float32")[1], parameters=())
    assert find_head(older) is None


def test_the_rows_of_a_chunk_follow_from_bytes_or_a_count():
    sizes = {"element_bytes": 4}
    assert chunk_rows_for(8192, 4096, 131072, **sizes) == 256
    assert chunk_rows_for(100, 4096, 131072, **sizes) == 100
    assert chunk_rows_for(8192, 4096, 131072, chunk_bytes="1GiB", **sizes) == 2048
    assert chunk_rows_for(8192, 4096, 131072, chunk_rows=7, **sizes) == 7
    with pytest.raises(InvalidOption):
        chunk_rows_for(8192, 4096, 131072, chunk_bytes="1000B", **sizes)
