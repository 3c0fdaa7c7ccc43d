"""Finds module calls that work row by row: each row of the output depends on the same row of the input, and on no other row.

Such a call can run in tiles (a few rows at a time), because tiles give the same numbers as the whole call, up to rounding. Rows
are the positions along one dimension of the input: tokens, pixels, nodes, or the samples of a batch. Linear layers,
element-wise ops, and norms and softmax over other dimensions are row-wise. Attention over the sequence mixes tokens, and batch
norm mixes samples.

The model runs once, and `RowFollower` (a dispatch mode) follows the rows from op to op. Each tensor that has rows gets a
`Layout`: which of its dimensions has the rows, also after reshapes that join or split dimensions. An op without a rule counts
as mixing rows, so an unknown op never makes a call row-wise.

Ops do not show what Python code does with the number of rows (``x / x.shape[1]``). So with real tensors the model runs once
more, and some rows of each row-wise call are computed alone and compared.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from plimsoll.tracing.constant_random import ConstantRandomNumbers
from plimsoll.tracing.ddp import inner_module
from plimsoll.tracing.fake import fake_batch, faked
from plimsoll.tracing.kernels import target_kernels
from plimsoll.tracing.recorder.calling import split_batch
from plimsoll.tracing.recorder.contents import lent
from plimsoll.tracing.recorder.untouched import private_copy, side_effects_kept, untouched
from plimsoll.tracing.regions import find_regions

Layout = tuple[tuple[int, ...], ...]
"""The dimensions of a tensor, each as the sizes of its factors, outermost first. The factor -1 means the rows.

A tensor (batch 2, rows, 8) that was reshaped to (2 · rows, 8) has the layout ((2, -1), (8,)).
"""

_LOG = logging.getLogger(__name__)
MOST_TILES = 64
"""The most tiles (parts of a few rows) that a module call may be cut into."""
_ROWS = -1


class MixesRows(Exception):
    """Raised if a module call does not work row by row: an output row depends on other input rows. The text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowwiseCall:
    """Data: a module call that works row by row along one dimension.

    ``dim`` is the dimension of the rows in the first tensor argument, and ``rows`` its size. ``inputs`` maps the place of each
    argument that has rows (a position or a keyword, as text) to the dimension of its rows, and ``outputs`` has the dimension of
    each returned tensor. ``inner_bytes`` are the bytes of all tensors that the call makes and does not return, and
    ``outer_bytes`` the bytes of its arguments with rows and of its outputs. ``is_random`` says whether the call draws random
    numbers.
    """

    path: str
    dim: int
    rows: int
    inputs: dict[str, int]
    outputs: tuple[int, ...]
    inner_bytes: int
    outer_bytes: int
    is_random: bool

    @property
    def savable_bytes(self) -> float:
        """How many of the ``inner_bytes`` do not exist at the same time if the call runs in as many tiles as possible."""
        return self.inner_bytes * (1 - 1 / min(self.rows, MOST_TILES))


@dataclass(slots=True)
class _Scope:
    """One module call while its ops are followed, to find whether it works row by row along one dimension."""

    path: str
    dim: int
    rows: int
    inputs: dict[str, int]
    outer_bytes: int
    given: frozenset[int]
    """The storages of the call's arguments."""
    layouts: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    made_bytes: int = 0
    is_random: bool = False
    reason: str = ""


