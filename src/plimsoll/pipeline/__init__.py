"""The wiring: trace, cost, plan, apply, verify. The only place, besides the command line, that knows several stages."""

from plimsoll.pipeline.advice import advise
from plimsoll.pipeline.attachment import attach
from plimsoll.pipeline.diagnosing import diagnose
from plimsoll.pipeline.evidence import compare, verify
from plimsoll.pipeline.fitting import fit
from plimsoll.pipeline.plans import apply, load, plan
from plimsoll.pipeline.probing import probe
from plimsoll.pipeline.reporting import report

__all__ = ["advise", "apply", "attach", "compare", "diagnose", "fit", "load", "plan", "probe", "report", "verify"]
