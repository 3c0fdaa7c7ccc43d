"""Models whose batches change size with every step, for measurements over random sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

_VOCABULARY = 128
_WIDTHS = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
_SIZES = (32, 48, 64, 80)


class Stream(NamedTuple):
    """A model, how to make it, and what draws the sizes and makes the batch of one step."""

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], tuple[int, ...]]
    batch: Callable[..., dict[str, Any]]


def streams() -> tuple[Stream, ...]:
    """Sequences of random lengths, two lengths, padding, four sizes of images, a graph with varying edges."""
    return (
        Stream("Llama", lambda: _hf("LlamaConfig", "LlamaForCausalLM", vocab_size=_VOCABULARY), _length, _words),
        Stream("GPT-2", lambda: _hf("GPT2Config", "GPT2LMHeadModel", **_GPT2), _length, _words),
        Stream("T5", lambda: _hf("T5Config", "T5ForConditionalGeneration", **_T5), _two_lengths, _pairs),
        Stream("BERT", lambda: _hf("BertConfig", "BertForMaskedLM", vocab_size=_VOCABULARY), _length, _padded),
        Stream(
            "ViT", lambda: _hf("ViTConfig", "ViTForImageClassification", image_size=64, patch_size=8), _size, _images
        ),
        Stream("GCN", Graphs, _graph, _edges),
        Stream(
            "Llama, wide",
            lambda: _hf("LlamaConfig", "LlamaForCausalLM", vocab_size=_VOCABULARY, **_WIDE),
            _length,
            _words,
        ),
        Stream("GPT-2, wide", lambda: _hf("GPT2Config", "GPT2LMHeadModel", **_GPT2 | _WIDE), _length, _words),
        Stream(
            "T5, wide", lambda: _hf("T5Config", "T5ForConditionalGeneration", **_T5 | _WIDE_T5), _two_lengths, _pairs
        ),
        Stream(
            "BERT, wide",
            lambda: _hf("BertConfig", "BertForMaskedLM", vocab_size=_VOCABULARY, **_WIDE),
            _length,
            _padded,
        ),
        Stream(
            "ViT, wide",
            lambda: _hf("ViTConfig", "ViTForImageClassification", image_size=128, patch_size=8, **_WIDE),
            _large_size,
            _images,
        ),
        Stream("GCN, wide", lambda: Graphs(width=256), _large_graph, _edges),
    )


_WIDE = {"hidden_size": 256, "intermediate_size": 1024}
_WIDE_T5 = {"hidden_size": 256, "d_ff": 1024, "d_kv": 64}
_GPT2 = {
    "vocab_size": _VOCABULARY,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 512,
    "eos_token_id": 1,
    "bos_token_id": 1,
}
_T5 = {
    "vocab_size": _VOCABULARY,
    "d_model": 64,
    "d_ff": 256,
    "num_layers": 3,
    "num_heads": 4,
    "d_kv": 16,
    "decoder_start_token_id": 0,
}


def _hf(config: str, model: str, **fields: Any) -> nn.Module:
    torch.manual_seed(0)
    given = {**_WIDTHS, "max_position_embeddings": 512, **fields}
    made = getattr(transformers, config)(**{**given, "use_cache": False})
    return getattr(transformers, model)(made).train()


def _length(random: torch.Generator) -> tuple[int, ...]:
    return (int(torch.randint(32, 513, (), generator=random)),)


def _two_lengths(random: torch.Generator) -> tuple[int, ...]:
    return (*_length(random), *_length(random))


def _size(random: torch.Generator) -> tuple[int, ...]:
    return (_SIZES[int(torch.randint(len(_SIZES), (), generator=random))],)


def _large_size(random: torch.Generator) -> tuple[int, ...]:
    return (2 * _size(random)[0],)


def _graph(random: torch.Generator) -> tuple[int, ...]:
    nodes = int(torch.randint(200, 600, (), generator=random))
    return nodes, int(torch.randint(2 * nodes, 8 * nodes, (), generator=random))


def _large_graph(random: torch.Generator) -> tuple[int, ...]:
    nodes, edges = _graph(random)
    return 10 * nodes, 10 * edges


def _words(length: int) -> dict[str, Any]:
    ids = torch.randint(2, _VOCABULARY, (2, length))
    return {"input_ids": ids, "labels": ids}


def _pairs(source: int, target: int) -> dict[str, Any]:
    return {"input_ids": _words(source)["input_ids"], "labels": _words(target)["labels"]}


def _padded(length: int) -> dict[str, Any]:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length // 2 :] = 0
    return {**_words(length), "attention_mask": mask}


def _images(size: int) -> dict[str, Any]:
    pixels = torch.randn(4, 3, size, size)
    return {"pixel_values": pixels, "labels": torch.randint(0, 2, (4,)), "interpolate_pos_encoding": True}


def _edges(nodes: int, edges: int) -> dict[str, Any]:
    return {
        "features": torch.randn(nodes, 32),
        "edges": torch.randint(0, nodes, (2, edges)),
        "labels": torch.randint(0, 4, (nodes,)),
    }


class _Convolution(nn.Module):
    """One layer of messages: every node adds up what its neighbours send."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.message = nn.Linear(width, width)
        self.update = nn.Linear(width, width)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """The nodes after one exchange of messages."""
        sent = torch.nn.functional.gelu(self.message(self.norm(nodes)))[edges[0]]
        received = torch.zeros_like(nodes).index_add(0, edges[1], sent)
        return nodes + torch.nn.functional.gelu(self.update(received))


class Graphs(nn.Module):
    """A graph convolution network that labels nodes."""

    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inward = nn.Linear(32, width)
        self.layers = nn.ModuleList(_Convolution(width) for _ in range(layers))
        self.outward = nn.Linear(width, 4)

    def forward(self, features: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss over all nodes."""
        nodes = self.inward(features)
        for layer in self.layers:
            nodes = layer(nodes, edges)
        return {"loss": torch.nn.functional.cross_entropy(self.outward(nodes), labels)}
