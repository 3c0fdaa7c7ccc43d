"""Refuse settings of an estimate that contradict themselves, or that no model could satisfy."""

from __future__ import annotations

from plimsoll.artifacts.job import Precision
from plimsoll.errors import InvalidLayout, InvalidOption, InvalidStrategy
from plimsoll.estimator.parallelism.rank import PARTLY_SHARDED
from plimsoll.estimator.setting import Setting, optimizer_of
from plimsoll.planning.costing.host import host_link
from plimsoll.planning.costing.links import Collective, collective_seconds
from plimsoll.planning.strategies import codecs_of_strategy

_WHOLLY_SHARDED = 3
_ALL_PERCENT = 100
_OF_TRANSFORMER_ENGINE = ("delayed", "current", "mxfp8")


def check_setting(setting: Setting) -> None:
    """Refuse settings that are invalid for every model, before a model is traced.

    Raises:
        UnknownOptimizer, InvalidOption: the optimizer does not exist, or master weights are given without an optimizer.
        InvalidStrategy: the strategy compresses; estimates do not know the seconds of codecs.
        InvalidLayout: several ranks on a device whose links are not known.
    """
    if setting.optimizer is not None:
        optimizer_of(setting, ())
    elif setting.has_master_weights:
        raise InvalidOption(
            "Master weights without an optimizer.",
            why="they are the copies that an optimizer updates, and there is none",
            next="name an optimizer, or leave master weights out",
        )
    _check_techniques(setting)
    if codecs_of_strategy(setting.strategy):
        raise InvalidStrategy(
            f"unsupported: strategy {setting.strategy!r} in an estimate.",
            why="it compresses, and seconds of codecs have to be measured on the device",
            next="estimate none, full, every:k, sqrt, selective:…, offload or auto, or plan on the device itself",
        )
    if setting.is_sending:
        host_link(setting.device)
    if setting.layout.ranks > 1:  # raises for a device without links
        collective_seconds(Collective.ALL_REDUCE, 1, setting.layout.ranks, setting.device)


def _check_techniques(setting: Setting) -> None:
    """Refuse techniques that contradict the layout, the precision or the optimizer."""
    how, layout, narrow = setting.how, setting.layout, (Precision.BF16, Precision.FP16)
    if setting.precision is Precision.FSDP_BF16 and (layout.zero < PARTLY_SHARDED or layout.shards == 1):
        raise InvalidOption(
            f"precision fsdp-bf16 with {layout}.",
            why="it is what FSDP casts when it gathers shards, and nothing is sharded",
            next="give zero=3 (or zero=2, which keeps what it gathered) and dp=2 or more, or take bf16-mixed",
        )
    if how.reduce and setting.precision is not Precision.FSDP_BF16:
        raise InvalidOption(
            f"reduce={how.reduce} without precision fsdp-bf16.",
            why="it is the reduce_dtype of FSDP's mixed precision",
            next="add precision fsdp-bf16, or write gradients=fp32 for gradients accumulated and reduced in f32",
        )
    if how.gradients and setting.precision in narrow and not setting.has_master_weights:
        raise InvalidOption(
            f"gradients={how.gradients} with parameters in {setting.precision} and no master weights.",
            why="torch's optimizers take a gradient in the type of its parameter; f32 ones are for master weights",
            next="add master weights, or leave gradients= out",
        )
    if how.gradients == "both" and (setting.precision not in narrow or layout.zero >= PARTLY_SHARDED):
        raise InvalidOption(
            f"gradients=both in {setting.precision or 'the types of the model'} with {layout}.",
            why="gradients of 16 bits stay beside f32 ones where nothing shards them",
            next="take precision bf16 or fp16 with zero=1 or none, or gradients=fp32",
        )
    if how.tf32 and "tf32" not in setting.device.peak_flops_per_second:
        raise InvalidOption(
            f"tf32 on {setting.device.name}.", why="the device has no such arithmetic", next="leave tf32 out"
        )
    _check_offload(setting)
    _check_fp8(setting)
    _check_megatron(setting)
    if how.padded >= _ALL_PERCENT:
        raise InvalidOption(
            f"padded={how.padded} leaves no token.",
            why="it is the share of padding in percent",
            next="give a number below 100",
        )
    if how.loss == "vocabulary-parallel" and layout.tp == 1:
        raise InvalidOption(
            "loss=vocabulary-parallel without tensor parallelism.",
            why="the vocabulary is divided among tensor-parallel ranks, and there is one",
            next="give tp=2 or more, or write loss=fused or loss=chunked",
        )
    if how.moe == "deepep" and layout.ep == 1:
        raise InvalidOption(
            f"moe=deepep with {layout}.",
            why="it exchanges tokens between the ranks of experts, and every rank has all of them",
            next="give ep=8, or write moe=fused",
        )
    _check_adapters(setting)
    if how.optimizer_in_backward:
        _check_optimizer_in_backward(setting)


