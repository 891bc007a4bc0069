from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxformer import Transformer, zoo
from jaxformer import functional as F
from jaxformer.config import (
    GLU,
    MLP,
    Alibi,
    ClampedGEGLU,
    Dropout,
    DynamicNTK,
    Embedding,
    Encoder,
    EncoderDecoder,
    FanAverage,
    FanIn,
    Initialisation,
    LayerNorm,
    Learned,
    LinearScaling,
    Llama3Scaling,
    LMHead,
    LongRope,
    MultiHead,
    Normal,
    NTKScaling,
    QueryScaling,
    Rope,
    Sinusoid,
    TransformerConfig,
    Yarn,
    Zeros,
)
from jaxformer.layers import empty_cache
from jaxformer.layers.block import Block
from tests.small_models import random_params

MIXED = (MLP(hidden_dim=9, bias=True), ClampedGEGLU(hidden_dim=5))
HYBRID = dict(attention=dict(positions=(Rope(), None), windows=(3, None)))


@pytest.mark.slow
def test_no_gradient_from_the_future(config, influence):
    """inventory row 87: logits up to t have exactly zero gradient by any later token."""
    seen = influence(config(**HYBRID), jnp.arange(7)[None] % 5) > 0
    assert not np.any(seen & ~jnp.tri(7, dtype=bool))
    assert np.all(jnp.diagonal(seen))


