"""Published claims about gradient compression, reckoned with the model behind ``advise_compression`` and the device catalogue.

    python -m benchmarks.compression_claims

Nothing is measured here. Links are the catalogue's: bytes as each method sends them, bandwidth as collectives reach it.
Local work (encoding, decoding, error feedback) is taken to pass over memory at the bandwidth that kernels reach, 40 bytes for
every gradient element: reading the gradient and the residual, finding what to send, writing the mean and the new residual.
That is a floor: it takes every method for one fused kernel or a few, and decodes all ranks' parts in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.page import format_table
from plimsoll.distributed.comm_cost.cost_meter import predict_step_seconds
from plimsoll.distributed.gradient_compression.method import Method
from plimsoll.distributed.gradient_compression.slots import compressed_bytes, dense_bytes
from plimsoll.planning.costing.devices import Device, find_device
from plimsoll.planning.costing.links import Collective, collective_seconds

LOCAL_BYTES_PER_ELEMENT = 40
GRADIENT_BYTES, FACTOR_BYTES = 2, 4
"""Gradients in bf16; factors of PowerSGD in float32."""


def local_seconds(elements: float, device: Device) -> float:
    return elements * LOCAL_BYTES_PER_ELEMENT / (device.bandwidth_bytes_per_second * device.achieved_bandwidth)


def top_k_rows(elements: int, claimed_seconds: float, device: Device) -> list[list[str]]:
    """What is left of "top-k at 1% cuts a 50 ms all-reduce to 0.5 ms", on a link on which the all-reduce takes that long."""
    rows = []
    local = local_seconds(elements, device)
    for ranks in (8, 32, 64):
        dense = dense_bytes(elements, torch.bfloat16, ranks, "mean")
        sent = compressed_bytes(Method(kind="topk", share=0.01), (elements,), torch.bfloat16, ranks, "mean")
        link = dense / claimed_seconds
        rows.append(
            [
                str(ranks),
                f"{link / 1e9:.0f} GB/s",
                f"{sent / 1e9:.2f} GB of {dense / 1e9:.2f}",
                f"{sent / link * 1e3:.1f} ms",
                f"{local * 1e3:.0f} ms",
                f"{(sent / link + local) * 1e3:.0f} ms",
                f"{claimed_seconds / (sent / link + local):.1f} ×",
            ]
        )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model of 80 like layers, ``tp`` ways tensor parallel, ``dp`` ways data parallel, its backward twice its forward."""

    parameters: float
    layers: int
    tp: int
    dp: int
    tokens: int
    device: Device

    @property
    def compute_seconds(self) -> float:
        flops = self.device.flops_per_second("bf16") * self.device.achieved_arithmetic
        return 6 * self.parameters * self.tokens / self.tp / flops

    def step_seconds(self, payload_share: float, *, is_overlapped: bool, local_share: float = 0.0) -> float:
        """With every layer a part, or everything sent after backward; ``local_share`` of the floor of local work."""
        elements = self.parameters / self.tp / self.layers
        whole_bytes = elements * GRADIENT_BYTES * payload_share
        sending = collective_seconds(Collective.ALL_REDUCE, whole_bytes, self.dp, self.device, stride=self.tp)
        return predict_step_seconds(
            self.compute_seconds / 3,
            self.compute_seconds,
            self.layers * local_share * local_seconds(elements, self.device),
            self.layers * sending,
            parts=self.layers if is_overlapped else 1,
        )


def power_sgd_rows(job: Job, rows: int, columns: int, rank: int) -> list[list[str]]:
    """What is left of "38% to 15% overhead with rank-8 PowerSGD", with and without overlap."""
    share = (rows + columns / job.tp) * rank * FACTOR_BYTES / (rows * columns / job.tp * GRADIENT_BYTES)
    found = []
    for is_overlapped in (False, True):
        plain = job.step_seconds(1.0, is_overlapped=is_overlapped) / job.compute_seconds - 1
        wire = job.step_seconds(share, is_overlapped=is_overlapped) / job.compute_seconds - 1
        whole = job.step_seconds(share, is_overlapped=is_overlapped, local_share=1.0) / job.compute_seconds - 1
        found.append(
            [
                f"{job.tokens:,}",
                "overlapped, a layer a part" if is_overlapped else "after backward",
                f"{job.compute_seconds * 1e3:.0f} ms",
                f"{plain:.1%}",
                f"{wire:.1%}",
                f"{whole:.1%}",
            ]
        )
    return found


def main() -> int:
    device = find_device("H100-SXM")
    print("Top-k at 1%, 1B parameters in bf16, on a link on which the all-reduce takes 50 ms\n")
    head = ("ranks", "that link", "each rank sends", "on the wire", "local work, at least", "together", "faster by")
    print("\n".join(format_table(head, top_k_rows(10**9, 0.05, device))))
    print("\nRank-8 PowerSGD, 70B parameters on 32 H100 (tp=8, dp=4)\n")
    rows: list[Sequence[str]] = []
    for tokens in (4096, 8192, 16384, 32768):
        job = Job(parameters=70e9, layers=80, tp=8, dp=4, tokens=tokens, device=device)
        rows += power_sgd_rows(job, rows=8192, columns=28672, rank=8)
    head = (
        "tokens per replica",
        "gradients are sent",
        "computing",
        "overhead",
        "PowerSGD, wire alone",
        "with local work",
    )
    print("\n".join(format_table(head, [list(row) for row in rows])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
