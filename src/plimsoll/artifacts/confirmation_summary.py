"""A confirmation in, rows of words out: what was off, and what the plan solved again takes. No torch, no rich in here."""

from __future__ import annotations

from plimsoll.artifacts.confirmation import Claim, Confirmation
from plimsoll.units import format_bytes, format_seconds, format_share


def confirmation_rows(confirmation: Confirmation) -> list[tuple[str, str]]:
    """What the device says about a plan made without it, as pairs of name and text."""
    rows = [
        ("planned for", f"{confirmation.cost_device}, with the costs of its roofline"),
        ("on the device", _finding(confirmation)),
    ]
    if confirmation.revised is not None:
        rows += [
            ("given plan", describe_claim(confirmation.given)),
            ("revised plan", f"{describe_claim(confirmation.revised)}: {confirmation.revised_verdict}"),
        ]
    elif confirmation.obstacle:
        rows.append(("revised plan", f"none: {confirmation.obstacle}"))
    return rows


def describe_claim(claim: Claim) -> str:
    """Predicted beside measured, in one line."""
    return (
        f"peak predicted {format_bytes(claim.predicted_peak_bytes)}, measured {format_bytes(claim.measured_peak_bytes)}; "
        f"forward and backward predicted {format_seconds(claim.predicted_seconds)}, measured "
        f"{format_seconds(claim.measured_seconds)} ± {format_seconds(claim.measured_spread_seconds)}"
    )


def _finding(confirmation: Confirmation) -> str:
    """Which of peak and time is off, and by how much."""
    given, found = confirmation.given, []
    if confirmation.budget_bytes is not None and confirmation.is_over_budget:
        over_bytes = given.measured_peak_bytes - confirmation.budget_bytes
        found.append(f"the peak is {format_bytes(over_bytes)} above the budget")
    elif confirmation.is_peak_off:
        found.append(f"the predicted peak is off by {format_share(given.peak_error)}")
    if confirmation.is_time_off:
        found.append(f"the predicted time is off by {format_share(given.seconds_error)}")
    limits = f"{confirmation.peak_tolerance:.0%} of the peak and {confirmation.seconds_tolerance:.0%} of the time are allowed"
    if not found:
        errors = f"the peak is off by {format_share(given.peak_error)}, the time by {format_share(given.seconds_error)}"
        return f"confirmed: {errors} ({limits})"
    return f"{' and '.join(found)} ({limits})"
