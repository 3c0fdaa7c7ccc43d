"""Finds changes that make a step fit when it does not fit under any plan. Each change is tried alone.

Every change is applied to the smallest point (a micro-batch and sequence) of the search, which is then evaluated again: more
memory, half the sequence, no accumulation, and compression of saved activations. An 8-bit optimizer and more ranks are
evaluated by estimating such a job. Changes that cannot be evaluated are listed as unsupported, with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from plimsoll.artifacts.fit import FitChange, FitPoint
from plimsoll.errors import PlimsollError
from plimsoll.estimator.estimate import estimate
from plimsoll.estimator.fit.search import Shape
from plimsoll.estimator.fit.single_device import Accumulation, FitTraining, SingleDevice, described
from plimsoll.estimator.optimizers import known_optimizers
from plimsoll.session.options import PlanOptions
from plimsoll.session.step_planner import StepPlanner
from plimsoll.units import format_bytes_up

_TOLERATED = "1%"
"""The relative error of gradients that the suggestion to compress activations allows."""
_RANKS = 8
"""The number of ranks in the suggestion to shard with ZeRO: the devices of one node, for most accelerators."""

_ADDING_STATE = ("momentum", "centered", "amsgrad")
"""Options of torch's optimizers that add a tensor of state for each parameter. By default they are off."""
_ALWAYS_MOMENTUM = ("muon",)
"""The optimizers whose momentum is on by default."""


