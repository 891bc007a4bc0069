"""A loop over layers is the model that has them as often, with the same parameters."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import Transformer, costs, generate, inspect
from jaxformer.config import (
    GLU,
    EncoderDecoder,
    HyperConnections,
    Initialisation,
    Loop,
    MoE,
    Router,
    TransformerConfig,
    UNetSkips,
    cycles_of,
)
from jaxformer.config.serialization import from_json, to_json
from jaxformer.data import Batch
from jaxformer.layers import empty_cache
from jaxformer.layers.layouts import arrange_layers
from jaxformer.parallel import MeshConfig, abstract_parameters, make_mesh, put_batch, shardings
from jaxformer.training.gradient import make_value_and_grad
from tests.small_models import BASE, jitted_forward, random_params

TOKENS = np.random.default_rng(3).integers(0, BASE.vocab_size, (2, 6), np.int32)
WINDOWS = replace(BASE, attention=replace(BASE.attention, windows=(None, 2)), num_layers=6)
MIDDLE = replace(WINDOWS, loop=Loop(passes=3, start=1, stop=5))  # two of a pattern, within others
LOOPS = {
    "middle": MIDDLE,
    "whole": replace(WINDOWS, loop=Loop(passes=2)),
    "one layer": replace(BASE, num_layers=2, loop=Loop(passes=3, stop=1)),
}
EXPERTS = MoE(expert=GLU(hidden_dim=6), num_experts=4, top_k=2, router=Router(selection_bias=True))


def without_loop(config):
    """The model that has each layer as often as it runs."""
    layers = config.invocations["decoder"]
    return replace(config, loop=None, num_layers=len(layers), **cycles_of(layers))


def repeated(config, params):
    """Parameters of it, from those of the loop."""
    by_layer = arrange_layers(config, params, "by_layer")
    layers = by_layer["decoder"]["first_layers"]
    order = config.loop.invocations(range(config.num_layers))
    again = {f"layer_{k}": layers[f"layer_{i}"] for k, i in enumerate(order)}
    return by_layer | {"decoder": by_layer["decoder"] | {"first_layers": again}}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.slow(but=["middle"])
def test_logits_equal_those_of_layers_with_the_same_parameters(name):
    config = LOOPS[name]
    params, whole = random_params(config), without_loop(config)
    logits = jitted_forward(config)(params, TOKENS)
    expected = jitted_forward(whole)(repeated(config, params), TOKENS)
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    by_layer = jitted_forward(config)(arrange_layers(config, params, "by_layer"), TOKENS)
    np.testing.assert_array_equal(by_layer, expected)


@pytest.mark.slow
@pytest.mark.parametrize("enter", ["sum", "final_norm"])
def test_a_pass_begins_with_the_sum_or_the_norm(enter):
    """Passes one by one: the input of the second is patched into a model of one pass."""
    config = replace(BASE, num_layers=2, loop=Loop(passes=2, enter=enter))
    once, params = replace(config, loop=None), random_params(config)
    first = inspect.trace(once, params, TOKENS).decoder
    second = first.stream[-1] + first.embeddings if enter == "sum" else first.final_normed
    patches = {"embeddings": inspect.Add(second - first.embeddings)}
    expected = inspect.run(once, params, TOKENS, patches=patches).logits
    np.testing.assert_allclose(jitted_forward(config)(params, TOKENS), expected, atol=2e-5)


@pytest.mark.parametrize("layout", ["stacked", "by_layer"])
@pytest.mark.slow
def test_a_text_in_parts_is_the_whole(layout):
    """Each layer has a cache for each pass."""
    params, run = arrange_layers(MIDDLE, random_params(MIDDLE), layout), jitted_forward(MIDDLE)
    whole, cache, parts = run(params, TOKENS), empty_cache(MIDDLE, (2,), 6), []
    for part in np.split(TOKENS, [3, 4], axis=1):
        logits, cache = run(params, part, cache=cache)
        parts.append(logits)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=2e-5)


@pytest.mark.slow
def test_rows_of_different_lengths_generate_what_they_do_alone():
    params, rows = random_params(MIDDLE), [[3, 1], [9, 2, 6, 5, 30]]
    together = generate(MIDDLE, params, rows, max_new_tokens=4)
    whole, repeats = without_loop(MIDDLE), repeated(MIDDLE, params)
    np.testing.assert_array_equal(generate(whole, repeats, rows, max_new_tokens=4), together)


def test_parameters_count_once_and_the_rest_as_often_as_layers_run():
    config = replace(MIDDLE, initialisation=Initialisation(residual="depth"))
    whole, once = without_loop(config), replace(config, loop=None)
    assert costs.num_parameters(config) == costs.num_parameters(once)
    assert costs.num_active_parameters(config) == costs.num_active_parameters(once)
    assert costs.forward_flops(config, 9) == costs.forward_flops(whole, 9)
    assert costs.cache_bytes(config, 9) == costs.cache_bytes(whole, 9)
    assert costs.activation_bytes(config, 2, 9) == costs.activation_bytes(whole, 2, 9)
    assert config.residual_init_divisor == whole.residual_init_divisor == 28**0.5


def loss_and_gradients(config, params, **sizes):
    mesh = make_mesh(MeshConfig(**sizes), jax.devices()[: int(np.prod([*sizes.values()]))])
    positions = np.tile(np.arange(8, dtype=np.int32), (2, 1))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 8), np.int32)
    batch = Batch(tokens, tokens, positions, np.ones_like(tokens), tokens != 7)
    program = jax.jit(make_value_and_grad(Transformer(config), mesh))
    local = jax.device_put(params, shardings(abstract_parameters(config, mesh)))
    return jax.device_get(program(local, {}, jnp.int32(0), put_batch(batch, mesh, 2))[:2])


@pytest.mark.slow
def test_gradients_are_sums_over_the_passes_and_routers_balance_each():
    config = replace(MIDDLE, feed_forward=(GLU(hidden_dim=10), EXPERTS))
    params, whole = random_params(config), without_loop(config)
    loss, gradients = loss_and_gradients(config, params, data=1)
    apart = arrange_layers(whole, repeated(config, params), "stacked")
    expected, by_invocation = loss_and_gradients(whole, apart, data=1)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    layers = arrange_layers(whole, by_invocation, "by_layer")["decoder"]["first_layers"]
    sums = {}
    for k, i in enumerate(config.loop.invocations(range(6))):
        of_layer = layers[f"layer_{k}"]
        sums[i] = jax.tree.map(jnp.add, sums[i], of_layer) if i in sums else of_layer
    ours = arrange_layers(config, gradients, "by_layer")["decoder"]["first_layers"]
    for i, of_layer in sums.items():
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), ours[f"layer_{i}"], of_layer
        )


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [dict(fsdp=2, tensor=2, context=2)])
def test_eight_devices_compute_what_one_does(sizes):
    loop = replace(MIDDLE.loop, enter="sum")
    config = replace(MIDDLE, loop=loop, vocab_size=12, feed_forward=(GLU(hidden_dim=12),))
    params = random_params(config)
    expected = loss_and_gradients(config, params, tensor=1)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-6)
    jax.tree.map(close, loss_and_gradients(config, params, **sizes), expected)


@pytest.mark.slow
def test_a_lens_reads_the_stream_after_each_pass():
    config = replace(BASE, num_layers=2, loop=Loop(passes=3))
    params = random_params(config)
    by_pass = inspect.logit_lens(config, params, TOKENS, layers="passes")
    for passes in (1, 2, 3):
        shorter = replace(config, loop=Loop(passes=passes))
        expected = jitted_forward(shorter)(params, TOKENS)
        np.testing.assert_allclose(by_pass[passes - 1], expected, atol=2e-5)
    with pytest.raises(ValueError, match="its layers run 3 times"):
        inspect.logit_attribution(config, params, TOKENS, right=1)
    with pytest.raises(ValueError, match="needs a model with a Loop"):
        inspect.logit_lens(BASE, random_params(BASE), TOKENS, layers="passes")


def test_a_loop_is_printed_read_from_json_and_kept_at_test_size():
    config = replace(MIDDLE, num_layers=40, loop=Loop(passes=3, start=3, stop=39))
    assert "loop=Loop(passes=3, start=3, stop=39, enter='last')" in repr(config)
    assert from_json(TransformerConfig, to_json(config)) == config != replace(config, loop=None)
    small = config.tiny()
    assert [len(part) for part in small.loop.split(small.layers)] == [3, 2, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(loop=Loop(passes=2, start=3)), "start < stop <= num_layers = 3; got 3 and 3"),
        (dict(loop=Loop(passes=2, stop=4)), "num_layers = 3; got 0 and 4"),
        (
            dict(loop=Loop(passes=2), topology=EncoderDecoder(num_encoder_layers=1)),
            "a Decoder or an Encoder; got an EncoderDecoder",
        ),
        (
            dict(loop=Loop(passes=2, enter="sum"), residual=HyperConnections()),
            "needs a single stream; HyperConnections has none",
        ),
        (dict(loop=Loop(passes=2, enter="final_norm"), final_norm=False), "final_norm=True"),
        (dict(loop=Loop(passes=2), residual=UNetSkips(num_layers=3)), "there must be no Loop"),
        (
            dict(
                loop=Loop(passes=2),
                attention=(BASE.attention, replace(BASE.attention, value_residual=True)),
            ),
            "Loop.start must be at least 1; got 0",
        ),
    ],
)
def test_impossible_loops(options, message):
    with pytest.raises(ValueError, match=message):
        replace(BASE, **options)


def test_layers_that_read_keys_of_earlier_ones_are_in_no_loop():
    reader = replace(BASE.attention, cross_layer_kv=True)
    with pytest.raises(ValueError, match="cross_layer_kv read an earlier layer"):
        replace(BASE, attention=(BASE.attention, reader), num_layers=2, loop=Loop(passes=2))
