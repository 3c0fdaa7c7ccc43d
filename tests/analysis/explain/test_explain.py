"""Explanations of real steps against measured memory: where the peak is, and what changes to the step take off it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import plimsoll
import zoo
from metering import warm_peak
from plimsoll.analysis.explain.changes import half_of
from plimsoll.analysis.explain.explain import by_place, place_of
from plimsoll.artifacts.base import to_json
from plimsoll.artifacts.explained import Explanation
from plimsoll.artifacts.offloaded_state import OffloadedState
from plimsoll.artifacts.plan import Holder
from plimsoll.artifacts.store import from_json, load_any
from plimsoll.artifacts.tile import Tile
from plimsoll.chunked import chunk_loss
from plimsoll.errors import InvalidModel, InvalidOption, InvalidStrategy, PlanNotUsable
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.roofline import roofline_costs
from plimsoll.planning.strategies import find_extremes
from plimsoll.tracing.trace import trace
from steps import Net
from unchanged import unchanged

VOCABULARY = 6000
WITHIN = 0.02


def llama() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4, "vocab_size": VOCABULARY}
    return zoo.build("llama", **sizes, max_position_embeddings=2048)


def tokens() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return zoo.words(tokens=160, vocabulary=VOCABULARY)


def change(explanation: Explanation, name: str) -> Any:
    return next(entry for entry in explanation.changes if entry.name == name)


def checkpointing() -> nn.Module:
    """The model as transformers checkpoints it."""
    model = llama()
    model.gradient_checkpointing_enable()
    return model


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    """A real step that checkpoints every block."""
    model, batch = checkpointing(), tokens()
    with unchanged(model):
        return plimsoll.explain(model, batch)


@pytest.fixture(scope="module")
def checkpointed_bytes() -> int:
    """The measured peak of that step."""
    return warm_peak(checkpointing(), tokens())


def test_both_peaks_are_the_measured_ones(explanation: Explanation, checkpointed_bytes: int):
    assert explanation.peak.bytes == pytest.approx(checkpointed_bytes, rel=0.005)
    assert explanation.plain_peak.bytes == pytest.approx(warm_peak(llama(), tokens()), rel=0.002)
    assert sum(holder.bytes for holder in explanation.peak.holders) == explanation.peak.bytes
    assert sum(holder.bytes for holder in explanation.resident) == explanation.resident_bytes


def test_the_parts_of_a_peak_add_up_to_it_and_its_logits_are_one_of_them(explanation: Explanation):
    parts = {part.name: part.bytes for part in explanation.parts}
    assert sum(parts.values()) == explanation.peak.bytes
    assert parts["head and loss"] >= 2 * 160 * VOCABULARY * 4  # logits and their log-softmax


@pytest.mark.long
def test_a_watched_step_and_a_traced_one_have_the_same_parts():
    model, batch = llama(), tokens()
    advice = plimsoll.advise(model, batch, "1GiB", compile_seconds=0)
    assert plimsoll.explain(model, batch).parts == advice.bottleneck.parts


def test_strategies_are_predicted_where_checkpointing_then_measures(explanation: Explanation, checkpointed_bytes: int):
    full, none = change(explanation, "strategy full"), change(explanation, "strategy none")
    assert full.predicted_peak_bytes == pytest.approx(checkpointed_bytes, rel=WITHIN)
    assert none.predicted_peak_bytes == pytest.approx(explanation.plain_peak.bytes, rel=0.001)


def test_the_chunked_loss_takes_off_what_it_is_said_to(explanation: Explanation, checkpointed_bytes: int):
    model = checkpointing()
    with chunk_loss(model):
        after = warm_peak(model, tokens())
    chunked = change(explanation, "chunked loss")
    assert chunked.lowers_bytes == pytest.approx(checkpointed_bytes - after, rel=WITHIN)
    assert "chunk_loss(model)" in chunked.how


def test_half_the_batch_takes_off_what_it_is_said_to(explanation: Explanation):
    half = {name: tensor[:1] for name, tensor in tokens().items()}
    predicted = change(explanation, "half the micro-batch").predicted_peak_bytes
    assert predicted == pytest.approx(warm_peak(checkpointing(), half), rel=WITHIN)


def test_freeing_the_output_takes_off_what_it_is_said_to(explanation: Explanation):

    alone = Net(
        lambda net, **batch: net.inner(**batch).loss, inner=checkpointing()
    )  # returns the loss and nothing else
    freed = change(explanation, "output freed before backward")
    assert freed.lowers_bytes > 0
    assert freed.predicted_peak_bytes == pytest.approx(warm_peak(alone, tokens()), rel=WITHIN)


def test_a_peak_that_does_not_move_is_explained(explanation: Explanation):
    assert explanation.setup == "torch.utils.checkpoint (2 times a step)"
    assert explanation.resident_bytes < explanation.plain_resident_bytes
    assert "chunked loss" in explanation.verdict
    best = explanation.helpful[0]
    assert best.name == "chunked loss"
    assert best.lowers_bytes > 0.5 * explanation.peak.bytes
    assert {part.place for part in explanation.recomputed} == {f"model.layers.{n}" for n in range(2)}
    assert all(part.most_bytes > 0 and part.ops > 10 for part in explanation.recomputed)


class Rows(nn.Module):
    """A stack that may checkpoint its blocks, offload, or do nothing, without a head."""

    def __init__(self, run: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda block, x: block(x)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x.square().mean()


def test_a_strategy_is_explained_without_being_run():
    model, x = Rows(), torch.randn(256, 64)
    plain_bytes = warm_peak(model, x)
    explanation = plimsoll.explain(model, x, "every:2")
    assert explanation.setup == "strategy every:2, by Plimsoll"
    assert explanation.plain_peak.bytes == pytest.approx(plain_bytes, rel=0.001)
    assert explanation.resident_bytes < explanation.plain_resident_bytes
    assert {part.place for part in explanation.recomputed} == {"blocks.0", "blocks.2"}
    assert {"strategy full", "strategy none"} < {entry.name for entry in explanation.changes}


class Classifier(Rows):
    """A head and a cross-entropy that ``chunk_loss`` does not know, too small to matter."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), labels)


