"""What every rank measured in, one receipt or one comparison for all of them out: the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from plimsoll.artifacts.comparison import Comparison, ComparisonRow
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.receipt import Receipt, Verdict
from plimsoll.artifacts.store import from_json
from plimsoll.artifacts.writing import to_json
from plimsoll.session.agreement import Agreement
from plimsoll.units import format_bytes

_SEVERITY = {verdict: index for index, verdict in enumerate(Verdict)}
"""The worst verdict first, in the order in which a receipt comes to one."""


def worst_receipt(agreement: Agreement, receipt: Receipt, plan: Plan | None) -> Receipt:
    """The receipt of the rank with the worst verdict, of those the one nearest to its budget, with a note on all ranks.

    Args:
        agreement: with the ranks that verified together.
        receipt: this rank's.
        plan: it may carry a budget for every rank.
    """
    if agreement.size == 1:
        return receipt
    if plan is not None and str(agreement.rank) in plan.budget_bytes_of_ranks:
        receipt = msgspec.structs.replace(receipt, budget_bytes=plan.budget_bytes_of_ranks[str(agreement.rank)])
    told = agreement.all_of("receipts", to_json(receipt), str)
    receipts = [_receipt(text, rank) for text, rank in zip(told, agreement.ranks, strict=True)]
    worst = min(
        range(len(receipts)), key=lambda index: (_SEVERITY[receipts[index].verdict], _room_bytes(receipts[index]))
    )
    peaks = [each.measured_peak_bytes or 0 for each in receipts]
    failed = [rank for rank, each in zip(agreement.ranks, receipts, strict=True) if each.exit_code]
    note = (
        f"verified on {agreement.size} ranks; this is the receipt of rank {agreement.ranks[worst]}, the worst. Measured peaks "
        f"lie between {format_bytes(min(peaks))} and {format_bytes(max(peaks))}"
        + (f"; it failed on {', '.join(map(str, failed))}" if failed else "")
    )
    return msgspec.structs.replace(receipts[worst], notes=(*receipts[worst].notes, note))


def _receipt(text: str, rank: int) -> Receipt:
    made = from_json(text, source=f"the receipt of rank {rank}")
    assert isinstance(made, Receipt)
    return made


def _room_bytes(receipt: Receipt) -> int:
    peaks = (receipt.measured_peak_bytes or 0, receipt.measured_recording_peak_bytes or 0)
    return (receipt.budget_bytes or 0) - max(peaks)


def merged_comparison(agreement: Agreement, comparison: Comparison) -> Comparison:
    """The largest peak, the slowest rank's seconds and the largest error of every strategy; equal where it is on all ranks.

    Args:
        agreement: with the ranks that compared together.
        comparison: this rank's, with the same strategies as everyone's.
    """
    if agreement.size == 1:
        return comparison
    told = [
        _comparison(text, rank)
        for text, rank in zip(agreement.all_of("comparisons", to_json(comparison), str), agreement.ranks, strict=True)
    ]
    seconds = [each.measured_baseline_seconds for each in told if each.measured_baseline_seconds is not None]
    return msgspec.structs.replace(
        told[0],
        baseline_peak_bytes=max(each.baseline_peak_bytes for each in told),
        measured_baseline_seconds=max(seconds, default=None),
        rows=tuple(_merged_row(rows) for rows in zip(*(each.rows for each in told), strict=True)),
        notes=(*told[0].notes, f"the worst of {agreement.size} ranks: largest peaks, seconds of the slowest"),
    )


def _comparison(text: str, rank: int) -> Comparison:
    made = from_json(text, source=f"the comparison of rank {rank}")
    assert isinstance(made, Comparison)
    return made


def _merged_row(rows: Sequence[ComparisonRow]) -> ComparisonRow:
    slowest = max(rows, key=lambda row: row.measured_seconds or 0.0)
    peaks = [row.measured_peak_bytes for row in rows if row.measured_peak_bytes is not None]
    errors = [row.gradient_error for row in rows if row.gradient_error is not None]
    equal = [row.is_bit_equal for row in rows if row.is_bit_equal is not None]
    return msgspec.structs.replace(
        slowest,
        measured_peak_bytes=max(peaks, default=None),
        gradient_error=max(errors, default=None),
        is_bit_equal=all(equal) if equal else None,
    )
