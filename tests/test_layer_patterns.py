"""Layers before the pattern, such as DeepSeek's dense ones, and layers with one branch."""

import shlex
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import config as c
from jaxformer import costs, inspect, save_pretrained, zoo
from jaxformer.generation import unroll
from jaxformer.run import pretraining
from jaxformer.run.command_line import parse_run
from jaxformer.run.program import print_run
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


DEEPSEEK = model(LATENT, (DENSE, EXPERTS, EXPERTS, EXPERTS), num_layers=4)
# Its first layer has other heads, a window and another network; then two kinds in turn.
MIXED = model(
    (
        c.MultiHead(num_heads=2, num_kv_heads=2, head_dim=8, windows=(3,)),
        *(HEADS, c.Decay(num_heads=4, head_dim=4)) * 3,
    ),
    (c.MLP(hidden_dim=24), *(EXPERTS, DENSE) * 3),
    num_layers=6,
)
# Each layer has one branch, as in Nemotron-H: mixers, attention and feed-forward networks.
ONE_BRANCH = model(
    (c.Decay(num_heads=4, head_dim=4), c.NoAttention(), HEADS),
    (c.NoFeedForward(), DENSE, c.NoFeedForward()),
    num_layers=7,
)
# Heads, their width and the hidden features grow with the depth, as in OpenELM.
GROWING = model(
    tuple(
        c.MultiHead(num_heads=n, num_kv_heads=2, head_dim=width)
        for n, width in ((2, 4), (4, 4), (4, 8), (6, 8))
    ),
    tuple(c.GLU(hidden_dim=width) for width in (8, 16, 24, 40)),
    num_layers=4,
)
MODELS = {"DeepSeek": DEEPSEEK, "mixed": MIXED, "one branch": ONE_BRANCH, "growing": GROWING}
by_model = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)


@by_model
@pytest.mark.slow
def test_it_computes_what_its_layers_do_one_by_one(config):
    params, tokens = random_params(config), texts().tokens[:2, :9]
    alone = unroll(config, params)
    assert set(alone["decoder"]) - {"final_norm"} == {"first_layers"}
    np.testing.assert_allclose(
        jitted_forward(config)(params, tokens), jitted_forward(config)(alone, tokens), atol=1e-5
    )


@pytest.mark.parametrize(
    "config, segments",
    [
        (DEEPSEEK, (1, 1, 3, 0)),
        (MIXED, (1, 2, 2, 1)),
        (ONE_BRANCH, (0, 3, 2, 1)),
        (GROWING, (0, 4, 1, 0)),
    ],
    ids=MODELS,
)
@pytest.mark.slow(but=["DeepSeek", "one branch"])
def test_the_pattern_that_repeats_is_found(config, segments):
    assert config.segments("decoder") == segments
    depth = {name: len(layers) for name, layers in random_params(config)["decoder"].items()}
    names = ("first_layers", "layers", "tail")
    assert [depth.get(name, 0) for name in names] == [segments[i] for i in (0, 1, 3)]


@pytest.mark.slow
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
@pytest.mark.slow
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
    one_by_one = [replace(config, num_layers=1, **c.cycles_of((layer,))) for layer in config.layers]
    head = costs.logits.logit_flops(config, 64)
    flops = [costs.forward_flops(one, 64) - head for one in one_by_one]
    assert costs.forward_flops(config, 64) == head + sum(flops)
    for cost in (costs.expert_flops, costs.cache_bytes):
        assert cost(config, 64) == sum(cost(one, 64) for one in one_by_one)


@by_model
def test_it_is_printed_read_back_and_made_small(config):
    assert c.from_json(c.TransformerConfig, c.to_json(config)) == config
    assert eval(repr(config), vars(c)) == config
    small = config.tiny()
    kinds = ([type(layer.attention) for layer in x.layers] for x in (small, config))
    assert len({tuple(dict.fromkeys(types)) for types in kinds}) == 1
    assert small.tiny() == small


def test_kinds_and_networks_of_all_layers_are_flags():
    kinds = "(NoAttention(), MultiHead(num_heads=2, num_kv_heads=2, head_dim=8))"
    networks = "(MLP(hidden_dim=9),) * 2 + (GLU(hidden_dim=8),)"
    flags = ["--model.attention", kinds, "--model.feed-forward", networks]
    run = parse_run(pretraining.RUNS, "", flags)
    assert run.model.layers[1].attention.num_heads == 2
    assert [layer.feed_forward.hidden_dim for layer in run.model.layers[:4]] == [9, 9, 8, 9]
    again = shlex.split(print_run(run, pretraining.RUNS))[2:]
    assert parse_run(pretraining.RUNS, "", again) == run


def test_every_rope_is_scaled():
    scaling = c.LinearScaling(factor=2.0)
    for config in MODELS.values():
        ropes = [layer.rope for layer in config.with_rope_scaling(scaling).layers]
        assert {rope.scaling for rope in ropes if rope is not None} == {scaling}


@pytest.mark.slow
def test_an_unrolled_model_is_exported_as_it_was(tmp_path):
    config = zoo.get("deepseek-v2-lite").tiny()
    params = random_params(config)
    save_pretrained(tmp_path / "stacked", config, params)
    save_pretrained(tmp_path / "unrolled", config, unroll(config, params))
    for name in ("config.json", "model.safetensors"):
        files = [(tmp_path / x / name).read_bytes() for x in ("stacked", "unrolled")]
        assert files[0] == files[1]


def test_a_model_without_attention_is_made_small_too():
    for kinds in (c.NoAttention(), (HEADS, *(c.NoAttention(),) * 3)):
        small = model(kinds, (DENSE,), num_layers=4).tiny()
        assert small.model_dim > 0 and small.tiny() == small


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            dict(attention=c.NoAttention(), feed_forward=(c.NoFeedForward(),)),
            r"A layer needs attention or a feed-forward network; got Layer\(attention=NoAtt",
        ),
        (
            dict(feed_forward=(DENSE, c.NoFeedForward()), block="parallel"),
            "A layer with one branch needs the serial block; got 'parallel'",
        ),
        (dict(num_layers=0), "num_layers must be positive"),
        (dict(dropout=c.Dropout(attention=0.1)), "Decay has no attention weights"),
        (
            dict(topology=c.EncoderDecoder(num_encoder_layers=1), attention=(LATENT, HEADS)),
            "needs MultiHead, for cross-attention; got Latent",
        ),
    ],
)
def test_what_cannot_be_is_refused(fields, message):
    kinds = c.Decay(num_heads=4, head_dim=4), HEADS
    with pytest.raises(ValueError, match=message):
        model(**dict(attention=kinds, feed_forward=(DENSE,), num_layers=4) | fields)


def test_a_layer_has_one_window_and_one_kind_of_positions():
    with pytest.raises(ValueError, match="one position option and one window; got 1 and 2"):
        c.Layer(attention=replace(HEADS, windows=(3, None)), feed_forward=DENSE)


def test_parameters_of_another_depth_are_refused():
    deeper = replace(DEEPSEEK, num_layers=5, feed_forward=(DENSE, *(EXPERTS,) * 4))
    with pytest.raises(ValueError, match=r"have 4 layers \(1 first layers, .* has 5 \(1 first"):
        jitted_forward(deeper)(random_params(DEEPSEEK), jnp.ones((1, 2), int))
