"""Writes the commands that start an estimated job: ``torchrun`` on each node, or a batch script for Slurm."""

from __future__ import annotations

import enum

from plimsoll.artifacts.estimate import Estimate
from plimsoll.planning.costing.devices import find_device

_PORT = 29500


class Launcher(enum.StrEnum):
    """The programs that can start the ranks of a job."""

    TORCHRUN = "torchrun"
    SBATCH = "sbatch"


def launch_script(estimate: Estimate, launcher: Launcher, *, budget: str | None = None) -> str:
    """Return the commands that start one process per rank of the estimated job. The user puts in the training script.

    Args:
        estimate: the job; its layout gives the number of ranks, its device the ranks of a node.
        launcher: the program that starts the ranks.
        budget: if given, ``plimsoll run`` starts the training script under this budget per rank.
    """
    script = "train.py" if budget is None else f'-m plimsoll run train.py --budget "{budget}"'
    ranks = estimate.layout.ranks
    most_on_node = min(ranks, find_device(estimate.device).ranks_per_node)
    # torchrun starts the same number of processes on every node, so this number must divide the ranks.
    on_node = next(count for count in range(most_on_node, 0, -1) if ranks % count == 0)
    nodes = ranks // on_node
    settings = ["export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"] if _is_expandable(estimate) else []
    about = f"# {estimate.target} on {ranks} x {estimate.device}: layout {estimate.layout}"
    if launcher is Launcher.TORCHRUN:
        nodes_of = ["--standalone"] if nodes == 1 else [
            f"--nnodes={nodes}",
            "--node-rank=$NODE_RANK",
            f"--rdzv-backend=c10d --rdzv-endpoint=$HEAD_NODE:{_PORT}",
        ]  # fmt: skip
        where = [] if nodes == 1 else [f"# on each of the {nodes} nodes, with NODE_RANK from 0 to {nodes - 1}"]
        return "\n".join([about, *where, *settings, _torchrun(nodes_of, on_node, script)])
    head = [
        "#!/bin/bash",
        f"#SBATCH --job-name={estimate.target.replace('/', '-')}",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={on_node}",
    ]
    endpoint = [
        'HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        *settings,
    ]
    rendezvous = [
        f"--nnodes={nodes}",
        f"--rdzv-id=$SLURM_JOB_ID --rdzv-backend=c10d --rdzv-endpoint=$HEAD_NODE:{_PORT}",
    ]
    return "\n".join([*head, about, *endpoint, f"srun {_torchrun(rendezvous, on_node, script)}"])


def _torchrun(rendezvous: list[str], on_node: int, script: str) -> str:
    return " ".join(["torchrun", *rendezvous, f"--nproc-per-node={on_node}", script])


def _is_expandable(estimate: Estimate) -> bool:
    return estimate.techniques.expandable_segments
