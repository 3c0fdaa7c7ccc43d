"""What an ``Attachment`` has found out about a training: its traced step, its plans, and what steps were measured to need.

All of it holds for the parameters that the loop trains now. A loop that trains parts of a model in turns has one `Knowledge`
for each part.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from plimsoll.artifacts.plan import Plan
from plimsoll.session.account import MemoryAccount, PlanRoom
from plimsoll.session.batch_shapes import Shapes
from plimsoll.session.carried import Carried
from plimsoll.session.fewer_forwards import FewerForwards
from plimsoll.session.joint_traces import JointTraces
from plimsoll.session.measured_step import MeasuredStep
from plimsoll.session.optimizer_watch import CountedState, OptimizerWatch
from plimsoll.session.options import PlanOptions
from plimsoll.session.said_overruns import SaidOverruns
from plimsoll.session.shapes import ShapePlans
from plimsoll.session.situations import MeteredSituations
from plimsoll.session.states import State
from plimsoll.session.step_planner import StepPlanner


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The traced step that plans are made for, as data. It is the step that was traced first, or a later traced step that
    needed more memory.
    """

    planner: StepPlanner
    shapes: Shapes
    accumulates: bool
    """Whether gradients existed when the step began."""
    error_scale: float = 1.0
    """The measured error of lossy forms (compressed values), as a multiple of the expected error."""
    batch_bytes: int = 0
    """Bytes that the batch's storages have in addition to the batch's tensors. A slice, for instance, keeps the whole storage
    alive.
    """


@dataclass(slots=True)
class LowestSteps:
    """The steps that run under the plan with the lowest peak, and are measured before the plan for the budget is made."""

    tries: int = 0
    """How many such steps have begun."""
    recorded_calls: int = 0
    """How many calls of regions (managed modules) had been recorded when the latest such step began."""
    is_over: bool = False
    """Whether these steps exceed the budget. They run all the same, because the error about the budget then names what they
    were measured to need.
    """
    planning_bytes: int = 0
    """If ``is_over``: the bytes that planning took: the peak of such a step, predicted or measured in a trial."""
    peak_bytes: int = 0
    """Their highest measured peak, on the rank where it was highest."""
    rest_bytes: int = 0
    """Their highest peak after backward, when no activations are left, on the rank where it was highest."""
    carried: Carried = field(default_factory=Carried)
    """The tensors that the loop keeps from one of these steps to the next."""


@dataclass(slots=True)
class Knowledge:
    """What an ``Attachment`` has found out about a training so far: its traced step, its plans, and what steps were measured to
    need.

    It is valid while the loop trains the same parameters. ``Attachment`` fills it; a new object is empty.
    """

    options: PlanOptions
    """The options with the tiles (parts of a few rows) and the offloaded state that were chosen for the traced step."""
    traces: JointTraces
    room: PlanRoom
    state: State = State.UNTRACED
    traced: PlannedStep | None = None
    shaped: ShapePlans | None = None
    """The ladder (plans with falling peaks) that each call chooses its plan from. None until the first plan for the budget is
    made, and None if the options do not allow a ladder.
    """
    shapes: list[Shapes] = field(default_factory=list)
    """Batch shapes that were traced, or that run under the plan that all ranks share."""
    served: Shapes | None = None
    """The batch shapes that the current plan was last chosen for."""
    lowest: LowestSteps = field(default_factory=LowestSteps)
    is_mixed: bool = False
    """True if the plan changed within the running or the measured step, because more or fewer forwards than planned waited for
    one backward.
    """
    held_at_plan_bytes: int = 0
    """Bytes that the training loop held when the step that plans were made from began, or when it ended if that is more."""
    corrected: MemoryAccount | None = None
    """The account (bytes that predictions lack) with the overshoot of a step over the budget. The next planning uses it."""
    traces_left: int = 0
    """How many more steps to trace in the search for one that runs as many operations as the step that took
    ``ran_more_bytes``.
    """
    ran_more_bytes: int = 0
    tracing_seconds: float = 0.0
    """How long the traces of this search, and of all such searches before it, have taken."""
    said_parts_bytes: int = 0
    """The highest peak in bytes that a warning has named, of steps that call parts of the model instead of the model. It is 1
    if a warning named no peak, and 0 before any warning.
    """
    said: SaidOverruns = field(default_factory=SaidOverruns)
    fewer: FewerForwards = field(default_factory=FewerForwards)
    counted: CountedState = field(default_factory=CountedState)
    metered: MeteredSituations = field(default_factory=MeteredSituations)
    frozen: frozenset[str] = frozenset()
    """The names of the parameters that were frozen when plans were made."""
    seen: set[object] = field(default_factory=set)
    """The effects (``Plan.effect``: the decisions alone) of all plans that have run before. A new one must be measured."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """A `Knowledge` (plans and measurements) of parameters that are frozen now, to be used again when they are trained again,
    with the plan that was applied when they were frozen.
    """

    knowledge: Knowledge
    watch: OptimizerWatch
    measured: MeasuredStep | None
    plan: Plan | None
