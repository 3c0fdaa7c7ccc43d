"""A plan, a model and a batch in; an error if they do not belong together."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from plimsoll.artifacts.plan import Plan
from plimsoll.errors import PlanMismatch
from plimsoll.session.agreement import BATCH
from plimsoll.tracing.kernels import runs_gpu_kernels
from plimsoll.tracing.recorder.calling import Loss, split_batch
from plimsoll.tracing.recorder.fingerprint import fingerprint, signature


def refuse_other_model(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan that was made for a model of another structure.

    Raises:
        PlanMismatch: both fingerprints are shown.
    """
    found = fingerprint(model)
    if found != plan.fingerprint:
        raise PlanMismatch(
            f"This plan was made for another model: {plan.fingerprint}, not {found}.",
            why="classes, names, shapes or dtypes of modules, parameters or buffers differ",
            next="plan this model, or load the model that the plan was made for",
        )


def refuse_other_signature(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan, loss: Loss | None
) -> None:
    """Refuse a batch of another shape or dtype, or a step in another mode, than the plan was made for.

    Raises:
        PlanMismatch: both signatures are shown.
    """
    found = signature(model, args, kwargs, loss=loss)
    if found != plan.signature:
        raise PlanMismatch(
            f"This plan was made for another step: {plan.signature}",
            why=f"this one is {found}",
            next="plan with this batch, or pass the batch, loss= and mode that the plan was made with",
        )


def refuse_other_device(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan for another kind of device: its kernels save other tensors for backward, so decisions do not carry over.

    Raises:
        PlanMismatch: both devices are shown.
    """
    here = next(model.parameters()).device
    if runs_gpu_kernels(plan.device) is not runs_gpu_kernels(str(here)):
        raise PlanMismatch(
            f"This plan was made for {plan.device}; the model is on {here}.",
            why="a GPU's kernels save other tensors for backward than a CPU's, and the plan decides about those tensors",
            next=f"verify it on {plan.device}, or plan for this device: leave device_profile= (--device-profile) out",
        )


def step_facts(
    model: nn.Module, batch: Any, *, loss: Loss | None, optimizer: torch.optim.Optimizer | None
) -> dict[str, str]:
    """What has to be the same on ranks that plan one step together: model, batch, mode, loss, optimizer, kind of device.

    Args:
        model: as the user passed it.
        batch: as the user passed it; shapes, types and plain values count, contents do not.
        loss: as for ``plimsoll.plan``.
        optimizer: as for ``plimsoll.plan``.

    Raises:
        InvalidBatch: it is no batch.
    """
    args, kwargs = split_batch(batch)
    return {
        "model": fingerprint(model),
        BATCH: signature(model, args, kwargs, loss=loss),
        "optimizer": type(optimizer).__name__,
        "device": ", ".join(sorted({parameter.device.type for parameter in model.parameters()})),
    }
