"""Ends the connections of process groups whose ranks wait for one that will not come, and makes new ones in their place.

Whoever waits in a collective is inside of torch, where no exception of Python's reaches it. It gets an error when its
connection ends. A group whose connections have ended is out of step for good, so it gets others: every object that holds the
group (a reducer, a device mesh, the user's own names) goes on with them.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterable

import torch
import torch.distributed as dist

from plimsoll.errors import InvalidModel
from plimsoll.session.rendezvous.world import World

_CPU = torch.device("cpu")
_NO_TIME = datetime.timedelta(milliseconds=1)
_TAG = 20_873
"""Of a message that nobody sends."""
_KINDS = range(32, 256)
"""Kinds of backends are one byte, of which torch names the first few."""


def release(groups: Iterable[dist.ProcessGroup]) -> None:
    """Close the connections of these groups, so that whoever waits in one of their collectives gets an error.

    With gloo by a receive that times out at once (gloo then closes every connection of the group), with other backends
    by ``abort``. Each group has more than one rank; this rank is in no collective of theirs.
    """
    for group in groups:
        if dist.get_backend(group) == dist.Backend.GLOO:
            _close(group)
        else:
            group.abort()


def _close(group: dist.ProcessGroup) -> None:
    somebody = (group.rank() + 1) % group.size()
    with contextlib.suppress(RuntimeError):  # the time-out that this is for, or a connection that is closed already
        group.recv([torch.empty(1, device=_CPU)], somebody, _TAG).wait(_NO_TIME)


def renew(world: World, groups: Iterable[dist.ProcessGroup], occasion: str) -> None:
    """Give released groups of gloo's new connections; called on all ranks alike.

    A group keeps the first backend that it gets of each kind for good, so a new one takes a kind that was not there yet.
    The private names were seen in torch 2.13; 2.9 and 2.11 bind the same ones.

    Raises:
        InvalidModel: there is no kind left.
    """
    for group in groups:
        name, about = group.group_name, group.group_desc
        ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
        store = dist.PrefixStore(f"renewed/{occasion}/{name}/{ranks}", world.store)
        timeout = group._get_backend(_CPU).options._timeout
        backend = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout=timeout)
        backend._set_sequence_number_for_group()
        for kind in _KINDS:
            for device in group._device_types:
                group._register_backend(device, dist.ProcessGroup.BackendType(kind), backend)
            if group._get_backend(_CPU) is backend:
                break
        else:
            raise InvalidModel(
                f"A process group has had {len(_KINDS)} times new connections, and can have no more.",
                why="a training step of its ranks ran out of memory as often",
                next="start the job anew, with a smaller budget",
            )
        group._set_group_name(name)  # both are kept by the backend
        group._set_group_desc(about)
