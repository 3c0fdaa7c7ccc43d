"""The ``state`` of an optimizer while some of its tensors are on a link (in host memory or on disk): a mapping that brings a
parameter's tensors back when its entry is read.

In the entry of a parameter, an `AwayTensor` takes the place of each tensor on the link. Code that counts bytes reads the
mapping with ``dict.values(optimizer.state)``, which does not bring anything back.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, Protocol

import torch

from plimsoll.errors import OffloadFailed
from plimsoll.tracing.stepped_gradients import SHAPE_READS
from plimsoll.tracing.torch_internals import count_holders


class AwayTensor(torch.Tensor):
    """Stands for a tensor of optimizer state that is in host memory or on disk. It has the tensor's shape, strides and dtype,
    but no values.
    """

    @staticmethod
    def like(tensor: torch.Tensor) -> torch.Tensor:
        """Return a stand-in for ``tensor``: an object with its shape, strides and dtype, but without values."""
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return meta.as_subclass(AwayTensor)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in SHAPE_READS:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise OffloadFailed(
            "This tensor of optimizer state is not on the device now.",
            why="the plan keeps it in host memory or on disk between steps, and this entry was read before it left",
            next="read it again through optimizer.state[parameter], which brings it back",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]  # torch's stub lacks the name
        return f"<optimizer state of shape {tuple(self.shape)}, not on the device now>"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return AwayTensor.like(self)


class Keeper(Protocol):
    """A protocol for the object that keeps an optimizer's state on a link (in host memory or on disk)."""

    def bring_back(self, parameters: Iterable[Any]) -> None:
        """Bring the state of these parameters back from the link (to host memory or disk) to the device."""

    def forget(self, parameters: Iterable[Any]) -> None:
        """Discard the stored state of these parameters, because other state replaces it."""

    def copied(self, parameter: Any, state: Any) -> Any:
        """Return the state of one parameter. Tensors that are in host memory or on disk are returned as copies."""

    def takes_copies(self) -> bool:
        """Return True at the first call after ``state_dict``: its caller gets copies of the state, and the state itself stays
        on the link.
        """


class OffloadedStates(defaultdict[Any, Any]):
    """The ``state`` of an optimizer, by parameter. Reading an entry brings its tensors back to the device.

    Copies and pickles of this mapping are plain mappings with whole tensors.
    """

    def __init__(self, keeper: Keeper, states: Iterable[tuple[Any, Any]]) -> None:
        super().__init__(dict, states)
        self._keeper = keeper

    def present(self, parameter: Any) -> Any:
        """Return the state of a parameter without bringing tensors back to the device; ``None`` if the state does not exist."""
        return dict.get(self, parameter)

    def order(self, parameters: Iterable[Any], known: Container[int]) -> None:
        """Move the entries of these parameters to the end, in this order, except for ``known`` ones (their ``id``). A step as a
        whole makes the entries in the order of its groups, and loops may rely on that.
        """
        for parameter in parameters:
            if parameter in self and id(parameter) not in known:
                dict.__setitem__(self, parameter, dict.pop(self, parameter))

    def __getitem__(self, key: Any) -> Any:
        self._keeper.bring_back((key,))
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._keeper.forget((key,))
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._keeper.forget((key,))
        super().__delitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._keeper.bring_back((key,))
        return super().get(key, default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._keeper.bring_back((key,))
        return super().setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._keeper.bring_back((key,))
        return super().pop(key, *default)

    def popitem(self) -> tuple[Any, Any]:
        self._keeper.bring_back(list(self))
        return super().popitem()

    def clear(self) -> None:
        self._keeper.forget(list(self))
        super().clear()

    def values(self) -> Any:
        self._keeper.bring_back(list(self))
        return super().values()

    def items(self) -> Any:
        if self._keeper.takes_copies():
            return self._copies().items()
        self._keeper.bring_back(list(self))
        return super().items()

    def __iter__(self) -> Iterator[Any]:
        # Defined here so that ``dict(state)`` reads through this class: for other classes it copies the entries as they are.
        return super().__iter__()

    def copy(self) -> Any:
        return defaultdict(dict, self._copies())

    def __copy__(self) -> Any:
        return self.copy()

    def __reduce__(self) -> Any:
        return defaultdict, (dict, self._copies())

    def _copies(self) -> dict[Any, Any]:
        return {key: self._keeper.copied(key, state) for key, state in dict.items(self)}


def is_held_elsewhere(state: dict[Any, Any], key: Any) -> bool:
    """Return True if something else than this entry holds the tensor or its storage.

    Example:
        >>> state = {"exp_avg": torch.zeros(4)}
        >>> is_held_elsewhere(state, "exp_avg")
        False
        >>> view = state["exp_avg"][:2]
        >>> is_held_elsewhere(state, "exp_avg")
        True
    """
    alone = _references({key: torch.empty(1)}, key)
    return any(found > least for found, least in zip(_references(state, key), alone, strict=True))


def _references(state: dict[Any, Any], key: Any) -> tuple[int, int]:
    tensor = state[key]
    return sys.getrefcount(tensor), count_holders(tensor)
