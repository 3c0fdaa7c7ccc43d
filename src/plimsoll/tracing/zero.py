"""Everything in Plimsoll that reads DeepSpeed, with or without ZeRO: its engine, optimizer, partitions and gathered parameters.

The engine calls the model, whose parameters are views of flat parameters. Hooks on the parameters move each gradient into a
bucket during backward. A trial step (run only to plan or verify) must not trigger these hooks, so it runs on twins: aliases of
the parameters without hooks (see ``ddp``). The inner optimizer steps flat partitions in its own dtype (without ZeRO: 32-bit
copies of 16-bit parameters). The model does not refer to these partitions.

In stage 3 a parameter is empty until hooks on its module gather it. It gets new memory before forward and before backward, and
frees it afterwards. All parameters that recipes (ops that rebuild a value) read must be gathered at the same time. So each
region (planned module) is made what DeepSpeed calls a leaf module: its parameters are gathered together, before its forward and
before the first node of its backward. Slots (saved tensors) and recipes hold the parameter itself, never its memory. Trial
steps run on the parameters, with the hooks that reduce gradients removed.

Source: deepspeed.runtime.zero.stage_1_and_2, stage3, parameter_offload, bf16_optimizer and fp16. The attributes that it sets on
parameters and modules, and its internal names, were seen in DeepSpeed 0.19. Importing it takes seconds. If DeepSpeed is not
imported, models do not use it.
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
"""The name of an attribute that ZeRO's stages 1 and 2 set on every parameter."""
_GATHERED = "ds_id"
"""The name of an attribute that ZeRO's stage 3 sets on every parameter."""
_LEAF = "_z3_leaf"
"""The name of a module attribute in stage 3. It says that the parameters of everything inside are gathered together."""


def inside_engine(model: nn.Module) -> nn.Module:
    """Return the module that a DeepSpeed engine calls. Of any other model, return the model itself."""
    kind = _engine_kind()
    return model.module if kind is not None and isinstance(model, kind) else model


def is_stepped_by_zero(parameters: Iterable[nn.Parameter]) -> bool:
    """Return True if ZeRO in stage 1 or 2 has hooks on the parameters."""
    return any(_STEPPED in vars(parameter) for parameter in parameters)