def value_and_gradient(cfg, params, tokens, **mode):
    def loss(params):
        logits = Transformer(cfg, **mode).apply({"params": params}, tokens)
        return F.cross_entropy(jnp.maximum(logits, -1e3), tokens)

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.slow
def test_every_mode_has_the_same_gradient(config, build, tokens):
    """Over a pattern of two layers with one left over."""
    cfg = config(**HYBRID, feed_forward=MIXED)
    params, _ = build(cfg)
    expected = value_and_gradient(cfg, params, tokens)
    for mode in (dict(remat="dots"), dict(remat="full"), dict(scan=False, remat="full")):
        other = value_and_gradient(cfg, params, tokens, **mode)
        chex.assert_trees_all_close(other, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
def test_remat_keeps_less(config, build):
    """What the backward pass reads of the forward pass shrinks from "none" to "dots" to "full"."""
    cfg = config(model_dim=32, num_layers=4)
    tokens = jnp.zeros((8, 32), int)
    params, _ = build(cfg)

    def num_saved(remat):
        model = Transformer(cfg, remat=remat)
        _, pullback = jax.eval_shape(
            lambda p: jax.vjp(lambda p: model.apply({"params": p}, tokens), p), params
        )
        return sum(x.size for x in jax.tree.leaves(pullback))

    assert num_saved("none") > num_saved("dots") > num_saved("full")


@pytest.mark.slow
def test_every_prefix_gives_the_same_logits(config, build, tokens):
    """inventory row 85: in training all rows predict; row t is what the model says of tokens[:t+1].
    Only generation reads the last row alone."""
    _, run = build(config())
    logits = run(tokens)
    np.testing.assert_allclose(run(tokens[:, :4])[:, -1], logits[:, 3], atol=1e-5)


@pytest.mark.slow
def test_packed_documents_do_not_see_each_other(config, build):
    """Two documents in one row give the logits each gives alone, and exactly no gradient across."""
    scaling = QueryScaling(beta=0.7, original_max_length=2)
    embedding = Embedding(positions=Learned(max_length=9))
    _, run = build(config(attention=dict(query_scaling=scaling), embedding=embedding))
    first, second = jnp.asarray([3, 1, 4]), jnp.asarray([1, 5, 9, 2])
    packed = run(
        jnp.concatenate([first, second])[None],
        positions=jnp.asarray([[0, 1, 2, 0, 1, 2, 3]]),
        segments=jnp.asarray([[1, 1, 1, 2, 2, 2, 2]]),
    )
    np.testing.assert_allclose(packed[0, :3], run(first), atol=1e-5)
    np.testing.assert_allclose(packed[0, 3:], run(second), atol=1e-5)


@pytest.mark.slow
def test_any_leading_axes(config, build, tokens):
    _, run = build(config())
    stacked = run(tokens.reshape(2, 1, 7))
    np.testing.assert_allclose(stacked[:, 0], run(tokens), atol=1e-5)
    np.testing.assert_allclose(run(tokens[0]), run(tokens)[0], atol=1e-5)


@pytest.mark.slow
def test_windows_limit_what_is_seen(config, influence):
    tokens = jnp.arange(7)[None]
    seen = influence(config(attention=dict(windows=(2,)), num_layers=1), tokens) > 0
    at = jnp.arange(7)
    np.testing.assert_array_equal(seen, F.window_mask(at, at, 2))


def test_pattern_with_layers_left_over(config, build, tokens):
    """Five layers of a pattern of two: two whole periods under the scan, one in the tail."""
    cfg = config(num_layers=5, attention=dict(positions=(Rope(), None)))
    params, _ = build(cfg)
    query = params["decoder"]["layers"]["layer_1"]["attention"]["query"]["kernel"]
    assert query.shape == (2, 14, 4, 6)
    assert set(params["decoder"]["tail"]) == {"layer_0"}


@pytest.mark.slow
def test_layers_run_in_the_order_of_the_pattern(config, build, tokens):
    """With a window on even layers only, swapping the pattern changes the result."""
    cfg = config(num_layers=4, attention=dict(windows=(1, None)))
    params, run = build(cfg)
    other = Transformer(config(num_layers=4, attention=dict(windows=(None, 1))))
    assert np.abs(run(tokens) - jax.jit(other.apply)({"params": params}, tokens)).max() > 1e-3


@pytest.mark.slow
def test_encoder_sees_both_ways(config, influence):
    assert np.all(influence(config(topology=Encoder()), jnp.arange(7)[None]) > 0)


ENCODER_DECODER = dict(
    topology=EncoderDecoder(num_encoder_layers=6),
    num_layers=6,
    norm_placement="post",
    final_norm=False,
    norm=LayerNorm(),
    attention=dict(num_kv_heads=4, positions=(None,)),
    feed_forward=(MLP(hidden_dim=11, activation="relu", bias=True),),
    embedding=Embedding(positions=Sinusoid()),
    head=LMHead(tied=True),
)


def test_the_first_transformer_has_six_blocks_of_its_sublayers(config, build, tokens):
    """inventory rows 83, 84: six encoder blocks of two sublayers, six decoder blocks of three."""
    params, _ = build(config(**ENCODER_DECODER))
    encoder, decoder = (params[name]["layers"]["layer_0"] for name in ("encoder", "decoder"))
    branches = {"attention", "feed_forward"}
    assert {name for name in encoder if not name.endswith("norm")} == branches
    assert {name for name in decoder if not name.endswith("norm")} == branches | {"cross_attention"}
    assert decoder["cross_attention"]["key"]["kernel"].shape == (6, 14, 4, 6)


@pytest.mark.slow
def test_padding_of_the_source_has_no_effect(config, build, tokens):
    """inventory row 84: queries come from the decoder, keys and values from the encoder, which
    gives one vector per source token; padded ones are seen by nobody, in the encoder neither."""
    _, run = build(config(**ENCODER_DECODER))
    source = jnp.asarray([[4, 8, 15, 16, 23]] * 2)
    real = jnp.asarray([[1, 1, 1, 0, 0]] * 2)
    other = source.at[:, 3:].set(7)
    np.testing.assert_array_equal(
        run(tokens, source=source, source_segments=real),
        run(tokens, source=other, source_segments=real),
    )
    np.testing.assert_allclose(
        run(tokens, source=source, source_segments=real),
        run(tokens, source=source[:, :3]),
        atol=1e-5,
    )
    changed = run(tokens, source=source.at[:, 0].set(9), source_segments=real)
    assert np.abs(changed - run(tokens, source=source, source_segments=real)).max() > 1e-3


@pytest.mark.slow
def test_packed_pairs_see_their_own_source(config, build):
    _, run = build(config(**ENCODER_DECODER))
    targets, sources = jnp.asarray([[3, 1, 4, 1]]), jnp.asarray([[5, 9, 2, 6, 5]])
    packed = run(
        targets,
        positions=jnp.asarray([[0, 1, 0, 1]]),
        segments=jnp.asarray([[1, 1, 2, 2]]),
        source=sources,
        source_positions=jnp.asarray([[0, 1, 2, 0, 1]]),
        source_segments=jnp.asarray([[1, 1, 1, 2, 2]]),
    )
    np.testing.assert_allclose(packed[:, 2:], run(targets[:, 2:], source=sources[:, 3:]), atol=1e-5)


def test_separate_source_vocabulary(config, build, tokens):
    cfg = config(
        **{
            **ENCODER_DECODER,
            "topology": EncoderDecoder(num_encoder_layers=2, source_vocab_size=50),
        }
    )
    params, _ = build(cfg)
    assert params["source_embedding"]["tokens"]["embedding"].shape == (50, 14)
    with pytest.raises(ValueError, match="Token id 50 .*vocabulary of 50"):
        Transformer(cfg).apply({"params": params}, tokens, source=tokens.at[0, 0].set(50))


def test_source_given_to_the_wrong_model(config, build, tokens):
    _, run = build(config())
    with pytest.raises(ValueError, match="topology Decoder has no encoder"):
        run(tokens, source=tokens)
    _, run = build(config(**ENCODER_DECODER))
    with pytest.raises(ValueError, match="needs a source"):
        run(tokens)


def test_wrong_ids_and_positions_are_refused(config, build, tokens):
    """linen's own lookup would give NaN."""
    cfg = config(embedding=Embedding(positions=Learned(max_length=7)))
    params, _ = build(cfg)
    with pytest.raises(ValueError, match="Token id 31 .*vocabulary of 31"):
        Transformer(cfg).apply({"params": params}, tokens.at[1, 2].set(31))
    with pytest.raises(ValueError, match="Position 7 is out of range"):
        Transformer(cfg).apply({"params": params}, jnp.zeros((1, 8), int))


def test_learned_positions_have_a_row_each(config, build):
    """inventory row 48: a learned absolute embedding is a table [max_length, d], added once."""
    params, _ = build(config(embedding=Embedding(positions=Learned(max_length=9))))
    assert params["embedding"]["positions"]["embedding"].shape == (9, 14)


@pytest.mark.slow
def test_learned_and_rotary_positions_compared(config, build, tokens):
    """inventory row 53: learned positions are parameters, added to the embedding, and end; rotary
    ones are none, act inside attention, leave the embedding as it is, and depend on distance."""
    cfg = config(
        embedding=Embedding(positions=Learned(max_length=9)), attention=dict(positions=(None,))
    )
    learned, run_learned = build(cfg)
    rotary, run_rotary = build(config())
    assert "positions" in learned["embedding"] and "positions" not in rotary["embedding"]
    later = jnp.arange(7) + 2
    np.testing.assert_allclose(run_rotary(tokens, positions=later), run_rotary(tokens), atol=1e-4)
    moved = run_learned(tokens, positions=later) - run_learned(tokens)
    assert np.abs(moved).max() > 1e-2
    with pytest.raises(ValueError, match="Position 9 is out of range"):
        Transformer(cfg).apply({"params": learned}, tokens, positions=later + 7)


def test_rotary_turns_queries_and_keys_by_default(config, build, tokens):
    """inventory row 54: not values, unless asked."""
    assert Rope().targets == ("q", "k")
    params, run = build(config())
    explicit = Transformer(config(attention=dict(positions=(Rope(targets=("q", "k")),))))
    np.testing.assert_allclose(
        run(tokens), jax.jit(explicit.apply)({"params": params}, tokens), atol=1e-5
    )


def test_head_width_is_free(config, build):
    """inventory row 55: d_k = d_model / num_heads is usual, not needed: 4 heads of 6, width 14."""
    params, _ = build(config())
    out = params["decoder"]["layers"]["layer_0"]["attention"]["out"]["kernel"]
    assert out.shape == (3, 4, 6, 14)


SCALINGS = [
    LinearScaling(factor=4.0),
    NTKScaling(factor=4.0),
    DynamicNTK(factor=2.0, original_max_length=4),
    Llama3Scaling(factor=8.0, original_max_length=16),
    Yarn(factor=4.0, original_max_length=16, beta_fast=4.0),
    Yarn(factor=4.0, original_max_length=16, attention_factor=1.5),
    LongRope(
        short_factors=(1.0, 1.1, 1.2),
        long_factors=(1.0, 2.0, 4.0),
        original_max_length=4,
        max_length=16,
    ),
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: type(s).__name__)
@pytest.mark.slow(but=["NTKScaling", "LongRope"])
def test_every_rope_scaling_changes_the_model(config, build, tokens, scaling):
    params, run = build(config())
    scaled = Transformer(config(attention=dict(positions=(Rope(scaling=scaling),))))
    logits = jax.jit(scaled.apply)({"params": params}, tokens)
    assert np.isfinite(logits).all() and np.abs(logits - run(tokens)).max() > 1e-3


@pytest.mark.slow
def test_length_decides_between_long_and_short_factors(config, build, tokens):
    long_rope = SCALINGS[-1]
    params, run = build(config(attention=dict(positions=(Rope(scaling=long_rope),))))
    always = replace(long_rope, short_factors=long_rope.long_factors)
    same = Transformer(config(attention=dict(positions=(Rope(scaling=always),))))
    apply = jax.jit(same.apply)
    np.testing.assert_allclose(apply({"params": params}, tokens), run(tokens), atol=1e-5)
    short = apply({"params": params}, tokens[:, :4])
    assert np.abs(short - run(tokens[:, :4])).max() > 1e-4


@pytest.mark.slow
def test_computes_in_bfloat16_on_float32_parameters(config, tokens):
    model = Transformer(config(), dtype=jnp.bfloat16)
    params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    logits, state = model.apply({"params": params}, tokens, capture_intermediates=True)
    exact = jax.jit(Transformer(config()).apply)({"params": params}, tokens)
    assert logits.dtype == jnp.float32
    assert 0 < np.abs(logits - exact).max() < 0.1
    block = state["intermediates"]["decoder"]["layers"]["layer_0"]["__call__"][0][0]
    assert block.dtype == jnp.bfloat16


@pytest.mark.slow
def test_dropout_only_when_asked_for(config, build, tokens):
    cfg = config(dropout=Dropout(embedding=0.2, attention=0.2, feed_forward=0.2, residual=0.2))
    params, run = build(cfg)
    np.testing.assert_array_equal(run(tokens), run(tokens))

    def noisy(seed):
        return run(tokens, deterministic=False, rngs={"dropout": jax.random.key(seed)})

    np.testing.assert_array_equal(noisy(0), noisy(0))
    assert np.abs(noisy(0) - noisy(1)).max() > 1e-3


@pytest.mark.parametrize("place", ["embedding", "attention", "feed_forward", "residual"])
@pytest.mark.slow
def test_each_place_of_dropout_acts(config, build, tokens, place):
    _, run = build(config(dropout=Dropout(**{place: 0.5})))
    dropped = run(tokens, deterministic=False, rngs={"dropout": jax.random.key(0)})
    assert np.abs(dropped - run(tokens)).max() > 1e-3


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.slow
def test_each_layer_drops_values_of_its_own(config, tokens, scan):
    """Where all but a bias is 0, its gradient is 0 where it was dropped and nowhere else."""
    cfg = config(feed_forward=MIXED[:1], dropout=Dropout(residual=0.5), final_norm=False)
    zeros = jax.tree.map(jnp.zeros_like, random_params(cfg))
    params = zeros | {"head": random_params(cfg)["head"]}
    model, rngs = Transformer(cfg, scan=scan), {"dropout": jax.random.key(0)}

    def total(params):
        return model.apply({"params": params}, tokens[:1, :1], deterministic=False, rngs=rngs).sum()

    layers = jax.jit(jax.grad(total))(params)["decoder"]["layers"]["layer_0"]
    is_kept = layers["feed_forward"]["down"]["bias"] != 0
    assert is_kept.shape == (3, cfg.model_dim) and 10 < is_kept.sum() < 32
    assert len(set(map(tuple, is_kept.tolist()))) == 3


@pytest.mark.slow
def test_masked_ids_get_no_probability(config, build, tokens):
    _, run = build(config(head=LMHead(masked_ids=(3, 5))))
    probabilities = jax.nn.softmax(run(tokens))
    np.testing.assert_array_equal(probabilities[..., jnp.asarray([3, 5])], 0.0)


@pytest.mark.slow
def test_initial_sizes(config, tokens):
    """Each choice of initial values shows in the parameters; depth divides the residual writers."""
    wide = config(
        model_dim=210,
        num_layers=8,
        initialisation=Initialisation(
            embedding=Normal(std=0.5), query=FanIn(gain=2.0), projection=FanAverage(), head=Zeros()
        ),
        attention=dict(head_dim=50),
        feed_forward=(GLU(hidden_dim=400),),
    )
    params = jax.jit(Transformer(wide).init)(jax.random.key(0), tokens)["params"]
    layer = params["decoder"]["layers"]["layer_0"]

    def std(branch, name):
        return float(jnp.std(layer[branch][name]["kernel"]))

    depth = (2 * 8) ** -0.5
    assert np.std(params["embedding"]["tokens"]["embedding"]) == pytest.approx(0.5, rel=0.05)
    assert std("attention", "query") == pytest.approx(2 * 210**-0.5, rel=0.02)
    assert std("attention", "key") == pytest.approx(((210 + 100) / 2) ** -0.5, rel=0.02)
    assert std("attention", "value") == pytest.approx(((210 + 100) / 2) ** -0.5, rel=0.02)
    assert std("attention", "out") == pytest.approx(depth * 205**-0.5, rel=0.02)
    assert std("feed_forward", "gate") == pytest.approx(305**-0.5, rel=0.02)
    assert std("feed_forward", "down") == pytest.approx(depth * 305**-0.5, rel=0.02)
    assert np.all(params["head"]["kernel"] == 0)
    plain = replace(wide, initialisation=replace(wide.initialisation, residual="plain"))
    assert (wide.residual_init_divisor, plain.residual_init_divisor) == (4.0, 1.0)


@pytest.mark.slow
def test_the_stream_keeps_its_size_with_depth(config, tokens):
    """Initial logits of 24 layers are about as large as those of 2."""

    def size(num_layers):
        cfg = config(num_layers=num_layers, model_dim=64, final_norm=False)
        model = Transformer(cfg)
        params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
        return jnp.std(jax.jit(model.apply)({"params": params}, tokens))

    assert size(24) < 2 * size(2)


@pytest.mark.slow
def test_under_vmap_grad_jit(config, build, tokens):
    params, run = build(config())
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), params)
    both = jax.jit(jax.vmap(lambda p, t: run(t, p)))(stacked, jnp.stack([tokens, tokens]))
    np.testing.assert_allclose(both[1], run(tokens), atol=1e-5)
    gradient = jax.jit(jax.grad(lambda p: F.cross_entropy(run(tokens, p), tokens)))(params)
    chex.assert_tree_all_finite(gradient)


