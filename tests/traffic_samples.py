"""Timed steps, links and methods that are easy to reckon with."""

from __future__ import annotations

import msgspec

from plimsoll.artifacts.traffic import (
    BucketTiming,
    LinkFit,
    LinkPoint,
    MethodTraffic,
    ShardedStep,
    StepTiming,
    Traffic,
    TrafficRuling,
    Transfer,
    Validation,
)
from plimsoll.artifacts.verdict import IntervalEstimate, Outcome
from plimsoll.distributed.comm_cost.forecast import BucketProgram, ForecastJob, MethodProgram
from samples import filled

MIB = 2**20


def make_link(transfer: Transfer, *, bytes_per_second: float = 10 * MIB, error: float = 0.0) -> LinkFit:
    return LinkFit(
        transfer=transfer,
        latency_seconds=0.01,
        bytes_per_second=bytes_per_second,
        relative_error=error,
        points=(LinkPoint(payload_bytes=MIB, measured_seconds=0.11),),
    )


def make_step(**changes: object) -> StepTiming:
    """A second of computing; two buckets of 4 MiB, full after 0.5 and 1.0 s."""
    step = StepTiming(
        measured_compute_seconds=1.0,
        measured_optimizer_seconds=0.1,
        spread=0.02,
        compute_share=1.0,
        transfer_share=1.0,
        processor_share=1.0,
        buckets=tuple(BucketTiming(gradient_bytes=4 * MIB, measured_ready_seconds=seconds) for seconds in (0.5, 1.0)),
    )
    return msgspec.structs.replace(step, **changes)


def make_job(*, bytes_per_second: float = 10 * MIB, ranks: int = 2, **changes: object) -> ForecastJob:
    links = {kind: make_link(kind, bytes_per_second=bytes_per_second) for kind in Transfer}
    return ForecastJob(make_step(**changes), links, ranks)


def make_program(
    method: str, payload_bytes: int, *, local_seconds: float = 0.0, transfer: Transfer = Transfer.ALL_REDUCE
) -> MethodProgram:
    """The same for both buckets."""
    bucket = BucketProgram((local_seconds / 2, local_seconds / 2), ((transfer, payload_bytes),))
    return MethodProgram(method, (bucket, bucket), spread=0.05)


UNCOMPRESSED_PROGRAM = make_program("none", 4 * MIB)


def make_validation(outcome: Outcome = Outcome.CLEAR) -> Validation:
    return filled(
        Validation,
        outcome=outcome,
        baseline_loss=2.0,
        method_loss=2.001,
        difference=IntervalEstimate(value=0.001, low=-0.002, high=0.004),
        found="+0.0010 (-0.0020 to +0.0040) beside 2.0000, 0.0200 allowed",
    )


def make_method(method: str, *, saved: float, ruling: TrafficRuling, validation: Validation | None = None):
    share = IntervalEstimate(value=saved, low=saved - 0.01, high=saved + 0.01)
    step = IntervalEstimate(value=1.9 * (1 - saved), low=1.8 * (1 - saved), high=2.0 * (1 - saved))
    return MethodTraffic(
        method=method,
        wire_bytes=8 * MIB,
        transfers=2,
        measured_local_seconds=0.01,
        transfer_seconds=0.82,
        exposed_seconds=0.41,
        predicted_step_seconds=step,
        predicted_saved_share=share,
        measured_step_seconds=step,
        measured_saved_share=share,
        break_even_bytes_per_second=20e6,
        break_even_hidden_share=0.9,
        gradient_error=0.1,
        gradient_cosine=0.99,
        validation=validation,
        ruling=ruling,
        reason="as the test says",
    )


def make_sharded_traffic() -> Traffic:
    """As of a model under FSDP2: measured, not predicted."""
    share, step = IntervalEstimate(value=0.2, low=0.1, high=0.3), IntervalEstimate(value=1.5, low=1.4, high=1.6)
    nothing = IntervalEstimate(value=0.0, low=0.0, high=0.0)
    methods = [
        filled(
            MethodTraffic,
            method=method,
            wire_bytes=4 * MIB,
            measured_step_seconds=step,
            measured_saved_share=saved,
            gradient_error=error,
            ruling=TrafficRuling.UNDECIDED,
        )
        for method, saved, error in (("none", nothing, None), ("int8:256", share, 0.01))
    ]
    return make_traffic(
        bucket_bytes=None,
        hidden_share=None,
        links=(),
        step=None,
        sharded=filled(ShardedStep, units=5, measured_silent_seconds=step, measured_most_saved_share=share),
        methods=tuple(methods),
    )


def make_traffic(**changes: object) -> Traffic:
    traffic = filled(
        Traffic,
        ruling=TrafficRuling.KEEP,
        reason="powersgd:4 as the test says",
        best="powersgd:4",
        backend="gloo",
        ranks=2,
        gradient_bytes=8 * MIB,
        bucket_bytes=4 * MIB,
        hidden_share=0.5,
        links=(make_link(Transfer.ALL_REDUCE),),
        step=make_step(),
        methods=(
            make_method("none", saved=0.0, ruling=TrafficRuling.UNDECIDED),
            make_method("powersgd:4", saved=0.2, ruling=TrafficRuling.KEEP, validation=make_validation()),
        ),
        notes=("a note",),
    )
    return msgspec.structs.replace(traffic, **changes)
