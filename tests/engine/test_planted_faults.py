"""Ways to make a recomputed value wrong, planted at a block's beginning, middle and end, with and without dropout after it.

Each way behaves for a few steps. Then it does something else in every step, and something else again by the time of backward.
In those steps gradients are right, or an error says that they would not be: in the first two such steps at the latest.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import itertools
import os
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from contracts.harness import Stack, batch, kernels_for, manage, weigh
from long_cases import some
from plimsoll.errors import ReplayMismatch, SavedTensorModified

WIDTH = 16
CLEAN_STEPS = 3
FAULTY_STEPS = 3
PLACES = ("beginning", "middle", "end")
FULL = "PLIMSOLL_EVERY_SHAPE" in os.environ
"""Every way in every place and 300 steps of clean models, which takes minutes."""


class State:
    """What a way reads: ``scale`` is 1 in clean steps."""

    scale = 1.0


class Way:
    """A way to make a recomputed value wrong. By itself it does what is right."""

    def __init__(self, state: State) -> None:
        self.state = state

    def __deepcopy__(self, memo: object) -> Way:
        return self

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        """What the block computes with it."""
        return (x.sin() * (x * host.weight).tanh()).tanh()

    @contextlib.contextmanager
    def around_forward(self, model: nn.Module) -> Iterator[None]:
        """What is there while the model runs forward."""
        yield

    def close(self) -> None:
        """Undo what it has done to the process."""


class Planted(nn.Module):
    """A way, and its parameters and buffers."""

    def __init__(self, way: Way, width: int) -> None:
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.matrix = nn.Parameter(torch.linspace(-0.5, 0.5, width * width).view(width, width))
        self.other = nn.Parameter(torch.linspace(-0.3, 0.6, width * width).view(width, width))
        self.register_buffer("table", torch.linspace(0.5, 1.0, 512 * 1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(self, x)


class PlantedBlock(nn.Module):
    """A residual block with a way in one of its places."""

    def __init__(self, way: Way, place: str, *, drops: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.planted = Planted(way, WIDTH)
        self.place, self.drops = place, drops

    def plant(self, x: torch.Tensor, place: str) -> torch.Tensor:
        if place != self.place:
            return x
        return F.dropout(self.planted(x), 0.2) if self.drops else self.planted(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.gelu(self.up(self.norm(self.plant(x, "beginning"))))
        return x + self.plant(self.down(self.plant(inner, "middle")), "end")


# --- code that torch calls do not show ---------------------------------------------------------------------------------


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale: float = 1.0
        self.times: int = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = (x.sin() * self.scale).tanh()
        return x * x.cos()


class ScriptedScale(Way):
    """TorchScript with a constant on a schedule."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.scripted = _scripted(Scripted())

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        self.scripted.scale = self.state.scale
        return self.scripted(x)


class ScriptedLoop(ScriptedScale):
    """TorchScript that repeats something a number of times on a schedule."""

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        self.scripted.times = 1 if self.state.scale == 1.0 else 2
        return self.scripted(x)


class ScriptedArgument(Way):
    """A TorchScript function that gets its constant as an argument."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.scripted = _scripted(_scaled, 1.0)

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        return self.scripted(x, self.state.scale)


def _scripted(code: Callable, *constants: float) -> Callable:
    """TorchScript that has run before: its first calls are compiled otherwise than later ones, and give other bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(code)
    for _ in range(3):
        scripted(torch.randn(6, 10, WIDTH, requires_grad=True), *constants).sum().backward()
    return scripted


def _scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x * scale).sigmoid().tanh()


_NUMBERS = itertools.count()


class CustomOp(Way):
    """A custom operator written in Python that reads a global."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        name = f"plimsoll_planted::op{next(_NUMBERS)}"

        @torch.library.custom_op(name, mutates_args=())
        def planted(x: torch.Tensor) -> torch.Tensor:
            return (x * state.scale).tanh()

        planted.register_autograd(
            lambda ctx, grad: grad * (1 - ctx.saved_tensors[0] ** 2),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
        )
        self.op = planted

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        return self.op(x)


class LibraryOp(Way):
    """An operator that a library defines, with a kernel in Python."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        space = f"plimsoll_planted_{next(_NUMBERS)}"
        self.library = torch.library.Library(space, "DEF")
        self.library.define("planted(Tensor x) -> Tensor")
        self.library.impl("planted", lambda x: (x * state.scale).sigmoid().tanh(), "CompositeImplicitAutograd")
        self.op = getattr(torch.ops, space).planted

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        return self.op(x).sin()

    def close(self) -> None:
        self.library._destroy()


