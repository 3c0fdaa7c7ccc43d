"""What a user allows a plan to do besides keeping values, as they wrote it in; the same, checked, out."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.plan import COLLECTIVES, Plan
from plimsoll.artifacts.trace import RegionCall, Trace
from plimsoll.errors import InvalidStrategy
from plimsoll.planning.limits import Limits
from plimsoll.planning.pins import Override, parse_override
from plimsoll.planning.strategies import check_strategy, codecs_of_strategy, uses_link
from plimsoll.tracing.recorder.collectives import IS_COLLECTIVE
from plimsoll.units import parse_bytes

WORDS = ("recompute", "compress", "offload", COLLECTIVES)
_WORD_OF = {Decision.RECOMPUTE: "recompute", Decision.COMPRESS: "compress", Decision.OFFLOAD: "offload"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """``max_error`` is the relative error of the gradient; ``link`` is empty for the device's default.

    ``strategies`` are those that will be asked for: a named one that compresses or offloads allows itself to.
    """

    allow: tuple[str, ...] = ("recompute",)
    max_error: float = 0.0
    host_budget_bytes: int | None = None
    overrides: tuple[Override, ...] = ()
    strategies: tuple[str, ...] = ("auto",)
    link: str = ""

    @property
    def codecs(self) -> tuple[str, ...]:
        """Lossy codecs that named strategies ask for."""
        return tuple(dict.fromkeys(codec for name in self.strategies for codec in codecs_of_strategy(name)))

    @property
    def wants_forms(self) -> bool:
        """Whether values may be held in another form at all."""
        return self.may_compress or self.may_offload

    @property
    def insists_on_forms(self) -> bool:
        """Whether values are to be held in another form even where everything fits."""
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
    def may_repeat_collectives(self) -> bool:
        return COLLECTIVES in self.allow

    @property
    def wants_lossy(self) -> bool:
        return self.max_error > 0 or bool(self.codecs)

    @property
    def overrides_without_forms(self) -> tuple[Override, ...]:
        """Overrides that need no other form."""
        return tuple(o for o in self.overrides if o.decision in (Decision.KEEP, Decision.RECOMPUTE))

    def opened(self, trace: Trace) -> Trace:
        """The trace as plans may see it: where they may repeat collectives, these are ops like others, with their seconds."""
        if not self.may_repeat_collectives:
            return trace
        return msgspec.structs.replace(trace, regions=tuple(map(_without_collectives, trace.regions)))

    def limits(self, error_scale: float = 1.0) -> Limits:
        """What regions share, if errors are so many times larger than expected."""
        return Limits((self.max_error / error_scale) ** 2, self.host_budget_bytes)

    def most_error(self, strategy: str) -> float | None:
        """The error that a plan may be measured to cause; ``None``: any."""
        return None if codecs_of_strategy(strategy) else self.max_error

    def written_into(self, plan: Plan) -> Plan:
        """The plan with what it was allowed."""
        return msgspec.structs.replace(
            plan,
            allow=self.allow,
            max_error=self.most_error(plan.strategy),
            host_budget_bytes=self.host_budget_bytes,
        )


def read_allowance(
    *,
    strategies: Sequence[str] = ("auto",),
    allow: Collection[str] | str = ("recompute",),
    max_error: float | str = 0.0,
    host_budget: int | str | None = None,
    overrides: Sequence[str] | str = (),
    link: str | None = None,
) -> Allowance:
    """Check and read what a user allows.

    Raises:
        InvalidStrategy: no such strategy, an unknown word, an error that is no share, or a lossy wish that nothing allows.
        InvalidBudget: a host budget without a clear unit.
    """
    for strategy in strategies:
        check_strategy(strategy)
    words = tuple(word for word in WORDS if word in _words(allow))
    error = read_error(max_error)
    if error and "compress" not in words and not any(map(codecs_of_strategy, strategies)):
        raise InvalidStrategy(
            f"max_error={max_error!r} allows lossy codecs, but compression is not allowed.",
            why="allow= is " + ", ".join(words),
            next="allow=('recompute', 'compress'), or leave max_error out",
        )
    if COLLECTIVES in words and "recompute" not in words:
        raise InvalidStrategy(
            "allow= has 'collectives' without 'recompute'.",
            why="collectives are run again as part of recomputing what is behind them",
            next="allow=('recompute', 'collectives')",
        )
    decided = tuple(parse_override(text) for text in ((overrides,) if isinstance(overrides, str) else overrides))
    _check_overrides(decided, words)
    return Allowance(
        allow=words,
        max_error=error,
        host_budget_bytes=None if host_budget is None else parse_bytes(host_budget),
        overrides=decided,
        strategies=tuple(strategies),
        link=link or "",
    )


def _without_collectives(call: RegionCall) -> RegionCall:
    ops = tuple(
        msgspec.structs.replace(op, obstacle="") if op.obstacle == IS_COLLECTIVE else op for op in call.graph.ops
    )
    return msgspec.structs.replace(call, graph=msgspec.structs.replace(call.graph, ops=ops))


def _check_overrides(overrides: Sequence[Override], words: tuple[str, ...]) -> None:
    """Refuse overrides that ask for what is not allowed."""
    for override in overrides:
        word = _WORD_OF.get(override.decision)
        if word is not None and word not in words:
            raise InvalidStrategy(
                f"override {override.pattern!r} asks for {override.decision.value}, which is not allowed.",
                why="allow= is " + ", ".join(words),
                next=f"add {word!r} to allow=, or override with another decision",
            )


def _words(allow: Collection[str] | str) -> frozenset[str]:
    words = frozenset(word.strip() for word in (allow.split(",") if isinstance(allow, str) else allow))
    unknown = sorted(words - set(WORDS))
    if unknown or not words:
        raise InvalidStrategy(
            f"allow={allow!r} is not understood.",
            why=f"{unknown[0]!r} is none of {', '.join(WORDS)}"
            if unknown
            else "it is empty; strategy='none' keeps all",
            next="write allow=('recompute', 'compress', 'offload') or some of them; 'collectives' lets recipes repeat those",
        )
    return words


def read_error(max_error: float | str) -> float:
    """``0.01``, ``"1%"``, ``"0.01"``."""
    try:
        text = str(max_error).strip()
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share < 1:
        raise InvalidStrategy(
            f"max_error={max_error!r} is not a share of the gradient.",
            why="it is the relative error that the gradient may have, from 0 (lossless) to below 1",
            next="write max_error=0.01, or '1%'",
        )
    return share
