"""The private names of torch that Plimsoll uses. Other files import them from here.

torch may change a private name in any release. These names were seen in torch 2.9 and in the versions of ``TRIED``. If a
version of torch lacks one of them, importing this file raises an error, so that a training step does not fail in the middle.
Private names of a single subject are in that subject's file: FSDP2's objects in ``fsdp2``, the profiler's log in
``meters.memory``, schedules in ``distributed.pipelines.schedules``.
"""

from __future__ import annotations

import functools
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import profiler

from plimsoll.errors import UnsupportedTorch, UntriedTorch

TRIED = ((2, 11), (2, 13), (2, 14), (2, 15))
"""The minor versions of torch that the tests were run with, oldest first. ``docs/versions.md`` says which tests, and when."""
_OLDEST, _NEWEST = (".".join(map(str, version)) for version in (TRIED[0], TRIED[-1]))


def internal(name: str) -> Any:
    """Return the object that torch has under a private, dotted name.

    Raises:
        UnsupportedTorch: this version of torch does not have the name.

    Example:
        >>> internal("torch._C._current_graph_task_id")()
        -1
    """
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise lacking(name) from error


def lacking(name: str) -> UnsupportedTorch:
    """Return the error for a private name that this version of torch does not have."""
    return UnsupportedTorch(
        f"torch {torch.__version__} does not have {name}.",
        why=f"Plimsoll uses a few private names of torch; torch {_OLDEST} to {_NEWEST} have this name",
        next=f"install torch {_OLDEST} to {_NEWEST}, or a Plimsoll that supports this torch",
    )


def is_at_least(major: int, minor: int) -> bool:
    """Return True if this torch has the version ``major.minor`` or a newer one. Pre-releases and local builds of a version
    count as that version.
    """
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    assert found is not None, torch.__version__
    return (int(found[1]), int(found[2])) >= (major, minor)


@functools.cache
def warn_if_untried() -> None:
    """Warn if this torch is newer than the versions in ``TRIED``, once in a process. Each public function that takes a model
    calls this function.

    A missing name raises ``UnsupportedTorch``. A name whose meaning has changed in a newer torch is not detected.
    """
    major, minor = TRIED[-1]
    if is_at_least(major, minor + 1):
        warnings.warn(
            f"torch {torch.__version__} is newer than every version that Plimsoll was tested with ({_OLDEST} to {_NEWEST}).\n"
            "  why   Plimsoll uses a few private names of torch, and their meaning may have changed\n"
            f"  next  check gradients and peak with plimsoll.verify, or install torch {_NEWEST}; to silence this warning,\n"
            '        warnings.filterwarnings("ignore", category=plimsoll.errors.UntriedTorch)',
            UntriedTorch,
            stacklevel=_frames_of_ours(),
        )


def _frames_of_ours() -> int:
    """Return how many frames of the call stack belong to Plimsoll, from the caller up to the first frame of other code. A
    warning then names that code.
    """
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "plimsoll":
        depth, frame = depth + 1, frame.f_back
    return depth


current_autograd_node: Callable[[], Any] = internal("torch._C._current_autograd_node")
"""Return the autograd node whose backward runs in this thread, or ``None`` outside of backward."""
current_graph_task: Callable[[], int] = internal("torch._C._current_graph_task_id")
"""Return the number of the backward that runs in this thread, or -1 outside of backward."""
without_torch_function: Callable[[], AbstractContextManager[None]] = internal("torch._C.DisableTorchFunction")
sequence_number: Callable[[], int] = internal("torch._C._autograd._get_sequence_nr")
"""Return the number of autograd nodes that this thread has made."""
is_autocast_on: Callable[[], bool] = internal("torch._C._is_any_autocast_enabled")
"""Return whether autocast is on for any kind of device.

``torch.is_autocast_enabled`` is slower, as it parses the kind's name.
"""
below_autograd: Callable[[], AbstractContextManager[None]] = internal("torch._C._AutoDispatchBelowAutograd")
"""Return a context manager that runs ops in its block below autograd (autograd does not record them).

Recipes run in this way.
"""

_registered: Callable[[], list[str]] = internal("torch._C._dispatch_get_all_op_names")


def existing_ops() -> frozenset[str]:
    """Return the names of all ops that torch and the imported libraries have registered so far, in the form of traces: ``mm``
    for ``aten::mm.out``, ``mylib.scan`` for ``mylib::scan``.
    """
    schemas = (name.partition(".")[0].partition("::") for name in _registered())
    return frozenset(name if space == "aten" else f"{space}.{name}" for space, _, name in schemas)


