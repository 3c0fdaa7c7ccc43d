"""``plimsoll compress-gradients TARGET``: finds out whether gradient compression saves time here. Run it with torchrun."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from plimsoll.errors import InvalidOption
from plimsoll.ui.cli import commands, options, ranks, terminal

if TYPE_CHECKING:
    from plimsoll.ui.cli.work import Loaded

MethodsOption = Annotated[
    str | None,
    typer.Option(
        "--methods",
        metavar="LIST",
        help="powersgd:RANK, topk:SHARE, randomk:SHARE, sign, int8; separated by commas. By default powersgd:4 (not under "
        "FSDP2), topk:1%, randomk:1%, sign, int8.",
    ),
]
RoundsOption = Annotated[
    int,
    typer.Option(
        "--steps", min=0, metavar="N", help="Real steps that every method takes; 0: predict only (not under FSDP2)."
    ),
]
ValidateOption = Annotated[
    int,
    typer.Option(
        "--validate", min=0, metavar="STEPS", help="Train this many steps with and without, and compare held-out loss."
    ),
]
OrdersOption = Annotated[
    int, typer.Option("--orders", min=1, metavar="N", help="Number of orders of the data that validation trains on.")
]
BucketOption = Annotated[
    str | None,
    typer.Option("--bucket", metavar="BYTES", help="Size of a bucket of gradients, with its unit; torch's by default."),
]


@commands.command
def compress_gradients(
    target: options.TargetArgument,
    *,
    methods: MethodsOption = None,
    steps: RoundsOption = 5,
    validate: ValidateOption = 0,
    orders: OrdersOption = 2,
    held_out: options.HeldOutOption = None,
    bucket: BucketOption = None,
    seed: options.SeedOption = 0,
    building: options.Building,
    to: options.Output,
) -> None:
    """Say whether compressing gradients pays here, from the measured link, step and methods, and from held-out loss.

    Started by torchrun on every rank; the first one prints. The target's model is put under DistributedDataParallel,
    unless the target has sharded it with fully_shard. A refusal is an answer: exit code 0.

    Example: torchrun --nproc-per-node 2 -m plimsoll compress-gradients llama-tiny --validate 200
    """
    with ranks.exit_codes(is_json=to.json) as crew:
        _check_several(crew)
        from plimsoll.distributed.comm_cost.advise_compression import advise_compression
        from plimsoll.ui.cli import work

        built = replace(building, device=crew.device(building.device), optimizer=options.OptimizerName.NONE)

        def load() -> work.Loaded:
            _check_optimizer(building.optimizer)
            _bytes_of(bucket)
            return _at_home(work.load(target, built))

        loaded = crew.load(load).target
        data = work.data_for(loaded)
        with terminal.show_progress() as report:
            traffic = advise_compression(
                loaded.model,
                data.batches,
                methods=None if methods is None else [name for name in methods.split(",") if name.strip()],
                loss=loaded.loss,
                optimizer=work.optimizer_factory(building.optimizer),
                measure_rounds=steps,
                validate_steps=validate,
                orders=orders,
                held_out=held_out,
                bucket_bytes=_bytes_of(bucket),
                seed=seed,
                data=data.description,
                progress=report,
            )
        if not crew.speaks:
            return
        terminal.hand_over(traffic, to)


def _bytes_of(bucket: str | None) -> int | None:
    from plimsoll.units import parse_bytes

    return None if bucket is None else parse_bytes(bucket)


def _at_home(loaded: Loaded) -> Loaded:
    """Set the target's GPU as the current device, because collectives without a tensor argument run on the current device."""
    import torch

    home = next((parameter.device for parameter in loaded.target.model.parameters()), None)
    if home is not None and home.type == "cuda":
        torch.cuda.set_device(home)
    return loaded


def _check_several(crew: ranks.Crew) -> None:
    if not crew.is_several:
        raise InvalidOption(
            "There is one rank only: no gradients are exchanged, so there is nothing to compress.",
            why="torchrun did not start this process, or started it alone",
            next="torchrun --nproc-per-node 2 -m plimsoll compress-gradients TARGET",
        )


def _check_optimizer(name: options.OptimizerName) -> None:
    if name is options.OptimizerName.NONE:
        raise InvalidOption(
            "--optimizer none takes no steps.",
            why="the optimizer's step is part of what compression is held against, and validation trains with it",
            next="leave --optimizer out for AdamW, or give sgd",
        )
