"""Tell whether checkpointing that is not ours gives the right gradients: two that do, and dropout below torch.compile.

PyTorch's partitioner may recompute dropout with another mask when ``activation_memory_budget`` is below 1. Runs on a CPU in
half a minute; the backend needs no compiler, and "inductor" shows the same.
"""

from __future__ import annotations

import torch
import torch._functorch.config
from torch import nn
from torch.utils.checkpoint import checkpoint

import plimsoll


class Net(nn.Module):
    """Blocks with dropout, checkpointed one by one unless ``compiled``."""

    def __init__(self, *, compiled: bool) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)]
        self.layers = nn.ModuleList(layers)
        self.run = torch.compile(self.plain, backend="aot_eager_decomp_partition") if compiled else self.checkpointed

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x))
        return x

    def checkpointed(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


def main() -> None:
    torch.manual_seed(0)
    batch, loss = torch.randn(128, 64), torch.mean
    print(plimsoll.verify(Net(compiled=False), batch, loss=loss, steps=1), "\n")

    offloading = torch.autograd.graph.save_on_cpu
    keeping = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    print(plimsoll.verify(keeping, batch, loss=loss, context=offloading, steps=1), "\n")

    with torch._functorch.config.patch(activation_memory_budget=0.1):
        receipt = plimsoll.verify(Net(compiled=True), batch, loss=loss, steps=1)
    print(receipt)
    print("\nPyTorch has mended it." if receipt.verdict.is_pass else "\nThese gradients are wrong.")


if __name__ == "__main__":
    main()
