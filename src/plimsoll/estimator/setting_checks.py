"""Refuses settings of an estimate that contradict themselves, or that are wrong for every model."""

from __future__ import annotations

from plimsoll.artifacts.job import Layout, Precision, Techniques
from plimsoll.artifacts.trace import Trace
from plimsoll.errors import InvalidLayout, InvalidOption, InvalidStrategy
from plimsoll.estimator.optimizers import is_paged
from plimsoll.estimator.parallelism.rank import PARTLY_SHARDED
from plimsoll.estimator.setting import AUTO, Setting, optimizer_of
from plimsoll.planning.costing.host import host_link
from plimsoll.planning.costing.links import Collective, collective_seconds
from plimsoll.planning.strategies import codecs_of_strategy, refuse_unknown_ops

_WHOLLY_SHARDED = 3
_ALL_PERCENT = 100
_OF_TRANSFORMER_ENGINE = ("delayed", "current", "mxfp8")


def check_setting(setting: Setting) -> None:
    """Refuse settings that are invalid for every model. This happens before a model is traced.

    Raises:
        UnknownOptimizer, InvalidOption: the optimizer does not exist, or master weights are given without an optimizer.
        InvalidStrategy: the strategy names an op that does not exist, or compresses; estimates do not know the seconds of
            codecs.
        InvalidLayout: several ranks on a device whose links are not known.
    """
    if setting.optimizer is not None:
        optimizer_of(setting, ())
    elif setting.has_master_weights:
        raise InvalidOption(
            "Master weights need an optimizer.",
            why="master weights are the copies that an optimizer updates, and the job does not have an optimizer",
            next="name an optimizer, or leave master weights out",
        )
    _check_techniques(setting)
    if setting.strategy.startswith("selective:"):
        # A question that was asked before is answered without torch.
        from plimsoll.tracing.torch_internals import existing_ops

        refuse_unknown_ops(setting.strategy, existing_ops())
    if codecs_of_strategy(setting.strategy):
        raise InvalidStrategy(
            f"Estimates do not support the strategy {setting.strategy!r}.",
            why="it compresses, and the time that codecs need must be measured on the device",
            next="estimate none, full, every:k, sqrt, selective:…, offload or auto, or plan on the device itself",
        )
    if setting.is_sending:
        host_link(setting.device)
    if setting.layout.ranks > 1:  # raises for a device without links
        collective_seconds(Collective.ALL_REDUCE, 1, setting.layout.ranks, setting.device)


def check_longest(layout: Layout, how: Techniques) -> None:
    """Raise an error for options that a search for the longest sequence cannot use: a layout that divides a sample or the model
    over ranks, and offloaded activations, because a row of the result offloads them.

    Raises:
        InvalidLayout, InvalidOption: one of these options is set.
    """
    divided = [f"{key}={getattr(layout, key)}" for key in ("tp", "cp", "pp", "ep") if getattr(layout, key) > 1]
    if divided:
        raise InvalidLayout(
            f"The longest sequence is not searched under {','.join(divided)}.",
            why="it is searched for ranks that run whole samples through the whole model",
            next="use dp= and zero= only, or estimate one length: plimsoll estimate TARGET --seq 128k --layout …",
        )
    if "activations" in how.on_host:
        raise InvalidOption(
            "offload=activations cannot be combined with a search for the longest sequence.",
            why="the search has a row with it, and rows without it to compare with",
            next="leave offload=activations out",
        )


def check_auto(strategy: str | None, budget: int | str | None) -> None:
    """Refuse ``auto`` without a budget: it would keep everything, and the user expects that something is planned.

    Raises:
        InvalidOption: names both options.
    """
    if strategy == AUTO and budget is None:
        raise InvalidOption(
            "strategy='auto' needs a budget.",
            why="auto is the fastest plan within a budget, and without a limit it would keep everything, as none does",
            next="pass budget='auto' for the device's memory, or bytes such as budget='60GiB'",
        )


