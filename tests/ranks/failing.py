"""What ranks do in ``test_failures.py``: one run of eight steps that meets a misfortune in every attempt but the last."""

from __future__ import annotations

import datetime
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import plimsoll
from plimsoll.distributed import latest_step, load_checkpoint, named_failures, save_checkpoint
from plimsoll.session.rendezvous.world import current_world
from plimsoll.units import GIB, MIB
from ranks.small_runs import Run, build_blocks, local_of, noise_of

STEPS, EVERY = 8, 4
MISFORTUNES = (
    "killed",
    "out of memory",
    "host out of memory",
    "wrong value",
    "killed while saving",
    "killed while asleep",
    "killed while stuck",
    "",
)
"""By attempt."""


def attempt(directory: str) -> dict[str, Any]:
    """Train to the end, from the last checkpoint, if this attempt's misfortune lets it."""
    root, number = Path(directory), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    run = build_blocks("fsdp", seed=number)
    checkpoint = None
    if latest_step(root / "run") is not None:
        checkpoint = load_checkpoint(root / "run", model=run.model, optimizer=run.optimizer)
    else:
        assert number == 0
    plan = plimsoll.plan(run.model, noise_of(0), strategy="full") if checkpoint is None else checkpoint.plan
    assert plan is not None
    handle = plimsoll.apply(run.model, plan)
    begin = 0 if checkpoint is None else checkpoint.step
    losses: list[float] = []
    try:
        with named_failures(
            run.model,
            run.optimizer,
            first_step=begin,
            handle=handle,
            timeout_seconds=1.0 if MISFORTUNES[number] == "killed while stuck" else 20.0,
        ):
            for step in range(begin, STEPS):
                losses += _step(run, step, MISFORTUNES[number], root)
                if (step + 1) % EVERY == 0:
                    save_checkpoint(root / "run", step=step + 1, model=run.model, optimizer=run.optimizer, plan=plan)
    except BaseException as error:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        _tell(root, f"{number}-{dist.get_rank()}-said", error, is_managed=bool(handle.regions))
        raise
    handle.remove()
    return {
        "attempt": number,
        "begin": begin,
        "losses": losses,
        "equal": _straight(begin) == (losses, run.bits()),
        "recorded": _recorded(),
        "files": sorted(os.listdir(root / "run")),
        "signal": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "hooks": sum(len(module._forward_hooks) for module in run.model.modules()) - _hooks_of_fsdp(),
    }


def _step(run: Run, step: int, misfortune: str, root: Path) -> list[float]:
    """One step; where it fails, what has become of the weights is written down."""
    before = _shards(run)
    try:
        _meet(misfortune, step, run)
        return run.train(range(step, step + 1))
    except Exception as error:
        signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGTERM}
        )  # time to write: torchrun ends ranks whose peer is gone
        file = f"{MISFORTUNES.index(misfortune)}-{dist.get_rank()}-met"
        _tell(root, file, error, is_unchanged=_shards(run) == before)
        raise


def _meet(misfortune: str, step: int, run: Run) -> None:
    rank = dist.get_rank()
    if misfortune == "killed" and (step, rank) == (5, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if misfortune.endswith("out of memory") and (step, rank) == (6, 1):
        _in_backward(run, _ask_for_too_much if misfortune.startswith("host") else _raise_out_of_memory)
    if misfortune == "wrong value" and (step, rank) == (4, 0):
        run.model.layers[1].down.register_forward_pre_hook(_raise_value_error)
    if misfortune == "killed while saving" and (step, rank) == (7, 0):
        sys.addaudithook(_kill_at_rename)
    if misfortune in ("killed while asleep", "killed while stuck") and step == 4:
        if rank == 1:
            time.sleep(0.2)
            os._exit(7)
        world = current_world()
        assert world is not None
        if misfortune == "killed while asleep":
            time.sleep(60)
        world.store.wait(["never"], datetime.timedelta(seconds=60))  # in C++: no signal's handler runs


def _in_backward(run: Run, act: Callable[[torch.Tensor], None]) -> None:
    """Have something happen when the gradient of the first block's last layer arrives."""
    run.model.layers[0].down.register_forward_hook(lambda module, args, output: output.register_hook(act) and None)


def _raise_out_of_memory(gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _ask_for_too_much(gradient: torch.Tensor) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 64 * MIB, limits[1]))
    try:
        torch.empty(4 * GIB, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _raise_value_error(module: torch.nn.Module, args: Any) -> None:
    raise ValueError("no such head")


def _kill_at_rename(event: str, args: tuple[Any, ...]) -> None:
    if event == "os.rename" and "step-00000008" in str(args[1]):
        os.kill(os.getpid(), signal.SIGKILL)


def _shards(run: Run) -> list[list[float]]:
    """The weights that the optimizer steps on this rank, whether FSDP2 has gathered them or not, and its state."""
    parameters = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    moments = [value for state in run.optimizer.state_dict()["state"].values() for value in state.values()]
    return [local_of(value).double().flatten().tolist() for value in (*parameters, *moments)]


def _tell(root: Path, name: str, error: BaseException, **seen: bool) -> None:
    cause = error.__cause__
    said = {"kind": type(error).__name__, "text": str(error), "notes": list(getattr(error, "__notes__", ())), **seen}
    said["from"] = None if cause is None else type(cause).__name__
    (root / f"{name}.json").write_text(json.dumps(said))


def _straight(begin: int) -> tuple[list[float], dict[str, list[float]]]:
    """The same run, unmanaged, without a misfortune: from its first step."""
    run = build_blocks("fsdp", seed=0)
    losses = run.train(range(STEPS))
    return losses[begin:], run.bits()


def _recorded() -> dict[str, str]:
    """What torchrun was told by the ranks of earlier attempts: by attempt and rank."""
    file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    found = sorted(file.parents[2].glob(f"attempt_*/*/{file.name}"))
    return {
        f"{path.parts[-3].removeprefix('attempt_')}-{path.parts[-2]}": json.loads(path.read_text())["message"][
            "message"
        ]
        for path in found
    }


def _hooks_of_fsdp() -> int:
    return sum(len(module._forward_hooks) for module in build_blocks("fsdp", seed=0).model.modules())