@pytest.mark.slow
def test_an_encoder_may_have_choices_of_its_own():
    """It is the encoder of a model that has no other choices; it is deeper than the decoder."""
    choices = dict(
        attention=MultiHead(
            num_heads=2, num_kv_heads=1, head_dim=6, positions=(Alibi(),), windows=(3, None)
        ),
        feed_forward=(GLU(hidden_dim=7),),
    )
    both = TransformerConfig(
        vocab_size=11,
        model_dim=8,
        num_layers=1,
        attention=MultiHead(num_heads=4, num_kv_heads=4, head_dim=2),
        feed_forward=(GLU(hidden_dim=5),),
        topology=EncoderDecoder(num_encoder_layers=2, **choices),
    )
    alone = replace(both, num_layers=2, topology=Encoder(), **choices)
    source = jnp.asarray([[1, 5, 3, 9]])

    @partial(jax.jit, static_argnums=0)
    def encoded(config, params, tokens, **options):
        apply = Transformer(config).apply
        _, captured = apply({"params": params}, tokens, **options, capture_intermediates=True)
        return captured["intermediates"]["encoder"]["__call__"][0][0]

    params = random_params(both)
    actual = encoded(both, params, source[:, :2], source=source)
    parts = {name: params[name] for name in ("embedding", "encoder", "head")}
    np.testing.assert_allclose(actual, encoded(alone, parts, source), atol=1e-6)


