"""All errors that Plimsoll raises for users, as one tree, and ``UntriedTorch``, the warning about a newer torch.

::

    PlimsollError
    ├── InvalidBudget          text without a clear unit, or an amount that is not positive
    ├── BudgetBelowFloor       no plan fits
    ├── BudgetAboveDevice      the budget is larger than the device's memory
    ├── InvalidModel           no parameters, no regions, already checkpointed
    ├── InvalidBatch           the model refuses it, or it is on another device
    ├── InvalidLoss            no scalar to call backward on
    ├── InvalidStrategy        no such strategy
    ├── InvalidRegions         a region pattern that matches nothing
    ├── InvalidOption          an option with an invalid value, or an option without effect in this call
    ├── InvalidTarget          a command-line target that does not load
    ├── InvalidLayout          degrees of parallelism that contradict the model or each other
    ├── UnknownOptimizer       an optimizer that the catalogue does not have
    ├── UnknownDevice          a device profile that the catalogue does not have
    ├── PlanFileError          not a plan, truncated, or of a newer schema
    ├── PlanMismatch           a plan for another model, dtype or shape
    ├── PlanNotUsable          a plan without decisions to apply
    ├── TracingFailed          the step cannot be traced
    ├── UnsupportedTorch       a torch without a private name that Plimsoll uses
    ├── UnsupportedFramework   a training framework in an untested version
    ├── InvalidReport          nothing to report, or an output path that cannot be used
    ├── InvalidCodec           an unknown codec, or unknown parameters of one
    ├── InvalidTrace           not a profiler trace, or two traces of different steps
    ├── InvalidProbe           steps, batches or held-out data that a probe cannot use
    ├── ProbeRunMismatch       a run directory of another probe, or data that has changed since the run began
    ├── ProbeRunUnusable       a run directory that cannot be read or written
    ├── CompressionMismatch    the saved state of another gradient compression
    ├── RankError              something about other ranks
    │   ├── RankMissing            a rank did not join an exchange in time
    │   ├── RankFailed             a rank failed during work that all ranks do together
    │   └── RanksDiffer            ranks have different models, batches, options, plans or versions
    ├── CaptureRefused         a CUDA graph is being captured, and a replay would not repeat this work
    ├── OffloadFailed          a link cannot store or return a tensor: disk full, host budget spent, I/O error
    └── ReplayMismatch         backward was about to use a value that differs from the value of forward
        └── SavedTensorModified    a value that backward needs was modified in place

Each error says what was found, why, and what to do next. Other warnings are plain ``UserWarning`` that begin with "plimsoll:".
"""

from __future__ import annotations

from collections.abc import Sequence


class PlimsollError(Exception):
    """Base class of all errors that Plimsoll raises for users.

    ``found`` is one sentence that says what was found. ``why`` (the reason) and ``next`` (what to do) are one line each.
    ``exit_code`` is the exit status of the command line when this error ends it.
    """

    exit_code = 2

    def __init__(self, found: str, *, why: str, next: str) -> None:  # noqa: A002 - the three words of every message
        super().__init__(found)
        self.found = found
        self.why = why
        self.next = next

    def __str__(self) -> str:
        return f"{self.found}\n  why   {self.why}\n  next  {self.next}"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.found, self.why, self.next), dict(self.__dict__))


def _rebuild(kind: type[PlimsollError], found: str, why: str, next_: str) -> PlimsollError:
    return kind(found, why=why, next=next_)


class InvalidBudget(PlimsollError):
    """The budget is not an amount of memory."""


class BudgetBelowFloor(PlimsollError):
    """The budget is below the smallest peak that any plan reaches.

    ``others`` has the lines of a table that says what other budgets cost. It is empty if no plan was made.
    """

    exit_code = 3

    def __init__(self, found: str, *, why: str, next: str, others: Sequence[str] = ()) -> None:  # noqa: A002 - as above
        super().__init__(found, why=why, next=next)
        self.others = tuple(others)

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *(f"  {line}" for line in self.others)])


