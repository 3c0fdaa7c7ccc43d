"""An estimate's answers for people: several devices, the price of a run, what fits, and how to start the job."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from plimsoll.artifacts.estimate import FittingChange
from plimsoll.artifacts.job import Layout, read_techniques
from plimsoll.artifacts.store import load_any
from plimsoll.errors import InvalidOption
from plimsoll.ui.cli.devices import read_price, split_devices
from plimsoll.ui.cli.launch import Launcher, launch_script
from plimsoll.ui.cli.options import parse_sequence
from plimsoll.ui.html.page import build_html
from plimsoll.ui.plain import render_plain
from plimsoll.ui.terminal import render_document
from plimsoll.ui.views.estimate import view_estimate, view_estimates
from ui.view_samples import make_estimate

TINY = ("estimate", "llama-tiny", "--batch", "2", "--seq", "256")
REFUSED = {
    "--device H100,": "does not list different devices",
    "--device H100,H100": "a device is named twice",
    "--device H100,H900": "No device is called 'H900'",
    "--device H100,A100 --launch torchrun": "--launch cannot be used with 2 devices",
    "--price 2.5": "add --tokens 10B to --price 2.5",
    "--price -1 --tokens 1B": "is not the price of an hour",
    "--price nan --tokens 1B": "is not the price of an hour",
    "--price A100=2 --tokens 1B": "nor DEVICE=NUMBER",
    "--price 1,2 --device H100,A100 --tokens 1B": "or --price H100=2.5,A100=2.5",
    "--tokens many": "'many' is not a positive whole number",
    "--tokens 0": "is not a positive whole number",
    "--tokens 1.5": "is not a positive whole number",
    "--lora 16 --techniques lora=8": "lora is given twice",
    "--launch torchrun --json": "--launch and --json were both given",
}


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLIMSOLL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.parametrize("words", REFUSED)
def test_what_a_job_cannot_be_asked_is_refused(words: str, run: Callable[..., Any]):
    ran = run(*TINY, *words.split(), code=2)
    assert REFUSED[words] in " ".join((ran.err + ran.out).split())


@pytest.mark.long
def test_several_devices_are_one_table_and_a_file_each(run: Callable[..., Any]):
    pytest.importorskip("transformers")
    shown = run(*TINY, "--device", "H100,laptop-CPU", "--tokens", "1B", "--price", "2.5", "-o", "job.json").words
    for part in ("on 2 devices: 2 of 2 fit", "H100-SXM", "laptop-CPU", "tokens/s", "price", "1.0B tokens"):
        assert part in shown
    assert {load_any(file).device for file in Path().glob("job-*.json")} == {"H100-SXM", "laptop-CPU"}
    found = run(*TINY, "--device", "H100,A100", "--json").out
    assert [each["device"] for each in json.loads(found)] == ["H100-SXM", "A100-80GB"]


def test_the_price_of_a_run_is_hours_times_price(run: Callable[..., Any]):
    pytest.importorskip("transformers")
    found = run(
        *TINY, "--device", "H100", "--tokens", "36M", "--price", "2", "--layout", "dp=2", "-o", "job.json"
    ).words
    estimate = load_any("job.json")
    hours = 36e6 / estimate.throughput.tokens_per_second / 3600 * 2
    assert estimate.device_hours == pytest.approx(hours)
    assert estimate.price == pytest.approx(2 * hours)
    assert f"36.0M tokens: {hours:,.0f} GPU-hours" in found


def test_an_estimate_without_tokens_has_no_price():
    estimate = make_estimate(1)
    assert estimate.device_hours is estimate.price is None


@pytest.mark.long
def test_what_fits_is_printed_as_commands_that_run(run: Callable[..., Any]):
    pytest.importorskip("transformers")
    small = ("estimate", "llama-tiny", "--device", "H100", "--batch", "1024", "--seq", "1k")
    shown = run(*small, code=3)
    assert "What fits, fewest GPU-seconds per sample first, other trainings last" in shown.out
    pasted = shown.out.replace("\\\n", " ")
    commands = [line.strip() for line in pasted.splitlines() if line.strip().startswith("plimsoll estimate")]
    assert 0 < len(commands) <= 3
    assert "fits, " in run(*shlex.split(commands[0])[1:]).words


@pytest.mark.parametrize("width", [40, 60, 100])
def test_a_long_command_is_broken_so_that_it_can_be_pasted(width: int):
    command = "plimsoll estimate llama-3-8b --device H100-SXM --strategy full --techniques loss=chunked,lora=16"
    change = FittingChange(
        name="recompute", options={}, ranks=1, total_bytes=1, error_bytes=0, step_seconds=1.0,
        rank_seconds_per_sample=1.0, command=command,
    )  # fmt: skip
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - rich closes nothing
    console.print(render_document(view_estimate(msgspec.structs.replace(make_estimate(1), changes=(change,)))))
    text = console.export_text()
    start = text.index("plimsoll estimate")
    pasted = text[start : text.index("\n\n", start)]
    echoed = subprocess.run(["sh", "-c", f"echo {pasted.strip()}"], capture_output=True, text=True, check=True)
    assert echoed.stdout.split() == command.split()
    assert command in render_plain(view_estimate(msgspec.structs.replace(make_estimate(1), changes=(change,))))


@pytest.mark.parametrize(
    ("ranks", "nodes", "on_node"), [(1, 1, 1), (8, 1, 8), (16, 2, 8), (12, 2, 6), (20, 4, 5), (11, 11, 1)]
)
def test_a_job_is_started_on_equal_nodes_with_one_process_per_rank(ranks: int, nodes: int, on_node: int):
    estimate = msgspec.structs.replace(make_estimate(1), layout=Layout(dp=ranks))
    script = launch_script(estimate, Launcher.SBATCH)
    assert f"#SBATCH --nodes={nodes}\n" in script
    assert f"#SBATCH --gpus-per-node={on_node}\n" in script
    assert f"--nproc-per-node={on_node} train.py" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    once = launch_script(estimate, Launcher.TORCHRUN)
    assert ("--standalone" in once) == (nodes == 1)
    assert (f"--nnodes={nodes}" in once) == (nodes > 1)


def test_expandable_segments_are_switched_on_where_the_job_starts():
    estimate = msgspec.structs.replace(make_estimate(1), techniques=read_techniques("expandable-segments"))
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in launch_script(estimate, Launcher.TORCHRUN)


def test_the_script_follows_the_estimate(run: Callable[..., Any]):
    pytest.importorskip("transformers")
    answered = run(*TINY, "--launch", "torchrun")
    assert answered.out.splitlines()[0].startswith("# llama-tiny on 1 x ")
    assert "torchrun --standalone --nproc-per-node=1 train.py" in answered.out
    assert "tokens" in answered.err
    assert '-m plimsoll run train.py --budget "60GiB"' in run(*TINY, "--launch", "torchrun", "--budget", "60GiB").out


@pytest.mark.parametrize(
    ("text", "tokens"), [("32k", 32768), ("4096", 4096), ("1K", 1024), ("128k", 131072), (512, 512)]
)
def test_a_length_of_sequences_may_end_in_k(text: str | int, tokens: int):
    assert parse_sequence(text) == tokens


def test_a_price_is_for_all_devices_or_for_each():
    assert read_price("10B", "2", ["A", "B"]) == (10**10, {"A": 2.0, "B": 2.0})
    assert read_price("1T", "A=2,B=3", ["A", "B"]) == (10**12, {"A": 2.0, "B": 3.0})
    assert read_price(None, None, ["A"]) == (None, {})
    assert split_devices("A, B") == ["A", "B"]
    with pytest.raises(InvalidOption):
        read_price("1B", "C=2", ["A"])


def test_a_page_begins_with_the_verdict_and_shows_the_price():
    change = FittingChange(
        name="recompute every block", options={"strategy": "full"}, ranks=1, total_bytes=1, error_bytes=0, step_seconds=1.0,
        rank_seconds_per_sample=1.0, command="plimsoll estimate tiny --strategy full",
    )  # fmt: skip
    estimate = msgspec.structs.replace(make_estimate(1), run_tokens=10**10, hourly_price=2.5, changes=(change,))
    page = build_html([estimate])
    body = page[page.index("<body>") :]
    assert body.index('class="verdict') < body.index("<h1>") < body.index("price of the run")
    assert "<code>plimsoll estimate tiny --strategy full</code>" in page
    assert f"{estimate.price:,.0f}" in page
    small = msgspec.structs.replace(estimate, device_bytes=1)
    assert "price if it fitted" in build_html([small])


def test_a_page_of_several_devices_has_a_verdict_for_each():
    other = msgspec.structs.replace(make_estimate(1), device="A100-80GB")
    assert build_html([make_estimate(1), other]).count('<p class="verdict') == 2


@pytest.mark.parametrize("ranks", [1, 1024])
def test_the_table_of_devices_keeps_each_row_on_one_line_of_80_columns(ranks: int):
    """The verdict is the longest one, the run costs millions, and names are as long as the catalogue's."""
    close = msgspec.structs.replace(make_estimate(ranks), device_bytes=None, run_tokens=10**13, hourly_price=2.5)
    estimates = [msgspec.structs.replace(close, device=name) for name in ("H100-SXM", "A100-80GB")]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_document(view_estimates(estimates)), crop=False)
    lines = console.export_text().splitlines()
    rows = [line for line in lines if line.strip().startswith(("H100-SXM ", "A100-80GB "))]
    assert len(rows) == 2
    assert lines.index(rows[1]) == lines.index(rows[0]) + 1
    assert max(map(len, lines)) <= 80
    assert "the price of one device for an hour, in the currency of --price" in " ".join(" ".join(lines).split())


def test_the_table_of_devices_leaves_out_what_nobody_knows():
    text = render_plain(view_estimates([make_estimate(1), make_estimate(1)]))
    assert "price" not in text
    assert "GPU-hours" not in text