@pytest.mark.long
def test_changes_are_ones_that_can_be_made_and_not_what_is_done_already():
    batch = (torch.randn(8, 64, device="meta"), torch.zeros(8, dtype=torch.int64, device="meta"))
    model = Classifier().to("meta")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    explanation = plimsoll.explain(model, batch, "full", optimizer=optimizer)
    names = {entry.name for entry in explanation.changes}
    assert "strategy none" in names
    assert "strategy full" not in names
    assert "optimizer with foreach=False" in names
    assert "optimizer with fused=True" not in names
    assert change(explanation, "chunked loss").how.startswith("plimsoll.chunked.linear_cross_entropy(")
    assert not any(name.startswith("chunked loss and") for name in names)


@pytest.fixture(scope="module")
def checkpointed() -> Explanation:
    """A stack whose blocks are checkpointed one by one."""
    return plimsoll.explain(Rows(lambda block, x: checkpoint(block, x, use_reentrant=False)), torch.randn(128, 64))


def test_fake_tensors_explain_what_real_ones_would(checkpointed: Explanation):
    with torch.device("meta"):
        model = Rows(lambda block, x: checkpoint(block, x, use_reentrant=False))
        fake = plimsoll.explain(model, torch.randn(128, 64))
    assert fake.is_fake
    assert fake.peak.bytes == pytest.approx(checkpointed.peak.bytes, rel=0.005)
    assert fake.resident_bytes == checkpointed.resident_bytes