def is_gathered_by_zero(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is a parameter in ZeRO's stage 3. Such a parameter has new memory each time it is gathered."""
    return isinstance(tensor, nn.Parameter) and _GATHERED in vars(tensor)


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """Return the shape of a tensor. For a parameter in ZeRO's stage 3, return the shape that it has when it is gathered."""
    shape: torch.Size = vars(tensor).get("ds_shape", tensor.shape)
    return shape


def has_leaf_modules(model: nn.Module) -> bool:
    """Return True if ZeRO's stage 3 gathers the parameters of some part of the model together."""
    return any(vars(module).get(_LEAF) for module in model.modules())


def engine_of(model: nn.Module) -> Any | None:
    """Return the DeepSpeed engine that calls a model, or ``None``. The engine is found in the closures of its hooks on the
    model.
    """
    kind = _engine_kind()
    if kind is None:
        return None
    hooks = (*model._forward_pre_hooks.values(), *model._forward_hooks.values())  # seen in torch 2.9 to 2.15
    cells = [cell for hook in hooks if isinstance(hook, FunctionType | MethodType) for cell in hook.__closure__ or ()]
    return next((cell.cell_contents for cell in cells if isinstance(cell.cell_contents, kind)), None)


def steps_with_buckets(model: nn.Module) -> bool:
    """Return True if DeepSpeed wraps the model's optimizer. It then moves gradients into buckets of its own during backward,
    and counts them.
    """
    return _wrapper_of(inside_engine(model)) is not None


def partitions(model: nn.Module) -> list[nn.Parameter]:
    """Return the tensors that DeepSpeed's optimizer steps on this rank instead of the model's parameters.

    They are flat partitions (ZeRO) or 32-bit copies. Without DeepSpeed, the list is empty.
    """
    wrapper = _wrapper_of(model)
    if wrapper is None:
        return []
    if _offload_of(model):  # its groups are empty except while it steps
        return list(wrapper.fp32_partitioned_groups_flat)
    return [each for group in wrapper.optimizer.param_groups for each in group["params"]]


def optimizer_inside(model: nn.Module) -> torch.optim.Optimizer | None:
    """Return the optimizer that ZeRO's stage 3 steps, or ``None``. This optimizer has parameters only while it steps."""
    found: torch.optim.Optimizer | None = _wrapper_of(model).optimizer if _offload_of(model) else None
    return found


def held_by_deepspeed(model: nn.Module) -> list[torch.Tensor]:
    """Return the tensors that DeepSpeed holds between steps: partitions, and gradients that accumulate.

    Optimizer state is not included.
    """
    wrapper = _wrapper_of(model)
    leaves = [] if wrapper is None else tree_leaves(list(vars(wrapper).values()))
    if _offload_of(model):
        leaves += [bucket.buffer for bucket in wrapper.ipg_buckets.values()]
    return [*partitions(model), *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]


def bytes_beside(model: nn.Module) -> int:
    """Return the bytes of the tensors that `held_by_deepspeed` returns.

    The flat parameters that the model's parameters are views of do not count.
    """
    own = list(model.parameters())
    return storage_bytes([*own, *held_by_deepspeed(model)], own[0].device) - storage_bytes(own, own[0].device)


class WholeRegions:
    """Makes ZeRO's stage 3 gather all parameters of a region together, until `put_back`. For that, each region becomes what
    DeepSpeed calls a leaf module.

    Hooks inside the regions that gather are removed. Hooks that make graph nodes stay, because they determine the order in
    which gradients are summed.
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
        """Let the modules inside the regions gather their own parameters again. Calling it twice does no harm."""
        own = {handle.id for handle in self._offload.forward_hooks} if self._leaves else set()
        for table, before in self._hooks.values():
            since = dict(table)
            table.clear()  # restores the original order
            table.update({each: hook for each, hook in before.items() if each in own or each in since} | since)
        for leaf, flag in self._leaves:
            setattr(leaf, _LEAF, flag)
        self._gather_anew()
        self._hooks, self._leaves = {}, []

    def _gather_anew(self) -> None:
        """Clear DeepSpeed's cache of the parameters to release after each module, because it was computed for the previous leaf
        modules.
        """
        if self._leaves:
            kind = type(self._offload.get_param_coordinator())
            told = vars(kind)["_PartitionedParameterCoordinator__params_to_release"]
            inspect.getclosurevars(told).nonlocals["func"].cache_clear()


class KeptGathering:
    """Remembers the state of ZeRO's stage 3 before a trial step. `put_back` leaves each parameter empty, as between steps, even
    after a step that failed.

    ``hooks`` are the hooks on leaf modules that reduce gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        self._offload = _offload_of(model)
        handles = _wrapper_of(model)._leaf_module_hooks if self._offload else ()
        self.hooks = [handle.hooks_dict_ref() for handle in handles]
        self._running = sys.modules[type(self._offload).__module__].FWD_MODULE_STACK if self._offload else []
        self._depth = len(self._running)

    def put_back(self) -> None:
        """Free the parameters that are gathered. The next forward gathers the parameters that it needs."""
        if self._offload:
            del self._running[self._depth :]
            self._offload.release_backward_leftovers()
            self._offload.partition_all_parameters()


def _wrapper_of(model: nn.Module) -> Any:
    """Return DeepSpeed's own optimizer, which wraps torch's optimizer. Return ``None`` if the model is not under such a
    wrapper.

    That is so for a model without an engine, and for an engine without ZeRO in 32 bits.
    """
    wrapper = getattr(engine_of(model), "optimizer", None)
    return wrapper if wrapper is not None and "optimizer" in vars(wrapper) else None


def _offload_of(model: nn.Module) -> Any:
    """Return the object that gathers parameters in ZeRO's stage 3, or ``None`` in other stages."""
    wrapper = _wrapper_of(model)
    return None if wrapper is None else vars(wrapper).get("parameter_offload")


def _engine_kind() -> Any | None:
    return getattr(sys.modules.get(_ENGINE), "DeepSpeedEngine", None)
