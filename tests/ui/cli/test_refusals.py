"""Whatever a command cannot do: its exit code, what was found, why and what to do next, in words and as JSON."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from analysis.diagnose.builders import recomputing_traces
from fakes import FakeVerbs
from long_cases import some
from plimsoll.errors import BudgetBelowFloor, ReplayMismatch
from samples import make_comparison, make_plan, make_receipt

pytest.importorskip("transformers")

TINY = "estimate llama-tiny --batch 1 --seq 256 --device H100"
FIT = "fit steps:stack --device-profile H100-SXM --most-batch 16 --optimizer none"
PROBE = "probe targets:stream --strategy full --steps 4"
REFUSED = {
    "plan nonsense": "'nonsense' is not a target.",
    "plan targets:": "'targets:' is not a target.",
    "plan targets:nothing": "targets:nothing does not exist.",
    "plan targets:number": "targets:number cannot be called",
    "plan targets:wrong": "targets:wrong returned an object of type int.",
    "plan targets:broken": "The target targets:broken failed.",
    "plan targets:leaves": "The target targets:leaves failed.",
    "plan no_import:step": "The module no_import cannot be imported.",
    "plan no_such_module:step": "InvalidTarget: The module no_such_module cannot be imported.",
    "plan missing.json": "missing.json cannot be read as JSON.",
    "plan empty.json": "empty.json is not a model configuration.",
    "plan unknown.json": "does not know the model_type 'perpetuum-mobile'",
    "plan targets:linear --batch 4": "--batch would not have an effect on targets:linear.",
    "plan targets:linear --seq 4 --device cuda": "--seq and --device would not have an effect",
    "plan vit-tiny --seq 4": "--seq would not have an effect on ViTForImageClassification.",
    "plan llama-tiny --device abacus": "The device 'abacus' is not available on this machine.",
    **{
        f"{command} targets:broken --strategy nonsense": "'nonsense' is not a strategy."
        for command in ("plan", "verify", "compare", "explain", "probe", "diagnose")
    },
    **{
        f"{command} targets:broken --budget 24G": "InvalidBudget"  # before the target is loaded
        for command in ("plan", "verify", "compare", "advise", "probe", "diagnose", "fit")
    },
    "plan targets:broken -b 100TiB --device-profile H100": "BudgetAboveDevice",
    "plan targets:broken -b -1": "a budget must be positive",
    "plan targets:broken -b nan": "is not an amount of memory",
    f"plan targets:broken -b {'9' * 400}": "is not an amount of memory",
    "plan targets:broken --max-error 200%": "is not a share",
    "plan targets:broken --allow magic": "is not understood",
    "plan targets:broken --link moon": "The link 'moon' does not exist.",
    "plan targets:broken --link disk": "offloading is not allowed",
    "plan targets:broken --host-budget 1GiB": "offloading is not allowed",
    f"plan llama-tiny --seq {'9' * 400}": "--seq has 400 digits.",
    f"probe targets:stream --seed {2**64}": "--seed has 20 digits.",
    "plan llama-tiny --batch 1000000000000": "The integer tensors of the batch do not fit on cpu.",
    "plan llama-tiny --device meta": "The device 'meta' is not available on this machine.",
    "plan targets:broken --device-profile H100@0W": "'0W' is not a valid change of H100-SXM.",
    "plan steps:stack -b 900TiB": "BudgetAboveDevice",
    "plan steps:stack --regions layers.*": "InvalidRegions",
    "plan steps:stack -s best": "InvalidStrategy",
    "plan steps:stack --device-profile H900": "UnknownDevice",
    "plan steps:stack -o no/such/place.json": "PlanFileError",
    "estimate targets:broken --budget 1GiB --plans empty.json/plans": "empty.json is not a directory",
    "probe targets:broken --run empty.json/run": "empty.json is not a directory",
    "diagnose targets:broken --strategy full --keep-traces empty.json/traces": "empty.json is not a directory",
    "fit targets:broken --budget 1GiB --save-plan no/plan.json": "/no does not exist",
    "verify targets:broken --strategy full --revised-plan no/plan.json": "/no does not exist",
    **{
        f"{command} targets:broken --strategy full --output /proc/x.json": "a new file cannot be created in /proc"
        for command in ("plan", "diagnose", "verify", "compare", "probe")
    },
    "probe targets:broken --run /proc/run": "a new file cannot be created in /proc",
    f"estimate targets:broken --budget 1GiB --plans {'a' * 300}": "File name too long",
    "verify targets:broken --plan no.json": "no.json cannot be read",
    "verify targets:broken --plan plan.json -o ./plan.json": "--output plan.json would be overwritten.",
    "show plan.json --export-sac plan.json": "--export-sac plan.json would be overwritten.",
    "explain plan.json -o plan.json": "--output plan.json would be overwritten.",
    "show runs/seed=2/plan.json": "runs/seed=2/plan.json cannot be read",
    "verify targets:broken --strategy full -o new.json --revised-plan new.json": "are both new.json",
    f"fit targets:broken --budget 1GiB --seq {'9' * 400}": "--seq has 400 digits.",
    f"plan {'a' * 300}.json": "cannot be read as JSON",
    "explain no_import.py": "no_import.py is a script, and not a target.",
    "explain no_such_module:step": "InvalidTarget: The module no_such_module cannot be imported.",
    "diagnose no.such:step": "The module no.such cannot be imported.",
    "show plan.json --export-sac no/policy.py": "/no does not exist",
    "report plan.json --timeline no/trace.json": "/no does not exist",
    "plan targets:broken --strategy memory-budget:0.5 --compile whole": "is a strategy of torch.compile",
    "compare targets:broken --strategy memory-budget:0.5": "is a strategy of torch.compile",
    "compare targets:broken --strategy checkpoint": "is a strategy of torch.compile",
    "plan targets:without_loss": "InvalidLoss",
    "plan targets:broken_loss": "InvalidLoss",
    "plan targets:refused": "InvalidBatch",
    "plan targets:checkpointed": "already checkpoints",
    "show nothing.json": "PlanFileError",
    "show cut.json": "not complete JSON",
    "verify targets:own --allow compress": "--allow would have no effect",
    "verify targets:own --plan plan.json --budget 1GiB": "--budget would have no effect",
    "advise targets:layers --budget 24G": "is ambiguous",
    "advise targets:layers --allow magic": "is not understood",
    "advise targets:layers --max-error 5 --allow recompute,compress": "is not a share",
    "advise targets:layers --receipt missing.json": "cannot be read",
    "advise targets:layers --receipt receipt.json": "of another model: ffffffffffffffff, not Sequential-",
    "advise targets:layers --device-profile Z9000": "Z9000",
    "explain targets:own --strategy int8": "cannot be replayed",
    "explain targets:own --strategy evry:2": "closest: every:2",
    "explain targets:own --strategy full --plan plan.json": "--strategy and --plan were both given",
    "explain targets:own --plan missing.json": "cannot be read",
    "explain targets:own --plan plan.json --regions layers.*": "--regions would have no effect beside --plan",
    "explain receipt.json": "holds a receipt, not a plan",
    "explain plan.json --strategy full": "would have no effect on a saved plan",
    f"{FIT} --budget 24G": "is ambiguous",
    f"{FIT} --budget 1MiB --seq 8": "--seq cannot be used with this batch.",
    f"{FIT} --budget 1MiB --global-batch 4 --accumulation 2": "contradict",
    f"{TINY} --layout tp=3": "attention heads",
    f"{TINY} --layout dp={'9' * 5000}": "a whole number of ranks",
    f"{TINY} --compare-with /dev/zero": "more than 64.0 MiB",
    f"{TINY} --device H1000": "try 'H100",
    f"{TINY} --budget 24G": "is ambiguous",
    f"{TINY} --strategy everything": "everything",
    f"{TINY} --plans plans": "There are no plans to save.",
    "probe targets:empty --strategy full --steps 4": "returned a stream without batches.",
    f"{PROBE} --held-out 30": "30 of 30 batches cannot be held out.",
    "probe targets:once --strategy full --steps 9": "The stream of batches ended after 5 batches.",
    f"{PROBE} --optimizer none": "--optimizer none cannot be used with probe.",
    f"{PROBE} --run .": "is not empty, and does not contain a probe.",
    f"{PROBE} --target-loss nan": "--target-loss is nan.",
    "probe targets:stream --plan absent.json": "absent.json cannot be read.",
    "probe targets:stream --plan plan.json --budget 1GiB": "--budget would have no effect together with --plan.",
    "diagnose baseline.json absent.json": "cannot be read",
    "diagnose absent.json.gz": "alone cannot be diagnosed",
    "diagnose report.nsys-rep": "alone cannot be diagnosed",
    "diagnose baseline.json with-plan.json --budget 1GiB": "--budget would have no effect",
    "diagnose baseline.json with-plan.json --steps 5 --batch 2": "--batch and --steps would have no effect",
    "diagnose steps:stack --plan plan.json -s full": "--strategy would have no effect together with --plan",
    "diagnose nothing": "is not a target",
    "compress-gradients llama-tiny": "one rank only",
    "demo --budget 24G": "is ambiguous",
    "report nowhere.json -o page.html": "PlanFileError: nowhere.json cannot be read",
    "report foreign.json -o page.html": "PlanFileError: foreign.json is JSON, but not a file of Plimsoll",
    "report plan.json other.json -o page.html": "PlanMismatch: plan.json and other.json are about different",
    "report plan.json -o nowhere/page.html": "PlanFileError: nowhere/page.html cannot be written",
    "report plan.json": "neither --output nor --timeline was given",
    "report plan.json -o plan.json": "plan.json would be overwritten",
    "report plan.json --timeline ./plan.json": "plan.json would be overwritten",
    "report plan.json -o same --timeline same": "--output and --timeline are both same",
    "report receipt.json --timeline trace.json": "InvalidReport: There is no timeline to write",
    "report receipt.json -o page.html --timeline trace.json": "no timeline",
}
BELOW_FLOOR = {
    "plan steps:stack -b 100KiB": "BudgetBelowFloor",
    "verify steps:stack -b 100KiB": "BudgetBelowFloor",
    "plan steps:stack -s none -b 515KiB": "strategy 'none' peaks at",
}
WITHOUT_JSON = ("show", "report", "demo")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Files of every kind, good ones and others, in the directory where commands run."""
    make_plan().save(tmp_path / "plan.json")
    make_receipt().save(tmp_path / "receipt.json")
    make_comparison().save(tmp_path / "comparison.json")
    make_receipt(model="Other", fingerprint="e" * 16).save(tmp_path / "other.json")
    recomputing_traces(tmp_path)
    for name, text in {
        "foreign.json": '{"some": "thing"}',
        "cut.json": '{"plimsoll": "plan", "schema',
        "empty.json": "{}",
        "unknown.json": '{"model_type": "perpetuum-mobile"}',
        "no_import.py": "raise ValueError('missing key')",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def _words(text: str) -> str:
    """A text without its figures: two runs of a command measure by themselves."""
    return " ".join(re.sub(r"\d[\d.]*", "#", text).split())


@pytest.mark.parametrize(
    ("command", "words", "code"),
    some([*((*row, 2) for row in REFUSED.items()), *((*row, 3) for row in BELOW_FLOOR.items())], 65),
    ids=[*REFUSED, *BELOW_FLOOR],
)
def test_what_cannot_be_done_is_said_and_leaves_every_file_as_it_was(
    command: str, words: str, code: int, run, files: Path
):
    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in files.rglob("*") if path.suffix != ".pyc" and path.is_file()}

    before = contents()
    said = run(*command.split(), code=code).err
    assert words in " ".join(said.split())
    assert "  why   " in said
    assert "  next  " in said
    if not command.startswith(WITHOUT_JSON):
        fields = run(*command.split(), "--json", code=code).json
        assert (fields["plimsoll"], fields["exit_code"]) == ("error", code)
        parts = f"{fields['error']}: {fields['found']} why {fields['why']} next {fields['next']}"
        assert _words(parts) in _words(said)
    assert contents() == before


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BudgetBelowFloor("too little.", why="it is so", next="more"), 3),
        (ReplayMismatch("another value.", why="an op changed", next="report it"), 4),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_have_exit_codes_and_no_traceback(error: BaseException, code: int, run, verbs: FakeVerbs):
    verbs.error = error
    said = run("plan", "targets:linear", code=code).err
    assert code == 130 or all(part in said for part in (f"{type(error).__name__}: ", "  why   ", "  next  "))