class ReplacedKernel(Way):
    """A kernel of torch's own that a library replaces."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.library.impl("erf", lambda x: torch.tanh(x * state.scale), "CPU")

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        return torch.erf(x).sigmoid()

    def close(self) -> None:
        self.library._destroy()


class HiddenState(Way):
    """An autograd function that reads a global."""

    def __init__(self, state: State) -> None:
        super().__init__(state)

        class Scale(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                out = (x * state.scale).tanh()
                ctx.save_for_backward(out)
                return out

            @staticmethod
            def backward(ctx, grad):
                (out,) = ctx.saved_tensors
                return grad * (1 - out * out)

        self.function = Scale

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(x)


class NumpyFunction(Way):
    """An autograd function that computes in numpy."""

    def __init__(self, state: State) -> None:
        super().__init__(state)

        class Compute(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                out = torch.from_numpy(np.tanh(x.numpy() * np.float32(state.scale)))
                ctx.save_for_backward(out)
                return out

            @staticmethod
            def backward(ctx, grad):
                (out,) = ctx.saved_tensors
                return grad * (1 - out * out)

        self.function = Compute

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(x.sin()).sigmoid()


class NumpyRead(Way):
    """A mask that numpy makes of the values of a tensor."""

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        mask = np.exp(-np.abs(x.detach().numpy()) * np.float32(self.state.scale))
        return (x.sin() * torch.from_numpy(mask)).tanh()


class NumpyWrite(Way):
    """numpy writes into a tensor that autograd saves."""

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        y = (x.sin() * 2.0).clone()
        y.detach().numpy()[...] *= np.float32(self.state.scale)
        return y.tanh() * y


class RawWrite(Way):
    """C code writes into a tensor that autograd saves."""

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        y = x.sin().tanh().clone()
        if self.state.scale != 1.0:
            ctypes.memset(y.data_ptr(), 0, y.numel() * y.element_size() // 2)
        return y.sigmoid() * y


class StorageWrite(Way):
    """A second tensor on the same memory is written, one that torch takes for other memory."""

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        y = (x.sin() * 2.0).clone()
        array = np.frombuffer((ctypes.c_char * (y.numel() * 4)).from_address(y.data_ptr()), dtype=np.float32)
        np.multiply(array, np.float32(self.state.scale), out=array)
        return y.tanh() * y


class PatchedInside(Way):
    """A function that torch's own Python code calls is replaced."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.original = original = torch.layer_norm
        torch.layer_norm = lambda x, *rest: original(x, *rest) * state.scale

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (x.shape[-1],)).tanh()

    def close(self) -> None:
        torch.layer_norm = self.original


