"""The verb ``attach``: keep the training of a model under a budget from its first step on, without a sample batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal

import torch
from torch import nn

from plimsoll.artifacts.progress import Progress, read_progress
from plimsoll.errors import InvalidModel
from plimsoll.session.agreement import agreement_for, described
from plimsoll.session.attachment import Attachment
from plimsoll.session.compiled import plans_compiled
from plimsoll.session.options import Budget, PlanOptions
from plimsoll.session.pressure import check_room
from plimsoll.session.rendezvous.exchange import TIMEOUT_SECONDS
from plimsoll.session.shapes import can_follow_shapes
from plimsoll.session.step_watch import is_watched
from plimsoll.session.task import check_model
from plimsoll.tracing.compiled.units import Unit, find_units
from plimsoll.tracing.ddp import inner_module, reduced_parameters
from plimsoll.tracing.optimizer import refuse_optimizer_of_another
from plimsoll.tracing.recorder.fingerprint import fingerprint
from plimsoll.tracing.zero import inside_engine, is_gathered_by_zero
from plimsoll.units import check_count


def attach(
    model: nn.Module,
    budget: int | str,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    regions: Sequence[str] | None = None,
    allow: Collection[str] | str = ("recompute",),
    max_error: float | str = 0.0,
    host_budget: int | str | None = None,
    overrides: Sequence[str] = (),
    link: str | None = None,
    verify_every: int = 100,
    room: Callable[[], int] | None = None,
    ranks: Sequence[int] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    progress: Progress | Literal["bar"] | None = None,
) -> Attachment:
    """Keep the training of ``model`` under ``budget``, without a sample batch.

    The first training step calibrates at the lowest peak that the engine can reach. From the second step on, the model runs
    under the cheapest plan that fits the budget. When a step under this plan was measured, one line with its figures is logged
    (logger "plimsoll", level INFO), or printed on stderr if no logging is set up. Evaluation (``model.eval()`` or no gradients)
    is not managed. Batches of other shapes get their own plans, chosen before they run; one or two more shapes are traced for
    that. If values may be compressed or offloaded, one plan serves all shapes.

    If torch.compile compiles the model or its blocks, the first training call makes a plan, compiles it and runs it once. Later
    shapes share few plans; each is compiled when a batch first needs it.

    With several ranks (torchrun), all call ``attach`` and calibrate together. From then on every rank chooses its plans for its
    own batches under its own budget. Batches may differ in length between ranks, except for tensor parallel ranks, which share
    one batch. If the model is sharded or split, ranks trace a new shape together in the first calls that have one. If a later
    new shape does not appear on all ranks in the same call, it runs at the lowest peak, with a warning. If values may be
    compressed or offloaded, or collectives repeated, all ranks run the identical plan.

    Args:
        model: the model as it will be trained, or the engine that DeepSpeed made of it.
        budget: as for ``plimsoll.plan``.
        optimizer: lets the plan count the optimizer's state before it exists; otherwise the first step measures it.
        regions: as for ``plimsoll.plan``.
        allow: as for ``plimsoll.plan``; so are ``max_error``, ``host_budget``, ``overrides`` and ``link``. If they allow other
            forms, the first training call runs one or two more steps to try them.
        max_error: the largest relative error of the gradient. Expected errors are scaled to one measured trial step.
        host_budget: bytes at the other end of the link.
        overrides: decisions by pattern.
        link: ``host`` or ``disk``.
        verify_every: as for ``plimsoll.apply``.
        room: a function that returns the bytes that the training step may take now in total, if that may be less than the
            budget. It is called before every training step. If the room shrinks, a tighter plan is applied at once; if it
            grows, a looser plan is applied some steps later. By default, CUDA is asked on a GPU, and nothing is asked on a CPU.
        ranks: as for ``plimsoll.plan``.
        timeout_seconds: as for ``plimsoll.plan``.
        progress: receives the stage and the share done until the plan for the budget exists. ``"bar"``: a bar on the terminal.

    Returns:
        An attachment with ``plan``, ``faults`` and ``remove()``; it is also a context manager.

    Raises:
        InvalidBudget, InvalidModel, InvalidOption: at once.
        BudgetBelowFloor, InvalidRegions, …: in the training call that finds the error: the first call, or the second, after the
            first step was measured. The model is then unmanaged (without a plan) and unchanged.
        RanksDiffer, RankFailed, RankMissing: as for ``plimsoll.plan``, at once or in a training call.

    Example:
        >>> handle = plimsoll.attach(model, budget="8GiB")  # doctest: +SKIP
        >>> for batch in batches:  # doctest: +SKIP
        ...     loss = model(**batch).loss
        ...     loss.backward()
    """
    model = inside_engine(model)
    report = read_progress(progress)
    with agreement_for(model, "attach", ranks=ranks, timeout_seconds=timeout_seconds) as agreement:
        check_model(model, optimizer)
        if optimizer is not None:
            refuse_optimizer_of_another(optimizer, model)
        _refuse_attached(model)
        units = find_units(model)
        check_count("verify_every", verify_every, least=0)
        limit = Budget.required(budget)
        options = PlanOptions.read(
            regions=regions, allow=allow, max_error=max_error, host_budget=host_budget, overrides=overrides, link=link
        )
        options.refuse_unknown(model)
        check_room(room, follows=can_follow_shapes(options, agreement.size), ranks=agreement.size)
        trained = {"model": fingerprint(model), "optimizer": type(optimizer).__name__}
        agreement.same("what to attach", {**trained, **options.facts(), **described(verify_every=verify_every)})
        _refuse_of_gathered(model, units, options)
        if plans_compiled(model, units, options, "auto", room=room, may_take_forms=agreement.size == 1):
            _refuse_split_graphs(model, units)
        else:
            units = ()
        return Attachment(
            model,
            limit,
            options,
            agreement,
            optimizer=optimizer,
            verify_every=verify_every,
            room=room,
            units=units,
            progress=report,
        )


def _refuse_attached(model: nn.Module) -> None:
    """Raise an error if the model already has a budget, whether or not its plan exists yet."""
    attached = next((name for name, module in model.named_modules() if is_watched(module)), None)
    if attached is not None:
        raise InvalidModel(
            f"{type(model).__name__} already has a budget: {attached or 'the model itself'}.",
            why="plimsoll.attach, plimsoll.apply, or a framework's integration was called on it before, and two budgets would "
            "plan for the same bytes",
            next="keep one of them, and remove the other with handle.remove()",
        )


def _refuse_of_gathered(model: nn.Module, units: Sequence[Unit], options: PlanOptions) -> None:
    """Refuse options that do not work with parameters gathered by DeepSpeed's ZeRO stage 3."""
    found = f"{units[0].path or 'the model'} is compiled by torch.compile" if units else ""
    if set(options.allow) - {"recompute"}:
        found = f"allow= names {', '.join(options.allow)}"
    if found and any(map(is_gathered_by_zero, model.parameters())):
        raise InvalidModel(
            f"{type(model).__name__} is trained by DeepSpeed's ZeRO in stage 3, and {found}.",
            why="stage 3 moves parameters to new memory in each step, but compiled code keeps their old memory; and the error "
            "of other forms is measured on whole gradients, but each rank has only shards",
            next='use allow="recompute" without torch.compile, or "stage": 2',
        )


def _refuse_split_graphs(model: nn.Module, units: Sequence[Unit]) -> None:
    """Refuse a model under ``DistributedDataParallel`` that torch.compile compiles as a whole.

    ``attach`` would compile it for its plan within the first call of the wrapper. Torch would not split code that is compiled
    there in the same way as in later calls.
    """
    if reduced_parameters(model) and not all(unit.path for unit in units):
        raise InvalidModel(
            f"{type(inner_module(model)).__name__} is compiled as a whole under DistributedDataParallel.",
            why="torch splits its graph at the reducer's buckets, and may split it elsewhere if attach compiles it inside a "
            "training call",
            next="compile the blocks (layer.compile() for each), or use plimsoll.plan and plimsoll.apply",
        )
