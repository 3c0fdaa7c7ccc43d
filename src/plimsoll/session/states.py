"""A table of events and states of a model under ``plimsoll.attach``, with the reaction to each event in each state.

Each cell names a method of ``Attachment``, which looks up its reaction to every event here. An empty cell means that the event
cannot occur in that state. A test runs a real training through every cell.

By default each batch has the cheapest plan that fits at its shapes (``ShapePlans``). Then LARGER_BATCH and EXCEEDED do not
occur: ``choose_plan`` traces new shapes, and ``correct_account`` notes by how much a step exceeded its prediction. Freezing
parameters does not change the plan, because a plan for all of them is still enough. THAWED occurs if parameters that were
frozen when plans were made are trained.

Before a call, at most one of the events between LARGER_BATCH and LOOP_HOLDS is looked for. CALL follows in the same call. With
plans for each shape, the reaction to the first event only updates what plans are chosen with, and ``choose_plan`` chooses.

    event           untraced           measuring          running                   given up
    THAWED          know_nothing       recall             recall                    know_nothing
    CALL            trace_first_call   calibrate          choose_plan               trace_first_call
    LARGER_BATCH                                          grow
    RAN_MORE                                              trace_again
    EXCEEDED                                              plan_tighter
    MORE_FORWARDS                                         plan_tighter
    FEWER_FORWARDS                                        plan_for_fewer
    NEW_STATE                                             count_state
    LOOP_HOLDS                                            count_held
    ROOM_CHANGED                                          follow_room
    STEP_ENDED                                            correct_account
    OUT_OF_MEMORY   have_none_tighter  have_none_tighter  plan_after_out_of_memory  have_none_tighter
    FAILED          give_up            give_up            keep_plan                 give_up
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple


class State(enum.StrEnum):
    """The state of a managed model: which plan it runs under now."""

    UNTRACED = "untraced"
    """No plan. The next training call is traced."""
    MEASURING = "measuring"
    """The plan with the lowest peak. The step is measured, because its trace does not contain all bytes of a training step."""
    RUNNING = "running"
    """A plan for the budget."""
    GIVEN_UP = "given up"
    """No plan: planning failed before the first plan for the budget was made."""

    @property
    def meaning(self) -> str:
        """What happens to the model in this state, in words for the user."""
        return {
            State.UNTRACED: "the next training step will be traced",
            State.MEASURING: "the first training step is measured, at the lowest peak",
            State.RUNNING: "training under a plan for the budget",
            State.GIVEN_UP: "unmanaged, because planning failed",
        }[self]


class TrainingEvent(enum.StrEnum):
    """The events that a managed model reacts to."""

    THAWED = "parameters that were frozen are trained"
    CALL = "a training call begins"
    LARGER_BATCH = "the batch is larger than every traced one, and all batches share one plan"
    RAN_MORE = "an earlier step ran more than the traced one, and exceeded the budget"
    EXCEEDED = "an earlier step exceeded the budget, and all batches share one plan"
    MORE_FORWARDS = "more forwards wait for one backward than planned"
    FEWER_FORWARDS = "in the latest steps fewer forwards waited for one backward than planned"
    NEW_STATE = "an optimizer has made new state"
    LOOP_HOLDS = "the training loop holds more or less when a step begins"
    ROOM_CHANGED = "other programs leave more or less memory on the device"
    STEP_ENDED = "a training step has ended"
    OUT_OF_MEMORY = "a step that can be repeated ran out of memory"
    FAILED = "planning failed"


class Reaction(NamedTuple):
    """What happens at an event in a state, as data: a method of ``Attachment``, and the states that the method may lead to."""

    method: str
    leads_to: frozenset[State]


def _cell(method: str, *leads_to: State) -> Reaction:
    return Reaction(method, frozenset(leads_to))


_UNTRACED, _MEASURING, _RUNNING, _GIVEN_UP = State
_BEGUN = (_MEASURING, _RUNNING)

TABLE: Mapping[TrainingEvent, Mapping[State, Reaction]] = {
    # Parameters that are trained only now need saved tensors that the trace did not count. So start with a new trace, unless
    # the same parameters were trained before.
    TrainingEvent.THAWED: {
        _UNTRACED: _cell("know_nothing", _UNTRACED),
        _MEASURING: _cell("recall", _UNTRACED, *_BEGUN),
        _RUNNING: _cell("recall", _UNTRACED, *_BEGUN),
        _GIVEN_UP: _cell("know_nothing", _UNTRACED),
    },
    TrainingEvent.CALL: {
        _UNTRACED: _cell("trace_first_call", *_BEGUN),
        _MEASURING: _cell("calibrate", *_BEGUN),
        _RUNNING: _cell("choose_plan", _RUNNING),
        # Only within `handle.step`: its function may catch the error and continue, or the step runs again.
        _GIVEN_UP: _cell("trace_first_call", *_BEGUN),
    },
    TrainingEvent.LARGER_BATCH: {_RUNNING: _cell("grow", *_BEGUN)},
    TrainingEvent.RAN_MORE: {_RUNNING: _cell("trace_again", *_BEGUN)},
    TrainingEvent.EXCEEDED: {_RUNNING: _cell("plan_tighter", _RUNNING)},
    TrainingEvent.MORE_FORWARDS: {_RUNNING: _cell("plan_tighter", _RUNNING)},
    TrainingEvent.FEWER_FORWARDS: {_RUNNING: _cell("plan_for_fewer", _RUNNING)},
    TrainingEvent.NEW_STATE: {_RUNNING: _cell("count_state", _RUNNING)},
    TrainingEvent.LOOP_HOLDS: {_RUNNING: _cell("count_held", _RUNNING)},
    TrainingEvent.ROOM_CHANGED: {_RUNNING: _cell("follow_room", _RUNNING)},
    # In MEASURING, the measurement is used when the next call begins, because all ranks exchange messages there.
    TrainingEvent.STEP_ENDED: {_RUNNING: _cell("correct_account", _RUNNING)},
    TrainingEvent.OUT_OF_MEMORY: {
        _UNTRACED: _cell("have_none_tighter", _UNTRACED),
        _MEASURING: _cell("have_none_tighter", _MEASURING),
        _RUNNING: _cell("plan_after_out_of_memory", _RUNNING),
        _GIVEN_UP: _cell("have_none_tighter", _UNTRACED),
    },
    # After an error of planning, attach gives up. After an error of the model, the state stays, and the next call plans again.
    TrainingEvent.FAILED: {
        _UNTRACED: _cell("give_up", _GIVEN_UP, _UNTRACED),
        _MEASURING: _cell("give_up", _GIVEN_UP, _MEASURING),
        _RUNNING: _cell("keep_plan", _RUNNING),
        _GIVEN_UP: _cell("give_up", _GIVEN_UP),
    },
}