class PatchedBuiltin(Way):
    """A function of torch._C is replaced."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.original = original = torch._C._nn.softplus
        torch._C._nn.softplus = lambda x: original(x * state.scale)

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        return torch._C._nn.softplus(x).tanh()

    def close(self) -> None:
        torch._C._nn.softplus = self.original


# --- parameters, buffers and their memory ------------------------------------------------------------------------------


class SwappedData(Way):
    """Weights get other memory for forward, and their own back before backward."""

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.sin(), host.matrix).tanh() * (x * host.weight).sigmoid()

    def put(self, parameter: nn.Parameter, data: torch.Tensor) -> None:
        parameter.data = data

    def changed(self, parameter: nn.Parameter) -> torch.Tensor:
        return parameter.detach() * self.state.scale

    @contextlib.contextmanager
    def around_forward(self, model: nn.Module) -> Iterator[None]:
        parameters = [p for module in model.modules() if isinstance(module, Planted) for p in module.parameters()]
        own = [parameter.data for parameter in parameters]
        for parameter in parameters:
            self.put(parameter, self.changed(parameter))
        yield
        for parameter, data in zip(parameters, own, strict=True):
            self.put(parameter, data)


class SetStorage(SwappedData):
    """As before, by ``set_``, of weights that autograd does not save."""

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        return (x.sin() + host.matrix[: x.shape[-2]]).tanh() * x

    @torch.no_grad()
    def put(self, parameter: nn.Parameter, data: torch.Tensor) -> None:
        parameter.set_(data)


class SwappedDataOfOthers(SwappedData):
    """Other modules of the same block get other weights for forward."""

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        return x.sin().tanh()

    @contextlib.contextmanager
    def around_forward(self, model: nn.Module) -> Iterator[None]:
        parameters = list(model.blocks.parameters())
        own = [parameter.data for parameter in parameters]
        for parameter in parameters:
            self.put(parameter, self.changed(parameter))
        yield
        for parameter, data in zip(parameters, own, strict=True):
            self.put(parameter, data)


class OtherPartOfOneStorage(SwappedData):
    """Weights and their perturbed form are two parts of one storage."""

    @contextlib.contextmanager
    def around_forward(self, model: nn.Module) -> Iterator[None]:
        parameters = [p for module in model.modules() if isinstance(module, Planted) for p in module.parameters()]
        flat = [torch.stack([p.detach(), p.detach() * self.state.scale]) for p in parameters]
        for parameter, both in zip(parameters, flat, strict=True):
            parameter.data = both[1]
        yield
        for parameter, both in zip(parameters, flat, strict=True):
            parameter.data = both[0]


class SwappedWithin(SwappedData):
    """The block quantizes its weights while it runs."""

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        own = host.matrix.data, host.weight.data
        host.matrix.data = (host.matrix.data * self.state.scale * 8).round() / 8
        host.weight.data = host.weight.data * self.state.scale
        y = F.linear((x.sin() * host.weight).tanh(), host.matrix).tanh()
        host.matrix.data, host.weight.data = own
        return y

    around_forward = Way.around_forward


class SwappedWithinFromOutside(SwappedWithin):
    """The block gets weights while it runs that were made before."""

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        own = host.weight.data
        host.weight.data = self.prepared[id(host)]
        y = (x.sin() * host.weight).tanh()
        host.weight.data = own
        return y

    @contextlib.contextmanager
    def around_forward(self, model: nn.Module) -> Iterator[None]:
        hosts = [module for module in model.modules() if isinstance(module, Planted)]
        self.prepared = {id(host): host.weight.detach() * self.state.scale for host in hosts}
        yield


class SwappedByHooks(SwappedWithin):
    """Hooks of a module give it other weights while it runs."""

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        return F.linear((x.sin() * host.weight).tanh(), host.matrix).tanh()

    @contextlib.contextmanager
    def around_forward(self, model: nn.Module) -> Iterator[None]:
        own: dict[int, torch.Tensor] = {}

        def before(module: Planted, args: object) -> None:
            for parameter in (module.matrix, module.weight):
                own[id(parameter)] = parameter.data
                parameter.data = parameter.data * self.state.scale

        def after(module: Planted, args: object, output: object) -> None:
            for parameter in (module.matrix, module.weight):
                parameter.data = own.pop(id(parameter))

        hosts = [module for module in model.modules() if isinstance(module, Planted)]
        hooks = [
            hook
            for host in hosts
            for hook in (host.register_forward_pre_hook(before), host.register_forward_hook(after))
        ]
        yield
        for hook in hooks:
            hook.remove()


class WrittenData(SwappedData):
    """Weights are perturbed in place, behind their version, and put back before backward."""

    @contextlib.contextmanager
    def around_forward(self, model: nn.Module) -> Iterator[None]:
        parameters = [p for module in model.modules() if isinstance(module, Planted) for p in module.parameters()]
        own = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.data.mul_(self.state.scale)
        yield
        for parameter, data in zip(parameters, own, strict=True):
            parameter.data.copy_(data)


class ReplacedParameter(SwappedData):
    """Modules get other parameter objects for forward."""

    @contextlib.contextmanager
    def around_forward(self, model: nn.Module) -> Iterator[None]:
        hosts = [module for module in model.modules() if isinstance(module, Planted)]
        own = [host._parameters["matrix"] for host in hosts]
        for host in hosts:
            host._parameters["matrix"] = nn.Parameter(host.matrix.detach() * self.state.scale)
        yield
        for host, parameter in zip(hosts, own, strict=True):
            host._parameters["matrix"] = parameter


class SwappedBuffer(Way):
    """A large buffer has other memory in forward than in backward."""

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * host.table[: x.shape[-1]]).tanh() * host.table[-x.shape[-1] :]

    @contextlib.contextmanager
    def around_forward(self, model: nn.Module) -> Iterator[None]:
        hosts = [module for module in model.modules() if isinstance(module, Planted)]
        own = [host.table.data for host in hosts]
        for host in hosts:
            host.table.data = host.table.data * self.state.scale
        yield
        for host, data in zip(hosts, own, strict=True):
            host.table.data = data


class WrittenBuffer(SwappedBuffer):
    """A large buffer is written behind its version."""

    @contextlib.contextmanager
    def around_forward(self, model: nn.Module) -> Iterator[None]:
        hosts = [module for module in model.modules() if isinstance(module, Planted)]
        own = [host.table.clone() for host in hosts]
        for host in hosts:
            host.table.data.mul_(self.state.scale)
        yield
        for host, data in zip(hosts, own, strict=True):
            host.table.data.copy_(data)


class HiddenWeight(Way):
    """A weight that no module has registered gets other memory for forward."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.hidden = [nn.Parameter(torch.linspace(-1, 1, WIDTH))]

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * self.hidden[0]).tanh()

    @contextlib.contextmanager
    def around_forward(self, model: nn.Module) -> Iterator[None]:
        own = self.hidden[0].data
        self.hidden[0].data = own * self.state.scale
        yield
        self.hidden[0].data = own