def test_a_forward_pass_traces_each_layer_once(config, build, tokens):
    cfg = config(num_layers=3)
    params, _ = build(cfg)
    calls = []

    def note(method, args, kwargs, context):
        if isinstance(context.module, Block) and context.method_name == "__call__":
            calls.append(context.module.path)
        return method(*args, **kwargs)

    with nn.intercept_methods(note):
        jax.eval_shape(Transformer(cfg).apply, {"params": params}, tokens)
    assert len(calls) == cfg.segments("decoder").period


def test_a_parameter_of_another_shape_is_named(config, build, tokens):
    params, _ = build(config())
    message = r"decoder/final_norm/scale has the shape \(9,\), but the model's is \(14,\)"
    params["decoder"]["final_norm"]["scale"] = jnp.ones(9)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(Transformer(config()).apply, {"params": params}, tokens)


@pytest.mark.exhaustive
def test_gradient_by_depth_at_initialisation(config, tokens):
    """inventory row 5: of 24 pre-norm layers the first has the larger gradient, of post-norm ones
    the last. That is so for the feed-forward of 2017; with a SwiGLU both have it in the first.
    Geometric means over 64 draws: 4.8, 0.54 and 10.7. Of post-norm 18 draws are the other way
    round, so one draw shows nothing."""

    def first_over_last(placement, feed_forward):
        """The mean over draws of the ratio's logarithm, in standard errors."""
        cfg = config(
            num_layers=24,
            model_dim=32,
            norm_placement=placement,
            norm=LayerNorm(),
            feed_forward=(feed_forward,),
            initialisation=Initialisation(residual="plain"),
        )

        def of_one_draw(key):
            params = Transformer(cfg).init(key, tokens)["params"]
            _, gradient = value_and_gradient(cfg, params, tokens)
            kernels = gradient["decoder"]["layers"]["layer_0"]["feed_forward"]["up"]["kernel"]
            norms = jnp.linalg.norm(kernels, axis=(1, 2))
            return jnp.log(norms[0] / norms[-1])

        draws = jax.jit(jax.vmap(of_one_draw))(jax.random.split(jax.random.key(0), 64))
        return draws.mean() / (draws.std(ddof=1) / 8)

    relu = MLP(hidden_dim=128, activation="relu")
    assert first_over_last("pre", relu) > 3
    assert first_over_last("post", relu) < -3
    assert first_over_last("post", GLU(hidden_dim=128)) > 3


