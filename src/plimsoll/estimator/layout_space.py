"""Lists the layouts that a search may choose from: all of a number of ranks that agree with the degrees that the user fixed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from plimsoll.artifacts.job import Layout, ModelFacts
from plimsoll.errors import InvalidLayout
from plimsoll.estimator.parallelism.layouts import check_layout, layout_entries, read_degree, read_layout

_OPEN = ("ranks", "samples")
_DEGREES = frozenset(("tp", "pp", "dp", "cp", "ep", "zero"))
_LARGEST_TP = 8


@dataclass(frozen=True, slots=True)
class LayoutSpace:
    """The layouts to search, as data: all that use ``ranks`` ranks and run ``samples`` samples per step.

    ``given`` maps the entries that the user fixed to their values.
    """

    ranks: int
    samples: int
    given: dict[str, str]

    @staticmethod
    def read(text: str | Layout) -> LayoutSpace | None:
        """Parse the space of layouts that a text describes. Return ``None`` if the text names a single layout.

        Raises:
            InvalidLayout: only one of ``ranks`` and ``samples`` is given, or a value is not a valid number.

        Example:
            >>> LayoutSpace.read("ranks=64, samples=512, tp=8").given
            {'tp': '8'}
        """
        given = {} if isinstance(text, Layout) else dict(layout_entries(text, also=_OPEN))
        found = {key: given.pop(key) for key in _OPEN if key in given}
        if not found:
            return None
        if len(found) < len(_OPEN) or not all(value.isdecimal() and int(value) for value in found.values()):
            missing = [key for key in _OPEN if key not in found]
            raise InvalidLayout(
                f"The layout {text!r} lacks {missing[0]}=."
                if missing
                else f"{text!r} does not define a search over layouts.",
                why="a search compares layouts of a number of ranks by the seconds of one step over a number of samples, and "
                "both must be positive",
                next='write "ranks=64,samples=512", followed by the degrees that you want to fix; or name one layout, such as '
                '"dp=8,zero=3"',
            )
        for key in _DEGREES & given.keys():
            read_degree(key, given[key])
        return LayoutSpace(int(found["ranks"]), int(found["samples"]), given)

    def layouts(self, batch: int, facts: ModelFacts) -> Iterator[Layout]:
        """Yield each layout of the space that the model's sizes allow, if a micro-batch has ``batch`` samples."""
        cp = int(self.given.get("cp", "1"))
        for tp in self._degrees("tp", self.ranks, most=_LARGEST_TP):
            for pp in self._degrees("pp", self.ranks // tp):
                dp, rest = divmod(self.ranks, tp * pp * cp)
                if rest or dp * batch > self.samples or self.samples % (dp * batch):
                    continue
                for ep in self._degrees("ep", dp * cp if facts.experts else 1):
                    for zero in [int(self.given["zero"])] if "zero" in self.given else _stages_of_zero(dp * cp, pp):
                        degrees = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "zero": zero}
                        found = self._layout(degrees, batch)
                        if found is not None and _is_possible(found, facts):
                            yield found

    def _degrees(self, key: str, whole: int, most: int | None = None) -> list[int]:
        if key in self.given:
            return [int(self.given[key])]
        return [degree for degree in range(1, min(whole, most or whole) + 1) if whole % degree == 0]

    def _layout(self, degrees: dict[str, int], batch: int) -> Layout | None:
        entries = {key: str(value) for key, value in degrees.items()} | self.given
        entries.setdefault("micro-batches", str(self.samples // (degrees["dp"] * batch)))
        words = [f"{key}={value}" if value else key for key, value in entries.items()]
        words += ["sp"] if degrees["tp"] > 1 and "sp" not in entries else []
        try:
            found = read_layout(",".join(words))
        except InvalidLayout:  # for example a schedule without a pipeline, or stages of another number
            return None
        is_asked = found.ranks == self.ranks and found.dp * found.micro_batches * batch == self.samples
        return found if is_asked else None


def _stages_of_zero(shards: int, pp: int) -> list[int]:
    """Return the stages of ZeRO (how much is sharded: 0 to 3) to try.

    With a pipeline, stage 3 is left out: every micro-batch would gather parameters again.
    """
    return [0] if shards == 1 else [1] if pp > 1 else [1, 3]


def _is_possible(layout: Layout, facts: ModelFacts) -> bool:
    try:
        check_layout(layout, facts)
    except InvalidLayout:
        return False
    return True
