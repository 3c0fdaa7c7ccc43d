"""The model of one rank: local shapes that train, and the whole model afterwards."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from estimator.local_rank import families
from plimsoll.errors import InvalidLayout
from plimsoll.estimator.local_rank.local import localised

DEGREES = [(2, False), (4, False), (2, True)]


def _is_supported(name: str, *, sequence_parallel: bool) -> bool:
    return not (sequence_parallel and name in families.ENCODER_DECODERS)


@pytest.mark.parametrize(("tp", "sequence_parallel"), DEGREES, ids=["tp2", "tp4", "tp2-sp"])
@pytest.mark.parametrize("name", families.FAMILIES)
def test_local_model_trains_and_its_shares_add_up_to_the_whole(name: str, tp: int, sequence_parallel: bool):
    if not _is_supported(name, sequence_parallel=sequence_parallel):
        pytest.skip("said to be unsupported: see test_impossible_divisions_are_refused_with_what_is_possible")
    model, batch = families.FAMILIES[name]()
    whole = {path: parameter.shape for path, parameter in model.named_parameters()}
    with localised(model, tp=tp, sequence_parallel=sequence_parallel) as local:
        output = model(**batch)
        output.loss.backward()
        shares = {path: parameter.shape for path, parameter in model.named_parameters()}
        trained = {path: parameter.grad for path, parameter in model.named_parameters() if parameter.requires_grad}
    assert output.loss.isfinite()
    assert all(gradient is not None and gradient.shape == shares[path] for path, gradient in trained.items())
    assert local.shards.keys() == {path for path in whole if shares[path] != whole[path]}
    assert all(shares[path].numel() * tp == whole[path].numel() for path in local.shards)
    divided = sum(whole[path].numel() for path in local.shards)
    in_blocks = sum(shape.numel() for path, shape in whole.items() if re.search(r"\.\d+\.", path) and len(shape) > 1)
    assert divided >= 0.85 * in_blocks, "most of what is in blocks has to be divided"


@pytest.mark.parametrize("name", families.EXPERTS)
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, True)], ids=["ep2", "tp2-sp-ep2"])
def test_experts_are_divided_and_their_tokens_exchanged(name: str, tp: int, sequence_parallel: bool):
    model, batch = families.FAMILIES[name]()
    stacks = {path: parameter.shape for path, parameter in model.named_parameters() if ".experts." in path}
    with localised(model, tp=tp, ep=2, sequence_parallel=sequence_parallel) as local:
        output = model(**batch)
        output.loss.backward()
        shares = {path: parameter.shape for path, parameter in model.named_parameters() if ".experts." in path}
    assert output.logits.shape == (2, 16, families.WORDS // tp)
    assert all(shares[path][0] * 2 == shape[0] for path, shape in stacks.items())
    assert all(shares[path].numel() * 2 * tp == shape.numel() for path, shape in stacks.items())
    assert {shard.group for path in stacks for shard in local.shards[path]} == ({"ep", "tp"} if tp > 1 else {"ep"})


@pytest.mark.parametrize("name", families.FAMILIES)
def test_the_model_is_restored_bit_for_bit(name: str):
    model, batch = families.FAMILIES[name]()
    before = _everything(model)
    bits = {path: tensor.detach().clone() for path, tensor in model.state_dict(keep_vars=True).items()}
    with localised(model, tp=2, ep=2 if name in families.EXPERTS else 1):
        model(**batch)
    assert _everything(model) == before
    assert all(torch.equal(tensor, bits[path]) for path, tensor in model.state_dict().items())
    assert all(path in bits for path in model.state_dict())


def test_the_model_is_restored_after_an_error():
    model, _ = families.mixtral()
    before = _everything(model)
    with pytest.raises(TypeError), localised(model, tp=2):
        model(input_ids="no tensor")
    assert _everything(model) == before
    with pytest.raises(InvalidLayout), localised(model, tp=2, ep=3):
        pass
    assert _everything(model) == before


def _everything(model: nn.Module) -> object:
    """Tensors by identity, attributes and configurations by value, and how many hooks there are."""
    found: list[object] = []
    for path, module in model.named_modules(remove_duplicate=False):
        state = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str | None)}
        tensors = {name: id(tensor) for name, tensor in (*module._parameters.items(), *module._buffers.items())}
        hooks = (len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks))
        config = vars(module).get("config")
        found.append((path, state, tensors, hooks, None if config is None else config.to_dict()))
    return found


def test_shares_are_the_first_ranks_part_of_each_fused_layer():
    model, _ = families.gpt2()
    fused = model.transformer.h[0].attn.c_attn.weight.detach()
    queries, keys, values = fused.split(32, dim=1)
    with localised(model, tp=4):
        share = model.transformer.h[0].attn.c_attn.weight
        assert torch.equal(share, torch.cat([queries[:, :8], keys[:, :8], values[:, :8]], 1))
        assert model.transformer.h[0].attn.split_size == 8


def test_one_group_of_heads_computes_what_it_computes_in_the_whole_model():
    model, _ = families.llama(keys=4)
    attention = model.model.layers[0].self_attn
    hidden = torch.randn(2, 16, 32)
    rotary = model.model.rotary_emb(hidden, torch.arange(16)[None])
    heads: list[torch.Tensor] = []
    with attention.o_proj.register_forward_pre_hook(lambda module, args: heads.append(args[0])):
        attention(hidden, position_embeddings=rotary, attention_mask=None)
        with localised(model, tp=4):
            attention(hidden, position_embeddings=rotary, attention_mask=None)
    torch.testing.assert_close(heads[1], heads[0][..., :8])


def test_few_key_value_heads_are_replicated_and_that_is_said():
    model, batch = families.llama(keys=2)
    with localised(model, tp=4) as local:
        assert model.model.layers[0].self_attn.k_proj.weight.shape == (4, 32)
        assert model.model.layers[0].self_attn.num_key_value_groups == 2
        model(**batch).loss.backward()
    assert "2 ranks hold a copy of each head" in local.notes[0]


def test_a_vocabulary_that_does_not_divide_gives_the_first_rank_most():
    model, batch = families.gpt2(words=97)
    with localised(model, tp=4) as local:
        assert model.lm_head.weight is model.transformer.wte.weight
        assert model.lm_head.weight.shape == (25, 32)
        assert model(**batch).logits.shape == (2, 16, 25)
    assert "97 words on 4 ranks" in local.notes[0]


def test_gradients_that_are_summed_over_ranks_once_a_step_are_named():
    qwen, _ = families.qwen3()
    with localised(qwen, tp=2) as local:
        assert {name.rpartition("layers.0.")[2] for name in local.summed_gradients if ".0." in name} == {
            "self_attn.q_norm.weight",
            "self_attn.k_norm.weight",
        }
    with localised(qwen, tp=2, sequence_parallel=True) as local:
        assert {"model.layers.1.input_layernorm.weight", "model.norm.weight"} <= set(local.summed_gradients)
        assert "the 2 tensor-parallel ranks sum the gradients of the 9 parameters" in local.notes[0]
        assert "(768 B)" in local.notes[0]
    mixture, _ = families.mixtral()
    with localised(mixture, tp=2) as local:
        assert local.summed_gradients == ("model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight")
    latent, _ = families.deepseek()
    with localised(latent, tp=2, sequence_parallel=True) as local:
        assert not [name for name in local.summed_gradients if "q_a_" in name or "kv_a_" in name]


def test_latent_attention_without_a_query_latent_is_divided_too():
    model, batch = families.deepseek(query_rank=None)
    with localised(model, tp=2, sequence_parallel=True) as local:
        model(**batch).loss.backward()
        assert model.model.layers[0].self_attn.q_proj.weight.shape == (32, 32)
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa.weight" not in local.shards


def test_roles_name_layers_that_nobody_knows():
    model = families.plain("ascend", "descend")
    with localised(model, tp=2, roles={"*.ascend": "colwise", "*.descend": "rowwise"}):
        assert model[1].ascend.weight.shape == (8, 8)
        model(torch.randn(2, 4, 8)).sum().backward()
    assert model[1].ascend.weight.shape == (16, 8)


def test_replicated_layers_are_left_whole():
    model = families.plain("fc1", "fc2")
    with localised(model, tp=2, roles={"0.*": "replicate"}) as local:
        assert local.shards.keys() == {"1.fc1.weight", "1.fc1.bias", "1.fc2.weight"}


def _with_layer(name: str, layer: nn.Module) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = families.plain()
        model[1].add_module(name, layer)
        return model

    return make


def _convolutions() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()))


@pytest.mark.parametrize(
    ("make", "change", "found", "advice"),
    [
        ("llama", {"tp": 3}, "8 attention heads and 4 key-value heads of model.layers.0.self_attn", "tp=1, 2, 4, 8"),
        ("llama", {"tp": 0}, "tp=0 is not a valid degree", "tp=1"),
        ("llama", {"ep": 2}, "does not have experts", "ep=1"),
        ("llama", {"sequence_parallel": True}, "Sequence parallelism needs tensor parallelism", "tp=2"),
        ("llama", {"tp": 2, "roles": {"*.nowhere": "colwise"}}, "does not match any weight", "module paths"),
        ("llama", {"tp": 2, "roles": {"*": "diagonal"}}, "'diagonal' is not a role", "colwise"),
        (
            "llama",
            {"tp": 2, "roles": {"model.layers.0.mlp.down_proj": "replicate"}},
            "because the matching layer is missing",
            "roles",
        ),
        ("mixtral", {"ep": 3}, "cannot divide the 4 experts", "ep=1, 2, 4"),
        *((name, {"tp": 2, "sequence_parallel": True}, "an encoder-decoder", "") for name in families.ENCODER_DECODERS),
        (families.plain, {"tp": 3}, "cannot divide the 16 features of 0.fc1", "tp=1, 2, 4, 8, 16"),
        (_with_layer("adapter", nn.Linear(8, 8)), {"tp": 2}, "does not know how to divide 1.adapter (Linear)", ""),
        (
            _with_layer("mixer", nn.Conv1d(8, 8, 1)),
            {"tp": 2, "roles": {"1.mixer": "colwise"}},
            "The role 'colwise' is not supported for 1.mixer",
            '"replicate"',
        ),
        (
            _with_layer("mixer", nn.Linear(8, 8)),
            {"tp": 2, "roles": {"1.mixer": "vocab"}},
            "The role 'vocab' is not supported for 1.mixer",
            '"replicate"',
        ),
        (_convolutions, {"tp": 2}, "Tensor parallelism does not support Sequential", ""),
    ],
)
def test_impossible_divisions_are_refused_with_what_is_possible(
    make: str | Callable[[], nn.Module], change: dict[str, Any], found: str, advice: str
):
    model = families.FAMILIES[make]()[0] if isinstance(make, str) else make()
    with pytest.raises(InvalidLayout, match=re.escape(found)) as caught, localised(model, **change):
        pass
    assert advice in caught.value.next


def test_a_sequence_that_does_not_divide_is_refused_with_those_that_do():
    model, batch = families.llama()
    short = {name: tensor[:, :15] for name, tensor in batch.items()}
    with (
        pytest.raises(InvalidLayout, match="15 positions among 2 ranks") as caught,
        localised(model, tp=2, sequence_parallel=True),
    ):
        model(**short)
    assert "14 or 16" in caught.value.next


def test_a_model_that_views_its_last_hidden_states_anew_keeps_all_its_samples():
    model, batch = families.gpt2()
    with localised(model, tp=2, sequence_parallel=True):
        assert model(**batch).logits.shape == (2, 16, families.WORDS // 2)


def test_a_model_that_reshapes_a_divided_sequence_is_refused():
    flat = {"lay": lambda x: x.reshape(-1, 16, 8)}  # takes the batch's shape for granted between its layers
    model = nn.Sequential(*(families.block("fc1", "fc2", **flat) for _ in range(2)))
    with (
        pytest.raises(InvalidLayout, match="does not support hidden states of shape"),
        localised(model, tp=2, sequence_parallel=True),
    ):
        model(torch.randn(2, 16, 8))
