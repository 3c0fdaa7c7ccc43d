"""Plans for JAX beside hand-written policies of ``jax.checkpoint``, for a scanned decoder in flax.nnx and in equinox.

    PYTHONPATH=src:tests/support python -m benchmarks.jax_policies [flax.nnx | equinox] [policies | budgets]

Memory is XLA's own figure for the compiled gradient. Beside it stands what the process allocates in one run beyond the
gradients that it returns: the highest resident memory less that before, with an allocator that gives every block of 64 KiB
back. Seconds are the process's CPU time per gradient on one thread; the two of a pair run in turns, and a ratio is the median
over the pairs' ratios. Every policy is met at its own memory: the plan's budget is what the policy takes.
"""

from __future__ import annotations

import ctypes
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from benchmarks.machine import page_head, versions
from benchmarks.page import format_table
from plimsoll.integrations import jax as pj
from plimsoll.units import MIB

WIDTH, HEADS, BLOCKS, WORDS, LENGTH, ROWS = 192, 4, 12, 512, 128, 4
_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
_PAIRS = 9
_MMAP_THRESHOLD = -3
"""What glibc calls the setting from which size on a block is the system's, and given back at once."""
_named = jax.checkpoint_policies.save_only_these_names
_QKV = ("query_proj", "key_proj", "value_proj")
_DOTS = (*_QKV, "out_proj")
POLICIES: dict[str, Any] = {
    "everything_saveable": jax.checkpoint_policies.everything_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "MaxText minimal": _named(*_DOTS, "mlpwi", "mlpwo"),
    "MaxText minimal_with_context": _named(*_DOTS, "mlpwi", "mlpwo", "context"),
    "MaxText save_dot_with_context_except_mlp": _named(*_DOTS, "context"),
    "MaxText save_dot_except_mlpwi": _named(*_DOTS, "mlpwo"),
    "MaxText save_dot_except_mlp": _named(*_DOTS),
    "MaxText save_qkv_proj": _named(*_QKV),
    "MaxText save_out_proj": _named("out_proj"),
}
"""MaxText's (``src/maxtext/layers/decoders.py``) without those that quantize, and those that offload: a CPU holds the same."""


