"""Refuses options that cannot work before torch is imported and before a model is built: within a second or two.

Everything here would also be refused later, by the public functions. But then the user has waited for imports, for a model or
for a trace. A size that follows from a model's configuration is compared with the machine and with the budget.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from plimsoll.errors import BudgetBelowFloor, InvalidOption, InvalidTarget, PlimsollError
from plimsoll.estimator.targets.recipe import Recipe, check_target, find_recipe
from plimsoll.estimator.targets.sizes import count_step_flops, parameter_bytes
from plimsoll.estimator.targets.target import TargetOptions, refuse_sizes
from plimsoll.planning.costing.host import host_memory_bytes
from plimsoll.ui.cli import options, terminal
from plimsoll.units import format_bytes, format_bytes_up

_LARGEST = 2**63 - 1
_FILES = ("output", "save_plan", "revised_plan", "timeline", "export_sac", "save_device")
_FOLDERS = ("plans", "run", "keep_traces")
_READ = ("plan", "receipt", "verdict")
_INPUTS = ("target", "subject", "file", "trace", "compare_with", *_READ)
"""The options and arguments that may name a file to read. ``_READ`` has those that name a saved result."""
"""The options that name a folder to write to. ``_FILES`` has the options that name a file."""
_WITHOUT_MODEL = ("estimate",)
"""Commands that never build the model in memory: they work with fake tensors, for devices of the catalogue."""
_BESIDE_LONGEST: Mapping[str, Mapping[str, Any]] = {
    "estimate": dict.fromkeys(
        ("seq", "strategy", "export", "tokens", "price", "launch", "plans", "compare_with", "save_device"), None
    ),
    "fit": {"seq": [], "global_batch": None, "accumulation": 1, "most_batch": 1024, "regions": [], "solves": 16}
    | {"save_plan": None, "device": "cpu", "strategy": None},
}
"""For each command with ``--longest-sequence``, the options that do not have an effect together with it, and their defaults."""
_KINDS = ("cpu", "cuda", "mps", "xpu", "hpu", "npu", "mtia", "xla", "privateuseone")
"""The kinds of devices that torch or a library for it can build a model on."""
_HOST = "cpu"
_FLOPS_PER_CORE = 5e10
_LONG_SECONDS = 60.0
_STATES = {options.OptimizerName.ADAMW: 2, options.OptimizerName.SGD: 1, options.OptimizerName.NONE: 0}
"""How many copies of the parameters an optimizer holds as its state, by the optimizer's name."""


def refuse_early(command: str, typed: Mapping[str, Any], *, plans_if_asked: bool) -> None:
    """Check everything that can be known before torch is imported and the model is loaded: numbers, files, target, device,
    sizes, planning options.

    Args:
        command: the name of the command's function.
        typed: a mapping from the names of options to their values.
        plans_if_asked: whether the command makes a plan only if options ask for one.

    Raises:
        PlimsollError: the error that the public function would raise later.
    """
    from plimsoll.session.options import Budget

    _refuse_numbers(typed)
    _refuse_files(typed)
    if {"budget", "strategy"} & typed.keys():
        _refuse_planning(command, typed, plans_if_asked=plans_if_asked)
    if command == "demo" and typed.get("budget"):
        Budget.read(typed["budget"]).bytes_of(_HOST, host_memory_bytes())
    if typed.get("longest_sequence"):
        _refuse_beside_longest(command, typed)
    elif command == "fit":
        _refuse_fit(typed)
    if command == "estimate":
        _refuse_estimate(typed)
    if terminal.is_under_torchrun():  # ranks compare their errors later, and each holds only a part of the model
        return
    _refuse_devices(command, typed)
    recipe = _recipe_of(typed)
    if recipe is None or command in _WITHOUT_MODEL or any(map(typed.get, ("layout", "techniques", "longest_sequence"))):
        return
    if command == "fit" and (typed.get("precision") or typed.get("strategy")):  # searches layouts, with fake tensors
        return
    _refuse_large(command, typed, recipe)
    _refuse_long(typed, recipe)
    if typed.get("link") == "host" and typed.get("device_profile") is None and typed.get("device") == _HOST:
        raise InvalidOption(
            "--link host would have no effect on cpu.",
            why="it moves tensors from a GPU to host memory, and these tensors are already there",
            next="write --link disk, or leave --link out",
        )
    if typed.get("device_profile") is None and typed.get("device") == _HOST and typed.get("budget"):
        Budget.read(typed["budget"]).bytes_of(_HOST, host_memory_bytes())


