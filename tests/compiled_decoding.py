"""Decoding, compiled ahead of time for absent chips."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxformer import zoo
from jaxformer.config import GLU
from jaxformer.generation.decode_loop import DecodeConfig, decode_tokens
from jaxformer.generation.prompts import Request
from jaxformer.layers.layouts import arrange_layers
from jaxformer.layers.parameter_metadata import cast_parameters
from jaxformer.parallel import abstract_parameters


def narrow_preset(name):
    """A model of eight heads and few ids, as deep as the preset."""
    config = zoo.get(name)
    width = 8 * config.attention.head_dim
    return replace(
        config,
        vocab_size=512,
        model_dim=width,
        attention=replace(config.attention, num_heads=8, num_kv_heads=8),
        feed_forward=(GLU(hidden_dim=2 * width),),
    )


def compiled_decode(config, chip, around=nullcontext, prompts=(8, 1024), layout="stacked"):
    """The text of a program that continues prompts of a shape [rows, tokens] by 128 tokens."""
    of = partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(chip))

    def cast(params):
        return cast_parameters(config, arrange_layers(config, params, layout), jnp.bfloat16)

    params = jax.eval_shape(cast, abstract_parameters(config, None))
    params = jax.tree.map(lambda x: of(x.shape, x.dtype), params)
    request = Request(
        *(of(shape, "int32") for shape in (prompts, prompts[:1], (prompts[0], 0), ()))
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    plan = DecodeConfig(config, 128, None, jnp.dtype(jnp.bfloat16))
    with jax.default_device(chip), around():
        lowered = decode_tokens.trace(plan, params, request, of(key.shape, key.dtype)).lower()
    return lowered.compile().as_text()