@pytest.mark.slow
def test_a_row_does_not_see_how_long_another_is(config, build, tokens):
    """Scalings that look at the length take each row's own."""
    scaling = DynamicNTK(factor=2.0, original_max_length=4)
    _, run = build(config(attention=dict(positions=(Rope(scaling=scaling),))))
    at = jnp.stack([jnp.arange(7), jnp.arange(7) + 40])
    together = run(tokens, positions=at)
    np.testing.assert_allclose(together[0], run(tokens[0], positions=at[0]), atol=1e-5)
    assert np.abs(together[0] - run(tokens[0], positions=at[1])).max() > 1e-3


GIVEN = {
    "tokens": [[1, 2, 3], [4, 5, 6]],
    "positions": [[0, 1, 2], [0, 1, 0]],
    "segments": [[1, 1, 1], [1, 1, 2]],
}


@pytest.mark.slow
def test_rows_without_tokens(config, build):
    cfg = config()
    empty, (params, _) = jnp.zeros((2, 0), jnp.int32), build(cfg)
    assert Transformer(cfg).apply({"params": params}, empty).shape == (2, 0, cfg.vocab_size)


@pytest.mark.parametrize("name", ["bamba-9b", "qwen-3.5-9b"])
@pytest.mark.slow
def test_64_bit_numbers_change_no_dtype(name):
    config = zoo.get(name).tiny()
    tokens, cache = jnp.zeros((1, 4), jnp.int32), empty_cache(config, (1,), 8)
    params = jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens)["params"]

    def apply(params, cache):
        return Transformer(config).apply({"params": params}, tokens, cache=cache)

    enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with enable_x64(True), jax.numpy_dtype_promotion("standard"):
        lowered = jax.jit(apply).lower(params, cache)
    logits, updated_cache = lowered.out_info
    assert logits.dtype == jnp.float32
    expected = jax.tree.map(lambda x: (x.shape, x.dtype), cache)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), updated_cache) == expected