def test_both_forms_of_checkpointing_are_watched(checkpointed: Explanation):
    model = Rows(lambda block, x: checkpoint(block, x, use_reentrant=True))
    reentrant = plimsoll.explain(model, torch.randn(128, 64, requires_grad=True))
    for explanation in (checkpointed, reentrant):
        assert "torch.utils.checkpoint" in explanation.setup
        assert {part.place for part in explanation.recomputed} == {f"blocks.{n}" for n in range(4)}
        assert explanation.resident_bytes < 0.7 * explanation.plain_resident_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_in_8_bits_takes_a_byte_for_each_element_and_a_scale_for_256(dtype: torch.dtype):
    model = nn.Linear(512, 512, bias=False, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    explanation = plimsoll.explain(model, torch.randn(4, 512, dtype=dtype), loss=torch.sum, optimizer=optimizer)
    lowered_bytes = change(explanation, "optimizer state in 8 bits").lowers_bytes
    assert lowered_bytes == pytest.approx(2 * 512 * 512 * (dtype.itemsize - 1 - 4 / 256), rel=1e-3)


def test_optimizer_gradients_and_offloading_belong_to_the_step():
    model = Rows()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    explanation = plimsoll.explain(
        model, (torch.randn(8, 64),), optimizer=optimizer, context=torch.autograd.graph.save_on_cpu
    )
    state_bytes = 2 * sum(p.numel() * 4 for p in model.parameters())
    assert explanation.setup == "torch.autograd.graph.save_on_cpu (1 times a step)"
    assert explanation.optimizer == "AdamW"
    assert explanation.peak.moment.startswith("optimizer")
    assert change(explanation, "optimizer with foreach=False").lowers_bytes > 0.2 * state_bytes
    assert change(explanation, "optimizer with fused=True").lowers_bytes > 0.2 * state_bytes
    assert change(explanation, "optimizer state in 8 bits").lowers_bytes == pytest.approx(0.74 * state_bytes, rel=0.03)
    assert change(explanation, "gradients set to None").lowers_bytes >= 0
    assert "chunked loss" in {entry.name for entry in explanation.unsupported}
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not optimizer.state


def test_set_to_none_takes_off_the_gradients_that_forward_meets():
    model, x = Rows(), torch.randn(512, 64)
    without = warm_peak(model, x)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    found = change(plimsoll.explain(model, x), "gradients set to None")
    assert found.predicted_peak_bytes == pytest.approx(without, rel=0.001)


def test_it_says_plainly_when_nothing_moves_the_peak():
    model = nn.Sequential(nn.Linear(256, 1))
    explanation = plimsoll.explain(model, torch.randn(1, 256), loss=lambda y: y.sum())
    assert not explanation.helpful
    assert explanation.verdict.endswith("None of the changes that were tried lowers the peak.")
    assert "none of the changes that were tried lowers the peak" in str(explanation)


def test_explanations_round_trip_and_read_well(explanation: Explanation, tmp_path: Any):
    assert from_json(to_json(explanation)) == explanation
    explanation.save(tmp_path / "explanation.json")
    assert load_any(tmp_path / "explanation.json") == explanation
    text = str(explanation)
    for part in (
        "set-up",
        "Resident after forward",
        "Recomputed in backward",
        "What would lower the peak",
        "chunked loss",
    ):
        assert part in text
    alone = msgspec.structs.replace(explanation, plain_peak=None, plain_resident_bytes=None)
    assert "everything kept" not in str(alone)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        *(({"strategy": each}, InvalidStrategy, "replayed") for each in ("int8", "offload", "hybrid:2,2", "auto")),
        ({"strategy": "evry:2"}, InvalidStrategy, "evry:2"),
        ({"strategy": 3}, InvalidStrategy, "int is not a strategy"),
        ({"context": torch.autograd.graph.save_on_cpu()}, InvalidOption, "cannot be called"),
        ({"strategy": "full", "context": torch.autograd.graph.save_on_cpu}, InvalidOption, "does not have an effect"),
        ({"model": "model"}, InvalidModel, ""),
    ],
)
def test_what_cannot_be_replayed_is_refused(how: dict[str, Any], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        plimsoll.explain(**({"model": Rows(), "batch": torch.randn(4, 64)} | how))


def test_a_saved_plan_explains_the_step_that_it_was_made_for():
    model, x = Rows(), torch.randn(256, 64)
    traced = trace(model, x, repeats=1)
    plan = find_extremes(traced, roofline_costs(traced, find_device("CPU"))).lowest
    assert plimsoll.explain(model, x, plan).peak.bytes == plan.predicted_peak_bytes
    tiled = msgspec.structs.replace(plan, tiles=(Tile(path="rows", count=2, rows=256, inputs={"0": 0}, outputs=(0,)),))
    state = OffloadedState(
        optimizer="SGD", link="host", chunks=(("rows.weight",),), state_bytes=10, offloaded_bytes=8, link_bytes=20
    )
    with pytest.raises(InvalidStrategy, match="in tiles"):
        plimsoll.explain(model, x, tiled)
    with pytest.raises(PlanNotUsable, match="explain cannot run this plan: it offloads the state of SGD"):
        plimsoll.explain(model, x, msgspec.structs.replace(plan, state=state))


def test_places_are_regions_then_modules_then_labels():
    regions = ["layers.1", "layers.10"]
    assert place_of("layers.10.mlp::mm#0", regions) == "layers.10"
    assert place_of("head::mm#0", regions) == "head"
    summed = by_place([Holder(label="layers.1::a", bytes=1), Holder(label="layers.1.b::c", bytes=2)], regions)
    assert summed == (Holder(label="layers.1", bytes=3),)


@pytest.mark.parametrize("batch", [torch.zeros(()), torch.zeros(1, 4), {"scale": 2.0}])
def test_a_batch_that_cannot_be_halved_is_not(batch: Any):
    assert half_of(batch) is None
