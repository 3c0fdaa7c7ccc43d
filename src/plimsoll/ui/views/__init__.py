"""Maps each kind of artifact (a saved result, such as a plan) to its view: a function that makes the content to show (a
document).

A new kind of artifact needs one file in this folder and one line in the table below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plimsoll.artifacts.advice import Advice
from plimsoll.artifacts.comparison import Comparison
from plimsoll.artifacts.estimate import Estimate
from plimsoll.artifacts.explained import Explanation
from plimsoll.artifacts.finding import Finding
from plimsoll.artifacts.fit import Fit
from plimsoll.artifacts.lengths import SequenceLengths
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.receipt import Receipt
from plimsoll.artifacts.traffic import Traffic
from plimsoll.artifacts.verdict import Verdict
from plimsoll.ui.document import Document
from plimsoll.ui.views.advice import view_advice
from plimsoll.ui.views.comparison import view_comparison
from plimsoll.ui.views.estimate import view_estimate
from plimsoll.ui.views.explanation import view_explanation
from plimsoll.ui.views.finding import view_finding
from plimsoll.ui.views.fit import view_fit
from plimsoll.ui.views.lengths import view_lengths
from plimsoll.ui.views.plan import view_plan
from plimsoll.ui.views.receipt import view_receipt
from plimsoll.ui.views.traffic import view_traffic
from plimsoll.ui.views.verdict import view_verdict

_VIEWS: dict[type, Callable[[Any], Document]] = {
    Plan: view_plan,
    Receipt: view_receipt,
    Comparison: view_comparison,
    Verdict: view_verdict,
    Finding: view_finding,
    Advice: view_advice,
    Estimate: view_estimate,
    Fit: view_fit,
    SequenceLengths: view_lengths,
    Explanation: view_explanation,
    Traffic: view_traffic,
}


def view(artifact: object) -> Document:
    """Make the document (the content to show) of an artifact. Any renderer (plain text, terminal or page) can show the
    document.
    """
    return _VIEWS[type(artifact)](artifact)