def _check_techniques(setting: Setting) -> None:
    """Raise an error for techniques that contradict the layout, the precision or the optimizer."""
    how, layout, narrow = setting.how, setting.layout, (Precision.BF16, Precision.FP16)
    if setting.precision is Precision.FSDP_BF16 and (layout.zero < PARTLY_SHARDED or layout.shards == 1):
        raise InvalidOption(
            f"The precision fsdp-bf16 cannot be combined with {layout}.",
            why="FSDP casts parameters when it gathers shards, and this layout does not shard parameters",
            next="use zero=3 (or zero=2, which keeps gathered parameters) and dp=2 or more, or use bf16-mixed",
        )
    if how.reduce and setting.precision is not Precision.FSDP_BF16:
        raise InvalidOption(
            f"reduce={how.reduce} needs the precision fsdp-bf16.",
            why="it is the reduce_dtype of FSDP's mixed precision",
            next="use precision fsdp-bf16, or write gradients=fp32 to accumulate and reduce gradients in f32",
        )
    if setting.precision in narrow:
        _check_master_weights(setting, setting.precision.value)
    if how.gradients == "both" and (setting.precision not in narrow or layout.zero >= PARTLY_SHARDED):
        raise InvalidOption(
            f"gradients=both cannot be combined with {setting.precision or 'the dtypes of the model'} and {layout}.",
            why="16-bit gradients are kept in addition to f32 gradients only if gradients are not sharded",
            next="use precision bf16 or fp16 with zero=1 or without zero, or use gradients=fp32",
        )
    if how.tf32 and "tf32" not in setting.device.peak_flops_per_second:
        raise InvalidOption(
            f"{setting.device.name} does not support tf32.",
            why="the device cannot compute in tf32",
            next="leave tf32 out",
        )
    _check_offload(setting)
    _check_fp8(setting)
    _check_megatron(setting)
    if how.padded >= _ALL_PERCENT:
        raise InvalidOption(
            f"padded={how.padded} would leave only padding.",
            why="it is the percentage of tokens that are padding",
            next="use a number below 100",
        )
    if how.loss == "vocabulary-parallel" and layout.tp == 1:
        raise InvalidOption(
            "loss=vocabulary-parallel needs tensor parallelism.",
            why="it divides the vocabulary among the tensor-parallel ranks, and there is only one",
            next="use tp=2 or more, or write loss=fused or loss=chunked",
        )
    if how.moe == "deepep" and layout.ep == 1:
        raise InvalidOption(
            f"moe=deepep cannot be combined with {layout}.",
            why="it exchanges tokens between ranks with different experts, but here every rank has all experts",
            next="use ep=8, or write moe=fused",
        )
    _check_adapters(setting)
    if how.optimizer_in_backward:
        _check_optimizer_in_backward(setting)


def check_gradients(setting: Setting, trace: Trace) -> None:
    """Raise an error for gradients in f32 of a model whose own dtypes have 16 bits, without master weights. The dtypes are
    known only after the model was traced.

    Raises:
        InvalidOption: see above.
    """
    narrow = {each.dtype for each in trace.parameters if each.is_trainable} & {"bf16", "f16"}
    if setting.precision is None and narrow:
        _check_master_weights(setting, " and ".join(sorted(narrow)))


def _check_master_weights(setting: Setting, dtype: str) -> None:
    if setting.how.gradients and not setting.has_master_weights:
        raise InvalidOption(
            f"gradients={setting.how.gradients} with parameters in {dtype} needs master weights.",
            why="torch's optimizers need gradients in the dtype of the parameters, and only master weights are in f32",
            next="add master weights, or leave gradients= out",
        )


def _check_offload(setting: Setting) -> None:
    """Raise an error for offloads to the host that this device or layout cannot do."""
    how, layout, reason, remedy = setting.how, setting.layout, "", ""
    if "optimizer" in how.on_host and (setting.optimizer is None or how.optimizer_in_backward or not setting.is_gpu):
        reason = (
            "offloading the optimizer means that a GPU's optimizer steps on the host after all gradients are computed"
        )
        remedy = "name an optimizer and a GPU, and leave optimizer-in-backward out"
    elif "optimizer" in how.on_host and is_paged(setting.optimizer or ""):
        reason = "a paged optimizer moves its state between host and device itself, so the state would be moved twice"
        remedy = f"leave offload= out, or use {(setting.optimizer or '').removeprefix('paged-')}"
    elif "parameters" in how.on_host and (layout.zero != _WHOLLY_SHARDED or layout.shards == 1):
        reason = "offloaded parameters are shards on the host, and this layout does not shard parameters"
        remedy = "use zero=3 and dp=2 or more, or write offload=optimizer"
    if reason:
        what = setting.optimizer or "no optimizer"
        raise InvalidOption(
            f"offload={how.offload} cannot be combined with {what} on {setting.device.name}, {layout}.",
            why=reason,
            next=remedy,
        )


