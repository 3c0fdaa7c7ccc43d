"""Predicted beside measured steps of gradient compression, on links of three speeds that are shaped here.

    python -m benchmarks.compression_links --ranks 2 --rounds 6 --page benchmarks/results

Needs root and iproute2. Every rank is a process on one thread in a network namespace of its own; gloo talks over virtual
Ethernet whose rate ``tc tbf`` limits. A small Llama is trained data-parallel on the standard library's source, in buckets that
overlap with backward. At each speed, one call of ``advise_compression`` measures the parts, predicts the step of every
method, and then measures the steps, all methods in turns.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from benchmarks.shaped_links import INTERFACE, ShapedLinks, shaped_links
from plimsoll.artifacts.store import load_any
from plimsoll.artifacts.traffic import MethodTraffic, Traffic
from plimsoll.units import format_rate

MEGABITS = (100.0, 1000.0, 10000.0)
METHODS = ("powersgd:4", "topk:1%")
PATIENCE_SECONDS = 600.0
HEAD = ("link", "method", "MiB sent per step", "local ms", "predicted ms", "measured ms", "off by", "saved: predicted",
        "saved: measured (95%)")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabits", type=float, nargs="+", default=list(MEGABITS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=6, help="in which every method takes steps")
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--bucket-bytes", type=int, default=2**20)
    parser.add_argument("--page", type=Path, help="folder to write the page to")
    parser.add_argument("--rank-output", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.rank_output is not None:
        run_rank(asked)
        return 0
    found: list[tuple[float, Traffic]] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # namespaces and ranks go away then, too
    with shaped_links(asked.ranks) as links:
        for megabits in asked.megabits:
            links.set_rate(megabits)
            found.append((megabits, run_ranks(links, asked)))
            print("\n".join(table([found[-1]])), flush=True)
    print("\n".join(conclusion(found)))
    if asked.page is not None:
        print(f"written to {write_page(asked, found)}")
    return 0


def run_ranks(links: ShapedLinks, asked: argparse.Namespace) -> Traffic:
    """Start one process per namespace, wait for all, and read what the first one found."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "traffic.json"
        options = [f"--{name}={getattr(asked, name)}" for name in ("rounds", "hidden", "layers", "batch", "sequence")]
        options += [f"--bucket-bytes={asked.bucket_bytes}", "--methods", *asked.methods]
        command = [sys.executable, "-m", "benchmarks.compression_links", *options, "--rank-output", str(output)]
        processes = []
        try:
            for rank in range(asked.ranks):
                environment = {
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(asked.ranks),
                    "LOCAL_WORLD_SIZE": str(asked.ranks),
                    "MASTER_ADDR": links.first_address,
                    "MASTER_PORT": "29500",
                    "GLOO_SOCKET_IFNAME": INTERFACE,
                    "OMP_NUM_THREADS": "1",
                }
                processes.append(subprocess.Popen(links.command(rank, command), env=environment))
            for process in processes:
                if process.wait(PATIENCE_SECONDS):
                    raise SystemExit(f"a rank ended with {process.returncode}")
        finally:
            for process in processes:
                process.kill()
        traffic = load_any(output)
        assert isinstance(traffic, Traffic)
        return traffic


