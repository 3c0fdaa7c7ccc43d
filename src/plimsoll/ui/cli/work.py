"""Work that several commands share: load a target with its optimizer and data, plan it, and check that the plan is usable.

A target is the model and batch that the command line names. A target built from a configuration is probed (trained for a
comparison) with real data. Language models get the source of Python's standard library, one byte per token; image classifiers
get scikit-learn's digits if scikit-learn is installed. Examples do not overlap, and their order is drawn once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import typer

import plimsoll
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.store import load_plan
from plimsoll.errors import BudgetBelowFloor, InvalidProbe, PlanNotUsable
from plimsoll.estimator.targets.target import Target, TargetOptions, load_target
from plimsoll.tracing.regions import find_regions
from plimsoll.ui.cli.early import TrainedSize
from plimsoll.ui.cli.options import Building, Compiled, OptimizerName, Planning
from plimsoll.ui.cli.terminal import is_first_rank, is_under_torchrun, show_progress, stderr
from plimsoll.ui.demo.story import VOCABULARY, read_corpus

if TYPE_CHECKING:
    import torch

    from plimsoll.analysis.probe.step import MakeOptimizer

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Data: a target (a model with its batch) and its optimizer. With a saved plan, ``saved`` is this plan."""

    target: Target
    optimizer: torch.optim.Optimizer | None
    saved: Plan | None = None

    def ask(self, verb: Callable[..., R], *args: object, **options: object) -> R:
        """Call ``verb``, a public function such as ``plimsoll.plan``, with the target's model, batch, loss and optimizer. Show
        progress, and return the function's result.
        """
        step = {"loss": self.target.loss, "optimizer": self.optimizer}
        with show_progress() as report:
            return verb(self.target.model, self.target.batch, *args, **step, progress=report, **options)


def load(
    text: str,
    building: Building,
    *,
    is_meta: bool = False,
    compiled: Compiled | None = None,
    budget: str | None = None,
) -> Loaded:
    """Load a target (a model with its batch), print its notes, and make its optimizer.

    Args:
        text: the target, as the user typed it.
        building: the options for building the target.
        is_meta: build the target on the meta device, without memory for weights, because its device is not present.
        compiled: which part of the model torch.compile compiles; by default, nothing is compiled.
        budget: the budget of the step. A model that needs more without any activations is refused before it is built.
    """

    def check(model: torch.nn.Module) -> None:
        size = _size(text, model, building)
        if not is_meta and building.device == "cpu":
            size.refuse_on_this_machine(budget)
        size.refuse_under(budget)

    how = TargetOptions(
        batch=building.batch, sequence=building.seq, device=building.device, is_meta=is_meta, check=check
    )
    with show_progress() as report:
        report(f"loading {text}", 0.0)
        target = load_target(text, how)
        if not target.is_configured and not is_under_torchrun():
            # Whether all its parameters get a gradient is unknown before a trace, so only the parameters count.
            replace(_size(text, target.model, building), trained_bytes=0).refuse_under(budget)
        if compiled is not None:  # compile the whole model, or each repeated block separately
            for module in [target.model] if compiled is Compiled.WHOLE else find_regions(target.model).values():
                module.compile()
    for note in target.notes if is_first_rank() else ():
        stderr().print(f"Note: {note}", markup=False)
    trained = [parameter for parameter in target.model.parameters() if parameter.requires_grad]
    has_none = building.optimizer is OptimizerName.NONE or not trained
    return Loaded(target=target, optimizer=None if has_none else optimizer_factory(building.optimizer)(trained))


def _size(text: str, model: torch.nn.Module, building: Building) -> TrainedSize:
    parameters = list(model.parameters())
    return TrainedSize(
        target=text,
        parameters_bytes=sum(parameter.nbytes for parameter in parameters),
        trained_bytes=sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        optimizer=building.optimizer,
    )


def optimizer_factory(name: OptimizerName) -> MakeOptimizer:
    """Return a function that makes the named optimizer from a list of parameters.

    Raises:
        InvalidProbe: the name is ``none``, but a probe must train.
    """
    import torch

    if name is OptimizerName.NONE:
        raise InvalidProbe(
            "--optimizer none cannot be used with probe.",
            why="probe compares training runs, so its steps must change the weights",
            next="leave --optimizer out for AdamW, or give --optimizer sgd",
        )
    sgd = functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    return torch.optim.AdamW if name is OptimizerName.ADAMW else sgd


