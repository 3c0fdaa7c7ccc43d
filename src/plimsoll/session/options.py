"""Reads the budget and the options of a plan once, at the public verb, in all notations that users may write.

All code behind the verb uses `PlanOptions`, and a budget in bytes.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from plimsoll.artifacts.backward_steps import BackwardSteps
from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.offloaded_state import OffloadedState
from plimsoll.artifacts.plan import COLLECTIVES, LINK_NAMES, Plan
from plimsoll.artifacts.region import IS_COLLECTIVE
from plimsoll.artifacts.tile import Tile
from plimsoll.artifacts.trace import RegionCall, Trace
from plimsoll.errors import BudgetAboveDevice, InvalidOption, InvalidRegions, InvalidStrategy
from plimsoll.planning.choice import Limits
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.pins import Override, parse_override, refuse_unknown_modules
from plimsoll.planning.strategies import check_strategy, codecs_of_strategy, refuse_unknown_ops, uses_link
from plimsoll.units import format_bytes, limit_text, parse_budget

if TYPE_CHECKING:
    from torch import nn

OFFLOAD_STATE = "offload-state"
"""The word in ``allow`` that permits plans to keep optimizer state on a link (to host memory or disk) between steps."""
STEP_IN_BACKWARD = "step-in-backward"
"""The word in ``allow`` that permits plans to step each parameter as soon as backward has completed its gradient."""
AUTO_MARGIN = 0.08
"""``budget="auto"`` leaves this share of the device's memory free for allocator fragmentation, libraries' workspaces and other
programs.
"""
_ALLOWED = ("recompute", "tile", "compress", "offload", OFFLOAD_STATE, STEP_IN_BACKWARD, COLLECTIVES)
_WORD_OF = {Decision.RECOMPUTE: "recompute", Decision.COMPRESS: "compress", Decision.OFFLOAD: "offload"}


@dataclass(frozen=True, slots=True)
class Budget:
    """The limit of a step's memory as the user passed it: bytes, no limit, or the device's memory (``is_auto``)."""

    asked_bytes: int | None = None
    is_auto: bool = False

    @classmethod
    def read(cls, budget: int | str | None) -> Budget:
        """Parse the user's budget. Raise ``InvalidBudget`` if its unit is missing or ambiguous, or if it is not positive."""
        return cls() if budget is None else cls.required(budget)

    @classmethod
    def required(cls, budget: int | str) -> Budget:
        """Parse a budget, as ``read`` does, but refuse ``None``."""
        return cls(is_auto=True) if budget == "auto" else cls(parse_budget(budget))

    @property
    def shown(self) -> str:
        """The budget as text for the user."""
        if self.is_auto:
            return "auto"
        return "none" if self.asked_bytes is None else format_bytes(self.asked_bytes)

    def bytes_on(self, costs: Costs) -> int | None:
        """Return the budget in bytes on the device of these costs; ``None`` without a limit."""
        return self.bytes_of(costs.device, costs.memory_bytes)

    def bytes_of(self, device: str, memory_bytes: int | None) -> int | None:
        """Return the budget in bytes on a device with this name and memory; ``None`` without a limit.

        Raises:
            BudgetAboveDevice: it is more than the device has, or it is "auto" and the device's memory is unknown.
        """
        asked_bytes = self.asked_bytes
        if self.is_auto:
            if memory_bytes is None:
                raise BudgetAboveDevice(
                    f"The memory of {device} is unknown.",
                    why="budget='auto' is the device's memory minus a margin",
                    next="pass the budget in bytes",
                )
            return int(memory_bytes * (1 - AUTO_MARGIN))
        if asked_bytes is not None and memory_bytes is not None and asked_bytes > memory_bytes:
            raise BudgetAboveDevice(
                f"budget {format_bytes(asked_bytes)} is more than the memory of {device}, {format_bytes(memory_bytes)}.",
                why="a plan for more memory than the device has would run out of memory",
                next=f'pass {limit_text(memory_bytes)} or less, or budget="auto"',
            )
        return asked_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Data: the options that plans of one step must follow. ``read`` parses and checks the user's input.

    ``strategies`` are the named strategies that will be requested: a strategy that compresses or offloads also allows these
    decisions. ``max_error`` is the relative error of the gradient. ``link`` says where values are offloaded (``host`` or
    ``disk``); it is empty for the device's default.
    """

    strategies: tuple[str, ...] = ("auto",)
    regions: tuple[str, ...] | None = None
    device_profile: str | None = None
    allow: tuple[str, ...] = ("recompute",)
    max_error: float = 0.0
    host_budget_bytes: int | None = None
    overrides: tuple[Override, ...] = ()
    link: str = ""
    tiles: tuple[Tile, ...] = ()
    """The module calls that run in tiles (parts of a few rows) in the steps that are planned. The planner chooses them, not the
    user.
    """
    state: OffloadedState | None = None
    """The optimizer state that is offloaded in the steps that are planned. The planner chooses it, not the user."""

    backward_steps: BackwardSteps | None = None
    """The parameters that are stepped in backward in the steps that are planned. The planner chooses them, not the user."""

    @classmethod
    def read(
        cls,
        *,
        strategies: Sequence[str] | str = ("auto",),
        regions: Sequence[str] | str | None = None,
        device_profile: str | None = None,
        allow: Collection[str] | str = ("recompute",),
        max_error: float | str = 0.0,
        host_budget: int | str | None = None,
        overrides: Sequence[str] | str = (),
        link: str | None = None,
    ) -> PlanOptions:
        """Parse the user's options.

        Raises:
            InvalidStrategy: an unknown strategy or word, an error that is not between 0 and 1, or an option that asks for
                something that ``allow`` does not permit.
            InvalidRegions: an empty list.
            InvalidBudget: a host budget without a clear unit.
            UnknownDevice: the device is not in the catalogue.
        """
        strategies = tuple(dict.fromkeys(as_texts("strategy", strategies)))
        for strategy in strategies:
            check_strategy(strategy)
        if device_profile is not None:
            find_device(device_profile)
        decided = tuple(map(parse_override, as_texts("overrides", overrides)))
        options = cls(
            strategies=strategies,
            regions=as_patterns(regions),
            device_profile=device_profile,
            allow=tuple(word for word in _ALLOWED if word in _words(allow)),
            max_error=read_error(max_error),
            host_budget_bytes=None if host_budget is None else parse_budget(host_budget),
            overrides=decided,
            link=_read_link(link),
        )
        options._refuse_contradictions()
        return options

    def refuse_unknown(self, model: nn.Module) -> None:
        """Refuse a strategy that names an op that does not exist, and an override that names a module that ``model`` does not
        have. A trace, which takes seconds, would find them too.

        Raises:
            InvalidStrategy: with the closest names.
        """
        # The command line reads options before it imports torch.
        from plimsoll.tracing.torch_internals import existing_ops

        for strategy in self.strategies:
            refuse_unknown_ops(strategy, existing_ops())
        refuse_unknown_modules(self.overrides, [name for name, _ in model.named_modules()], existing_ops())

    def _refuse_contradictions(self) -> None:
        """Raise an error if other options ask for something that ``allow`` does not permit."""
        words = ", ".join(self.allow)
        if self.max_error and "compress" not in self.allow and not self.codecs:
            raise InvalidStrategy(
                f"max_error={self.max_error:g} allows lossy codecs, but compression is not allowed.",
                why=f"allow= is {words}",
                next="pass allow=('recompute', 'compress'), or leave max_error out",
            )
        may_send = self.may_offload or self.may_offload_state
        if (self.link or self.host_budget_bytes is not None) and not may_send:
            raise InvalidStrategy(
                f"{'link' if self.link else 'host_budget'}= is for offloaded values, but offloading is not allowed.",
                why=f"allow= is {words}",
                next="pass allow=('recompute', 'offload'), or leave it out",
            )
        if self.may_tile and not self.may_recompute:
            raise InvalidStrategy(
                "allow= has 'tile' without 'recompute'.",
                why="a tiled call saves only its inputs, and backward recomputes each tile",
                next="pass allow=('recompute', 'tile')",
            )
        if self.may_repeat_collectives and not self.may_recompute:
            raise InvalidStrategy(
                "allow= has 'collectives' without 'recompute'.",
                why="collectives run again only when values that are computed from them are recomputed",
                next="pass allow=('recompute', 'collectives')",
            )
        others = [word for word in ("tile", OFFLOAD_STATE) if word in self.allow]
        if self.may_step_in_backward and others:
            raise InvalidStrategy(
                f"allow= has {STEP_IN_BACKWARD!r} and {others[0]!r}.",
                why="a tiled call adds to its gradients once for each tile"
                if others[0] == "tile"
                else "offloaded state is stepped in chunks after backward, when all gradients are there",
                next=f"leave one of the two out of allow=, and compare the plans: {STEP_IN_BACKWARD!r} frees gradients, "
                f"{others[0]!r} frees {'activations' if others[0] == 'tile' else 'optimizer state'}",
            )
        for override in self.overrides:
            word = _WORD_OF.get(override.decision)
            if word is not None and word not in self.allow:
                raise InvalidStrategy(
                    f"override {override.pattern!r} asks for {override.decision.value}, which is not allowed.",
                    why=f"allow= is {words}",
                    next=f"add {word!r} to allow=, or choose another decision for this pattern",
                )

    def refuse_tiles(self, what: str) -> None:
        """Raise an error if tiles, offloaded optimizer state or steps in backward are allowed where they are not supported.
        ``what`` is the subject of its first sentence.
        """
        if self.may_step_in_backward:
            raise InvalidStrategy(
                f"{what} cannot step parameters in backward.",
                why="only plan and attach decide about it, in one process, for models that torch.compile does not compile: "
                "several ranks reduce a gradient after it is complete, and compiled code completes all at once",
                next=f"leave {STEP_IN_BACKWARD!r} out of allow=, or pass the uncompiled model and its optimizer to "
                "plimsoll.plan or plimsoll.attach",
            )
        if self.may_offload_state:
            raise InvalidStrategy(
                f"{what} cannot offload optimizer state.",
                why="only plan and attach decide about it, in one process, for models that torch.compile does not compile",
                next=f"leave {OFFLOAD_STATE!r} out of allow=, or pass the uncompiled model and its optimizer to plimsoll.plan "
                "or plimsoll.attach",
            )
        if self.may_tile:
            raise InvalidStrategy(
                f"{what} cannot run in tiles.",
                why="only plan and attach decide about tiles, in one process, for models that torch.compile does not compile",
                next="leave 'tile' out of allow=, or pass the uncompiled model to plimsoll.plan or plimsoll.attach",
            )

    def facts(self) -> dict[str, str]:
        """Return the options that must be equal on ranks that plan together, as text by name. Budgets may differ between ranks,
        also the host's.
        """
        names = ("regions", "device_profile", "allow", "max_error", "overrides", "link")
        strategies = {"strategy": ", ".join(map(repr, self.strategies))}
        return strategies | {name: repr(getattr(self, name)) for name in names}

    @property
    def codecs(self) -> tuple[str, ...]:
        """The names of the lossy codecs that the named strategies use."""
        return tuple(dict.fromkeys(codec for name in self.strategies for codec in codecs_of_strategy(name)))

    @property
    def wants_forms(self) -> bool:
        """True if the plan may hold values in another form than unchanged (compressed or offloaded)."""
        return self.may_compress or self.may_offload

    @property
    def insists_on_forms(self) -> bool:
        """True if the user requires that some values are compressed or offloaded, even if everything fits without it."""
        return (
            bool(self.codecs) or any(map(uses_link, self.strategies)) or self.overrides_without_forms != self.overrides
        )

    @property
    def may_compress(self) -> bool:
        return "compress" in self.allow or bool(self.codecs)

    @property
    def may_offload(self) -> bool:
        return "offload" in self.allow or any(map(uses_link, self.strategies))

    @property
    def may_recompute(self) -> bool:
        return "recompute" in self.allow

    @property
    def may_tile(self) -> bool:
        return "tile" in self.allow

    @property
    def may_offload_state(self) -> bool:
        return OFFLOAD_STATE in self.allow

    @property
    def may_step_in_backward(self) -> bool:
        return STEP_IN_BACKWARD in self.allow

    @property
    def may_repeat_collectives(self) -> bool:
        return COLLECTIVES in self.allow

    @property
    def wants_lossy(self) -> bool:
        return self.max_error > 0 or bool(self.codecs)

    @property
    def overrides_without_forms(self) -> tuple[Override, ...]:
        """The user's overrides that ask for KEEP or RECOMPUTE, not for compressed or offloaded values."""
        return tuple(o for o in self.overrides if o.decision in (Decision.KEEP, Decision.RECOMPUTE))

    def opened(self, trace: Trace) -> Trace:
        """Return the trace that plans are made from. If plans may repeat collectives, it is a copy where collectives are
        ordinary ops with a cost in seconds.
        """
        if not self.may_repeat_collectives:
            return trace
        return msgspec.structs.replace(trace, regions=tuple(map(_without_collectives, trace.regions)))

    def limits(self, error_scale: float = 1.0) -> Limits:
        """Return the limits that all regions (managed modules) share: the allowed error of the gradient, and the bytes on the
        host. ``error_scale`` is the measured error as a multiple of the expected one.
        """
        host_bytes = self.host_budget_bytes
        if host_bytes is not None and self.state is not None:
            host_bytes = max(0, host_bytes - self.state.link_bytes)
        return Limits((self.max_error / error_scale) ** 2, host_bytes)

    def most_error(self, strategy: str) -> float | None:
        """Return the largest measured error that a plan of this strategy may have, or ``None`` if any error is allowed."""
        return None if codecs_of_strategy(strategy) else self.max_error

    def written_into(self, plan: Plan) -> Plan:
        """Return the plan with these options written into its fields, so that a saved plan shows them."""
        return msgspec.structs.replace(
            plan,
            allow=self.allow,
            tiles=self.tiles,
            state=self.state,
            backward_steps=self.backward_steps,
            max_error=self.most_error(plan.strategy),
            host_budget_bytes=self.host_budget_bytes,
        )


