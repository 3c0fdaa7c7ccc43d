"""What ``plimsoll.explain`` says a change takes off the peak, against the measured peak with the change made.

    python -m benchmarks.explain_accuracy --models llama gemma2 --rows 2 --sequence 256 --vocabulary 6000

Real architectures of transformers with random weights, no optimizer. Every figure is predicted / measured: the step as it is,
what the chunked loss takes off, the step with every block (and every second block) checkpointed by ``torch.utils.checkpoint``
against the strategies ``full`` and ``every:2``, half the batch. Prints a table.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import plimsoll
from benchmarks.machine import device_name, versions
from plimsoll.artifacts.explained import Explanation
from plimsoll.chunked import chunk_loss
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.roofline import roofline_costs
from plimsoll.planning.simulate import run_choices
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import strategy_choices
from plimsoll.session.training_step import TrainingStep
from plimsoll.tracing.trace import trace

SMALL = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
GROUPED = {**SMALL, "num_key_value_heads": 2}
TOKENS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "llama-tied": ("Llama", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 24}),
    "mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 4}),
    "gemma2": ("Gemma2", {**GROUPED, "head_dim": 24}),
    "phi": ("Phi", SMALL),
    "cohere": ("Cohere", SMALL),
    "granite": ("Granite", {**GROUPED, "logits_scaling": 4.0}),
    "olmo": ("Olmo", SMALL),
    "gpt-neox": ("GPTNeoX", SMALL),
    "gpt2": ("GPT2", {"n_embd": 96, "n_layer": 4, "n_head": 4, "n_positions": 512}),
    "opt": ("OPT", {"hidden_size": 96, "ffn_dim": 256, "num_hidden_layers": 4, "num_attention_heads": 4}),
}
_LAYERS = ("model.layers", "model.decoder.layers", "gpt_neox.layers", "transformer.h")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.explain_accuracy", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=6000)
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    print(f"{device_name(torch.device('cpu'))}; {', '.join(f'{k} {v}' for k, v in versions().items())}\n")
    print("| model | step as it is | chunked loss takes off | every block | every second block | half the batch |")
    print("|---|--:|--:|--:|--:|--:|")
    for name in options.models:
        print(_row(name, options.rows, options.sequence, options.vocabulary), flush=True)
    return 0


def _row(name: str, rows: int, sequence: int, vocabulary: int) -> str:
    family, sizes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**TOKENS, **sizes}, vocab_size=vocabulary, use_cache=False)
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{family}{head}")(config).train()
    ids = torch.randint(2, vocabulary, (rows, sequence))
    batch = {"input_ids": ids, "labels": ids}
    plain = plimsoll.explain(model, batch)
    measured = _peak(model, batch)
    with chunk_loss(model):
        chunked = _peak(model, batch)
    cells = [_ratio(plain.peak.bytes, measured), _ratio(_of(plain, "chunked loss").lowers_bytes, measured - chunked)]
    traced = trace(model, batch, repeats=1)
    index = StepIndex(traced, roofline_costs(traced, find_device("CPU")))
    for every in (1, 2):
        predicted = run_choices(index, strategy_choices(index, f"every:{every}")).peak_bytes
        with _checkpointed(model, every):
            cells.append(_ratio(predicted, _peak(model, batch)))
    half = {key: tensor[: rows // 2] for key, tensor in batch.items()}
    cells.append(_ratio(_of(plain, "half the micro-batch").predicted_peak_bytes, _peak(model, half)))
    return f"| {name} | {' | '.join(cells)} |"


@contextmanager
def _checkpointed(model: nn.Module, every: int) -> Iterator[None]:
    """Each run of ``every`` blocks goes through one ``torch.utils.checkpoint``."""
    named = dict(model.named_modules())
    layers: Any = next(named[path] for path in _LAYERS if path in named)
    groups = [list(layers)[start : start + every] for start in range(0, len(layers), every)]
    forwards = {layer: layer.forward for layer in layers}

    def run(group: list[nn.Module], hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for layer in group:
            out = forwards[layer](hidden, *args, **kwargs)
            hidden = out[0] if isinstance(out, tuple) else out
        return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

    def first(group: list[nn.Module]) -> Any:
        return lambda *args, **kwargs: checkpoint(run, group, *args, use_reentrant=False, **kwargs)

    try:
        for group in groups:
            group[0].forward = first(group)
            for other in group[1:]:
                other.forward = lambda hidden, *args, **kwargs: hidden
        yield
    finally:
        for layer in itertools.chain.from_iterable(groups):
            del layer.forward


def _peak(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Of a warm step, from no gradients."""
    model.zero_grad(set_to_none=True)
    step = TrainingStep(model, (), batch)
    step.measure_peak()
    found = step.measure_peak().peak_bytes
    model.zero_grad(set_to_none=True)
    return found


def _of(explanation: Explanation, name: str) -> Any:
    return next(change for change in explanation.changes if change.name == name)


def _ratio(predicted: int, measured: int) -> str:
    return f"{predicted / measured:.4f}"


if __name__ == "__main__":
    sys.exit(main())
