"""Wrong words for every option of every command, and wrong values for every argument of every public verb.

``PYTHONPATH=tests python tests/support/wrong_inputs.py`` tries them all (with 5, every fifth), each in a fork of this process.
It prints how many there are, which were not refused as they should be, and what processor time they took beyond Python's
imports. The suite tries some.
"""

from __future__ import annotations

import ast
import inspect
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer.main
from typer.testing import CliRunner

import plimsoll
import steps
from analysis.diagnose.builders import recomputing_traces
from plimsoll.errors import PlimsollError
from plimsoll.ui.cli.app import app
from samples import make_plan, make_receipt

COUNTS = ("0", "-1", "1.5", "many", "", "9" * 400, "1 2", "0x10", "nan")
OR_NONE = COUNTS[1:]
AMOUNTS = (
    "",
    "24G",
    "-1",
    "nan",
    "0",
    "1e400GiB",
    "9" * 400 + "GiB",
    "GiB",
    "½GiB",
    "1,5GiB",
    "inf",
    "-5GiB",
    "1KB/s",
    "0.1B",
)
NAMES = (
    "",
    "every:0",
    "every:-1",
    "every:x",
    "hybrid:1",
    "hybrid:a,b",
    "SQRT",
    "auto,full",
    "int3",
    "x" * 5000,
    "full ",
    "none:1",
)
FILES = ("no/such/x.json", ".", "", "/", "plan.json/x", "/proc/x.json", "a" * 300)
READ = ("missing.json", "", ".", "foreign.json", "cut.json", "/dev/null", "/dev/zero", "a" * 300)
FOLDERS = ("plan.json", "plan.json/x")
TYPED: dict[str, tuple[str, ...]] = {
    "--budget": AMOUNTS, "--host-budget": AMOUNTS, "--bucket": AMOUNTS, "--strategy": NAMES,
    "--regions": ("", "no.such.*", "[", "(", " ", "*" * 300 + "q", ".*", "blocks.9"),
    "--allow": ("", "magic", "recompute,", "RECOMPUTE", ",", "all", "recompute;compress", "keep"),
    "--max-error": ("", "-1%", "200%", "nan", "inf", "1e400", "0.5.5", "%", "ten", "2"),
    "--override": ("", "=", "a", "a=", "=keep", "a=eat", "blocks.*=compress:int3", "nosuch*=keep", "[=keep", "blocks.*==keep"),
    "--link": ("", "moon", "host", "HOST", "disk:/no/such"),
    "--optimizer": ("", "adamv", "9", "none!", "adamw,sgd"),
    "--device": ("", "abacus", "cuda", "cuda:99", "cuda:-1", "meta", "cuda:", "H100@", "H100@0W", "9GiB+1"),
    "--device-memory": ("", "24", "24GiB"), "--device-flops": ("", "165"), "--device-bandwidth": ("", "1008"),
    "--device-profile": ("", "H900", "H100@", "H100@-1W", "H100@0W", "H100@1e999W", "/etc/passwd", "missing.json", "cut.json"),
    "--bandwidth": ("", "-1", "0", "nan", "inf", "fast", "1e400"),
    "--compile": ("", "all"), "--seed": ("x", "", "1.5", "9" * 400, str(2**64)),
    "--output": FILES, "--save-plan": FILES, "--revised-plan": FILES, "--timeline": FILES, "--export-sac": FILES,
    "--save-device": FILES, "--plans": FOLDERS, "--run": FOLDERS, "--keep-traces": FOLDERS,
    "--plan": (*READ, "receipt.json", "plan.json"), "--receipt": (*READ, "plan.json"), "--verdict": (*READ, "plan.json"),
    "--compare-with": (*READ, "plan.json"),
    "--intermediate": ("", "nosuch", "["), "--target-loss": ("", "nan", "inf", "ten"),
    "--compile-seconds": ("", "-1", "nan", "ten"),
    "--precision": ("", "fp8", "int8", "float33", "bf16,fp16"),
    "--layout": ("dp=0", "dp=-1", "dp=x", "dp", "=", "dp=1,dp=2", "tp=3", "foo=2", "zero=4", "schedule=zigzag", "virtual=0",
                 f"dp={'9' * 400}", "cp=7", "ep=2", "dp=2;tp=2", ",", "sp=2", "dp=2.5", "virtual=2"),
    "--techniques": ("gradients=fp3", "loss=foo", "x", "=", "loss=", "loss=fused,loss=chunked", ",", "gradients"),
    "--tokens": ("", "0", "-1", "1.5", "many", "nan", "1e9", "10 Q", "9" * 400), "--launch": ("", "mpirun"),
    "--price": ("2", "x", "-1", "nan", "H100=", "A100=2", "1,2"), "--lora": COUNTS,
    "--export": ("", "deepspeed", "megatron,transformers"),
    "--methods": ("", "powersgd", "powersgd:0", "topk:200%", "sign:3", "gzip"),
    **dict.fromkeys(("--batch", "--seq", "--steps", "--chunk", "--most-batch", "--solves", "--accumulation", "--global-batch",
                     "--orders"), COUNTS),
    **dict.fromkeys(("--curve", "--held-out", "--validate"), OR_NONE),
}  # fmt: skip
"""By option, words that nothing can be made of."""
GOOD = {
    "demo": "demo", "plan": "plan steps:stack", "fit": "fit steps:stack -b 1GiB", "verify": "verify steps:stack",
    "compare": "compare steps:stack", "probe": "probe targets:stream", "explain": "explain steps:stack",
    "advise": "advise steps:stack --compile-seconds 0", "diagnose": "diagnose steps:stack", "show": "show plan.json",
    "report": "report plan.json -o page.html", "estimate": "estimate llama-tiny --batch 1 --seq 64",
    "compress-gradients": "compress-gradients steps:stack",
}  # fmt: skip
TARGETS = (
    "",
    ":",
    "steps:",
    "steps:nosuch",
    "steps:a b",
    "nosuch:stack",
    "nosuch.of:stack",
    "steps",
    "llama-tinyy",
    ".",
    "/",
    "/dev/null",
    "missing.json",
    "foreign.json",
    "cut.json",
    "receipt.json",
    "a" * 300,
    "https://x/y",
    "\x1b[31m",
    "\0",
)
ARGUMENTS: dict[str, tuple[str, ...]] = {"TARGET": TARGETS, "TARGET|PLAN": TARGETS, "TARGET|TRACE": (*TARGETS, "plan.json"),
                                         "FILE": READ}  # fmt: skip
