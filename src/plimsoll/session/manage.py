"""Applies a plan to the model that it was made for, in one process or on all ranks together."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from plimsoll.artifacts.plan import Plan
from plimsoll.engine.apply import Handle, apply_plan
from plimsoll.errors import PlanMismatch, PlanNotUsable, UnknownDevice
from plimsoll.planning.costing.devices import find_device
from plimsoll.session.agreement import Agreement
from plimsoll.session.rendezvous.conversation import differing
from plimsoll.session.rendezvous.exchange import exchange
from plimsoll.session.rendezvous.world import current_world
from plimsoll.session.task import stand_in_loss
from plimsoll.tracing.kernels import runs_gpu_kernels
from plimsoll.tracing.recorder.fingerprint import fingerprint
from plimsoll.units import format_bytes


def manage(model: nn.Module, plan: Plan, **options: Any) -> Handle:
    """Apply the plan to the model. If recipes (ops that rebuild a value) repeat collectives, ranks compare these collectives
    when a region (managed module) is recorded.

    Options and errors are those of `plimsoll.engine.apply.apply_plan`.
    """
    return apply_plan(model, plan, agree_on_service=agree_on_service, **options)


def manage_together(
    agreement: Agreement, model: nn.Module, plan: Plan, *, sentinel_every: int = 1, verify_every: int = 0
) -> Handle:
    """Apply the plan on all ranks of the agreement. Call this inside the agreement's ``with`` block. If another rank fails, the
    plan is removed here too.

    Raises:
        PlanMismatch, PlanNotUsable, OffloadFailed: the plan cannot be applied here.
        RankFailed, RankMissing: the plan cannot be applied on another rank.
    """
    handle = manage(model, plan, sentinel_every=sentinel_every, verify_every=verify_every)
    try:
        agreement.meet("applied")
    except BaseException:
        handle.remove()
        raise
    return handle


def agree_on_service(region: str, peers: tuple[int, ...], service: str) -> None:
    """Check that ranks which communicate within a region recompute it in the same way, with the same collectives.

    If one rank kept values that the others rebuild, the others would wait in a collective for ever. So ranks compare once,
    after the region was recorded. ``peers`` are global ranks, including this one.

    Raises:
        RanksDiffer: another rank handles the region differently.
        RankMissing: another rank does not record this region now.
    """
    world = current_world(peers)
    if world is None:
        return
    answers = [answer.decode() for answer in exchange(world, f"collectives of {region}", service.encode())]
    if len(set(answers)) > 1:
        why = "if one rank keeps values that the others rebuild, the others wait in a collective for ever"
        raise differing({f"region {region!r}": answers}, world.ranks, "plan without 'collectives' in allow=", why=why)


def check_plan(plan: object) -> None:
    """Refuse an object that is not a plan, such as a path."""
    if not isinstance(plan, Plan):
        raise PlanNotUsable(
            f"plan= has the type {type(plan).__name__}, not a Plan.",
            why="a plan is made by plimsoll.plan(...), or read from a file by plimsoll.load(path)",
            next="plimsoll.load(path)" if isinstance(plan, str) else "plan = plimsoll.plan(model, batch, budget=...)",
        )


def refuse_optimizer_decisions(plan: Plan, verb: str) -> None:
    """Refuse a plan that offloads optimizer state or steps parameters in backward, for a verb that does not run the optimizer
    as training does.
    """
    if plan.state is not None:
        action, word = f"offloads the state of {plan.state.optimizer}", "offload-state"
    elif plan.backward_steps is not None:
        action, word = f"steps parameters of {plan.backward_steps.optimizer} in backward", "step-in-backward"
    else:
        return
    raise PlanNotUsable(
        f"{verb} cannot run this plan: it {action}.",
        why="only plimsoll.apply and plimsoll.attach run the optimizer's step for some parameters at a time",
        next=f"plan without {word!r} in allow=, or check this plan with plimsoll.verify",
    )


def refuse_other_model(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan that was made for a model with another structure, or for another framework."""
    if plan.framework != "torch":
        raise PlanMismatch(
            f"This plan was made for {plan.framework}, not for PyTorch.",
            why=f"its decisions name values of a {plan.framework} function, and a PyTorch module saves other values",
            next=f"use the plan with plimsoll.integrations.{plan.framework}, or plan this model with plimsoll.plan",
        )
    found = fingerprint(model)
    if found != plan.fingerprint:
        raise PlanMismatch(
            f"This plan was made for another model: {plan.fingerprint}, not {found}.",
            why="modules, parameters or buffers differ in class, name, shape or dtype, or other parameters are trained",
            next="plan this model, or load the model that the plan was made for",
        )


def refuse_other_signature(found: str, plan: Plan) -> None:
    """Refuse a batch of another shape or dtype than the plan was made for, or a step in another mode."""
    if found == plan.signature:
        return
    next_ = "plan with this batch, or pass the batch, loss= and mode that the plan was made with"
    if stand_in_loss.__name__ in plan.signature:
        next_ = "plimsoll.attach made it for its training, whose loss it does not know; verify a plan of plimsoll.plan"
    raise PlanMismatch(
        f"This plan was made for another step: {plan.signature}", why=f"this step is {found}", next=next_
    )


_OTHER_KERNELS = (
    "kernels of a GPU save other tensors for backward than kernels of a CPU, and the plan decides about saved tensors"
)


def warn_of_other_device(model: nn.Module, plan: Plan) -> None:
    """Warn if the plan was made for another kind of device than the model is on, or for another GPU of the catalogue."""
    here = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if plan.framework != "torch" or here.type == "meta":
        return
    if _has_other_kernels(plan, here):
        name, effect = str(here), f"{_OTHER_KERNELS}: on this device the step may need more memory"
    elif here.type == "cuda" and _is_another(plan.device, torch.cuda.get_device_name(here)):
        name = torch.cuda.get_device_name(here)
        effect = "its decisions depend on the speed of that device, and libraries allocate other workspaces there"
    else:
        return
    budget = "" if plan.budget_bytes is None else f" under a budget of {format_bytes(plan.budget_bytes)}"
    warnings.warn(
        f"plimsoll: this plan was made for {plan.device}, and the model is on {name}. Its peak of "
        f"{format_bytes(plan.predicted_peak_bytes)}{budget} was predicted for {plan.device}; {effect}. "
        "To plan for this device, leave device_profile= (--device-profile) out.",
        stacklevel=4,
    )


def _has_other_kernels(plan: Plan, here: torch.device) -> bool:
    return runs_gpu_kernels(plan.device) is not runs_gpu_kernels(str(here))


def _is_another(planned: str, found: str) -> bool:
    """True if both names are in the catalogue and name different devices."""
    try:
        return find_device(planned).name.partition("@")[0] != find_device(found).name
    except UnknownDevice:
        return False


def refuse_other_device(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan for another kind of device. Its kernels save other tensors for backward, so the decisions do not apply."""
    here = next(model.parameters()).device
    if _has_other_kernels(plan, here):
        raise PlanMismatch(
            f"This plan was made for {plan.device}; the model is on {here}.",
            why=_OTHER_KERNELS,
            next=f"use it on {plan.device}, or plan for this device: leave device_profile= (--device-profile) out",
        )
