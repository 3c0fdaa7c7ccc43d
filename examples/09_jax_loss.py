"""A JAX loss under a budget: which values of a scanned network are held for its gradient, and which are computed again.

pip install 'torch-plimsoll[jax]'
python examples/09_jax_loss.py
"""

import jax
import jax.numpy as jnp

from plimsoll.integrations import jax as pj

WIDTH, LAYERS, ROWS = 64, 8, 512


def block(x, weights):
    up, down = weights
    h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return x + jax.nn.gelu(h @ up) @ down


def loss(params, batch):
    x, _ = jax.lax.scan(lambda x, weights: (block(x, weights), None), batch, params)
    return jnp.mean(x**2)


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    params = (
        jax.random.normal(keys[0], (LAYERS, WIDTH, 4 * WIDTH)) * 0.05,
        jax.random.normal(keys[1], (LAYERS, 4 * WIDTH, WIDTH)) * 0.05,
    )
    batch = jax.random.normal(keys[2], (ROWS, WIDTH))

    unmanaged = pj.temporary_bytes(loss, params, batch)
    plan = pj.plan(loss, params, batch, budget=unmanaged // 4)
    print(plan)

    step = jax.jit(jax.value_and_grad(pj.wrap(loss, plan)))
    taken = step.lower(params, batch).compile().memory_analysis().temp_size_in_bytes
    print(f"XLA's temporary memory: {taken / 2**20:.1f} MiB of {unmanaged / 2**20:.1f} MiB unmanaged")
    assert taken <= unmanaged // 4

    value, gradient = step(params, batch)
    expected = jax.grad(loss)(params, batch)
    errors = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), gradient, expected)
    print(f"loss {value:.4f}, the gradient differs by at most {max(errors):.1g} of its largest entry")


if __name__ == "__main__":
    main()
