"""What is refused before torch is imported, and what a command says before slow work begins."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from long_cases import some
from plimsoll.planning.costing import host
from plimsoll.ui.cli import early
from plimsoll.ui.cli.flags import in_flags

EARLY = {
    "plan llama-tiny --budget 90MiB --device-profile H100 --device cuda": "would have no effect together with --device-profile",
    "plan llama-tiny --budget 90MiB --device-profile H100 --device H100": "would have no effect together with --device-profile",
    "plan llama-tiny --budget 90MiB --device H100": "--device-profile H100-SXM",
    "plan llama-tiny --budget 90MiB --device abacus": "The device 'abacus' is not available",
    "plan llama-tiny --budget 90MiB --device cuda:": "The device 'cuda:' is not available",
    "plan llama-tiny --budget 900TiB": "is more than the memory of cpu",
    "plan llama-3-405b --budget 75GiB": "plimsoll plan llama-3-405b --budget 75GiB --device-profile H100-SXM",
    "verify llama-3-405b --strategy full": "plimsoll plan llama-3-405b --device-profile H100-SXM",
    "verify llama-tiny": "verify was given nothing to verify",
    "fit llama-tiny --budget 1GiB --accumulation 2 --global-batch 7": "--global-batch 7 and --accumulation 2 contradict",
    "fit llama-tiny --budget 1GiB --layout rank=4": "try ranks",
    "fit llama-tiny --budget 1GiB --layout dp=4": "write --layout ranks=8,dp=4",
    "fit llama-tiny --budget 1GiB --layout ranks=4": "--layout needs --global-batch and --device-profile.",
    "fit llama-3-405b --budget 75GiB": "plimsoll fit llama-3-405b --budget 75GiB --device-profile H100-SXM",
    "fit llama-tiny --budget 1GiB --layout ranks=8 --save-plan p.json": "--save-plan cannot be used with --layout",
    "fit llama-tiny --budget 1GiB --techniques lora=x": "lora needs a whole number above 0",
    "fit llama-tiny --budget 1GiB --precision bf16 --save-plan p.json": "--save-plan cannot be used with --precision",
    "fit llama-tiny --budget 1GiB --optimizer lion --save-plan p.json": "--save-plan cannot be used with --optimizer lion",
    "fit llama-tiny --budget 1GiB --strategy full --most-batch 2 --solves 3": "--most-batch 2 and --solves 3 cannot be used",
    "fit llama-tiny --budget 1GiB --precision bf16": "--precision needs --global-batch and --device-profile.",
    "fit llama-tiny --budget 1GiB --techniques lora=8": "--techniques needs --global-batch and --device-profile.",
    "plan gpt2-tiny --seq 4096": "accepts at most 1,024 tokens per sample, not 4,096",
    "plan llama-tiny --allow offload --link host": "--link host would have no effect on cpu",
    "demo --budget 90TiB": "is more than the memory of cpu",
    "advise llama-tiny --verdict nofile.json": "writes a verdict",
    "advise llama-tiny --receipt nofile.json": "writes a receipt",
    "estimate llama-tiny --layout ranks=8": "lacks samples=",
    "estimate llama-tiny --layout samples=8": "lacks ranks=",
    "estimate llama-tiny --techniques lora=-1": "lora needs a whole number above 0",
    "estimate llama-tiny --strategy auto": "--strategy auto needs a budget.",
    "estimate llama-tiny --precision fp7": "is not the name of a precision",
    "compare llama-tiny --strategy memory-budget:0.7": "plimsoll compare TARGET --compile whole --strategy memory-budget:0.7",
    "plan llama-tiny --max-error 1%": "pass --allow recompute,compress, or leave --max-error out",
}
BELOW_FLOOR = ("plan", "fit", "verify", "compare", "advise", "probe", "diagnose")


@pytest.mark.parametrize("words", EARLY)
def test_wrong_words_are_refused_with_what_to_type_instead(words: str, run: Callable[..., Any]):
    said = run(*words.split(), code=2).err
    assert EARLY[words] in said
    assert said.count("  why   ") == said.count("  next  ") == 1
    assert "loading" not in said


def test_a_diagnosis_of_nothing_is_refused(run: Callable[..., Any]):
    assert "plimsoll diagnose llama-tiny --strategy full" in run("diagnose", "llama-tiny", code=2).err


@pytest.mark.parametrize("command", BELOW_FLOOR)
def test_a_budget_below_parameters_and_state_is_refused_from_the_configuration(command: str, run: Callable[..., Any]):
    said = run(command, "llama-tiny", "--budget", "52MiB", code=3).err
    assert "below 52.3 MiB, which llama-tiny needs" in said
    assert "parameters 13.1 MiB, gradients 13.1 MiB, adamw state 26.1 MiB" in said
    assert "loading" not in said


def test_a_model_that_cannot_be_counted_is_refused_when_it_is_built_without_memory(run: Callable[..., Any]):
    pytest.importorskip("transformers")
    assert "below 15.0 MiB, which t5-tiny needs" in run("plan", "t5-tiny", "--budget", "14MiB", code=3).err


def test_the_parameters_of_a_function_alone_are_compared_with_the_budget(run: Callable[..., Any]):
    said = run("plan", "steps:stack", "--budget", "20KiB", code=3).err
    assert "parameters" in said
    assert "gradients" not in said


def test_a_machine_of_unknown_memory_refuses_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host.os, "sysconf_names", {})
    assert host.host_memory_bytes() is None


@pytest.mark.parametrize(
    ("override", "is_refused"),
    some(
        [
            ("nolayer.*=keep", True),
            ("model.layers.9.*=keep", True),
            ("layers.*.mlp::silu=keep", False),
            ("*nolayer*=keep", True),
            ("*::silu=keep", False),
        ],
        2,
    ),
)
def test_overrides_of_unknown_modules_are_refused_before_the_trace(
    override: str, is_refused: bool, run: Callable[..., Any]
):
    pytest.importorskip("transformers")
    how = ("plan", "llama-tiny", "--batch", "1", "--seq", "16", "--strategy", "auto", "--device-profile", "H100")
    if is_refused:
        assert "does not match any module" in run(*how, "--override", override, code=2).err
    else:
        run(*how, "--override", override)


def test_a_command_says_at_once_what_it_loads(run: Callable[..., Any]):
    assert run("plan", "steps:stack").err.startswith("loading steps:stack\n")


def test_a_step_of_minutes_is_announced_before_it_runs():
    lines = list(early.notice("plan", {"target": "llama-tiny", "seq": 100_000, "device": "cpu"}))
    assert lines[0] == "loading llama-tiny"
    assert "one step is 5.0e+14 FLOPs" in lines[1]
    assert "--device-profile does not run the step" in lines[1]


@pytest.mark.parametrize(
    "how", [{"seq": 256}, {"seq": 100_000, "device_profile": "H100"}, {"seq": 100_000, "device": "cuda"}]
)
def test_other_steps_are_not_announced(how: dict[str, Any]):
    assert list(early.notice("plan", {"target": "llama-tiny", "device": "cpu", **how})) == ["loading llama-tiny"]


@pytest.mark.parametrize(
    "words",
    some(
        ["plan llama-tiny --budget 1MiB", "plan llama-tiny --device H100", "fit llama-tiny -b 1GiB --layout ranks=2"], 1
    ),
)
def test_refusals_import_neither_torch_nor_scipy(words: str, tmp_path: Path):
    code = "import sys; from plimsoll.__main__ import main\ntry: main()\nexcept SystemExit: pass\n"
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'scipy', 'transformers')))"
    subprocess.run([sys.executable, "-c", code, *words.split()], check=True, cwd=tmp_path)


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("pass allow=('recompute', 'compress')", "pass --allow recompute,compress"),
        ("or leave max_error out", "or leave --max-error out"),
        ("pass allow=('recompute',)", "pass --allow recompute"),
        ('budget="70.70MiB" (74131876 bytes), or budget=12.', "--budget 70.70MiB (74131876 bytes), or --budget 12."),
        ("leave sequences= out to use the length", "leave --seq out to use the length"),
        ("leave loss= out, or use loss=fused with tp=2", "leave loss= out, or use loss=fused with tp=2"),
        ("pass loss=lambda output: ..., or put labels into the batch",
         "let the target return (model, batch, loss), with a function loss(output), or put labels into the batch"),
        ("pass budget='auto' for the memory", "pass --budget auto for the memory"),
        ("device_profile=None, optimizer='adamw'.", "--device-profile None, --optimizer adamw."),
        ("gradient_budget=3", "gradient_budget=3"),
    ],
)  # fmt: skip
def test_options_of_python_are_written_as_they_are_typed(text: str, typed: str):
    assert in_flags(text) == typed
