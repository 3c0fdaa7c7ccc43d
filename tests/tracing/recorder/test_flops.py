"""The FLOPs of an op call, compared with matrix products and with counts by hand."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from plimsoll.tracing.recorder.flops import count_flops


class Counting(TorchDispatchMode):
    """Adds up the FLOPs of convolutions, forward and backward apart."""

    def __init__(self) -> None:
        super().__init__()
        self.forward, self.backward = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "convolution" in func._schema.name:
            flops = count_flops(func, args, kwargs or {}, out)
            assert flops is not None
            if "backward" in func._schema.name:
                self.backward += flops
            else:
                self.forward += flops
        return out


def counted(model: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    with Counting() as counting:
        model(x).sum().backward()
    return counting.forward, counting.backward


def as_products(layer: nn.Conv2d | nn.ConvTranspose2d, x: torch.Tensor) -> torch.Tensor:
    """The same convolution written as one matrix product per sample and group, between gathering and scattering of pixels."""
    how = {
        "kernel_size": layer.kernel_size,
        "dilation": layer.dilation,
        "padding": layer.padding,
        "stride": layer.stride,
    }
    samples, groups = x.shape[0], layer.groups
    height, width = layer(x).shape[-2:]
    if isinstance(layer, nn.ConvTranspose2d):
        rows = x.reshape(samples * groups, x.shape[1] // groups, -1)
        weight = layer.weight.reshape(groups, x.shape[1] // groups, -1).transpose(1, 2).repeat(samples, 1, 1)
        made = torch.bmm(weight, rows).reshape(samples, -1, rows.shape[-1])
        return F.fold(made, (height, width), **how)
    rows = F.unfold(x, **how)
    rows = rows.reshape(samples * groups, -1, rows.shape[-1])
    weight = layer.weight.reshape(groups, layer.out_channels // groups, -1).repeat(samples, 1, 1)
    return torch.bmm(weight, rows).reshape(samples, layer.out_channels, height, width)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("how", [{}, {"stride": 2, "padding": 1}, {"dilation": 2}])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_a_convolution_counts_the_products_that_it_can_be_written_as(
    kind: type[nn.Conv2d | nn.ConvTranspose2d], how: dict[str, int], groups: int
) -> None:
    layer = kind(8, 16, 3, groups=groups, bias=False, **how)
    x = torch.randn(2, 8, 9, 11, requires_grad=True)
    torch.testing.assert_close(as_products(layer, x), layer(x))
    with FlopCounterMode(display=False) as both:
        as_products(layer, x).sum().backward()
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        as_products(layer, x)
    of_forward = forward.get_flop_counts()["Global"][torch.ops.aten.bmm]
    # "as_products" runs the layer too, for the sizes of its result. The products alone are counted.
    of_both = both.get_flop_counts()["Global"][torch.ops.aten.bmm]
    assert counted(layer, x) == (of_forward, of_both - of_forward)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(
    ("kind", "sizes", "positions"),
    [
        (nn.Conv1d, (20,), 18),
        (nn.Conv3d, (6, 7, 8), 4 * 5 * 6),
        (nn.ConvTranspose1d, (20,), 20),
        (nn.ConvTranspose3d, (6, 7, 8), 6 * 7 * 8),
    ],
)
def test_one_and_three_dimensions_agree_with_a_count_by_hand(
    kind: Any, sizes: tuple[int, ...], positions: int, groups: int
) -> None:
    layer = kind(4, 12, 3, groups=groups)
    forward = 2 * 5 * positions * 3 ** len(sizes) * 4 * 12 // groups
    x = torch.ones(5, 4, *sizes)
    assert counted(layer, x) == (forward, forward)  # no gradient of x
    assert counted(layer, x.requires_grad_()) == (forward, 2 * forward)
    layer.weight.requires_grad_(False)
    assert counted(layer, x) == (forward, forward)  # no gradient of the weight


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_without_groups_torch_counts_the_same(kind: Any) -> None:
    layer, x = kind(6, 10, 3, stride=2, device="meta"), torch.ones(2, 6, 9, 9, device="meta", requires_grad=True)
    with FlopCounterMode(display=False) as torchs:
        layer(x).sum().backward()
    assert sum(counted(layer, x)) == torchs.get_total_flops() > 0


def test_the_backward_of_a_depthwise_convolution_is_twice_its_forward() -> None:
    layer = nn.Conv2d(256, 256, 3, padding=1, groups=256, device="meta")
    x = torch.empty(64, 256, 56, 56, device="meta", requires_grad=True)
    forward = 2 * 9 * prod(x.shape)
    assert counted(layer, x) == (forward, 2 * forward)
    assert 3 * forward < 2.8e9


def test_an_op_without_a_formula_has_no_count() -> None:
    x = torch.ones(3)
    assert count_flops(torch.ops.aten.mul.Tensor, (x, x), {}, x) is None
