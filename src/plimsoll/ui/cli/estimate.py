"""``plimsoll estimate`` predicts memory and speed of a job.

``plimsoll fit`` finds the batch and plan with the highest throughput.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plimsoll.artifacts.estimate import Estimate, FittingChange
from plimsoll.artifacts.files import make_folder
from plimsoll.artifacts.progress import Progress, silent
from plimsoll.errors import InvalidOption
from plimsoll.ui.cli import commands, options, ranks, terminal
from plimsoll.ui.cli.devices import describe_device, read_price, split_devices
from plimsoll.ui.cli.launch import Launcher, launch_script

if TYPE_CHECKING:
    from plimsoll.analysis.diagnose.measured_run import RunFigures

DeviceNameOption = Annotated[
    str,
    options.of_target(
        "--device",
        "-d",
        metavar="NAME",
        help="Device from the catalogue: H100-SXM, A100-80GB, laptop-CPU … Several, with commas between them, are compared.",
    ),
]
DeviceMemoryOption = Annotated[
    str | None,
    options.of_target(
        "--device-memory",
        metavar="BYTES",
        help="Any GPU in place of --device: the memory that its driver leaves to programs, such as 24GiB. Needs the next two.",
    ),
]
DeviceFlopsOption = Annotated[
    str | None,
    options.of_target(
        "--device-flops",
        metavar="TFLOPS",
        help="Its dense peak in 16 bits, in teraFLOPS, such as 165. In f32, half of it.",
    ),
]
DeviceBandwidthOption = Annotated[
    str | None,
    options.of_target("--device-bandwidth", metavar="GB/S", help="The bandwidth of its memory in GB/s, such as 1008."),
]
TokensOption = Annotated[
    str | None,
    options.of_result(
        "--tokens", metavar="N", help="Tokens of the whole run, such as 10B: shows its hours and its price."
    ),
]
PriceOption = Annotated[
    str | None,
    options.of_result(
        "--price",
        metavar="PRICE",
        help="Price of one device for one hour: 2.5, or one for each device: H100-SXM=2.5,A100-80GB=1.5. Needs --tokens.",
    ),
]
LaunchOption = Annotated[
    Launcher | None,
    options.of_result(
        "--launch", help="Print the commands that start the ranks of this job on stdout, and the estimate on stderr."
    ),
]
LoraOption = Annotated[
    int | None,
    options.of_target("--lora", min=1, metavar="RANK", help="Train low-rank adapters only, as --techniques lora=RANK."),
]
PrecisionOption = Annotated[
    str | None,
    options.of_target(
        "--precision",
        metavar="NAME",
        help="fp32, bf16, fp16, bf16-mixed, fp16-mixed or fsdp-bf16; by default the model's own.",
    ),
]
OptimizerNameOption = Annotated[
    str,
    options.of_target(
        "--optimizer", metavar="NAME", help="adamw, adamw-fused, adamw-8bit, sgd, adafactor, muon … or none."
    ),
]
MasterWeightsOption = Annotated[
    bool, options.of_target("--master-weights", help="The optimizer keeps a copy of narrow weights in float32.")
]
LayoutOption = Annotated[
    str,
    options.of_target(
        "--layout",
        "-l",
        metavar="DEGREES",
        help="How the step is divided over ranks: dp=8,tp=8,sp,pp=4,zero=1,micro-batches=64; also cp, ep, schedule, virtual. "
        "ranks=64,samples=512 searches the fastest layout.",
    ),
]
EstimateBudgetOption = Annotated[
    str | None,
    options.of_plan(
        "--budget",
        "-b",
        metavar="BYTES",
        help='Memory for the tensors of one rank: "70GiB", or auto to fit the device.',
    ),
]
EstimateStrategyOption = Annotated[
    str | None,
    options.of_plan(
        "--strategy",
        "-s",
        metavar="NAME",
        help="none, full, every:K, sqrt, selective:… or auto (the default with a budget).",
    ),
]
FrameworkOption = Annotated[
    str | None,
    options.of_plan(
        "--export",
        metavar="NAME",
        help="Search the settings of megatron, torchtitan or transformers for the budget: recomputation and offloading.",
    ),
]
TechniquesOption = Annotated[
    str,
    options.of_target(
        "--techniques",
        "-t",
        metavar="KEYS",
        help="What else the run does: gradients=fp32, loss=fused, fp8=rowwise, offload=parameters+activations, lora=16 …",
    ),
]
CompareOption = Annotated[
    Path | None,
    options.of_result(
        "--compare-with",
        metavar="FILE",
        help="Compare with a run: its figures in JSON, a snapshot of torch's allocator, or a profiler's trace.",
        dir_okay=False,
    ),
]
SaveDeviceOption = Annotated[
    Path | None,
    options.of_result(
        "--save-device",
        metavar="FILE",
        help="Save the device with corrections from that run. --device reads the file.",
        dir_okay=False,
    ),
]
FitBudgetOption = Annotated[
    str,
    options.of_plan(
        "--budget",
        "-b",
        metavar="BYTES",
        help='Memory limit for the peak of the whole step: "70GiB", "80GB", or auto for the device\'s memory.',
    ),
]
SequencesOption = Annotated[
    list[int] | None,
    options.of_target(
        "--seq",
        parser=options.parse_sequence,
        metavar="N",
        help="Tokens per example, such as 4096 or 32k. Repeat it to try several.",
    ),
]
GlobalBatchOption = Annotated[
    int | None,
    options.of_target(
        "--global-batch", min=1, metavar="N", help="Examples per optimizer step, by gradient accumulation."
    ),
]
AccumulationOption = Annotated[
    int, options.of_target("--accumulation", min=1, metavar="N", help="Micro-batches per optimizer step.")
]
MostBatchOption = Annotated[
    int, options.of_target("--most-batch", min=1, metavar="N", help="Largest micro-batch to consider.")
]
SolvesOption = Annotated[int, options.of_plan("--solves", min=1, metavar="N", help="Maximum number of plans to solve.")]
PlanOutputOption = Annotated[
    Path | None,
    options.of_result("--save-plan", metavar="FILE", help="Save the best point's plan as JSON.", dir_okay=False),
]
FitPrecisionOption = Annotated[
    str | None,
    options.of_target(
        "--precision",
        metavar="NAME",
        help="fp32, bf16, fp16, bf16-mixed, fp16-mixed or fsdp-bf16. Searches layouts, of one rank without --layout.",
    ),
]
FitStrategyOption = Annotated[
    str | None,
    options.of_plan(
        "--strategy",
        "-s",
        metavar="NAME",
        help="full, every:K, sqrt, selective:… in place of a plan. Searches layouts, of one rank without --layout.",
    ),
]
FitOptimizerOption = Annotated[
    str,
    options.of_target(
        "--optimizer",
        metavar="NAME",
        help="adamw, sgd or none; any other of estimate's searches layouts, of one rank without --layout.",
    ),
]
FitTechniquesOption = Annotated[
    str,
    options.of_target(
        "--techniques",
        "-t",
        metavar="KEYS",
        help="What else the run does, as for estimate: lora=16, loss=fused … Searches layouts, of one rank without --layout.",
    ),
]
FitLayoutOption = Annotated[
    str,
    options.of_target(
        "--layout",
        "-l",
        metavar="DEGREES",
        help="Also search layouts of several devices: ranks=64, or with fixed degrees: ranks=64,tp=8,sp. Needs --global-batch.",
    ),
]
LongestOption = Annotated[
    bool,
    options.of_target(
        "--longest-sequence",
        help="Find the longest sequence that fits instead: plain, checkpointed, planned, in tiles, with offloaded inputs, and "
        "with the loss in chunks.",
    ),
]
PlansOption = Annotated[
    Path | None,
    options.of_result(
        "--plans", metavar="DIR", help="Save the plan of every stage in this directory.", file_okay=False
    ),
]


_NO_CHANGE = (
    "none of the changes that were tried makes the job fit: recomputation, a chunked loss, an optimizer of 8 bits, a smaller "
    "micro-batch, adapters, and shards over up to 512 ranks. A search over layouts also tries tensor and pipeline parallelism: "
    "--layout ranks=64,samples=512"
)


@commands.command
def estimate(
    context: typer.Context,
    target: options.TargetArgument,
    *,
    device: DeviceNameOption = "H100-SXM",
    device_memory: DeviceMemoryOption = None,
    device_flops: DeviceFlopsOption = None,
    device_bandwidth: DeviceBandwidthOption = None,
    batch: options.BatchOption = None,
    seq: options.SequenceOption = None,
    longest_sequence: LongestOption = False,
    precision: PrecisionOption = None,
    optimizer: OptimizerNameOption = "adamw",
    master_weights: MasterWeightsOption = False,
    layout: LayoutOption = "",
    budget: EstimateBudgetOption = None,
    strategy: EstimateStrategyOption = None,
    export: FrameworkOption = None,
    techniques: TechniquesOption = "",
    lora: LoraOption = None,
    tokens: TokensOption = None,
    price: PriceOption = None,
    launch: LaunchOption = None,
    plans: PlansOption = None,
    compare_with: CompareOption = None,
    save_device: SaveDeviceOption = None,
    to: options.Output,
) -> None:
    """Estimate the memory and speed of training a model on devices that are not present.

    Example: plimsoll estimate llama-3-70b --layout dp=64,zero=3 --strategy full
    """
    import msgspec

    import plimsoll
    from plimsoll.analysis.diagnose import measured_run
    from plimsoll.errors import BudgetBelowFloor
    from plimsoll.estimator.fitting_changes import find_fitting_changes

    with ranks.one_process("estimate", is_json=to.json):
        described = describe_device(device_memory, device_flops, device_bandwidth)
        if described is not None and "--device" in options.given(context):
            raise InvalidOption(
                f"--device {device} and --device-memory were both given.",
                why="the three figures describe a GPU that is not in the catalogue",
                next="leave one of them out",
            )
        device = described or device
        devices = split_devices(device)
        of_one = {"--plans": plans, "--compare-with": compare_with, "--save-device": save_device, "--launch": launch}
        _refuse_for_several(devices, {flag: value for flag, value in of_one.items() if value is not None})
        if plans is not None:
            _refuse_without_plans(budget, strategy)
        if launch is not None and to.json:
            raise InvalidOption(
                "--launch and --json were both given.",
                why="the commands that start a job are text",
                next="leave one of them out",
            )
        run = _read_run(compare_with, save_device)
        run_tokens, prices = read_price(tokens, price, devices)
        how = ",".join(filter(None, [techniques, f"lora={lora}" if lora else ""]))
        if longest_sequence:
            how_given = {"precision": precision, "optimizer": optimizer, "has_master_weights": master_weights}
            _find_longest(
                target, to, batch=batch, device=device, budget=budget, layout=layout, techniques=how, **how_given
            )
            return
        words = {"layout": layout, "optimizer": optimizer, "techniques": how, "budget": budget, "strategy": strategy}
        asked = {"batch": str(batch or ""), **{name: word or "" for name, word in words.items()}}

        def ask(name: str, given: Mapping[str, str], progress: Progress) -> Estimate:
            found = plimsoll.estimate(
                target,
                int(given["batch"]) if given["batch"] else None,
                device=name,
                sequence=seq,
                precision=precision,
                optimizer=given["optimizer"],
                has_master_weights=master_weights,
                layout=given["layout"],
                budget=given["budget"] or None,
                strategy=given["strategy"] or None,
                export=export,
                techniques=given["techniques"],
                progress=progress,
            )
            found = msgspec.structs.replace(found, run_tokens=run_tokens, hourly_price=prices.get(name))
            if run_tokens is not None and found.device_hours is None:
                note = "--tokens and --price have no effect: the speed of this model is not in tokens per second"
                found = msgspec.structs.replace(found, notes=(*found.notes, note))
            return found

        with terminal.show_progress() as report:
            estimates = [ask(name, asked, report) for name in devices]
            found = estimates[0]
            is_open = (
                len(devices) == 1
                and found.does_fit is not True
                and not (export or found.layouts or found.stages[0].plans)
            )
            if is_open and compare_with is None:
                changes = find_fitting_changes(found, asked, lambda given: ask(device, given, silent), report)
                typed = {**_typed(context), **({"--techniques": how} if lora else {})}
                commanded = [msgspec.structs.replace(each, command=_command(target, typed, each)) for each in changes]
                notes = (*found.notes, *(() if changes else (_NO_CHANGE,)))
                found = estimates[0] = msgspec.structs.replace(found, changes=tuple(commanded), notes=notes)
        if len(devices) > 1:
            _hand_over_several(estimates, to)
            terminal.end(0 if any(each.does_fit is not False for each in estimates) else BudgetBelowFloor.exit_code)
            return
        if compare_with is not None:
            found = measured_run.set_beside(found, run, compare_with)
        terminal.hand_over(found, to, is_aside=launch is not None)
        if launch is not None:
            terminal.say(launch_script(found, launch, budget=None if budget is None else str(budget)))
        if save_device is not None:
            measured_run.save_correction(measured_run.correct_device(found), save_device)
        if plans is not None:
            _save_plans(found, plans, to)
        terminal.end(BudgetBelowFloor.exit_code if found.does_fit is False else 0)


def _typed(context: typer.Context) -> dict[str, str]:
    """Return the typed options that describe the job, by their long names. The text of a flag is empty."""
    values = {parameter.opts[0]: context.params[str(parameter.name)] for parameter in context.command.params}
    about_result = ("--output", "--json", "--launch", "--plans", "--lora")
    texts = {name: values[name] for name in options.given(context) if name not in about_result}
    return {name: "" if value is True else str(value) for name, value in texts.items()}


def _command(target: str, typed: Mapping[str, str], change: FittingChange) -> str:
    """Return the command that estimates a job with one suggested change: the user's options, with the change applied."""
    changed = {f"--{name}": value for name, value in change.options.items()}
    words = {name: value for name, value in {**typed, **changed}.items() if name not in changed or value}
    parts = [f"{name} {shlex.quote(value)}" if value else name for name, value in words.items()]
    return " ".join(["plimsoll estimate", shlex.quote(target), *parts])