def _without_collectives(call: RegionCall) -> RegionCall:
    ops = tuple(
        msgspec.structs.replace(op, obstacle="") if op.obstacle == IS_COLLECTIVE else op for op in call.graph.ops
    )
    return msgspec.structs.replace(call, graph=msgspec.structs.replace(call.graph, ops=ops))


def _words(allow: Collection[str] | str) -> frozenset[str]:
    given = allow.split(",") if isinstance(allow, str) else as_texts("allow", allow)
    words = frozenset(word.strip() for word in given)
    unknown = sorted(words - set(_ALLOWED))
    if unknown or not words:
        raise InvalidStrategy(
            f"allow={allow!r} is not understood.",
            why=f"{unknown[0]!r} is not one of {', '.join(_ALLOWED)}"
            if unknown
            else "it is empty; to keep everything, use strategy='none'",
            next="pass some of allow=('recompute', 'tile', 'compress', 'offload', 'offload-state', 'step-in-backward'), or "
            "also 'collectives' to let recipes repeat them",
        )
    return words


def read_error(max_error: float | str) -> float:
    """Parse the allowed error, such as ``0.01``, ``"1%"`` or ``"0.01"``, and return it as a share."""
    try:
        text = str(max_error).strip()
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share < 1:
        raise InvalidStrategy(
            f"max_error={max_error!r} is not a share of the gradient.",
            why="it is the relative error that the gradient may have, from 0 (lossless) to below 1",
            next="pass max_error=0.01, or '1%'",
        )
    return share


