"""The conditions under which a recorded recipe (ops that rebuild dropped tensors) may be used for a call. All are checked
before anything is dropped.

There are three checks, in this order:

1. Before the call: may Plimsoll install saved-tensor hooks? See `is_somebody_elses_call`; `compiled_part` is checked once.
2. Before forward: does the call look like a recorded call? `SignatureReader.read` makes a key of its inputs and state.
3. After forward, while every saved tensor is still held: did the call do the same as the recorded call? The torch calls must
   match (see ``call_stream``), and `Guard.holds` compares the saved tensors.

If the second or the third check fails, the call keeps everything, so its gradients are correct by construction.

Guards cannot see everything, for example a constant inside a C++ extension. Samples catch such differences (see ``sampling``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from plimsoll.engine.hooks import GONE, OpenCall
from plimsoll.engine.modes import Modes, modes_around
from plimsoll.engine.replay_plan import ReplayPlan
from plimsoll.engine.torch_flags import Flags, flags_for
from plimsoll.tracing.local_tensors import beside_weights, is_pending, is_sharded, layout_key, local_of
from plimsoll.tracing.torch_internals import (
    are_saved_hooks_enabled,
    is_being_traced,
    is_in_forward_ad,
    peek_functorch,
    top_saved_hooks,
    without_torch_function,
)

NO_OFFSET = -1
"""The offset that is noted for a saved tensor without a single storage (a sparse tensor)."""
_SCALARS = (bool, int, float, complex, str)
_PLAIN = (torch.Tensor, nn.Parameter)


def is_somebody_elses_call() -> bool:
    """Return whether the plan must not manage the saved tensors of the call that begins now.

    This is so if other saved-tensor hooks are active, if such hooks are forbidden, or if a functorch transform, forward-mode AD
    or a tracer is active.
    """
    return (
        top_saved_hooks(True) is not None
        or not are_saved_hooks_enabled()
        or peek_functorch() is not None
        or is_in_forward_ad()
        or is_being_traced()
    )


Places = list[tuple[dict[str, torch.Tensor | None], str]]
"""Where the parameters and buffers are: a list of pairs of a module's dictionary (such as ``_parameters``) and the name in it.
"""


class Entry(NamedTuple):
    """Data: everything that is known about a call of a region (a module that the plan decides about) before forward runs.

    ``signature`` (a hashable tuple of shapes, dtypes and other state) determines which recordings fit the call. ``sources`` are
    the region's current parameters and buffers, in the order of `SignatureReader.places`. ``inputs`` are the tensors among the
    arguments, ``flags`` are torch's flags, and ``modes`` are the user's active function modes.
    """

    signature: tuple[Any, ...]
    sources: list[torch.Tensor | None]
    inputs: list[torch.Tensor]
    flags: Flags
    modes: Modes | None

    def memory(self, places: Iterable[int]) -> dict[int, torch.UntypedStorage]:
        """Return the storages of the parameters and buffers with these indices in ``sources``, as a mapping from index to
        storage.
        """
        found = ((place, self.sources[place]) for place in places)
        return {place: local_of(source).untyped_storage() for place, source in found if source is not None}


class SignatureReader:
    """Reads the state of a region before a call: inputs, parameters, buffers, scalar attributes, and active modes. From the
    state it makes the call's signature, a hashable key.
    """

    def __init__(self, module: nn.Module, device_type: str) -> None:
        self._module = module
        self._device_type = device_type
        self._generation = 0
        self._scan()

    def _scan(self) -> None:
        """Find the places (dictionaries and names) of the parameters, buffers, submodules and scalar attributes that are read
        in each call.

        This is repeated when submodules were replaced or tensors moved. Each scan starts a new generation, whose number is part
        of the signature.
        """
        module = self._module
        self._generation += 1
        self._children = [
            (inner._modules, tuple(inner._modules.values())) for inner in module.modules() if inner._modules
        ]
        self._scalars = [
            (inner.__dict__, name)
            for inner in module.modules()
            for name, value in inner.__dict__.items()
            if isinstance(value, _SCALARS)
        ]
        self.places: Places = []
        """Where the parameters are, then the buffers, then the extra tensors that belong to frozen (quantized) weights."""
        for kind in ("_parameters", "_buffers"):
            for inner in module.modules():
                holder = getattr(inner, kind)
                self.places += [(holder, name) for name, tensor in holder.items() if _has_memory(tensor)]
        self.places += [(holder, key) for _, holder, key in beside_weights(module)]
        first: dict[int, int] = {}
        self._ties = []
        for index, (holder, name) in enumerate(self.places):
            tensor = holder[name]
            assert tensor is not None
            twin = first.setdefault(local_of(tensor).untyped_storage()._cdata, index)
            if twin != index:
                self._ties.append((twin, index))

    def scalars(self) -> tuple[Any, ...]:
        """Return the current values of all attributes of the region and its submodules that were numbers, bools or strings when
        the region was scanned. For an attribute that has become something else, such as a tensor, return its type.
        """
        values = [holder.get(name) for holder, name in self._scalars]
        return tuple([value if isinstance(value, _SCALARS) else type(value) for value in values])

    def _sources(self) -> tuple[list[torch.Tensor | None], tuple[bool, ...]]:
        """Return the current parameters and buffers of the region, and a tuple that says for each whether it requires a
        gradient.

        Raises:
            AttributeError: a parameter or buffer no longer exists.
        """
        sources: list[Any] = [holder.get(name) for holder, name in self.places]
        return sources, tuple([source.requires_grad for source in sources])

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        """Read the inputs, parameters and modes of a call before its forward runs, and return them as an `Entry`. The user's
        function modes do not see these reads.
        """
        modes = modes_around()
        if modes is None:
            return self._read(args, kwargs, None)
        with without_torch_function():
            return self._read(args, kwargs, modes)

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any], modes: Modes | None) -> Entry:
        for modules, children in self._children:
            if tuple(modules.values()) != children:
                self._scan()
                break
        inputs: list[torch.Tensor] = []
        described = (
            tuple([describe(value, inputs) for value in args]),
            tuple([(name, describe(kwargs[name], inputs)) for name in sorted(kwargs)]) if kwargs else (),
        )
        try:
            sources, trained = self._sources()
        except AttributeError:
            # bitsandbytes moves an 8-bit weight's scales from the weight to the module's state in the first call.
            self._scan()
            sources, trained = self._sources()
        flags = flags_for(self._device_type)
        signature = (
            self._generation,
            described,
            None if len(inputs) == 1 else _shared_bases(inputs),
            trained,
            tuple([_share_memory(sources[one], sources[other]) for one, other in self._ties]) if self._ties else (),
            torch.is_autocast_enabled(self._device_type) and torch.get_autocast_dtype(self._device_type),
            flags,
            modes,
        )
        return Entry(signature, sources, inputs, flags, modes)


def _has_memory(tensor: torch.Tensor | None) -> bool:
    """Return whether a parameter or buffer exists and is dense (strided). Ops that read a sparse tensor are never run again."""
    return tensor is not None and local_of(tensor).layout is torch.strided


def _share_memory(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return False
    return bool(local_of(one).untyped_storage()._cdata == local_of(other).untyped_storage()._cdata)


def describe(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a hashable description of an argument.

    It contains a tensor's geometry, dtype and device, the value of a scalar, or the type of another object. Tensors in the
    argument are appended to ``tensors``.
    """
    kind = type(value)
    # the fast path for everything but DTensors and similar subclasses
    if kind in _PLAIN and value.layout is torch.strided:
        tensors.append(value)
        return (value.requires_grad, _lies(value))
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        if is_sharded(value):
            return (kind, layout_key(value), value.requires_grad, _lies(local_of(value)))
        if is_pending(value):
            return (kind, value.requires_grad, _lies(local_of(value)))
        return (kind, value.layout, value.shape, value.dtype, value.requires_grad, value.device)
    if value is None or isinstance(value, _SCALARS):
        return (kind, value)
    if isinstance(value, tuple | list):
        return (kind, *[describe(item, tensors) for item in value])
    if isinstance(value, dict):
        return (dict, *[(str(name), describe(item, tensors)) for name, item in value.items()])
    return kind