push_saved_hooks: Callable[[Any, Any], None] = internal("torch._C._autograd._push_saved_tensors_default_hooks")
pop_saved_hooks: Callable[[], None] = internal("torch._C._autograd._pop_saved_tensors_default_hooks")
top_saved_hooks: Callable[[bool], Any] = internal("torch._C._autograd._top_saved_tensors_default_hooks")
"""Return the active pair of saved-tensor hooks, or ``None``.

With the argument True, return the pair even if hooks are ignored while tracing.
"""
are_saved_hooks_enabled: Callable[[], bool] = internal("torch._C._autograd._saved_tensors_hooks_is_enabled")
peek_functorch: Callable[[], Any] = internal("torch._C._functorch.peek_interpreter_stack")
"""Return the innermost ``torch.func`` transform that is active, or ``None``."""
FUNCTION_SPACES: tuple[Any, ...] = tuple(
    internal(f"torch._C.{name}") for name in ("_nn", "_linalg", "_special", "_fft", "_sparse", "_nested")
)
"""Modules with functions of torch that do not have a public name."""
TensorBase: Any = internal("torch._C.TensorBase")
"""The class with the methods that ``torch.Tensor`` inherits."""
are_overrides_on: Callable[[], bool] = internal("torch._C._is_torch_function_enabled")
"""Return whether functions call ``__torch_function__``.

Types that override ``__torch_function__`` switch this off when they call the original function.
"""
count_function_modes: Callable[[], int] = internal("torch._C._len_torch_function_stack")
function_mode_at: Callable[[int], Any] = internal("torch._C._get_function_stack_at")
"""Return the function mode at a place of the stack of modes. The last mode is called first."""
push_function_mode: Callable[[Any], None] = internal("torch._C._push_on_torch_function_stack")
pop_function_mode: Callable[[], Any] = internal("torch._C._pop_torch_function_stack")
dispatch_mode_at: Callable[[int], Any] = internal("torch._C._get_dispatch_stack_at")
get_dispatch_mode: Callable[[Any], Any] = internal("torch._C._get_dispatch_mode")
count_dispatch_modes: Callable[[], int] = internal("torch._C._len_torch_dispatch_stack")
TRACING_MODES: tuple[Any, ...] = tuple(
    internal(f"torch._C._TorchDispatchModeKey.{mode}") for mode in ("FAKE", "PROXY", "FUNCTIONAL")
)
get_jit_tracing_state: Callable[[], Any] = internal("torch._C._get_tracing_state")
is_profiler_on: Callable[[], bool] = internal("torch._C._autograd._profiler_enabled")
"""Return whether any profiler runs. The profilers of our own meters count too."""
is_storage_gone: Callable[[int], bool] = internal("torch._C.StorageBase._expired")
"""Return whether the storage that a weak reference points to was freed. The argument is the address in the reference."""
_count_uses: Callable[[int], int] = internal("torch._C._storage_Use_Count")
has_storage: Callable[[torch.Tensor], bool] = internal("torch._C._has_storage")
preserving_versions: Callable[[Sequence[torch.Tensor]], AbstractContextManager[None]] = internal(
    "torch.autograd.grad_mode._unsafe_preserve_version_counter"
)
without_modes: Callable[[], AbstractContextManager[Any]] = internal(
    "torch.utils._python_dispatch._disable_current_modes"
)
excluding_keys: Callable[[Any], AbstractContextManager[None]] = internal("torch._C._ExcludeDispatchKeyGuard")
dispatch_keys: Callable[[Any], Any] = internal("torch._C.DispatchKeySet")
AUTOCAST_CPU: Any = internal("torch._C.DispatchKey.AutocastCPU")
at_end_of_backward: Callable[[Callable[[], None]], None] = internal(
    "torch.autograd.Variable._execution_engine.queue_callback"
)
"""Queue a function that is called when the running backward ends."""
resolve_group: Callable[[str], Any] = (
    internal("torch._C._distributed_c10d._resolve_process_group")
    if torch.distributed.is_available()
    else lambda name: None
)
"""Return the process group that has this name. Functional collectives use such names."""

internal("torch.autograd.forward_ad._current_level")
internal("torch.autograd.profiler._is_profiler_enabled")


def times_compiled() -> int:
    """Return how often ``torch.compile`` has compiled something in this process, including recompilations."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")  # importing it takes seconds
    return 0 if dynamo is None else sum(dynamo.FRAME_COMPILE_COUNTER.values())  # seen in torch 2.9 to 2.15


def count_holders(tensor: torch.Tensor) -> int:
    """Return the reference count of the tensor's storage.

    Compare the number only with other results of this function, because reading the count adds a reference.
    """
    return _count_uses(tensor.untyped_storage()._cdata)


def is_in_forward_ad() -> bool:
    """Return True if forward-mode differentiation is active."""
    return torch.autograd.forward_ad._current_level >= 0


def is_being_traced() -> bool:
    """Return True if ops are recorded (by jit.trace, make_fx, export or with fake tensors) instead of being run in training."""
    return get_jit_tracing_state() is not None or (
        count_dispatch_modes() > 0 and any(get_dispatch_mode(mode) is not None for mode in TRACING_MODES)
    )


def is_profiled() -> bool:
    """Return True if a profiler of the user runs. Our own meters do not set this flag."""
    return bool(profiler._is_profiler_enabled)


def free_pinned_memory() -> None:
    """Return the unused pinned memory of the host allocator to the system. CPU builds of torch do not have this allocator."""
    internal("torch._C._host_emptyCache")()


def free_cublas_workspaces() -> None:
    """Return cuBLAS's workspaces to torch's allocator.

    The next product allocates new ones. Call this only in builds with CUDA.
    """
    internal("torch._C._cuda_clearCublasWorkspaces")()


def parametrized_tensors() -> dict[Any, Any]:
    """Return the cache of ``torch.nn.utils.parametrize.cached``, a dictionary of computed weights that torch replaces."""
    found: dict[Any, Any] = internal("torch.nn.utils.parametrize._cache")
    return found
