"""Benchmark programs of jaxformer."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmark.turns import Round, Size, with_working_space
from jaxformer import Transformer, generate
from jaxformer import functional as F
from jaxformer.config import GLU, MultiHead, TransformerConfig
from jaxformer.data import Batch
from jaxformer.layers.mode import Remat
from jaxformer.parallel import (
    MeshConfig,
    abstract_parameters,
    declarations,
    make_mesh,
    put_batch,
    shardings,
)
from jaxformer.training import step
from jaxformer.training.optimizers import AdamW, OptimizerConfig, make_optimizer
from jaxformer.training.schedules import Constant


def config_of(size: Size) -> TransformerConfig:
    """Model configuration of a benchmark size."""
    return TransformerConfig(
        vocab_size=size.vocab_size,
        model_dim=size.model_dim,
        num_layers=size.num_layers,
        attention=MultiHead(
            num_heads=size.num_heads,
            num_kv_heads=size.num_heads,
            head_dim=size.model_dim // size.num_heads,
        ),
        feed_forward=(GLU(hidden_dim=size.hidden_dim),),
    )


def training(size: Size, *, remat: Remat = "dots", **options: Any) -> Round:
    """Build an AdamW training step, data-parallel over all devices, as the experiments do."""
    model = Transformer(config_of(size), dtype=jnp.dtype(size.dtype), remat=remat, **options)
    mesh = make_mesh(MeshConfig())
    rule = OptimizerConfig(schedule=Constant(peak=1e-4), optimizer=AdamW())
    optimizer = make_optimizer(rule, 1000, declarations(model.config))
    state = step.init_state(model, optimizer, jax.random.key(0), mesh)
    batch = drawn_batch(size, mesh)
    update = step.make_update(model, optimizer, mesh).lower(state, batch).compile()

    def one() -> None:
        nonlocal state
        state, metrics = update(state, batch)
        metrics.loss.block_until_ready()

    return with_working_space(one, update)


def compiling(size: Size, *, layers: int) -> Round:
    """Build a program that compiles a training step of `layers` layers from scratch."""
    size = replace(size, num_layers=layers)
    model = Transformer(config_of(size), dtype=jnp.dtype(size.dtype))
    mesh = make_mesh(MeshConfig())
    rule = OptimizerConfig(schedule=Constant(peak=1e-4), optimizer=AdamW())
    optimizer = make_optimizer(rule, 1000, declarations(model.config))
    state, batch = step.abstract_state(model, optimizer, mesh), drawn_batch(size, mesh)

    def one() -> None:
        jax.clear_caches()
        step.make_update(model, optimizer, mesh).lower(state, batch).compile()

    return one


def drawn_batch(size: Size, mesh: jax.sharding.Mesh) -> Any:
    """A batch of random tokens, sharded over the devices."""
    shape = size.batch_size, size.length + 1
    tokens = np.random.default_rng(0).integers(0, size.vocab_size, shape, dtype=np.int32)
    ones = np.ones((size.batch_size, size.length), np.int32)
    at = np.broadcast_to(np.arange(size.length, dtype=np.int32), ones.shape)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], at, ones, ones > 0)
    return put_batch(batch, mesh, size.batch_size)


def decoding(size: Size, *, only_prompt: bool = False) -> Round:
    """Build greedy decoding, data-parallel; or prefill of long prompts plus one token."""
    config, dtype, mesh = config_of(size), jnp.dtype(size.dtype), make_mesh(MeshConfig())

    def start() -> Any:
        params = Transformer(config).init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        return jax.tree.map(lambda x: x.astype(dtype), params)

    params = jax.jit(start, out_shardings=shardings(abstract_parameters(config, mesh)))()
    shape = size.batch_size, size.length if only_prompt else size.prompt
    prompt = np.random.default_rng(0).integers(0, size.vocab_size, shape, dtype=np.int32)

    def one() -> None:
        generate(
            config,
            params,
            prompt,
            max_new_tokens=1 if only_prompt else size.new_tokens,
            dtype=dtype,
            mesh=mesh,
        ).block_until_ready()

    return one


def attention(
    size: Size, *, implementation: F.Implementation = "auto", window: int | None = None
) -> Round:
    """Build causal attention with its gradient, the batch sharded over all devices."""
    shape = size.batch_size, size.length, size.num_heads, size.model_dim // size.num_heads
    rng = np.random.default_rng(0)
    given = [jnp.asarray(rng.normal(size=shape), jnp.dtype(size.dtype)) for _ in range(3)]
    devices = jax.devices()
    mesh = jax.sharding.Mesh(devices[: math.gcd(len(devices), size.batch_size)], ("data",))
    rows = jax.sharding.PartitionSpec("data")
    given = [jax.device_put(x, jax.sharding.NamedSharding(mesh, rows)) for x in given]
    at = jnp.arange(size.length)
    mask = F.AttentionMask(at, at, rule=F.MaskRule(causal=True, window=window, contiguous=True))

    def slopes(*given: Any) -> Any:
        def total(query: Any, key: Any, value: Any) -> Any:
            found = F.dot_product_attention(query, key, value, mask, implementation=implementation)
            return jnp.sum(jnp.square(found.astype(jnp.float32)))

        return jax.grad(total, argnums=(0, 1, 2))(*given)

    spread = jax.shard_map(slopes, mesh=mesh, in_specs=(rows,) * 3, out_specs=(rows,) * 3)
    program = jax.jit(spread).lower(*given).compile()

    def one() -> None:
        jax.block_until_ready(program(*given))

    return with_working_space(one, program)


def long_attention(size: Size, *, length: int, window: int | None = None) -> Round:
    """Build attention of four heads of width 64 over one long sequence."""
    size = replace(size, batch_size=1, num_heads=4, model_dim=256, length=length)
    return attention(size, window=window)


def losses(size: Size, *, whole: bool = False) -> Round:
    """Build the cross-entropy of hidden states, with gradients of hidden states and output head."""
    tokens = size.batch_size * size.length
    rng = np.random.default_rng(0)
    features = jnp.asarray(rng.normal(size=(tokens, size.model_dim)), jnp.dtype(size.dtype))
    kernel = jnp.asarray(rng.normal(size=(size.model_dim, size.vocab_size)) / 16, features.dtype)
    targets = jnp.asarray(rng.integers(0, size.vocab_size, tokens))

    chunk = size.vocab_size if whole else None  # None leaves it to the function

    def total(features: Any, kernel: Any) -> Any:
        return jnp.mean(F.linear_cross_entropy(features, kernel, targets, chunk=chunk))

    program = jax.jit(jax.value_and_grad(total, argnums=(0, 1))).lower(features, kernel).compile()

    def one() -> None:
        jax.block_until_ready(program(features, kernel))

    return with_working_space(one, program)


def large_losses(size: Size, *, whole: bool = False) -> Round:
    """Build the cross-entropy of 4,096 tokens over a vocabulary of 128,000."""
    return losses(replace(size, batch_size=8, length=512, vocab_size=128_000), whole=whole)


def rotations(size: Size, *, real: bool) -> Round:
    """Build 100 applications of RoPE with their gradient, in complex or in real arithmetic."""
    shape = size.batch_size, size.length, size.num_heads, size.model_dim // size.num_heads
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.dtype(size.dtype))
    turns = F.rope_rotations(jnp.arange(size.length), F.rope_frequencies(shape[-1]))

    def written_out(x: Any) -> Any:
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        cos, sin = turns.real[:, None], turns.imag[:, None]
        both = [first * cos - second * sin, first * sin + second * cos]
        return jnp.concatenate(both, axis=-1).astype(x.dtype)

    def total(x: Any) -> Any:
        turned = written_out(x) if real else F.rotate(x, turns)
        return jnp.sum(jnp.square(turned).astype(jnp.float32))

    program = jax.jit(jax.grad(total)).lower(x).compile()

    def one() -> None:
        for _ in range(100):
            program(x).block_until_ready()

    return with_working_space(one, program)


TURNS = 8


def products(size: Size) -> Round:
    """Build square matmuls on all devices at once: the reachable peak FLOP/s."""
    square = jnp.full((size.matrix, size.matrix), 1 / size.matrix, jnp.dtype(size.dtype))
    each = [jax.device_put(square, device) for device in jax.devices()]
    multiply = jax.jit(lambda x: jax.lax.fori_loop(0, TURNS, lambda _, y: y @ x, x))

    def one() -> None:
        jax.block_until_ready([multiply(x) for x in each])

    return one


def copies(size: Size) -> Round:
    """Build copies of large arrays on all devices at once: the reachable memory bandwidth."""
    large = jnp.ones(size.copied, jnp.float32)
    each = [jax.device_put(large, device) for device in jax.devices()]
    add = jax.jit(lambda x: jax.lax.fori_loop(0, TURNS, lambda _, y: y + 1, x), donate_argnums=0)

    def one() -> None:
        each[:] = jax.block_until_ready([add(x) for x in each])

    return one
