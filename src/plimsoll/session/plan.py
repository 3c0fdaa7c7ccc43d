"""The verbs ``plan``, ``apply`` and ``load``: decide about saved activations, and apply the decisions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import Progress, part_of, read_progress
from plimsoll.artifacts.store import load_plan
from plimsoll.engine.apply import Handle
from plimsoll.errors import BudgetBelowFloor, InvalidStrategy
from plimsoll.session.agreement import agreement_for, described
from plimsoll.session.applied_budget import BudgetWatch
from plimsoll.session.attachment import refuse_attached
from plimsoll.session.backward_steps import BackwardStepsAtWork, name_backward_steps, with_backward_steps
from plimsoll.session.compiled import compiled_planner, plans_compiled
from plimsoll.session.manage import check_plan, manage_together, refuse_other_model, warn_of_other_device
from plimsoll.session.optimizer_watch import optimizer_in_view
from plimsoll.session.options import Budget, PlanOptions
from plimsoll.session.rendezvous.exchange import TIMEOUT_SECONDS
from plimsoll.session.retry import AppliedPlan, can_retry
from plimsoll.session.state_offload import StateAtWork, with_offloaded_state
from plimsoll.session.step_context import ContextWatch
from plimsoll.session.step_planner import StepPlanner, eager_planner
from plimsoll.session.task import TrainingTask, check_module
from plimsoll.session.tiling import name_tiles, with_best_tiles, with_more_tiles
from plimsoll.tracing.ddp import inner_module
from plimsoll.tracing.recorder.calling import Loss
from plimsoll.units import check_count


def plan(
    model: nn.Module,
    batch: Any,
    budget: int | str | None = None,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    strategy: str = "auto",
    regions: Sequence[str] | None = None,
    device_profile: str | None = None,
    allow: Collection[str] | str = ("recompute",),
    max_error: float | str = 0.0,
    host_budget: int | str | None = None,
    overrides: Sequence[str] = (),
    link: str | None = None,
    compile: bool | Mapping[str, Any] | None = None,  # noqa: A002 - torch's word
    ranks: Sequence[int] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    progress: Progress | Literal["bar"] | None = None,
) -> Plan:
    """Decide for every saved activation what to do with it until backward, so that the training step fits ``budget``.

    One step is traced on the model's own device at the lowest memory. For a model on the meta device, or with a
    ``device_profile``, it is traced with fake tensors. With a budget and a real device, the plan is then run once; if it takes
    more than predicted, it is solved again with less. If ``allow`` permits compressing or offloading, one more step measures
    their cost and error. The call restores model, gradients, buffers, plain attributes, optimizer and random states.

    With several ranks (torchrun), all ranks make this call with the same arguments. They run the steps together, the rank with
    the least room (bytes that plans may use) solves, and all return its plan, or all raise.

    Args:
        model: any PyTorch model, on the device and in the mode that it trains with: eager, or compiled by torch.compile as a
            whole or block by block.
        batch: a tensor (one argument), a tuple (positional) or a dict (keywords).
        budget: bytes, as an int or as text with a unit (``"70GiB"``); bounds the peak of everything that the training step
            allocates on the device. ``"auto"``: the device's memory less 8%. ``None``: no limit (for a named strategy).
        loss: from the model's output to a scalar; by default ``output.loss``, or the output itself if it is a scalar.
        optimizer: with it the budget also covers its state and its step; without it, forward, backward and gradients.
        strategy: ``auto`` (the budgeted optimum), or ``none``, ``full``, ``every:k``, ``sqrt``, ``input-only``,
            ``selective:attention|mlp|norm|<op list>``, ``int8``, ``int4``, ``fp8``, ``offload``, ``offload-inputs``,
            ``hybrid:N,k``.
        regions: module paths, ``*`` for one level (``"model.layers.*"``); by default the repeated blocks.
        device_profile: plan for a device that this machine lacks, from the catalogue (``"H100-SXM"``).
        allow: what the plan may do other than keep: ``recompute``, ``compress`` (codecs), ``offload`` (to pinned host memory
            from a GPU, else to disk), ``tile`` (run row-wise parts such as MLPs a few rows at a time; gradients are then equal
            up to rounding, not bit for bit), ``offload-state`` (keep optimizer state in host memory or on disk between steps),
            ``step-in-backward`` (step each parameter as soon as its gradient is complete).
        max_error: the relative error ‖Δg‖ / ‖g‖ that lossy codecs may cause in the gradient (``0.01`` or ``"1%"``); 0 allows
            lossless codecs only. It is measured before the plan is returned.
        host_budget: bytes that offloaded values may take at the other end of the link.
        overrides: decisions by pattern that ``auto`` respects: ``"layers.*.mlp::silu=compress:int8"``, ``"*attn*=keep"``.
        link: ``host`` or ``disk``; by default the usual one of the device.
        compile: plan as if torch.compile compiled the model, which is not compiled yet: ``True``, or keywords of torch.compile
            (``{"dynamic": False}``). ``plimsoll.apply`` then compiles it.
        ranks: global ranks that plan together. By default these are the ranks of the model's process groups (DDP, FSDP2,
            DTensor), or all ranks if the model does not have a group.
        timeout_seconds: how long ranks wait for each other in each exchange.
        progress: a function that receives the stage and the share done. ``"bar"``: a bar on the terminal.

    Returns:
        A plan: printable, savable, with the status, the predicted peak and seconds, the lower bound and both gaps.

    Raises:
        BudgetBelowFloor: no plan fits. The error names the floor (the lowest reachable peak), what holds memory there, and what
            to do.
        PlimsollError: the arguments do not make a step or a plan (InvalidBudget, BudgetAboveDevice, InvalidModel, InvalidBatch,
            InvalidLoss, InvalidRegions, InvalidStrategy, UnknownDevice, TracingFailed).
        RankError: another rank raised (RankFailed), did not call (RankMissing), or has another model, batch shapes, options or
            versions (RanksDiffer).

    Example:
        >>> import torch, plimsoll
        >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)])
        >>> plimsoll.plan(model, torch.randn(32, 64), loss=lambda y: y.square().mean()).status.value
        'OPTIMAL'

    Known weakness: bounds and costs describe a model of the machine; only measurements describe the machine itself.
    """
    report = read_progress(progress)
    with agreement_for(model, "plan", ranks=ranks, timeout_seconds=timeout_seconds) as agreement:
        task = TrainingTask.read(model, batch, loss=loss, optimizer=optimizer, compile=compile)
        limit = Budget.read(budget)
        options = PlanOptions.read(
            strategies=strategy,
            regions=regions,
            device_profile=device_profile,
            allow=allow,
            max_error=max_error,
            host_budget=host_budget,
            overrides=overrides,
            link=link,
        )
        options.refuse_unknown(task.model)
        has_budget = described(has_budget=budget is not None)
        if agreement.size > 1:
            options.refuse_tiles("A step of several ranks")
        agreement.same("what to plan", {**task.facts(), **options.facts(), **has_budget})
        task = agreement.patient(task)
        is_compiled = plans_compiled(task.model, task.units, options, strategy, may_take_forms=agreement.size == 1)
        with task.compiled() if is_compiled else contextlib.nullcontext():
            planner_of = compiled_planner if is_compiled else eager_planner
            planner = planner_of(agreement, task, options, limit, part_of(report, 0.0, 0.5))
            step = functools.partial(task.step, written=planner.trace.written)
            planner.try_forms(step, part_of(report, 0.5, 0.7))
            whole, is_auto = planner, strategy == "auto" and not is_compiled

            def planner_with(chosen: PlanOptions) -> StepPlanner:
                tiled = eager_planner(agreement, task, chosen, limit)
                tiled.try_forms(step)
                return tiled

            if options.may_offload_state:
                _refuse_named(strategy)
                whole = planner = with_offloaded_state(whole, task)
            if options.may_step_in_backward:
                _refuse_named(strategy)
                whole = planner = with_backward_steps(whole, task)
            if options.may_tile and is_auto:
                report("trying tiles", 0.6)  # each set of tiles is a step to trace, which took minutes at 4,096 tokens
                planner = with_best_tiles(whole, task, planner_with)
            solving = part_of(report, 0.7, 1.0)
            try:
                made = planner.plan(strategy, step, solving)
            except BudgetBelowFloor as refusal:
                if agreement.size == 1 and is_auto and not options.may_tile:
                    name_tiles(refusal, planner, task)
                    name_backward_steps(refusal, planner, task)
                more = with_more_tiles(planner, whole, task, planner_with)
                if more is None:
                    raise
                made = more.plan(strategy, step, solving)
        agreement.same_plan(made)
        report("done", 1.0)
        return made


def _refuse_named(strategy: str) -> None:
    """Refuse a named strategy that may decide about the optimizer: such a strategy decides about activations alone."""
    if strategy != "auto":
        raise InvalidStrategy(
            f"strategy={strategy!r} cannot offload optimizer state or step parameters in backward.",
            why="a named strategy decides about activations alone, and the optimizer's step is decided for a budget",
            next="use strategy='auto' with a budget, or leave 'offload-state' and 'step-in-backward' out of allow=",
        )


def apply(
    model: nn.Module,
    plan: Plan,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    sentinel_every: int = 1,
    verify_every: int = 100,
    ranks: Sequence[int] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Handle:
    """Manage ``model`` by ``plan``, until ``handle.remove()`` or the end of the ``with`` block.

    The model's code, parameters and ``state_dict`` do not change. A region (managed module) that keeps everything is not
    touched at all. If the plan was made for another device, or names values that the calls do not make, one warning is given.
    The first call of each managed region records and verifies it (about three times the forward); later calls run with two
    hooks and a guard. With several ranks, all apply the identical plan, or none does.

    Args:
        model: the model that the plan was made for.
        plan: a plan with a usable status.
        optimizer: the optimizer that the plan was made with, if the plan offloads its state or steps
            in backward. By default, it is the only
            optimizer in this process that trains the model.
        sentinel_every: in every n-th call of a region, rebuilt values are compared with samples from forward. Larger numbers
            cost less on models that are bound by launches.
        verify_every: in every n-th training call of the model, and in calls 2, 4, 8 … before, one region is verified bit for
            bit, in rotation. Its dropped tensors are moved to disk (from a GPU to host memory) and compared with the rebuilt
            tensors. Regions that may do more than their torch calls show (TorchScript, custom operators, user-defined modes)
            are verified ten times as often. A mismatch causes a warning and an entry in ``handle.faults``. Backward gets the
            true tensor, and the region no longer uses recipes. 0: never.
        ranks: as for ``plan``.
        timeout_seconds: as for ``plan``.

    Returns:
        A handle; also a context manager.

    Raises:
        PlanMismatch: the plan was made for another model (both fingerprints are shown), or a plan is applied already, or the
            model has a budget by ``plimsoll.attach``.
        PlanNotUsable: ``plan`` is not a plan, or its status says that there is nothing to apply.
        InvalidModel: torch.compile compiles the model, or every region that the plan manages.
        InvalidOption: ``sentinel_every`` below 1, ``verify_every`` below 0, or the optimizer cannot step in chunks.
        RanksDiffer: another rank has another plan; RankFailed: it could not apply it; RankMissing: it did not call.

    Example:
        >>> with plimsoll.apply(model, plan):  # doctest: +SKIP
        ...     for batch in batches:
        ...         model(**batch).loss.backward()
    """
    with agreement_for(model, "apply", ranks=ranks, timeout_seconds=timeout_seconds) as agreement:
        check_module(model)
        check_plan(plan)
        check_count("sentinel_every", sentinel_every, least=1)
        check_count("verify_every", verify_every, least=0)
        refuse_other_model(model, plan)
        warn_of_other_device(model, plan)
        agreement.same_plan(plan)
        refuse_attached(model)
        handle = manage_together(agreement, model, plan, sentinel_every=sentinel_every, verify_every=verify_every)
        try:
            handle.remove_with_me(ContextWatch(inner_module(model), plan.signature))
            budget_bytes = plan.budget_bytes_of_ranks.get(str(agreement.rank), plan.budget_bytes)
            watch = None if budget_bytes is None else BudgetWatch(model, handle, plan, budget_bytes)
            if watch is not None:
                handle.measure_with(lambda: watch.peak_bytes)
                handle.remove_with_me(watch)
            # After the watch: these hooks have to run first, so that the watch finds the state offloaded.
            if plan.state is not None:
                found = optimizer_in_view(model, optimizer)
                handle.remove_with_me(StateAtWork(model, found, plan.state, plan.host_budget_bytes))
            if plan.backward_steps is not None:
                steps = BackwardStepsAtWork(model, optimizer_in_view(model, optimizer), plan.backward_steps)
                handle.remove_with_me(steps)
                if watch is not None:
                    watch.is_due = lambda: steps.has_decided
            if can_retry(model, plan):
                handle.retry_with(AppliedPlan(handle, model, plan, agreement).run)
        except BaseException:
            handle.remove()  # the caller gets no handle to remove the plan with
            raise
        return handle


def load(path: str | Path) -> Plan:
    """Read a plan that ``plan.save`` wrote. Plans hold decisions, never code; loading one runs nothing.

    Raises:
        PlanFileError: not a plan, truncated, or written by a newer version.
    """
    return load_plan(path)