class RowFollower(TorchDispatchMode):
    """Follows the rows through all module calls of a running model.

    Enter it together with `watching`, and run the model's forward without gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self._open: list[list[_Scope]] = []
        self._calls: dict[str, list[tuple[RowwiseCall, ...]]] = {}
        self.reasons: dict[str, str] = {}
        """Maps the path of each module that is not row-wise to the reason of its last call."""

    @property
    def found(self) -> dict[str, RowwiseCall]:
        """The calls that work row by row, by module path. No call is inside of another one: where both work row by row, the
        call or the calls inside of it are chosen, whichever saves more memory.

        A module that is called several times is included only if each of its calls works row by row along the same dimension.
        """
        chosen: dict[str, RowwiseCall] = {}
        # from the innermost modules to the outermost
        for path in sorted(self._calls, key=lambda path: -path.count(".")):
            dims = [{call.dim: call for call in calls} for calls in self._calls[path]]
            common = set.intersection(*(set(calls) for calls in dims))
            if not common:
                continue
            # the dimension with the most rows can be cut into the most tiles
            best = max(common, key=lambda dim: min(calls[dim].rows for calls in dims))
            call = max((calls[best] for calls in dims), key=lambda call: call.inner_bytes)
            inside = [inner for inner in chosen if inner.startswith(f"{path}.")]
            if call.savable_bytes >= sum(chosen[inner].savable_bytes for inner in inside):
                for inner in inside:
                    del chosen[inner]
                chosen[path] = call
        return chosen

    @contextlib.contextmanager
    def watching(self, modules: dict[str, nn.Module]) -> Iterator[None]:
        """Return a context manager. Inside, calls of these modules (by path) are followed."""
        hooks = []
        for path, module in modules.items():
            hooks.append(module.register_forward_pre_hook(self._opener(path), with_kwargs=True))
            # also after a forward that raised: the code around it may catch the error
            hooks.append(module.register_forward_hook(self._closer(path), with_kwargs=True, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _opener(self, path: str) -> Callable[..., None]:
        def opened(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._open.append(_scopes(path, args, kwargs))

        return opened

    def _closer(self, path: str) -> Callable[..., None]:
        def closed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            finished = [(scope, _outputs(scope, output)) for scope in self._open.pop()]
            calls = tuple(_call_of(scope, dims) for scope, dims in finished if dims)
            self._calls.setdefault(path, []).append(calls)
            if not calls:
                self.reasons[path] = next(
                    (scope.reason for scope, _ in finished if scope.reason),
                    "its first tensor does not have two dimensions",
                )

        return closed

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # a fake tensor is asked for its device
            return out
        makes_views = any(result.alias_info is not None for result in func._schema.returns)
        size = 0 if makes_views else sum(leaf.nbytes for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        for scopes in self._open:
            for scope in scopes:
                scope.made_bytes += size
                scope.is_random |= torch.Tag.nondeterministic_seeded in func.tags
                if not scope.reason:
                    try:
                        _follow(scope, func, args, kwargs or {}, out)
                    except MixesRows as mixing:
                        scope.reason = f"{func._schema.name.partition('::')[2]} {mixing}"
                    except (LookupError, TypeError, AttributeError):  # a form of the op that its rule does not know
                        scope.reason = f"{func._schema.name.partition('::')[2]} may mix rows"
        return out


def _scopes(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Scope]:
    given = {**{str(at): value for at, value in enumerate(args)}, **kwargs}
    tensors = {place: value for place, value in given.items() if isinstance(value, torch.Tensor)}
    first = next((tensor for tensor in tensors.values() if tensor.is_floating_point()), None)
    if first is None or first.dim() < 2:
        return []
    scopes = []
    for dim in range(first.dim() - 1):
        if first.shape[dim] < 2:
            continue
        rowed = {place: dim for place, tensor in tensors.items() if tensor.shape[: dim + 1] == first.shape[: dim + 1]}
        outer_bytes = sum(tensors[place].nbytes for place in rowed)
        storages = frozenset(tensor.untyped_storage()._cdata for tensor in tensors.values())
        scope = _Scope(path, dim, first.shape[dim], rowed, outer_bytes, storages)
        for place in rowed:
            scope.layouts[tensors[place]] = _plain(tensors[place].shape, dim)
        scopes.append(scope)
    return scopes


def _outputs(scope: _Scope, output: Any) -> tuple[int, ...]:
    """Return the dimension of each output that has the rows, or an empty tuple if the module call does not work row by row."""
    if scope.reason:
        return ()
    leaves = list(output) if type(output) is tuple else [output]
    dims = []
    for leaf in leaves:
        layout = scope.layouts.get(leaf) if isinstance(leaf, torch.Tensor) else None
        at = None if layout is None else _row_dim(layout)
        if layout is None or at is None or layout[at] != (_ROWS,):
            scope.reason = "returns something that is not a tensor with the same rows"
            return ()
        dims.append(at)
    scope.outer_bytes += sum(leaf.nbytes for leaf in leaves)
    scope.made_bytes -= sum(leaf.nbytes for leaf in leaves)
    return tuple(dims)


def _call_of(scope: _Scope, outputs: tuple[int, ...]) -> RowwiseCall:
    return RowwiseCall(
        path=scope.path,
        dim=scope.dim,
        rows=scope.rows,
        inputs=scope.inputs,
        outputs=outputs,
        inner_bytes=scope.made_bytes,
        outer_bytes=scope.outer_bytes,
        is_random=scope.is_random,
    )


# ------------------------------------------------------------------------------------------------------------------ layouts


def _plain(shape: Sequence[int], dim: int) -> Layout:
    """Return the layout (sizes, with -1 for the rows) of a tensor whose dimension ``dim`` is the rows."""
    return tuple((_ROWS,) if at == dim else (size,) for at, size in enumerate(shape))


def _row_dim(layout: Layout) -> int:
    return next(at for at, factors in enumerate(layout) if _ROWS in factors)


def _at(shape: Sequence[int], dim: int, factors: tuple[int, ...]) -> Layout:
    """Return the layout (sizes of each dimension) of a tensor of this shape, where dimension ``dim`` consists of these factors.
    The factor -1 means the rows.
    """
    return tuple(factors if at == dim else (size,) for at, size in enumerate(shape))


def reshaped(layout: Layout, rows: int, shape: Sequence[int]) -> Layout:
    """Return the layout that a tensor has after a reshape to ``shape``. ``rows`` is the number of rows.

    A layout lists the sizes that each dimension consists of; -1 means the rows.

    Raises:
        MixesRows: the reshape splits the rows, or joins them with a part of another dimension.

    Example:
        >>> reshaped(((2,), (-1,), (8,)), 6, (12, 8))
        ((2, -1), (8,))
    """
    pending = [factor for factors in layout for factor in factors if factor != 1]
    made: list[tuple[int, ...]] = []
    for size in shape:
        factors: list[int] = []
        left = size
        while left > 1:
            if not pending:
                raise MixesRows("splits the rows")
            factor = pending.pop(0)
            width = rows if factor == _ROWS else factor
            if left % width == 0:
                factors.append(factor)
                left //= width
            elif factor != _ROWS and width % left == 0:
                factors.append(left)
                pending.insert(0, width // left)
                left = 1
            else:
                raise MixesRows("splits the rows")
        made.append(tuple(factors) or (size,))
    if not any(_ROWS in factors for factors in made):
        raise MixesRows("splits the rows")
    return tuple(made)


# -------------------------------------------------------------------------------------------------------------------- rules

_Rule = Callable[["_Op"], Sequence[Layout | None] | Layout | None]


@dataclass(slots=True)
class _Op:
    """One op with the layouts of its tensors. A layout says which dimension has the rows; it is ``None`` for a tensor without
    rows.
    """

    func: torch._ops.OpOverload
    arguments: dict[str, Any]
    layouts: dict[str, Layout | None]
    out: Any

    @property
    def inputs(self) -> list[tuple[torch.Tensor, Layout | None]]:
        found: list[tuple[torch.Tensor, Layout | None]] = []
        for name, value in self.arguments.items():
            if isinstance(value, torch.Tensor):
                found.append((value, self.layouts[name]))
            elif isinstance(value, list | tuple):
                layouts: Any = self.layouts.get(name)
                found += [
                    (each, layout)
                    for each, layout in zip(value, layouts or (), strict=False)
                    if isinstance(each, torch.Tensor)
                ]
        return found

    @property
    def outputs(self) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(self.out) if isinstance(leaf, torch.Tensor)]

    def only(self, name: str) -> tuple[torch.Tensor, Layout]:
        """Return the argument ``name`` and its layout (which dimension has the rows).

        Raises:
            MixesRows: another argument has rows too.
        """
        layout = self.layouts[name]
        if layout is None or sum(found is not None for _, found in self.inputs) > 1:
            raise MixesRows("has rows in another argument")
        return self.arguments[name], layout


def _follow(
    scope: _Scope, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> None:
    """Find which dimension of an op's results has the rows, and note it as their layout.

    Raises:
        MixesRows: a row of a result may depend on other rows.
    """
    known = scope.layouts
    arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    layouts: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            layouts[name] = known.get(value)
        elif isinstance(value, list | tuple):
            layouts[name] = [known.get(each) if isinstance(each, torch.Tensor) else None for each in value]
    op = _Op(func, arguments, layouts, out)
    written = [argument.name for argument in func._schema.arguments if argument.is_write]
    for name in written:
        target = arguments.get(name)
        if isinstance(target, torch.Tensor) and target.untyped_storage()._cdata in scope.given:
            raise MixesRows("writes to an argument")
    if all(layout is None for _, layout in op.inputs):
        for name in written:
            if isinstance(arguments.get(name), torch.Tensor) and not func._schema.name.endswith(("fill_", "zero_")):
                raise MixesRows("writes to a tensor in place")
        return
    rule = _RULES.get(func._schema.name.partition("::")[2])
    if rule is None:
        rule = _pointwise if torch.Tag.pointwise in func.tags else None
    if rule is None:
        raise MixesRows("may mix rows")
    made = rule(op)
    results = op.outputs
    each: Sequence[Layout | None] = made if isinstance(made, list) else [made] * len(results)  # type: ignore[list-item]
    for name in written:
        if layouts.get(name) != each[0]:
            raise MixesRows("writes rows to a tensor in place")
    for tensor, layout in zip(results, each, strict=True):
        if layout is not None:
            known[tensor] = layout


def _pointwise(op: _Op) -> Layout:
    """Return which dimension has the rows in the result of an elementwise op with broadcasting.

    All arguments with rows must have them in the same dimension of the result. Each other argument must be the same for all
    rows.
    """
    shape = op.outputs[0].shape
    found: tuple[int, tuple[int, ...]] | None = None
    for tensor, layout in op.inputs:
        if layout is not None:
            dim = _row_dim(layout)
            here = dim + len(shape) - tensor.dim(), layout[dim]
            if found is not None and found != here:
                raise MixesRows("combines different rows")
            found = here
    assert found is not None
    at, factors = found
    for tensor, layout in op.inputs:
        dim = at - len(shape) + tensor.dim()
        if layout is None and dim >= 0 and tensor.shape[dim] != 1:
            raise MixesRows("combines rows with a tensor that differs from position to position")
    return _at(shape, at, factors)


def _like(op: _Op) -> Layout | None:
    """Return which dimension has the rows in the result of an op that does not change the shape."""
    return next(layout for _, layout in op.inputs if layout is not None)


def _dims_of(op: _Op, ndim: int) -> set[int]:
    dims = op.arguments.get("dim", op.arguments.get("dims", _default(op.func, "dim")))
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return set(range(ndim))
    return {dim % ndim for dim in (dims if isinstance(dims, list | tuple) else [dims])}


def _default(func: torch._ops.OpOverload, name: str) -> Any:
    return next((argument.default_value for argument in func._schema.arguments if argument.name == name), None)


def _along(op: _Op) -> Layout:
    """Return which dimension has the rows in the result of an op that reduces, scans, sorts or normalises other dimensions."""
    tensor, layout = op.only("self")
    row = _row_dim(layout)
    dims = _dims_of(op, tensor.dim())
    if row in dims:
        raise MixesRows("works along the rows")
    out = op.outputs[0]
    at = row if out.dim() == tensor.dim() else row - sum(dim < row for dim in dims)
    return _at(out.shape, at, layout[row])


def _trailing_norm(op: _Op) -> list[Layout | None]:
    """Return which dimension has the rows in the results of a layer norm or RMS norm over the last dimensions."""
    tensor, layout = op.only("input")
    row = _row_dim(layout)
    if row >= tensor.dim() - len(op.arguments["normalized_shape"]):
        raise MixesRows("normalises along the rows")
    return [_at(out.shape, row, layout[row]) for out in op.outputs]


def _product(left: str, right: str) -> _Rule:
    def rule(op: _Op) -> Layout:
        one, other = op.layouts[left], op.layouts[right]
        batched = op.arguments[left].dim() == 3
        shape = op.outputs[0].shape
        if sum(layout is not None for _, layout in op.inputs) > (one is not None) + (other is not None):
            raise MixesRows("adds rows to a product")
        if batched and one is not None and other is not None and _row_dim(one) == _row_dim(other) == 0:
            if one[0] != other[0]:
                raise MixesRows("multiplies different rows")
            return _at(shape, 0, one[0])
        if one is not None and other is None and _row_dim(one) == len(shape) - 2:
            return _at(shape, len(shape) - 2, one[len(shape) - 2])
        if other is not None and one is None and _row_dim(other) == len(shape) - 1:
            return _at(shape, len(shape) - 1, other[len(shape) - 1])
        raise MixesRows("sums over the rows")

    return rule


def _reshape(op: _Op) -> Layout:
    tensor, layout = op.only("self")
    row = _row_dim(layout)
    rows = tensor.shape[row] // math.prod(factor for factor in layout[row] if factor != _ROWS)
    return reshaped(layout, rows, op.outputs[0].shape)


def _permute(op: _Op) -> Layout:
    tensor, layout = op.only("self")
    name = op.func._schema.name.partition("::")[2]
    order = list(range(tensor.dim()))
    if name == "permute":
        order = [dim % tensor.dim() for dim in op.arguments["dims"]]
    else:
        one, other = (0, 1) if name == "t" else (op.arguments["dim0"], op.arguments["dim1"])
        order[one], order[other] = order[other], order[one]
    return tuple(layout[dim] for dim in order)


def _unsqueeze(op: _Op) -> Layout:
    tensor, layout = op.only("self")
    at = op.arguments["dim"] % (tensor.dim() + 1)
    return (*layout[:at], (1,), *layout[at:])


def _squeeze(op: _Op) -> Layout:
    tensor, layout = op.only("self")
    wanted = _dims_of(op, tensor.dim())
    return tuple(each for dim, each in enumerate(layout) if dim not in wanted or tensor.shape[dim] != 1)


def _expand(op: _Op) -> Layout:
    tensor, layout = op.only("self")
    row, shape = _row_dim(layout), op.outputs[0].shape
    return _at(shape, row + len(shape) - tensor.dim(), layout[row])


def _parts(op: _Op) -> list[Layout | None]:
    """Return which dimension has the rows in the results of an op that takes parts of other dimensions: slice, select, split,
    unbind.
    """
    tensor, layout = op.only("self")
    dim, row = op.arguments.get("dim", 0) % tensor.dim(), _row_dim(layout)
    drops = op.outputs[0].dim() < tensor.dim()
    if dim == row and (drops or any(out.shape[dim] != tensor.shape[dim] for out in op.outputs)):
        raise MixesRows("takes some of the rows")
    at = row - (drops and dim < row)
    return [_at(out.shape, at, layout[row]) for out in op.outputs]


def _joined(op: _Op) -> Layout:
    tensors = op.inputs
    layouts = [layout for _, layout in tensors]
    first = layouts[0]
    if first is None or any(layout is None for layout in layouts):
        raise MixesRows("joins tensors with and without rows")
    row, shape = _row_dim(first), op.outputs[0].shape
    stacks = len(shape) > tensors[0][0].dim()
    dim = op.arguments.get("dim", 0) % len(shape)
    if any(layout[row] != first[row] for layout in layouts if layout is not None) or (dim == row and not stacks):
        raise MixesRows("joins different rows")
    return _at(shape, row + (stacks and dim <= row), first[row])


def _looked_up(op: _Op) -> Layout:
    """Return which dimension has the rows in the result of a look-up in a table (an embedding). The indices have rows, the
    table does not.
    """
    name = "indices" if "indices" in op.arguments else "index"
    _, layout = op.only(name)
    row = _row_dim(layout)
    return _at(op.outputs[0].shape, row, layout[row])


def _gathered(op: _Op) -> Layout:
    tensor, layout = op.arguments["self"], op.layouts["self"]
    index = op.layouts["index"]
    if layout is None or index is None:
        raise MixesRows("gathers from other rows")
    row = _row_dim(layout)
    if op.arguments["dim"] % tensor.dim() == row or _row_dim(index) != row or index[row] != layout[row]:
        raise MixesRows("gathers from other rows")
    return _at(op.outputs[0].shape, row, layout[row])


def _convolved(op: _Op) -> Layout:
    _, layout = op.only("input")
    row = _row_dim(layout)
    weight, space = op.arguments["weight"], row - 2
    is_pointwise = (
        space >= 0
        and weight.shape[row] == 1
        and not op.arguments["transposed"]
        and _one(op.arguments["stride"], space) == 1
        and _one(op.arguments["padding"], space) == 0
    )
    if row != 0 and not is_pointwise:
        raise MixesRows("convolves along the rows")
    return _at(op.outputs[0].shape, row, layout[row])


def _one(sizes: Sequence[int], at: int) -> int:
    return sizes[at] if at < len(sizes) else sizes[0]


def _attended(op: _Op) -> list[Layout | None]:
    """Return which dimension has the rows in the results of attention. Rows must be the samples of the batch: the first
    dimension of queries, keys and values.
    """
    names = [name for name in ("query", "key", "value") if name in op.arguments]
    layouts = [op.layouts[name] for name in names]
    first = layouts[0]
    if first is None or _row_dim(first) != 0 or any(layout is None or layout[0] != first[0] for layout in layouts):
        raise MixesRows("attends to other rows")
    for tensor, layout in op.inputs:
        if layout is None and tensor.dim() == op.arguments["query"].dim() and tensor.shape[0] != 1:
            raise MixesRows("combines rows with a mask that differs from position to position")
    return [_at(out.shape, 0, first[0]) if out.dim() >= 2 else None for out in op.outputs]


def _named(rule: _Rule, names: str) -> dict[str, _Rule]:
    return dict.fromkeys(names.split(), rule)


_RULES: dict[str, _Rule] = {
    **_named(
        _like, "clone alias detach detach_ lift_fresh _to_copy contiguous native_dropout bernoulli bernoulli_ dropout"
    ),
    **_named(_like, "empty_like zeros_like ones_like full_like rand_like randn_like fill_ zero_ uniform_ normal_"),
    **_named(_pointwise, "copy_ where masked_fill masked_fill_ rrelu_with_noise prelu _prelu_kernel glu_jvp"),
    **_named(_along, "sum mean amax amin var var_mean std std_mean logsumexp prod any all argmax argmin max min"),
    **_named(
        _along, "linalg_vector_norm norm _softmax _log_softmax _safe_softmax cumsum cumprod sort topk glu argsort"
    ),
    **_named(_trailing_norm, "native_layer_norm _fused_rms_norm"),
    **_named(_product("self", "mat2"), "mm bmm"),
    **_named(_product("mat1", "mat2"), "addmm"),
    **_named(_product("batch1", "batch2"), "baddbmm"),
    **_named(_reshape, "view _unsafe_view reshape _reshape_alias"),
    **_named(_permute, "permute transpose t"),
    **_named(_unsqueeze, "unsqueeze"),
    **_named(_squeeze, "squeeze"),
    **_named(_expand, "expand"),
    **_named(_parts, "slice select split split_with_sizes unbind narrow"),
    **_named(_joined, "cat stack"),
    **_named(_looked_up, "embedding"),
    **_named(_gathered, "gather"),
    **_named(_convolved, "convolution"),
    **_named(
        _attended,
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
    ),
}


def find_rowwise_calls(
    model: nn.Module,
    batch: Any,
    *,
    regions: Sequence[str] | None = None,
    device_name: str | None = None,
    written: Collection[str] = (),
) -> dict[str, RowwiseCall]:
    """Run the model's forward once, without gradients, and return its outermost row-wise calls by module path.

    Args:
        model: the model. It may be under ``DistributedDataParallel``; paths are those of the inner model.
        batch: the arguments of the model: a tensor (one argument), a tuple (positional) or a mapping (keywords).
        regions: patterns of the modules that are planned, as for `plimsoll.tracing.trace.trace`. A module that contains a
            planned module is never returned.
        device_name: the name of a device that this machine lacks. Then the forward runs with fake tensors, as it does for
            a model on the meta device.
        written: the names of the parameters that forward writes in place, such as an embedding with ``max_norm``. They are
            restored.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
        >>> model = nn.Sequential(nn.Sequential(mlp, nn.BatchNorm1d(4)), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        >>> list(find_rowwise_calls(model, torch.ones(32, 4)))
        ['0.0', '1.0']
    """
    model = inner_module(model)
    modules = may_run_in_tiles(model, find_regions(model, regions))
    follower = RowFollower()
    call = split_batch(batch)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    is_fake = on_meta or device_name is not None
    with untouched(model, written), side_effects_kept(call), torch.no_grad(), contextlib.ExitStack() as stack:
        if is_fake:
            mode = stack.enter_context(faked(model))
            stack.enter_context(target_kernels(device_name or "cpu"))
            args, kwargs = fake_batch(lent(call), mode)
        else:
            args, kwargs = private_copy(call)
        with follower.watching(modules), follower:
            model(*args, **kwargs)
    for path, reason in follower.reasons.items():
        _LOG.debug("plimsoll: %s cannot run in tiles: %s", path, reason)
    found = follower.found
    if found and not is_fake:
        with untouched(model, written), side_effects_kept(call), torch.no_grad():
            args, kwargs = private_copy(call)
            with _comparing(found, modules) as differing:
                model(*args, **kwargs)
        found = {path: each for path, each in found.items() if path not in differing}
    return found


@contextlib.contextmanager
def _comparing(found: dict[str, RowwiseCall], modules: dict[str, nn.Module]) -> Iterator[set[str]]:
    """Return a context manager. Inside, each of these calls computes a third of its rows once more, alone. It yields the set of
    paths whose rows then differ by more than rounding.
    """
    differing: set[str] = set()

    def comparer(path: str, call: RowwiseCall) -> Callable[..., None]:
        def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given: dict[str, Any] = {**{str(at): value for at, value in enumerate(args)}, **kwargs}
            rows = next(given[place].shape[dim] for place, dim in call.inputs.items())
            first, count = rows // 3, max(1, rows // 3)
            part = {place: given[place].narrow(dim, first, count) for place, dim in call.inputs.items()}
            own = [part.get(str(at), value) for at, value in enumerate(args)]
            named = {name: part.get(name, value) for name, value in kwargs.items()}
            try:
                with ConstantRandomNumbers() if call.is_random else contextlib.nullcontext():
                    whole = module.forward(*args, **kwargs) if call.is_random else output
                    alone = module.forward(*own, **named)
            except Exception as error:  # noqa: BLE001 - the user's code, which may insist on a number of rows
                _LOG.debug("plimsoll: %s cannot run in tiles: a third of its rows raised %r", path, error)
                differing.add(path)
                return
            pairs = zip(_as_list(whole), _as_list(alone), call.outputs, strict=True)
            if not all(_is_rounding(one.narrow(dim, first, count), other) for one, other, dim in pairs):
                differing.add(path)

        return compare

    hooks = [
        modules[path].register_forward_hook(comparer(path, call), with_kwargs=True) for path, call in found.items()
    ]
    try:
        yield differing
    finally:
        for hook in hooks:
            hook.remove()


def _as_list(output: Any) -> list[torch.Tensor]:
    return list(output) if isinstance(output, tuple) else [output]


def _is_rounding(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors agree to at least half the digits of their dtype."""
    if one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
    norm = one.double().norm()
    return bool((one.double() - other.double()).norm() <= math.sqrt(torch.finfo(one.dtype).eps) * norm) or not norm


def may_run_in_tiles(model: nn.Module, regions: Collection[str]) -> dict[str, nn.Module]:
    """Return the modules that may run in tiles, by path.

    A module that contains a region (planned module) may not, but a region itself may. Hooks on submodules would run once for
    each tile and again in backward, so modules with such submodules are left out too.
    """
    return {
        path: module
        for path, module in model.named_modules()
        if path
        and type(module).forward is not nn.Module.forward  # a ModuleList cannot be called
        and next(module.parameters(), None) is not None
        and not any(region.startswith(f"{path}.") for region in regions)
        and not any(_has_hooks(inner) for inner in module.modules() if inner is not module)
    }


def _has_hooks(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)
