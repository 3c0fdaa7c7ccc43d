"""The stages of a session, in order, the cheapest proof first. One file each; a new one is one file and one line here."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from benchmarks.gpu_session.session import Session


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage. It starts only where ``least_seconds`` are left, and is stopped after ``most_seconds``.

    ``parts`` run in processes of their own, ``at_once`` side by side on a GPU; they share the stage's time.
    """

    name: str
    least_seconds: float
    most_seconds: float
    module: str = ""
    parts: tuple[str, ...] = ("",)
    at_once: int = 1

    def run(self, session: Session, part: str) -> None:
        importlib.import_module(f"benchmarks.gpu_session.stages.{self.module or self.name}").run(session, part)


STAGES = (
    Stage("environment", 15, 45),
    Stage("smoke", 25, 60),
    Stage("headline", 90, 170),
    Stage("sweep", 35, 70),
    Stage("offload", 40, 80),
    Stage("binding", 35, 60),
    Stage("longest", 40, 70),
    Stage("compiled", 70, 150),
    # Links are timed, so nothing else may run on the device.
    Stage("links", 20, 60, module="contracts", parts=("links",)),
    Stage(
        "contracts",
        60,
        200,
        parts=("codecs", "architectures", "budgets", "planted_faults", "lossy", "offload"),
        at_once=4,
    ),
    Stage("losing", 25, 40),
    Stage("published", 60, 100),
)
