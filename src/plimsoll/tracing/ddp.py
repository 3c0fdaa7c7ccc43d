"""All knowledge of ``DistributedDataParallel``: the model inside, the bytes of the reducer's buckets, steps that it does not
see.

The reducer counts gradients with hooks on the parameter objects. It learns the order of its buckets from the first step, and
with ``static_graph`` the whole graph. A trial step must not teach it anything. So a trial step runs on twins: parameters
without hooks that share the originals' memory and replace them in the modules during the step.

Source: torch.nn.parallel.DistributedDataParallel and its reducer (torch/csrc/distributed/c10d/reducer.cpp). Known weakness: a
model that keeps its parameters in its own lists, outside of ``nn.Module``, uses those in a trial step too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from plimsoll.tracing.zero import is_gathered_by_zero, is_stepped_by_zero


def inner_module(model: nn.Module) -> nn.Module:
    """Return the model inside of ``DistributedDataParallel`` and ``torch.compile(model)``, in any order of wrappers.

    Names, fingerprints and regions always refer to the inner model, so a plan is the same with and without a wrapper.
    """
    return layers_of(model)[-1]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the model with its wrappers, the outermost first."""
    layers = [model]
    while isinstance(model, DistributedDataParallel) or is_compiled_wrapper(model):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod  # type: ignore[assignment]
        layers.append(model)
    return layers


def is_compiled_wrapper(module: nn.Module) -> bool:
    """True if ``torch.compile(module)`` made this module."""
    return type(module).__name__ == "OptimizedModule"  # by name (torch 2.9 to 2.15): importing its module takes seconds


def _reducer(model: nn.Module) -> DistributedDataParallel | None:
    """Return the wrapper that reduces the gradients of a model: the model itself or one of its layers of wrappers."""
    return next((layer for layer in layers_of(model) if isinstance(layer, DistributedDataParallel)), None)


def unseen_wrapper(model: nn.Module) -> nn.Module | None:
    """Return a ``DistributedDataParallel`` that reduces this model's gradients but is not one of its wrappers, or None.

    It is around the running call of the model, or inside the model. Its buckets would not be counted, and it would see trial
    steps.
    """
    if _reducer(model) is not None:
        return None
    around = DistributedDataParallel._active_ddp_module  # seen in torch 2.9 to 2.15
    return around or next((part for part in model.modules() if isinstance(part, DistributedDataParallel)), None)


def bucket_bytes(model: nn.Module) -> int:
    """Return the bytes of the reducer's buckets, without parameters and gradients; 0 for a model without a reducer.

    Every reduced gradient has a place in a bucket for the wrapper's lifetime. With ``gradient_as_bucket_view`` an existing
    gradient is in that place, and is not counted twice.
    """
    return sum(
        parameter.numel() * parameter.element_size()
        for parameter in reduced_parameters(model)
        if not (gradients_are_views(model) and parameter.grad is not None)
    )


def has_rebuilt_buckets(model: nn.Module) -> bool:
    """True if the reducer has rebuilt its buckets. It does so once, in the forward after its first backward.

    Only C++ knows the buckets. A measurement of that step sees the new buckets allocated but not the old ones freed.
    """
    reducer = _reducer(model)
    return reducer is not None and bool(reducer._has_rebuilt_buckets)  # seen in torch 2.9 to 2.15


def is_without_reduction(model: nn.Module) -> bool:
    """True if the next backward leaves its gradients to a later reduction (``no_sync``)."""
    reducer = _reducer(model)
    return reducer is not None and not reducer.require_backward_grad_sync


def gradients_are_views(model: nn.Module) -> bool:
    """True if each gradient moves into a bucket when it is complete."""
    reducer = _reducer(model)
    return reducer is not None and bool(reducer.gradient_as_bucket_view)


