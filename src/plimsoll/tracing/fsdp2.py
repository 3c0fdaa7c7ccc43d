"""Everything in Plimsoll that reads ``fully_shard`` (FSDP2, HSDP): its shards, gathered parameters and waiting gradients, and
its state, which trial steps (run only to plan or verify) must restore.

FSDP2 keeps one storage per gathered parameter permanently. It fills the storage before a module's forward and backward, and
empties it (``resize_(0)``) afterwards. So the storage has several lives in a step. Its size shows whether it is filled.

Source: torch.distributed.fsdp._fully_shard. No public name gives these storages, so only this file reads FSDP2's own objects.
Seen in torch 2.9 and 2.11 (one group of parameters per module, no way to reset a failed step), 2.13 and 2.14 (several groups,
``reset_iter_state``) and 2.15 (gradients accumulate in ``grad`` of the gathered parameter, and a reset drops them). FSDP takes
about a second to import. If it is not in `sys.modules`, nothing is sharded.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from plimsoll.tracing.local_tensors import gradient_of, is_sharded
from plimsoll.tracing.torch_internals import is_at_least, lacking
from plimsoll.tracing.zero import partitions

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

_HOME = "torch.distributed.fsdp._fully_shard"
_IDLE = "IDLE"
_OF_WAITING = ("_partial_reduce_output_layout", "_post_backward_pending")
"""Names of a group's attributes about waiting gradients (torch 2.15): the layout of the flat gradient, and whether work is
pending.
"""


class Gathered:
    """Lists the memory that FSDP2 uses for a model's gathered parameters. The object is made once, and is asked many times
    while a step runs.
    """

    def __init__(self, model: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._parameters = [(names.get(id(part.sharded_param)) or _name_of(part), part) for part in _parameters(model)]

    def __bool__(self) -> bool:
        """Return whether any parameter is sharded by FSDP2."""
        return bool(self._parameters)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and memory of each parameter that was gathered before. A storage of 0 bytes is empty now."""
        for name, part in self._parameters:
            for tensor in (*part.all_gather_outputs, *part._unsharded_inner_tensors):
                yield name, tensor


def has_flat_parameters(model: nn.Module) -> bool:
    """Return True if a module is under FSDP1 (``FullyShardedDataParallel``), which replaces parameters by views of flat
    tensors.
    """
    if _HOME not in sys.modules:
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel

    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def sharded_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the sharded parameters, even if the parameters of a module are gathered now.

    Without FSDP2, return an empty list.
    """
    return [part.sharded_param for part in _parameters(model)]


def gathered_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that FSDP2 gathers from the shards of all ranks. They exist from the first gathering on."""
    found = (getattr(part, "_unsharded_param", None) for part in _parameters(model))
    return [each for each in found if each is not None]


def process_groups(model: nn.Module) -> Iterator[torch.distributed.ProcessGroup]:
    """Yield the process groups that gather parameters and reduce gradients.

    A parameter may have another mesh, which compares equal to FSDP2's mesh but has other groups. So the groups are read from
    FSDP2's own meshes.
    """
    for group in _groups(model):
        for info in (group.mesh_info, group.post_forward_mesh_info):
            if info is not None:
                yield from info.mesh.get_all_groups()


def every_parameter(model: nn.Module) -> list[nn.Parameter]:
    """Return all parameters of a model, each once, and the tensors that an optimizer holds in place of some of them.

    These tensors are the shards of gathered parameters, and ZeRO's partitions.
    """
    return list(dict.fromkeys([*model.parameters(), *sharded_parameters(model), *partitions(model)]))


def every_gradient(model: nn.Module) -> list[torch.Tensor]:
    """Return all gradients that exist now, including the gradients that wait for a later reduction over ranks."""
    reduced = [each for each in map(gradient_of, every_parameter(model)) if each is not None]
    return [*reduced, *(gradient for _, gradient in waiting_gradients(model))]


def splits_activations(model: nn.Module) -> bool:
    """Return True if ranks share the work on one batch (tensor parallelism).

    Return False if they only gather parameters, each for its own batch.
    """
    parts = _parameters(model)
    gathered = {*(part.sharded_param for part in parts), *gathered_parameters(model)}
    return any(part.is_dtensor for part in parts) or any(
        is_sharded(parameter) for parameter in model.parameters() if parameter not in gathered
    )


