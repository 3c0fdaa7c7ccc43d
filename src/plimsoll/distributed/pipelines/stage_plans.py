"""``apply_stages``: manages the stages of a pipeline by saved plans.

``plimsoll estimate --plans DIR`` names regions (managed modules) by their paths in the whole model. In a stage's module, the
path to the same block may be shorter or longer. A region matches a module if one path is the end of the other path. A region
that matches nothing or several modules is an error. Regions are never matched by position.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from torch import nn

from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.store import load_plan
from plimsoll.distributed.pipelines.rank_plans import TIMEOUT_SECONDS, StageAgreement
from plimsoll.distributed.pipelines.schedules import RankSchedule, Schedule, read_schedule
from plimsoll.engine.apply import Handle, RemovedAtEnd
from plimsoll.errors import InvalidOption, PlanFileError, PlanMismatch
from plimsoll.estimator.pipeline_schedule.orders import most_in_flight
from plimsoll.session.manage import check_plan, manage, refuse_other_device
from plimsoll.session.rendezvous.world import current_world
from plimsoll.session.task import check_model
from plimsoll.units import check_count


class StagesHandle(RemovedAtEnd):
    """The applied plans of this rank's stages, by stage. Use it as a context manager, or call ``remove`` at the end."""

    def __init__(self, plans: Mapping[int, Plan], handles: Sequence[Handle]) -> None:
        self.plans = dict(plans)
        self._handles = tuple(handles)

    def remove(self) -> None:
        """Stop managing all stages. A second call does no harm."""
        for handle in self._handles:
            handle.remove()


