"""A model spread over eight devices is the model on one: loss and every gradient."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from jaxformer import Transformer, zoo
from jaxformer import functional as F
from jaxformer.config import EncoderDecoder
from jaxformer.layers.mode import Mode, dropout
from jaxformer.parallel import (
    MeshConfig,
    axes_of,
    batch_spec,
    make_mesh,
    parameter_specs,
    token_axes,
)
from tests.tiny_llamas import LLAMAS

pytestmark = pytest.mark.usefixtures("no_checks_of_annotations")

BATCH, LENGTH, BLOCKS = 8, 16, 272  # the last is of several blocks of queries and keys
BLANK = jnp.zeros((1, 2), int)


@functools.cache
def on_one_device(name, length=LENGTH):
    """Configuration, parameters, batch, loss and gradients."""
    config = LLAMAS.get(name) or zoo.get(name).tiny()
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, config.vocab_size - 1, (BATCH, length + 1)))
    source = jnp.asarray(rng.integers(0, config.vocab_size - 1, (BATCH, length)))
    segments = jnp.asarray(np.sort(rng.integers(1, 4, (BATCH, length)), axis=1))
    reads = isinstance(config.topology, EncoderDecoder)
    options = {"source": source} if reads else {"segments": segments}
    model = Transformer(config, attention_implementation="xla")
    shapes = jax.eval_shape(
        lambda: model.init(jax.random.key(0), BLANK, **({"source": BLANK} if reads else {}))
    )["params"]

    def draw(path, x):
        noise = 0.1 * rng.normal(size=x.shape)
        return jnp.asarray(noise + (path[-1].key == "scale"), jnp.float32)

    params = jax.tree_util.tree_map_with_path(draw, shapes)

    def loss(params):
        logits = model.apply({"params": params}, tokens[:, :-1], **options)
        return jnp.mean(F.token_cross_entropy(logits, tokens[:, 1:]))

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    return config, params, (tokens[:, :-1], tokens[:, 1:], source, segments), value, gradients


def spread(name, *, length=LENGTH, **sizes):
    """Loss and gradients on a mesh of these sizes."""
    config, params, batch, *_ = on_one_device(name, length)
    mesh = make_mesh(MeshConfig(**sizes), jax.devices()[: math.prod(sizes.values())])
    axes, over = axes_of(mesh.shape), token_axes(mesh.shape)
    where = parameter_specs(config, mesh.shape)
    model = Transformer(config, axes=axes)
    reads = isinstance(config.topology, EncoderDecoder)

    def per_device(params, tokens, targets, source, segments):
        def loss(params):
            options = {"source": source} if reads else {"segments": segments}
            logits = model.apply({"params": params}, tokens, **options)
            losses = F.token_cross_entropy(logits, targets, axis_name=axes.tensor)
            return jax.lax.psum(jnp.sum(losses), over) / (BATCH * length)

        return jax.value_and_grad(loss)(params)

    rows = batch_spec(mesh.shape)
    program = jax.shard_map(
        per_device, mesh=mesh, in_specs=(where, *[rows] * 4), out_specs=(P(), where)
    )
    order = F.ring_order(length, sizes.get("context", 1))
    return jax.jit(program)(params, *(x[:, order] for x in batch))


MESHES = [  # other models and meshes: tests/training/test_meshes.py, tests/zoo/test_spreading.py
    ("llama-2-70b", dict(data=2, fsdp=2, tensor=2)),
    ("mixtral-8x7b", dict(tensor=2, context=2, expert=2)),
    ("gpt-j-6b", dict(fsdp=2, tensor=2, context=2)),  # parallel branches that share a norm
    ("pythia-70m", dict(fsdp=2, tensor=4)),  # parallel branches with a norm each
    ("norms of heads", dict(fsdp=2, tensor=4)),
    ("shared", dict(fsdp=2, tensor=2, context=2)),
    ("latent", dict(fsdp=2, tensor=2, context=2)),
    ("decay", dict(data=2, fsdp=2, tensor=2)),
    ("nine placements", dict(tensor=2, context=4)),  # a layer for each of the rotary settings
]


def label(part):
    return part if isinstance(part, str) else "-".join(f"{k}{v}" for k, v in part.items())


@pytest.mark.parametrize("name, sizes", MESHES, ids=label)
@pytest.mark.slow(but=["llama-2-70b-data2-fsdp2-tensor2", "norms of heads-fsdp2-tensor4"])
def test_spread_is_whole(name, sizes):
    assert error(name, LENGTH, sizes) <= 1e-5


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("llama-2-70b", dict(data=2, fsdp=2, tensor=2)),
        ("bloom-560m", dict(fsdp=2, tensor=4)),  # slopes of each device's heads
        ("t5-small", dict(data=2, fsdp=2, tensor=2)),  # a table of each device's heads; a source
        ("gemma-2-2b", dict(data=4, tensor=2)),
    ],
    ids=label,
)
@pytest.mark.slow
def test_blocks_on_devices_are_whole_matrices_on_one(name, sizes):
    assert error(name, BLOCKS, sizes) <= 1e-5


def error(name, length, sizes):
    """Of loss and gradients on devices, relative to both a number and the largest gradient."""
    _, _, _, loss, gradients = on_one_device(name, length)
    found, spread_gradients = jax.device_get(spread(name, length=length, **sizes))
    # Those of key biases are nothing but rounding.
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradients))
    errors = jax.tree.map(
        lambda one, other: np.max(np.abs(one - other) / (np.abs(other) + largest)),
        spread_gradients,
        jax.device_get(gradients),
    )
    return np.max([abs(found - loss) / abs(loss), *jax.tree.leaves(errors)])


class Dropping(nn.Module):
    part_of: str | None

    @nn.compact
    def __call__(self, x):
        return dropout(self, x, 0.5, Mode(deterministic=False), part_of=self.part_of)


def test_devices_drop_other_parts_of_what_is_shared_out_and_the_same_of_what_all_have():
    mesh = make_mesh(MeshConfig(tensor=4), jax.devices()[:4])
    rngs = {"dropout": jax.random.key(0)}

    def dropped(part_of, spec):
        run = lambda x: Dropping(part_of).apply({}, x, rngs=rngs)  # noqa: E731
        program = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
        return np.asarray(jax.jit(program)(jnp.ones(256)))

    parts = dropped("tensor", P("tensor")).reshape(4, 64) > 0
    assert len(np.unique(parts, axis=0)) == 4 and 0.3 < parts.mean() < 0.7
    same = dropped(None, P())  # its type says that devices do not differ
    np.testing.assert_array_equal(same, Dropping(None).apply({}, jnp.ones(256), rngs=rngs))