def block(x: jax.Array, parts: Any, norms: tuple[Any, Any]) -> jax.Array:
    """One block of a decoder on any library's linear layers, with MaxText's names."""
    query, key, value, out, up, down = parts
    rows, length, _ = x.shape
    h = norms[0](x)
    q, k, v = (
        checkpoint_name(layer(h), f"{name}_proj").reshape(rows, length, HEADS, -1)
        for layer, name in ((query, "query"), (key, "key"), (value, "value"))
    )
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / (WIDTH // HEADS) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    context = checkpoint_name(jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v), "context")
    x = x + checkpoint_name(out(context.reshape(x.shape)), "out_proj")
    h = jax.nn.gelu(checkpoint_name(up(norms[1](x)), "mlpwi"))
    return x + checkpoint_name(down(h), "mlpwo")


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        sizes = [(WIDTH, WIDTH)] * 4 + [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
        self.parts = nnx.List([nnx.Linear(a, b, use_bias=False, rngs=rngs) for a, b in sizes])
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return block(x, self.parts, self.norms)


class EquinoxBlock(eqx.Module):
    parts: list[eqx.nn.Linear]
    norms: list[eqx.nn.LayerNorm]

    def __init__(self, key: jax.Array) -> None:
        sizes = [(WIDTH, WIDTH)] * 4 + [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
        keys = jax.random.split(key, len(sizes))
        self.parts = [eqx.nn.Linear(a, b, use_bias=False, key=k) for (a, b), k in zip(sizes, keys, strict=True)]
        self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(2)]

    def __call__(self, x: jax.Array) -> jax.Array:
        over = [jax.vmap(jax.vmap(each)) for each in (*self.parts, *self.norms)]
        return block(x, over[:6], (over[6], over[7]))


def decoder(library: str) -> tuple[Callable[..., Any], Any]:
    """A loss of (parameters, words, policy), and its parameters."""
    ends = jax.random.normal(jax.random.key(1), (WORDS, WIDTH)) * 0.02
    if library == "flax.nnx":
        blocks = nnx.vmap(NnxBlock, in_axes=0)(nnx.Rngs(0).split(BLOCKS))
        graph, stacked = nnx.split(blocks)
        merge = lambda params: nnx.merge(graph, params)  # noqa: E731
    else:
        whole = eqx.filter_vmap(EquinoxBlock)(jax.random.split(jax.random.key(0), BLOCKS))
        stacked, static = eqx.partition(whole, eqx.is_array)
        merge = lambda params: eqx.combine(params, static)  # noqa: E731

    def loss(params: Any, words: jax.Array, policy: Any = None) -> jax.Array:
        def body(x: jax.Array, each: Any) -> tuple[jax.Array, None]:
            return merge(each)(x), None

        if policy is not None:
            body = jax.checkpoint(body, policy=policy, prevent_cse=False)
        x, _ = jax.lax.scan(body, params[1][words[:, :-1]], params[0])
        scores = jax.nn.log_softmax(x @ params[1].T)
        return -jnp.mean(jnp.take_along_axis(scores, words[:, 1:, None], -1))

    return loss, (stacked, ends)


class Gradient:
    """A compiled gradient, what XLA says of its memory, and what it takes."""

    def __init__(self, loss: Callable[..., Any], params: Any, words: jax.Array) -> None:
        self.args = (params, words)
        self.compiled = jax.jit(jax.value_and_grad(loss)).lower(*self.args).compile()
        self.bytes = self.compiled.memory_analysis().temp_size_in_bytes
        self.result = jax.block_until_ready(self.compiled(*self.args))

    def allocated_bytes(self) -> int:
        """What the process takes at most in one run, beyond what the run returns; the median of three."""
        found = []
        for _ in range(3):
            Path("/proc/self/clear_refs").write_text("5")
            before = _status("VmRSS")
            jax.block_until_ready(self.compiled(*self.args))
            found.append(_status("VmHWM") - before - self.compiled.memory_analysis().output_size_in_bytes)
        return statistics.median(found)

    def seconds(self) -> float:
        began = time.process_time()
        jax.block_until_ready(self.compiled(*self.args))
        return time.process_time() - began


def _status(field: str) -> int:
    """Bytes of the process, as Linux says them."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def ratio(ours: Gradient, theirs: Gradient) -> tuple[float, float, float]:
    """Median seconds of both, and the median of the pairs' ratios."""
    pairs = []
    for number in range(_PAIRS):
        first, second = (ours, theirs) if number % 2 else (theirs, ours)
        seconds = {id(first): first.seconds(), id(second): second.seconds()}
        pairs.append((seconds[id(ours)], seconds[id(theirs)]))
    return (*(statistics.median(each) for each in zip(*pairs, strict=True)), statistics.median(a / b for a, b in pairs))


def error(ours: Gradient, theirs: Gradient) -> float:
    """The largest difference of gradients, as a share of the largest entry of each array."""
    pairs = zip(jax.tree.leaves(ours.result), jax.tree.leaves(theirs.result), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)


def planned(loss: Any, params: Any, words: jax.Array, budget: int | None) -> tuple[Gradient, Any, float, float]:
    """The plan's gradient, the plan, its planning in CPU seconds, and the error of the first prediction."""
    began = time.process_time()
    plan = pj.plan(loss, params, words, budget=budget)
    seconds = time.process_time() - began
    ours = Gradient(pj.wrap(loss, plan), params, words)
    assert budget is None or ours.bytes <= budget
    return ours, plan, seconds, plan.predicted_peak_bytes / ours.bytes - 1


def policies(library: str) -> list[str]:
    """The plan beside every policy, at the policy's own memory."""
    loss, params = decoder(library)
    words = jax.random.randint(jax.random.key(2), (ROWS, LENGTH + 1), 0, WORDS)
    rows, ratios = [], []
    for name, policy in POLICIES.items():
        theirs = Gradient(lambda p, w, policy=policy: loss(p, w, policy), params, words)
        ours, _, seconds, _ = planned(loss, params, words, theirs.bytes)
        a, b, share = ratio(ours, theirs)
        ratios.append(share)
        figures = [mib(each) for each in (theirs.bytes, theirs.allocated_bytes(), ours.bytes, ours.allocated_bytes())]
        rows.append(
            [name, *figures, f"{a:.3f} / {b:.3f} s", f"{share:.3f}", f"{error(ours, theirs):.1g}", f"{seconds:.1f} s"]
        )
        print(rows[-1], file=sys.stderr, flush=True)
    head = [
        "policy",
        "XLA",
        "process",
        "plan: XLA",
        "process",
        "seconds, plan / policy",
        "ratio",
        "gradient",
        "planning",
    ]
    middle = f"Median ratio {statistics.median(ratios):.3f}."
    return [f"## {library}: beside policies", "", *format_table(head, rows), "", middle, ""]


def budgets(library: str) -> list[str]:
    """Plans at shares of the way from the least of the policies to unmanaged."""
    loss, params = decoder(library)
    words = jax.random.randint(jax.random.key(2), (ROWS, LENGTH + 1), 0, WORDS)
    unmanaged = Gradient(loss, params, words)
    least = Gradient(lambda p, w: loss(p, w, POLICIES["nothing_saveable"]), params, words).bytes
    rows = []
    for share in _SHARES:
        budget = int(least + share * (unmanaged.bytes - least))
        ours, plan, seconds, off = planned(loss, params, words, budget)
        _, _, faster = ratio(ours, unmanaged)
        said = plan.notes[-1].rpartition("said ")[2]
        row = [f"{share:.0%}", mib(budget), mib(ours.bytes), mib(ours.allocated_bytes()), f"{off:+.2%}", said]
        rows.append([*row, f"{faster:.3f}", f"{error(ours, unmanaged):.1g}", f"{seconds:.1f} s"])
        print(rows[-1], file=sys.stderr, flush=True)
    head = [
        "budget",
        "",
        "XLA",
        "process",
        "plan's figure",
        "before compiling",
        "seconds / unmanaged",
        "gradient",
        "planning",
    ]
    process = mib(unmanaged.allocated_bytes())
    told = (
        f"Between {mib(least)} of `nothing_saveable` and {mib(unmanaged.bytes)} unmanaged ({process} by the process):"
    )
    return [f"## {library}: budgets", "", told, "", *format_table(head, rows), ""]


def mib(bytes_: int) -> str:
    """With one decimal."""
    return f"{bytes_ / MIB:.1f} MiB"


def main() -> int:
    """Print the page."""
    text = page_head(
        "JAX: plans beside hand-written policies",
        "PYTHONPATH=src:tests/support python -m benchmarks.jax_policies",
        device=f"{jax.devices()[0].device_kind}, one thread, load {os.getloadavg()[0]:.1f}",
        versions=versions() | {"jax": jax.__version__},
    )
    sizes = f"{BLOCKS} blocks in one `lax.scan`, width {WIDTH}, {ROWS} × {LENGTH} words"
    text.append(f"A decoder of {sizes}. {(__doc__ or '').split(chr(10) * 2)[2]}")
    print("\n".join([*text, ""]))
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)
    asked = set(sys.argv[1:])
    for library in asked & {"flax.nnx", "equinox"} or ("flax.nnx", "equinox"):
        for table in (policies, budgets):
            if table.__name__ in asked or not asked & {"policies", "budgets"}:
                print("\n".join(table(library)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