# --- modes and subclasses ----------------------------------------------------------------------------------------------


class ScalingCalls(TorchFunctionMode):
    """Makes something else of every ``tanh`` that is called."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * self.state.scale if func is torch.Tensor.tanh else result


class ReplacingCalls(ScalingCalls):
    """Calls another function instead."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.tanh and self.state.scale != 1.0:
            func = torch.Tensor.sigmoid
        return func(*args, **(kwargs or {}))


class ScalingOps(TorchDispatchMode):
    """Scales the result of every ``tanh``."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * self.state.scale if func is torch.ops.aten.tanh.default else result


class RoundingOps(ScalingOps):
    """Rounds what every product computes, in faulty steps."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mul.Tensor and self.state.scale != 1.0:
            return (result * 16).round() / 16
        return result


class ModeAround(Way):
    """A mode of the user's around forward."""

    mode: Callable[[State], contextlib.AbstractContextManager] = ScalingCalls

    @contextlib.contextmanager
    def around_forward(self, model: nn.Module) -> Iterator[None]:
        with self.mode(self.state):
            yield


class ModeFromNowOn(ModeAround):
    """A mode around forward in faulty steps alone."""

    @contextlib.contextmanager
    def around_forward(self, model: nn.Module) -> Iterator[None]:
        with self.mode(self.state) if self.state.scale != 1.0 else contextlib.nullcontext():
            yield


class ReplacingMode(ModeAround):
    mode = ReplacingCalls


class ReplacingModeFromNowOn(ModeFromNowOn):
    mode = ReplacingCalls


class DispatchMode(ModeAround):
    mode = ScalingOps


class DispatchModeFromNowOn(ModeFromNowOn):
    mode = ScalingOps


class RoundingMode(ModeAround):
    mode = RoundingOps


class ScaledTensor(torch.Tensor):
    """A tensor whose functions do something else."""

    state: State

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.tanh:
            result = super().__torch_function__(torch.Tensor.mul, types, (result, cls.state.scale), {})
        return result


