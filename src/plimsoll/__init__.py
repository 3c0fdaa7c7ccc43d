"""Fits PyTorch training under a memory budget in bytes, at the least cost in time, and proves that it did.

Example:
    >>> plan = plimsoll.plan(model, batch, budget="70GiB")  # doctest: +SKIP
    >>> with plimsoll.apply(model, plan):  # doctest: +SKIP
    ...     train(model)

Names are loaded when they are first used, so ``import plimsoll`` loads neither torch nor scipy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plimsoll.artifacts.base import ArtifactBase

if TYPE_CHECKING:
    from plimsoll.analysis.advise.advise import advise
    from plimsoll.analysis.diagnose.diagnose import diagnose
    from plimsoll.analysis.explain.explain import explain
    from plimsoll.analysis.probe.probe import probe
    from plimsoll.analysis.verify.compare import compare
    from plimsoll.analysis.verify.verify import verify
    from plimsoll.artifacts.plan import Plan
    from plimsoll.artifacts.receipt import Receipt
    from plimsoll.errors import PlimsollError
    from plimsoll.estimator.estimate import estimate
    from plimsoll.estimator.fit.fit import fit
    from plimsoll.integrations.callback import PlimsollCallback as PlimsollCallback
    from plimsoll.session.attach import attach
    from plimsoll.session.plan import apply, load, plan
    from plimsoll.ui.html.page import report

__all__ = [
    "Plan",
    "PlimsollError",
    "Receipt",
    "advise",
    "apply",
    "attach",
    "compare",
    "diagnose",
    "estimate",
    "explain",
    "fit",
    "load",
    "plan",
    "probe",
    "report",
    "verify",
]

__version__ = "0.1.0"

_HOMES = {
    "Plan": "plimsoll.artifacts.plan",
    "PlimsollError": "plimsoll.errors",
    "Receipt": "plimsoll.artifacts.receipt",
    "advise": "plimsoll.analysis.advise.advise",
    "apply": "plimsoll.session.plan",
    "attach": "plimsoll.session.attach",
    "compare": "plimsoll.analysis.verify.compare",
    "diagnose": "plimsoll.analysis.diagnose.diagnose",
    "estimate": "plimsoll.estimator.estimate",
    "explain": "plimsoll.analysis.explain.explain",
    "fit": "plimsoll.estimator.fit.fit",
    "load": "plimsoll.session.plan",
    "plan": "plimsoll.session.plan",
    "probe": "plimsoll.analysis.probe.probe",
    "report": "plimsoll.ui.html.page",
    "verify": "plimsoll.analysis.verify.verify",
}


def _text_of(artifact: object, *, with_details: bool = False) -> str:
    from plimsoll.ui.plain import render_plain
    from plimsoll.ui.views import view

    return render_plain(view(artifact), with_details=with_details)


def _summary_of(artifact: object) -> str:
    from plimsoll.ui.plain import summarize
    from plimsoll.ui.views import view

    return summarize(view(artifact))


def _html_of(artifact: object | None, *, text: str = "") -> str:
    from plimsoll.ui.html.notebook import render_notebook
    from plimsoll.ui.views import view

    return render_notebook(None if artifact is None else view(artifact), text=text)


def _policy_text() -> str:
    from importlib import resources

    return resources.files("plimsoll").joinpath("integrations", "sac_policy.py").read_text(encoding="utf-8")


ArtifactBase.render = staticmethod(_text_of)
ArtifactBase.summarize = staticmethod(_summary_of)
ArtifactBase.to_html = staticmethod(_html_of)
ArtifactBase.policy_text = staticmethod(_policy_text)


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name == "distributed":
        return import_module("plimsoll.distributed")
    if name == "PlimsollCallback":  # not in __all__: it is for frameworks that may not be installed
        return import_module("plimsoll.integrations.callback").PlimsollCallback
    if name not in _HOMES:
        raise AttributeError(f"module 'plimsoll' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "PlimsollCallback", "__version__"])