def run_rank(asked: argparse.Namespace) -> None:
    """One rank: build the model, ask the adviser, and save what the first rank was told."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.progress import say
    from plimsoll.distributed import advise_compression
    from plimsoll.ui.demo.story import VOCABULARY, read_corpus

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=asked.hidden,
        intermediate_size=asked.hidden * 8 // 3,
        num_hidden_layers=asked.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=asked.sequence,
        use_cache=False,
    )
    text = torch.frombuffer(bytearray(read_corpus()), dtype=torch.uint8).long()
    batches = 16
    pieces = text[: batches * asked.batch * asked.sequence].view(batches, asked.batch, asked.sequence)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE_SECONDS))
    is_first = dist.get_rank() == 0
    traffic = advise_compression(
        DistributedDataParallel(LlamaForCausalLM(config).train(), bucket_cap_mb=asked.bucket_bytes / 2**20),
        [{"input_ids": piece, "labels": piece} for piece in pieces],
        methods=asked.methods,
        measure_rounds=asked.rounds,
        progress=(lambda stage, share: say(stage)) if is_first else None,
    )
    if is_first:
        traffic.save(asked.rank_output)
    dist.destroy_process_group()


def error_of(method: MethodTraffic) -> float:
    """How far the prediction is from the measured step, as a share of the measured one."""
    return method.predicted_step_seconds / method.measured_step_seconds.value - 1


def is_within(method: MethodTraffic) -> bool:
    """Whether the prediction lies in the 95% interval of the measured step."""
    measured = method.measured_step_seconds
    return measured.low <= method.predicted_step_seconds <= measured.high


def table(found: Sequence[tuple[float, Traffic]]) -> list[str]:
    """One row per link and method."""
    lines = [f"| {' | '.join(HEAD)} |", "|---|---|" + "--:|" * (len(HEAD) - 2)]
    for megabits, traffic in found:
        for method in traffic.methods:
            measured, saved = method.measured_step_seconds, method.measured_saved_share
            cells = (
                f"{megabits:g} Mbit/s",
                method.method,
                f"{method.sent_bytes / 2**20:.2f}",
                f"{method.measured_local_seconds * 1e3:.1f}",
                f"{method.predicted_step_seconds * 1e3:.1f}",
                f"{measured.value * 1e3:.1f} ({measured.low * 1e3:.1f}–{measured.high * 1e3:.1f})",
                f"{error_of(method):+.1%}",
                f"{method.predicted_saved_share:.1%}",
                f"{saved.value:.1%} ({saved.low:.1%} to {saved.high:.1%})",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def conclusion(found: Sequence[tuple[float, Traffic]]) -> list[str]:
    """How well the model predicts, per link."""
    lines = []
    for megabits, traffic in found:
        errors = [error_of(method) for method in traffic.methods]
        lines.append(
            f"- {megabits:g} Mbit/s: largest error {max(map(abs, errors)):.1%}, "
            f"{sum(abs(error) <= 0.15 for error in errors)} of {len(errors)} steps within 15%, "
            f"{sum(map(is_within, traffic.methods))} within the measured interval; measured all-reduce "
            f"{format_rate(traffic.measured_bytes_per_second)}, latency {traffic.measured_latency_seconds * 1e3:.2f} ms"
        )
    return lines


def write_page(asked: argparse.Namespace, found: Sequence[tuple[float, Traffic]]) -> Path:
    """The result page."""
    import torch

    from benchmarks.machine import device_name, page_head, page_stem, versions

    device = torch.device("cpu")
    traffic = found[0][1]
    lines = [
        *page_head(
            "Gradient compression on shaped links",
            f"python -m benchmarks.compression_links --ranks {asked.ranks} --rounds {asked.rounds}",
            device=device_name(device),
            versions=versions(),
        ),
        f"Load of the machine when it ended: {os.getloadavg()[1]:.1f}.",
        "",
        f"{asked.ranks} ranks, one thread each, in network namespaces joined by virtual Ethernet and a bridge; `tc tbf` "
        f"limits both directions of each link; gloo. Llama, {asked.layers} layers, hidden size {asked.hidden}, batch "
        f"{asked.batch} × {asked.sequence} per rank, gradients in {traffic.exchanges} buckets. Predicted: from the "
        f"parts. Measured: medians over {asked.rounds} rounds with all methods in turns, the slowest rank's, with their "
        "95% interval. The optimizer is not part of the step.",
        "",
        *table(found),
        "",
        *conclusion(found),
    ]
    asked.page.mkdir(parents=True, exist_ok=True)
    path = asked.page / f"{page_stem(device, 'compression-links')}.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    raise SystemExit(main())
