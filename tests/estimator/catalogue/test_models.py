"""The catalogue: every entry is complete, its facts are those of its source, and every family's sibling can be traced."""

from __future__ import annotations

import math

import pytest

from long_cases import some
from plimsoll.estimator.catalogue.models import known_models
from plimsoll.estimator.targets.tracing import TraceRequest, target_facts, trace_target
from plimsoll.estimator.trace_cache import TracedTarget

CATALOGUE = known_models()
TINY = "made for a CPU: the real architecture, small sizes"
TINY_NAMES = [name for name in CATALOGUE if name.endswith("-tiny")]
TRACED_ELSEWHERE = ("llama-tiny", "t5-tiny")
"""The first by the tests of the cache, the second's architecture by those of fake traces: a trace takes a second."""


@pytest.fixture(scope="module", params=some([name for name in TINY_NAMES if name not in TRACED_ELSEWHERE], 4))
def traced(request: pytest.FixtureRequest) -> TracedTarget:
    return trace_target(TraceRequest(target=request.param, device_name="H100-SXM"))


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_entry_names_its_source_and_is_asked_about_a_batch(name: str):
    model = CATALOGUE[name]
    assert len(model.source) > 20
    assert (model.source.startswith(TINY)) is name.endswith("-tiny")
    assert model.batch >= 1
    assert model.sequence is None or model.sequence > 1


def test_every_architecture_has_a_tiny_sibling():
    tiny = {CATALOGUE[name].architecture for name in TINY_NAMES}
    assert {model.architecture for model in CATALOGUE.values()} == tiny


def test_a_tiny_sibling_is_traced_with_facts_of_its_own(traced: TracedTarget):
    facts, trace = traced.facts, traced.trace
    assert trace.is_fake
    assert trace.regions
    assert not [region.obstacle for region in trace.regions if region.obstacle]
    assert facts.batch == CATALOGUE[facts.name].batch
    elements = sum(math.prod(parameter.shape) for parameter in trace.parameters)
    assert facts.parameters == elements
    assert 0 < facts.active_parameters <= facts.parameters
    assert (facts.active_parameters < facts.parameters) is (facts.experts is not None)
    if facts.layers is not None:
        assert facts.layers == len(trace.regions)
    if CATALOGUE[facts.name].note:
        assert any(CATALOGUE[facts.name].note in note for note in trace.notes)
    assert any("all experts get the same number of tokens" in note for note in trace.notes) is (
        facts.experts is not None
    )


def test_experts_compute_as_many_rows_as_tokens_are_sent(traced: TracedTarget):
    facts = traced.facts
    products = [key for key, spec in traced.trace.specs.items() if spec.name == "_grouped_mm"]
    if facts.experts is None:
        assert not products
        return
    rows = facts.tokens * facts.experts_per_token
    assert all(f"[{rows}x" in key or f"x{rows}]" in key for key in products)
    width = facts.hidden
    assert any(
        spec.flops % (2 * rows * width) == 0 and spec.flops > 0
        for spec in traced.trace.specs.values()
        if spec.name == "_grouped_mm"
    )


@pytest.mark.parametrize(
    ("name", "sizes"),  # layers, hidden, heads, key-value heads, vocabulary
    [
        ("llama-3-405b", (126, 16384, 128, 8, 128256)),
        ("llama-2-13b", (40, 5120, 40, 40, 32000)),
        ("qwen3-32b", (64, 5120, 64, 8, 151936)),
        ("mixtral-8x7b", (32, 4096, 32, 8, 32000)),
        ("deepseek-v3", (61, 7168, 128, 128, 129280)),
        ("gpt3-175b", (96, 12288, 96, 96, 50257)),
        ("megatron-1t", (128, 25600, 160, 160, 51200)),
        ("bert-large", (24, 1024, 16, 16, 30522)),
        ("t5-large", (48, 1024, 16, 16, 32128)),
        ("vit-h", (32, 1280, 16, 16, None)),
        ("clip-vit-l-14", (36, 1024, 16, 16, 49408)),
        ("whisper-large-v3", (64, 1280, 20, 20, 51866)),
        ("mamba2-130m", (24, 768, None, None, 50288)),
        ("sd-1.5-unet", (None, None, None, None, None)),
    ],
)
def test_facts_are_read_without_building_the_model(name: str, sizes: tuple[int | None, ...]):
    facts = target_facts(TraceRequest(target=name, device_name="H100-SXM"))
    assert (facts.layers, facts.hidden, facts.heads, facts.kv_heads, facts.vocabulary) == sizes
    assert facts.parameters is None


def test_tokens_count_text_alone():
    assert target_facts(TraceRequest(target="llama-3-8b", device_name="H100", batch=3, sequence=100)).tokens == 300
    assert target_facts(TraceRequest(target="clip-vit-l-14", device_name="H100")).tokens is None
    assert target_facts(TraceRequest(target="whisper-large-v3", device_name="H100")).tokens is None
