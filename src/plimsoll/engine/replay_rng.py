"""Record the generator's state in forward, so that dropout and other random ops draw the same numbers on replay.

Calls that are not recorded run without a dispatch mode. So Plimsoll's code runs inside a region (a module that the plan decides
about) only at two kinds of *points*: when the region begins, and when a tensor is saved. A random op can be repeated if the
generator was not used between such a point and the op: then the op starts from the state that was recorded at that point.
Recording a state costs about 2 µs on a CPU. The state is held as a generator: a CPU's state takes 2.5 KiB as a generator, and 5
KiB as a tensor.

On replay, Plimsoll sets the generator to the state of the op's point, runs the op, and restores the generator in a ``finally``
(see ``replay_code``), so that a replay never changes the random numbers of the training run itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from plimsoll.engine.capturing import refuse_capture
from plimsoll.tracing.recorder.recorder import RecordedOp

ENTRY = -1
"""The number of the point before the first op of a region. A number ``k >= 0`` is the point where saved tensor ``k`` is saved.
"""

StatePoints = Mapping[int, tuple[tuple[int, torch.Generator], ...]]
"""A mapping from a point in forward to the random generators whose state is recorded there, each as a pair of index and
generator.
"""


def generators_of(devices: Sequence[torch.device]) -> tuple[torch.Generator, ...]:
    """Return the default generators of the CPU and of the given CUDA devices."""
    indices = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    return (torch.default_generator, *(torch.cuda.default_generators[index] for index in indices))


def state_points(ops: Iterable[RecordedOp], generators: Sequence[torch.Generator]) -> StatePoints:
    """Return the points of forward where later calls must record the states of random generators, so that backward can run
    these random ops again.
    """
    points: dict[int, dict[int, torch.Generator]] = {}
    for op in ops:
        if op.random_point is not None:
            position, point = op.random_point
            points.setdefault(point, {})[position] = generators[position]
    return {point: tuple(found.items()) for point, found in points.items()}


def take_states(points: StatePoints, at: int, states: dict[tuple[int, int], torch.Generator]) -> None:
    """Record the generator states that belong to the point ``at`` of forward, which has been reached. They are written to
    ``states``.

    When backward runs random ops again, they start from these states.

    Raises:
        CaptureRefused: a CUDA graph is being captured.
    """
    for position, generator in points.get(at, ()):
        refuse_capture(
            generator.device.type,
            "A random op that backward recomputes, such as dropout,",
            why="recomputing it restores the generator's state, but a CUDA graph draws new numbers on every replay",
            next="set dropout to 0, or plan with a larger budget so that outputs of random ops are kept",
        )
        states[position, at] = generator.clone_state()


class RandomPoints:
    """Watches the random generators while a region is recorded. For each random op, it finds a point of forward at which to
    record the generator's state, so that the op can be repeated.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = tuple(generators)
        self._latest: list[tuple[int, torch.Tensor]] = [(ENTRY, g.get_state()) for g in self.generators]
        self.states = {(index, ENTRY): generator.clone_state() for index, generator in enumerate(self.generators)}
        """The recorded states. The key is a pair of generator index and point."""

    def at_slot(self, index: int) -> None:
        """Note that saved tensor number ``index`` was saved. If a generator's state has changed since the point before, record
        the state.
        """
        for position, generator in enumerate(self.generators):
            state = generator.get_state()
            if not torch.equal(state, self._latest[position][1]):
                self._latest[position] = (index, state)
                self.states[position, index] = generator.clone_state()

    def end(self) -> None:
        """Note that forward is over, and release the latest states.

        The recorder stays in reference cycles for a while, and its random states would stay too.
        """
        self._latest.clear()

    def before(self, op: RecordedOp, device: torch.device) -> torch.Tensor | None:
        """Return the recorded generator state for repeating the random op that is about to run.

        The number of the point is stored with the op. Return ``None`` if the generator was used since the last point.
        """
        position = self._index(device)
        if position is None:
            return None
        point, state = self._latest[position]
        if not torch.equal(self.generators[position].get_state(), state):
            return None
        op.random_point = (position, point)
        return state

    def state(self, device: torch.device) -> torch.Tensor:
        """Return the current state of the device's random generator. If that generator is not watched, return the state of the
        CPU's generator.
        """
        return self.generators[self._index(device) or 0].get_state()

    def restore(self, device: torch.device, state: torch.Tensor) -> None:
        generator = self.generators[self._index(device) or 0]
        if not torch.equal(generator.get_state(), state):
            generator.set_state(state)

    def _index(self, device: torch.device) -> int | None:
        wanted = torch.device("cpu") if device.type != "cuda" else torch.device("cuda", device.index or 0)
        return next((i for i, generator in enumerate(self.generators) if generator.device == wanted), None)
