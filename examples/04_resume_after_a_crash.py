"""A rank fails in the middle of a run; torchrun starts the job again, and it goes on from its last checkpoint."""

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # a new store for every attempt, see docs/resume.md

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.run import main as torchrun

import plimsoll


def state_of(model, optimizer, step=0):
    weights, moments = get_state_dict(model, optimizer)
    random = {os.environ.get("RANK", "0"): torch.get_rng_state()}  # every rank has a stream of its own
    return {"step": step, "model": weights, "optimizer": moments, "random": random}


def load(path, model, optimizer):
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    torch.set_rng_state(*state["random"].values())
    return state["step"]


@record
def train(directory):
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Dropout(0.1)) for _ in "1234"])
    optimizer = torch.optim.AdamW(fully_shard(model).parameters(), lr=1e-2)
    plimsoll.apply(model, plimsoll.plan(model, torch.randn(64, 32), strategy="full", loss=lambda y: y.pow(2).mean()))
    whole = sorted(directory.glob("step-*/.metadata"))  # which torch writes last
    begin = load(whole[-1].parent, model, optimizer) if whole else 0
    print(f"rank {dist.get_rank()} begins at step {begin}", flush=True)
    for step in range(begin + 1, 9):
        model(torch.randn(64, 32)).pow(2).mean().backward()
        if (step, dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]) == (5, 1, "0"):
            raise ValueError("a batch that cannot be read")
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            dcp.save(state_of(model, optimizer, step), checkpoint_id=directory / f"step-{step:08}")
    dist.destroy_process_group()


if __name__ == "__main__" and len(sys.argv) > 1:
    train(Path(sys.argv[1]))
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        torchrun(["--standalone", "--nproc-per-node=2", "--max-restarts=1", __file__, directory])
