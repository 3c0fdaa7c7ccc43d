"""Unusual functions of one matrix: tests put each of them inside a block that is managed. One more is one more case."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# What a slot is must not depend on how a tensor lies in memory.


def shared_by_several_ops(x):
    return x.sigmoid() * x + x.tanh() * x.exp().neg().exp()


def views_of_one_storage(x):
    first, second = x.chunk(2, -1)
    return torch.cat([first * second, second * first.exp()], -1)


def expanded(x):
    scale = x.mean(-1, keepdim=True).expand_as(x)
    return x * scale * scale


def square_transposes(x):
    square = x.T @ x
    return x @ (square * square.T).softmax(-1)


def saved_twice_through_different_views(x):
    folded = x.view(-1, 4, 8).transpose(0, 1)
    return (folded * folded.exp().reshape(folded.shape)).transpose(0, 1).reshape(x.shape)


def base_with_offset(x):
    padded = F.pad(x, (3, 5))
    inside = padded[:, 3:-5]
    return inside * inside.exp()


def scans(x):
    return x.cumsum(-1) * x.sigmoid().cumprod(-1) + x.logcumsumexp(0)


def not_contiguous(x):
    turned = x.t()
    return (turned.exp() * turned).t().sigmoid()


def double_precision(x):
    wide = x.double()
    return (wide * wide.exp()).sin().float()


def complex_numbers(x):
    number = torch.complex(x, x.sin())
    return (number * number.exp()).abs()


def conjugates(x):
    number = torch.complex(x, x.cos())
    other = torch.complex(x.sin(), x)
    return (number.conj() * other).real * (number.exp().conj() * other.conj()).imag


def spectrum(x):
    return torch.fft.irfft(torch.fft.rfft(x).exp().mul(0.1), n=x.shape[-1])


def viewed_as_other_dtype(x):
    bits = x.detach().exp().view(torch.int32)
    return x * (bits >> 3).view(torch.float32).nan_to_num(0.0).sigmoid()


def zero_size(x):
    nothing = x[:0].exp()
    return x.exp() + (nothing * nothing).sum() + x[:, :0].tanh().sum()


def infinities_and_nans(x):
    wild = torch.where(x > 0.5, x / 0.0, x)
    return torch.nan_to_num(wild.exp() * wild, nan=0.5, posinf=1.0, neginf=-1.0) + x.sigmoid()


def gathered(x):
    order = x.argsort(-1)
    return x.gather(-1, order) * x.exp() + x.topk(3, -1).values.sum(-1, keepdim=True)


def scattered(x):
    index = (x > 0).long()
    return torch.zeros_like(x).scatter_add(0, index, x.exp()) * x


def sorted_and_unfolded(x):
    return x.sort(-1).values.unfold(-1, 4, 4).exp().flatten(-2) * x


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


def leaky_in_place(x):
    y = F.leaky_relu(x * 3, 0.1, inplace=True)
    return y * F.relu(x + 1, inplace=True)


# Random numbers, which are rebuilt from the generator's state.


def dropout_in_several_places(x):
    return F.dropout(F.dropout(x, 0.2).exp(), 0.3) * F.dropout(x, 0.1)


def two_draws_without_a_saved_tensor_between(x):
    noise = torch.rand_like(x) + torch.randn_like(x)
    return (x + noise).exp() * noise.sigmoid()


def alpha_and_feature_dropout(x):
    return F.alpha_dropout(x, 0.2, training=True) * F.dropout1d(x[None], 0.3)[0]


def randomised_leaky_relu(x):
    return F.rrelu(x, 0.1, 0.4, training=True) * x.exp()


def randomised_leaky_relu_in_place(x):
    return F.rrelu(x * 2, 0.1, 0.4, training=True, inplace=True) * x.exp()


def seeds_inside(x):
    y = F.dropout(x, 0.3)
    torch.manual_seed(7)
    return F.dropout(y.exp(), 0.3) * torch.rand_like(y)


def attention_dropout(x):
    q = x.view(1, 2, -1, 16)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3).reshape(x.shape)


def bernoulli_and_multinomial(x):
    x = x.nan_to_num(0.0).clamp(-3, 3)
    mask = torch.bernoulli(x.sigmoid())
    picked = torch.multinomial(x.softmax(-1), 4)
    return x * mask + x.gather(-1, picked).exp().sum(-1, keepdim=True)


def gumbel(x):
    return F.gumbel_softmax(x, tau=0.7) * x


def permuted(x):
    return x[torch.randperm(x.shape[0])].exp() * x