def _refuse_for_several(devices: Sequence[str], given: Mapping[str, Any]) -> None:
    if len(devices) > 1 and given:
        raise InvalidOption(
            f"{' and '.join(given)} cannot be used with {len(devices)} devices.",
            why="the option is about the job on one device",
            next=f"leave it out, or name one device: --device {devices[0]}",
        )


def _hand_over_several(estimates: Sequence[Estimate], to: options.Output) -> None:
    """Print the estimates of several devices as one table, or as a list in JSON. With ``--output`` each estimate is saved in
    its own file.
    """
    from plimsoll.artifacts.base import to_json
    from plimsoll.ui.terminal import render_document
    from plimsoll.ui.views.estimate import view_estimates

    files = []
    for found in estimates if to.output is not None else ():
        assert to.output is not None
        name = re.sub(r"[^\w.+-]", "-", found.device)  # such as H100-SXM@400Gb/s, where the slash would be a folder
        files.append(to.output.with_stem(f"{to.output.stem}-{name}"))
        found.save(files[-1])
    if to.json:
        terminal.write_json("[" + ",\n".join(map(to_json, estimates)) + "]")
        return
    terminal.stdout().print(render_document(view_estimates(estimates)), crop=False)
    for file in files:
        terminal.say(f"saved to {file}")


