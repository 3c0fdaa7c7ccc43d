"""What ranks do in ``test_compress_gradients.py``: the command line, on every rank at once, and what it prints there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typer.testing import CliRunner

from plimsoll.ui.cli.app import app


def regression() -> tuple[torch.nn.Module, list[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """A target with a stream of batches."""
    random = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    return model, [torch.randn(4, 64, generator=random) for _ in range(30)], lambda output: output.square().mean()


def ask(path: str) -> dict[str, Any]:
    """Exit code and text of a short measurement."""
    options = ["--methods", "topk:1%", "--steps", "1", "--validate", "2", "--orders", "1", "--output", path]
    result = CliRunner().invoke(app, ["compress-gradients", "ranks.traffic_command:regression", *options])
    return {"code": result.exit_code, "stdout": result.stdout, "stderr": result.stderr}
