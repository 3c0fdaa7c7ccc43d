"""A rank is killed in the middle of a run; the other one names it, the job restarts, and goes on from the last checkpoint.

Run it as it stands, or as `torchrun --nproc-per-node=2 --max-restarts=1 examples/04_resume_after_a_crash.py`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # a new store for every attempt, see docs/resume.md

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import plimsoll
from plimsoll.distributed import latest_step, load_checkpoint, named_failures, save_checkpoint


@record
def train() -> None:
    directory = Path(tempfile.gettempdir()) / f"plimsoll-{os.environ['TORCHELASTIC_RUN_ID']}"
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    blocks = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Dropout(0.1)) for _ in range(4)]
    model = fully_shard(torch.nn.Sequential(*blocks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if step := latest_step(directory) or 0:
        plan = load_checkpoint(directory, model=model, optimizer=optimizer).plan
    else:
        plan = plimsoll.plan(model, torch.randn(64, 32), strategy="full", loss=lambda y: y.pow(2).mean())
    handle = plimsoll.apply(model, plan)
    with named_failures(model, optimizer, first_step=step, handle=handle):
        while step < 8:
            if step == 5 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), 9)
            model(torch.randn(64, 32)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 2 == 0:
                save_checkpoint(directory, step=step, model=model, optimizer=optimizer, plan=plan, keep=2)
    print(f"rank {dist.get_rank()} finished in attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
    dist.destroy_process_group()
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        job = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "max_restarts": 1, "start_method": "fork"}
        elastic_launch(LaunchConfig(1, 1, 2, run_id=f"crash-{os.getpid()}", **job), train)()
