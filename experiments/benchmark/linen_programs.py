"""Benchmark program: a Llama-like decoder with Flax linen's own attention."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from experiments.benchmark.runner import BenchmarkSize, RoundFunction, with_temp_bytes


class Block(nn.Module):
    """Pre-norm attention and a gated feed-forward."""

    size: BenchmarkSize

    @nn.compact
    def __call__(self, x: Any, mask: Any) -> tuple[Any, None]:
        size = self.size
        dense = partial(nn.Dense, use_bias=False, dtype=size.dtype)
        attention = nn.MultiHeadDotProductAttention(
            size.num_heads, use_bias=False, dtype=size.dtype
        )
        x = x + attention(nn.RMSNorm(dtype=size.dtype)(x), mask=mask)
        y = nn.RMSNorm(dtype=size.dtype)(x)
        gate, up = (dense(size.hidden_dim)(y) for _ in range(2))
        return x + dense(size.model_dim)(nn.silu(gate) * up), None


class Model(nn.Module):
    """A decoder of Flax linen layers with learned positions (linen's attention has none)."""

    size: BenchmarkSize

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        size = self.size
        embed = partial(nn.Embed, features=size.model_dim, dtype=size.dtype)
        x = embed(size.vocab_size)(tokens)
        x = x + embed(size.length)(jnp.arange(tokens.shape[1]))[None]
        mask = nn.make_causal_mask(tokens)
        layers = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=size.num_layers,
        )(size)
        x, _ = layers(x, mask)
        x = nn.RMSNorm(dtype=size.dtype)(x)
        return nn.Dense(size.vocab_size, use_bias=False, dtype=size.dtype)(x)


def train_program(size: BenchmarkSize, *, all_devices: bool = False) -> RoundFunction:
    """Build an AdamW training step, on one device or data-parallel over all."""
    if all_devices and len(jax.devices()) == 1:
        raise ValueError("there is only one device")
    model, optimizer = Model(size), optax.adamw(1e-4)
    shape = size.batch_size, size.length + 1
    tokens = np.random.default_rng(0).integers(0, size.vocab_size, shape, dtype=np.int32)
    mesh = jax.sharding.Mesh(jax.devices()[: None if all_devices else 1], ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed_tokens = jax.device_put(tokens, rows)
    params = jax.jit(model.init, out_shardings=everywhere)(jax.random.key(0), tokens[:1, :-1])
    state = jax.jit(lambda p: (p, optimizer.init(p)), out_shardings=everywhere)(params)

    def update(state: Any, tokens: Any) -> Any:
        params, opt_state = state

        def loss(params: Any) -> Any:
            logits: Any = model.apply(params, tokens[:, :-1])
            token_losses = optax.softmax_cross_entropy_with_integer_labels(
                logits.astype(jnp.float32), tokens[:, 1:]
            )
            return jnp.mean(token_losses)

        value, grads = jax.value_and_grad(loss)(params)
        changes, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, changes), opt_state), value

    program = jax.jit(update, donate_argnums=0).lower(state, placed_tokens).compile()

    def run_round() -> None:
        nonlocal state
        state, value = program(state, placed_tokens)
        value.block_until_ready()

    return with_temp_bytes(run_round, program)
