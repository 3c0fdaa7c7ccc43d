"""Refuse models that cannot be traced, and turn exceptions in a step into one clear error of Plimsoll that says why.

Out-of-memory errors and interrupts are not changed.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from plimsoll.errors import InvalidBatch, InvalidModel, PlimsollError, TracingFailed
from plimsoll.tracing.ddp import is_compiled_wrapper, layers_of, unseen_wrapper
from plimsoll.tracing.fsdp2 import has_flat_parameters, sharded_parameters
from plimsoll.tracing.local_tensors import is_sharded
from plimsoll.tracing.recorder.collectives import failed_in_collective
from plimsoll.tracing.zero import engine_of, has_leaf_modules, is_gathered_by_zero, is_stepped_by_zero

_REFUSALS = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError, ArithmeticError)
_DEPENDS_ON_DATA = (DataDependentOutputException, DynamicOutputShapeException)
_DISABLES_HOOKS = inspect.unwrap(torch.autograd.graph.disable_saved_tensors_hooks).__code__
_HIGHER_ORDER = "_higher_order_ops"
"""The name of the folder of torch's ops that take functions: ``cond``, ``while_loop``, ``scan``."""
_WITHOUT_FAKE = (UnsupportedFakeTensorException, UnsupportedOperatorException)


def check_traceable(model: nn.Module) -> None:
    """Raise an error if a model does not have a training step that can be traced. Otherwise do nothing.

    Raises:
        InvalidModel: the model does not have parameters, has parameters without a shape, or has nothing to train. Or it is
            sharded by FSDP1, or gathered layer by layer by DeepSpeed's ZeRO-3.
        TracingFailed: gradients are switched off.
    """
    refuse_without_shape(model)
    parameters = list(model.parameters())
    name = type(model).__name__
    if has_flat_parameters(model):
        raise InvalidModel(
            "This model is sharded by FullyShardedDataParallel (FSDP1).",
            why="its parameters are views of flat parameters and are replaced in every call, so their memory cannot be tracked",
            next="shard it with torch.distributed.fsdp.fully_shard (FSDP2)",
        )
    is_gathered = any(map(is_gathered_by_zero, parameters))
    if (is_gathered or is_stepped_by_zero(parameters)) and engine_of(model) is None:
        raise InvalidModel(
            f"{name} is not the module that DeepSpeed's ZeRO engine calls.",
            why="the engine around it holds partitions and gradients that the budget would not count",
            next="pass engine.module; plimsoll.attach also accepts the DeepSpeedEngine itself",
        )
    if is_gathered and not has_leaf_modules(model):
        raise InvalidModel(
            f"DeepSpeed's ZeRO in stage 3 gathers the parameters of {name} layer by layer.",
            why="recomputing a block needs all its parameters at once, but most would already be freed again",
            next="call plimsoll.attach(engine, budget=…), which makes each block gather all its parameters together",
        )
    if not parameters:
        raise InvalidModel(
            f"{name} does not have parameters.",
            why="a training step without parameters does not compute gradients",
            next="pass the module that you train",
        )
    if not any(parameter.requires_grad for parameter in parameters):
        raise InvalidModel(
            f"No parameter of {name} is trainable.",
            why=f"requires_grad is False on all {len(parameters)} parameters",
            next="unfreeze the parameters that you train: parameter.requires_grad_(True)",
        )
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        raise TracingFailed(
            "Gradients are switched off here.",
            why="the call is inside torch.no_grad() or torch.inference_mode(), so nothing would be saved for backward",
            next="call Plimsoll outside that block",
        )


def refuse_without_shape(model: nn.Module) -> None:
    """Raise an error if the model has lazy modules that have not run yet.

    Raises:
        InvalidModel: a parameter or buffer does not have a shape yet.
    """
    if any(
        isinstance(each, UninitializedParameter | UninitializedBuffer)
        for each in (*model.parameters(), *model.buffers())
    ):
        raise InvalidModel(
            f"{type(model).__name__} has parameters without a shape.",
            why="lazy modules create their parameters in their first forward pass",
            next="run the model once on a batch, under torch.no_grad() if you like",
        )


