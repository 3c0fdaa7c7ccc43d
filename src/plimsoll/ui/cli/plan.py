"""``plimsoll plan TARGET``: traces a step, decides what to keep, recompute, compress and offload, shows and saves the plan."""

from __future__ import annotations

from dataclasses import replace

from plimsoll.ui.cli import commands, options, ranks, terminal


@commands.command
def plan(
    target: options.TargetArgument,
    *,
    asked: options.Planning,
    building: options.Building,
    device_profile: options.DeviceProfileOption = None,
    compiled: options.CompileOption = None,
    to: options.Output,
    explain: options.ExplainOption = False,
) -> None:
    """Fit a training step under a memory budget, and show the time that it costs.

    Under torchrun all ranks plan together, whether or not the target wraps its model (DDP, FSDP2, DTensor).

    Example: plimsoll plan llama-tiny --budget 90MiB --output plan.json
    """
    from plimsoll.ui.cli import work

    with ranks.exit_codes(is_json=to.json) as crew:
        building = replace(building, device=crew.device(building.device))
        is_meta = device_profile is not None
        loaded = crew.load(lambda: work.load(target, building, is_meta=is_meta, compiled=compiled, budget=asked.budget))
        made = work.make_plan(loaded, asked, device_profile)
        if crew.speaks:
            terminal.hand_over(made, to, explain=explain)
        work.refuse_unusable(made)
