"""Noise that is followed through backward: what is expected of one lossy value is about what it does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import steps
from contracts.harness import weigh
from engine.models import Wrapped
from engine.watching import CODECS, Watched, gradients_of, watch
from plimsoll.engine import sensing
from steps import Net

WIDTH, ROWS = 64, 128


def mlp(function, norm=None, *, residual=True):
    """A pair of linear layers around a function, beside a residual connection or without one."""
    way = lambda net, x: residual * x + net.down(function(net.up(net.norm(x))))  # noqa: E731
    return Net(way, norm=norm or nn.Identity(), up=nn.Linear(WIDTH, 2 * WIDTH), down=nn.Linear(2 * WIDTH, WIDTH))


def swiglu():
    gate, up, down = (nn.Linear(*sizes) for sizes in [(WIDTH, 2 * WIDTH)] * 2 + [(2 * WIDTH, WIDTH)])
    return Net(lambda net, x: x + net.down(F.silu(net.gate(x)) * net.up(x)), gate=gate, up=up, down=down)


def attention():
    def attend(net, x):
        q, k, v = (t.reshape(2, -1, 4, WIDTH // 4).transpose(1, 2) for t in net.qkv(x).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + net.out(seen.transpose(1, 2).reshape(x.shape))

    return Net(attend, qkv=nn.Linear(WIDTH, 3 * WIDTH), out=nn.Linear(WIDTH, WIDTH))


BLOCKS = {
    "linear": lambda: mlp(nn.Identity()),
    "gelu": lambda: mlp(F.gelu),
    "silu": lambda: mlp(F.silu),
    "tanh": lambda: mlp(torch.tanh),
    "softmax": lambda: mlp(lambda x: x.softmax(-1)),
    "silu * up": swiglu,
    "layer norm": lambda: mlp(F.gelu, norm=nn.LayerNorm(WIDTH)),
    "attention": attention,
}


def step(model):
    weigh(model(torch.randn(ROWS, 8))).backward()


def around(block) -> Watched:
    torch.manual_seed(0)
    return watch(Wrapped(block, WIDTH), ["block"], step)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_error_of_one_lossy_value_is_about_what_is_expected(name):
    watched = around(BLOCKS[name]())
    for codec in CODECS:
        values = watched.lossy(codec)
        assert values
        for packed in values:
            ratio = watched.expected(*packed, codec) / watched.measured([packed], codec)
            assert 1 / 3 < ratio < 3, (packed, codec, ratio)


@pytest.mark.parametrize("make", [steps.llama, steps.gpt2, steps.vit])
def test_the_error_of_a_whole_model_is_about_the_sum_of_what_is_expected(make):
    model, batch, _ = make()
    pattern = ("layers", "h", "layer")
    names = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    listed = next(name for name in names if name.rpartition(".")[2] in pattern)
    regions = [f"{listed}.{index}" for index in range(len(model.get_submodule(listed)))]
    watched = watch(model, regions, lambda subject: subject(**batch).loss.backward())
    for codec in ("int8", "int4"):
        packed = watched.lossy(codec)
        assert len(packed) > 10
        expected = sum(watched.expected(*one, codec) ** 2 for one in packed) ** 0.5
        ratio = expected / watched.measured(packed, codec)
        assert 1 / 2 < ratio < 2, (codec, ratio)


class Exponent(torch.autograd.Function):
    """Counts how often its backward runs."""

    runs = 0

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        Exponent.runs += 1
        return gradient * ctx.saved_tensors[0]


def test_a_backward_of_the_user_s_own_is_run_once_and_what_it_reads_must_be_exact():
    torch.manual_seed(0)
    model = Wrapped(mlp(Exponent.apply), WIDTH)
    gradients_of(model, step)
    Exponent.runs = 0
    watched = watch(model, ["block"], step)
    assert Exponent.runs == 2  # once unmanaged, once watched
    assert all(torch.equal(watched.plain[name], watched.seen[name]) for name in watched.plain)
    found = {value: watched.sensitivity("block", entry) for value, entry in watched.values("block").items()}
    read = [value for value, entry in watched.values("block").items() if "ExponentBackward" in entry.readers]
    assert read
    assert all(found[value] == float("inf") for value in read)
    assert all(found[value] < float("inf") for value in found.keys() - set(read))


def test_what_a_node_reads_that_refuses_to_run_twice_must_be_exact(monkeypatch):
    def run(node, gradients):
        if node.name() == "GeluBackward0":
            node(*gradients)
            raise RuntimeError("once is enough")
        return original(node, gradients)

    original = sensing._run
    monkeypatch.setattr(sensing, "_run", run)
    watched = around(mlp(F.gelu))
    assert all(torch.equal(watched.plain[name], watched.seen[name]) for name in watched.plain)
    found = {value: watched.sensitivity("block", entry) for value, entry in watched.values("block").items()}
    assert found.pop("up::addmm#0") == float("inf")
    assert all(sensitivity < float("inf") for sensitivity in found.values())


def test_what_flows_past_a_branch_dilutes_its_noise():
    """The same block with and without its residual connection: less of the gradient that leaves is noise."""

    flows = []
    for residual in (True, False):
        watched = around(mlp(F.gelu, residual=residual))
        flows.append(watched.values("block")["up::addmm#0"].flow_error)
    assert 0 < flows[0] < flows[1] / 2


def test_a_value_whose_noise_reaches_nothing_costs_nothing():
    """A frozen layer's weight gradient is not computed, so what only that would read is not even saved."""
    torch.manual_seed(0)
    model = Wrapped(mlp(F.gelu), WIDTH)
    model.block.down.weight.requires_grad_(False)
    watched = watch(model, ["block"], step)
    assert "gelu#0" not in watched.values("block")
    entry = watched.values("block")["up::addmm#0"]
    assert watched.sensitivity("block", entry) > 0
