"""Compresses the gradients of a model under DistributedDataParallel, through its communication hook.

DDP's reducer accepts one hook in its lifetime. Our hook stays when compression is removed, and then does exactly what DDP does
without a hook, bit for bit; a later call uses it again.

On a CPU the hook's collectives run on their own thread and in their own process group, one bucket after the other. gloo matches
collectives by the order of calls, and callbacks of two buckets would race. On a GPU the hook queues them on their own stream.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future as Job
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from plimsoll.distributed.gradient_compression.averaging import Averages, average_whole
from plimsoll.distributed.gradient_compression.slots import GradientPart, GradientSlot
from plimsoll.distributed.gradient_compression.switch import Reduced, Switch, reduce_bucket
from plimsoll.errors import InvalidOption, RankFailed


def parts_of_replicas(model: DistributedDataParallel) -> list[GradientPart]:
    """The trained parameters, with shape and dtype of their reductions."""
    return [
        GradientPart(name=name, shape=tuple(parameter.shape), dtype=parameter.dtype)
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad
    ]


class Replicas:
    """Compresses the buckets of one model; ``switch`` is the result of ``free_switch_of``."""

    def __init__(
        self, model: DistributedDataParallel, switch: Switch | None, slots: list[GradientSlot], averages: Averages
    ) -> None:
        trained = [each for each in model.module.parameters() if each.requires_grad]
        self._slots = dict(zip(trained, slots, strict=True))
        self._averages = averages
        self._step = 0
        self._failure: str | None = None
        self._group = model.process_group
        self._own_group: dist.ProcessGroup | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        if switch is None:
            switch = Switch(model.process_group)
            model.register_comm_hook(switch, reduce_bucket)
        device = next(model.parameters()).device
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
        else:
            self._group = self._own_group = _twin_of(model.process_group)
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gradient-compression")
        self._switch = switch
        switch.answer = self.reduce

    def reduce(self, bucket: GradBucket) -> Reduced:
        """Average a bucket, at once (on a GPU queued) or on the thread."""
        flat, gradients, step = bucket.buffer(), bucket.gradients(), self._step
        slots = [self._slots[each] for each in bucket.parameters()]
        self._step += bucket.is_last()

        def job() -> torch.Tensor:
            # gloo aborts the process if two ranks call different collectives of one group: exchange nothing after a failure.
            if self._failure is not None:
                raise RankFailed(
                    f"An earlier exchange of gradients failed on this rank ({self._failure}).",
                    why="the other ranks are at that exchange, or past it, and would be sent what belongs to another one",
                    next="start again from the last checkpoint, or remove() the compression on all ranks and begin anew",
                    ranks=(dist.get_rank(),),
                )
            try:
                if flat.is_sparse:
                    with torch.no_grad():
                        average_whole(flat, self._group)
                else:
                    self._averages.reduce(slots, gradients, flat, group=self._group, step=step)
            except BaseException as error:
                self._failure = f"{type(error).__name__}: {error}"
                raise
            return flat

        if self._stream is not None:
            return _on_stream(self._stream, flat.device, job)
        assert self._thread is not None, "removed"
        return _on_thread(self._thread, job)

    def restore(self, step: int) -> None:
        """Continue to count steps from here."""
        self._step = step

    def detach(self) -> None:
        """Leave the buckets to DDP's all-reduce."""
        self._switch.answer = None
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
        is_whole = self._own_group is not None and self._own_group.size() == dist.get_world_size()
        # A smaller group stays until the program ends: torch would give its name to a later group, and gloo its addresses.
        # A failed group stays too: its unfinished collectives may hold it on its own threads.
        if is_whole and self._failure is None:
            dist.destroy_process_group(self._own_group)
        self._own_group = None


def _twin_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A new group of the same ranks; all of them have to call this."""
    ranks = dist.get_process_group_ranks(group)
    is_whole = len(ranks) == dist.get_world_size()
    twin: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=not is_whole)
    return twin


def free_switch_of(model: DistributedDataParallel) -> Switch | None:
    """Return the switch that an earlier call left in the model; None if the model is without a hook.

    Raises:
        InvalidOption: the model has another hook, or is compressed already.
    """
    # Hooks can only be read from this private list. Registering a second hook fails, whoever registered the first.
    for hook, state in model._comm_hooks:
        if isinstance(state, Switch):
            if state.answer is not None:
                raise twice()
            return state
        raise InvalidOption(
            f"The model has a communication hook already: {hook.__qualname__}.",
            why="DistributedDataParallel takes one hook for its whole life",
            next="wrap the model again without that hook, or leave the gradients to it",
        )
    return None


def twice() -> InvalidOption:
    """The error for a model whose gradients are compressed already."""
    return InvalidOption(
        "The gradients of this model are compressed already.",
        why="what one compression left unsent would be lost to the other",
        next="remove() the first handle, then compress again",
    )


def _on_thread(thread: ThreadPoolExecutor, job: Callable[[], torch.Tensor]) -> Reduced:
    promised: Reduced = torch.futures.Future()

    def hand_on(done: Job[torch.Tensor]) -> None:
        error = done.exception()
        if error is None:
            promised.set_result(done.result())
        else:
            # torch's reducer treats the exception like a tensor, and shows only its text.
            told = RuntimeError(f"{type(error).__name__}: {error}")
            promised.set_exception(told)  # type: ignore[arg-type]  # torch types it as a result

    thread.submit(job).add_done_callback(hand_on)
    return promised


def _on_stream(stream: torch.cuda.Stream, device: torch.device, job: Callable[[], torch.Tensor]) -> Reduced:
    promised: Reduced = torch.futures.Future(devices=[device])
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        promised.set_result(job())
    return promised
