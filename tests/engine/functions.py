"""Unusual functions of one matrix: tests put each of them inside a block that is managed. One more is one more case."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# What a slot is must not depend on how a tensor lies in memory.


def saved_twice_through_different_views(x):
    folded = x.view(-1, 4, 8).transpose(0, 1)
    return (folded * folded.exp().reshape(folded.shape)).transpose(0, 1).reshape(x.shape)


def conjugates(x):
    number = torch.complex(x, x.cos())
    other = torch.complex(x.sin(), x)
    return (number.conj() * other).real * (number.exp().conj() * other.conj()).imag


def viewed_as_other_dtype(x):
    bits = x.detach().exp().view(torch.int32)
    return x * (bits >> 3).view(torch.float32).nan_to_num(0.0).sigmoid()


def infinities_and_nans(x):
    wild = torch.where(x > 0.5, x / 0.0, x)
    return torch.nan_to_num(wild.exp() * wild, nan=0.5, posinf=1.0, neginf=-1.0) + x.sigmoid()


# Writes in place to memory of the region's own.


def masked_fill(x):
    scores = x @ x.T
    scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1) @ x


def slices_of_empty(x):
    out = torch.empty_like(x)
    half = x.shape[1] // 2
    out[:, :half] = x[:, :half].exp()
    out[:, half:] = x[:, half:].sin()
    return out * x


def zeros_then_slices(x):
    out = torch.zeros_like(x)
    out[:, 2:5] = x[:, 2:5].exp()
    return out.sigmoid() * out


def chain_of_writes(x):
    y = x * 2
    y.add_(1).mul_(x).clamp_(min=-1)
    y[0] = 0
    return y.exp()


def out_argument(x):
    with torch.no_grad():
        out = torch.empty_like(x)
        torch.exp(x, out=out)
    return x * out


def index_put(x):
    y = x * 2
    y[torch.tensor([0, 2])] = x[:2]
    return y.sigmoid() * y


def saved_then_written_by_detached_alias(x):
    y = x.detach().clone()
    z = x * y
    w = y.clone()
    w.mul_(2)
    return z * w.exp()


# Random numbers, which are rebuilt from the generator's state.


def seeds_inside(x):
    y = F.dropout(x, 0.3)
    torch.manual_seed(7)
    return F.dropout(y.exp(), 0.3) * torch.rand_like(y)


def bernoulli_and_multinomial(x):
    x = x.nan_to_num(0.0).clamp(-3, 3)
    mask = torch.bernoulli(x.sigmoid())
    picked = torch.multinomial(x.softmax(-1), 4)
    return x * mask + x.gather(-1, picked).exp().sum(-1, keepdim=True)


FUNCTIONS = {
    "shared by several ops": lambda x: x.sigmoid() * x + x.tanh() * x.exp().neg().exp(),
    "views of one storage": lambda x: torch.cat(
        [(parts := x.chunk(2, -1))[0] * parts[1], parts[1] * parts[0].exp()], -1
    ),
    "expanded": lambda x: x * (scale := x.mean(-1, keepdim=True).expand_as(x)) * scale,
    "square transposes": lambda x: x @ ((square := x.T @ x) * square.T).softmax(-1),
    "base with offset": lambda x: (inside := F.pad(x, (3, 5))[:, 3:-5]) * inside.exp(),
    "scans": lambda x: x.cumsum(-1) * x.sigmoid().cumprod(-1) + x.logcumsumexp(0),
    "not contiguous": lambda x: ((turned := x.t()).exp() * turned).t().sigmoid(),
    "double precision": lambda x: ((wide := x.double()) * wide.exp()).sin().float(),
    "complex numbers": lambda x: ((number := torch.complex(x, x.sin())) * number.exp()).abs(),
    "spectrum": lambda x: torch.fft.irfft(torch.fft.rfft(x).exp().mul(0.1), n=x.shape[-1]),
    "zero size": lambda x: x.exp() + ((nothing := x[:0].exp()) * nothing).sum() + x[:, :0].tanh().sum(),
    "gathered": lambda x: x.gather(-1, x.argsort(-1)) * x.exp() + x.topk(3, -1).values.sum(-1, keepdim=True),
    "scattered": lambda x: torch.zeros_like(x).scatter_add(0, (x > 0).long(), x.exp()) * x,
    "sorted and unfolded": lambda x: x.sort(-1).values.unfold(-1, 4, 4).exp().flatten(-2) * x,
    "leaky in place": lambda x: F.leaky_relu(x * 3, 0.1, inplace=True) * F.relu(x + 1, inplace=True),
    "dropout in several places": lambda x: F.dropout(F.dropout(x, 0.2).exp(), 0.3) * F.dropout(x, 0.1),
    "two draws without a saved tensor between": lambda x: (
        (x + (noise := torch.rand_like(x) + torch.randn_like(x))).exp() * noise.sigmoid()
    ),
    "alpha and feature dropout": lambda x: F.alpha_dropout(x, 0.2, training=True) * F.dropout1d(x[None], 0.3)[0],
    "randomised leaky relu": lambda x: F.rrelu(x, 0.1, 0.4, training=True) * x.exp(),
    "randomised leaky relu in place": lambda x: F.rrelu(x * 2, 0.1, 0.4, training=True, inplace=True) * x.exp(),
    "attention dropout": lambda x: F.scaled_dot_product_attention(*[x.view(1, 2, -1, 16)] * 3, dropout_p=0.3).reshape(
        x.shape
    ),
    "gumbel": lambda x: F.gumbel_softmax(x, tau=0.7) * x,
    "permuted": lambda x: x[torch.randperm(x.shape[0])].exp() * x,
    "saved twice through different views": saved_twice_through_different_views,
    "conjugates": conjugates,
    "viewed as other dtype": viewed_as_other_dtype,
    "infinities and nans": infinities_and_nans,
    "masked fill": masked_fill,
    "slices of empty": slices_of_empty,
    "zeros then slices": zeros_then_slices,
    "chain of writes": chain_of_writes,
    "out argument": out_argument,
    "index put": index_put,
    "saved then written by detached alias": saved_then_written_by_detached_alias,
    "seeds inside": seeds_inside,
    "bernoulli and multinomial": bernoulli_and_multinomial,
}
