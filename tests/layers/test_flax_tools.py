"""Flax's own tools take every model, whatever its layers choose."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from jaxformer import Transformer, costs
from jaxformer.config import GLU, BlockSparse, EncoderDecoder, MoE
from jaxformer.layers import empty_cache
from tests.layers.test_every_option import KINDS, T5
from tests.small_models import BASE

TOKENS = jnp.zeros((1, 4), jnp.int32)


def of(**attention):
    return replace(BASE, attention=replace(BASE.attention, **attention))


CONFIGS = {
    "windows": of(windows=(3, None)),
    "blocks": of(windows=(BlockSparse(block_size=2, local_blocks=1, stride=2), None, 3)),
    "biases": of(positions=(T5, None), windows=(3, None)),
    "hybrid": replace(BASE, attention=KINDS["hybrid of three"]),
    "experts": replace(BASE, feed_forward=(MoE(expert=GLU(hidden_dim=5), num_experts=4),)),
    "source": replace(of(windows=(3, None)), topology=EncoderDecoder(num_encoder_layers=1)),
}
every_model = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def inputs(config):
    return {"source": TOKENS} if isinstance(config.topology, EncoderDecoder) else {}


@every_model
@pytest.mark.slow
def test_a_summary_counts_every_parameter(config):
    table = Transformer(config).tabulate(jax.random.key(0), TOKENS, **inputs(config))
    assert f"Total Parameters: {costs.num_parameters(config):,}" in table


@every_model
@pytest.mark.slow(but=["experts"])
def test_parameters_are_all_that_init_gives(config):
    """From shapes of the inputs alone, as `lazy_init` has it."""
    shape = jax.ShapeDtypeStruct(TOKENS.shape, TOKENS.dtype)
    arguments = dict.fromkeys(inputs(config), shape)
    made = jax.eval_shape(
        lambda: Transformer(config).lazy_init(jax.random.key(0), shape, **arguments)
    )
    assert set(made) == {"params"}


@every_model
@pytest.mark.slow
def test_what_every_method_gives_can_be_captured(config):
    """With a cache, too."""
    model, everything = Transformer(config), lambda module, method: True

    def captured(cache):
        variables = model.init(jax.random.key(0), TOKENS, **inputs(config))
        of_all = {"capture_intermediates": everything, "mutable": ["intermediates"]}
        _, seen = model.apply(variables, TOKENS, cache=cache, **of_all, **inputs(config))
        return seen["intermediates"]["__call__"][0]

    logits = jax.eval_shape(captured, None)
    assert logits.shape == (*TOKENS.shape, config.vocab_size)
    assert jax.eval_shape(lambda: captured(empty_cache(config, (1,), 5)))[0].shape == logits.shape


def test_bound_and_intercepted_calls_are_those_of_apply():
    """`bind`, and `nn.intercept_methods` that counts the calls of one kind of module."""
    model, calls = Transformer(CONFIGS["windows"]), []

    def count(call, args, kwargs, context):
        calls.append(context.module.name)
        return call(*args, **kwargs)

    def bound():
        params = model.init(jax.random.key(0), TOKENS)["params"]
        with nn.intercept_methods(count):
            return model.bind({"params": params})(TOKENS)

    assert jax.eval_shape(bound).shape == (*TOKENS.shape, BASE.vocab_size)
    assert {"layer_0", "layer_1", "feed_forward", "final_norm"} <= set(calls)
