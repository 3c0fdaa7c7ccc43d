"""Everything in Plimsoll that reads ``DistributedDataParallel``: the model inside, the bytes of the reducer's buckets, and
trial steps (run only to plan or verify) that the reducer must not see.

The reducer averages gradients over ranks, and counts them with hooks on the parameter objects. From the first step it learns
the order of its buckets, and with ``static_graph`` the whole graph. It must not learn from a trial step. So a trial step runs
on twins: parameters without hooks that share the originals' memory and replace them in the modules during the step.

Source: torch.nn.parallel.DistributedDataParallel and its reducer (torch/csrc/distributed/c10d/reducer.cpp). Known weakness: a
model that keeps its parameters in its own lists, outside of ``nn.Module``, uses the originals in a trial step too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from plimsoll.tracing.zero import is_gathered_by_zero, is_stepped_by_zero


def inner_module(model: nn.Module) -> nn.Module:
    """Return the model inside of the wrappers ``DistributedDataParallel`` and ``torch.compile(model)``, in whatever order they
    are.

    Names, fingerprints and regions (planned modules) always refer to the inner model, so a plan is the same with and without a
    wrapper.
    """
    return layers_of(model)[-1]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return a list with the model and the modules that it wraps. The outermost wrapper is first, the inner model last."""
    layers = [model]
    while isinstance(model, DistributedDataParallel) or is_compiled_wrapper(model):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod  # type: ignore[assignment]
        layers.append(model)
    return layers


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Return True if ``torch.compile(module)`` made this module."""
    return type(module).__name__ == "OptimizedModule"  # by name (torch 2.9 to 2.15): importing its module takes seconds


def _reducer(model: nn.Module) -> DistributedDataParallel | None:
    """Return the ``DistributedDataParallel`` that reduces a model's gradients, or ``None``.

    It is the model itself or one of the wrappers inside it.
    """
    return next((layer for layer in layers_of(model) if isinstance(layer, DistributedDataParallel)), None)


def unseen_wrapper(model: nn.Module) -> nn.Module | None:
    """Return a ``DistributedDataParallel`` that reduces this model's gradients but is not one of its wrappers, or None.

    Such a ``DistributedDataParallel`` is around the running call of the model, or inside the model. Its buckets would not be
    counted, and trial steps would not be hidden from it.
    """
    if _reducer(model) is not None:
        return None
    around = DistributedDataParallel._active_ddp_module  # seen in torch 2.9 to 2.15
    return around or next((part for part in model.modules() if isinstance(part, DistributedDataParallel)), None)


def bucket_bytes(model: nn.Module) -> int:
    """Return the bytes of the reducer's buckets, or 0 for a model without a reducer. Parameters and gradients do not count.

    Every reduced gradient has a place in a bucket for the wrapper's lifetime. With ``gradient_as_bucket_view``, an existing
    gradient is in that place already, and is not counted twice.
    """
    return sum(
        parameter.numel() * parameter.element_size()
        for parameter in reduced_parameters(model)
        if not (gradients_are_views(model) and parameter.grad is not None)
    )


def has_rebuilt_buckets(model: nn.Module) -> bool:
    """Return True if the reducer has rebuilt its buckets. The reducer does so once, in the forward after its first backward.

    Only C++ knows the buckets. A measurement of that step sees the new buckets allocated but not the old ones freed.
    """
    reducer = _reducer(model)
    return reducer is not None and bool(reducer._has_rebuilt_buckets)  # seen in torch 2.9 to 2.15


def is_without_reduction(model: nn.Module) -> bool:
    """Return True if the next backward does not reduce its gradients but leaves that to a later step (``no_sync``)."""
    reducer = _reducer(model)
    return reducer is not None and not reducer.require_backward_grad_sync


def gradients_are_views(model: nn.Module) -> bool:
    """Return True if each gradient moves into a bucket when it is complete (``gradient_as_bucket_view``)."""
    reducer = _reducer(model)
    return reducer is not None and bool(reducer.gradient_as_bucket_view)


def reduced_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose gradients the reducer averages over ranks."""
    reducer = _reducer(model)
    named = [] if reducer is None else reducer.module.named_parameters()
    ignored = () if reducer is None else reducer.parameters_to_ignore
    return [parameter for name, parameter in named if parameter.requires_grad and name not in ignored]


def own_reductions(model: nn.Module) -> list[str]:
    """Return the names of communication hooks that replace the reducer's all-reduce. torch 2.9 to 2.15 store the hooks in this
    way.
    """
    reducer = _reducer(model)
    return [] if reducer is None else [hook.__qualname__ for hook, _ in reducer._comm_hooks]


def is_static(model: nn.Module) -> bool:
    """Return True if the reducer learns the graph from its first step and assumes the same graph in all later steps."""
    reducer = _reducer(model)
    return reducer is not None and bool(reducer.static_graph)


def begin_anew(model: nn.Module) -> None:
    """Reset the reducer after a step whose backward did not finish.

    Call this on all ranks, or the ranks' buckets will differ.
    """
    reducer = _reducer(model)
    if reducer is not None:
        reducer.reducer._reset_state()  # seen in torch 2.9 to 2.15


def _twin_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return an alias of a parameter, of its class and with the user's attributes, which forward may read. Those of DeepSpeed
    stay behind, because its hooks look for them.
    """
    twin = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    if type(parameter) is not type(twin):
        twin.__class__ = type(parameter)
    vars(twin).update({name: value for name, value in vars(parameter).items() if not name.startswith("ds_")})
    return twin


class Twins:
    """Aliases of the parameters of a wrapped model (twins). They share the parameters' memory, but do not have the hooks of DDP
    and ZeRO.

    A model without such a wrapper does not get twins.
    """

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
        self._twins = {each: _twin_of(each) for each in originals}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Return a context manager. In its block, the twins (aliases of the parameters) take the parameters' places in the
        modules, so that the reducer does not see the steps.

        At the end, the gradients of the twins become the parameters' gradients. Code that torch.compile compiles in the block
        is split at the reducer's buckets, as in training (``_inside_ddp_forward``, seen in torch 2.9 to 2.15).
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
        """Return a context manager for steps that count bytes. In its block, each new gradient is freed when it is complete, as
        if it moved into a bucket.

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
    """Return a context manager for a step that counts bytes: in its block, the reducer of ``model``, if it has one, does not
    see the step.
    """
    twins = Twins(model)
    with twins.in_place(), twins.moving_gradients(keeps=False):
        yield


def _mover(parameter: nn.Parameter) -> Callable[[torch.Tensor], None]:
    """Return a hook that copies a gradient to memory which was allocated before, and makes the copy the gradient."""
    place = torch.empty_like(parameter, requires_grad=False)

    def move(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if parameter.grad is not place:
            parameter.grad = place.copy_(parameter.grad)

    return move


def _shrink(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.new_zeros(()).expand(parameter.shape)
