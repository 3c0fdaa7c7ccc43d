"""Find the modules that torch.compile has compiled in a model, and compile them again with a partitioner of Plimsoll.

A *unit* is a module that was compiled: the model, or its blocks one by one. The options of the user's compilation, and whether
it allows graph breaks and dynamic sizes, are read from the compiled call that torch.compile left. So the new compilation
differs from the user's only in the partitioner, which is passed to this compilation only. When the plan is removed, the user's
compiled call is restored with its cached code.

Private to torch and seen in torch 2.9 to 2.15: ``Module._compiled_call_impl``, ``OptimizedModule``, the chain of
``_torchdynamo_orig_backend``, the context in the closure of a compiled function, ``compile_fx``'s ``inner_compile``,
``invoke_subgraph_placeholder`` and how Dynamo finds it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from plimsoll.errors import InvalidModel, InvalidOption
from plimsoll.tracing.ddp import is_compiled_wrapper, layers_of
from plimsoll.tracing.refusals import is_disabled, refuse_compiler, without_compiled
from plimsoll.tracing.regions import around, find_regions

INDUCTOR = "inductor"
_KINDS = {"fullgraph": bool, "dynamic": bool | None, "options": Mapping | None, "mode": str | None}
"""A mapping from the keywords of torch.compile that a plan supports to their types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCall:
    """Data: the arguments of the user's call of torch.compile."""

    backend: str = INDUCTOR
    options: Mapping[str, Any] = field(default_factory=dict)
    fullgraph: bool = False
    dynamic: bool | None = None

    @classmethod
    def read(cls, compiled: Any) -> CompileCall:
        """Return the arguments of the torch.compile call that compiled this function.

        Raises:
            InvalidModel: a plan manages the function's module.
        """
        if isinstance(compiled, PlannedCall):
            raise InvalidModel(
                f"A plan already compiles {type(compiled.module).__name__}.",
                why="two plans cannot decide about the same tensors",
                next="call remove() on the handle of the first plan",
            )
        if isinstance(compiled, functools.partial):
            compiled = compiled.args[0] if compiled.func is _apart else compiled.func
        context = inspect.getclosurevars(compiled).nonlocals.get("self")
        backend = getattr(context, "callback", None)
        while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
            backend = inner
        name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", type(backend).__name__)
        return cls(
            backend=str(name),
            options=dict(getattr(backend, "config", {})),
            fullgraph=bool(getattr(context, "fullgraph", False)),
            dynamic=getattr(context, "_dynamic", None),
        )

    @classmethod
    def of(cls, options: Any) -> CompileCall:
        """Return the arguments of torch.compile that the option ``compile=`` means. The option is True, or a dict with
        torch.compile's own keywords.

        Raises:
            InvalidOption: torch.compile does not have a keyword or refuses a value, or another backend is given.
        """
        given = dict(options) if isinstance(options, Mapping) else {}
        unknown = given.keys() - _KINDS.keys()
        wrong = [name for name in _KINDS.keys() & given.keys() if not isinstance(given[name], _KINDS[name])]
        if unknown or wrong or (not isinstance(options, Mapping) and options is not True):
            raise InvalidOption(
                f"compile={options!r} is not valid.",
                why=f"compile= does not accept {', '.join(sorted(unknown))}"
                if unknown
                else f"{wrong[0]} cannot have type {type(given[wrong[0]]).__name__}"
                if wrong
                else "compile= is True, or a dict of keyword arguments for torch.compile",
                next='pass compile=True or a dict such as compile={"dynamic": False}, with fullgraph, dynamic, mode or options',
            )
        try:
            return cls.read(torch.compile(_nothing, **given))
        except (RuntimeError, TypeError) as error:
            raise InvalidOption(
                f"torch.compile does not accept compile={options!r}.",
                why=str(error).partition("\n")[0],
                next="pass keyword arguments and values that torch.compile accepts",
            ) from error

    @property
    def key(self) -> str:
        """A text that is equal for two objects if torch.compile compiles in the same way with them."""
        return repr((self.backend, sorted(self.options.items(), key=str), self.fullgraph, self.dynamic))

    def compile(self, backend: Callable[..., Any] | None = None, **more: Any) -> Callable[..., Any]:
        """Return a function that calls a module (its first argument) as compiled code, with these options and ``more``.

        ``backend`` replaces inductor. Options that the user has set take precedence over ``more``.
        """
        given = {name: value for name, value in self.options.items() if value is not None}
        how = {"options": {**more, **given} or None} if backend is None else {"backend": backend}
        return self._compile(**how)

    def _compile(self, **how: Any) -> Callable[..., Any]:
        """Return a function that calls a module (its first argument) as compiled code. It is compiled separately from the
        user's compilations, without a recompile limit, and with ``nested_compile_region`` inlined.

        Beyond the limit, torch would run the module uncompiled, which keeps everything. Nested regions become part of the
        surrounding graph, where each use is decided on separately.
        """
        compile_: Any = torch.compile
        known = inspect.signature(compile_).parameters
        has_limit = "recompile_limit" in known and "isolate_recompiles" in known  # torch 2.13
        if "isolate_recompiles" in known:  # torch 2.12
            how["isolate_recompiles"] = True
        if has_limit:
            how["recompile_limit"] = sys.maxsize
        compiled: Callable[..., Any] = compile_(_call_of, fullgraph=self.fullgraph, dynamic=self.dynamic, **how)
        return functools.partial(_apart, compiled, None if has_limit else sys.maxsize)

    def captured(self, partitioner: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function like the result of `compile`. When it compiles a module, ``partitioner`` splits the graphs, and
        ``run`` makes functions from the parts in place of inductor.
        """
        from torch._inductor.compile_fx import compile_fx  # takes seconds to import

        def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            patches = {**self.options, "custom_partitioner_fn": partitioner, "triton.cudagraphs": False}
            with torch._functorch.config.patch(enable_autograd_cache=False):
                return compile_fx(module, list(inputs), inner_compile=run, config_patches=patches)

        return self.compile(backend)


def _call_of(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module as ``Module.__call__`` does, and return its output. All modules that share a compilation are called through
    this one function.
    """
    return module._call_impl(*args, **kwargs)


def _apart(compiled: Callable[..., Any], limit: int | None, *args: Any, **kwargs: Any) -> Any:
    """Call compiled code without a recompile limit, and return its output.

    ``torch.compiler.nested_compile_region`` is treated as ordinary code.
    """
    builder: Any = importlib.import_module("torch._dynamo.variables.builder")
    regions: Any = importlib.import_module("torch._higher_order_ops.invoke_subgraph")
    config = torch._dynamo.config  # its patch() makes a class in every call, which is slower than everything else here
    limits = config.recompile_limit, config.accumulated_recompile_limit
    is_region, region = builder.is_invoke_subgraph, regions.invoke_subgraph_placeholder
    _own.count(1)
    builder.is_invoke_subgraph, regions.invoke_subgraph_placeholder = _is_never, _called
    # counts everything that shares `_call_of`, including plans that were removed
    config.accumulated_recompile_limit = sys.maxsize
    if limit is not None:
        config.recompile_limit = limit
    try:
        return compiled(*args, **kwargs)
    finally:
        _own.count(-1)
        config.recompile_limit, config.accumulated_recompile_limit = limits
        builder.is_invoke_subgraph, regions.invoke_subgraph_placeholder = is_region, region


class _Own:
    """Counts the calls, in all threads, that are inside of code which Plimsoll has compiled. ``is_running`` says whether such a
    call is running.
    """

    is_running = False

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0

    def count(self, entered: int) -> None:
        """Count an entry (``entered`` is 1) or an exit (-1)."""
        with self._lock:
            self._count += entered
            self.is_running = self._count > 0


_own = _Own()


def _is_compiled_by_others() -> bool:
    """Return True if torch.compile is tracing now, and not for a compilation that Plimsoll has started in any thread."""
    return torch.compiler.is_compiling() and not _own.is_running


@contextlib.contextmanager
def as_ours() -> Iterator[None]:
    """Return a context manager. Compilations inside its block count as Plimsoll's own, so they may reach modules under
    a plan.
    """
    _own.count(1)
    try:
        yield
    finally:
        _own.count(-1)


class _RefuseOthers:
    """A forward pre-hook that raises if a compilation which is not Plimsoll's traces the module.

    If the user's torch.compile traces a module, it does not run the module's compiled call, and so ignores the plan. Copies and
    pickles of the module get a hook that does nothing.
    """

    def __init__(self, *, is_at_work: bool = False) -> None:
        self._is_at_work = is_at_work

    def __call__(self, module: nn.Module, _: Any) -> None:
        """Refuse the call if another compilation is tracing the module.

        Raises:
            InvalidModel: another compilation is tracing the module. The error arrives in the caller of the compiled code.
        """
        if self._is_at_work and _is_compiled_by_others():
            refuse_compiler(module, is_compiled=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> _RefuseOthers:
        return _RefuseOthers()

    def __reduce__(self) -> tuple[type[_RefuseOthers], tuple[()]]:
        return (_RefuseOthers, ())


def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Takes the place of the function that marks a ``nested_compile_region`` for Dynamo: call ``function`` directly, so that
    its code becomes part of the surrounding graph.
    """
    return function(*args, **kwargs)


def _is_never(_: object) -> bool:
    return False


def _nothing() -> None:
    """Do nothing. torch.compile is called on this function only to find out what its options mean."""


class PlannedCall:
    """The compiled call that a plan installs in place of the user's. It raises if a torch.compile around the model
    traces it.
    """

    def __init__(self, compiled: Callable[..., Any], module: nn.Module) -> None:
        self._compiled = compiled
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module as the plan has compiled it, and return its output.

        Raises:
            InvalidModel: another compilation is tracing the module. The error arrives in the caller of the compiled code.
        """
        if _is_compiled_by_others():
            refuse_compiler(self.module, is_compiled=True)
        if torch.is_grad_enabled() and _is_switched_off():
            warnings.warn(
                f"plimsoll: torch.compile is switched off, but {type(self.module).__name__} trains under a plan for compiled "
                "code. So it keeps all its activations and may exceed the budget",
                stacklevel=2,
            )
        return self._compiled(self.module, *args, **kwargs)


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Data about a module that was compiled. ``wrapper`` is the ``OptimizedModule`` around it, or ``None`` if it was compiled
    in place.
    """

    path: str
    module: nn.Module
    call: CompileCall
    wrapper: nn.Module | None = None

    def holds(self, region: str) -> bool:
        """Return True if the region (planned module) with this path is compiled together with this module."""
        return not self.path or region == self.path or region.startswith(self.path + ".")

    def touches(self, region: str) -> bool:
        """Return True if this module contains the region, or is inside the region."""
        return self.holds(region) or not region or self.path.startswith(region + ".")

    def local(self, region: str) -> str:
        """Return the path of a region inside this module, relative to this module."""
        return region[len(self.path) :].lstrip(".") if self.path else region


def find_units(model: nn.Module) -> tuple[Unit, ...]:
    """Return the compiled modules of a model that support a plan. Their paths are paths in the unwrapped model, and none of
    them is inside another.

    Compiled modules that do not support a plan are left out, as long as at least one region is outside of them.

    Raises:
        InvalidModel: the modules are compiled for another backend, or with a partitioner or a memory budget of the user's own.
            Or ``DistributedDataParallel`` was compiled in place.
    """
    *wrappers, inner = layers_of(model)
    for wrapper in wrappers:
        if is_compiled_wrapper(wrapper):
            # While its compiled call is replaced, the original is stored on the module.
            whole = Unit("", inner, CompileCall.read(inner._compiled_call_impl or wrapper.forward), wrapper)
            _refuse(_refusal(whole))
            return (whole,)
        if wrapper._compiled_call_impl is not None:
            _refuse(_compiled_reducer())
    found: list[Unit] = []
    for name, module in inner.named_modules():
        if any(not unit.path or name.startswith(unit.path + ".") for unit in found):
            continue
        if module._compiled_call_impl is not None:
            found.append(Unit(name, module, CompileCall.read(module._compiled_call_impl)))
        elif is_compiled_wrapper(module):
            found.append(Unit(name, layers_of(module)[1], CompileCall.read(module.forward), module))
    refused = {unit: refusal for unit in found if (refusal := _refusal(unit))}
    if refused and all(any(unit.touches(region) for unit in refused) for region in find_regions(inner)):
        _refuse(next(iter(refused.values())))
    return tuple(unit for unit in found if unit not in refused)


def split_regions(
    model: nn.Module, units: Sequence[Unit], patterns: Sequence[str] | None
) -> tuple[dict[str, tuple[str, ...]], dict[str, nn.Module]]:
    """Return two mappings: from the path of a compiled module (unit) to the paths of the regions inside that are compiled with
    it, and from path to module for the regions that run eagerly.

    A region is a planned module. A unit without a region is a region itself. If a region has units inside, the parts around the
    units replace it. Parts of a unit that torch.compiler.disable excludes run eagerly.
    """
    paths = [unit.path for unit in units]
    held: dict[str, tuple[str, ...]] = dict.fromkeys(paths, ())
    eager: dict[str, nn.Module] = {}
    for name, module in find_regions(model, patterns).items():
        inner = {path for path in paths if name == "" or path.startswith(name + ".")}
        owner = next((unit for unit in units if unit.holds(name)), None)
        if owner is not None:
            held[owner.path] += (name,)
        elif inner:
            eager |= around(module, name, inner)
            held |= {path: (path,) for path in inner}
        else:
            eager[name] = module
    for unit in units:
        out = [name for name, module in unit.module.named_modules() if name and is_disabled(module.forward)]
        outermost = [name for name in out if not any(name.startswith(other + ".") for other in out)]
        eager |= {".".join(filter(None, (unit.path, name))): unit.module.get_submodule(name) for name in outermost}
    if patterns is None:
        held = {path: names or (path,) for path, names in held.items()}
    return held, without_compiled(eager)


def _refuse(refusal: InvalidModel | None) -> None:
    if refusal is not None:
        raise refusal


def _compiled_reducer() -> InvalidModel:
    return InvalidModel(
        "DistributedDataParallel was compiled in place by ddp.compile().",
        why="that also compiles the wrapper's forward, but a plan can replace only the compiled code of the model inside",
        next="call layer.compile() for each block before wrapping, or use torch.compile(ddp)",
    )


def _refusal(unit: Unit) -> InvalidModel | None:
    """Return an error that says why a unit (compiled module) does not support a plan, or None if it supports one."""
    what = f"{type(unit.module).__name__} ({unit.path})" if unit.path else type(unit.module).__name__
    if unit.call.backend != INDUCTOR:
        return InvalidModel(
            f"{what} is compiled by torch.compile for the backend {unit.call.backend!r}.",
            why="a plan is carried out by inductor's partitioner, and this backend does not use a partitioner",
            next="call torch.compile(model) with the default backend, or train the model uncompiled",
        )
    of_process = getattr(sys.modules.get("torch._inductor.config"), "custom_partitioner_fn", None)
    if (unit.call.options.get("custom_partitioner_fn") or of_process) is not None:
        return InvalidModel(
            f"{what} is compiled with its own custom_partitioner_fn.",
            why="only one partitioner can decide what a graph saves, and the plan installs one",
            next="remove custom_partitioner_fn from the options of torch.compile and from torch._inductor.config",
        )
    if torch._functorch.config.activation_memory_budget != 1.0:
        return InvalidModel(
            "torch._functorch.config.activation_memory_budget is set.",
            why="it decides about the same tensors as the plan, with a share of each graph's saved bytes as its limit",
            next="set it back to 1.0; the plan enforces a budget in bytes instead",
        )
    return None


def _is_switched_off() -> bool:
    """Return True if compiled code runs uncompiled.

    That is so under ``torch.compiler.set_stance("force_eager")`` and with ``TORCH_COMPILE_DISABLE=1``.
    """
    stance = torch._dynamo.eval_frame._stance.stance  # private, seen in torch 2.9 to 2.15
    return bool(stance == "force_eager" or torch._dynamo.config.disable)


def check_compiler(device: torch.device) -> None:
    """Raise an error if torch.compile cannot compile here. This is called before a compiled model is planned.

    Raises:
        InvalidModel: torch.compile is switched off, or a C++ compiler for the CPU is missing.
    """
    if _is_switched_off():
        raise InvalidModel(
            "torch.compile is switched off here.",
            why='torch.compiler.set_stance("force_eager") or TORCH_COMPILE_DISABLE=1 runs the model uncompiled, but a plan for '
            "a compiled model needs the compiled graphs",
            next="switch torch.compile on, or plan the uncompiled model",
        )
    if device.type != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise InvalidModel(
            "torch.compile cannot find a C++ compiler on this machine.",
            why="on a CPU, inductor compiles kernels with a C++ compiler, and planning compiles and runs the plan once",
            next="install g++ (apt-get install g++), or name a compiler in the environment: CXX=clang++",
        ) from error


@contextlib.contextmanager
def in_place(units: Sequence[Unit], made: Callable[[Unit], Callable[..., Any] | None]) -> Iterator[None]:
    """Return a context manager. Inside its block, ``made(unit)`` replaces the compiled call of each unit.

    If ``made`` returns ``None``, the uncompiled module replaces it.
    """
    with contextlib.ExitStack() as stack:
        for unit in units:
            stack.callback(install(unit, made(unit)))
        yield


def install_alone(unit: Unit, function: Callable[..., Any]) -> Callable[[], None]:
    """Replace a unit's compiled call by ``function``, as `install` does, and add a hook that refuses all other compilations of
    the module.

    Return a function that undoes both.
    """
    put_back, hook = install(unit, function), unit.module.register_forward_pre_hook(_RefuseOthers(is_at_work=True))

    def undo() -> None:
        hook.remove()
        put_back()

    return undo


def install(unit: Unit, function: Callable[..., Any] | None) -> Callable[[], None]:
    """Replace a unit's compiled call by ``function``, or by the uncompiled module if ``function`` is ``None``.

    Return a function that restores the compiled call.
    """
    module, wrapper = unit.module, unit.wrapper
    before = module._compiled_call_impl
    forward = None if wrapper is None else wrapper.forward
    module._compiled_call_impl = function
    if wrapper is not None:
        wrapper.forward = functools.partial(nn.Module.__call__, layers_of(wrapper)[1])

    def put_back() -> None:
        module._compiled_call_impl = before
        if wrapper is not None:
            wrapper.forward = forward  # type: ignore[assignment]

    return put_back