def waiting_gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the gradients that wait for a later reduction (``set_requires_gradient_sync(False)``).

    Each comes with the name of its parameter or, if it belongs to a whole group of parameters, of its module.
    """
    for name, holder, attribute in _waiting_places(model):
        gradient = getattr(holder, attribute)
        if gradient is not None:
            yield name, gradient


def _waiting_places(model: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Yield the places that store waiting gradients: a name, an object, and its attribute that holds a gradient or ``None``."""
    for group in _groups(model):
        for part in group.fsdp_params:
            if (unsharded := getattr(part, "_unsharded_param", None)) is not None:  # made by the first gathering
                yield _name_of(part), unsharded, "grad"
            if "unsharded_accumulated_grad" in vars(part):  # torch 2.15 made it a property that reads the line above
                yield _name_of(part), part, "unsharded_accumulated_grad"
        yield group._module_fqn or "", group, "_partial_reduce_output"


class KeptWaiting:
    """Remembers the gradients that wait for a later reduction over ranks. `put_back` makes the same gradients wait again."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        places = _waiting_places(model)
        self.places = [(holder, attribute, getattr(holder, attribute)) for _, holder, attribute in places]
        self._groups = [
            (group, name, copy.copy(vars(group)[name]))
            for group in _groups(model)
            for name in _OF_WAITING
            if name in vars(group)
        ]

    def put_back(self) -> None:
        """Put the remembered gradients back into their places. A place that has appeared since gets ``None``."""
        for group, name, value in self._groups:
            setattr(group, name, copy.copy(value))
        kept = {(id(holder), attribute): gradient for holder, attribute, gradient in self.places}
        for _, holder, attribute in _waiting_places(self._model):
            setattr(holder, attribute, kept.get((id(holder), attribute)))


def holds_gradients_back(model: nn.Module) -> bool:
    """Return True if the next backward leaves gradients that wait for a later reduction."""
    return any(not (group.reduce_grads and group.all_reduce_grads) for group in _groups(model))


@contextlib.contextmanager
def holding_gradients_back(model: nn.Module, *, holds: bool) -> Iterator[None]:
    """Return a context manager that decides whether gradients wait inside its block.

    With ``holds``, the modules keep their settings. Otherwise, each module reduces its gradients.
    """
    groups = _groups(model)
    before = [(group.reduce_grads, group.all_reduce_grads) for group in groups]
    try:
        for group, flags in zip(groups, before, strict=True):
            group.reduce_grads, group.all_reduce_grads = flags if holds else (True, True)
        yield
    finally:
        for group, flags in zip(groups, before, strict=True):
            group.reduce_grads, group.all_reduce_grads = flags


def emptied_after_forward(model: nn.Module, modules: Mapping[str, nn.Module]) -> frozenset[str]:
    """Return the names of those ``modules`` whose parameters may be freed between their forward and their backward."""
    owners = {
        part._module_info.module
        for group in _groups(model)
        if group.post_forward_mesh_info is not None
        for part in group.fsdp_params
    }
    return frozenset(name for name, module in modules.items() if owners and not owners.isdisjoint(module.modules()))


def release_gathered(model: nn.Module) -> None:
    """Reset FSDP2 after a step whose backward did not finish. Gradients are kept, although torch 2.15 drops gradients in a
    reset.
    """
    gradients, waiting = [(each, each.grad) for each in sharded_parameters(model)], KeptWaiting(model)
    for state, module in {module._get_fsdp_state(): module for module in _sharded_modules(model)}.items():
        if state._is_root and is_at_least(2, 13):
            module.reset_iter_state()
        elif state._is_root:
            _reset(state)
    for parameter, gradient in gradients:
        parameter.grad = gradient
    waiting.put_back()


def _reset(root: Any) -> None:
    """Do what ``reset_iter_state`` does, for versions of torch that do not have this function."""
    comm, context = root._comm_ctx, root._state_ctx
    comm.all_gather_state = comm.reduce_scatter_state = None
    comm.post_forward_order.clear()
    for state in context.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = type(state._training_state).IDLE
        for group in _groups_of(state):
            group.finalize_backward()  # waits for pending work
            group._training_state = state._training_state
            group._to_sharded()
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


def gather_once(model: nn.Module) -> None:
    """Let each module that has never gathered its parameters do so once. This allocates the memory that later steps reuse."""
    for module in _sharded_modules(model):
        parts = [part for group in groups_of(module) for part in group.fsdp_params]
        if any(getattr(part, "_unsharded_param", None) is None for part in parts):
            module.unshard()
            module.reshard()


def reshard(model: nn.Module) -> None:
    """Free gathered parameters. After a forward without a backward, the parameters of the root module are still gathered."""
    for module in _sharded_modules(model):
        module.reshard()


def own_reductions(model: nn.Module) -> list[str]:
    """Return the names of functions that replace torch's own reductions of gradients: the user's, or those of gradient
    compression.
    """
    found = dict.fromkeys(thing for group in _groups(model) for thing in _own_of(group) if thing is not None)
    return [getattr(thing, "__qualname__", type(thing).__name__) for thing in found]


class KeptShards:
    """Sets FSDP2's state aside, so that trial steps between two training steps do not change it. Until `put_back`, zeros
    replace the waiting gradients.

    Until then, torch's own reductions replace the user's reductions, which may keep unsent data and count steps. Parameters
    that stay gathered after backward (``set_reshard_after_backward(False)``) are freed at the beginning and by `put_back`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        if not _is_busy(model):
            reshard(model)
        self._reductions = [(group, group._reduce_scatter_comm, group._all_reduce_hook) for group in _groups(model)]
        for group, _, _ in self._reductions:
            if _own_of(group)[0] is not None:
                from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

                group._reduce_scatter_comm = DefaultReduceScatter()
            group._all_reduce_hook = None
        self._waiting = KeptWaiting(model)
        for holder, attribute, gradient in self._waiting.places:
            if gradient is not None:
                setattr(holder, attribute, torch.zeros_like(gradient))

    def put_back(self) -> None:
        """Restore FSDP2's state, and discard what an unfinished step has left."""
        if _is_busy(self._model):
            release_gathered(self._model)
        reshard(self._model)
        self._waiting.put_back()
        for group, scatter, hook in self._reductions:
            group._reduce_scatter_comm, group._all_reduce_hook = scatter, hook


