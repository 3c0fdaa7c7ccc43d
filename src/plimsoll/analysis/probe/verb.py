"""A model, batches and a plan in; the verdict of training under the plan beside training without it out."""

from __future__ import annotations

import functools
import math
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from plimsoll.analysis.probe.arms import Job, MakeOptimizer
from plimsoll.analysis.probe.run_directory import RunDirectory
from plimsoll.analysis.probe.settings import Settings
from plimsoll.analysis.probe.step import Blocks, Trainer
from plimsoll.analysis.probe.stream import Call, Stream, checksum, held_out_calls
from plimsoll.analysis.probe.summary import About, make_verdict
from plimsoll.analysis.probe.until_clear import run_probe
from plimsoll.analysis.verify.evidence import versions
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import Progress, part_of, silent
from plimsoll.artifacts.store import from_json
from plimsoll.artifacts.verdict import Verdict
from plimsoll.artifacts.writing import to_json
from plimsoll.errors import InvalidModel, InvalidProbe, PlanNotUsable, ProbeRunUnusable
from plimsoll.session.manage import check_plan, manage, refuse_other_model, refuse_other_signature
from plimsoll.session.rendezvous.world import refuse_several_ranks
from plimsoll.session.task import check_model, explained_loss, refuse_profiler
from plimsoll.tracing.recorder.calling import Loss
from plimsoll.tracing.recorder.fingerprint import fingerprint, signature


def probe(
    model: nn.Module,
    batches: Any,
    plan: Plan,
    *,
    steps: int = 1000,
    loss: Loss | None = None,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    held_out: Iterable[Any] | int | None = None,
    target_loss: float | None = None,
    seed: int = 0,
    run: str | Path | None = None,
    chunk_steps: int = 20,
    early: bool = True,
    data: str = "",
    progress: Progress | None = None,
) -> Verdict:
    """Train with and without the plan, and say whether the plan harms training.

    Both arms start from the model's weights as they are and see the same batches with the same random numbers. They take
    turns on the one model object, a chunk of steps at a time; their states wait in the run directory. The model, its
    gradients and buffers and the random state are left as they were, also after an error or Ctrl-C.

    Args:
        model: on its device, in the mode in which it trains.
        batches: anything that yields batches (a loader, a list) and can be passed through again; or one batch (a tensor, a
            tuple, a dict), which both arms then overfit.
        plan: the plan to judge.
        steps: that each arm takes, at least one.
        loss: as for ``plimsoll.plan``.
        optimizer: makes the optimizer of each arm from an iterable of parameters; AdamW by default.
        held_out: batches for evaluation, or how many batches at the end of each pass through ``batches`` are set apart; by
            default a tenth of them, at most 8, where their number is known.
        target_loss: the loss to which steps and seconds are counted; by default the baseline's own final one.
        seed: of everything random.
        run: a directory in which the run is kept: the same call goes on there after an interruption, and gives what an
            uninterrupted one would. By default a temporary one.
        chunk_steps: steps that one arm takes before the other one's turn.
        early: stop as soon as the answer is clear.
        data: what the batches are, in words, for the verdict.
        progress: told the losses of both arms and the share done.

    Returns:
        A verdict with the rule that decided it and the figures behind it; its exit code is 0 where training may rely on
        the plan.

    Raises:
        InvalidProbe: no steps, no batches, fewer than are to be held out, or a target loss that is not finite.
        ProbeRunMismatch: the run directory belongs to another probe, or the data has changed.
        ProbeRunUnusable: the run directory cannot be read or written.
        PlanMismatch: the plan was made for another model or step.

    Example:
        >>> import torch, plimsoll
        >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(2)])
        >>> loss = lambda output: output.square().mean()
        >>> plan = plimsoll.plan(model, torch.randn(4, 8), loss=loss, strategy="full")
        >>> batches = [torch.randn(4, 8) for _ in range(6)]
        >>> plimsoll.probe(model, batches, plan, steps=4, loss=loss).ruling
        <Ruling.IDENTICAL: 'IDENTICAL'>

    Source: docs/probe.md defines every figure and rule. Known weakness: two runs show one trajectory each; how far runs
    from other seeds would lie apart is not known here.
    """
    report = progress or silent
    check_model(model)
    refuse_several_ranks(model, "probe")
    check_trainable(model)
    check_plan(plan)
    refuse_other_model(model, plan)
    refuse_profiler(model)
    if not plan.status.is_usable:
        raise PlanNotUsable(
            f"This plan is {plan.status}.", why=plan.status.advice, next="plan again with a larger budget"
        )
    settings = _settings(steps, chunk_steps, seed, target_loss, is_early=early)
    loss = explained_loss(loss)
    report("reading the data", 0.0)
    stream, evaluated = _read_data(batches, held_out, seed)
    about = _about(model, stream, evaluated, plan, loss, optimizer, data)
    with tempfile.TemporaryDirectory(prefix="plimsoll-probe-") as temporary:
        directory = RunDirectory(Path(temporary) / "run" if run is None else Path(run))
        directory.claim(_identity(model, plan, settings, about, evaluated))
        finished = _finished(directory)
        if finished is not None:
            report("this run was finished before: its verdict is shown", 1.0)
            return finished
        blocks = Blocks(model, tuple(region.name for region in plan.regions))
        job = Job(
            trainer=Trainer(model, loss, blocks),
            blocks=blocks,
            manage=functools.partial(manage, model, plan),
            make_optimizer=optimizer,
            stream=stream,
            held_out=evaluated,
            settings=settings,
            directory=directory,
            report=part_of(report, 0.0, 1.0),
        )
        verdict = make_verdict(run_probe(job), plan, settings, about)
        directory.finish(to_json(verdict))
    return verdict


