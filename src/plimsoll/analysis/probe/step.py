"""Runs one training step of a probe, and records its loss, gradient norms, seconds and peak memory."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from plimsoll.analysis.probe.evidence import GradientRecord, StepRecord
from plimsoll.analysis.probe.stream import Call
from plimsoll.artifacts.receipt import finite
from plimsoll.errors import InvalidModel, InvalidProbe
from plimsoll.tracing.local_tensors import as_reals, densified
from plimsoll.tracing.meters.memory import PeakMeter, storage_bytes
from plimsoll.tracing.meters.timing import Marks
from plimsoll.tracing.optimizer import needs_closure
from plimsoll.tracing.recorder.calling import Loss, after_autocast, name_of, output_tensors, own_loss, scalar_loss
from plimsoll.tracing.recorder.foreign_leaves import foreign_leaves_kept
from plimsoll.tracing.recorder.untouched import private_copy

ELSEWHERE = "elsewhere"
"""The name of the block with all trainable parameters outside the plan's regions (modules that the plan decides about)."""


MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Blocks:
    """The model's trainable parameters, grouped into blocks: one for each region (a module that the plan decides about) of the
    plan, one for all other parameters.
    """

    def __init__(self, model: nn.Module, regions: Sequence[str]) -> None:
        names = sorted(dict.fromkeys(regions), key=len, reverse=True)
        members: dict[str, list[nn.Parameter]] = {name: [] for name in (*dict.fromkeys(regions), ELSEWHERE)}
        for path, parameter in model.named_parameters():
            if parameter.requires_grad:
                home = next((name for name in names if not name or path.startswith(f"{name}.")), ELSEWHERE)
                members[home].append(parameter)
        self.members: Mapping[str, list[nn.Parameter]] = {name: found for name, found in members.items() if found}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.members)

    def norms(self) -> tuple[float | None, tuple[float | None, ...]]:
        """Return the norm of the whole gradient, and a tuple with the norm of each block.

        A norm that is not finite is ``None``. The device is synchronised only once.
        """
        squares = []
        for parameters in self.members.values():
            gradients = [as_reals(parameter.grad) for parameter in parameters if parameter.grad is not None]
            if not gradients:
                squares.append(torch.zeros((), dtype=torch.float64))
                continue
            widest = functools.reduce(torch.promote_types, (each.dtype for each in gradients), torch.float32)
            norms = torch._foreach_norm(gradients, 2, widest)
            squares.append(torch.stack([norm.double().square() for norm in norms]).sum())
        found = torch.stack([square.to(squares[0].device) for square in squares]).tolist()
        whole = math.sqrt(math.fsum(found)) if all(map(math.isfinite, found)) else math.nan
        return finite(whole), tuple(finite(math.sqrt(each)) if math.isfinite(each) else None for each in found)

    def take_gradients(self) -> list[list[torch.Tensor | None]]:
        """Copy all gradients to the host. Return a list for each block of parameters, with one tensor for each parameter.

        They are copied to the host, because the gradients of two steps must not be on the device together.
        """
        return [
            [None if p.grad is None else densified(p.grad).to("cpu", copy=True) for p in parameters]
            for parameters in self.members.values()
        ]

    def compare(self, step: int, baseline: list[list[torch.Tensor | None]]) -> GradientRecord | None:
        """Compare the model's present gradients with the gradients of a step without a plan, block by block.

        ``None`` if any value is not finite.
        """
        columns: tuple[list[float], list[float], list[float]] = ([], [], [])
        for parameters, theirs in zip(self.members.values(), baseline, strict=True):
            sums = [0.0, 0.0, 0.0]
            for parameter, other in zip(parameters, theirs, strict=True):
                mine = None if parameter.grad is None else as_reals(parameter.grad).to("cpu", torch.float64).flatten()
                one = None if other is None else as_reals(other).double().flatten()
                sums[0] += 0.0 if mine is None or one is None else float(one @ mine)
                sums[1] += 0.0 if one is None else float(one @ one)
                sums[2] += 0.0 if mine is None else float(mine @ mine)
            for column, total in zip(columns, sums, strict=True):
                column.append(total)
        if not all(math.isfinite(each) for column in columns for each in column):
            return None
        products, ones, others = (tuple(column) for column in columns)
        return GradientRecord(step=step, products=products, baseline_squares=ones, plan_squares=others)


