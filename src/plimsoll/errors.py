"""Every error that Plimsoll raises at its users, in one tree, and the warning about a newer torch, ``UntriedTorch``.

::

    PlimsollError
    ├── InvalidBudget          text without a clear unit, or nothing positive
    ├── BudgetBelowFloor       no plan fits
    ├── BudgetAboveDevice      more than the device has
    ├── InvalidModel           no parameters, no regions, already checkpointed
    ├── InvalidBatch           the model refuses it, or it lies on another device
    ├── InvalidLoss            no scalar to call backward on
    ├── InvalidStrategy        no such strategy
    ├── InvalidRegions         a region pattern that matches nothing
    ├── InvalidOption          an option whose value means nothing, or that has no effect here
    ├── InvalidTarget          a command-line target that does not load
    ├── InvalidLayout          degrees of parallelism that the model or each other rule out
    ├── UnknownOptimizer       an optimizer that the catalogue does not have
    ├── UnknownDevice          a device profile that the catalogue does not have
    ├── PlanFileError          not a plan, truncated, or of a newer schema
    ├── PlanMismatch           a plan for another model, dtype or shape
    ├── PlanNotUsable          a plan that has no decisions to apply
    ├── TracingFailed          the step cannot be traced
    ├── UnsupportedTorch       a torch that lacks what Plimsoll stands on
    ├── UnsupportedFramework   a training framework of a version that was not tried
    ├── InvalidReport          nothing to report, or not to that place
    ├── InvalidCodec           a codec's name or parameters that are not known
    ├── InvalidTrace           no profiler trace, or two that do not belong together
    ├── InvalidProbe           steps, batches or held-out data that a probe cannot work with
    ├── ProbeRunMismatch       a run directory that belongs to another probe, or data that has changed since
    ├── ProbeRunUnusable       a run directory that cannot be read or written
    ├── CompressionMismatch    the saved state of another gradient compression
    ├── RankError              something about other ranks
    │   ├── RankMissing            one did not come to an exchange in time
    │   ├── RankFailed             one failed in what all do together
    │   └── RanksDiffer            they have different models, batches, options, plans or versions
    ├── CaptureRefused         a CUDA graph is being captured, and cannot repeat what is to be done
    ├── OffloadFailed          a link cannot take or give back a tensor: disk full, host budget spent, I/O error
    └── ReplayMismatch         backward was about to use a value that is not what forward made
        └── SavedTensorModified    a value that backward needs was written in place

Each says what was found, why, and what to do next. Other warnings are plain ``UserWarning`` that begin with "plimsoll:".
"""

from __future__ import annotations


class PlimsollError(Exception):
    """The root of the tree: ``found`` is one sentence, ``why`` and ``next`` one line each."""

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
    """The budget is below the smallest peak that any plan reaches."""

    exit_code = 3


class BudgetAboveDevice(PlimsollError):
    """The budget is more than the device has."""


class InvalidModel(PlimsollError):
    """The model cannot be planned."""


class InvalidBatch(PlimsollError):
    """The batch does not fit the model."""


class InvalidLoss(PlimsollError):
    """There is no scalar loss."""


class InvalidStrategy(PlimsollError):
    """The strategy is not one that Plimsoll knows."""


class InvalidRegions(PlimsollError):
    """The region pattern matches nothing."""


class InvalidOption(PlimsollError):
    """An option's value means nothing, or it has no effect here."""


class InvalidLayout(PlimsollError):
    """Degrees of parallelism that do not go with the model or with each other."""


class UnknownOptimizer(PlimsollError):
    """An optimizer that the catalogue does not have."""


class InvalidTarget(PlimsollError):
    """The command-line target does not load."""


class UnknownDevice(PlimsollError):
    """The catalogue has no device of this name."""


class PlanFileError(PlimsollError):
    """The file holds no plan that this version can read."""


class PlanMismatch(PlimsollError):
    """The plan was made for something else."""


class PlanNotUsable(PlimsollError):
    """The plan has no decisions that could be applied."""


class TracingFailed(PlimsollError):
    """The training step cannot be traced."""


class UnsupportedTorch(PlimsollError):
    """This torch lacks a private name that Plimsoll stands on."""


class UntriedTorch(UserWarning):
    """This torch is of a newer minor version than those that the tests were run with.

    Example:
        >>> import warnings
        >>> warnings.filterwarnings("ignore", category=UntriedTorch)
    """


class UnsupportedFramework(PlimsollError):
    """A training framework whose version is outside of those that its integration was tried with."""


class InvalidReport(PlimsollError):
    """No page, or no timeline, can be made of what was given."""


class InvalidCodec(PlimsollError):
    """No codec goes by that name, or not with these parameters."""


class InvalidTrace(PlimsollError):
    """A profiler's trace that cannot be read, or two that cannot be compared."""


class InvalidProbe(PlimsollError):
    """The probe is asked for something that it cannot do."""


class ProbeRunMismatch(PlimsollError):
    """The run directory belongs to something else."""


class ProbeRunUnusable(PlimsollError):
    """The run directory cannot be read or written."""


class CompressionMismatch(PlimsollError):
    """A saved state of gradient compression that belongs to another method, model, rank or number of ranks."""


class RankError(PlimsollError):
    """Something about other ranks; ``ranks`` are those that it is about."""

    def __init__(self, found: str, *, why: str, next: str, ranks: tuple[int, ...] = ()) -> None:  # noqa: A002 - as above
        super().__init__(found, why=why, next=next)
        self.ranks = ranks


class RankMissing(RankError):
    """A rank did not come in time to what all do together."""


class RankFailed(RankError):
    """Another rank failed in what all do together."""


class RanksDiffer(RankError):
    """Ranks that should do the same have different models, batches, options, plans or versions."""


class CaptureRefused(PlimsollError):
    """A CUDA graph is being captured, and what a plan is to do now could not be repeated by it."""


class OffloadFailed(PlimsollError):
    """A link cannot take or give back a tensor; the step has changed nothing and can be run again."""

    exit_code = 3


class ReplayMismatch(PlimsollError):
    """A rebuilt value is not what forward made; the step must not reach the optimizer."""

    exit_code = 4


class SavedTensorModified(ReplayMismatch):
    """A value that backward needs was modified in place."""
