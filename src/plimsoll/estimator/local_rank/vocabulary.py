"""Divides word embeddings and heads by vocabulary, with the cross entropy over a part of the words.

Each rank holds a range of the words. Embedding: words of other ranks give zeros, and the results are summed. Head: logits
``[tokens, vocabulary / tp]``. Loss: the largest logit, the sum of exponentials and the label's logit are each reduced over
ranks, one number per token, so no rank ever holds all logits.

A vocabulary that ``tp`` does not divide is divided unevenly, as by ``torch.chunk``; the rank described here is the first, which
holds the most.

Source: Shoeybi et al. 2019, section 3 ("parallel cross entropy"); buffers as in torch's
``torch.distributed.tensor.parallel.loss_parallel``, which saves the log-probabilities (Megatron-LM saves the exponentials in
the memory of the logits: as many saved bytes, but one buffer less while the loss is computed).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from plimsoll.errors import InvalidLayout
from plimsoll.estimator.local_rank.collectives import all_reduce_, leave
from plimsoll.estimator.local_rank.cuts import Edits, Shard

_GROUP = "tp"
_COUNTS = ("vocab_size", "num_embeddings", "out_features")


def local_words(words: int, tp: int) -> int:
    """Return the number of words that the first rank holds."""
    return -(-words // tp)


def divide_words(modules: Mapping[str, nn.Module], model: nn.Module, tp: int, edits: Edits) -> int:
    """Cut word embeddings and heads to this rank's words, and set the vocabulary sizes that losses use.

    Return the number of this rank's words, or 0 if the model does not have embeddings or heads.
    """
    sizes = {_words(module) for module in modules.values()}
    if not sizes:
        return 0
    words = max(sizes)
    if len(sizes) > 1:
        raise InvalidLayout(
            f"Tensor parallelism does not support vocabularies of {' and '.join(map(str, sorted(sizes)))} words in one model.",
            why="the loss over divided logits supports only one vocabulary size",
            next='keep the other table whole: roles={"path.of.it": "replicate"}',
        )
    local = local_words(words, tp)
    for module in modules.values():
        edits.shard(module._parameters["weight"], Shard(dim=0, kept=local, ranks=tp, group=_GROUP))
        edits.shard(module._parameters.get("bias"), Shard(dim=0, kept=local, ranks=tp, group=_GROUP))
        if isinstance(module, nn.Embedding):
            table = _Table(local, tp)
            edits.hook(module.register_forward_pre_hook(table.mask))
            edits.hook(module.register_forward_hook(table.reduce))
            edits.at_end(table.forget)
            if module.padding_idx is not None and module.padding_idx >= local:
                edits.set(module, "padding_idx", None)
    _localise_counts(model, modules.values(), words, local, edits)
    return local


def _words(module: nn.Module) -> int:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight.shape[0]


def _localise_counts(model: nn.Module, modules: Iterable[nn.Module], words: int, local: int, edits: Edits) -> None:
    """Set vocabulary sizes in modules and their configurations to the local size: models reshape logits to these sizes."""
    owners: dict[int, object] = {id(module): module for module in model.modules()}
    owners.update({id(config): config for config in _configs(model)})
    divided = {id(module) for module in modules}
    for key, owner in owners.items():
        names = _COUNTS if key in divided else ("vocab_size",)
        edits.scale(owner, names, lambda size: local if size == words else size)


def _configs(model: nn.Module) -> Iterable[object]:
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None:
            yield config
            yield from (part for part in vars(config).values() if type(part).__name__.endswith("Config"))


class _Table:
    """The lookup in one rank's part of an embedding: words of other ranks are looked up as word 0 and set to zero."""

    def __init__(self, local: int, tp: int) -> None:
        self._local = local
        self._tp = tp
        self._elsewhere: torch.Tensor | None = None

    def mask(self, module: nn.Module, args: Any) -> Any:
        words = args[0]
        self._elsewhere = words >= self._local
        return (words.masked_fill(self._elsewhere, 0), *args[1:])

    def reduce(self, module: nn.Module, args: Any, output: Any) -> Any:
        assert self._elsewhere is not None
        mine = output.masked_fill_(self._elsewhere.unsqueeze(-1), 0.0)
        self.forget()
        return leave(mine, self._tp, _GROUP)

    def forget(self) -> None:
        self._elsewhere = None


class VocabularyLoss(TorchFunctionMode):
    """A mode that, while active, makes ``cross_entropy`` over ``local`` classes compute the loss over all ranks' words."""

    def __init__(self, local: int, tp: int) -> None:
        super().__init__()
        self._local = local
        self._tp = tp

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            return self._cross_entropy(*args, **kwargs)
        return func(*args, **kwargs)

    def _cross_entropy(
        self,
        input: torch.Tensor,  # noqa: A002 - torch's signature
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:
        if input.dim() != 2 or input.shape[1] != self._local or target.dtype.is_floating_point:
            return F.cross_entropy(
                input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
            )
        if weight is not None or label_smoothing or size_average is not None or reduce is not None:
            raise InvalidLayout(
                "Tensor parallelism does not support weight= or label_smoothing= in cross entropy over divided logits.",
                why="they need more than the three reductions per token that the estimate models",
                next="leave weight= and label_smoothing= out, or keep the head whole: "
                'roles={"lm_head": "replicate", "model.embed_tokens": "replicate"}',
            )
        logits = input.float() if torch.is_autocast_enabled(input.device.type) else input  # as autocast does
        losses = VocabularyParallelCrossEntropy.apply(logits, target, ignore_index, self._tp)
        if reduction == "none":
            return losses  # type: ignore[no-any-return]
        total = losses.sum()
        return total / (target != ignore_index).sum() if reduction == "mean" else total  # type: ignore[no-any-return]


class VocabularyParallelCrossEntropy(torch.autograd.Function):
    """An autograd function that returns minus the log-probability of every target, ``[tokens]``.

    It saves the log-probabilities of this rank's words.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, ignored: int, tp: int) -> torch.Tensor:
        largest = logits.amax(1, keepdim=True)
        all_reduce_(largest, tp, _GROUP)
        shifted = logits - largest
        total = shifted.exp().sum(1, keepdim=True)
        all_reduce_(total, tp, _GROUP)
        log_probabilities = shifted - total.log()
        del shifted
        absent = (target >= logits.shape[1]) | (target == ignored)
        present = target.masked_fill(absent, 0).unsqueeze(1)
        losses = log_probabilities.gather(1, present).squeeze(1).neg().masked_fill(absent, 0.0)
        all_reduce_(losses, tp, _GROUP)
        losses = losses.masked_fill(target == ignored, 0.0)
        ctx.save_for_backward(log_probabilities, present, absent, target == ignored)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        log_probabilities, present, absent, is_ignored = ctx.saved_tensors
        scale = gradients[0].masked_fill(is_ignored, 0.0).unsqueeze(1)
        update = torch.zeros_like(log_probabilities)
        update.scatter_(1, present, absent.logical_not().unsqueeze(1).to(update.dtype).neg())
        return (update + log_probabilities.exp()) * scale, None, None, None