@pytest.mark.slow
def test_lists_and_narrow_ids_are_arrays(config, build):
    cfg = config()
    params, _ = build(cfg)
    model, variables = Transformer(cfg), {"params": params}
    arrays = {name: jnp.asarray(values) for name, values in GIVEN.items()}
    expected = model.apply(variables, **arrays)
    forms = [GIVEN, {n: np.asarray(x, np.uint8) for n, x in GIVEN.items()}]
    for form in forms:
        np.testing.assert_array_equal(model.apply(variables, **form), expected)
    made = jax.eval_shape(lambda: model.init(jax.random.key(0), GIVEN["tokens"]))["params"]
    assert jax.tree.structure(made) == jax.tree.structure(params)


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(segments=[[1, 1], [1, 2]]), r"segments has 2 .*axis 1 .* but tokens has 3"),
        (dict(positions=[0, 1]), r"positions has 2 .*axis 0 .* but tokens has 3 .*axis 1"),
        (dict(tokens=[[0.5, 1.0, 2.0]]), "tokens is float32, but must be an integer"),
        (
            dict(targets=[[1, 2, 3]]),
            r"targets has batch axes \(1,\) .* must be the \(2,\) of tokens",
        ),
    ],
)
def test_what_does_not_fit_is_named_as_it_was_passed(config, build, changed, message):
    cfg = config()
    params, _ = build(cfg)
    with pytest.raises(ValueError, match=f"^Transformer: {message}"):
        Transformer(cfg).apply({"params": params}, **{**GIVEN, **changed})