def _check_offload(setting: Setting) -> None:
    """Refuse offloads that the host cannot hold, or cannot hold alone."""
    how, layout, reason, remedy = setting.how, setting.layout, "", ""
    if "optimizer" in how.on_host and (setting.optimizer is None or how.optimizer_in_backward or not setting.is_gpu):
        reason = "a GPU's optimizer steps on the host when all gradients are there"
        remedy = "name an optimizer and a GPU, and leave optimizer-in-backward out"
    elif "parameters" in how.on_host and (layout.zero != _WHOLLY_SHARDED or layout.shards == 1):
        reason = "shards lie on the host until they are gathered, and nothing is sharded"
        remedy = "give zero=3 and dp=2 or more, or write offload=optimizer"
    if reason:
        what = setting.optimizer or "no optimizer"
        raise InvalidOption(
            f"offload={how.offload} with {what} on {setting.device.name}, {layout}.", why=reason, next=remedy
        )


def _check_fp8(setting: Setting) -> None:
    """Refuse fp8 recipes without arithmetic on the device, and sharded fp8 weights, whose memory is not modelled."""
    how, device = setting.how, setting.device
    wanted = "mxf8" if how.fp8 == "mxfp8" else "f8"
    if how.fp8 and wanted not in device.peak_flops_per_second:
        raise InvalidOption(
            f"fp8={how.fp8} on {device.name}.", why="the device has no such arithmetic", next="leave fp8= out"
        )
    if how.fp8 in _OF_TRANSFORMER_ENGINE and setting.layout.zero == _WHOLLY_SHARDED:
        raise InvalidOption(
            f"unsupported: fp8={how.fp8} with zero=3.",
            why="Transformer Engine holds weights in fp8 beside those in 16 bits, and how it shards them is not modelled",
            next="take zero=2 or less, or fp8=tensorwise or fp8=rowwise",
        )


def _check_megatron(setting: Setting) -> None:
    """Refuse techniques without effect here, or that contradict each other."""
    how, layout, found = setting.how, setting.layout, ("", "", "")
    if how.megatron and how.compile:
        found = "megatron with compile", "both say which kernels blocks run in", "leave one of them out"
    elif how.fp8_weights and how.fp8 not in _OF_TRANSFORMER_ENGINE:
        recipes = ", ".join(_OF_TRANSFORMER_ENGINE)
        found = "fp8-weights", "Transformer Engine holds them so", f"add fp8= with one of its recipes: {recipes}"
    elif how.comm_overlap and not ((layout.tp > 1 and layout.sequence_parallel) or (layout.zero and layout.shards > 1)):
        what = "it hides collectives of sequence parallelism, and gathers of ZeRO"
        found = f"comm-overlap with {layout}", what, "give tp= with sp, or zero=1 with dp=, or leave it out"
    elif how.expandable_segments and not setting.is_gpu:
        what = "it is a setting of the caching allocator"
        found = f"expandable-segments on {setting.device.name}", what, "leave it out, or name a GPU"
    if found[0]:
        raise InvalidOption(f"{found[0]}.", why=found[1], next=found[2])


def _check_adapters(setting: Setting) -> None:
    how, layout = setting.how, setting.layout
    is_low_rank = bool(how.lora or how.qlora)
    if is_low_rank + bool(how.adapters) > 1 or (how.lora and how.qlora) or (how.lora_on and not is_low_rank):
        raise InvalidOption(
            f"{how} says two things, or half of one.",
            why="a model trains low-rank adapters or bottlenecks, beside weights as they are or in 4 bits",
            next="give one of lora=16, qlora=16 or adapters=64; lora-on= goes with the first two",
        )
    if how.is_adapting and (layout.tp > 1 or layout.ep > 1):
        raise InvalidLayout(
            f"unsupported: adapters under tp={layout.tp}, ep={layout.ep}.",
            why="which rank holds which part of an adapter is not known here",
            next="take dp=, pp= and zero= alone",
        )


def _check_optimizer_in_backward(setting: Setting) -> None:
    layout, reason = setting.layout, ""
    if setting.optimizer is None:
        reason = "there is no optimizer"
    elif layout.micro_batches > 1:
        reason = f"gradients of {layout.micro_batches} micro-batches are added up before a step"
    elif layout.shards > 1 and layout.zero < PARTLY_SHARDED:
        reason = "buckets hold all gradients until the last of them is reduced"
    elif setting.how.gradients:
        reason = "gradients=fp32 keeps them all"
    if reason:
        raise InvalidOption(
            f"optimizer-in-backward with {layout}.",
            why=reason,
            next="leave it out, or take one micro-batch on one rank or under zero=2 or 3",
        )
