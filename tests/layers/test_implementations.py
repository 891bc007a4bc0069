"""A model whose attention runs by blocks is the model."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import Transformer, zoo
from jaxformer.config import GLU, Encoder, EncoderDecoder, MoE, Rope, TransformerXL
from jaxformer.data import Batch
from jaxformer.functional import splash_attention
from jaxformer.functional.attention import dot_product as attention
from jaxformer.functional.attention import kernels
from jaxformer.functional.platforms import TargetDevice
from jaxformer.layers import empty_cache
from jaxformer.parallel import MeshConfig, make_mesh
from jaxformer.training.gradient import make_value_and_grad
from tests.small_models import random_params

T = 21
MODELS = {
    "rotary, grouped": zoo.get("llama-2-70b").tiny(),
    "ALiBi": zoo.get("bloom-560m").tiny(),
    "buckets, a source": zoo.get("t5-small").tiny(),
    "windows, caps": zoo.get("gemma-2-2b").tiny(),
    "one head of keys": zoo.get("falcon-7b").tiny(),
    "blocks by head": zoo.get("phi-3-small").tiny(),
    "both ways": replace(zoo.get("gemma-2-2b").tiny(), topology=Encoder()),
}
SELDOM = {"rotary, grouped", "one head of keys"}  # as those with windows and caps


def inputs(config, rng, segmented):
    tokens = jnp.asarray(rng.integers(0, config.vocab_size - 1, (2, T)))
    segments = jnp.asarray(np.sort(rng.integers(1, 4, (2, T)), axis=1)) if segmented else None
    options = {"segments": segments}
    if isinstance(config.topology, EncoderDecoder):
        options |= {
            "source": tokens[:, ::-1],
            "source_segments": jnp.arange(2 * T).reshape(2, T) % 3,
        }
    return tokens, options


@pytest.mark.parametrize(
    "segmented",
    [pytest.param(False, marks=pytest.mark.exhaustive), True],
    ids=["one text", "packed"],
)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.exhaustive if n in SELDOM else ()) for n in MODELS]
)
@pytest.mark.slow
def test_blocks_give_the_same(name, segmented):
    """Loss and every gradient."""
    # Another seed than 0: there, a unit of T5's ReLU stands within 1e-7 of its corner.
    config, rng = MODELS[name], np.random.default_rng(1)
    tokens, options = inputs(config, rng, segmented)
    whole, blocks = (
        Transformer(config, attention_implementation=kind) for kind in ("xla", "blockwise")
    )
    shapes = jax.eval_shape(lambda: whole.init(jax.random.key(0), tokens, **options))["params"]
    params = jax.tree.map(lambda x: np.float32(0.2 * rng.normal(size=x.shape)), shapes)
    weights = np.float32(rng.normal(size=(2, T, config.vocab_size)))

    @jax.jit
    def both(params):
        def total(params, model):
            return jnp.mean(weights * model.apply({"params": params}, tokens, **options))

        return [jax.value_and_grad(total)(params, model) for model in (whole, blocks)]

    (value, gradients), (actual, slopes) = both(params)
    np.testing.assert_allclose(actual, value, rtol=1e-5, atol=1e-7)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradients))
    for one, other in zip(jax.tree.leaves(slopes), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.slow
def test_prompts_read_in_parts_by_blocks():
    """A cache's keys stand where they stand, empty slots too."""
    config, rng = zoo.get("gemma-2-2b").tiny(), np.random.default_rng(0)
    tokens, _ = inputs(config, rng, False)
    params = random_params(config)

    @partial(jax.jit, static_argnums=0)
    def read(kind, params):
        model, cache = (
            Transformer(config, attention_implementation=kind),
            empty_cache(config, (2,), T),
        )
        parts = []
        for part in (tokens[:, :9], tokens[:, 9:]):
            logits, cache = model.apply({"params": params}, part, cache=cache)
            parts.append(logits)
        return jnp.concatenate(parts, axis=1)

    np.testing.assert_allclose(read("blockwise", params), read("xla", params), atol=2e-5)


