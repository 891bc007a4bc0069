"""Layers before the pattern, such as DeepSeek's dense ones, and layers with one branch."""

import shlex
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import pretrain
from experiments.command_line import parse_run
from experiments.training.program import print_run
from jaxformer import config as c
from jaxformer import costs, inspect, save_pretrained
from jaxformer.generation import unroll
from tests.small_models import jitted_forward, random_params
from tests.test_custom_options import after_a_step, assert_cached_is_whole, texts

HEADS = c.MultiHead(num_heads=4, num_kv_heads=2, head_dim=4)
LATENT = c.Latent(num_heads=4, latent_dim=8, nope_dim=4, rope_dim=4, value_dim=4)
DENSE = c.GLU(hidden_dim=24)
EXPERTS = c.MoE(expert=c.GLU(hidden_dim=8), num_experts=4)


def model(attention, feed_forward, **fields):
    return c.TransformerConfig(
        vocab_size=128, model_dim=16, attention=attention, feed_forward=feed_forward, **fields
    )


DEEPSEEK = model(
    LATENT, (EXPERTS,), num_layers=4, first_layers=(c.Layer(attention=LATENT, feed_forward=DENSE),)
)
# Its first layer has other heads, a window and a dense network; then two kinds in turn.
MIXED = model(
    c.Hybrid(kinds=(c.Decay(num_heads=4, head_dim=4), HEADS)),
    (DENSE, EXPERTS),
    num_layers=6,
    first_layers=(
        c.Layer(
            attention=c.MultiHead(num_heads=2, num_kv_heads=2, head_dim=8, windows=(3,)),
            feed_forward=c.MLP(hidden_dim=24),
        ),
    ),
)
# Each layer has one branch, as in Nemotron-H: mixers, attention and feed-forward networks.
ONE_BRANCH = model(
    c.Hybrid(kinds=(c.Decay(num_heads=4, head_dim=4), c.NoAttention(), HEADS)),
    (c.NoFeedForward(), DENSE, c.NoFeedForward()),
    num_layers=7,
)
MODELS = {"DeepSeek": DEEPSEEK, "mixed": MIXED, "one branch": ONE_BRANCH}
by_model = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)


def spelled_out(config, params):
    """The same model with a pattern as long as it is deep, whose layers are no repetitions."""
    layers = [config.layer(i) for i in range(config.num_layers)]
    kinds = tuple(layer.to_layer().attention for layer in layers)
    attention = c.Hybrid(kinds=kinds)
    feed_forward = tuple(layer.feed_forward for layer in layers)
    decoder = {k: x for k, x in params["decoder"].items() if k == "final_norm"}
    for i, layer in enumerate(inspect.unstack_layers(params["decoder"])):
        decoder.setdefault("layers", {})[f"layer_{i}"] = jax.tree.map(lambda x: x[None], layer)
    longer = replace(config, attention=attention, feed_forward=feed_forward, first_layers=())
    return longer, {**params, "decoder": decoder}


@by_model
@pytest.mark.slow(but=["DeepSeek", "one branch"])
def test_it_computes_what_the_same_layers_in_one_pattern_do(config):
    params, tokens = random_params(config), texts().tokens[:2, :9]
    assert len(params["decoder"].get("first_layers", ())) == len(config.first_layers)
    longer, spread = spelled_out(config, params)
    assert len(longer.distinct_layers) == len(config.distinct_layers)
    np.testing.assert_allclose(
        jitted_forward(config)(params, tokens), jitted_forward(longer)(spread, tokens), atol=1e-5
    )


def test_a_missing_branch_has_no_norm_and_no_parameters():
    params, tokens = random_params(ONE_BRANCH), texts().tokens[:1, :5]
    parts = [set(layer) for layer in inspect.unstack_layers(params["decoder"])[:3]]
    assert parts == [
        {"pre_attention_norm", "attention"},
        {"pre_feed_forward_norm", "feed_forward"},
        {"pre_attention_norm", "attention"},
    ]
    branches = inspect.trace(ONE_BRANCH, params, tokens).decoder.branches
    sizes = {name: jnp.abs(x).max(axis=(1, 2, 3)) > 0 for name, x in branches.items()}
    assert sizes["attention"].tolist() == [True, False, True, True, False, True, True]
    assert sizes["feed_forward"].tolist() == [False, True, False, False, True, False, False]
    maps = inspect.attention_maps(ONE_BRANCH, params, tokens, layers=(2, 5))
    np.testing.assert_allclose(maps.decoder.sum(-1), 1, rtol=1e-5)
    with pytest.raises(ValueError, match=r"NoAttention computes .* that do are \[0, 2, 3, 5, 6\]"):
        inspect.attention_maps(ONE_BRANCH, params, tokens)