SWITCHES = {"--help", "--json", "--explain", "--master-weights", "--early", "--longest-sequence"}
MODEL, BATCH, LOSS = steps.stack()
BAD_COUNTS: tuple[Any, ...] = (-1, 1.5, "x", 10**400)
GIVEN: dict[str, tuple[Any, ...]] = {
    "model": (None, 3, "llama", torch.nn.Linear, [MODEL]),
    "budget": ("24G", "", -1, 0, 1.5, float("nan"), [1], "nanGiB", b"1GiB"),
    "loss": (3, "mse", lambda output: output, lambda output: 3, lambda output: None, lambda: 1),
    "optimizer": ("adamv", 3), "strategy": ("", 3, "evry:2", ["full", 3], b"full"),
    "regions": (3, [], [3], [None], [b"blocks"]), "device_profile": ("H900", 3, "", "H100@0W"),
    "allow": ("", 3, [], ["magic"], [3], "all"), "max_error": (-1, 2, float("nan"), "ten", [], "200%"),
    "host_budget": ("24G", -1, 0, []), "overrides": (3, ["a"], "a", [3]), "link": ("moon", 3, []),
    "ranks": (3, [7], [None]), "curve_steps": BAD_COUNTS, "verify_every": BAD_COUNTS, "sentinel_every": (0, *BAD_COUNTS),
    "plan": (None, 3, "plan.json", make_receipt()), "device": ("", None, 3, "H900", "missing.json"),
    "precision": ("fp8", 3), "layout": ("dp=0", 3, "foo", None), "export": (3, "deepspeed"), "techniques": ("x", 3, None),
    "target": (None, 3, "", ":", "https://x/y"), "chunk_steps": (0, *BAD_COUNTS), "seed": BAD_COUNTS,
    "held_out": (-1, 99, "x"), "target_loss": (float("nan"), float("inf")), "batches": (None, 3, [], [3]),
    "sequences": ([], 0, ["x"], [10**400]), "global_batch": BAD_COUNTS,
    "accumulation": (0, *BAD_COUNTS), "most_batch": (0, *BAD_COUNTS),
    "path": (None, 3, "", ".", "no/such/x.json", "\0"), "artifacts": (None, 3, [], [3], "plan.json"),
}  # fmt: skip
"""By argument, values that nothing can be made of."""
CALLS: dict[str, dict[str, Any]] = {
    "plan": {"model": MODEL, "batch": BATCH, "loss": LOSS},
    "apply": {"model": MODEL, "plan": make_plan()},
    "attach": {"model": MODEL, "budget": "1GiB"},
    "verify": {"model": MODEL, "batch": BATCH, "plan": make_plan(), "loss": LOSS},
    "explain": {"model": MODEL, "batch": BATCH, "loss": LOSS},
    "probe": {"model": MODEL, "batches": [BATCH] * 4, "plan": make_plan(), "loss": LOSS},
    "estimate": {"target": MODEL, "batch": BATCH, "loss": LOSS},
    "fit": {"model": MODEL, "batch": BATCH, "budget": "1GiB", "loss": LOSS},
    "load": {"path": "plan.json"},
    "report": {"artifacts": make_plan(), "path": "page.html"},
}