def notice(command: str, typed: Mapping[str, Any]) -> Iterator[str]:
    """Yield what to tell the user before the work begins: what is loaded, and whether one step takes minutes on this CPU."""
    text = _target_of(typed)
    if not text or command in _WITHOUT_MODEL or typed.get("longest_sequence"):
        return
    yield f"loading {text}"
    recipe, seq = _recipe_of(typed), typed.get("seq")
    if recipe is None or typed.get("device_profile") or typed.get("device", _HOST) != _HOST or isinstance(seq, list):
        return
    flops = count_step_flops(recipe, batch=typed.get("batch"), sequence=seq)
    cores = os.cpu_count() or 1
    seconds = (flops or 0) / _FLOPS_PER_CORE / cores
    if seconds > _LONG_SECONDS:
        yield (
            f"Note: one step is {flops:.1e} FLOPs, about {math.ceil(seconds / 60):,} minutes on {cores} CPU cores, and "
            f"{command} runs several. A smaller --batch or --seq is faster; plan --device-profile does not run the step."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSize:
    """Data: the bytes that training a model holds under every plan: its parameters, and gradients and state of trained ones.

    ``parameters_bytes`` counts all parameters, ``trained_bytes`` those that get a gradient.
    """

    target: str
    parameters_bytes: int
    trained_bytes: int
    optimizer: options.OptimizerName

    @property
    def total_bytes(self) -> int:
        """The bytes that are in memory at once when the optimizer steps."""
        return self.parameters_bytes + self.trained_bytes * (1 + _STATES[self.optimizer])

    def refuse_on_this_machine(self, budget: str | None, command: str = "plan") -> None:
        """Refuse to build the model here if it needs more than all memory of the machine.

        ``command`` is the command to suggest; it must have ``--device-profile``.

        Raises:
            InvalidTarget: the message names both sizes and ``--device-profile``.
        """
        host_bytes = host_memory_bytes()
        if host_bytes is None or self.total_bytes <= host_bytes:
            return
        asked = f" --budget {shlex.quote(budget)}" if budget else ""
        raise InvalidTarget(
            f"{self.target} needs {format_bytes(self.total_bytes)} for one training step, but this machine has "
            f"{format_bytes(host_bytes)}.",
            why=f"{self._parts()}; without --device-profile the model is built and run on this machine",
            next="name the device to plan for, which need not be here: "
            f"plimsoll {command} {shlex.quote(self.target)}{asked} --device-profile H100-SXM",
        )

    def refuse_under(self, budget: str | None) -> None:
        """Raise an error if the budget is smaller than the bytes that every plan has to hold.

        Raises:
            BudgetBelowFloor: the message names both sizes.
        """
        from plimsoll.session.options import Budget

        limit = Budget.read(budget).asked_bytes
        if limit is None or self.total_bytes <= limit:
            return
        narrower = [f", --optimizer {name}" for name in _STATES if 0 < _STATES[name] < _STATES[self.optimizer]]
        raise BudgetBelowFloor(
            f"budget {format_bytes(limit)} is below {format_bytes(self.total_bytes)}, which {self.target} needs without any "
            "activations.",
            why=f"{self._parts()}; all are in memory when the optimizer steps, whatever a plan does with activations",
            next=f"a budget above {format_bytes_up(self.total_bytes)}{''.join(narrower)}, or shards on several ranks: "
            f"plimsoll estimate {shlex.quote(self.target)} --layout dp=8,zero=3",
        )

    def _parts(self) -> str:
        state_bytes = self.trained_bytes * _STATES[self.optimizer]
        parts = {
            "parameters": self.parameters_bytes,
            "gradients": self.trained_bytes,
            f"{self.optimizer} state": state_bytes,
        }
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)