@pytest.mark.slow
def test_what_is_kept_by_remat_is_not_computed_again():
    """Products alone are not enough: those of blocks stand inside loops."""
    config = MODELS["rotary, grouped"]
    tokens = jnp.zeros((1, 8), int)
    params = jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens)["params"]

    def exponentials(remat):
        model = Transformer(config, remat=remat, attention_implementation="blockwise")

        def total(params):
            return jnp.sum(model.apply({"params": params}, tokens))

        return str(jax.make_jaxpr(jax.grad(total))(params)).count("= exp ")

    none, dots, full = map(exponentials, ("none", "dots", "full"))
    assert none == dots < full


def count_equations(jaxpr, name):
    """How many equations are of this primitive or function; those in a loop count once."""
    count = sum(name in (eqn.primitive.name, eqn.params.get("name")) for eqn in jaxpr.eqns)
    for eqn in jaxpr.eqns:
        parts = jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns"))
        count += sum(count_equations(part, name) for part in parts if hasattr(part, "eqns"))
    return count


@pytest.mark.slow
def test_products_of_experts_are_not_computed_again():
    moe = MoE(expert=GLU(hidden_dim=16), num_experts=4, top_k=2)
    config = replace(MODELS["rotary, grouped"], num_layers=1, feed_forward=(moe,))
    tokens = jnp.zeros((1, 8), int)
    params = jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens)["params"]

    def num_products(remat):
        def total(params):
            return jnp.sum(Transformer(config, remat=remat).apply({"params": params}, tokens))

        return count_equations(jax.make_jaxpr(jax.grad(total))(params), "blocked_matmul")

    assert [num_products(remat) for remat in ("none", "dots", "full")] == [6, 6, 9]


SIZES = {"data": dict(data=2), "fsdp and tensor": dict(fsdp=2, tensor=2)}
BOTH = [("data", "none"), ("fsdp and tensor", "dots"), ("fsdp and tensor", "full")]
BOTH += [
    pytest.param(*case, marks=pytest.mark.exhaustive)
    for case in (("data", "dots"), ("data", "full"), ("fsdp and tensor", "none"))
]


@pytest.mark.parametrize("sizes, remat", BOTH)
@pytest.mark.slow
def test_a_kernel_runs_once_each_way(sizes, remat, monkeypatch):
    """In the gradient of a mesh, which is that by whole matrices."""
    monkeypatch.setattr(kernels, "target_device", lambda: TargetDevice("tpu", "TPU v5"))
    monkeypatch.setattr(attention, "splash_attention", partial(splash_attention, interpret=True))
    config, T = MODELS["rotary, grouped"], 128
    sizes = SIZES[sizes]
    mesh = make_mesh(MeshConfig(**sizes), jax.devices()[: math.prod(sizes.values())])
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, T))
    segments = 1 + (np.arange(T) > np.array([[50], [90]]))
    batch = Batch(tokens, tokens[:, ::-1], np.arange(T) + 0 * tokens, segments, tokens > 9)
    arguments = random_params(config), {}, np.int32(0), batch

    def traced(kind):
        model = Transformer(config, remat=remat, attention_implementation=kind)
        return jax.jit(make_value_and_grad(model, mesh)).trace(*arguments)

    splash, whole = traced("splash"), traced("xla")
    # Forwards, and backwards for queries and for keys.
    assert count_equations(splash.jaxpr.jaxpr, "pallas_call") == 3
    actual, expected = (program.lower().compile()(*arguments) for program in (splash, whole))
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.slow
def test_memory_of_a_model_is_linear_in_length(remat):
    """Masks too, which are the same in all layers, so that JAX would gladly keep them."""
    config = MODELS["rotary, grouped"]
    model = Transformer(config, remat=remat, attention_implementation="blockwise")

    def working_space(length):
        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
        params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]

        def total(params, tokens):
            return jnp.sum(model.apply({"params": params}, tokens))

        program = jax.jit(jax.grad(total)).lower(params, tokens).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert working_space(8192) < 2.2 * working_space(4096)


@pytest.mark.slow
def test_what_has_no_rule_is_refused_by_name():
    config = zoo.get("llama-2-70b").tiny()
    attention = replace(config.attention, positions=(Rope(), TransformerXL()))
    model = Transformer(replace(config, attention=attention), attention_implementation="blockwise")
    with pytest.raises(ValueError, match="an attention_bias, not arrays; got an array as mask"):
        model.init(jax.random.key(0), jnp.zeros((1, 4), int))