def _read_run(run: Path | None, device: Path | None) -> RunFigures:
    """Read the figures of a measured run, before the long work starts. Without a file, the figures are empty."""
    from plimsoll.analysis.diagnose.measured_run import RunFigures, read_run

    if run is None and device is not None:
        raise InvalidOption(
            "--save-device was given without --compare-with.",
            why="the saved corrections come from the measurements of a run of the same job",
            next="add --compare-with FILE",
        )
    return RunFigures() if run is None else read_run(run)


def _refuse_without_plans(budget: str | None, strategy: str | None) -> None:
    """Raise an error if ``--plans`` was given but the command will not make plans."""
    if budget is None or strategy not in (None, "auto"):
        raise InvalidOption(
            "There are no plans to save.",
            why="without a budget the estimate makes no plans"
            if budget is None
            else f"strategy {strategy!r} is simulated, not planned",
            next="add --budget and leave --strategy out, or leave --plans out",
        )


def _save_plans(found: Estimate, directory: Path, to: options.Output) -> None:
    """Save each plan in its own file, named by pipeline rank and by the plan's number on that rank.

    An existing file is replaced.
    """
    plans = {f"rank-{s.stage}-stage-{n}.json": plan for s in found.stages for n, plan in enumerate(s.plans)}
    if plans:
        make_folder(directory)
    for name, plan in plans.items():
        plan.save(directory / name)
    if not to.json:
        told = (
            f"{len(plans)} plans saved in {directory}"
            if plans
            else "everything fits without a plan, so there are no plans to save"
        )
        terminal.say(told)


