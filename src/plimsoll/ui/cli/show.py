"""``plimsoll show FILE``: what another command saved, to read. Needs neither torch nor the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from plimsoll.artifacts.advice import Advice
from plimsoll.artifacts.estimate import Estimate
from plimsoll.artifacts.explained import Explanation
from plimsoll.artifacts.finding import Finding
from plimsoll.artifacts.fit import Fit
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.receipt import Receipt
from plimsoll.artifacts.store import Artifact, load_any
from plimsoll.artifacts.traffic import Traffic
from plimsoll.artifacts.verdict import Verdict
from plimsoll.ui.cli import options, ranks, terminal

FileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="What plan, verify, compare, probe, diagnose, advise, explain, estimate, fit or compress-gradients saved "
        "with --output.",
        show_default=False,
    ),
]


def show(file: FileArgument, *, explain: options.ExplainOption = False, json: options.JsonOption = False) -> None:
    """Show a saved plan, receipt, comparison, verdict, finding, advice, explanation, estimate, fit or gradient
    traffic.

    Example: plimsoll show plan.json --explain
    """
    with ranks.one_process("show", is_json=json):
        artifact = load_any(file)
        if explain and isinstance(artifact, Plan):
            terminal.print_result(artifact, artifact.explain(), is_json=json)
        else:
            terminal.print_result(artifact, _render(artifact), is_json=json)


def _render(artifact: Artifact) -> RenderableType:
    from plimsoll.ui.advice_terminal import render_advice
    from plimsoll.ui.comparison_terminal import render_comparison
    from plimsoll.ui.estimate_terminal import render_estimate
    from plimsoll.ui.explanation_terminal import render_explanation
    from plimsoll.ui.finding_terminal import render_finding
    from plimsoll.ui.fit_terminal import render_fit
    from plimsoll.ui.plan_terminal import render_plan
    from plimsoll.ui.receipt_terminal import render_receipt
    from plimsoll.ui.traffic_terminal import render_traffic
    from plimsoll.ui.verdict_terminal import render_verdict

    if isinstance(artifact, Plan):
        return render_plan(artifact)
    if isinstance(artifact, Receipt):
        return render_receipt(artifact)
    if isinstance(artifact, Verdict):
        return render_verdict(artifact)
    if isinstance(artifact, Advice):
        return render_advice(artifact)
    if isinstance(artifact, Finding):
        return render_finding(artifact)
    if isinstance(artifact, Estimate):
        return render_estimate(artifact)
    if isinstance(artifact, Fit):
        return render_fit(artifact)
    if isinstance(artifact, Explanation):
        return render_explanation(artifact)
    if isinstance(artifact, Traffic):
        return render_traffic(artifact)
    return render_comparison(artifact)
