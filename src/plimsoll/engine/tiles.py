"""Runs the calls of a module in tiles (a few rows at a time), so that only one tile's intermediate tensors exist at a time.

It is for modules that work row by row (see `plimsoll.tracing.rows`). Forward runs tile by tile and saves only the arguments.
Backward runs each tile's forward again, computes the tile's gradients, and adds the gradients of the weights up over the tiles.
So a tiled call recomputes, like checkpointing, but its memory in backward is that of one tile.

Tiles are other matrix shapes, and the gradients of the weights are sums in another order. So results equal the whole call's
results up to rounding, not bit for bit. If parameters are narrower than 32 bits, their gradients are added up in float32.

A tiled call is an ordinary part of the step: a region (a module that the plan decides about) that contains one is recorded,
recomputed, compressed and offloaded as any other region.

Source: tiled MLPs of ALST (Bekman et al. 2025, arXiv:2506.13996) and of Liger-Kernel, which take the module and the number of
tiles from the user.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from plimsoll.artifacts.tile import Tile
from plimsoll.engine.copies import ReplacedForward, calling_module
from plimsoll.engine.replay_rng import generators_of
from plimsoll.errors import InvalidLoss, InvalidModel, PlanMismatch
from plimsoll.tracing.recorder.calling import graph_nodes
from plimsoll.tracing.torch_internals import peek_functorch, sequence_number

_WIDE = 4
"""Gradients of parameters with fewer bytes per number than this are added up in float32."""


class TiledForward(ReplacedForward):
    """Takes the place of a module's ``forward``, and runs it in tiles.

    Calls without gradients, calls under ``torch.func`` and calls inside of torch.compile run as a whole.
    """

    def __init__(self, module: nn.Module, tile: Tile, only_first: int | None = None) -> None:
        super().__init__(module)
        self._tile = tile
        self._only_first = only_first
        self._bare = _Bare(module, self._original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caller = calling_module(self)
        if caller is not None and caller is not self.module:
            self._leave(caller)  # a shallow copy of the module, with weights of its own
            return caller.forward(*args, **kwargs)
        if (
            self._is_removed
            or not torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or peek_functorch() is not None
        ):
            return self._original(*args, **kwargs)
        call = self._call(args, kwargs)
        return self._original(*args, **kwargs) if call is None else call.run()

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        """Return the tiled call with its tensors, or ``None`` if these arguments do not have the number of rows that the plan
        expects.
        """
        leaves, spec = tree_flatten((args, kwargs))
        given: dict[str, Any] = {**{str(at): value for at, value in enumerate(args)}, **kwargs}
        rowed = {id(given.get(place)): dim for place, dim in self._tile.inputs.items()}
        dims = [rowed.get(id(leaf)) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        sizes = {
            leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if dim is not None and leaf.dim() > dim
        }
        if len(sizes) != 1 or len([dim for dim in dims if dim is not None]) != len(self._tile.inputs):
            return None
        rows = sizes.pop()
        return _Call(self._bare, self._tile, leaves, spec, dims, rows, self._only_first) if rows > 1 else None


class _Bare(nn.Module):
    """A module whose forward is the tiled module's own forward, without hooks. It is used because ``functional_call``, which
    replaces weights, needs a module.
    """

    def __init__(self, module: nn.Module, original: Any) -> None:
        super().__init__()
        self.module = module
        self._own_forward = original

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._own_forward(*args, **kwargs)


class _Call:
    """One tiled call: its tensors, and how to run one tile with other tensors in their places."""

    def __init__(
        self,
        bare: _Bare,
        tile: Tile,
        leaves: list[Any],
        spec: TreeSpec,
        dims: list[int | None],
        rows: int,
        only_first: int | None,
    ) -> None:
        self._bare, self._tile, self._spec = bare, tile, spec
        self._places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.dims = [dims[at] for at in self._places]
        """For each tensor argument, the dimension of its rows, or ``None`` if every tile gets the whole tensor."""
        weights = dict(bare.named_parameters()) | dict(bare.named_buffers())
        self._names = list(weights)
        self.tensors: list[torch.Tensor] = [*(leaves[at] for at in self._places), *weights.values()]
        step = -(-rows // self._tile.count)
        self.rows = rows
        self.parts = [(start, min(step, rows - start)) for start in range(0, rows, step)][:only_first]
        self.device = device = self.tensors[0].device
        self._training = [(module, module.training) for module in bare.module.modules()]
        self._autocast = (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
        self._generators = generators_of([device]) if tile.is_random else ()
        self.states: list[tuple[torch.Generator, ...]] = []
        self.is_tuple = False

    def run(self) -> Any:
        """Run the tiles, and return the whole call's output."""
        outputs = _Tiled.apply(self, *self.tensors)
        self.tensors = []  # autograd holds them now, and frees them when backward is over
        return outputs if self.is_tuple or not isinstance(outputs, tuple) else outputs[0]

    def part(self, tensors: Sequence[torch.Tensor], start: int, count: int) -> list[torch.Tensor]:
        """Return the tensors for one tile: views of rows ``start`` to ``start + count``, and tensors without rows unchanged."""
        rowed = zip(tensors, self.dims, strict=False)
        parts = [tensor if dim is None else tensor.narrow(dim, start, count) for tensor, dim in rowed]
        return [*parts, *tensors[len(self.dims) :]]

    def compute(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the module's own forward on one tile's tensors (arguments, then weights), and return its outputs."""
        leaves = list(self._leaves)
        for at, tensor in zip(self._places, tensors, strict=False):
            leaves[at] = tensor
        args, kwargs = tree_unflatten(leaves, self._spec)
        weights = dict(zip(self._names, tensors[len(self._places) :], strict=True))
        # A cast that the cache of autocast made in forward, without gradients, would be used by other calls of the weight.
        enabled, dtype = self._autocast
        with torch.autocast(self.device.type, dtype=dtype, enabled=enabled, cache_enabled=False):
            output = torch.func.functional_call(self._bare, weights, args, kwargs)
        self.is_tuple = isinstance(output, tuple)
        return output if isinstance(output, tuple | list) else (output,)

    def note_state(self) -> None:
        """Record the states of the random generators before the next tile."""
        if self._generators:
            self.states.append(tuple(generator.clone_state() for generator in self._generators))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Return a context manager for a second forward in backward. Inside it, training flags are those of forward. At its
        end, random states are restored.
        """
        now = [generator.get_state() for generator in self._generators]
        flags = [(module, module.training) for module, _ in self._training]
        for module, was_training in self._training:
            module.training = was_training
        try:
            yield
        finally:
            for module, is_training in flags:
                module.training = is_training
            for generator, state in zip(self._generators, now, strict=True):
                generator.set_state(state)

    def put_state_back(self, tile: int) -> None:
        """Set the random generators to the states that they had in forward when tile number ``tile`` started."""
        if self._generators:
            for generator, state in zip(self._generators, self.states[tile], strict=True):
                generator.set_state(state.get_state())

    @property
    def output_dims(self) -> tuple[int, ...]:
        """The dimension of the rows in each output."""
        return self._tile.outputs


class _Tiled(torch.autograd.Function):
    """The autograd function that runs a call in tiles. Its arguments are the call, and all tensors that the call reads."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> Any:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        whole: list[torch.Tensor] = []
        for start, count in call.parts:
            call.note_state()
            outputs = call.compute(call.part(tensors, start, count))
            for at, (output, dim) in enumerate(zip(outputs, call.output_dims, strict=True)):
                if start == 0:
                    shape = [*output.shape]
                    shape[dim] = call.rows
                    whole.append(output.new_empty(shape))
                whole[at].narrow(dim, start, count).copy_(output)
            del outputs, output  # the next tile takes their memory
        ctx.mark_non_differentiable(*(each for each in whole if not (each.is_floating_point() or each.is_complex())))
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise InvalidLoss(
                "A call that runs in tiles cannot be differentiated twice.",
                why="it computes its gradients tile by tile, and autograd does not record how",
                next="plan without 'tile' in allow= if the loss has gradients of gradients",
            )
        call, tensors = ctx.call, ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        sums = _Sums(tensors, call.dims, needed)
        with call.again():
            for tile, (start, count) in enumerate(call.parts):
                call.put_state_back(tile)
                leaves = sums.leaves(call.part(tensors, start, count))
                first_node = sequence_number()
                with torch.enable_grad():
                    outputs = call.compute(leaves)
                if tile == 0:
                    _refuse_other_sources(outputs, leaves, first_node)
                parts = [
                    (output, gradient.narrow(dim, start, count))
                    for output, gradient, dim in zip(outputs, gradients, call.output_dims, strict=True)
                    if output.requires_grad
                ]
                del outputs
                if parts:
                    _backward(parts)
                sums.take(leaves, start, count)
                del parts, leaves
        return (None, *sums.gradients())

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise InvalidLoss(
            "A call that runs in tiles cannot be differentiated in forward mode.",
            why="it computes its gradients tile by tile, in backward",
            next="plan without 'tile' in allow= if you need forward-mode derivatives",
        )


def _refuse_other_sources(outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], first_node: int) -> None:
    """Raise an error if the outputs depend on a tensor that needs a gradient and is neither an argument nor a weight of the
    module, such as an attribute that another module has computed. Its gradient would be wrong.
    """
    own = {id(leaf) for leaf in leaves}
    for node in graph_nodes(outputs):
        leaf = getattr(node, "variable", None)
        if id(leaf) not in own if leaf is not None else node._sequence_nr() < first_node:
            raise InvalidModel(
                "A module that runs in tiles reads a tensor that is neither its argument nor its own weight.",
                why="the gradient of that tensor would be computed once for each tile, and not be added up",
                next="plan without 'tile' in allow=, or pass the tensor to the module as an argument",
            )


def _backward(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    outputs = [output for output, _ in parts]
    gradients = [gradient for _, gradient in parts]
    parts.clear()  # autograd then frees each output as soon as it can
    torch.autograd.backward(outputs, gradients)


class _Sums:
    """Adds up the gradients of all tiles. Gradients of rows are written to their place, and gradients of whole tensors are
    summed.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], dims: Sequence[int | None], needed: Sequence[bool]) -> None:
        self._dims = [*dims, *[None] * (len(tensors) - len(dims))]
        self._needed = needed
        self._dtypes = [tensor.dtype for tensor in tensors]
        self._rows = [
            torch.empty_like(tensor) if dim is not None and wanted else None
            for tensor, dim, wanted in zip(tensors, self._dims, needed, strict=True)
        ]
        self._wide: dict[int, torch.Tensor] = {}
        self._leaves: dict[int, torch.Tensor] = {}
        for at, (tensor, dim, wanted) in enumerate(zip(tensors, self._dims, needed, strict=True)):
            if dim is None:
                self._leaves[at] = leaf = tensor.detach().requires_grad_(wanted)
                if wanted and tensor.element_size() < _WIDE:
                    leaf.register_post_accumulate_grad_hook(self._widener(at))

    def leaves(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of one tile as leaves of a new autograd graph. Tensors without rows are the same leaves in all
        tiles.
        """
        wanted = zip(parts, self._needed, strict=True)
        return [
            self._leaves[at] if at in self._leaves else part.detach().requires_grad_(is_needed)
            for at, (part, is_needed) in enumerate(wanted)
        ]

    def take(self, leaves: Sequence[torch.Tensor], start: int, count: int) -> None:
        """Store the gradients of one tile's rows at their place in the whole gradients."""
        for leaf, rows, dim in zip(leaves, self._rows, self._dims, strict=True):
            if rows is not None and dim is not None:
                place = rows.narrow(dim, start, count)
                place.zero_() if leaf.grad is None else place.copy_(leaf.grad)

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients of all tensors, each in its tensor's dtype."""
        found: list[torch.Tensor | None] = list(self._rows)
        for at, leaf in self._leaves.items():
            found[at] = self._wide.pop(at).to(self._dtypes[at]) if at in self._wide else leaf.grad
            leaf.grad = None
        # Leaves hold their hooks, and the hooks hold this object. Without this, all of it, with the rows, would stay until
        # Python's garbage collector runs.
        self._leaves.clear()
        self._rows.clear()
        return found

    def _widener(self, at: int) -> Any:
        def widen(leaf: torch.Tensor) -> None:
            """Add the gradient in float32: one rounding to 16 bits for each tile would add up."""
            assert leaf.grad is not None
            if at in self._wide:
                self._wide[at].add_(leaf.grad)
            else:
                self._wide[at] = leaf.grad.float()
            leaf.grad = None

        return widen


class Tiles:
    """All tiled calls of a plan on a model. ``install`` puts them in place, ``remove`` takes them out."""

    def __init__(self, model: nn.Module, tiles: Collection[Tile], *, only_first: int | None = None) -> None:
        """Check that the model has the modules and that they are not tiled already. Nothing changes yet.

        With ``only_first`` each call runs only that many of its tiles. This is for traces with fake tensors: all tiles after
        the second need the same memory, and a trace of two is much shorter. Results and seconds are then wrong.

        Raises:
            PlanMismatch: a module is not there, or another plan runs it in tiles.
        """
        modules = dict(model.named_modules())
        for tile in tiles:
            module = modules.get(tile.path)
            if module is None or isinstance(module.__dict__.get("forward"), TiledForward):
                raise PlanMismatch(
                    f"The plan runs {tile.path!r} in tiles, but "
                    + ("the model does not have it." if module is None else "another plan does so already."),
                    why="a plan names the modules of the model that it was made for, and only one plan can run a module",
                    next="call plimsoll.plan for this model" if module is None else "call remove() on the first handle",
                )
        self._forwards = [TiledForward(modules[tile.path], tile, only_first) for tile in tiles]

    def install(self) -> None:
        for forward in self._forwards:
            forward.install()

    def remove(self) -> None:
        for forward in self._forwards:
            forward.remove()


@contextlib.contextmanager
def in_tiles(model: nn.Module, tiles: Collection[Tile], *, only_first: int | None = None) -> Iterator[None]:
    """Return a context manager. Inside, the model's calls run in these tiles, or only in the first ``only_first`` of them."""
    placed = Tiles(model, tiles, only_first=only_first)
    placed.install()
    try:
        yield
    finally:
        placed.remove()