class Trainer:
    """Runs and measures training steps and evaluations of one model."""

    def __init__(self, model: nn.Module, loss: Loss | None, blocks: Blocks) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.loss = loss
        self.blocks = blocks

    def backward(self, call: Call) -> float:
        """Run forward, loss and backward for one batch, and return the loss. Gradients of earlier steps are deleted first."""
        for parameter in self.model.parameters():
            parameter.grad = None
        # The caller's autocast stays on for the whole probe. Without this, each step would use the first step's cast weights.
        torch.clear_autocast_cache()
        output = self.model(*call.args, **call.kwargs)
        loss = scalar_loss(output, self.loss)
        with after_autocast(self.device.type), foreign_leaves_kept(self.model, loss):
            loss.backward()
        return float(loss.detach())

    def step(
        self, number: int, call: Call, optimizer: torch.optim.Optimizer, watch: Callable[[], None] | None = None
    ) -> StepRecord:
        """Run and time one step. If the loss or the gradient is not finite, the optimizer does not step.

        Args:
            number: the number of the step, counted from 0.
            call: the batch.
            optimizer: an optimizer of the model's parameters.
            watch: called between backward and the optimizer's step; its time is not counted.
        """
        call = self.own(call)
        # CPU time ignores other programs, but it adds up over threads. So with several threads, wall time is measured.
        clock = Marks(self.device, time.process_time if torch.get_num_threads() == 1 else time.perf_counter)
        record = self._step(number, call, optimizer, functools.partial(_running, clock), watch)
        at = [0.0, *clock.seconds()]
        seconds = sum(end - begin for begin, end in zip(at[::2], at[1::2], strict=True))
        return msgspec.structs.replace(record, seconds=seconds)

    def measured_step(self, number: int, call: Call, optimizer: torch.optim.Optimizer) -> StepRecord:
        """Run one step and measure its peak, and return the step's record.

        The peak is in bytes, and includes parameters, buffers, batch and optimizer state.
        """
        call = self.own(call)
        for parameter in self.model.parameters():
            parameter.grad = None
        held = [*self.model.parameters(), *self.model.buffers(), *output_tensors((call.args, call.kwargs))]
        held += output_tensors(list(optimizer.state.values()))
        static_bytes = storage_bytes(held, self.device)
        with PeakMeter(self.device) as meter:
            record = self._step(number, call, optimizer)
        return msgspec.structs.replace(record, peak_bytes=static_bytes + meter.peak_bytes)

    def _step(
        self,
        number: int,
        call: Call,
        optimizer: torch.optim.Optimizer,
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
        watch: Callable[[], None] | None = None,
    ) -> StepRecord:
        with timed():
            loss = self.backward(call)
        norm, block_norms = self.blocks.norms()
        if watch is not None:
            watch()
        if math.isfinite(loss) and norm is not None:
            with timed(), after_autocast(self.device.type):  # it also clears the casts of the old weights
                optimizer.step()
        return StepRecord(step=number, loss=finite(loss), gradient_norm=norm, block_norms=block_norms)

    def evaluate(self, calls: Sequence[Call]) -> tuple[float | None, ...]:
        """Return the loss of each batch, in evaluation mode and without gradients. A loss that is not finite is ``None``."""
        flags = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                return tuple(finite(self._evaluated(self.own(call))) for call in calls)
        finally:
            for module, flag in flags:
                module.training = flag

    def _evaluated(self, call: Call) -> float:
        output = self.model(*call.args, **call.kwargs)
        if self.loss is not None:
            return float(self.loss(output))
        own = own_loss(output)
        return float(output if own is None else own)

    def own(self, call: Call) -> Call:
        """Copy the batch to the model's device, into new storages, because a model may write to its inputs."""
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), (call.args, call.kwargs))
        args, kwargs = private_copy((args, kwargs))
        return Call(args, kwargs)


def check_trainable(model: nn.Module) -> None:
    """Raise if the model cannot be trained here.

    Raises:
        InvalidModel: the model does not have trainable parameters, or its parameters are on the meta device.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained or any(parameter.is_meta for parameter in model.parameters()):
        raise InvalidModel(
            f"{type(model).__name__} cannot be trained here.",
            why="its parameters are on the meta device, where they have no memory"
            if trained
            else "none of its parameters requires a gradient",
            next="probe the model on the device that it trains on",
        )


def make_one(model: nn.Module, optimizer: MakeOptimizer) -> torch.optim.Optimizer:
    """Return an optimizer of the model's trainable parameters.

    Raises:
        InvalidProbe: ``optimizer`` does not make a ``torch.optim.Optimizer``, or makes one whose step needs a closure.
    """
    made = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    if not isinstance(made, torch.optim.Optimizer):
        raise InvalidProbe(
            f"optimizer= returned a {type(made).__name__}, which is not a torch.optim.Optimizer.",
            why="each of the two training runs needs its own optimizer",
            next="pass torch.optim.AdamW, or a function of the parameters that returns an optimizer",
        )
    if needs_closure(made):
        raise InvalidProbe(
            f"probe cannot train with {type(made).__name__}.",
            why="its step runs forward and backward itself, through a closure, and probe runs and compares each once per step",
            next="probe the plan with another optimizer, such as torch.optim.SGD",
        )
    return made


def describe_optimizer(made: torch.optim.Optimizer) -> str:
    """Return the optimizer's class and its numeric defaults as text: ``AdamW(lr=0.001, weight_decay=0.01)``."""
    shown = {
        name: value
        for name, value in made.defaults.items()
        if isinstance(value, int | float | tuple) and not isinstance(value, bool)
    }
    return f"{type(made).__name__}({', '.join(f'{name}={value}' for name, value in sorted(shown.items()))})"


def optimizer_settings(made: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return every setting of every group of parameters as text, to tell optimizers apart. Objects are named by their type."""

    def text(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return str(value.tolist())
        return repr(value) if isinstance(value, bool | int | float | complex | str | None) else name_of(type(value))

    groups = [{**group, "params": len(group["params"])} for group in made.param_groups]
    return tuple(f"{keystr(path)}={text(value)}" for path, value in tree_flatten_with_path(groups)[0])


@contextmanager
def _running(clock: Marks) -> Iterator[None]:
    clock.mark()
    yield
    clock.mark()