class BudgetAboveDevice(PlimsollError):
    """The budget is larger than the device's memory."""


class InvalidModel(PlimsollError):
    """Plimsoll cannot plan this model: it is without parameters or regions, or it is already checkpointed."""


class InvalidBatch(PlimsollError):
    """The batch does not fit the model."""


class InvalidLoss(PlimsollError):
    """The step does not return a scalar loss on which backward can be called."""


class InvalidStrategy(PlimsollError):
    """The strategy is not one that Plimsoll knows."""


class InvalidRegions(PlimsollError):
    """A pattern for regions (the modules that Plimsoll manages) or for modules matches nothing, or no pattern is given."""


class InvalidOption(PlimsollError):
    """The value of an option is invalid, or the option has no effect in this call."""


class InvalidLayout(PlimsollError):
    """Degrees of parallelism contradict the model or each other."""


class UnknownOptimizer(PlimsollError):
    """The catalogue does not contain this optimizer."""


class InvalidTarget(PlimsollError):
    """A target (the text that names a model or a step, as on the command line) does not load, or not with these options."""


class UnknownDevice(PlimsollError):
    """The catalogue does not contain a device of this name."""


class PlanFileError(PlimsollError):
    """This version cannot read a plan from the file."""


class PlanMismatch(PlimsollError):
    """The plan was made for another model, batch, mode or kind of device."""


class PlanNotUsable(PlimsollError):
    """The plan does not contain decisions that could be applied, because its search failed."""


class TracingFailed(PlimsollError):
    """The training step cannot be traced."""


class UnsupportedTorch(PlimsollError):
    """The installed version of torch does not have a private name that Plimsoll uses."""


class UntriedTorch(UserWarning):
    """A warning: the installed torch has a newer minor version than all versions that were tested.

    Example:
        >>> import warnings
        >>> warnings.filterwarnings("ignore", category=UntriedTorch)
    """


class UnsupportedFramework(PlimsollError):
    """The integration was not tested with this version of the training framework."""


class InvalidReport(PlimsollError):
    """A page or a timeline cannot be made from the given objects."""


class InvalidCodec(PlimsollError):
    """The codec is unknown, or it does not accept these parameters."""


class InvalidTrace(PlimsollError):
    """A profiler's trace cannot be read, or two traces cannot be compared."""


class InvalidProbe(PlimsollError):
    """The probe cannot work with these steps, batches or held-out data."""


class ProbeRunMismatch(PlimsollError):
    """The run directory belongs to another probe, or the data has changed since the run began."""


class ProbeRunUnusable(PlimsollError):
    """The run directory cannot be read or written."""


class CompressionMismatch(PlimsollError):
    """The saved state of gradient compression belongs to another method, model, rank or number of ranks."""


class RankError(PlimsollError):
    """An error about other ranks of a distributed job. ``ranks`` lists the numbers of these ranks, if they are known."""

    def __init__(self, found: str, *, why: str, next: str, ranks: tuple[int, ...] = ()) -> None:  # noqa: A002 - as above
        super().__init__(found, why=why, next=next)
        self.ranks = ranks


class RankMissing(RankError):
    """A rank did not join an exchange, which needs all ranks, before the time limit."""


class RankFailed(RankError):
    """Another rank failed during the work that all ranks do together."""


class RanksDiffer(RankError):
    """Ranks that must agree have different models, batches, options, plans or versions."""


class CaptureRefused(PlimsollError):
    """A CUDA graph is being captured, and a replay of the graph would not repeat the plan's work."""


class OffloadFailed(PlimsollError):
    """A link (pinned host memory or a disk) cannot store or return an offloaded tensor.

    The step has not changed the model or the optimizer, so it can be run again.
    """

    exit_code = 3


class ReplayMismatch(PlimsollError):
    """A value that backward recomputed differs from the value that forward computed.

    The step's gradients may be wrong, so the optimizer must not use them.
    """

    exit_code = 4


class SavedTensorModified(ReplayMismatch):
    """A value that backward needs was modified in place."""
