"""What every rank does with DeepSpeed's engine."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from benchmarks.stack_setups import deepspeed
from benchmarks.stack_setups.hugging_face import llama, plain_trainer, train
from benchmarks.stack_setups.set_up import Arm, Watch

import plimsoll
import zoo
from launching import refused
from metering import LiveStorages
from plimsoll.artifacts.trace import Category
from plimsoll.integrations.budgeted import switch_off


def train_in_stages(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Train without a budget and within one in every case; look at one plan; meet the refusals; gather layer by layer again."""
    trained = [_compared(case) for case in cases]
    return {"trained": trained, "parts": _parts(), "refused": _refusals(), "gathered": _gathered()}


def _compared(case: dict[str, Any]) -> dict[str, Any]:
    run = functools.partial(deepspeed.train, **case)
    without, within = Watch(LiveStorages()), Watch(LiveStorages())
    run(without, Arm(), 4)
    budget_bytes = int(0.8 * max(without.peaks))
    run(within, Arm(budget=budget_bytes), 4)
    return {
        "is within": 0 < max(within.peaks) <= budget_bytes,
        "is less": max(within.peaks) < max(without.peaks),
        "has equal losses": within.losses == without.losses,
        "has equal weights": all(map(torch.equal, within.weights, without.weights)),
    }


def _engine(stage: int) -> Any:
    made = llama()
    config = deepspeed.configuration(stage)
    return deepspeed.on_cpu().initialize(model=made, model_parameters=made.parameters(), config=config)[0]


def _parts() -> dict[str, bool]:
    engine = _engine(1)
    with plimsoll.attach(engine, "1GiB") as handle:
        engine.backward(engine(**zoo.words(8, 64))["loss"])
        engine.step()
        engine(**zoo.words(8, 64))
    classes = handle.plan.classes
    world = torch.distributed.get_world_size()
    trained_bytes = sum(parameter.numel() * 4 for parameter in engine.module.parameters())
    engine.destroy()
    return {
        "has partitions": classes[Category.COMMUNICATION] >= trained_bytes // world,
        "has state": classes[Category.OPTIMIZER_STATE] >= 2 * trained_bytes // world,
    }


def _refusals() -> dict[str, str]:
    found = {}
    engine = _engine(3)
    found["no leaf modules"] = refused(lambda: plimsoll.plan(engine.module, zoo.words(), "1GiB")).next
    found["forms"] = refused(lambda: plimsoll.attach(engine, "1GiB", allow="offload")).found
    with plimsoll.attach(engine, "1GiB"):
        found["out of range"] = refused(lambda: engine(input_ids=torch.full((1, 8), 10**6))).kind
    engine.module.model.layers[0].compile()
    found["compiled"] = refused(lambda: plimsoll.attach(engine, "1GiB")).found
    engine.destroy()
    engine = _engine(1)
    with plimsoll.attach(engine, "1GiB") as handle:
        found["step"] = refused(lambda: handle.step(engine, **zoo.words())).found
    with plimsoll.attach(engine.module.model, "1GiB"):
        told = refused(lambda: engine(**zoo.words()))
    found["part of a model"] = told.next
    engine.destroy()
    return found


def _gathered() -> dict[str, Any]:
    """A budget that comes late and goes early, with another shape in between: what stage 3 gathers then, and when."""
    ways = [_late(None), _late(7 * 2**20)]
    (plain, losses, weights), (within, other_losses, other_weights) = ways
    return {
        "hooks are back": plain["hooks"] == within["hooks"] and plain["hooks"] != within["hooks at work"],
        "all is let go": not any(within["left"]),
        "has equal losses": losses == other_losses,
        "has equal weights": all(map(torch.equal, weights, other_weights)),
    }


def _late(budget: int | None) -> tuple[dict[str, Any], list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    engine = _engine(3)
    losses, told = [], {}
    with contextlib.ExitStack() as stack:
        for step in range(6):
            if step == 2 and budget is not None:
                handle = stack.enter_context(plimsoll.attach(engine, budget))
                told["hooks at work"] = _hooks(engine.module)
            if step == 5 and budget is not None:
                handle.remove()
            loss = engine(**zoo.words(8, (64, 64, 64, 48, 64, 64)[step]))["loss"]
            engine.backward(loss)
            losses.append(float(loss.detach()))
            told["left"] = [p.numel() for p in engine.module.parameters() if not p.ds_persist]
            engine.step()
    told["hooks"] = _hooks(engine.module)
    parameters = list(engine.module.parameters())
    with deepspeed.on_cpu().zero.GatheredParameters(parameters):
        weights = [parameter.detach().clone() for parameter in parameters]
    engine.destroy()
    return told, losses, weights


def _hooks(model: torch.nn.Module) -> list[list[str]]:
    """The names of the hooks around every module inside of the model, in the order in which they run."""
    inside = (part for part in model.modules() if part is not model)
    tables = (table for part in inside for table in (part._forward_pre_hooks, part._forward_hooks))
    return [[hook.__qualname__ for hook in table.values()] for table in tables]


def train_with_trainer(folder: str) -> list[dict[str, Any]]:
    """Hugging Face's ``Trainer`` under stages 1, 2 and 3, which makes the engine itself."""
    deepspeed.on_cpu()
    return [_compared_in_trainer(folder, stage) for stage in (1, 2, 3)]


def _compared_in_trainer(folder: str, stage: int) -> dict[str, Any]:
    config = deepspeed.configuration(stage, accumulation=2)
    config = {**config, "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
    make = functools.partial(plain_trainer, folder, max_steps=3, gradient_accumulation_steps=2, deepspeed=config)
    without, within = Watch(LiveStorages()), Watch(LiveStorages())
    train(make, without, Arm())
    budget_bytes = int(0.85 * max(without.peaks))
    trainer = train(make, within, Arm(own_switch=True, budget=budget_bytes))
    return {
        "is an engine": type(trainer.model_wrapped).__name__ == "DeepSpeedEngine",
        "is within": 0 < max(within.peaks) <= budget_bytes,
        "has equal losses": within.losses == without.losses,
        "has equal weights": all(map(torch.equal, within.weights, without.weights)),
    }


def switch_off_own() -> dict[str, bool]:
    """DeepSpeed's function for checkpointing runs what it is given once, for as long as a budget is at work."""
    package = deepspeed.on_cpu()
    before = package.checkpointing.checkpoint
    engine = _engine(1)
    package.checkpointing.configure(None)
    given = torch.ones(2, requires_grad=True)
    with contextlib.ExitStack() as undo:
        count = switch_off(engine, undo)
        made = package.checkpointing.checkpoint(torch.exp, given)
        alone = package.checkpointing.checkpoint(lambda x, by: (x * by,), given, by=2.0)
    again = package.checkpointing.checkpoint(torch.exp, given)
    engine.destroy()
    return {
        "says so": count == 1,
        "runs it once": "Exp" in made.grad_fn.name() and "Mul" in alone.grad_fn.name(),
        "is back": package.checkpointing.checkpoint is before and "Checkpoint" in again.grad_fn.name(),
    }