def _own_of(group: FSDPParamGroup) -> tuple[Any, Any]:
    """Return the user's reduce-scatter (None if torch's own is in use) and the all-reduce hook."""
    scatter = group._reduce_scatter_comm
    return None if type(scatter).__module__.startswith("torch.") else scatter, group._all_reduce_hook


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    if _HOME not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    # `fully_shard` makes a subclass; this check is cheap, and every step of large models calls it
    if not FSDPModule.__subclasses__():
        return []
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _states(model: nn.Module) -> list[FSDPState]:
    return list(dict.fromkeys(module._get_fsdp_state() for module in _sharded_modules(model)))


def _groups(model: nn.Module) -> list[FSDPParamGroup]:
    return [group for state in _states(model) for group in _groups_of(state)]


def groups_of(module: FSDPModule) -> list[FSDPParamGroup]:
    """Return FSDP2's groups of a module that ``fully_shard`` was called on. The groups hold the parameters and the hooks."""
    return _groups_of(module._get_fsdp_state())


def _groups_of(state: FSDPState) -> list[FSDPParamGroup]:
    fields = vars(state)
    if "_fsdp_param_groups" in fields:
        return list(fields["_fsdp_param_groups"])
    if "_fsdp_param_group" not in fields:
        raise lacking("FSDPState._fsdp_param_groups")
    return [group] if (group := fields["_fsdp_param_group"]) is not None else []


def _parameters(model: nn.Module) -> list[FSDPParam]:
    return [part for group in _groups(model) for part in group.fsdp_params]


def _name_of(part: FSDPParam) -> str:
    return part._param_fqn or part._module_info.param_name


def _is_busy(model: nn.Module) -> bool:
    """Return True if a module is in the middle of a forward or a backward."""
    parts: list[FSDPState | FSDPParamGroup] = [*_states(model), *_groups(model)]
    return any(part._training_state.name != _IDLE for part in parts) or any(
        group._post_forward_indices for group in _groups(model)
    )
