"""All that knows DeepSpeed, with ZeRO in any stage or without: the model in its engine, what it steps, what it holds.

The engine calls the model, whose parameters are views of flat ones. Hooks on the parameters move every gradient into a bucket
while backward runs; a trial step must not reach them, so it runs on twins (see ``ddp``). The optimizer inside steps flat
partitions in its own type (without ZeRO, copies of 16-bit parameters in 32 bits), of which the model knows nothing.

In stage 3 a parameter is empty until hooks on its module gather it: it gets new memory, before forward and before backward, and
lets go of it after them. What recipes read has to be there all at once, so every region is made what DeepSpeed calls a leaf
module: its parameters are gathered together, before its forward and before the first node of its backward. Slots and recipes
hold the parameter itself, never its memory. Trial steps run on the parameters, with the hooks that reduce gradients taken off.

Source: deepspeed.runtime.zero.stage_1_and_2, stage3, parameter_offload, bf16_optimizer and fp16. What it writes on parameters
and modules, and what it calls its own, was seen in DeepSpeed 0.19. Importing it takes seconds; where nobody has, no model is in
its hands.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from plimsoll.tracing.meters.memory import storage_bytes

_ENGINE = "deepspeed.runtime.engine"
_STEPPED = "_hp_mapping"
"""What stages 1 and 2 write on every parameter."""
_GATHERED = "ds_id"
"""What stage 3 writes on every parameter."""
_LEAF = "_z3_leaf"
"""Says of a module in stage 3 that the parameters of all that is inside are gathered together."""


def inside_engine(model: nn.Module) -> nn.Module:
    """The module that a DeepSpeed engine calls; any other model is its own."""
    kind = _engine_kind()
    return model.module if kind is not None and isinstance(model, kind) else model


def is_stepped_by_zero(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether ZeRO, stage 1 or 2, has hooks on the parameters."""
    return any(_STEPPED in vars(parameter) for parameter in parameters)