def load_saved(file: Path | None) -> Plan | None:
    """Load the plan that ``--plan`` names, or return ``None`` if ``--plan`` was not given."""
    return None if file is None else load_plan(file)


def make_plan(loaded: Loaded, asked: Planning, device_profile: str | None = None) -> Plan:
    """Plan the step of the loaded target (a model with its batch) with the given options."""
    return loaded.ask(plimsoll.plan, strategy=asked.strategy, device_profile=device_profile, **asked.words())


def refuse_unusable(plan: Plan) -> None:
    """Exit with an error code if the plan must not be applied, so that a time-out is never reported as success.

    Raises:
        typer.Exit: with the code of ``BudgetBelowFloor`` or ``PlanNotUsable``.
    """
    if not plan.status.is_usable:
        below_floor = plan.budget_bytes is not None and plan.budget_bytes < plan.floor_bytes
        raise typer.Exit(BudgetBelowFloor.exit_code if below_floor else PlanNotUsable.exit_code)


@dataclass(frozen=True, slots=True)
class Data:
    """The batches to train on, and their description in words.

    If the description is empty, the description of the stream of batches is used instead.
    """

    batches: Any
    description: str = ""


class PickedBatches(Sequence[dict[str, Any]]):
    """A sequence of batches that are put together when they are read. Their order was drawn once, from a fixed seed.

    Args:
        columns: tensors whose first dimension counts the examples, by argument name.
        batch: examples per batch.
        device: the device of the batches.
    """

    def __init__(self, columns: dict[str, torch.Tensor], *, batch: int, device: torch.device) -> None:
        import torch

        self._columns, self._batch, self._device = columns, batch, device
        self._order = torch.randperm(len(next(iter(columns.values()))), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._order) // self._batch

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        picks = self._order[place * self._batch : (place + 1) * self._batch]
        return {name: column[picks].to(self._device) for name, column in self._columns.items()}


def data_for(target: Target) -> Data:
    """Return the data to probe a target with.

    This is the target's own stream if it has one, real data if the target was built from a configuration, and else its single
    batch.
    """
    if target.batches is not None or not target.is_configured:
        return Data(target.batch if target.batches is None else target.batches)
    if target.batch.keys() == {"input_ids", "labels"} and target.batch["labels"].dim() > 1:
        return _text(target)
    if "pixel_values" in target.batch:
        return _digits(target)
    return Data(target.batch, "one random batch: Plimsoll has no real data for this architecture")


def _text(target: Target) -> Data:
    import torch

    model: Any = target.model
    batch, sequence = target.batch["input_ids"].shape
    vocabulary = model.config.get_text_config().vocab_size
    if vocabulary < VOCABULARY:
        return Data(target.batch, f"one random batch: a vocabulary of {vocabulary} is too small for bytes")
    text = torch.frombuffer(bytearray(read_corpus()), dtype=torch.uint8)
    pieces = text[: len(text) // sequence * sequence].view(-1, sequence).long()
    if len(pieces) < batch:
        return Data(target.batch, f"one random batch: the standard library has fewer than {batch} × {sequence} tokens")
    found = PickedBatches({"input_ids": pieces, "labels": pieces}, batch=batch, device=target.batch["input_ids"].device)
    return Data(found, f"Python's standard library, one byte per token, {len(found)} batches of {batch} × {sequence}")


def _digits(target: Target) -> Data:
    import torch
    from torch.nn.functional import interpolate

    try:
        from sklearn.datasets import load_digits
    except ImportError:
        return Data(target.batch, "one random batch: scikit-learn, which contains real images, is not installed")
    model: Any = target.model
    pixels = target.batch["pixel_values"]
    batch, channels, height, width = pixels.shape
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=pixels.dtype)[:, None]
    images = interpolate(images, size=(height, width), mode="bilinear").expand(-1, channels, -1, -1)
    classes = model.config.num_labels
    columns = {"pixel_values": images, "labels": torch.tensor(digits.target).remainder(classes)}
    found = PickedBatches(columns, batch=batch, device=pixels.device)
    modulo = "" if classes >= 10 else f" (the digit modulo {classes})"
    return Data(found, f"scikit-learn's handwritten digits{modulo}, {len(found)} batches of {batch}")