def _lies(value: torch.Tensor) -> tuple[Any, ...]:
    lazy = value.is_neg() or value.is_conj()
    return (value.shape, value.dtype, value.stride(), value.storage_offset(), value.device, lazy)


def _shared_bases(tensors: list[torch.Tensor]) -> tuple[int, ...] | None:
    """Return which of these tensors share memory, or ``None`` if none do.

    The result has, for each tensor, the index of the first tensor with the same memory. All tensors are alive, so equal
    addresses mean the same storage. A tensor without an address is treated as if it shared with none.
    """
    bases = []
    for tensor in tensors:
        local = local_of(tensor)
        if type(local) in _PLAIN and local.layout is torch.strided:
            bases.append(int(local.data_ptr() - local.storage_offset() * local.element_size()))
        else:
            bases.append(id(tensor))
    return None if len(set(bases)) == len(bases) else tuple(map(bases.index, bases))


class Guard:
    """Checks whether a call of a region that has just returned saved the same tensors as the recorded call.

    ``node_counts`` is the range for the number of autograd nodes that such a call may create.
    """

    def __init__(self, plan: ReplayPlan, node_counts: range) -> None:
        self._node_counts = node_counts
        dropped = set(plan.dropped_slots)
        self._slots = tuple(
            (g.size, g.dtype, g.stride, g.offset, slot.index in dropped, slot.value < 0)
            for g, slot in zip(plan.recording.slot_geometries, plan.graph.slots, strict=True)
        )
        self._layouts = plan.recording.layouts
        self._twins = plan.twins
        held = ((value, source) for value, source in plan.parameters if source.is_held)
        self._offsets = tuple((source.place, plan.geometry_of(value).offset) for value, source in held)

    def holds(self, call: OpenCall, node_count: int) -> bool:
        """Return whether this call saved the same tensors as the recorded call and created an expected number of autograd
        nodes.

        This is the last check before tensors are dropped. It runs in every call that is not recorded, and reads only metadata
        on the host.
        """
        tensors = call.tensors
        if len(tensors) != len(self._slots) or node_count not in self._node_counts:
            return False
        if call.sharded != len(self._layouts) or (call.sharded and not self._lies_alike(call)):
            return False
        for cell, tensor, (size, dtype, stride, offset, is_dropped, may_be_gone) in zip(
            call.cells, tensors, self._slots, strict=True
        ):
            if cell is GONE:
                if may_be_gone:
                    continue
                return False
            if (
                tensor.shape != size
                or tensor.dtype is not dtype
                or (offset != NO_OFFSET and (tensor.stride() != stride or tensor.storage_offset() != offset))
            ):
                return False
            # A saved tensor that was written to afterwards must raise in backward, as it does without a plan. A kept cell
            # raises; a recipe would not.
            if is_dropped and cell.version_now(tensor) != cell.version:
                return False
        sources = call.sources
        for place, offset in self._offsets:  # flat parameters are slices of one storage, and may move within it
            source = sources[place]
            if source is None or local_of(source).storage_offset() != offset:
                return False
        for first, second in self._twins:
            if tensors[first].untyped_storage()._cdata != tensors[second].untyped_storage()._cdata:
                return False
        return True

    def _lies_alike(self, call: OpenCall) -> bool:
        """Return whether the same saved tensors are DTensors as in the recorded call, each with the same mesh, placements and
        global shape.
        """
        shells = ((call.cells[index].shell, layout) for index, layout in self._layouts.items())
        return all(shell is not None and shell.layout == layout for shell, layout in shells)