class Subclass(Way):
    """A subclass of tensors that rewrites calls."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.kind = type("ScaledTensorOfThisWay", (ScaledTensor,), {"state": state})

    def __call__(self, host: Planted, x: torch.Tensor) -> torch.Tensor:
        return x.sin().as_subclass(self.kind).tanh().as_subclass(torch.Tensor).sigmoid()


WAYS: dict[str, type[Way]] = {
    "a scripted constant": ScriptedScale,
    "a scripted loop": ScriptedLoop,
    "an argument of a scripted function": ScriptedArgument,
    "a custom operator": CustomOp,
    "an operator of a library": LibraryOp,
    "a replaced kernel": ReplacedKernel,
    "an autograd function with hidden state": HiddenState,
    "an autograd function in numpy": NumpyFunction,
    "a mask that numpy makes": NumpyRead,
    "a write of numpy": NumpyWrite,
    "a write of C code": RawWrite,
    "a write through an address": StorageWrite,
    "a patched function inside of torch": PatchedInside,
    "a patched builtin": PatchedBuiltin,
    "weights swapped through .data": SwappedData,
    "weights swapped through set_": SetStorage,
    "all weights of the block swapped": SwappedDataOfOthers,
    "weights in another part of one storage": OtherPartOfOneStorage,
    "weights swapped while the block runs": SwappedWithin,
    "weights made before, swapped while the block runs": SwappedWithinFromOutside,
    "weights swapped by hooks": SwappedByHooks,
    "weights written through .data": WrittenData,
    "other parameter objects": ReplacedParameter,
    "a swapped buffer": SwappedBuffer,
    "a buffer written through .data": WrittenBuffer,
    "a weight that is not registered": HiddenWeight,
    "a function mode": ModeAround,
    "a function mode from now on": ModeFromNowOn,
    "a function mode that replaces calls": ReplacingMode,
    "a function mode that replaces calls from now on": ReplacingModeFromNowOn,
    "a dispatch mode": DispatchMode,
    "a dispatch mode from now on": DispatchModeFromNowOn,
    "a dispatch mode that rounds": RoundingMode,
    "a tensor subclass": Subclass,
}

FOUND = (ReplayMismatch, SavedTensorModified)
LOUD = {
    "a scripted constant",
    "an argument of a scripted function",
    "a custom operator",
    "an operator of a library",
    "a replaced kernel",
    "a write of numpy",
    "a write of C code",
    "a write through an address",
    "a patched function inside of torch",
    "weights written through .data",
    "a buffer written through .data",
    "a dispatch mode",
    "a dispatch mode that rounds",
}
"""Ways that no comparison of calls shows: a sample stops the step. All others get right gradients."""


def _gradients(model: nn.Module, way: Way, index: int) -> dict[str, torch.Tensor]:
    state = way.state
    is_faulty = index >= CLEAN_STEPS
    state.scale = (1.25 if index % 2 else 0.7) if is_faulty else 1.0
    torch.manual_seed(index)
    model.zero_grad()
    with way.around_forward(model):
        loss = weigh(model(batch(index, 6, 10, 8)))
    state.scale = 1.0
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def outcomes(kind: type[Way], place: str, *, drops: bool) -> list[str]:
    """What became of each step: "right", "wrong", or "found" at the end."""
    torch.manual_seed(0)
    way = kind(State())
    try:
        plain = Stack(*(PlantedBlock(way, place, drops=drops) for _ in range(2)), width=WIDTH)
        managed = copy.deepcopy(plain)
        expected = [_gradients(plain, way, index) for index in range(CLEAN_STEPS + FAULTY_STEPS)]
        made = []
        with warnings.catch_warnings(), manage(managed):
            warnings.simplefilter("ignore")
            for index, right in enumerate(expected):
                try:
                    found = _gradients(managed, way, index)
                except FOUND:
                    made.append("found")
                    break
                same = right.keys() == found.keys() and all(torch.equal(right[name], found[name]) for name in right)
                made.append("right" if same else "wrong")
        return made
    finally:
        way.close()


@pytest.mark.parametrize("name", some(WAYS, 10))
def test_a_planted_fault_gives_right_gradients_or_an_error_in_its_first_step(name):
    everywhere = list(itertools.product((True, False), PLACES))
    turn = list(WAYS).index(name)
    # Behind a dropout at the end only the way itself is dropped: nothing after it shows what it made.
    for drops, place in everywhere if FULL else ((True, "end"), everywhere[turn % 6]):
        made = outcomes(WAYS[name], place, drops=drops)
        steps = CLEAN_STEPS + FAULTY_STEPS
        assert made == (["right"] * CLEAN_STEPS + ["found"] if name in LOUD else ["right"] * steps), (place, drops)


TEXT = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(0))
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def _llama():
    return LlamaForCausalLM(LlamaConfig(**SMALL, vocab_size=100)), {"input_ids": TEXT, "labels": TEXT}


def _gpt2():
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config), {"input_ids": TEXT, "labels": TEXT}


def _vit():
    config = ViTConfig(**SMALL, image_size=16, patch_size=4, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return ViTForImageClassification(config), {"pixel_values": images, "labels": torch.tensor([0, 1])}


def _mixtral():
    config = MixtralConfig(**SMALL, vocab_size=100, num_key_value_heads=2, num_local_experts=4, attention_dropout=0.1)
    return MixtralForCausalLM(config), {"input_ids": TEXT, "labels": TEXT}


@pytest.mark.parametrize("build", [_llama, _gpt2, _vit, _mixtral])
def test_clean_models_raise_no_alarm(build):
    torch.manual_seed(0)
    model, inputs = build()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with kernels_for("mixtral"), manage(model, verify_every=5) as handle:
        for _ in range(300 if FULL else 12):
            model(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert handle.faults == ()
        assert handle.inspected_calls
        assert all(outcome.dropped_bytes for outcome in handle.outcomes())
