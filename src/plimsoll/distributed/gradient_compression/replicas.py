"""Compresses the gradients of a model under DistributedDataParallel, through DDP's communication hook.

DDP's reducer accepts one hook in its lifetime. So our hook stays when compression is removed, and then does exactly what DDP
does without a hook, bit for bit. A later call of ``compress_gradients`` uses the same hook again.

The exchange of a bucket is blocking code. On a GPU it is queued on a stream of its own, and backward continues. On a CPU
backward waits for the exchange: gloo matches collectives by the order of calls, so a second thread would need a second process
group. If an exchange fails, backward ends there, and torch refuses further steps of the wrapper. So ranks never get what is
meant for another exchange.

Do not add ``from __future__ import annotations`` here: DDP compares a hook's annotations with classes, not with names.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from plimsoll.distributed.gradient_compression.averaging import Averages, SplitGradients, average_whole
from plimsoll.distributed.gradient_compression.method import Method
from plimsoll.distributed.gradient_compression.slots import Form, GradientPart, GradientSlot
from plimsoll.errors import InvalidOption

Reduced = torch.futures.Future[torch.Tensor]
"""A future whose result is the bucket's memory after averaging."""


class ReplicaHook:
    """The state of DDP's hook. It compresses buckets while ``averages`` is set, and otherwise does DDP's own all-reduce."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._group = model.process_group
        self._device = next(model.parameters()).device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self.averages: Averages | None = None
        self.slots: dict[nn.Parameter, GradientSlot] = {}

    def reduce(self, bucket: GradBucket) -> Reduced:
        """Average a bucket over ranks, and return a future of the bucket's memory."""
        flat = bucket.buffer()
        if self.averages is None:
            work = dist.all_reduce(flat.mul_(1 / self._group.size()), group=self._group, async_op=True)
            assert work is not None, "it is asynchronous"
            reduced: Reduced = work.get_future().then(lambda future: future.value()[0])
            return reduced
        if self._stream is None:
            self._average(self.averages, bucket)
            return _finished(flat, [])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._average(self.averages, bucket)
            return _finished(flat, [self._device])

    def _average(self, averages: Averages, bucket: GradBucket) -> None:
        if bucket.buffer().is_sparse:
            with torch.no_grad():
                average_whole(bucket.buffer(), self._group)
            return
        slots = [self.slots[each] for each in bucket.parameters()]  # type: ignore[index]  # they are parameters
        averages.average(SplitGradients.of_mean(bucket.buffer(), bucket.gradients()), slots, self._group)


def reduce_bucket(hook: ReplicaHook, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce one bucket. DDP calls this function, the registered hook, for each bucket in backward."""
    return hook.reduce(bucket)


def _finished(flat: torch.Tensor, devices: list[int | str | torch.device]) -> Reduced:
    """Return a future that is done. On a GPU, the future is done when the current stream arrives at this point."""
    future: Reduced = torch.futures.Future(devices=devices)
    future.set_result(flat)
    return future


class Replicas:
    """A model under DDP, whose buckets are all-reduced. Attaches compression to the model's hook, and detaches it."""

    form: Form = "mean"
    name = "replicas"

    def __init__(self, model: DistributedDataParallel) -> None:
        self.group: dist.ProcessGroup = model.process_group
        self._model = model
        self._trained = {
            name: each
            for name, each in model.module.named_parameters()
            if each.requires_grad and name not in model.parameters_to_ignore  # DDP does not reduce their gradients
        }
        self._hook: ReplicaHook | None = None

    def parts(self) -> list[GradientPart]:
        """Return the trained parameters, with the shape and dtype of their reductions."""
        return [GradientPart(name, tuple(each.shape), each.dtype) for name, each in self._trained.items()]

    def check(self, method: Method) -> None:
        """Raise an error if the model has another hook or is already compressed. All methods work with DDP."""
        # Hooks can only be read from this private list. Registering a second hook fails, whoever registered the first.
        for hook, state in self._model._comm_hooks:
            if not isinstance(state, ReplicaHook):
                raise InvalidOption(
                    f"The model has a communication hook already: {hook.__qualname__}.",
                    why="DistributedDataParallel takes one hook for its whole life",
                    next="wrap the model again without that hook, or leave the gradients to it",
                )
            if state.averages is not None:
                raise twice()
            self._hook = state

    def attach(self, slots: list[GradientSlot], averages: Averages) -> None:
        """Compress the model's gradients from now on. ``slots`` are the records of the parameters, in the order of
        ``parts``.
        """
        if self._hook is None:
            self._hook = ReplicaHook(self._model)
            self._model.register_comm_hook(self._hook, reduce_bucket)
        self._hook.slots = dict(zip(self._trained.values(), slots, strict=True))
        self._hook.averages = averages

    def detach(self) -> None:
        """End the compression: from now on DDP's own all-reduce averages the buckets.

        DDP holds the hook for ever, so the hook drops its parameters and residuals.
        """
        assert self._hook is not None, "attached"
        self._hook.averages, self._hook.slots = None, {}


def twice() -> InvalidOption:
    """Return the error to raise if ``compress_gradients`` is called for a model whose gradients are compressed already."""
    return InvalidOption(
        "The gradients of this model are compressed already.",
        why="what one compression left unsent would be lost to the other",
        next="remove() the first handle, then compress again",
    )
