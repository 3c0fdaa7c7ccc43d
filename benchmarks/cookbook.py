"""The cookbook of docs/cookbook.md: common jobs × GPUs, estimated. Run with ``python -m benchmarks.cookbook``.

Every row is ``plimsoll estimate`` with ``--budget auto``, so the plan recomputes only what the device requires. Nothing is
measured: a row is an estimate with its error bar.
"""

from __future__ import annotations

import plimsoll
from plimsoll.errors import PlimsollError

GIB = 1 << 30
JOBS = (
    ("llama-3.2-1b", 8192, "adamw", "dp=1", "loss=chunked", ("RTX-4090", "A100-80GB", "H100-SXM")),
    ("llama-3.1-8b", 8192, "adamw", "dp=1", "lora=16,loss=chunked", ("RTX-4090", "A100-40GB", "A100-80GB", "H100-SXM")),
    ("llama-3.1-8b", 4096, "adamw", "dp=1", "qlora=16,loss=chunked", ("RTX-4090", "A100-40GB")),
    ("qwen2.5-7b", 4096, "adamw-8bit", "dp=1", "loss=chunked", ("A100-80GB", "H100-SXM")),
    ("llama-3.1-8b", 8192, "adamw", "dp=8,zero=3", "loss=chunked", ("A100-40GB", "A100-80GB", "H100-SXM")),
    ("qwen3-14b", 8192, "adamw", "dp=8,zero=3", "loss=chunked", ("A100-80GB", "H100-SXM")),
    ("llama-3.1-70b", 4096, "adamw", "dp=8,zero=3", "qlora=16,loss=chunked", ("A100-80GB", "H100-SXM")),
)


def row_of(target: str, sequence: int, optimizer: str, layout: str, techniques: str, device: str) -> str:
    """Estimate one job on one device. Return a row of the table, or the reason that there is none."""
    what = f"| `{target}` | {techniques.replace(',', ', ')} | {optimizer} | {layout} | {sequence:,} | {device} |"
    kept = {
        "precision": "bf16",
        "optimizer": optimizer,
        "layout": layout,
        "techniques": techniques,
        "sequence": sequence,
    }
    try:
        found = plimsoll.estimate(target, device=device, budget="auto", **kept)
    except PlimsollError as error:
        return f"{what} {type(error).__name__}: {str(error).splitlines()[0]} |"
    keeping = plimsoll.estimate(target, device=device, strategy="none", **kept)
    total = found.tightest
    verdict = {True: "fits", False: "does not fit", None: "too close to call"}[found.does_fit]
    return (
        f"{what} {keeping.tightest.total_bytes / GIB:.1f} | {total.total_bytes / GIB:.1f} ± {total.error_bytes / GIB:.1f} "
        f"| {verdict} | {found.throughput.tokens_per_second:,.0f} |"
    )


if __name__ == "__main__":
    for *job, devices in JOBS:
        for device in devices:
            print(row_of(*job, device), flush=True)
