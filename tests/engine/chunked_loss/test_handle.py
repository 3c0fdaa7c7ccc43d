"""One line chunks the loss of real causal language models, and takes itself away without a trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import plimsoll
import zoo
from plimsoll.chunked import chunk_loss
from plimsoll.engine.chunked_loss.handle import can_chunk
from plimsoll.errors import InvalidBatch, InvalidLoss, InvalidModel, InvalidOption
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.roofline import roofline_costs
from plimsoll.planning.strategies import find_extremes
from plimsoll.session.training_step import TrainingStep
from plimsoll.tracing.trace import trace

VOCABULARY = 300
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "vocab_size": VOCABULARY}


def llama(**options: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **{**TOKENS, **options}))


def causal(name: str, **options: Any) -> Callable[[], nn.Module]:
    """How to build a small causal model of this family."""
    config, model = (getattr(transformers, f"{name}{kind}") for kind in ("Config", "ForCausalLM"))
    return lambda: model(config(**SMALL, **TOKENS, **options))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "tied head": lambda: llama(tie_word_embeddings=True),
    "tied gpt2": lambda: zoo.build("gpt2", vocab_size=VOCABULARY).eval(),
    "softcap": causal("Gemma2", num_key_value_heads=2, head_dim=8, final_logit_softcapping=2.0),
    "scaled logits": causal("Granite", logits_scaling=4.0),
    "head with a bias": causal("Phi"),
    "router loss": causal("Mixtral", num_key_value_heads=2, num_local_experts=4, output_router_logits=True),
}


def batch_of(**more: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (2, 12))
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels, **more}


def loss_and_gradients(model: nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("items", [None, 17], ids=["mean", "num_items_in_batch"])
def test_loss_and_gradients_are_the_models_own(make: Callable[[], nn.Module], items: int | None):
    torch.manual_seed(0)
    model = make()
    batch = batch_of() if items is None else batch_of(num_items_in_batch=items)
    expected = loss_and_gradients(model, batch)
    with chunk_loss(model, chunk_rows=5):
        found = loss_and_gradients(model, batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_removal_leaves_the_model_as_it_was():
    model = llama()
    before = copy.deepcopy(model.__dict__), copy.deepcopy(model.lm_head.__dict__)
    names = list(model.state_dict())
    handle = chunk_loss(model)
    assert list(model.state_dict()) == names
    handle.remove()
    handle.remove()
    assert not handle.is_active
    assert (model.__dict__.keys(), model.lm_head.__dict__.keys()) == (before[0].keys(), before[1].keys())
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_loss_that_was_set_by_hand_is_set_again():
    model = transformers.BertLMHeadModel(transformers.BertConfig(**SMALL, vocab_size=VOCABULARY, is_decoder=True))
    model.loss_function = transformers.loss.loss_utils.ForCausalLMLoss
    with chunk_loss(model):
        assert model.loss_function is not transformers.loss.loss_utils.ForCausalLMLoss
    assert model.__dict__["_loss_function"] is transformers.loss.loss_utils.ForCausalLMLoss


def test_without_labels_or_gradients_there_are_logits_as_before():
    model = llama()
    batch = batch_of()
    expected = model(input_ids=batch["input_ids"]).logits
    with torch.no_grad():
        evaluated = model(**batch)
    with chunk_loss(model):
        assert torch.equal(model(input_ids=batch["input_ids"]).logits, expected)
        with torch.no_grad():
            again = model(**batch)
        assert torch.equal(again.logits, evaluated.logits)
        assert torch.equal(again.loss, evaluated.loss)
        assert model.generate(batch["input_ids"][:1], max_new_tokens=2).shape[1] == 14


def test_output_logits_know_their_shape_and_say_what_they_are_when_they_are_used():
    model = llama()
    with chunk_loss(model):
        logits = model(**batch_of()).logits
    assert logits.shape == (2, 12, VOCABULARY)
    assert not hasattr(logits, "layout")
    uses = (lambda x, _: torch.softmax(x, -1), lambda x, _: x.argmax(), lambda x, _: x[..., :5], lambda x, y: x * y)
    for use in uses:
        with pytest.raises(InvalidModel, match="because the loss is chunked"):
            use(logits, torch.ones(2))  # type: ignore[operator]


def test_a_tuple_comes_back_where_a_tuple_is_wanted_and_labels_may_be_given_by_position():
    model, batch = llama(), batch_of()
    with chunk_loss(model):
        loss, *_ = model(**batch, return_dict=False)
        assert loss.dim() == 0
        output = model(batch["input_ids"], None, None, None, None, batch["labels"])
        assert not isinstance(output.logits, torch.Tensor)


def test_fewer_logits_than_labels_are_refused():
    model = llama()
    with chunk_loss(model), pytest.raises((InvalidBatch, InvalidLoss), match="logits_to_keep"):
        model(**batch_of(logits_to_keep=3))


def test_a_copy_made_meanwhile_computes_with_its_own_weights():
    model = llama()
    with chunk_loss(model, chunk_rows=5):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.lm_head.weight.zero_()
        assert twin(**batch_of()).loss.item() == pytest.approx(torch.tensor(float(VOCABULARY)).log().item(), rel=1e-5)
        assert model(**batch_of()).loss.item() != twin(**batch_of()).loss.item()


def test_what_cannot_be_chunked_in_one_line_is_refused_untouched():
    encoder = transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, vocab_size=VOCABULARY))
    assert can_chunk(llama())
    for model in (nn.Linear(2, 2), encoder, transformers.LlamaModel(transformers.LlamaConfig(**SMALL, **TOKENS))):
        with pytest.raises(InvalidModel, match="chunk_loss cannot chunk the loss"):
            chunk_loss(model)
        assert not can_chunk(model)
    changed = llama()
    changed.loss_function = lambda **kwargs: torch.zeros(())
    with pytest.raises(InvalidModel, match="not ForCausalLMLoss"):
        chunk_loss(changed)
    twice = llama()
    with chunk_loss(twice), pytest.raises(InvalidModel, match="already"):
        chunk_loss(twice)
    with pytest.raises(InvalidModel, match=r"not a torch\.nn\.Module"):
        chunk_loss("llama")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="both given"):
        chunk_loss(llama(), chunk_rows=1, chunk_bytes=1)


def test_a_model_that_computes_its_loss_elsewhere_is_told_so():
    class Own(transformers.LlamaForCausalLM):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> Any:
            logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=input_ids.float().mean(), logits=logits)

    model = Own(transformers.LlamaConfig(**SMALL, **TOKENS))
    with chunk_loss(model), pytest.raises(InvalidModel, match="did not pass every output of its head"):
        model(**batch_of())


def test_it_composes_with_a_plan_in_either_order():
    model = llama()
    batch = batch_of()
    expected = loss_and_gradients(model, batch)
    traced = trace(model, batch, repeats=1)
    plan = find_extremes(traced, roofline_costs(traced, find_device("CPU"))).lowest
    for first, second in (
        (lambda: chunk_loss(model, chunk_rows=5), lambda: plimsoll.apply(model, plan)),
        (lambda: plimsoll.apply(model, plan), lambda: chunk_loss(model, chunk_rows=5)),
    ):
        with first(), second():
            for _ in range(2):
                torch.testing.assert_close(loss_and_gradients(model, batch), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(loss_and_gradients(model, batch), expected, rtol=0, atol=0)


def test_the_peak_of_a_step_loses_its_logits():
    model = llama(vocab_size=8000)
    ids = torch.randint(2, 8000, (2, 128))
    plain = TrainingStep(model, (), {"input_ids": ids, "labels": ids}).measure_peak().peak_bytes
    with chunk_loss(model, chunk_rows=16):
        chunked = TrainingStep(model, (), {"input_ids": ids, "labels": ids}).measure_peak().peak_bytes
    logit_bytes = 2 * 128 * 8000 * 4
    assert plain - chunked > 3.5 * logit_bytes