def is_gathered_by_zero(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter of stage 3, which has other memory every time that it is gathered."""
    return isinstance(tensor, nn.Parameter) and _GATHERED in vars(tensor)


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """The shape of a tensor; of a parameter in stage 3 the one that it is gathered in."""
    shape: torch.Size = vars(tensor).get("ds_shape", tensor.shape)
    return shape


def has_leaf_modules(model: nn.Module) -> bool:
    """Whether stage 3 gathers the parameters of some part of the model together."""
    return any(vars(module).get(_LEAF) for module in model.modules())


def engine_of(model: nn.Module) -> Any | None:
    """The engine that calls a model: it is found in the engine's own hooks on that."""
    kind = _engine_kind()
    if kind is None:
        return None
    hooks = (*model._forward_pre_hooks.values(), *model._forward_hooks.values())  # seen in torch 2.9 to 2.15
    cells = [cell for hook in hooks if isinstance(hook, FunctionType | MethodType) for cell in hook.__closure__ or ()]
    return next((cell.cell_contents for cell in cells if isinstance(cell.cell_contents, kind)), None)


def steps_with_buckets(model: nn.Module) -> bool:
    """Whether DeepSpeed moves gradients into buckets of its own while backward runs, and keeps account of them."""
    return _wrapper_of(inside_engine(model)) is not None


def partitions(model: nn.Module) -> list[nn.Parameter]:
    """What DeepSpeed steps on this rank in place of the parameters: flat partitions (ZeRO), or copies in 32 bits."""
    wrapper = _wrapper_of(model)
    if wrapper is None:
        return []
    if _offload_of(model):  # its groups are empty but while it steps
        return list(wrapper.fp32_partitioned_groups_flat)
    return [each for group in wrapper.optimizer.param_groups for each in group["params"]]


def optimizer_inside(model: nn.Module) -> torch.optim.Optimizer | None:
    """The optimizer that stage 3 steps, which has no parameters but while it does."""
    found: torch.optim.Optimizer | None = _wrapper_of(model).optimizer if _offload_of(model) else None
    return found


def held_by_deepspeed(model: nn.Module) -> list[torch.Tensor]:
    """What DeepSpeed holds between steps beside optimizer state: partitions, and gradients while they accumulate."""
    wrapper = _wrapper_of(model)
    leaves = [] if wrapper is None else tree_leaves(list(vars(wrapper).values()))
    if _offload_of(model):
        leaves += [bucket.buffer for bucket in wrapper.ipg_buckets.values()]
    return [*partitions(model), *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]


def bytes_beside(model: nn.Module) -> int:
    """The same, but for the flat parameters themselves, of which the model's are views."""
    own = list(model.parameters())
    return storage_bytes([*own, *held_by_deepspeed(model)], own[0].device) - storage_bytes(own, own[0].device)


class WholeRegions:
    """Regions whose parameters stage 3 gathers together until ``put_back``: leaf modules. Hooks inside that gather are off;
    those that make nodes of the graph stay, as they decide in which order gradients are summed.
    """

    def __init__(self, model: nn.Module, regions: Iterable[nn.Module]) -> None:
        self._offload = offload = _offload_of(model)
        self._leaves = [(leaf, vars(leaf).get(_LEAF, False)) for leaf in regions if offload and leaf is not model]
        inside = {part for leaf, _ in self._leaves for part in leaf.modules() if part is not leaf}
        tables = {id(table) for part in inside for table in (part._forward_pre_hooks, part._forward_hooks)}
        self._hooks: dict[int, tuple[dict[int, Any], dict[int, Any]]] = {}
        for handle in offload.forward_hooks if self._leaves else ():
            table = handle.hooks_dict_ref()
            if id(table) in tables:
                self._hooks.setdefault(id(table), (table, dict(table)))
                table.pop(handle.id, None)
        for leaf, _ in self._leaves:
            setattr(leaf, _LEAF, True)
        self._gather_anew()

    def put_back(self) -> None:
        """The modules inside gather their own parameters again; harmless when called twice."""
        own = {handle.id for handle in self._offload.forward_hooks} if self._leaves else set()
        for table, before in self._hooks.values():
            since = dict(table)
            table.clear()  # the order of before comes back
            table.update({each: hook for each, hook in before.items() if each in own or each in since} | since)
        for leaf, flag in self._leaves:
            setattr(leaf, _LEAF, flag)
        self._gather_anew()
        self._hooks, self._leaves = {}, []

    def _gather_anew(self) -> None:
        """Forget what is to be released after which module: it was worked out for the modules as they were."""
        if self._leaves:
            kind = type(self._offload.get_param_coordinator())
            told = vars(kind)["_PartitionedParameterCoordinator__params_to_release"]
            inspect.getclosurevars(told).nonlocals["func"].cache_clear()


class KeptGathering:
    """Stage 3 between steps: ``put_back`` leaves every parameter empty, also after a step that failed on its way.

    ``hooks`` are those of leaf modules that reduce gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        self._offload = _offload_of(model)
        handles = _wrapper_of(model)._leaf_module_hooks if self._offload else ()
        self.hooks = [handle.hooks_dict_ref() for handle in handles]
        self._running = sys.modules[type(self._offload).__module__].FWD_MODULE_STACK if self._offload else []
        self._depth = len(self._running)

    def put_back(self) -> None:
        """Let go of what is gathered. The next forward gathers what it needs."""
        if self._offload:
            del self._running[self._depth :]
            self._offload.release_backward_leftovers()
            self._offload.partition_all_parameters()


def _wrapper_of(model: nn.Module) -> Any:
    """DeepSpeed's optimizer around torch's, if the engine has one: without ZeRO and in 32 bits it has torch's alone."""
    wrapper = getattr(engine_of(model), "optimizer", None)
    return wrapper if wrapper is not None and "optimizer" in vars(wrapper) else None


def _offload_of(model: nn.Module) -> Any:
    """What gathers parameters in stage 3; ``None`` in others."""
    wrapper = _wrapper_of(model)
    return None if wrapper is None else vars(wrapper).get("parameter_offload")


def _engine_kind() -> Any | None:
    return getattr(sys.modules.get(_ENGINE), "DeepSpeedEngine", None)
