"""A function in, what it returned on each of N real ranks out.

The ranks are started by torchrun's own agent (``torch.distributed.launcher``), as processes with a gloo group. They are forked
from a server that has imported torch and transformers once, so a launch costs a second, not N imports.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

_ROOT = Path(__file__).resolve().parents[1]
_PRELOADED = [
    "torch",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "plimsoll.engine.apply",
    "plimsoll.session.attach",
    "plimsoll.distributed.pipelines.pipeline_stages",
    "plimsoll.session.plan",
    "plimsoll.planning.solve",
]


def launch(ranks: int, function: str, payload: Any = None, *, timeout_seconds: float = 120.0) -> list[Any]:
    """Run ``function`` (``"benchmarks.layouts:measure"``; modules below ``tests`` are found too) on so many ranks of one group.

    Args:
        ranks: how many processes.
        function: takes the payload, or nothing where it is ``None``; what it returns is pickled.
        payload: the same for all ranks.
        timeout_seconds: of the group's collectives: one that waits longer fails the rank.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: some rank raised; its traceback is in the message.
    """
    multiprocessing.set_forkserver_preload(_PRELOADED)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=f"tests-{os.getpid()}",
        start_method="forkserver",
        max_restarts=0,
        monitor_interval=0.05,
    )
    with _environment({"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}):
        returned = elastic_launch(config, _enter)(function, payload, timeout_seconds)
    return [returned[rank] for rank in range(ranks)]


def _enter(function: str, payload: Any, timeout_seconds: float) -> Any:
    """On a rank: join the group, run the function, leave."""
    import datetime

    import torch

    torch.set_num_threads(1)
    for place in (str(_ROOT / "tests" / "support"), str(_ROOT / "tests"), str(_ROOT)):
        if place not in sys.path:
            sys.path.insert(0, place)
    module, name = function.split(":")
    run: Callable[..., Any] = getattr(importlib.import_module(module), name)
    gc.freeze()  # what was imported is no tensor of the run: meters that look through all objects need not see it
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_seconds))
    try:
        return run() if payload is None else run(payload)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
