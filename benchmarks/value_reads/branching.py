"""Blocks whose branches, loops and numbers depend on values of tensors, while all sizes stay."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.value_reads.stack import ROWS, WIDTH, Block

_FUNCTIONS = (torch.sin, torch.tanh, F.gelu, torch.sigmoid, F.silu, torch.cos)
_SEQUENCES, _LENGTH = 8, ROWS // 8


def plain(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x + block.wide(x)


def guarded(block: Any, x: torch.Tensor) -> torch.Tensor:
    wide = block.wide(x)
    return x + (wide / 10 if wide.abs().max().item() > 1e4 else wide)


def counted(block: Any, x: torch.Tensor) -> torch.Tensor:
    wide = block.wide(x)
    return x + wide / (wide > 0).sum().item() * 1e4


def branched(block: Any, x: torch.Tensor) -> torch.Tensor:
    wide = block.wide(x)
    return x + (wide * F.silu(wide) if x.detach()[0, 0].item() > 0 else wide)


def six_branches(block: Any, x: torch.Tensor) -> torch.Tensor:
    wide = block.wide(x)
    for is_taken, function in zip((x.detach()[0, :6] > 0).tolist(), _FUNCTIONS, strict=True):
        if is_taken:
            wide = wide + 0.1 * function(wide)
    return x + wide


def looked_up(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x + block.wide(x + block.table[(x.detach().sum().abs() * 1000).long() % 8])


def early_exit(block: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        wide = block.wide(x)
        x = x + wide
        if float(wide.detach().abs().mean()) < 0.115:
            break
    return x


def clipped(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Rescale the update if its norm is too large."""
    wide = block.wide(x)
    norm = wide.detach().norm().item()
    return x + (wide * (50.0 / norm) if norm > 50 else wide)


def winsorized(block: Any, x: torch.Tensor) -> torch.Tensor:
    wide = block.wide(x)
    low, high = torch.quantile(wide.detach()[:64], torch.tensor([0.01, 0.99])).tolist()
    return x + wide.clamp(low, high)


def finite_only(block: Any, x: torch.Tensor) -> torch.Tensor:
    wide = block.wide(x)
    if not torch.isfinite(wide).all():
        wide = torch.nan_to_num(wide)
    assert wide.detach().abs().max() < 1e6
    return x + wide


