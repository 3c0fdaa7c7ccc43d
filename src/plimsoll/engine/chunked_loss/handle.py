"""Change a causal language model of transformers so that its loss is computed in chunks, and change it back.

Between the head and the loss, models cast, scale, cap or slice their logits. While the loss is chunked, the head returns
`DeferredLogits`: hidden states in place of the logits, with a note of these operations. A cast only changes the noted dtype,
because the loss computes in float32 in any case. Scales and one softcap are noted. Slices of positions are taken from the
hidden states. Any other operation needs the logits themselves, and raises.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import nn

from plimsoll.engine.chunked_loss.loss import linear_cross_entropy
from plimsoll.errors import InvalidBatch, InvalidModel
from plimsoll.planning.what_if import chunk_rows_for
from plimsoll.tracing.recorder.calling import name_of


def chunk_loss(model: nn.Module, *, chunk_bytes: int | str | None = None, chunk_rows: int | None = None) -> ChunkHandle:
    """Compute the loss of a causal language model without ever holding all its logits.

    From here on, a call with labels and gradients goes from the last hidden states to the loss chunk by chunk. Everything else
    (no labels, ``torch.no_grad()``, generation) is as before, and so are parameters and ``state_dict``.

    Args:
        model: a causal language model of transformers, or a wrapper around such a model (PEFT). The model's output embeddings
            are a plain ``nn.Linear``, tied or not, and the model's loss is ``ForCausalLMLoss``.
        chunk_bytes: the most that the logits of one chunk may take, in bytes or with a unit (``"256MiB"``).
        chunk_rows: how many positions a chunk has. Without ``chunk_bytes`` and ``chunk_rows``, a chunk's logits take as many
            bytes as the hidden states.

    Returns:
        A handle that removes the chunked loss again. It is also a context manager.

    Raises:
        InvalidModel: the model, its head or its loss is of another kind, or the loss is chunked already.
        InvalidOption: a chunk cannot have this size.

    Example:
        >>> with chunk_loss(model):  # doctest: +SKIP
        ...     model(input_ids=ids, labels=ids).loss.backward()

    While the loss is chunked, ``output.logits`` knows only its shape, dtype and device: the logits were never computed, and any
    other use of it raises. Known weakness: a copy of the model made inside (``copy.deepcopy``) keeps the chunked loss forever.
    """
    chunk_rows_for(1, 1, 1, element_bytes=1, chunk_bytes=chunk_bytes, chunk_rows=chunk_rows)
    base = _causal_model(model)
    head = _head_of(base)
    return ChunkHandle(_ChunkedHead(base, head, chunk_bytes, chunk_rows))


def can_chunk(model: nn.Module) -> bool:
    """Return whether `chunk_loss` accepts this model."""
    try:
        _head_of(_causal_model(model))
    except InvalidModel:
        return False
    return True


class ChunkHandle:
    """The handle of a model whose loss is chunked. Its ``remove`` restores the model's own loss. As a context manager, the
    handle does so at the end of the block.
    """

    def __init__(self, chunked: _ChunkedHead) -> None:
        self._chunked: _ChunkedHead | None = chunked
        chunked.attach()

    @property
    def is_active(self) -> bool:
        """Whether the loss is still computed in chunks."""
        return self._chunked is not None

    def remove(self) -> None:
        """Restore the head and the loss that the model had before. A second call does nothing."""
        chunked, self._chunked = self._chunked, None
        if chunked is not None:
            chunked.detach()

    def __enter__(self) -> ChunkHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class _ChunkedHead:
    """Replaces the forward of a model's head, and the model's loss.

    The replacements are bound methods, so a deep copy of the model copies this object too.
    """

    def __init__(self, model: Any, head: nn.Linear, chunk_bytes: int | str | None, chunk_rows: int | None) -> None:
        self._model = model
        self._head = head
        self._chunk_bytes = chunk_bytes
        self._chunk_rows = chunk_rows
        self._hooks: list[Any] = []
        self._set_loss = model.__dict__.get("_loss_function")
        self._is_wanted = False
        self._made = 0
        self._used = 0
        self._wants_tuple = False

    def attach(self) -> None:
        """Replace the forward of the head and the loss of the model, and register the hooks on the model."""
        self._model.loss_function = self.loss
        self._head.forward = self.head_forward  # type: ignore[method-assign, assignment]
        self._hooks = [
            self._model.register_forward_pre_hook(self.before, with_kwargs=True),
            self._model.register_forward_hook(self.after, with_kwargs=True, always_call=True),
        ]

    def detach(self) -> None:
        """Restore the forward of the head and the loss of the model, and remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        for module, name in ((self._head, "forward"), (self._model, "_loss_function")):
            if getattr(module.__dict__.get(name), "__self__", None) is self:
                del module.__dict__[name]
        if self._set_loss is not None:
            self._model.loss_function = self._set_loss

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pre-hook of the model: decide whether this call needs logits or only a loss. Only a loss is needed if
        labels are passed and gradients are enabled.
        """
        names = list(inspect.signature(model.forward).parameters)
        labels = {**dict(zip(names, args, strict=False)), **kwargs}.get("labels")
        self._is_wanted = labels is not None and torch.is_grad_enabled()
        self._made = self._used = 0
        if not self._is_wanted:
            return None
        given = kwargs.get("return_dict")
        self._wants_tuple = not (self._model.config.return_dict if given is None else given)
        return args, {**kwargs, "return_dict": True}

    def after(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """A forward hook of the model: raise ``InvalidModel`` if the model did not pass the head's output to the loss."""
        was_wanted, self._is_wanted = self._is_wanted, False
        if not was_wanted or output is None:
            return None
        if self._made != self._used:
            raise InvalidModel(
                f"{type(model).__name__} did not pass every output of its head to its loss_function.",
                why=f"the head ran {self._made} times, and loss_function {self._used} times: the loss is computed elsewhere",
                next="remove chunk_loss; call plimsoll.chunked.linear_cross_entropy(hidden, weight, labels) inside the model",
            )
        return output.to_tuple() if self._wants_tuple else None

    def head_forward(self, hidden: torch.Tensor) -> Any:
        """Replaces the head's forward: return logits if they are needed, else `DeferredLogits`."""
        if not self._is_wanted:
            return nn.Linear.forward(self._head, hidden)
        self._made += 1
        return DeferredLogits(hidden=hidden, classes=self._head.out_features, dtype=hidden.dtype)

    def loss(
        self,
        logits: Any,
        labels: torch.Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Replaces the model's loss: return the loss with labels shifted by one position.

        The loss is the mean over labels, or the sum divided by ``num_items_in_batch``.
        """
        if not isinstance(logits, DeferredLogits):
            original = _causal_lm_loss()
            result: torch.Tensor = original(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
            )
            return result
        self._used += 1
        self._check_weight()
        targets = shift_labels
        if targets is None:  # position n predicts the token at position n + 1
            targets = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        _check_rows(logits, targets, vocab_size)
        total = linear_cross_entropy(
            logits.hidden.reshape(-1, logits.hidden.shape[-1]),
            self._head.weight,
            targets.reshape(-1).to(logits.device),
            bias=self._head.bias,
            reduction="mean" if num_items_in_batch is None else "sum",
            ignore_index=ignore_index,
            scale=logits.scale,
            softcap=logits.softcap,
            chunk_bytes=self._chunk_bytes,
            chunk_rows=self._chunk_rows,
        )
        if num_items_in_batch is None:
            return total
        is_tensor = isinstance(num_items_in_batch, torch.Tensor)
        return total / (num_items_in_batch.to(total.device) if is_tensor else num_items_in_batch)  # type: ignore[union-attr]

    def _check_weight(self) -> None:
        weight = self._head.weight
        if type(weight) is not nn.Parameter and type(weight) is not torch.Tensor:
            raise InvalidModel(
                f"The head's weight has the type {type(weight).__name__} when the loss is computed.",
                why="the loss needs the whole weight on this device, but a sharded weight is gathered only while the head runs",
                next="leave the head in the root group of fully_shard, or remove chunk_loss",
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeferredLogits:
    """Takes the place of logits that are never computed. ``hidden`` is the input of the head, and the other fields note what
    the model does to the logits.

    The logits would be ``linear(hidden) * inner``, then (if ``is_capped``) the tanh of this, times ``outer``.
    """

    hidden: torch.Tensor
    classes: int
    inner: float = 1.0
    is_capped: bool = False
    outer: float = 1.0
    dtype: torch.dtype

    @property
    def scale(self) -> float:
        """The factor on the logits before the softcap.

        ``outer * tanh(inner * z)`` equals the softcap ``outer``, applied to ``inner * outer * z``.
        """
        return self.inner * self.outer if self.is_capped else self.inner

    @property
    def softcap(self) -> float | None:
        """The softcap of the logits, or ``None`` if they are not capped."""
        return self.outer if self.is_capped else None

    @property
    def shape(self) -> torch.Size:
        """The shape that the logits would have."""
        return torch.Size((*self.hidden.shape[:-1], self.classes))

    @property
    def device(self) -> torch.device:
        """The device that the logits would be on."""
        return self.hidden.device

    @property
    def ndim(self) -> int:
        """The number of dimensions that the logits would have."""
        return self.hidden.dim()

    def dim(self) -> int:
        """Return the number of dimensions that the logits would have."""
        return self.hidden.dim()

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Return the shape that the logits would have, or the size of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def float(self) -> DeferredLogits:
        """Return a copy whose noted dtype is float32. Nothing is computed: the loss is computed in float32 in any case."""
        return replace(self, dtype=torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> DeferredLogits:
        """Return a copy with another noted dtype. Nothing is computed.

        Another device raises ``InvalidModel``, because the logits would have to be moved.
        """
        dtype = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)), self.dtype)
        elsewhere = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.device | str)]
        if any(torch.device(place) != self.device for place in elsewhere):
            raise _refused("moves them to another device")
        return replace(self, dtype=dtype)

    def contiguous(self) -> DeferredLogits:
        """Return these logits unchanged: the loss itself puts the hidden states into a suitable layout."""
        return self

    def __getitem__(self, index: Any) -> DeferredLogits:
        parts: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(part, slice) or part is Ellipsis for part in parts):
            raise _refused("indexes single positions")
        reaches_classes = Ellipsis in parts or len(parts) >= self.dim()
        if reaches_classes and parts[-1] is not Ellipsis and parts[-1] != slice(None):
            raise _refused("selects some of the classes")
        return replace(self, hidden=self.hidden[index])

    def __mul__(self, factor: Any) -> DeferredLogits:
        factor = _number(factor)
        if self.is_capped:
            return replace(self, outer=self.outer * factor)
        return replace(self, inner=self.inner * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> DeferredLogits:
        return self * (1.0 / _number(divisor))

    def tanh(self) -> DeferredLogits:
        """Return a copy that notes that the logits are capped by tanh. Nothing is computed. A second cap raises
        ``InvalidModel``.
        """
        if self.is_capped:
            raise _refused("caps them twice")
        return replace(self, is_capped=True)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.tanh and len(args) == 1 and isinstance(args[0], cls):
            return args[0].tanh()
        raise _refused(f"calls {func.__name__} on them")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _refused(f"uses their {name}")


def _check_rows(logits: DeferredLogits, targets: torch.Tensor, vocab_size: int | None) -> None:
    rows = logits.hidden.shape[:-1].numel()
    if targets.numel() != rows or (vocab_size is not None and vocab_size != logits.classes):
        raise InvalidBatch(
            f"The logits have {rows} positions and {logits.classes} classes; the labels have {targets.numel()} positions and "
            f"vocab_size={vocab_size}.",
            why="the loss needs one label per position and the same number of classes (logits_to_keep leaves fewer positions "
            "than labels)",
            next="do not pass logits_to_keep together with labels",
        )


def _causal_lm_loss() -> Any:
    return importlib.import_module("transformers.loss.loss_utils").ForCausalLMLoss


def _causal_model(model: object) -> Any:
    """Return the outermost transformers model in ``model`` that has output embeddings. Its loss must be one that can be
    replaced.

    Raises:
        InvalidModel: such a model was not found, or its loss is of another kind or chunked already.
    """
    if not isinstance(model, nn.Module):
        raise InvalidModel(
            f"chunk_loss got a {type(model).__name__}, which is not a torch.nn.Module.",
            why="it changes how a module computes its loss",
            next="pass the model that you train",
        )
    transformers: Any = sys.modules.get("transformers")  # not imported: then it is not a model of transformers
    for module in () if transformers is None else model.modules():
        if isinstance(module, transformers.PreTrainedModel) and module.get_output_embeddings() is not None:
            if isinstance(getattr(module.__dict__.get("_loss_function"), "__self__", None), _ChunkedHead):
                raise InvalidModel(
                    f"The loss of {type(module).__name__} is already chunked.",
                    why="chunk_loss was called on this model before",
                    next="call remove() on the first handle",
                )
            if module.loss_function is not _causal_lm_loss():
                name = name_of(module.loss_function)
                raise _no_causal_model(model, f"the loss of {type(module).__name__} is {name}, not ForCausalLMLoss")
            return module
    raise _no_causal_model(model, "it does not contain a transformers model with output embeddings")


def _no_causal_model(model: nn.Module, why: str) -> InvalidModel:
    return InvalidModel(
        f"chunk_loss cannot chunk the loss of {type(model).__name__}.",
        why=why,
        next="call plimsoll.chunked.linear_cross_entropy(hidden, weight, labels) where your code computes the loss",
    )


def _head_of(model: Any) -> nn.Linear:
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise _no_causal_model(
            model, f"its head has the type {type(head).__name__}, but chunk_loss supports only a plain nn.Linear"
        )
    if "forward" in head.__dict__:
        raise _no_causal_model(model, "other code has replaced the forward method of its head")
    return head


def _number(factor: Any) -> float:
    if isinstance(factor, int | float) and not isinstance(factor, bool):
        return float(factor)
    raise _refused(f"scales them by a {type(factor).__name__}")


class _NoLogits(InvalidModel, AttributeError):
    """The error for code that needs the logits. It is also an ``AttributeError``, so that ``hasattr`` returns False."""


def _refused(what: str) -> InvalidModel:
    return _NoLogits(
        f"The model does not compute its logits because the loss is chunked, but other code {what}.",
        why="under chunk_loss, a training call with labels computes the loss from the hidden states, and output.logits is only "
        "a placeholder",
        next="to get logits, call the model without labels or under torch.no_grad(), or call handle.remove()",
    )