def find_changes(training: FitTraining, device: SingleDevice, smallest: FitPoint) -> tuple[FitChange, ...]:
    """Return changes that would help when no point (a micro-batch and sequence) of a search fits. Each change is applied to
    ``smallest``, the smallest point.

    Changes that make the point fit come first, then changes with more throughput.
    """
    finder = _Finder(training, device, smallest)
    found = list(finder.changes())
    rank = {True: 0, False: 1, None: 2}
    return tuple(
        sorted(found, key=lambda c: (rank[c.does_fit], -(c.items_per_second or 0.0), c.predicted_peak_bytes or 0))
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Finder:
    training: FitTraining
    device: SingleDevice
    smallest: FitPoint

    @property
    def shape(self) -> Shape:
        """The micro-batch (examples and tokens) of the smallest point of the search."""
        return Shape(self.smallest.micro_batch, self.smallest.sequence)

    def changes(self) -> Iterator[FitChange]:
        """Yield each change that applies to this model and batch."""
        yield self._more_memory()
        if self.training.batches.items_name == "tokens" and self.shape.sequence > 1:
            yield self._half_the_sequence()
        if self.device.accumulation.of(self.shape.batch) > 1:
            yield self._no_accumulation()
        yield self._compression()
        yield from self._estimated()

    def _more_memory(self) -> FitChange:
        floor_bytes = self.smallest.predicted_peak_bytes
        more = format_bytes_up(floor_bytes - self.device.budget_bytes)
        looser = self._with(budget_bytes=floor_bytes)
        return self._change(f"{more} more memory", looser.evaluate(self.shape))

    def _half_the_sequence(self) -> FitChange:
        half = Shape(self.shape.batch, self.shape.sequence // 2)
        return self._change(f"half the sequence, {half.sequence} tokens", self._with().evaluate(half))

    def _no_accumulation(self) -> FitChange:
        alone = self._with(accumulation=Accumulation())
        return self._change("no accumulation: gradients of one micro-batch", alone.evaluate(self.shape))

    def _compression(self) -> FitChange:
        name = f"compress saved tensors, gradient error up to {_TOLERATED}"
        if self.training.is_elsewhere:
            return FitChange(
                name=name, does_fit=None, note="time and error of codecs can be measured only on the device itself"
            )
        trace, costs = self.device.traced(self.shape)
        options = PlanOptions.read(allow=("recompute", "compress"), max_error=_TOLERATED)
        budget_bytes = self.device.budget_bytes
        planner = StepPlanner(trace, costs, options, budget_bytes)
        planner.try_forms(self.training.task(self.shape).step)
        plan = planner.solve(budget_bytes, raise_below_floor=False)
        note = f"expected error {plan.predicted_error:.2%}, not measured" if not plan.is_lossless else ""
        return self._change(name, described(self.smallest, plan), note)

    def _estimated(self) -> Iterator[FitChange]:
        """Yield changes of the optimizer (8 bits) and of the layout (more ranks), each evaluated with ``estimate``."""
        optimizer = self._optimizer_name()
        if optimizer is not None and optimizer not in known_optimizers():
            note = f"estimates do not support the optimizer {optimizer}"
            yield FitChange(name="an 8-bit optimizer, or more ranks", does_fit=None, note=note)
            return
        narrow = f"{optimizer}-8bit"
        if narrow in known_optimizers():
            yield self._estimate(f"{narrow} in place of {optimizer}", "", narrow)
        for stage in (1, 2, 3):
            if stage > 1 or optimizer is not None:  # stage 1 shards only the optimizer's state
                name = f"ZeRO stage {stage} over {_RANKS} ranks"
                yield self._estimate(name, f"dp={_RANKS},zero={stage}", optimizer or "none")
        yield self._estimate("tensor parallel over 2 ranks", "tp=2", optimizer or "none")

    def _optimizer_name(self) -> str | None:
        """Return the name of the optimizer as in estimates, with the options that add state to it."""
        optimizer = self.training.optimizer
        if optimizer is None:
            return None
        name = type(optimizer).__name__.lower()
        options = [key for key in _ADDING_STATE if any(group.get(key) for group in optimizer.param_groups)]
        if name == "sgd" and options == ["momentum"]:
            return "sgd-momentum"
        return name if name in _ALWAYS_MOMENTUM or not options else f"{name} with {' and '.join(options)}"

    def _estimate(self, name: str, layout: str, optimizer: str) -> FitChange:
        """Estimate the same micro-batch on another layout or with another optimizer, and return the change with its peak.

        Give a speed only if this fit's own speeds come from a roofline model as well, because measured and modelled speeds
        cannot be compared.
        """
        training, count = self.training, self.device.accumulation.of(self.shape.batch)
        if training.options.regions is not None:
            return FitChange(
                name=name, does_fit=None, note="estimates choose regions themselves, but regions= was passed"
            )
        try:
            found = estimate(
                training.model,
                training.batches.of(self.shape),
                device=training.options.device_profile or _name_here(training),
                optimizer=optimizer,
                layout=",".join(part for part in (layout, f"micro-batches={count}" if count > 1 else "") if part),
                strategy="auto",
                budget=self.device.budget_bytes,
                loss=training.loss,
            )
        except PlimsollError as error:
            return FitChange(name=name, does_fit=None, note=error.found)
        peak_bytes = max(stage.allocated_bytes for stage in found.stages)
        does_fit = peak_bytes <= self.device.budget_bytes
        speed = found.throughput.samples_per_second * self.shape.sequence / found.layout.ranks
        is_comparable = does_fit and training.is_elsewhere
        return FitChange(
            name=name,
            does_fit=does_fit,
            predicted_peak_bytes=peak_bytes,
            items_per_second=speed if is_comparable else None,
            note="per rank" if found.layout.ranks > 1 else "",
        )

    def _with(self, *, budget_bytes: int | None = None, accumulation: Accumulation | None = None) -> SingleDevice:
        """Return an object like the given one that evaluates steps under another budget or another accumulation. Both use the
        same traces.
        """
        return dataclasses.replace(
            self.device,
            budget_bytes=self.device.budget_bytes if budget_bytes is None else budget_bytes,
            accumulation=accumulation or self.device.accumulation,
            plans={},
            unmanaged={},
        )

    def _change(self, name: str, point: FitPoint, note: str = "") -> FitChange:
        return FitChange(
            name=name,
            does_fit=point.does_fit,
            predicted_peak_bytes=point.predicted_peak_bytes,
            items_per_second=point.items_per_second if point.does_fit else None,
            note=note,
        )


def _name_here(training: FitTraining) -> str:
    """Return the catalogue's name for the device that the model is on."""
    home = next(training.model.parameters()).device
    return torch.cuda.get_device_name(home) if home.type == "cuda" else home.type