def prepare(folder: Path) -> None:
    """Put files of every kind into a directory."""
    make_plan().save(folder / "plan.json")
    make_receipt().save(folder / "receipt.json")
    recomputing_traces(folder)
    (folder / "foreign.json").write_text('{"some": "thing"}')
    (folder / "cut.json").write_text('{"plimsoll": "plan", "schema')


def wrong_commands() -> Iterator[list[str]]:
    """Every option of every command, and its first argument, with every wrong word of its kind."""
    for name, command in typer.main.get_command(app).commands.items():
        if name == "run":  # most of its words go to the script; tests/ui/cli/test_run.py has the others
            continue
        for option in (max(p.opts, key=len) for p in command.params if p.param_type_name == "option"):
            for word in () if option in SWITCHES else TYPED[option]:
                good = GOOD[name].split()
                if option in ("--batch", "--seq", "--device") and name != "estimate":
                    good[1] = "llama-tiny"  # of a function these options are refused whatever they say
                yield [*good, option, word]
        if name != "demo":
            first = next(p for p in command.params if p.param_type_name == "argument")
            yield from ([name, word, *GOOD[name].split()[2:]] for word in ARGUMENTS[first.metavar])


def wrong_calls() -> Iterator[tuple[str, str, Any]]:
    """Every verb with every wrong value of one of its arguments."""
    for verb, good in CALLS.items():
        for name in inspect.signature(getattr(plimsoll, verb)).parameters:
            yield from ((verb, name, value) for value in GIVEN.get(name, ()) if (verb, name) not in FREE)
        assert good.keys() <= GIVEN.keys() | {"batch"}


FREE = {("attach", "optimizer"), ("explain", "strategy")}