def _find_longest(target: str, to: options.Output, **how: Any) -> None:
    """Search the longest sequence that fits the device, for one row of memory-saving decisions after the other, and print the
    lengths.
    """
    from plimsoll.estimator.longest_sequence import longest_sequence

    with terminal.show_progress() as report:
        found = longest_sequence(target, progress=report, **how)
    terminal.hand_over(found, to)
    terminal.end(found.exit_code)


def _fit_layout(target: str, budget: str, layout: str, to: options.Output, **sizes: Any) -> None:
    """Search the fastest layout (division of the step over ranks) with its micro-batch, and print the estimate.

    Each pipeline stage of the layout has its own plan.
    """
    import plimsoll
    from plimsoll.errors import BudgetBelowFloor

    with terminal.show_progress() as report:
        found = plimsoll.fit(target, None, budget, layout=layout, progress=report, **sizes)
    terminal.hand_over(found, to)
    terminal.end(BudgetBelowFloor.exit_code if found.does_fit is False else 0)


@commands.command
def fit(
    target: options.TargetArgument,
    *,
    budget: FitBudgetOption,
    seq: SequencesOption = None,
    longest_sequence: LongestOption = False,
    global_batch: GlobalBatchOption = None,
    accumulation: AccumulationOption = 1,
    most_batch: MostBatchOption = 1024,
    optimizer: FitOptimizerOption = "adamw",
    precision: FitPrecisionOption = None,
    strategy: FitStrategyOption = None,
    regions: options.RegionsOption = None,
    device_profile: options.DeviceProfileOption = None,
    device: options.DeviceOption = "cpu",
    layout: FitLayoutOption = "",
    techniques: FitTechniquesOption = "",
    solves: SolvesOption = 16,
    save_plan: PlanOutputOption = None,
    to: options.Output,
) -> None:
    """Find the micro-batch and the plan with the most tokens (or examples) per second under a memory budget.

    Example: plimsoll fit llama-3-8b --budget 75GiB --device-profile H100-SXM --seq 2048 --seq 8192
    """
    import plimsoll
    from plimsoll.planning.costing.host import host_memory_bytes
    from plimsoll.session.options import Budget
    from plimsoll.ui.cli import work

    with ranks.one_process("fit", is_json=to.json):
        if longest_sequence:
            limit: int | str | None = budget
            if device_profile is None:
                limit = Budget.read(budget).bytes_of(device, host_memory_bytes())
            given = {"layout": layout, "techniques": techniques, "optimizer": optimizer, "precision": precision}
            _find_longest(target, to, device=device_profile or "CPU", budget=limit, **given)
            return
        traced = {each.value: each for each in options.OptimizerName}
        if layout or techniques or precision or strategy or optimizer not in traced:
            layout = layout or "ranks=1"
            sizes = {"sequences": seq or None, "global_batch": global_batch, "accumulation": accumulation}
            how = {"regions": regions or None, "device_profile": device_profile, "optimizer": optimizer}
            how |= {"techniques": techniques, "precision": precision, "strategy": strategy}
            _fit_layout(target, budget, layout, to, **sizes, **how)
            return
        is_text = ":" not in target
        building = options.Building(
            optimizer=traced[optimizer], device=device, seq=max(seq) if seq and is_text else None
        )
        loaded = work.load(target, building, is_meta=device_profile is not None)
        found = loaded.ask(
            plimsoll.fit,
            budget,
            sequences=seq or None,
            global_batch=global_batch,
            accumulation=accumulation,
            most_batch=most_batch,
            regions=regions or None,
            device_profile=device_profile,
            most_solves=solves,
        )
        terminal.hand_over(found, to)
        if save_plan is not None:
            terminal.save_beside(found.plan, "plan", save_plan, to)
        terminal.end(found.exit_code)
