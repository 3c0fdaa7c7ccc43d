"""The wiring: trace, cost, plan, apply, verify. The only place, besides the command line, that knows several stages.

Functions are loaded when they are first used: an estimate whose trace is cached needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plimsoll.pipeline.advice import advise
    from plimsoll.pipeline.attachment import attach
    from plimsoll.pipeline.diagnosing import diagnose
    from plimsoll.pipeline.estimating import estimate
    from plimsoll.pipeline.evidence import compare, verify
    from plimsoll.pipeline.explaining import explain
    from plimsoll.pipeline.fitting import fit
    from plimsoll.pipeline.plans import apply, load, plan
    from plimsoll.pipeline.probing import probe
    from plimsoll.pipeline.reporting import report

__all__ = [
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

_HOMES = {
    "advise": "advice",
    "apply": "plans",
    "attach": "attachment",
    "compare": "evidence",
    "diagnose": "diagnosing",
    "estimate": "estimating",
    "explain": "explaining",
    "fit": "fitting",
    "load": "plans",
    "plan": "plans",
    "probe": "probing",
    "report": "reporting",
    "verify": "evidence",
}
"""The file of every function."""


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'plimsoll.pipeline' has no attribute {name!r}")
    return getattr(import_module(f"plimsoll.pipeline.{_HOMES[name]}"), name)
