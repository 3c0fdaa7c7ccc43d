"""How long it takes to import, to trace and to plan: 32 and 80 blocks, and Llama-3-70B as fake tensors.

    python -m benchmarks.planning_speed

Every figure comes from a fresh Python, so that resident memory is its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

_LLAMA_70B = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
"""Llama-3-70B, from its published config."""
_LLAMA_8B = {**_LLAMA_70B, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
_CASES: dict[str, dict[str, Any]] = {
    "32 blocks of Llama-3-8B": {**_LLAMA_8B, "num_hidden_layers": 32},
    "80 blocks of Llama-3-8B": {**_LLAMA_8B, "num_hidden_layers": 80},
    "Llama-3-70B": _LLAMA_70B,
}
_LENGTH = 8192
_PROFILE = "H200"


def import_figures() -> dict[str, Any]:
    start = time.perf_counter()
    import plimsoll  # noqa: F401

    return {"seconds": time.perf_counter() - start, "loads torch": "torch" in sys.modules}


def plan_figures(name: str) -> dict[str, Any]:
    """Trace a case with fake tensors for one device of the catalogue; plan it halfway between floor and peak if that fits.

    Llama-3-70B's weights alone are more than any device of the catalogue has, so that it is traced and simulated only.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import plimsoll
    from plimsoll.errors import BudgetAboveDevice

    before_bytes = _resident_bytes()
    config = LlamaConfig(**_CASES[name], attn_implementation="sdpa", use_cache=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
        ids = torch.zeros(1, _LENGTH, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    start = time.perf_counter()
    whole = plimsoll.plan(model, batch, strategy="none", device_profile=_PROFILE)
    figures: dict[str, Any] = {"trace and simulate seconds": time.perf_counter() - start}
    budget = (whole.floor_bytes + whole.baseline_peak_bytes) // 2
    start = time.perf_counter()
    try:
        plan = plimsoll.plan(model, batch, budget=budget, device_profile=_PROFILE)
        figures |= {
            "trace and plan seconds": time.perf_counter() - start,
            "solve seconds": plan.solve_seconds,
            "status": str(plan.status),
            "gap of step": plan.gap_of_step,
        }
    except BudgetAboveDevice as error:
        figures["not planned"] = error.found
    return figures | {
        "resident MiB above imports": (_resident_bytes() - before_bytes) / 2**20,
        "resident MiB": _resident_bytes() / 2**20,
    }


def _resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning_speed", description=__doc__)
    parser.add_argument("--only", choices=["import", *_CASES], help="one of them, in this process, as JSON")
    options = parser.parse_args()
    if options.only == "import":
        print(json.dumps(import_figures()))
    elif options.only:
        print(json.dumps(plan_figures(options.only)))
    else:
        for name in ("import", *_CASES):
            command = [sys.executable, "-m", "benchmarks.planning_speed", "--only", name]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            print(f"{name}: {done.stdout.strip() or f'failed with exit code {done.returncode}'}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