def _refuse_numbers(typed: Mapping[str, Any]) -> None:
    for name, value in ((n, each) for n, v in typed.items() for each in (v if isinstance(v, list) else [v])):
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise InvalidOption(
                f"{option} has {len(str(abs(value)))} digits.",
                why="the largest whole number that an option accepts is 2**63 - 1",
                next="give a smaller number, or leave the option out",
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidOption(
                f"{option} is {value}.",
                why="the option needs a finite number",
                next="give a finite number, or leave the option out",
            )


def _refuse_files(typed: Mapping[str, Any]) -> None:
    """Check that output files can be written, and that the target (the model to load) and the saved results can be read.

    A file that can be read only once, such as a pipe, is not read here. Under torchrun, nothing is read here: there, the ranks
    compare their errors later.
    """
    from plimsoll.artifacts.files import check_folder, check_place, is_read_once

    for names, check in ((_FILES, check_place), (_FOLDERS, check_folder)):
        for place in (typed[name] for name in names if typed.get(name) is not None):
            check(place)
    _refuse_overwriting(typed)
    if terminal.is_under_torchrun():
        return
    if "target" in typed:
        check_target(typed["target"])
    for name in _READ:
        if typed.get(name) is not None and not is_read_once(typed[name]):
            _read(name, typed[name])


def _refuse_overwriting(typed: Mapping[str, Any]) -> None:
    """Raise an error if an output would overwrite a file that the command reads, or two outputs have one path."""
    read = [Path(typed[name]) for name in _INPUTS if typed.get(name) is not None]
    # os.path says False of a name that is too long, where Path raises
    read += [folder / "config.json" for folder in read if os.path.isdir(folder)]
    read += [Path(name) for name in str(typed.get("device") or "").split(",") if name.endswith(".json")]
    written: dict[Path, str] = {}
    for name in (name for name in _FILES if typed.get(name) is not None):
        option, place = f"--{name.replace('_', '-')}", Path(typed[name])
        if place.exists() and not place.is_file():  # a device or a pipe keeps nothing
            continue
        if place.exists() and any(os.path.exists(each) and each.samefile(place) for each in read):
            raise InvalidOption(
                f"{option} {place} would be overwritten.",
                why="it is also a file that this command reads",
                next=f"give {option} another name",
            )
        other = written.setdefault(place.resolve(), option)
        if other != option:
            raise InvalidOption(
                f"{other} and {option} are both {place}.",
                why="they are two files, and one would overwrite the other",
                next="give them two different names",
            )


def _read(name: str, file: Path) -> None:
    """Read the saved result that ``--plan``, ``--receipt`` or ``--verdict`` names, so that a wrong file is refused before the
    slow work.
    """
    from plimsoll.artifacts.plan import Plan
    from plimsoll.artifacts.receipt import Receipt
    from plimsoll.artifacts.store import of_kind
    from plimsoll.artifacts.verdict import Verdict

    kinds: dict[str, type[Plan] | type[Receipt] | type[Verdict]] = {
        "plan": Plan,
        "receipt": Receipt,
        "verdict": Verdict,
    }
    of_kind(file, kinds[name])


def _refuse_planning(command: str, typed: Mapping[str, Any], *, plans_if_asked: bool) -> None:
    """Check the options of plans: strategies, words, amounts, and whether the device has as much memory as the budget."""
    from plimsoll.planning.costing.devices import find_device
    from plimsoll.planning.strategies import is_torchs_own
    from plimsoll.session.options import Budget, PlanOptions, read_error

    asked = "auto" if typed.get("strategy") in (None, []) else typed["strategy"]
    # compare --compile takes several strategies, and some of them may be torch's own, which PlanOptions would refuse.
    strategies = (
        [asked] if isinstance(asked, str) else [s for s in asked if not (typed["compiled"] and is_torchs_own(s))]
    )
    budget, device = Budget.read(typed.get("budget")), typed.get("device_profile")
    limits = options.limits(typed)
    is_asked = options.asks_for_plan(typed)
    if typed.get("plan") is not None or (plans_if_asked and not is_asked):
        read_error(limits.pop("max_error"))  # it is about the measured gradient then, and no codec need be allowed
    PlanOptions.read(strategies=strategies, device_profile=device, **limits)
    if device is not None:
        budget.bytes_of(device, find_device(device).memory_bytes)
    if command == "verify" and typed.get("plan") is None and not is_asked:
        _refuse_unchecked(typed)


def _refuse_unchecked(typed: Mapping[str, Any]) -> None:
    """Raise an error if the own checkpointing of a model built from a configuration should be verified, because such a model
    does not checkpoint.
    """
    recipe = _recipe_of(typed)
    if recipe is not None and not recipe.fields.get("gradient_checkpointing"):
        raise InvalidOption(
            f"verify was given nothing to verify on {recipe.name}.",
            why="without --plan, --budget or --strategy it checks the model's own activation checkpointing, and a model built "
            "from its configuration does not use any",
            next=f"name one: plimsoll verify {shlex.quote(typed['target'])} --plan plan.json, or --budget 8GiB, or "
            "--strategy full",
        )


def _refuse_fit(typed: Mapping[str, Any]) -> None:
    """Check the sizes and the layout of ``fit``."""
    if typed["global_batch"] is not None and typed["accumulation"] != 1:
        raise InvalidOption(
            f"--global-batch {typed['global_batch']} and --accumulation {typed['accumulation']} contradict each other.",
            why="the global batch divided by the micro-batch is the accumulation, and fit chooses the micro-batch",
            next=f"leave --accumulation out, or leave --global-batch out to fix {typed['accumulation']} micro-batches per step",
        )
    searching = _layout_option(typed)
    if not searching:
        return
    if typed["save_plan"] is not None:
        raise InvalidOption(
            f"--save-plan cannot be used with {searching}.",
            why="the option makes fit search layouts; each stage of a layout has its own plan, and --save-plan writes only one",
            next="save the result with --output, or run `plimsoll estimate` for the layout that was found, with --plans DIR",
        )
    limits = {"most_batch": "--most-batch", "solves": "--solves"}
    changed = [f"{flag} {typed[name]}" for name, flag in limits.items() if typed[name] != _BESIDE_LONGEST["fit"][name]]
    if changed:
        raise InvalidOption(
            f"{' and '.join(changed)} cannot be used with {searching}.",
            why="the option makes fit search layouts, which has its own limits for micro-batches and plans",
            next=f"leave out {' and '.join(changed)}",
        )
    from plimsoll.artifacts.job import read_techniques
    from plimsoll.estimator.parallelism.layouts import layout_entries

    read_techniques(typed["techniques"])
    entries = dict(layout_entries(typed["layout"], also=("ranks", "samples")))
    if "ranks" not in entries and typed["layout"]:
        raise InvalidOption(
            f"--layout {typed['layout']} does not say how many ranks to divide the step over.",
            why="fit searches all layouts of a number of ranks; a single layout is estimated",
            next=f"write --layout ranks=8,{typed['layout']}, or run "
            f"plimsoll estimate {shlex.quote(typed['target'])} --layout {typed['layout']}",
        )
    missing = {"--global-batch 512": typed["global_batch"], "--device-profile H100-SXM": typed["device_profile"]}
    lacking = [flag for flag, value in missing.items() if value is None]
    if lacking:
        raise InvalidOption(
            f"{searching} needs {' and '.join(flag.split()[0] for flag in lacking)}.",
            why="layouts are compared by the seconds of one step over the global batch, estimated for a device profile",
            next=f"add {' '.join(lacking)}",
        )


def _layout_option(typed: Mapping[str, Any]) -> str:
    """Return the option that makes ``fit`` search layouts with estimates, or an empty text. Without one, it traces the step."""
    for name in ("layout", "techniques", "precision", "strategy"):
        if typed[name]:
            return f"--{name}"
    optimizer = typed["optimizer"]
    return "" if optimizer in list(options.OptimizerName) else f"--optimizer {optimizer}"


def _refuse_beside_longest(command: str, typed: Mapping[str, Any]) -> None:
    """Check the options of a search for the longest sequence. Raise an error for options that do not have an effect in it.

    Raises:
        InvalidOption: the message names the options.
    """
    from plimsoll.artifacts.job import read_techniques
    from plimsoll.estimator.parallelism.layouts import read_layout
    from plimsoll.estimator.setting_checks import check_longest

    ignored = [
        f"--{name.replace('_', '-')}"
        for name, default in _BESIDE_LONGEST[command].items()
        if (typed.get(name) or default) != default
    ]
    if command == "estimate" and "," in typed["device"]:
        ignored.append(f"--device {typed['device']}")
    if ignored:
        raise InvalidOption(
            f"{' and '.join(ignored)} cannot be used with --longest-sequence.",
            why="it searches the length itself, on one device, with decisions of its own in each row",
            next="leave out either --longest-sequence or the other options",
        )
    lora = f"lora={typed['lora']}" if typed.get("lora") else ""
    check_longest(read_layout(typed["layout"]), read_techniques(",".join(filter(None, [typed["techniques"], lora]))))


def _refuse_estimate(typed: Mapping[str, Any]) -> None:
    """Check the texts of the options of ``plimsoll estimate``: device, precision, techniques and layout."""
    from plimsoll.artifacts.job import parse_precision, read_techniques
    from plimsoll.estimator.layout_space import LayoutSpace
    from plimsoll.estimator.parallelism.layouts import read_layout
    from plimsoll.estimator.setting_checks import check_auto
    from plimsoll.planning.costing.devices import find_device
    from plimsoll.ui.cli.devices import read_price, split_devices

    devices = split_devices(typed["device"])
    for name in devices:
        find_device(name)
    read_price(typed["tokens"], typed["price"], devices)
    parse_precision(typed["precision"])
    read_techniques(",".join(filter(None, [typed["techniques"], f"lora={typed['lora']}" if typed["lora"] else ""])))
    if LayoutSpace.read(typed["layout"]) is None:
        read_layout(typed["layout"])
        if typed["export"] is None:
            check_auto(typed["strategy"], typed["budget"])


def _refuse_devices(command: str, typed: Mapping[str, Any]) -> None:
    """Check that ``--device`` names a device that torch may build a model on, and that it has an effect.

    Raises:
        InvalidTarget: the device does not exist here, or the target ignores the option.
        InvalidOption: ``--device-profile`` was given too.
    """
    device, profile = typed.get("device"), typed.get("device_profile")
    if device is None or device == _HOST or command in _WITHOUT_MODEL:
        return
    text = _target_of(typed)
    if text and _recipe_of(typed) is None and ":" in text:
        refuse_sizes(text, TargetOptions(batch=typed.get("batch"), sequence=_one(typed.get("seq")), device=device))
    if profile is not None:
        raise InvalidOption(
            f"--device {device} would have no effect together with --device-profile {profile}.",
            why="with a device profile the model is not built on a device of this machine",
            next=f"leave --device out to plan for {profile}, or leave --device-profile out to plan on this machine",
        )
    kind, _, number = device.partition(":")
    if kind in _KINDS and (number.isdecimal() or ":" not in device) and not (kind == "cuda" and _is_without_gpus()):
        return
    raise InvalidTarget(
        f"The device {device!r} is not available on this machine.",
        why="the installed torch is built for CPUs only"
        if kind == "cuda" and (number.isdecimal() or ":" not in device)
        else f"--device is what torch calls a device of this machine: {', '.join(_KINDS[:4])}, or one with a number, cuda:1",
        next=_instead(device, is_profile_known="device_profile" in typed),
    )


def _instead(device: str, *, is_profile_known: bool) -> str:
    """Return the advice in the error for a device that is not available here: it may be a name from the device catalogue."""
    from plimsoll.planning.costing.devices import find_device

    try:
        name = find_device(device).name
    except PlimsollError:
        name = "H100-SXM"
    if is_profile_known:
        return (
            f"leave --device out to use the CPU, or plan for a device of another machine with --device-profile {name}"
        )
    return f"leave --device out to use the CPU; plimsoll plan and fit know other devices: --device-profile {name}"


def _is_without_gpus() -> bool:
    """Return True if the installed torch is built without support for GPUs. Its version file says so; torch is not imported."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return False
    file = Path(spec.submodule_search_locations[0]) / "version.py"
    if not file.is_file():
        return False
    text = file.read_text(encoding="utf-8", errors="replace")
    values = [re.search(rf"^{name}\b[^=\n]*=\s*(\S+)", text, re.MULTILINE) for name in ("cuda", "hip")]
    return all(value is not None and value[1] == "None" for value in values)


def _refuse_large(command: str, typed: Mapping[str, Any], recipe: Recipe) -> None:
    """Compare the size of a model, from its configuration, with this machine and with the budget."""
    known, name = parameter_bytes(recipe), typed.get("optimizer")
    if known is None or name not in set(options.OptimizerName):
        return
    optimizer = options.OptimizerName(name)
    size = TrainedSize(target=_target_of(typed), parameters_bytes=known, trained_bytes=known, optimizer=optimizer)
    if typed.get("device_profile") is None and typed.get("device", _HOST) == _HOST:
        size.refuse_on_this_machine(typed.get("budget"), command if "device_profile" in typed else "plan")
    size.refuse_under(typed.get("budget"))


def _refuse_long(typed: Mapping[str, Any], recipe: Recipe) -> None:
    """Refuse a sequence that is longer than the positions that a GPT-2 has learned."""
    seq, positions = _one(typed.get("seq")), recipe.fields.get("n_positions")
    if recipe.fields.get("model_type") == "gpt2" and isinstance(positions, int) and seq is not None and seq > positions:
        raise InvalidTarget(
            f"{recipe.name} accepts at most {positions:,} tokens per sample, not {seq:,}.",
            why="its positions are learned, and it has one for each token of a sample",
            next=f"use --seq {positions} or less, or a configuration with more positions",
        )


def _target_of(typed: Mapping[str, Any]) -> str:
    """Return the text that names the target (a model with its batch) of the command, or an empty text."""
    text = typed.get("target") or ("" if typed.get("trace") is not None else typed.get("subject"))
    return text if isinstance(text, str) else ""


def _recipe_of(typed: Mapping[str, Any]) -> Recipe | None:
    """Return the description (recipe) of the model that the command will build, or ``None`` if the target is a function, a
    saved file or unknown.
    """
    from plimsoll.artifacts.files import is_read_once

    text = _target_of(typed)
    if not text or is_read_once(text):
        return None
    try:
        return find_recipe(text)
    except PlimsollError:  # `explain` also takes a saved plan; a target that is wrong is refused elsewhere
        return None


def _one(sequence: int | list[int] | None) -> int | None:
    return max(sequence, default=None) if isinstance(sequence, list) else sequence
