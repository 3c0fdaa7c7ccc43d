"""Loads a model with its batch and loss from text: a function to call, a configuration, or a catalogue name."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from plimsoll.artifacts.job import Precision
from plimsoll.errors import InvalidTarget
from plimsoll.estimator.targets.recipe import Recipe, explain_import, find_recipe, split_target

if TYPE_CHECKING:
    import torch

_HERE = "cpu"
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """Options for building a target (a model with its batch) from a configuration. A target that is a function decides these
    itself.

    With ``is_meta`` the model is on the meta device: enough to plan for a device that this machine lacks. ``precision`` is
    ``None`` for the configuration's own dtypes. ``check`` receives the model on the meta device, before memory is allocated for
    it; it raises if the model is too large.
    """

    batch: int | None = None
    sequence: int | None = None
    device: str = _HERE
    is_meta: bool = False
    precision: Precision | None = None
    check: Callable[[torch.nn.Module], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A loaded target, as data: a model with its batch, and a loss if the model does not compute one.

    ``batches`` is the stream of batches whose first is ``batch``, or ``None`` if there is only one batch. With
    ``is_configured`` the model was built from a configuration, and ``batch`` is random. ``precision`` chooses the autocast of
    its step; ``notes`` say what the target does not show.
    """

    model: torch.nn.Module
    batch: Any
    loss: Callable[[Any], torch.Tensor] | None = None
    batches: Iterable[Any] | None = None
    is_configured: bool = False
    precision: Precision | None = None
    notes: tuple[str, ...] = ()

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Run the forward pass under autocast if the precision is mixed; otherwise do nothing."""
        import torch

        name = None if self.precision is None else self.precision.autocast_dtype
        if name is None:
            yield
            return
        home = next((parameter.device.type for parameter in self.model.parameters()), _HERE)
        with torch.autocast(_HERE if home == "meta" else home, dtype=getattr(torch, name)):
            yield


def load_target(text: str, options: TargetOptions) -> Target:
    """Load the target (model, batch and loss) that the command line names.

    Args:
        text: ``package.module:function`` (the working directory is importable), the path of a ``config.json``, ``timm/NAME``,
            ``diffusers/CLASS``, or a name from the catalogue.
        options: batch size, sequence length, device and precision, for targets other than functions.

    Raises:
        InvalidTarget: it cannot be imported, does not exist, or does not return a model and a batch.
    """
    recipe = find_recipe(text)
    if recipe is None:
        refuse_sizes(text, options)
        return _load_function(text, options.precision)
    return build(recipe, options)


def refuse_sizes(text: str, options: TargetOptions) -> None:
    """Raise an error if options are given that a target function (a user's function that returns model and batch) would ignore,
    because it chooses its own batch and device.
    """
    ignored = [
        name
        for name, is_given in (
            ("--batch", options.batch is not None),
            ("--seq", options.sequence is not None),
            ("--device", options.device != _HERE),
        )
        if is_given
    ]
    if ignored:
        raise InvalidTarget(
            f"{' and '.join(ignored)} would not have an effect on {text}.",
            why="the function itself chooses batch and device; these options are for configurations",
            next=f"leave {'it' if len(ignored) == 1 else 'them'} out, and set sizes and device inside the function",
        )


def check_precision(model: torch.nn.Module, precision: Precision | None, name: str) -> None:
    """Raise an error if the parameters of a given model do not have the dtype that ``precision`` computes in.

    A model that the caller made is traced in its own dtypes, so an estimate would name another precision than it computes.
    Mixed precision is an autocast around the model's own dtypes, so it applies to every model. Some models keep a few
    parameters in another dtype, so the dtype with the most elements counts.

    Raises:
        InvalidTarget: the parameters have another dtype.
    """
    if precision is None or precision.is_mixed:
        return
    counts: Counter[str] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    [(found, _)] = counts.most_common(1) or [(precision.parameter_dtype, 0)]
    if found == precision.parameter_dtype:
        return
    raise InvalidTarget(
        f"A step in {precision.value} needs parameters in {precision.parameter_dtype}; those of {name} are in {found}.",
        why="a model that is already built is traced in its own dtypes",
        next=f"convert it with model.to(torch.{precision.parameter_dtype}), or leave the precision out; "
        "bf16-mixed and fp16-mixed do not change parameters",
    )


def _load_function(text: str, precision: Precision | None) -> Target:
    module_name, function_name = split_target(text)
    with _importable_working_directory():
        function = _find_function(text, module_name, function_name)
        try:
            made = function()
        except (Exception, SystemExit) as error:  # user code may raise anything, and the message says what
            raise InvalidTarget(
                f"The target {text} failed.",
                why=f"{type(error).__name__}: {error}",
                next=f"call {function_name}() without arguments from Python to see where it fails",
            ) from error
    target = _unpack(text, made)
    check_precision(target.model, precision, text)
    return replace(target, precision=precision)


def _find_function(text: str, module_name: str, function_name: str) -> Callable[[], object]:
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # an import runs user code
        raise explain_import(module_name, error) from error
    function: object = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise InvalidTarget(
            f"{text} does not exist."
            if function is None
            else f"{text} cannot be called: its type is {type(function).__name__}.",
            why=f"{module_name} has {', '.join(names[:8]) or 'no functions'}",
            next="name a function without arguments that returns (model, batch) or (model, batch, loss)",
        )
    return function


def _unpack(text: str, made: object) -> Target:
    import torch

    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], torch.nn.Module):
        return _with_stream(text, made[0], made[1], made[2] if len(made) == 3 else None)
    found = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"an object of type {type(made).__name__}"
    raise InvalidTarget(
        f"{text} returned {found}.",
        why="a target returns (model, batch) or (model, batch, loss), where model is a torch.nn.Module",
        next="return model, batch",
    )


def _with_stream(text: str, model: torch.nn.Module, batch: Any, loss: Callable[[Any], torch.Tensor] | None) -> Target:
    """Make a target (a model with its batches) from a batch, or from a stream of batches (loader, list, iterator).

    Commands that need only one batch use the first batch of the stream.
    """
    import torch

    if isinstance(batch, torch.Tensor | tuple | Mapping) or not isinstance(batch, Iterable):
        return Target(model=model, batch=batch, loss=loss)
    batches: Iterable[Any] = batch
    if isinstance(batch, Iterator):  # it can be iterated only once
        first = next(batch, None)
        batches = itertools.chain([first], batch)
    else:
        first = next(iter(batch), None)
    if first is None:
        raise InvalidTarget(
            f"{text} returned a stream without batches.",
            why=f"the first pass through the {type(batch).__name__} did not yield a batch",
            next="return at least one batch",
        )
    return Target(model=model, batch=first, loss=loss, batches=batches)


@contextlib.contextmanager
def _importable_working_directory() -> Iterator[None]:
    """Make modules of the working directory importable, as ``python -m`` does."""
    here = os.getcwd()
    if here in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def build(recipe: Recipe, options: TargetOptions) -> Target:
    """Build a model from its configuration, with random weights, and a random batch to train it.

    ``options`` override the recipe's sizes, device and precision.

    Raises:
        InvalidTarget: a library is missing or refuses the configuration, the device does not exist, or no batch is known.
    """
    import torch

    from plimsoll.estimator.targets.models import BUILDERS, BatchSize, make_batch, refuse_too_large

    if not options.is_meta:
        _refuse_absent(options.device)
    dtype = None if options.precision is None else getattr(torch, options.precision.parameter_dtype)
    make = BUILDERS[recipe.library]
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = make(recipe, dtype)
    if options.check is not None:
        options.check(model)
    if not options.is_meta:
        needed = sum(parameter.nbytes for parameter in model.parameters())
        refuse_too_large(f"The parameters of {type(model).__name__}", needed, options.device)
        with torch.random.fork_rng(devices=[]), torch.device(options.device):
            torch.manual_seed(_SEED)
            model = make(recipe, dtype)
    size = BatchSize(
        samples=options.batch or recipe.batch,
        sequence=options.sequence or recipe.sequence,
        is_asked=options.sequence is not None,
        device=options.device,
        is_meta=options.is_meta,
    )
    return Target(
        model=model,
        batch=make_batch(model, size),
        is_configured=True,
        precision=options.precision,
        notes=recipe.notes,
    )


def _refuse_absent(device: str) -> None:
    """Raise if torch cannot allocate on the device here."""
    import torch

    try:
        torch.zeros(1, device=device).item()  # `item` fails on the meta device, whose tensors do not have values
    except Exception as error:  # torch raises AssertionError, RuntimeError or NotImplementedError, by kind of device
        raise InvalidTarget(
            f"The device {device!r} is not available on this machine.",
            why=f"torch {torch.__version__} says: {str(error).strip().split(chr(10))[0]}",
            next="leave --device out to use the CPU, or plan for a device of another machine with --device-profile",
        ) from error