def fault_of_command(words: list[str]) -> tuple[str, float]:
    """What is wrong with the answer to a wrong command: nothing, if it is one error with its code; and its seconds."""
    begun = time.process_time()
    result = CliRunner().invoke(app, words, prog_name="plimsoll")
    seconds = time.process_time() - begun
    if not isinstance(result.exception, SystemExit):
        return f"{result.exception!r}, exit code {result.exit_code}", seconds
    said = result.stderr
    is_one = said.count("  why   ") == said.count("  next  ") == 1 or "Error: " in said or "Invalid value" in said
    return "" if result.exit_code in (2, 3) and is_one else f"exit code {result.exit_code}: {said[-200:]}", seconds


def fault_of_call(verb: str, name: str, value: Any) -> tuple[str, float]:
    """The same of a wrong call, after which the model is as it was."""
    before, begun = [tensor.clone() for tensor in MODEL.state_dict().values()], time.process_time()
    fault = "nothing was refused"
    try:
        getattr(plimsoll, verb)(**CALLS[verb] | {name: value})
    except PlimsollError:
        fault = ""
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError, OSError, ArithmeticError) as error:
        fault = repr(error)
    seconds = time.process_time() - begun
    if not all(map(torch.equal, before, MODEL.state_dict().values())):
        fault += " and the model is another"
    return fault, seconds


MOST_SECONDS = 120


def answer_of(ask: Callable[[], tuple[str, float]]) -> tuple[str, float]:
    """The fault and the processor seconds of a trial in a process of its own: what it breaks, keeps or prints ends with it."""
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as printed:
        child = os.fork()
        if not child:
            signal.alarm(MOST_SECONDS)
            for stream in (1, 2):
                os.dup2(printed.fileno(), stream)
            os.write(answer.fileno(), repr(ask()).encode())
            os._exit(0)
        _, status, _ = os.wait4(child, 0)
        for file in (answer, printed):
            file.seek(0)
        leaked = printed.read().decode(errors="replace").strip()
        if status:
            return f"ended with status {status}: {leaked[-300:]}", float(MOST_SECONDS)
        fault, seconds = ast.literal_eval(answer.read().decode())
        return fault or (f"printed past the console: {leaked[-300:]}" if leaked else ""), seconds


def main(every: int) -> int:
    """Try all of it, or one of so many; how many faults there were."""
    os.environ |= {"NO_COLOR": "1", "COLUMNS": "100", "TERM": "dumb"}
    os.chdir(tempfile.mkdtemp())
    prepare(Path())
    before = {path: path.read_bytes() for path in Path().iterdir()}
    os.environ["PLIMSOLL_CACHE_DIR"] = tempfile.mkdtemp()
    CliRunner().invoke(app, ["plan", "llama-tiny", "--batch", "1", "--seq", "32"])  # imports what the others need
    trials: list[tuple[str, Callable[[], tuple[str, float]]]] = [
        *((" ".join(words), partial(fault_of_command, words)) for words in wrong_commands()),
        *((f"{call[0]}({call[1]}={call[2]!r})", partial(fault_of_call, *call)) for call in wrong_calls()),
    ]
    answers = []
    for what, ask in trials[::every]:
        fault, seconds = answer_of(ask)
        answers.append((what, fault, seconds))
        if fault:
            print(f"{what[:100]}: {fault[:300]}", flush=True)
    slowest = sorted(answers, key=lambda answer: -answer[2])[:10]
    after = {path: path.read_bytes() for path in Path().iterdir() if path.name != "page.html"}
    faults = sum(bool(fault) for _, fault, _ in answers)
    lost = sorted(str(path) for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    print(f"{len(answers)} wrong inputs, {faults} faults, files changed: {lost or 'none'}")
    spent = sorted(seconds for _, _, seconds in answers)
    print(
        f"processor seconds beyond imports: median {statistics.median(spent):.2f}, "
        f"of 95 in 100 up to {spent[len(spent) * 95 // 100]:.1f}, over 2: {sum(each > 2 for each in spent)}; the slowest "
        + "; ".join(f"{seconds:.1f} {what[:60]}" for what, _, seconds in slowest)
    )
    return faults + len(lost)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(bool(main(int(sys.argv[1]) if sys.argv[1:] else 1)))