def refuse_nested(tensors: Iterable[torch.Tensor]) -> None:
    """Raise an error if one of the tensors is nested (jagged ones too). The sizes of a nested tensor are data, so the shapes of
    its ops change from batch to batch.

    Raises:
        InvalidBatch: one of the tensors is nested.
    """
    if any(tensor.is_nested for tensor in tensors):
        raise InvalidBatch(
            "The model computes with a nested tensor.",
            why="the lengths of its rows depend on data, so a plan can neither count its bytes nor recompute it",
            next="pass a padded tensor with a mask, or the packed values with their offsets",
        )


def refuse_unseen_reducer(model: nn.Module) -> None:
    """Raise an error if the model's gradients are reduced by a ``DistributedDataParallel`` that the caller did not pass with
    the model.

    Raises:
        InvalidModel: the model is called from within a ``DistributedDataParallel``, or contains one.
    """
    wrapper = unseen_wrapper(model)
    if wrapper is not None:
        raise InvalidModel(
            f"DistributedDataParallel is {'inside of' if wrapper in model.modules() else 'around'} {type(model).__name__}.",
            why="the budget would not count DDP's buckets, and DDP would reduce the gradients of trial steps",
            next="wrap the model first, then pass DistributedDataParallel itself (such as what accelerator.prepare returns)",
        )


def refuse_shards(model: nn.Module) -> None:
    """Raise an error if a model that is to be traced with fake tensors is split over ranks.

    This comes before FSDP2's first forward, which would set FSDP2 up with the fake tensors.

    Raises:
        InvalidModel: a parameter is a DTensor.
    """
    if any(is_sharded(parameter) for parameter in (*sharded_parameters(model), *model.parameters())):
        raise InvalidModel(
            f"{type(model).__name__} is split over ranks and cannot be traced without its device.",
            why="its parameters would be fake: FSDP2 could not gather them, and DTensors could not compute with them",
            next="plan on the device itself, without device_profile=; or before you split the model: "
            'plimsoll.estimate(model, batch, layout="dp=8,zero=3")',
        )


def compiled_part(module: nn.Module) -> str:
    """Return which part of a module torch.compile or TorchScript compiles: a submodule's name, "the module", or ``""`` if no
    part is.

    The module, its submodules and functions that a forward calls are checked. Hooks around compiled code would unpack
    everything at once, and compiled code decides in its own backward what it saves. torch refuses hooks on scripted modules,
    and their parameters cannot be tracked.
    """
    for name, inner in module.named_modules():
        # The class of a scripted module has a descriptor as forward, which raises when it is read from the class.
        forward = inner.__dict__.get("forward", inspect.getattr_static(type(inner), "forward"))
        is_opaque = isinstance(inner, torch.jit.ScriptModule) or is_compiled(inner)
        if is_opaque or any(map(_is_compiled_function, (forward, *_called_by(inner, forward)))):
            return name or "the module"
    return ""


def is_compiled(module: nn.Module) -> bool:
    """Return True if torch.compile, or the module's own ``compile()``, was called on this very module.

    Its parts do not count.
    """
    return is_compiled_wrapper(module) or module._compiled_call_impl is not None  # seen in torch 2.9 to 2.15


def _is_compiled_function(function: Any) -> bool:
    return _stored(function, "_torchdynamo_orig_callable") is not None and not is_disabled(function)


def is_disabled(function: Any) -> bool:
    """Return whether torch.compiler.disable keeps a function from being compiled."""
    return bool(_stored(function, "_torchdynamo_disable"))


def _stored(thing: Any, name: str) -> Any:
    """Return the value of an attribute without running code of the user, or ``None`` if it does not exist. For a method, look
    at the method's function.

    The code of a forward may name objects of any class, and their ``__getattr__`` and properties may raise anything (``class
    AttrDict(dict): __getattr__ = dict.__getitem__``). So none of the user's code runs here.
    """
    return inspect.getattr_static(thing.__func__ if isinstance(thing, MethodType) else thing, name, None)


def _function_behind(thing: Any) -> FunctionType | None:
    """Return the Python function that a callable finally calls, found by unwrapping methods and wrappers. Return ``None`` if
    this is not a Python function.
    """
    seen: set[int] = set()
    while id(thing) not in seen:
        seen.add(id(thing))
        wrapped = _stored(thing, "__wrapped__")
        if wrapped is not None:
            thing = wrapped
        elif isinstance(thing, MethodType | classmethod | staticmethod):
            thing = thing.__func__
    return thing if isinstance(thing, FunctionType) else None


