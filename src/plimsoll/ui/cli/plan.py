"""``plimsoll plan TARGET``: trace one step, decide what to keep, recompute, compress and offload, show it, save it."""

from __future__ import annotations

from plimsoll.ui.cli import options, ranks, terminal


def plan(
    target: options.TargetArgument,
    *,
    budget: options.BudgetOption = None,
    strategy: options.StrategyOption = "auto",
    regions: options.RegionsOption = None,
    optimizer: options.OptimizerOption = options.OptimizerName.ADAMW,
    device_profile: options.DeviceProfileOption = None,
    allow: options.AllowOption = "recompute",
    max_error: options.MaxErrorOption = "0",
    host_budget: options.HostBudgetOption = None,
    override: options.OverrideOption = None,
    link: options.LinkOption = None,
    device: options.DeviceOption = "cpu",
    batch: options.BatchOption = None,
    seq: options.SequenceOption = None,
    output: options.OutputOption = None,
    explain: options.ExplainOption = False,
    json: options.JsonOption = False,
) -> None:
    """Fit a training step under a memory budget, and show what it costs.

    Under torchrun all ranks plan together, for a target that wraps its model (DDP, FSDP2, DTensor) or not.

    Example: plimsoll plan llama-tiny --budget 200MiB --output plan.json
    """
    from plimsoll.estimator.targets.target import TargetOptions
    from plimsoll.ui.cli import work

    with ranks.exit_codes(is_json=json) as crew:
        how = TargetOptions(batch=batch, sequence=seq, device=crew.device(device), is_meta=device_profile is not None)
        loaded = crew.load(lambda: work.load(target, how, optimizer, (strategy,)))
        request = work.PlanRequest(
            budget=budget,
            strategy=strategy,
            regions=tuple(regions or ()),
            device_profile=device_profile,
            allowed=work.Allowed(
                allow=allow, max_error=max_error, host_budget=host_budget, overrides=tuple(override or ()), link=link
            ),
        )
        made = work.make_plan(loaded, request)
        if crew.speaks:
            if output is not None:
                made.save(output)
            terminal.print_result(made, is_json=json, saved_to=output, text=made.explain() if explain else None)
        work.refuse_unusable(made)
