"""Benchmark programs of jaxformer."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmark.runner import BenchmarkSize, RoundFunction, with_temp_bytes
from jaxformer import Transformer, generate
from jaxformer import functional as F
from jaxformer.config import GLU, MoE, MultiHead, TransformerConfig
from jaxformer.data import Batch
from jaxformer.layers.layouts import arrange_layers, decoding_layout
from jaxformer.layers.runtime import Remat
from jaxformer.parallel import (
    MeshConfig,
    make_mesh,
    parameter_metadata,
    parameter_shardings,
    put_batch,
)
from jaxformer.training import train_step
from jaxformer.training.optimizers import AdamW, OptimizerConfig, make_optimizer
from jaxformer.training.schedules import Constant


def model_config(size: BenchmarkSize) -> TransformerConfig:
    """Model configuration of a benchmark size."""
    return TransformerConfig(
        vocab_size=size.vocab_size,
        model_dim=size.model_dim,
        num_layers=size.num_layers,
        attention=MultiHead(
            num_heads=size.num_heads,
            num_kv_heads=size.num_kv_heads or size.num_heads,
            head_dim=size.model_dim // size.num_heads,
        ),
        feed_forward=(GLU(hidden_dim=size.hidden_dim),),
    )


def moe_config(size: BenchmarkSize) -> TransformerConfig:
    """Model configuration of "experts": fewer layers, with experts; a token uses 1/8 of them."""
    moe = MoE(
        expert=GLU(hidden_dim=size.expert_dim),
        num_experts=size.num_experts,
        top_k=size.num_experts // 8,
    )
    return replace(model_config(size), num_layers=size.moe_layers, feed_forward=(moe,))


def train_program(
    size: BenchmarkSize,
    *,
    documents: int = 1,
    experts: bool = False,
    remat: Remat = "dots",
    **options: Any,
) -> RoundFunction:
    """Build an AdamW training step, data-parallel over all devices, as the experiments do."""
    config = moe_config(size) if experts else model_config(size)
    model = Transformer(config, dtype=jnp.dtype(size.dtype), remat=remat, **options)
    mesh = make_mesh(MeshConfig())
    optimizer_config = OptimizerConfig(schedule=Constant(peak=1e-4), optimizer=AdamW())
    optimizer = make_optimizer(optimizer_config, 1000, parameter_metadata(model.config))
    state = train_step.init_train_state(model, optimizer, jax.random.key(0), mesh)
    batch = random_batch(size, mesh, documents)
    update = train_step.make_train_step(model, optimizer, mesh).lower(state, batch).compile()

    def run_round() -> None:
        nonlocal state
        state, metrics = update(state, batch)
        metrics.loss.block_until_ready()

    return with_temp_bytes(run_round, update)


def compile_program(size: BenchmarkSize, *, layers: int) -> RoundFunction:
    """Build a program that compiles a training step of `layers` layers from scratch."""
    size = replace(size, num_layers=layers)
    model = Transformer(model_config(size), dtype=jnp.dtype(size.dtype))
    mesh = make_mesh(MeshConfig())
    rule = OptimizerConfig(schedule=Constant(peak=1e-4), optimizer=AdamW())
    optimizer = make_optimizer(rule, 1000, parameter_metadata(model.config))
    state, batch = train_step.abstract_train_state(model, optimizer, mesh), random_batch(size, mesh)

    def run_round() -> None:
        jax.clear_caches()
        train_step.make_train_step(model, optimizer, mesh).lower(state, batch).compile()

    return run_round


def random_batch(size: BenchmarkSize, mesh: jax.sharding.Mesh, documents: int = 1) -> Any:
    """A batch of random tokens, sharded over the devices; each row has documents of one length."""
    shape = size.batch_size, size.length + 1
    tokens = np.random.default_rng(0).integers(0, size.vocab_size, shape, dtype=np.int32)
    document, position = np.divmod(np.arange(size.length, dtype=np.int32), size.length // documents)
    positions, segments = (np.tile(x, (size.batch_size, 1)) for x in (position, document + 1))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], positions, segments, segments > 0)
    return put_batch(batch, mesh, size.batch_size)


def decode_program(
    size: BenchmarkSize, *, prefill_only: bool = False, rows: int | None = None
) -> RoundFunction:
    """Build greedy decoding, data-parallel; or prefill of long prompts plus one token."""
    size = replace(size, batch_size=rows or size.batch_size)
    config, dtype, mesh = model_config(size), jnp.dtype(size.dtype), make_mesh(MeshConfig())

    def start() -> Any:
        params = Transformer(config).init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        return jax.tree.map(lambda x: x.astype(dtype), params)

    params = jax.jit(start, out_shardings=parameter_shardings(config, mesh))()
    params = arrange_layers(config, params, decoding_layout(config), donate=True)
    shape = size.batch_size, size.length if prefill_only else size.prompt
    prompt = np.random.default_rng(0).integers(0, size.vocab_size, shape, dtype=np.int32)

    def run_round() -> None:
        generate(
            config,
            params,
            prompt,
            max_new_tokens=1 if prefill_only else size.new_tokens,
            dtype=dtype,
            mesh=mesh,
        ).block_until_ready()

    return run_round


def attention_program(
    size: BenchmarkSize, *, implementation: F.Implementation = "auto", window: int | None = None
) -> RoundFunction:
    """Build causal attention with its gradient, the batch sharded over all devices."""
    shape = size.batch_size, size.length, size.num_heads, size.model_dim // size.num_heads
    rng = np.random.default_rng(0)
    qkv = [jnp.asarray(rng.normal(size=shape), jnp.dtype(size.dtype)) for _ in range(3)]
    devices = jax.devices()
    mesh = jax.sharding.Mesh(devices[: math.gcd(len(devices), size.batch_size)], ("data",))
    rows = jax.sharding.PartitionSpec("data")
    qkv = [jax.device_put(x, jax.sharding.NamedSharding(mesh, rows)) for x in qkv]
    at = jnp.arange(size.length)
    mask = F.AttentionMask(
        at, at, rule=F.MaskRule(causal=True, window=window, contiguous_positions=True)
    )

    def qkv_grads(*qkv: Any) -> Any:
        def total(query: Any, key: Any, value: Any) -> Any:
            heads = F.dot_product_attention(query, key, value, mask, implementation=implementation)
            return jnp.sum(jnp.square(heads.astype(jnp.float32)))

        return jax.grad(total, argnums=(0, 1, 2))(*qkv)

    sharded = jax.shard_map(qkv_grads, mesh=mesh, in_specs=(rows,) * 3, out_specs=(rows,) * 3)
    program = jax.jit(sharded).lower(*qkv).compile()

    def run_round() -> None:
        jax.block_until_ready(program(*qkv))

    return with_temp_bytes(run_round, program)


def long_attention_program(
    size: BenchmarkSize, *, length: int, window: int | None = None
) -> RoundFunction:
    """Build attention of four heads of width 64 over one long sequence."""
    size = replace(size, batch_size=1, num_heads=4, model_dim=256, length=length)
    return attention_program(size, window=window)


def loss_program(size: BenchmarkSize, *, all_logits: bool = False) -> RoundFunction:
    """Build the cross-entropy of hidden states, with gradients of hidden states and output head."""
    tokens = size.batch_size * size.length
    rng = np.random.default_rng(0)
    features = jnp.asarray(rng.normal(size=(tokens, size.model_dim)), jnp.dtype(size.dtype))
    kernel = jnp.asarray(rng.normal(size=(size.model_dim, size.vocab_size)) / 16, features.dtype)
    targets = jnp.asarray(rng.integers(0, size.vocab_size, tokens))

    chunk = size.vocab_size if all_logits else None  # None is the function's default

    def total(features: Any, kernel: Any) -> Any:
        return jnp.mean(F.linear_cross_entropy(features, kernel, targets, chunk_size=chunk))

    program = jax.jit(jax.value_and_grad(total, argnums=(0, 1))).lower(features, kernel).compile()

    def run_round() -> None:
        jax.block_until_ready(program(features, kernel))

    return with_temp_bytes(run_round, program)


def large_vocabulary_program(size: BenchmarkSize, *, all_logits: bool = False) -> RoundFunction:
    """Build the cross-entropy of 4,096 tokens over a vocabulary of 128,000."""
    return loss_program(
        replace(size, batch_size=8, length=512, vocab_size=128_000), all_logits=all_logits
    )


def rope_program(size: BenchmarkSize, *, real_numbers: bool) -> RoundFunction:
    """Build 100 applications of RoPE with their gradient, in complex or in real arithmetic."""
    shape = size.batch_size, size.length, size.num_heads, size.model_dim // size.num_heads
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.dtype(size.dtype))
    rotations = F.rope_rotations(jnp.arange(size.length), F.rope_frequencies(shape[-1]))

    def rotate_real(x: Any) -> Any:
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        cos, sin = rotations.real[:, None], rotations.imag[:, None]
        both = [first * cos - second * sin, first * sin + second * cos]
        return jnp.concatenate(both, axis=-1).astype(x.dtype)

    def total(x: Any) -> Any:
        turned = rotate_real(x) if real_numbers else F.rotate(x, rotations)
        return jnp.sum(jnp.square(turned).astype(jnp.float32))

    program = jax.jit(jax.grad(total)).lower(x).compile()

    def run_round() -> None:
        for _ in range(100):
            program(x).block_until_ready()

    return with_temp_bytes(run_round, program)


REPEATS = 8


def matmul_program(size: BenchmarkSize) -> RoundFunction:
    """Build square matmuls on all devices at once: the reachable peak FLOP/s."""
    square = jnp.full(
        (size.matrix_dim, size.matrix_dim), 1 / size.matrix_dim, jnp.dtype(size.dtype)
    )
    matrices = [jax.device_put(square, device) for device in jax.devices()]
    multiply = jax.jit(lambda x: jax.lax.fori_loop(0, REPEATS, lambda _, y: y @ x, x))

    def run_round() -> None:
        jax.block_until_ready([multiply(x) for x in matrices])

    return run_round


def copy_program(size: BenchmarkSize) -> RoundFunction:
    """Build copies of large arrays on all devices at once: the reachable memory bandwidth."""
    large = jnp.ones(size.copy_size, jnp.float32)
    arrays = [jax.device_put(large, device) for device in jax.devices()]
    add = jax.jit(lambda x: jax.lax.fori_loop(0, REPEATS, lambda _, y: y + 1, x), donate_argnums=0)

    def run_round() -> None:
        arrays[:] = jax.block_until_ready([add(x) for x in arrays])

    return run_round