def _check_fp8(setting: Setting) -> None:
    """Raise an error for fp8 recipes that the device cannot compute, and for sharded fp8 weights (their memory is not
    modelled).
    """
    how, device = setting.how, setting.device
    wanted = "mxf8" if how.fp8 == "mxfp8" else "f8"
    if how.fp8 and wanted not in device.peak_flops_per_second:
        raise InvalidOption(
            f"{device.name} does not support fp8={how.fp8}.",
            why="the device cannot compute in this format",
            next="leave fp8= out",
        )
    if how.fp8 in _OF_TRANSFORMER_ENGINE and setting.layout.zero == _WHOLLY_SHARDED:
        raise InvalidOption(
            f"fp8={how.fp8} is not supported with zero=3.",
            why="Transformer Engine holds fp8 copies of the 16-bit weights, and estimates do not model how it shards them",
            next="use zero=2 or less, or fp8=tensorwise or fp8=rowwise",
        )


def _check_megatron(setting: Setting) -> None:
    """Raise an error for techniques that do not change anything in this setting, and for techniques that contradict each
    other.
    """
    how, layout, found = setting.how, setting.layout, ("", "", "")
    if how.megatron and how.compile:
        found = (
            "megatron cannot be combined with compile",
            "each sets the kernels of the blocks",
            "leave out one of them",
        )
    elif how.fp8_weights and how.fp8 not in _OF_TRANSFORMER_ENGINE:
        recipes = ", ".join(_OF_TRANSFORMER_ENGINE)
        found = (
            "fp8-weights needs fp8=",
            "only Transformer Engine holds weights in fp8",
            f"add fp8= with one of {recipes}",
        )
    elif how.comm_overlap and not ((layout.tp > 1 and layout.sequence_parallel) or (layout.zero and layout.shards > 1)):
        what = "it hides collectives of sequence parallelism and gathers of ZeRO, and this layout has neither"
        found = f"comm-overlap does not apply to {layout}", what, "use tp= with sp, or zero=1 with dp=, or leave it out"
    elif how.expandable_segments and not setting.is_gpu:
        what = "it is a setting of the caching allocator for GPUs"
        found = f"expandable-segments does not apply to {setting.device.name}", what, "leave it out, or name a GPU"
    if found[0]:
        raise InvalidOption(f"{found[0]}.", why=found[1], next=found[2])


def _check_adapters(setting: Setting) -> None:
    how, layout = setting.how, setting.layout
    is_low_rank = bool(how.lora or how.qlora)
    if is_low_rank + bool(how.adapters) > 1 or (how.lora and how.qlora) or (how.lora_on and not is_low_rank):
        raise InvalidOption(
            f"The adapter options in {how} are contradictory or incomplete.",
            why="a model trains either LoRA adapters (lora=, or qlora= with 4-bit weights) or bottleneck adapters (adapters=)",
            next="use one of lora=16, qlora=16 or adapters=64; use lora-on= only with lora= or qlora=",
        )
    if how.qlora and how.moe:
        raise InvalidOption(
            f"moe={how.moe} cannot be combined with qlora={how.qlora}.",
            why="these kernels multiply experts in 16 bits, and QLoRA holds experts in 4 bits",
            next="leave moe= out, or use lora=",
        )
    if how.is_adapting and (layout.tp > 1 or layout.ep > 1):
        raise InvalidLayout(
            f"Adapters are not supported with tp={layout.tp}, ep={layout.ep}.",
            why="estimates do not model which rank holds which part of an adapter",
            next="use only dp=, pp= and zero=",
        )


def _check_optimizer_in_backward(setting: Setting) -> None:
    layout, reason = setting.layout, ""
    if setting.optimizer is None:
        reason = "the job does not have an optimizer"
    elif layout.micro_batches > 1:
        reason = f"the gradients of {layout.micro_batches} micro-batches must be added up before the optimizer steps"
    elif layout.shards > 1 and layout.zero < PARTLY_SHARDED:
        reason = "buckets hold all gradients until the last gradient is reduced"
    elif setting.how.gradients:
        reason = "gradients= keeps all gradients until the step"
    if reason:
        raise InvalidOption(
            f"optimizer-in-backward cannot be combined with this job on {layout}.",
            why=reason,
            next="leave it out, or name an optimizer and use one micro-batch, on one rank or with zero=2 or 3",
        )