def _called_by(module: nn.Module, forward: Any) -> Iterator[Any]:
    """Yield the objects that a forward may call by name.

    These are the globals and the module's attributes that its code mentions, and its closure. The module's own methods, and
    functions of the same file, are searched in the same way.
    """
    waiting, seen = [forward], set()
    while waiting:
        function = _function_behind(waiting.pop())
        if function is None or function.__code__ in seen:
            continue
        code = function.__code__
        seen.add(code)
        named = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
        waiting += [
            each for each in map(_function_behind, named) if each is not None and each.__module__ == function.__module__
        ]
        own = [vars(module).get(name, _stored(type(module), name)) for name in code.co_names]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a cell that is still empty
                own.append(cell.cell_contents)
        waiting += (
            each for each in own if isinstance(each, FunctionType) and not f"{each.__module__}".startswith("torch.")
        )
        yield from (*named, *own)


def refuse_compiled(model: nn.Module) -> None:
    """Raise an error if torch.compile compiles the model as a whole, because a plan could not decide about any of its tensors.

    Raises:
        InvalidModel: the model is compiled as a whole.
    """
    if any(map(is_compiled, layers_of(model))):
        raise _compiled(f"{type(model).__name__} is compiled by torch.compile.")


def uncompiled_regions(model: nn.Module, regions: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the regions (planned modules) that a plan can decide about: those without compiled parts. For each of the other
    regions, warn that it is not managed.

    Raises:
        InvalidModel: no region remains, or the model is compiled as a whole.
    """
    refuse_compiled(model)
    left = without_compiled(regions)
    if regions and not left:
        raise _compiled(f"Every region of {type(model).__name__} is compiled by torch.compile or TorchScript.")
    return left


def without_compiled(regions: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the regions without compiled parts. Warn that each of the other regions is not managed."""
    compiled = {name: part for name, module in regions.items() if (part := compiled_part(module))}
    for name, part in compiled.items():
        warnings.warn(f"plimsoll: region {name!r} is not managed: {part} is compiled", stacklevel=2)
    return {name: module for name, module in regions.items() if name not in compiled}


def without_transforms(
    regions: Mapping[str, nn.Module], name: str, left_alone: Mapping[str, nn.Module]
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Move region ``name``, and all regions of the same class, from ``regions`` to ``left_alone``, and warn.

    The region runs a transform of ``torch.func``, which cannot run under saved-tensor hooks. Return the remaining regions, and
    the new ``left_alone``, as two mappings from name to module.
    """
    kept = {other: each for other, each in regions.items() if type(each) is type(regions[name])}
    warnings.warn(
        f"plimsoll: {', '.join(map(repr, kept))} keep all activations: they use torch.func, which forbids saved-tensor hooks",
        stacklevel=3,
    )
    return {other: each for other, each in regions.items() if other not in kept}, {**left_alone, **kept}


def refuses_hooks(error: BaseException) -> bool:
    """Return True if a transform of ``torch.func`` raised the error because hooks on saved tensors are active."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code is _DISABLES_HOOKS


def refuse_compiler(module: nn.Module, *, is_compiled: bool = False) -> None:
    """Stop torch.compile when it reaches a managed module while tracing. Evaluation and torch.export are allowed.

    ``is_compiled`` says whether the plan itself has compiled the module.

    Raises:
        InvalidModel: the error arrives in the caller of the compiled code.
    """
    # A private name, seen in torch 2.9 to 2.15: before 2.13 Dynamo replaces is_exporting() by True whenever it traces.
    if torch.is_grad_enabled() and not torch.compiler._is_exporting_flag:
        # An error that is raised during tracing would make Dynamo run the code uncompiled instead. After a graph break the
        # following code may be traced again, and torch 2.11 cannot do that with an error of ours. So the error is raised in a
        # function that is not traced.
        torch._dynamo.graph_break("Plimsoll: a model under a plan cannot be compiled; call handle.remove() first")
        torch.compiler.disable(_refuse_managed)(module, is_compiled)


def _refuse_managed(module: nn.Module, is_compiled: bool) -> None:  # noqa: FBT001 - Dynamo calls it
    found = f"{type(module).__name__} was compiled by torch.compile while a plan was managing it."
    if not is_compiled:
        raise _compiled(found)
    raise InvalidModel(
        found,
        why="the plan compiled it to control what the code saves; compiled again inside other code it loses that control",
        next="call torch.compile before plimsoll.apply or attach, or not at all if the plan compiles the model",
    )


def _compiled(found: str) -> InvalidModel:
    return InvalidModel(
        found,
        why="compiled code itself decides what it saves for backward, so a plan for the eager model would not change it",
        next="train the model uncompiled under the plan (call handle.remove() before torch.compile), or compile only parts "
        "inside some regions: those regions keep all their activations",
    )


def refused_script() -> InvalidModel:
    """Return the error for torch.jit.script on a managed model, or on a copy that was made while the model was managed."""
    return InvalidModel(
        "torch.jit.script cannot compile a model under a plan.",
        why="it compiles the source code of forward and hooks, and a plan replaces them by Python objects",
        next="call handle.remove() first (and copy the model only after that); torch.jit.trace and torch.export work "
        "under a plan",
    )


def explain_forward(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that turns an error in the model's forward into a clear error of Plimsoll.

    The error says that the batch does not fit the model, or that fake tensors lack values or kernels.
    """
    return _explained(
        model,
        lambda found, place: InvalidBatch(
            f"{type(model).__name__} cannot process the batch: {found}",
            why=f"the forward pass failed in {place}, before planning",
            next="check that model(*batch) (tuple), model(**batch) (dict) or model(batch) (tensor) works",
        ),
    )


class BackwardFailed(TracingFailed):
    """Raised when backward fails in a step that is run in order to be traced."""


def explain_backward(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that turns an error in the model's backward into a clear error of Plimsoll.

    Unlike in forward, the batch is not named as a cause: forward has shown that the batch fits.
    """
    return _explained(
        model,
        lambda found, place: BackwardFailed(
            f"The backward pass of {type(model).__name__} failed in {place}: {found}",
            why="a backward formula or a hook on gradients raised it in a step that was run in order to be traced",
            next="check that loss.backward() works without Plimsoll; if it does, please report this model",
        ),
    )


@contextlib.contextmanager
def _explained(model: nn.Module, refusal: Callable[[str, str], PlimsollError]) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (*_DEPENDS_ON_DATA, *_WITHOUT_FAKE) as error:
        raise _not_fakeable(model, error) from error
    except Exception as error:
        # Whatever class the model's error has: a loop may raise its own and catch it.
        is_ours = type(error).__module__.startswith("plimsoll.") and not isinstance(error, _REFUSALS)
        if is_ours or failed_in_collective(error):  # neither the batch nor the model is the cause
            raise
        frames = traceback.extract_tb(error.__traceback__)
        if op := next(
            (path.stem for each in frames if (path := Path(each.filename)).parent.name == _HIGHER_ORDER), None
        ):
            raise _runs_graphs(model, op, error) from error
        frame = frames[-1]
        place = f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})"
        raise refusal(f"{type(error).__name__}: {first_line(error)}", place) from error


def _runs_graphs(model: nn.Module, op: str, error: Exception) -> TracingFailed:
    return TracingFailed(
        f"{type(model).__name__} runs torch's {op}, which cannot be traced op by op: {first_line(error)}",
        why="it turns the functions passed to it into graphs and runs those graphs",
        next="use a Python branch or loop, or compute both branches and select with torch.where",
    )


def _not_fakeable(model: nn.Module, error: Exception) -> TracingFailed:
    if isinstance(error, _DEPENDS_ON_DATA):
        op = getattr(error, "func", "an op")
        return TracingFailed(
            f"{type(model).__name__} cannot be traced without data: the result of {op} depends on values.",
            why="a fake trace knows only shapes; routing, content-based masks and .item() on activations need real numbers",
            next="trace on the device itself (with real parameters, without device_profile=), "
            "or pass index and mask tensors of the batch as real tensors on the CPU",
        )
    return TracingFailed(
        f"{type(model).__name__} runs an op without a fake kernel: {first_line(error)}",
        why="without one, the shapes of the op's outputs are known only after running it",
        next="register a fake kernel with torch.library.register_fake, or trace on the device itself",
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text."""
    text = str(error).strip()
    return text.splitlines()[0] if text else "no message"
