"""``plimsoll compress-gradients TARGET``: finds out whether gradient compression saves time on these ranks.

Run it with torchrun.
"""

from __future__ import annotations

from typing import Annotated

import typer

from plimsoll.errors import InvalidOption
from plimsoll.ui.cli import commands, options, ranks, terminal

MethodsOption = Annotated[
    str,
    typer.Option(
        "--methods",
        metavar="LIST",
        help="powersgd:RANK (not under FSDP2), topk:SHARE; separated by commas. By default powersgd:4 and topk:1%.",
        show_default=False,
    ),
]
RoundsOption = Annotated[
    int, typer.Option("--steps", min=1, metavar="N", help="Number of rounds; every method takes steps in each.")
]
BandwidthOption = Annotated[
    float | None,
    typer.Option(
        "--bandwidth",
        min=0.001,
        metavar="MBIT",
        help="Predict for a link of this many Mbit/s; by default for the measured one.",
    ),
]


@commands.command
def compress_gradients(
    target: options.TargetArgument,
    *,
    methods: MethodsOption = "",
    steps: RoundsOption = 5,
    bandwidth: BandwidthOption = None,
    seed: options.SeedOption = 0,
    device: options.DeviceOption = "cpu",
    batch: options.BatchOption = None,
    seq: options.SequenceOption = None,
    to: options.Output,
) -> None:
    """Say what each method of gradient compression costs a step here: bytes, encoding, predicted and measured seconds, error.

    Started by torchrun on every rank; the first one prints. The target's model is put under DistributedDataParallel,
    unless the target has wrapped it, or sharded it with fully_shard. The step is without the optimizer.

    Example: torchrun --nproc-per-node 2 -m plimsoll compress-gradients llama-tiny --bandwidth 1000
    """
    with ranks.exit_codes(is_json=to.json) as crew:
        if not crew.is_several:
            raise InvalidOption(
                "There is one rank only: no gradients are exchanged, so there is nothing to compress.",
                why="torchrun did not start this process, or started it alone",
                next="torchrun --nproc-per-node 2 -m plimsoll compress-gradients TARGET",
            )
        import torch
        from torch.nn.parallel import DistributedDataParallel

        from plimsoll.distributed.comm_cost.advise_compression import advise_compression
        from plimsoll.session.rendezvous.world import find_participants
        from plimsoll.ui.cli import work

        built = options.Building(optimizer=options.OptimizerName.NONE, device=crew.device(device), batch=batch, seq=seq)
        loaded = crew.load(lambda: work.load(target, built)).target
        model, data = loaded.model, work.data_for(loaded)
        home = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        if home.type == "cuda":
            torch.cuda.set_device(home)  # collectives without a tensor argument run on the current device
        if not find_participants(model).groups:
            model = DistributedDataParallel(model)
        with terminal.show_progress() as report:
            traffic = advise_compression(
                model,
                data.batches,
                methods=[name for name in methods.split(",") if name.strip()],
                loss=loaded.loss,
                measure_rounds=steps,
                bytes_per_second=None if bandwidth is None else bandwidth * 1e6 / 8,
                seed=seed,
                data=data.description,
                progress=report,
            )
        if crew.speaks:
            terminal.hand_over(traffic, to)