def reduced_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose gradients the reducer averages over ranks."""
    reducer = _reducer(model)
    named = [] if reducer is None else reducer.module.named_parameters()
    ignored = () if reducer is None else reducer.parameters_to_ignore
    return [parameter for name, parameter in named if parameter.requires_grad and name not in ignored]


def own_reductions(model: nn.Module) -> list[str]:
    """Return the names of communication hooks that replace the reducer's all-reduce (stored like this in torch 2.9 to 2.15)."""
    reducer = _reducer(model)
    return [] if reducer is None else [hook.__qualname__ for hook, _ in reducer._comm_hooks]


def is_static(model: nn.Module) -> bool:
    """True if the reducer learns the graph from its first step and assumes it in all others."""
    reducer = _reducer(model)
    return reducer is not None and bool(reducer.static_graph)


def begin_anew(model: nn.Module) -> None:
    """Reset the reducer after a step whose backward did not finish. Call this on all ranks, or their buckets will differ."""
    reducer = _reducer(model)
    if reducer is not None:
        reducer.reducer._reset_state()  # seen in torch 2.9 to 2.15


class Twins:
    """Aliases of the parameters of a wrapped model that bypass the hooks of DDP and ZeRO; none for any other model."""

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._reducer, is_zero = _reducer(model), is_stepped_by_zero(model.parameters())
        for module in () if self._reducer is None and not is_zero else inner_module(model).modules():
            self._places += [(module, name, each) for name, each in module._parameters.items() if each is not None]
        originals = dict.fromkeys(parameter for _, _, parameter in self._places)
        # ZeRO's hooks move every gradient into a bucket too.
        moved = originals if is_zero else reduced_parameters(model) if gradients_are_views(model) else ()
        self._moved = frozenset(parameter for parameter in moved if parameter.requires_grad)
        self._gathered = [each for each in model.parameters() if is_gathered_by_zero(each) and each.requires_grad]
        self._twins = {each: nn.Parameter(each.detach(), requires_grad=each.requires_grad) for each in originals}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Run steps on the twins, which the reducer does not see. Afterwards their gradients become the parameters' gradients.

        What torch.compile compiles here is split at the reducer's buckets, as in training (``_inside_ddp_forward``, seen in
        torch 2.9 to 2.15).
        """
        for parameter, twin in self._twins.items():
            twin.grad = parameter.grad
        for module, name, parameter in self._places:
            setattr(module, name, self._twins[parameter])
        try:
            with contextlib.nullcontext() if self._reducer is None else self._reducer._inside_ddp_forward():
                yield
        finally:
            for module, name, parameter in self._places:
                setattr(module, name, parameter)
            for parameter, twin in self._twins.items():
                parameter.grad = twin.grad
                twin.grad = None

    @contextlib.contextmanager
    def moving_gradients(self, *, keeps: bool) -> Iterator[None]:
        """Free every new gradient when it is complete, as if it moved into a bucket. Use this in steps that count bytes.

        With ``keeps``, the gradient moves to memory that was allocated before the block. Otherwise a tensor with the same shape
        and a single element replaces it.
        """
        hooks = [
            self._twins[parameter].register_post_accumulate_grad_hook(_mover(parameter) if keeps else _shrink)
            for parameter in self._moved
            if parameter.grad is None
        ]
        hooks += [each.register_post_accumulate_grad_hook(_shrink) for each in self._gathered]  # they move into shards
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@contextlib.contextmanager
def unseen_by_reducer(model: nn.Module) -> Iterator[None]:
    """Run a step that counts bytes so that the reducer of ``model`` (if any) does not see it."""
    twins = Twins(model)
    with twins.in_place(), twins.moving_gradients(keeps=False):
        yield


def _mover(parameter: nn.Parameter) -> Callable[[torch.Tensor], None]:
    """Return a hook that copies the gradient to preallocated memory and makes that the gradient."""
    place = torch.empty_like(parameter, requires_grad=False)

    def move(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if parameter.grad is not place:
            parameter.grad = place.copy_(parameter.grad)

    return move


def _shrink(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.new_zeros(()).expand(parameter.shape)
