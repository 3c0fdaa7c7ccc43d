"""A model and its optimizer in, everything that a checkpoint holds of them by name out; and back, without a step in between.

Names are those of the plain model, whatever wraps it: a run under ``DistributedDataParallel`` can be resumed under FSDP2.
State of the optimizer goes by the parameter's name, and so do the options of its group: pipeline stages may be divided anew.
``torch.distributed.checkpoint.state_dict`` makes an optimizer without state take a step with zero gradients first, which
counts: Adam would resume one step ahead, and hooks on steps would run. Names for the optimizer are therefore found here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from plimsoll.errors import CheckpointMismatch, InvalidOption
from plimsoll.tracing.ddp import inner_module

MODEL, STATE, GROUP = "model/", "optimizer/state/", "optimizer/group/"
_COMPILED = "_orig_mod"
_HOST = torch.device("cpu")


def entries_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Everything to keep, by name: the live tensors (whole or sharded), and small objects.

    Raises:
        InvalidOption: the optimizer trains something else, or hides sharded tensors in containers.
    """
    entries = {MODEL + name: value for name, value in get_model_state_dict(model).items()}
    if optimizer is None:
        return entries
    packed = optimizer.state_dict()
    for group, names in zip(packed["param_groups"], _names_by_group(model, optimizer), strict=True):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for index, name in zip(group["params"], names, strict=True):
            entries[GROUP + name] = options
            for key, value in packed["state"].get(index, {}).items():
                _refuse_hidden_shards(name, key, value)
                entries[f"{STATE}{name}/{key}"] = value
    return entries


def host_copy_of(value: torch.Tensor) -> torch.Tensor:
    """Memory on the host for what ``value`` is to become, laid out over ranks alike."""
    return torch.empty_like(value.detach(), device=_HOST, requires_grad=False)


def state_template(
    key: str, size: torch.Size, dtype: torch.dtype, live: Mapping[str, Any], parameter: torch.Tensor
) -> torch.Tensor:
    """Memory on the host for one tensor of an optimizer's state.

    Args:
        key: its name among the entries.
        size: of the whole tensor, as it was saved.
        dtype: as it was saved.
        live: the entries as they are, which show how an optimizer that has state already divides it.
        parameter: whose state it is; state of its shape is divided as it is.
    """
    present = live.get(key)
    if isinstance(present, torch.Tensor) and present.shape == size:
        return torch.empty_like(present.detach(), dtype=dtype, device=_HOST, requires_grad=False)
    if parameter.shape == size:
        return torch.empty_like(parameter.detach(), dtype=dtype, device=_HOST, requires_grad=False)
    return torch.empty(size, dtype=dtype, device=_HOST)


def set_model(model: nn.Module, loaded: Mapping[str, Any]) -> None:
    """Copy what was loaded into the model."""
    state = {name.removeprefix(MODEL): value for name, value in loaded.items() if name.startswith(MODEL)}
    set_model_state_dict(model, state, options=StateDictOptions(strict=True))


def set_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, loaded: Mapping[str, Any]) -> None:
    """Give the optimizer the state and the options that were loaded.

    Raises:
        CheckpointMismatch: parameters that share a group here had different options.
    """
    state: dict[int, dict[str, Any]] = {}
    names_by_index: list[str] = []
    groups: list[dict[str, Any]] = []
    for names in _names_by_group(model, optimizer):
        first = len(names_by_index)
        names_by_index += names
        options = [loaded[GROUP + name] for name in names]
        if any(repr(other) != repr(options[0]) for other in options):
            raise CheckpointMismatch(
                f"Parameters that were in different groups of the optimizer are in one group now: {names[0]!r}, …",
                why="their learning rates or other options differed, and one group can have only one",
                next="make the optimizer with the groups that the checkpoint was saved with",
            )
        kept = dict(options[0]) if options else {}
        groups.append(kept | {"params": list(range(first, len(names_by_index)))})
    indices = {name: index for index, name in enumerate(names_by_index)}
    for entry, value in loaded.items():
        if entry.startswith(STATE):
            name, _, key = entry.removeprefix(STATE).partition("/")
            state.setdefault(indices[name], {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    _restore_dtypes(optimizer, state)


def parameters_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's parameters by their names in the model."""
    groups = zip(optimizer.param_groups, _names_by_group(model, optimizer), strict=True)
    return {name: param for group, names in groups for param, name in zip(group["params"], names, strict=True)}


def _restore_dtypes(optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, Any]]) -> None:
    """Optimizers cast floating state to the parameter's dtype; state that was kept in another one keeps it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state.items():
        present = optimizer.state[parameters[index]]
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and present[key].dtype != value.dtype:
                present[key] = value.to(present[key].device)


def _names_by_group(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """For each group of the optimizer, the names of its parameters in order."""
    names = {id(parameter): _plain(name) for name, parameter in inner_module(model).named_parameters()}
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if strangers:
        raise InvalidOption(
            f"The optimizer trains {len(strangers)} tensors that are not parameters of the model.",
            why=f"the first has the shape {tuple(strangers[0].shape)}; a checkpoint keeps state by the parameter's name",
            next="pass the model whose parameters the optimizer was made with; make it after fully_shard, not before",
        )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def _refuse_hidden_shards(name: str, key: str, value: Any) -> None:
    if isinstance(value, dict | list | tuple) and any(isinstance(leaf, DTensor) for leaf in _leaves(value)):
        raise InvalidOption(
            f"The optimizer's {key!r} of {name!r} is a {type(value).__name__} with sharded tensors in it.",
            why="a checkpoint divides tensors over other ranks by name, and these have none",
            next="use an optimizer that keeps its tensors in state[parameter][name]",
        )


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return [value]
    return [leaf for part in value for leaf in _leaves(part)]
