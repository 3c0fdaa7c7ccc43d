"""Watches which Python code a call runs: every code object, the instructions of it that ran, and every C function called.

`HostState` derives from it what that code can have read. The watch uses Python's own tracing (``sys.settrace``,
``sys.setprofile``), which slows the call down by some milliseconds, so it is on for one call of a region.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, ModuleType, TracebackType
from typing import Any

import torch

_TORCH = f"{Path(torch.__file__).parent}/"
_OURS = (f"{Path(__file__).parents[1]}/", "<plimsoll")
"""How the names of files begin that hold our code, or code that we generated."""
_OF_THE_GUARD = (*_OURS, f"{_TORCH}overrides.py", contextlib.__file__)
"""How the names of files begin whose code runs because torch calls are compared while the code is watched.

A context manager of the user's, made by ``contextlib``, cannot be followed therefore, and counts as an obstacle.
"""
_TRUSTED = tuple(
    f"{_TORCH}{name}"
    for name in (
        *("nn/", "overrides.py", "_tensor.py", "_VF.py", "_jit_internal.py", "jit/_trace.py", "backends/", "_ops.py"),
        *("autograd/function.py", "utils/_contextlib.py", "_higher_order_ops/"),
    )
)
"""Code of torch whose calls of C functions read no state but torch's flags, which are part of a call's signature."""

_PURE_BUILTINS = frozenset(
    {
        *(
            "abs",
            "all",
            "any",
            "bool",
            "callable",
            "chr",
            "divmod",
            "getattr",
            "hasattr",
            "hash",
            "isinstance",
            "issubclass",
        ),
        *("iter", "len", "max", "min", "next", "ord", "pow", "print", "repr", "round", "setattr", "sorted", "sum"),
    }
)
# Modules of torch's ops; private names seen in torch 2.11 to 2.15.
_PURE_MODULES = frozenset(
    {"math", "_operator", "_abc", "_functools", "torch._C._nn", "torch._C._fft", "torch._C._linalg"}
)
_PURE_OWNERS = (str, bytes, int, float, tuple, list, dict, set, frozenset)
"""Their methods depend on their contents alone."""
_TORCH_QUESTIONS = frozenset(
    {"_get_tracing_state", "_is_tracing", "is_grad_enabled", "is_autocast_enabled", "_has_torch_function"}
)
"""What code asks torch: the answers are the same in every call that recipes serve."""
_TENSOR_QUESTIONS = frozenset(
    {
        *(
            "__len__",
            "device",
            "dim",
            "dtype",
            "element_size",
            "get_device",
            "is_complex",
            "is_contiguous",
            "is_cpu",
            "is_cuda",
        ),
        *(
            "is_floating_point",
            "is_meta",
            "is_nested",
            "is_quantized",
            "is_sparse",
            "itemsize",
            "layout",
            "nbytes",
            "ndim",
        ),
        *("ndimension", "nelement", "numel", "requires_grad", "shape", "size", "storage_offset", "stride"),
    }
)
"""Methods and properties of tensors that return what the call's signature and the ops before decide."""


class ExecutedCode:
    """A context in which a call of a region is watched. ``obstacle`` says what ran that may depend on more than can be seen.

    ``ops`` are the names of the torch functions that are known to return tensors.
    """

    def __init__(self, ops: frozenset[str]) -> None:
        self.obstacle = ""
        self.globals: dict[CodeType, dict[str, Any]] = {}
        """The global names that each code object runs with."""
        self._offsets: dict[CodeType, set[int]] = defaultdict(set)
        self._ops = ops
        self._is_on = False

    def __enter__(self) -> ExecutedCode:
        if sys.gettrace() is not None or sys.getprofile() is not None:
            self.obstacle = "a debugger, a profiler or a measurement of coverage is on"
            return self
        self._is_on = True
        sys.settrace(self._trace)
        sys.setprofile(self._profile)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_on:
            sys.setprofile(None)
            sys.settrace(None)
            self._is_on = False

    def judge(self, asked: Iterable[Any]) -> None:
        """Note an obstacle if a torch function that returned no tensor may have read data."""
        for function in asked:
            named = getattr(function, "__self__", None) if function.__name__ == "__get__" else function
            name = getattr(named, "__name__", "")
            if name not in _TENSOR_QUESTIONS and not self.obstacle:
                self.obstacle = f"it asks tensors for {name}"

    def read_names(self, code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
        """The global names that the code has read, and the names that may be attributes."""
        global_names, attributes, obstacle = _names_of(code, frozenset(self._offsets[code]))
        self.obstacle = self.obstacle or obstacle
        return global_names, attributes

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Called when a frame begins."""
        code = frame.f_code
        if code.co_filename.startswith(_OF_THE_GUARD):
            return None
        self.globals.setdefault(code, frame.f_globals)
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._trace_opcode

    def _trace_opcode(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self._offsets[frame.f_code].add(frame.f_lasti)
        return self._trace_opcode

    def _profile(self, frame: FrameType, event: str, function: Any) -> None:
        """Called when a C function begins."""
        if event == "c_call" and not self.obstacle and not self._is_pure(frame.f_code.co_filename, function):
            self.obstacle = f"{frame.f_code.co_qualname} calls {function.__qualname__}"

    def _is_pure(self, caller: str, function: BuiltinFunctionType) -> bool:
        """Whether what a C function returns depends on its arguments alone, or is a tensor."""
        if caller.startswith((*_OURS, *_TRUSTED)):
            return True
        owner, name = function.__self__, function.__name__
        if isinstance(owner, torch.Tensor):
            return name in self._ops or name in _TENSOR_QUESTIONS
        if isinstance(owner, ModuleType):
            module = owner.__name__
            return module in _PURE_MODULES or (module == "builtins" and name in _PURE_BUILTINS) or _is_question(name)
        if owner is None or type(owner).__name__.startswith("pybind11"):
            return name in self._ops or _is_question(name)
        return isinstance(owner, _PURE_OWNERS) or (isinstance(owner, type) and issubclass(owner, _PURE_OWNERS))


@functools.lru_cache(maxsize=512)
def _names_of(code: CodeType, offsets: frozenset[int]) -> tuple[frozenset[str], frozenset[str], str]:
    """Global names, names that may be attributes, and an obstacle, of the instructions at these offsets.

    Strings among the constants count as attributes: ``getattr(x, "name")``.
    """
    global_names: set[str] = set()
    attributes: set[str] = set()
    obstacle = ""
    for instruction in dis.get_instructions(code):
        if offsets and instruction.offset not in offsets:
            continue
        name, value = instruction.opname, instruction.argval
        if name.startswith("IMPORT_"):
            obstacle = f"{code.co_qualname} imports a module"
        elif name == "BUILD_STRING" and not is_torchs(code):
            obstacle = f"{code.co_qualname} makes a string, which may be the name of an attribute"
        elif name == "LOAD_CONST":
            constants = value if isinstance(value, tuple) else (value,)
            attributes |= {text for text in constants if isinstance(text, str)}
        elif name in ("LOAD_GLOBAL", "LOAD_NAME"):
            global_names.add(value)
        elif name in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            if value == "__dict__" and not is_torchs(code):
                obstacle = f"{code.co_qualname} reads all attributes of an object"
            attributes.add(value)
    return frozenset(global_names), frozenset(attributes - {"__dict__"}), obstacle


def _is_question(name: str) -> bool:
    return name in _TORCH_QUESTIONS or name.startswith("_has_torch_function")


def is_torchs(code: CodeType) -> bool:
    """Whether it is code of torch itself."""
    return code.co_filename.startswith(_TORCH)