@by_model
@pytest.mark.slow(but=["DeepSeek"])
def test_with_a_cache_it_is_the_whole_text_at_once(config):
    assert_cached_is_whole(config)


@by_model
@pytest.mark.slow
def test_it_trains_on_eight_devices_as_on_one(config):
    actual = after_a_step(config, (("data", 2), ("fsdp", 2), ("tensor", 2)))
    expected = after_a_step(config, (("data", 1),))
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), actual[1], expected[1])


@by_model
def test_it_is_counted_layer_by_layer(config):
    params = random_params(config)
    assert costs.num_parameters(config) == sum(x.size for x in jax.tree.leaves(params))
    longer, _ = spelled_out(config, params)
    for cost in (costs.num_parameters, costs.num_active_parameters):
        assert cost(config) == cost(longer)
    for cost in (costs.forward_flops, costs.expert_flops, costs.cache_bytes):
        assert cost(config, 64) == cost(longer, 64)


@by_model
def test_it_is_printed_read_back_and_made_small(config):
    assert c.from_json(c.TransformerConfig, c.to_json(config)) == config
    assert eval(repr(config), vars(c)) == config
    small = config.tiny()
    assert [type(x.attention) for x in small.distinct_layers] == [
        type(x.attention) for x in config.distinct_layers
    ]
    assert small.tiny() == small


def test_it_is_a_flag():
    layer = "Layer(attention=MultiHead(num_heads=2, num_kv_heads=2, head_dim=8), "
    layer += "feed_forward=MLP(hidden_dim=9))"
    run = parse_run(pretrain.RUNS, "", ["--model.first-layers", layer])
    assert run.model.first_layers[0].feed_forward == c.MLP(hidden_dim=9)
    again = shlex.split(print_run(run, pretrain.RUNS))[3:]
    assert parse_run(pretrain.RUNS, "", again) == run


def test_every_rope_is_scaled():
    scaling = c.LinearScaling(factor=2.0)
    for config in MODELS.values():
        ropes = [layer.rope for layer in config.with_rope_scaling(scaling).distinct_layers]
        assert {rope.scaling for rope in ropes if rope is not None} == {scaling}


def test_a_model_of_first_layers_alone_is_changed_layer_by_layer():
    alone, params = unroll(DEEPSEEK, random_params(DEEPSEEK))
    with pytest.raises(ValueError, match="All 4 layers are first_layers, which keep their pos"):
        alone.with_positions(c.Alibi())
    with pytest.raises(ValueError, match="first_layers cannot be exported; .* before `unroll`"):
        save_pretrained("nowhere", alone, params)


def test_a_model_without_attention_is_made_small_too():
    for fields in ({}, {"first_layers": (c.Layer(attention=HEADS, feed_forward=DENSE),)}):
        small = model(c.NoAttention(), (DENSE,), num_layers=4, **fields).tiny()
        assert small.model_dim > 0 and small.tiny() == small


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            dict(attention=c.NoAttention(), feed_forward=(c.NoFeedForward(),), first_layers=()),
            r"A layer needs attention or a feed-forward network; got LayerConfig\(attention=NoAtt",
        ),
        (
            dict(feed_forward=(DENSE, c.NoFeedForward()), block="parallel", first_layers=()),
            "A layer with one branch needs the serial block; got 'parallel'",
        ),
        (dict(num_layers=0), "num_layers must be positive"),
        (
            dict(first_layers=(c.Layer(attention=LATENT, feed_forward=DENSE),) * 5),
            "num_layers must be at least the number of first_layers, 5; got 4",
        ),
        (dict(dropout=c.Dropout(attention=0.1)), "Decay has no attention weights"),
        (
            dict(
                topology=c.EncoderDecoder(num_encoder_layers=1),
                first_layers=(c.Layer(attention=LATENT, feed_forward=DENSE),),
            ),
            "needs MultiHead, for cross-attention; got Latent",
        ),
    ],
)
def test_what_cannot_be_is_refused(fields, message):
    first = (c.Layer(attention=c.Decay(num_heads=4, head_dim=4), feed_forward=DENSE),)
    with pytest.raises(ValueError, match=message):
        model(
            **dict(attention=HEADS, feed_forward=(DENSE,), num_layers=4, first_layers=first)
            | fields
        )


def test_a_layer_has_one_window_and_one_kind_of_positions():
    with pytest.raises(ValueError, match="one position option and one window; got 1 and 2"):
        c.Layer(attention=replace(HEADS, windows=(3, None)), feed_forward=DENSE)


def test_parameters_of_another_depth_are_refused():
    with pytest.raises(ValueError, match=r"have 4 layers \(1 first layers, .* has 5 \(1 first"):
        jitted_forward(replace(DEEPSEEK, num_layers=5))(
            random_params(DEEPSEEK), jnp.ones((1, 2), int)
        )
