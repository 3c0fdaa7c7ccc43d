"""``plimsoll compress-gradients TARGET``: does sending fewer bytes of gradients pay here? Under torchrun, on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from plimsoll.cli import options, ranks, terminal
from plimsoll.errors import InvalidOption

_PATIENCE_SECONDS = 600.0
"""Ranks may build the same model at very different speeds."""

MethodsOption = Annotated[
    str,
    typer.Option(
        "--methods", metavar="LIST", help="powersgd:RANK, topk:SHARE, randomk:SHARE, sign, int8; separated by commas."
    ),
]
RoundsOption = Annotated[
    int,
    typer.Option("--steps", min=0, metavar="N", help="Rounds in which every method takes real steps; 0: predict only."),
]
ValidateOption = Annotated[
    int,
    typer.Option(
        "--validate", min=0, metavar="STEPS", help="Train so many steps with and without, and compare held-out loss."
    ),
]
OrdersOption = Annotated[
    int, typer.Option("--orders", min=1, metavar="N", help="Orders of the data in which validation trains.")
]
HeldOutOption = Annotated[
    int | None,
    typer.Option("--held-out", min=0, metavar="N", help="Batches at the end of the data that are kept for evaluation."),
]
BucketOption = Annotated[
    str | None,
    typer.Option("--bucket", metavar="BYTES", help="Size of a bucket of gradients, with its unit; torch's by default."),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Of everything random.")]


def compress_gradients(
    target: options.TargetArgument,
    *,
    methods: MethodsOption = "powersgd:4,topk:1%,randomk:1%,sign,int8",
    steps: RoundsOption = 5,
    validate: ValidateOption = 0,
    orders: OrdersOption = 2,
    held_out: HeldOutOption = None,
    bucket: BucketOption = None,
    seed: SeedOption = 0,
    optimizer: options.OptimizerOption = options.OptimizerName.ADAMW,
    device: options.DeviceOption = "cpu",
    batch: options.BatchOption = None,
    seq: options.SequenceOption = None,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
) -> None:
    """Say whether compressing gradients pays here, from the measured link, step and methods, and from held-out loss.

    Started by torchrun on every rank; the first one prints. Model and optimizer are those of the target, under
    DistributedDataParallel. A refusal is an answer: exit code 0.

    Example: torchrun --nproc-per-node 2 -m plimsoll compress-gradients llama-tiny --validate 200
    """
    with ranks.exit_codes(is_json=json) as crew:
        home = _join(device, crew)
        from plimsoll.cli.probe import optimizer_factory
        from plimsoll.cli.probe_data import data_for
        from plimsoll.pipeline.compressing import advise_compression
        from plimsoll.ranks.exchange import together
        from plimsoll.ranks.world import current_world
        from plimsoll.reports.traffic_terminal import render_traffic
        from plimsoll.targets.target import TargetOptions, load_target
        from plimsoll.units import parse_bytes

        world = current_world()
        assert world is not None, "a group of several ranks"
        with together(world, "loading the target", timeout_seconds=_PATIENCE_SECONDS):
            _check_optimizer(optimizer)
            bucket_bytes = None if bucket is None else parse_bytes(bucket)
            loaded = load_target(target, TargetOptions(batch=batch, sequence=seq, device=home))
            data = data_for(loaded)
        with _progress(is_shown=world.is_first) as report:
            traffic = advise_compression(
                loaded.model,
                data.batches,
                methods=[name for name in methods.split(",") if name.strip()],
                loss=loaded.loss,
                optimizer=optimizer_factory(optimizer),
                measure_rounds=steps,
                validate_steps=validate,
                orders=orders,
                held_out=held_out,
                bucket_bytes=bucket_bytes,
                seed=seed,
                data=data.description,
                progress=report,
            )
        if not world.is_first:
            return
        if output is not None:
            traffic.save(output)
        terminal.print_result(traffic, render_traffic(traffic), is_json=json, saved_to=output)


def _check_optimizer(name: options.OptimizerName) -> None:
    if name is options.OptimizerName.NONE:
        raise InvalidOption(
            "--optimizer none takes no steps.",
            why="the optimizer's step is part of what compression is held against, and validation trains with it",
            next="leave --optimizer out for AdamW, or give sgd",
        )


def _join(device: str, crew: ranks.Crew) -> str:
    """Join the ranks that torchrun started, which part with the crew; this rank's device.

    Raises:
        InvalidOption: torchrun did not start this process, or started it alone.
    """
    if not crew.is_several:
        raise InvalidOption(
            "There is one rank only: no gradients are exchanged, so there is nothing to compress.",
            why="torchrun did not start this process, or started it alone",
            next="torchrun --nproc-per-node 2 -m plimsoll compress-gradients TARGET",
        )
    import torch
    import torch.distributed as dist

    is_cuda = device.startswith("cuda")
    home = crew.device(device)
    if is_cuda:
        torch.cuda.set_device(home)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if is_cuda else "gloo")
        crew.has_joined = True
    return home


@contextlib.contextmanager
def _progress(*, is_shown: bool) -> Iterator[Callable[[str, float], None] | None]:
    """A bar on one rank; several would write over each other."""
    if not is_shown:
        yield None
        return
    from plimsoll.cli.progress import show_progress

    with show_progress(terminal.stderr()) as report:
        yield report