def check_trainable(model: nn.Module) -> None:
    """Refuse a model whose training could not be undone, or not be run.

    Raises:
        InvalidModel: it has no parameters to train, or they are on the meta device.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained or any(parameter.is_meta for parameter in model.parameters()):
        raise InvalidModel(
            f"{type(model).__name__} cannot be trained here.",
            why="its parameters are on the meta device, where they have no memory"
            if trained
            else "no parameter of it requires a gradient",
            next="probe the model on the device that it trains on",
        )


def _settings(steps: int, chunk_steps: int, seed: int, target_loss: float | None, *, is_early: bool) -> Settings:
    for name, value in (("steps", steps), ("chunk_steps", chunk_steps)):
        if value < 1:
            raise InvalidProbe(
                f"{name}={value} is no number of steps to take.",
                why="each arm takes at least one",
                next="take a thousand, or as many as you have time for",
            )
    if target_loss is not None and not math.isfinite(target_loss):
        raise InvalidProbe(
            f"target_loss={target_loss} is no loss that training can reach.",
            why="it is not finite",
            next="give a number, or leave it out for the baseline's own final loss",
        )
    return Settings(steps=steps, chunk_steps=chunk_steps, seed=seed, target_loss=target_loss, is_early=is_early)


def _read_data(batches: Any, held_out: Iterable[Any] | int | None, seed: int) -> tuple[Stream, list[Call]]:
    """The stream to train on, and the batches for evaluation."""
    if held_out is None or isinstance(held_out, int):
        stream = Stream(batches, set_apart=held_out, seed=seed)
        return stream, stream.held_out()
    return Stream(batches, set_apart=0, seed=seed), held_out_calls(held_out)


def _about(
    model: nn.Module,
    stream: Stream,
    held_out: list[Call],
    plan: Plan,
    loss: Loss | None,
    optimizer: MakeOptimizer,
    data: str,
) -> About:
    first = stream.first()
    found = signature(model, first.args, first.kwargs, loss=loss)
    refuse_other_signature(found, plan)
    tensors = [each for each in (*first.args, *first.kwargs.values()) if isinstance(each, torch.Tensor)]
    tokens = first.kwargs.get("input_ids")
    has_tokens = isinstance(tokens, torch.Tensor)
    examples = tensors[0].shape[0] if tensors and tensors[0].dim() else 1
    return About(
        model=type(model).__name__,
        fingerprint=plan.fingerprint,
        signature=found,
        device=str(next(model.parameters()).device),
        optimizer=describe_optimizer(model, optimizer),
        data=data or stream.description,
        versions={**versions(), "threads": str(torch.get_num_threads())},
        items="tokens" if has_tokens else "examples",
        items_per_step=tokens.numel() if isinstance(tokens, torch.Tensor) else examples,
        notes=_notes(stream, held_out),
    )


def _notes(stream: Stream, held_out: list[Call]) -> tuple[str, ...]:
    if stream.is_fixed and not held_out:
        return (
            "both arms overfit the one batch that they were given, and held-out perplexity is not measured: the verdict "
            "speaks of gradients and of this batch's loss only",
        )
    if not held_out:
        return ("there is no held-out data, so perplexity is not measured: the verdict rests on the training loss",)
    return ()


def describe_optimizer(model: nn.Module, optimizer: MakeOptimizer) -> str:
    """``AdamW(lr=0.001, weight_decay=0.01)``: its class, and its defaults that are numbers."""
    made = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    if not isinstance(made, torch.optim.Optimizer):
        raise InvalidProbe(
            f"optimizer= made a {type(made).__name__}, which is no torch.optim.Optimizer.",
            why="each arm trains with an optimizer of its own",
            next="pass torch.optim.AdamW, or a function of the parameters that returns an optimizer",
        )
    shown = {
        name: value
        for name, value in made.defaults.items()
        if isinstance(value, int | float | tuple) and not isinstance(value, bool)
    }
    return f"{type(made).__name__}({', '.join(f'{name}={value}' for name, value in sorted(shown.items()))})"


def _identity(model: nn.Module, plan: Plan, settings: Settings, about: About, held_out: list[Call]) -> dict[str, str]:
    """Everything that decides what a run gives, part by part; long parts as checksums."""
    weights = 0
    for tensor in (*model.parameters(), *model.buffers()):
        weights = checksum(Call((tensor,), {}), weights)
    held_out_code = 0
    for call in held_out:
        held_out_code = checksum(call, held_out_code)
    decided = [
        (region.name, region.call, region.is_boundary_dropped, sorted(region.dropped), sorted(region.packed.items()))
        for region in plan.regions
    ]
    return {
        "model": fingerprint(model),
        "weights": f"{weights:08x}",
        "plan": f"{plan.strategy} {zlib.crc32(repr((decided, plan.link)).encode()):08x}",
        "step": about.signature,
        "settings": msgspec.json.encode(settings).decode(),
        "optimizer": about.optimizer,
        "held-out data": f"{len(held_out)} batches {held_out_code:08x}",
        "device": about.device,
        "torch": str(torch.__version__),
    }


def _finished(directory: RunDirectory) -> Verdict | None:
    """The verdict of a run that has come to its end."""
    content = directory.verdict()
    if content is None:
        return None
    found = from_json(content, source=str(directory.path / "verdict.json"))
    if not isinstance(found, Verdict):
        raise ProbeRunUnusable(
            f"{directory.path / 'verdict.json'} holds a {found.KIND}.",
            why="something else was written over the verdict of this run",
            next="delete the directory and start again",
        )
    return found