def cooled_attention(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Attention whose temperature follows the entropy of its first heads."""
    keys = block.norm(x).view(_SEQUENCES, _LENGTH, WIDTH)
    scores = keys @ keys.mT / math.sqrt(WIDTH)
    shares = scores.detach().softmax(-1)
    entropy = float(-(shares * shares.clamp_min(1e-9).log()).sum(-1).mean())
    return x + (scores / max(entropy, 0.5)).softmax(-1).matmul(keys).view(ROWS, WIDTH) + block.wide(x)


def stochastic_depth(block: Any, x: torch.Tensor) -> torch.Tensor:
    if block.training and torch.rand(()).item() < 0.25:
        return x * 1.0
    return x + block.wide(x) / 0.75


def host_random(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Draw from the generators of Python and of numpy."""
    wide = block.wide(x)
    if random.random() < 0.3:
        wide = wide + 0.1 * torch.sin(wide)
    return x + wide * float(np.random.uniform(0.9, 1.1))


def data_dropout(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x + F.dropout(block.wide(x), p=min(0.5, float(x.detach().abs().mean()) / 8))


def dynamic_rotary(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Rotary positions with a base that grows with the longest position (NTK scaling)."""
    positions = (x.detach()[:, 0].abs() * 40).long()
    longest = int(positions.max()) + 1
    base = 10000.0 if longest <= 128 else 10000.0 * (longest / 128) ** (WIDTH / (WIDTH - 2))
    angles = positions[:, None] / base ** (torch.arange(0, WIDTH, 2) / WIDTH)
    one, two = block.norm(x).chunk(2, -1)
    turned = torch.cat([one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()], -1)
    return x + block.wide(turned)


def observed_quantization(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Fake quantization with the range of this call."""
    wide = block.wide(x)
    low, high = wide.detach().amin().item(), wide.detach().amax().item()
    scale = max(high - low, 1e-6) / 255
    zero = min(255, max(0, round(-low / scale)))
    return x + torch.fake_quantize_per_tensor_affine(wide, scale, zero, 0, 255)


def one_expert(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Send the whole batch to the expert that it votes for."""
    scores = block.gate(x).mean(0).softmax(-1)
    number = int(scores.argmax())
    return x + block.wide(x) + F.gelu(block.experts[number](x)) * scores[number]


def straight_through_gate(block: Any, x: torch.Tensor) -> torch.Tensor:
    gate = block.gate(x.mean(0, keepdim=True))[0, 0].sigmoid()
    is_open = gate.detach().item() > 0.5
    return x + block.wide(x) * (1 + gate - gate.detach()) if is_open else x + block.experts[0](x) * (1 - gate)


def converged(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Iterate to a fixed point with gradients through all iterations."""
    found = x
    for _ in range(8):
        before, found = found, 0.5 * x + 0.5 * torch.tanh(block.wide(found))
        if (found - before).detach().abs().max() < 0.02:
            break
    return found


def equilibrium(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Iterate to a fixed point without gradients, then once with them (a deep equilibrium model)."""
    with torch.no_grad():
        found = torch.zeros_like(x)
        for _ in range(12):
            before, found = found, 0.5 * x + 0.5 * torch.tanh(block.wide(found))
            if float((found - before).norm() / found.norm()) < 1e-2:
                break
    return 0.5 * x + 0.5 * torch.tanh(block.wide(found))


def power_iteration(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Divide by the spectral norm, which is found by iteration until it settles."""
    weight, vector, norm = block.experts[0].weight, torch.ones(WIDTH), 0.0
    with torch.no_grad():
        for _ in range(30):
            vector = F.normalize(weight.T @ (weight @ vector), dim=0)
            before, norm = norm, float((weight @ vector).norm() + x.abs().mean() * 1e-3)
            if abs(norm - before) < 1e-3 * norm:
                break
    return x + block.wide(x) + F.linear(x, weight / norm)


def sinkhorn(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Balance the assignment to four experts, until rows and columns agree."""
    shares = block.gate(x).softmax(-1)
    for _ in range(20):
        shares = shares / shares.sum(0, keepdim=True) * (ROWS / 4)
        shares = shares / shares.sum(1, keepdim=True)
        if (shares.sum(0) - ROWS / 4).detach().abs().max().item() < 0.5:
            break
    return (
        x
        + block.wide(x)
        + sum(share[:, None] * expert(x) for share, expert in zip(shares.T, block.experts, strict=True))
    )


def jittered_cholesky(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Add to the diagonal until the factorization succeeds."""
    wide = block.wide(x)
    matrix = wide[:, :16].T @ wide[:, :16] - 40.0 * float(x.detach()[0, 0] > 0) * torch.eye(16)
    jitter = 1e-3
    while torch.linalg.cholesky_ex(matrix.detach() + jitter * torch.eye(16)).info.item() != 0:
        jitter *= 8
    factor = torch.linalg.cholesky(matrix + jitter * torch.eye(16))
    return x + wide + (wide[:, :16] @ factor).repeat(1, WIDTH // 16) * 0.01


def viterbi(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Score the best path, which a loop in Python reads back."""
    wide = block.wide(x)
    scores, best, back = wide[:16, :6], wide[0, :6], []
    for row in scores[1:]:
        best, origin = (best[:, None] + block.table[:6, :6]).max(0)
        best = best + row
        back.append(origin)
    path = [int(best.argmax())]
    for origin in reversed(back):
        path.append(int(origin[path[-1]]))
    return x + wide + 0.01 * sum(scores[15 - step, state] for step, state in enumerate(path))


def numpy_threshold(block: Any, x: torch.Tensor) -> torch.Tensor:
    wide = block.wide(x)
    limit = float(np.quantile(x.detach().numpy()[:, 0], 0.7))
    return x + torch.where(x[:, :1] > limit, wide, 0.5 * wide)


def worded(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Choose arguments that are words and truth values."""
    wide, is_positive = block.wide(x), bool(x.detach()[0, 0] > 0)
    best = wide.topk(WIDTH, -1, largest=is_positive).values
    return x + F.gelu(wide, approximate="tanh" if is_positive else "none") + 0.1 * best


def mixed_precision(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Leave lower precision if numbers are large."""
    is_small = x.detach()[0].abs().max().item() < 2.5
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_small):
        wide = block.wide(x)
    return x + wide.float()


class DomainNorm(Block):
    """One batch norm of two, by the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norms[int(x.detach()[0].mean() > 0)](self.wide(x))  # type: ignore[no-any-return]


class RunningScale(Block):
    """Divide by a running mean, which the block keeps as a number and as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = 1.0
        self.register_buffer("running", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now = x.detach().abs().mean()
        self.mean = 0.9 * self.mean + 0.1 * now.item()
        self.running.mul_(0.9).add_(now, alpha=0.1)
        return x + self.wide(x) / self.mean / self.running.item()


class Annealed(Block):
    """A temperature that falls with the number of calls, and a sparse maximum below a limit."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores = self.gate(x) / max(0.5, math.exp(-0.02 * self.calls))
        shares = scores.softmax(-1)
        if shares.detach().amax(-1).mean().item() > 0.4:
            shares = shares * (shares > 0.25)
        return x + self.wide(x) * (shares @ self.table[:4])


class MemoryBank(Block):
    """Attend to a queue of earlier rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.randn(256, WIDTH))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = (x @ self.bank.clone().T / math.sqrt(WIDTH)).softmax(-1) @ self.bank.clone()
        with torch.no_grad():
            start = int(self.place)
            self.bank[start : start + 64] = x[:64]
            self.place.fill_((start + 64) % 256)
        return x + self.wide(x + found)


class Codebook(Block):
    """Vector quantization with running means, and new codes for unused ones."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(32, WIDTH))
        self.register_buffer("uses", torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.wide(x)
        rows = (x + wide).detach()
        chosen = torch.cdist(rows, self.codes).argmin(1)
        quantized = self.codes[chosen]
        with torch.no_grad():
            counts = torch.bincount(chosen, minlength=32).float()
            self.uses.mul_(0.9).add_(counts, alpha=0.1)
            is_used = counts > 0
            sums = torch.zeros_like(self.codes).index_add_(0, chosen, rows)
            self.codes[is_used] = 0.9 * self.codes[is_used] + 0.1 * sums[is_used] / counts[is_used, None]
            dead = (self.uses < 0.3).nonzero().squeeze(1)
            if len(dead):
                self.codes[dead] = rows[torch.randint(0, ROWS, (len(dead),))]
                self.uses[dead] = 1.0
        return x + wide + 0.1 * (quantized - rows).detach() + 0.1 * wide * quantized


BLOCKS = (
    *(plain, guarded, counted, branched, six_branches, looked_up, early_exit, clipped, winsorized, finite_only),
    *(cooled_attention, stochastic_depth, host_random, data_dropout, dynamic_rotary, observed_quantization, one_expert),
    *(straight_through_gate, converged, equilibrium, power_iteration, sinkhorn, jittered_cholesky, viterbi),
    *(numpy_threshold, worded, mixed_precision, DomainNorm, RunningScale, Annealed, MemoryBank, Codebook),
)