def apply_stages(
    schedule: Schedule,
    plans: Mapping[int, Plan] | str | Path,
    *,
    verify_every: int = 100,
    ranks: Sequence[int] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> StagesHandle:
    """Manage the stages of this rank by existing plans.

    Call this function on all ranks of the job. Either all ranks apply their plans, or none of them does.

    Args:
        schedule: a schedule of ``torch.distributed.pipelining``, with its stages.
        plans: by stage, or the directory that ``plimsoll estimate --plans`` wrote. A stage without a plan keeps everything.
        verify_every: as for ``plimsoll.apply``.
        ranks: global ranks that run this job; by default all.
        timeout_seconds: how long ranks wait for each other.

    Returns:
        A handle with ``plans``, whose regions (planned modules) have the names of the stages' modules, and ``remove()``.

    Raises:
        PlanMismatch: a region is not in the stage, the device is of another kind, or the schedule has more micro-batches in
            flight than the plan assumes.
        InvalidOption: ``plans`` is not a mapping, or has a plan for a stage that does not exist.
        PlanFileError: the directory does not contain a plan for this rank.
        RankFailed: another rank refused.

    Example:
        >>> with plimsoll.distributed.apply_stages(schedule, "plans/"):  # doctest: +SKIP
        ...     schedule.step(batch, target=labels)
    """
    check_count("verify_every", verify_every, least=0)
    agreement = StageAgreement(current_world(ranks), timeout_seconds)
    with agreement.together("read"):
        rank = read_schedule(schedule)
        for stage in rank.stages.values():
            check_model(stage.submod)
        found = _assigned(rank, plans)
    handles: list[Handle] = []
    with contextlib.ExitStack() as undo:
        with agreement.together("applied"):
            for index, plan in found.items():
                module, splits = rank.stages[index].submod, rank.splits_backward(index)
                handle = manage(module, plan, verify_every=verify_every, splits_backward=splits)
                handles.append(undo.enter_context(handle))
        undo.pop_all()
    return StagesHandle(found, handles)


def _assigned(rank: RankSchedule, plans: Mapping[int, Plan] | str | Path) -> dict[int, Plan]:
    """Return the plans of this rank by stage. Their regions get the names that they have in the stages' modules."""
    if isinstance(plans, str | Path):
        mine = _read(rank, Path(plans))
    else:
        _check_stages(rank, plans)
        mine = {index: plan for index, plan in plans.items() if index in rank.stages}
    found = {}
    for index, plan in mine.items():
        check_plan(plan)
        module = rank.stages[index].submod
        refuse_other_device(module, plan)
        in_flight = most_in_flight(rank.actions)[index]
        if plan.in_flight < in_flight:
            raise PlanMismatch(
                f"The plan of stage {index} is for {plan.in_flight} micro-batches in flight, but the schedule has {in_flight}.",
                why="every micro-batch holds the activations that the plan keeps, so the peak would exceed the prediction",
                next="plan with the schedule and the number of micro-batches that you train with",
            )
        found[index] = renamed(plan, module, f"stage {index}")
    return found


def _check_stages(rank: RankSchedule, plans: object) -> None:
    """Raise an error if ``plans`` is not a mapping, or has a plan for a stage that does not exist."""
    if not isinstance(plans, Mapping):
        raise InvalidOption(
            f"The plans are a {type(plans).__name__}, which does not assign plans to stages.",
            why="each stage has its own plan",
            next="pass {stage: plan}, or the directory that plimsoll estimate --plans wrote",
        )
    unknown = [index for index in plans if index not in range(rank.stage_count)]
    if unknown:
        raise InvalidOption(
            f"The plans include stage {unknown[0]!r}, but the pipeline has stages 0 to {rank.stage_count - 1}.",
            why="a plan for a stage that does not exist would not have an effect",
            next="use the index of each stage in the pipeline as its key",
        )


def _read(rank: RankSchedule, directory: Path) -> dict[int, Plan]:
    """Read the plan files of this rank, and return the plans by stage. A file belongs to the one stage that has its regions."""
    paths = sorted(directory.glob(f"rank-{rank.rank}-stage-*.json"))
    if not paths:
        raise PlanFileError(
            f"{directory} does not contain a plan for pipeline rank {rank.rank}.",
            why=f"its files would be named rank-{rank.rank}-stage-<number>.json",
            next="pass the directory that plimsoll estimate --plans wrote, or pass {stage: plan}",
        )
    found: dict[int, Plan] = {}
    for path in paths:
        plan = load_plan(path)
        fitting = [index for index, stage in rank.stages.items() if not _missing(plan, stage.submod)]
        if len(fitting) != 1 or fitting[0] in found:
            raise PlanMismatch(
                f"{path.name} must match one stage that no other file matches, but it matches {len(fitting)} of the stages "
                f"{sorted(rank.stages)}.",
                why=f"its regions are {_named(plan.regions[0].name if plan.regions else 'none', len(plan.regions))}",
                next="use the block names of the whole model in the stages' modules, or pass {stage: plan}",
            )
        found[fitting[0]] = plan
    return found


def renamed(plan: Plan, module: nn.Module, what: str) -> Plan:
    """Return a plan whose regions (planned modules) are renamed to paths in a stage's module. The given plan may be for the
    whole model.

    ``what`` is the name of the stage in errors.

    Raises:
        PlanMismatch: a region does not match any module, or matches ambiguously.
    """
    missing = _missing(plan, module)
    if missing:
        raise PlanMismatch(
            f"The plan decides about {_named(missing[0], len(missing))}, which {what} does not have.",
            why="the plan was made for another stage, or the stage's blocks have other names than in the whole model",
            next="pass each stage its own plan, and use the block names of the whole model in its modules",
        )
    names = {region.name: _places(region.name, module)[0] for region in plan.regions}
    for name, path in names.items():
        fitting = _places(name, module)
        sharing = [other for other in names if names[other] == path]
        if len(fitting) > 1 or len(sharing) > 1:
            several = " or ".join(map(repr, fitting if len(fitting) > 1 else sharing))
            said = f"{name!r} may be {several}" if len(fitting) > 1 else f"{several} may be {path!r}"
            raise PlanMismatch(
                f"Regions of the plan match {what} ambiguously: {said}.",
                why="module paths are matched from their ends, and Plimsoll does not guess",
                next="plan with the module names of the stage",
            )
    regions = tuple(msgspec.structs.replace(region, name=names[region.name]) for region in plan.regions)
    return msgspec.structs.replace(plan, regions=regions)


def _missing(plan: Plan, module: nn.Module) -> list[str]:
    return [region.name for region in plan.regions if not _places(region.name, module)]


def _places(name: str, module: nn.Module) -> list[str]:
    """Return the paths of the modules that the name of a region matches.

    This is the name itself if it is a path. Else it is the longest path that is an end of the name. Else it is all paths that
    end with the name.
    """
    paths = [path for path, _ in module.named_modules() if path]
    if name in paths:
        return [name]
    shorter = [path for path in paths if name.endswith(f".{path}")]
    return [max(shorter, key=len)] if shorter else [path for path in paths if path.endswith(f".{name}")]


def _named(name: str, count: int) -> str:
    return repr(name) if count == 1 else f"{name!r} and {count - 1} more"
