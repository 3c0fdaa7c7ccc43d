"""What one layer saves, against the published formula, to the byte.

Korthikanti et al. 2022 (table 2), fp16 or bf16, dropout, attention probabilities kept: ``sbh(34 + 5as/h)``; tensor parallelism
``sbh(10 + 24/t + 5as/(ht))``; with sequence parallelism ``sbh/t (34 + 5as/h)``.
"""

from __future__ import annotations

import functools
import re

from estimator.local_rank.families import labelled, narrow
from plimsoll.artifacts.region import Origin
from plimsoll.artifacts.trace import Trace
from plimsoll.estimator.local_rank.local import localised
from plimsoll.tracing.trace import trace

S, B, H, A = 64, 2, 32, 4
UNIT = S * B * H


@functools.cache
def _layer(tp: int, attention: str = "eager", activation: str = "gelu", *, is_split: bool = False) -> dict[str, int]:
    """Bytes of what a layer saves, by value; a storage counts once."""
    sizes = {"n_embd": H, "n_layer": 1, "n_head": A, "n_positions": S}
    model, batch = (
        narrow("gpt2", **sizes, activation_function=activation, attn_implementation=attention),
        labelled(B, S),
    )
    if tp == 1:
        return _saved(trace(model, batch, device_name="H100", regions=["transformer.h.0"]))
    with localised(model, tp=tp, sequence_parallel=is_split):
        return _saved(trace(model, batch, device_name="H100", regions=["transformer.h.0"]))


def _saved(step: Trace) -> dict[str, int]:
    """Without what the formula leaves out as small: mean and reciprocal deviation of both layer norms, per position."""
    graph = step.regions[0].graph
    saved = {slot.value for slot in graph.slots if slot.is_managed}
    values = [graph.values[v] for v in sorted(saved)]
    kept = [v for v in values if v.origin in (Origin.OP, Origin.INPUT)]
    saved_bytes = dict({v.storage: (v.name, v.bytes) for v in reversed(kept)}.values())
    statistics = [name for name in saved_bytes if re.search(r"native_layer_norm#0\.[12]", name)]
    assert len(statistics) == 4
    assert sum(saved_bytes.pop(name) for name in statistics) <= 16 * S * B
    return saved_bytes


def test_one_rank_saves_what_the_formula_says():
    assert sum(_layer(1).values()) == UNIT * 34 + 5 * A * S * S * B


def test_tensor_parallelism_saves_what_the_formula_says():
    tp = 4
    formula = UNIT * 10 + UNIT * 24 // tp + 5 * A * S * S * B // tp
    assert sum(_layer(tp).values()) == formula


def test_sequence_parallelism_saves_more_than_the_formula_by_two_gathered_inputs():
    """Megatron-LM gathers the inputs of both column-parallel layers again in backward; torch keeps them whole."""
    tp = 4
    formula = (UNIT * 34 + 5 * A * S * S * B) // tp
    gathered = 2 * 2 * UNIT * (tp - 1) // tp
    saved = _layer(tp, is_split=True)
    assert sum(saved.values()) == formula + gathered
    assert [size for name, size in saved.items() if "all_gather" in name] == [2 * UNIT, 2 * UNIT]


def test_flash_attention_saves_no_probabilities():
    """Beside its output a row's log-sum-exp (float32) and the state of its dropout."""
    flash = _layer(1, "sdpa")
    log_sum_exp = 4 * S * B * A
    assert 0 <= sum(flash.values()) - (UNIT * 34 + log_sum_exp) <= 32


def test_a_gelu_made_of_single_ops_saves_three_times_its_input_more():
    """``gelu_new`` in transformers is no kernel: its tanh, its sum and its product are saved as well."""
    assert sum(_layer(1, "eager", "gelu_new").values()) - sum(_layer(1).values()) == 3 * 8 * UNIT