def test_our_own_mistakes_keep_their_traceback(run, verbs: FakeVerbs):
    verbs.error = AssertionError("ours")
    with pytest.raises(AssertionError, match="ours"):
        run("plan", "targets:linear")


def test_missing_transformers_is_said_clearly(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "needs transformers" in run("plan", "llama-tiny", code=2).err


def test_a_number_out_of_range_is_refused_by_the_option_itself(run):
    assert "greater than or equal to 1" in " ".join(run("probe", "targets:stream", "--steps", "0", code=2).err.split())


def test_a_single_rank_is_told_how_to_start_several(run):
    assert "torchrun --nproc-per-node 2" in run("compress-gradients", "llama-tiny", code=2).err


@pytest.mark.parametrize(
    ("typed", "found"),
    {
        "plan --json": "Missing argument 'TARGET'.",
        "plan steps:stack --batch many --json": "Invalid value for '--batch'",
        "plan steps:stack --bugdet 1GiB --json": "No such option: --bugdet",
        "frobnicate --json": "No such command 'frobnicate'.",
    }.items(),
)
def test_words_that_no_command_takes_are_errors_as_json_where_that_is_asked_for(run, typed, found):
    shown = run(*typed.split(), code=2)
    told = json.loads(shown.out)
    assert found in told["found"]
    assert told["exit_code"] == 2
    assert not shown.err