def _read_link(link: str | None) -> str:
    """Check the name of a link, and return it. ``None`` gives "", which means the device's default link."""
    if link is None or link in LINK_NAMES:
        return link or ""
    raise InvalidOption(
        f"The link {link!r} does not exist.",
        why=f"links are {', '.join(LINK_NAMES)}",
        next="pass one of them, or leave link= out for the device's default",
    )


def as_texts(name: str, given: Collection[str] | str) -> tuple[str, ...]:
    """Return a tuple of texts. A single text gives a tuple of one.

    Raises:
        InvalidOption: something that is not text.
    """
    texts = tuple(given) if isinstance(given, Collection) and not isinstance(given, str) else (given,)
    for text in texts:
        check_text(name, text)
    return texts


def check_text(name: str, given: object) -> None:
    """Raise an error if the value of an option is not text. ``name`` is the option's name.

    Raises:
        InvalidOption: shows what was given.
    """
    if not isinstance(given, str):
        raise InvalidOption(
            f"{name}= must be text, not {reprlib.repr(given)}.",
            why=f"its type is {type(given).__name__}",
            next=f"pass {name}= as on the command line, or leave it out",
        )


def as_patterns(regions: Sequence[str] | str | None) -> tuple[str, ...] | None:
    """Return region patterns as a tuple. A single pattern need not be in a list. An empty list is refused."""
    if regions is None:
        return None
    patterns = as_texts("regions", regions)
    if not patterns:
        raise InvalidRegions(
            "regions= is empty.",
            why="a plan decides about values in regions, and an empty list selects none",
            next="leave it out to select the repeated blocks, or name modules, as in 'model.layers.*'",
        )
    return patterns
