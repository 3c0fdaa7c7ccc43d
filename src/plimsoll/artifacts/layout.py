"""How one training step is spread over ranks: the degrees of parallelism and the schedule of its pipeline. No torch here.

The names of the dimensions are the field's: ``dp`` data, ``tp`` tensor, ``cp`` context, ``pp`` pipeline, ``ep`` expert
parallelism. A step runs on ``dp * tp * cp * pp`` ranks; expert parallelism divides the experts among ranks of the ``dp * cp``
dimension and adds none. Ranks are numbered with ``tp`` fastest, then ``cp``, ``dp``, and ``pp`` slowest (torchtitan puts
``pp`` outermost too), so that tensor-parallel groups lie within a node.
"""

from __future__ import annotations

import enum

import msgspec


class PipelineSchedule(enum.StrEnum):
    """The order in which a stage runs its micro-batches.

    ``GPIPE`` (Huang et al. 2019): all forwards, then all backwards. ``ONE_F_ONE_B`` (Narayanan et al. 2019): one forward,
    one backward in turn. ``INTERLEAVED`` (Narayanan et al. 2021): every rank holds several stages. ``ZERO_BUBBLE`` (Qi et
    al. 2023, ZB-H1): backward in two halves, that of the weights filling the bubble.
    """

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Degrees of parallelism of one training step; the default is one rank.

    ``zero`` is the stage of ZeRO within the data-parallel ranks (and the context-parallel ones): 0 replicates everything, 1
    shards the optimizer state, 2 also gradients, 3 also parameters (what FSDP does). ``micro_batches`` run one after the
    other before the optimizer steps: gradient accumulation, or what is in a pipeline's flight. ``virtual_stages`` are the
    stages per rank of an interleaved schedule.
    """

    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    virtual_stages: int = 1
    micro_batches: int = 1

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def shards(self) -> int:
        """Over how many ranks ZeRO spreads what it shards."""
        return self.dp * self.cp

    @property
    def stages(self) -> int:
        """How many stages the pipeline has."""
        return self.pp * self.virtual_stages

    def __str__(self) -> str:
        degrees = [
            f"{name}={getattr(self, name)}" for name in ("dp", "tp", "cp", "pp", "ep") if getattr(self, name) > 1
        ]
        degrees += ["sp"] if self.sequence_parallel else []
        degrees += [f"zero={self.zero}"] if self.zero else []
        if self.pp > 1:
            degrees.append(f"schedule={self.schedule.value}")
            degrees += [f"virtual={self.virtual_stages}"] if self.virtual_stages > 1 else []
        degrees += [f"micro-batches={self.micro_batches}"] if self.micro_batches > 1 else []
        return ",".join(degrees) or "one rank"
