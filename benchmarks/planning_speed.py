"""How long it takes to import, to trace and to plan: models on this machine, and Llamas of 32 and 80 blocks as fake tensors.

    python -m benchmarks.planning_speed
    python -m benchmarks.planning_speed --out benchmarks/results

Every figure comes from a fresh Python, so that resident memory is its own. The models are traced with measured costs and
planned at ten budgets between floor and unmanaged peak; ``--out`` writes a page of those.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
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
_WORDS = {"vocab_size": 1000, "use_cache": False}
_DECODER = {**_WORDS, "num_attention_heads": 8, "num_key_value_heads": 4}
MODELS: dict[str, tuple[str, str, dict[str, Any], tuple[int, ...]]] = {
    "T5, 8 + 8 blocks": ("T5Config", "T5ForConditionalGeneration", {
        **_WORDS, "d_model": 256, "d_kv": 32, "d_ff": 1024, "num_layers": 8, "decoder_start_token_id": 0,
    }, (4, 128)),
    "ViT-S, 12 blocks": ("ViTConfig", "ViTForImageClassification", {
        "hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6, "num_labels": 10,
    }, (2, 3, 224, 224)),
    "SwinV2-T": ("Swinv2Config", "Swinv2ForImageClassification", {
        "image_size": 256, "embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24], "window_size": 8,
    }, (1, 3, 256, 256)),
    "Mamba, 4 blocks": ("MambaConfig", "MambaForCausalLM", {
        **_WORDS, "hidden_size": 128, "num_hidden_layers": 4,
    }, (2, 64)),
    "GPT-2, 12 blocks": ("GPT2Config", "GPT2LMHeadModel", {**_WORDS, "n_embd": 256, "n_layer": 12, "n_head": 8}, (4, 128)),
    "BERT, 12 blocks": ("BertConfig", "BertForMaskedLM", {
        "vocab_size": 1000, "hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 1024,
    }, (4, 128)),
    "Mixtral, 6 blocks": ("MixtralConfig", "MixtralForCausalLM", {
        **_DECODER, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_local_experts": 4,
    }, (2, 128)),
    "Llama, 12 blocks": ("LlamaConfig", "LlamaForCausalLM", {
        **_DECODER, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 12,
    }, (4, 128)),
    "Llama, 80 blocks": ("LlamaConfig", "LlamaForCausalLM", {
        **_DECODER, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 80,
    }, (2, 64)),
    "ResNet-50": ("ResNetConfig", "ResNetForImageClassification", {"num_labels": 10}, (2, 3, 128, 128)),
}  # fmt: skip
"""Transformers' own code with random weights: configuration, model, and the shape of its words or pictures."""
_SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 0.95)
"""Budgets, as shares of the way from the floor to the unmanaged peak."""


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


def model_and_batch(name: str) -> tuple[Any, dict[str, Any]]:
    """One of the models with its batch, the same every time."""
    import torch
    import transformers

    config, model, fields, shape = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**fields)).train()
    if len(shape) == 2:
        words = torch.randint(2, 1000, shape)
        return made, {"input_ids": words, "labels": words}
    return made, {"pixel_values": torch.randn(shape), "labels": torch.zeros(shape[0], dtype=torch.long)}


def solve_figures(name: str) -> dict[str, Any]:
    """Trace one of the models on this machine, and plan it at ten budgets; processor seconds of planning alone."""
    from plimsoll.planning.solve import Planner, solve
    from plimsoll.planning.step import StepIndex
    from plimsoll.session.step_planner import trace_and_cost
    from plimsoll.session.task import TrainingTask

    traced = trace_and_cost(TrainingTask.read(*model_and_batch(name)))
    start = time.process_time()
    planner = Planner(StepIndex(*traced))
    assert planner.ladder, "it is solved when it is first asked for"
    build_seconds = time.process_time() - start
    low, high = planner.floor.peak_bytes, planner.baseline.peak_bytes
    each, gaps = [], []
    for share in _SHARES:
        start = time.process_time()
        plan = solve(planner, budget_bytes=int(low + share * (high - low)))
        each.append(time.process_time() - start)
        gaps.append(plan.gap_of_step)
    return {
        "step MiB": high / 2**20,
        "regions": len(traced[0].regions),
        "choices": planner.problem.columns,
        "build seconds": build_seconds,
        "plan seconds": sorted(each)[len(each) // 2],
        "most plan seconds": max(each),
        "gap of step": sorted(gaps)[len(gaps) // 2],
    }


def page(found: dict[str, dict[str, Any]]) -> str:
    """The figures of the models, as a page."""
    from benchmarks.machine import device_name, page_head, versions

    device = device_name(torch_device())
    head = page_head("Planning", "python -m benchmarks.planning_speed", device=device, versions=versions())
    lines = [
        "Processor seconds on one thread: what a planner makes once per step (choices, floor, frontier), and a plan, its bound",
        "and its reasons, at ten budgets from the floor to 95% of the way to the unmanaged peak: the median and the most.",
        "",
        "| model | unmanaged peak | regions | choices | once | a plan | at most | gap of step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, each in found.items():
        times = " | ".join(f"{each[key]:.2f} s" for key in ("build seconds", "plan seconds", "most plan seconds"))
        lines.append(
            f"| {name} | {each['step MiB']:.0f} MiB | {each['regions']} | {each['choices']} | {times} | "
            f"{each['gap of step']:.2%} |"
        )
    return "\n".join([*head, *lines, ""])


def torch_device() -> Any:
    """The device on which models are planned here."""
    import torch

    return torch.device("cpu")


def _resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _alone(name: str) -> str:
    """What a fresh Python prints for one case."""
    command = [sys.executable, "-m", "benchmarks.planning_speed", "--only", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.strip() or f"failed with exit code {done.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning_speed", description=__doc__)
    parser.add_argument("--only", choices=["import", *MODELS, *_CASES], help="one of them, in this process, as JSON")
    parser.add_argument("--out", type=Path, help="folder for a page of the models; other cases are left out")
    options = parser.parse_args()
    if options.only == "import":
        print(json.dumps(import_figures()))
    elif options.only:
        print(json.dumps(solve_figures(options.only) if options.only in MODELS else plan_figures(options.only)))
    else:
        found = {}
        for name in MODELS if options.out else ("import", *MODELS, *_CASES):
            said = _alone(name)
            print(f"{name}: {said}", flush=True)
            if name in MODELS and said.startswith("{"):
                found[name] = json.loads(said)
        if options.out:
            from benchmarks.machine import page_stem

            (options.out / f"{page_stem(torch_device(), 'planning')}.md").write_text(page(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
