"""A model, its regions and a step in; what a sensor expects forms to do to its gradient, and what they do, out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from engine.models import region_plan
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.plan import RegionPlan, ValueDecision
from plimsoll.engine.apply import apply_plan
from plimsoll.engine.sensing import Seen, Sensor
from plimsoll.session.training_step import relative_error
from samples import make_plan

Step = Callable[[nn.Module], None]
CODECS = ("int8", "int4", "bf16")


def gradients_of(model: nn.Module, step: Step) -> dict[str, torch.Tensor]:
    """The gradients of one step, from the same random state every time."""
    model.zero_grad()
    torch.manual_seed(5)
    step(model)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def region(name: str, forms: dict[str, str] | None = None) -> RegionPlan:
    """A region that keeps everything but for the values in other forms."""
    return region_plan(
        name,
        *(
            ValueDecision(value=value, decision=Decision.COMPRESS, bytes=0, form=form)
            for value, form in (forms or {}).items()
        ),
    )


@dataclass
class Watched:
    """A model after one watched step. ``plain`` are the unmanaged gradients, ``seen`` those of the watched step."""

    model: nn.Module
    step: Step
    names: Sequence[str]
    sensor: Sensor
    plain: dict[str, torch.Tensor]
    seen: dict[str, torch.Tensor]

    def values(self, name: str) -> dict[str, Seen]:
        return self.sensor.seen[name, 0]

    def sensitivity(self, name: str, entry: Seen) -> float:
        """Relative error of the whole gradient per unit of noise in one value."""
        energy = {key: float(gradient.norm()) ** 2 for key, gradient in self.plain.items()}
        later = tuple(f"{other}." for other in self.names[self.names.index(name) :])
        upstream = sum(share for key, share in energy.items() if not key.startswith(later))
        return math.sqrt((entry.parameter_error + entry.flow_error * upstream) / sum(energy.values()))

    def expected(self, name: str, value: str, codec: str) -> float:
        """The error that this codec on this value is expected to cause."""
        entry = self.values(name)[value]
        return self.sensitivity(name, entry) * entry.trials[codec].noise

    def lossy(self, codec: str) -> list[tuple[str, str]]:
        """Region and name of every value that this codec can take."""
        return [
            (name, value)
            for name in self.names
            for value, entry in self.values(name).items()
            if codec in entry.trials and entry.trials[codec].payload_bytes is not None
        ]

    def measured(self, packed: Sequence[tuple[str, str]], codec: str) -> float:
        """The error that this codec on these values does cause."""
        regions = tuple(region(n, {v: codec for other, v in packed if other == n}) for n in self.names)
        with apply_plan(self.model, make_plan(regions=regions)):
            return relative_error(self.plain, gradients_of(self.model, self.step))


def watch(model: nn.Module, names: Sequence[str], step: Step, *, wants_sensitivity: bool = True) -> Watched:
    """Run one step unmanaged and one watched."""
    plain = gradients_of(model, step)
    sensor = Sensor(CODECS, {(name, 0) for name in names}, wants_sensitivity=wants_sensitivity)
    with apply_plan(model, make_plan(regions=tuple(map(region, names))), sensor=sensor):
        seen = gradients_of(model, step)
        sensor.close()
    return Watched(model, step, names, sensor, plain, seen)
