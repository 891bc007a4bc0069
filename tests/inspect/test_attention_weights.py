"""Attention maps are those of transformers, and of numbers written out in numpy."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import Transformer, inspect, zoo
from jaxformer.config import (
    Alibi,
    Angles,
    BlockSparse,
    Decay,
    Differential,
    Encoder,
    EncoderDecoder,
    Latent,
    MultiHead,
    SharedKV,
    T5Bias,
    TransformerXL,
)
from jaxformer.functional import prefer_blockwise
from jaxformer.inspect import attention_weights as attention
from tests.inspect.conftest import GOLDEN

NAMES = sorted(path.stem for path in GOLDEN.glob("*.npz"))
KINDS = {
    "grouped": {},
    "alibi": {"positions": (Alibi(),)},
    "t5": {"positions": (T5Bias(num_buckets=8, max_distance=14),)},
    "transformer-xl": {"positions": (TransformerXL(),)},
    "window": {"windows": (3, None)},
    "blocks": {"windows": (BlockSparse(block_size=2, local_blocks=1, stride=2),)},
    "relu": {"normalizer": "relu"},
    "sinks": {"sinks": True},
    "shared": SharedKV(num_heads=4, num_kv_heads=2, head_dim=6),
    "differential": Differential(num_heads=4, num_kv_heads=2, head_dim=6),
    "latent": Latent(num_heads=4, latent_dim=8, nope_dim=4, rope_dim=2, value_dim=6),
    "decay": Decay(num_heads=4, head_dim=6, angles=Angles()),
    "hybrid": (
        Decay(num_heads=4, head_dim=6),
        MultiHead(num_heads=4, num_kv_heads=2, head_dim=6, windows=(3, None)),
    ),
}


def test_the_families_of_the_survey_are_there():
    assert {"llama", "gpt2", "bloom", "t5", "mt5", "gemma2", "mistral", "deepseek_v2"} < set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow(but=["mistral"])
def test_maps_are_those_of_transformers(name, reference):
    outputs, config, params, tokens, inputs = reference(name)
    maps = inspect.attention_maps(config, params, tokens, **inputs)
    parts = {part: x for part, x in maps._asdict().items() if x is not None}
    assert set(parts) == set(outputs) & {"decoder", "encoder", "cross"}
    for part, actual in parts.items():
        np.testing.assert_allclose(actual, outputs[part], atol=1e-5, rtol=0, err_msg=part)


def numpy_maps(params, tokens, config, window):
    """Attention of the first layer of a Llama, in float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    layer = jax.tree.map(lambda x: x[0], params["decoder"]["layers"]["layer_0"])
    x = params["embedding"]["tokens"]["embedding"][np.asarray(tokens)]
    x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.norm.eps)
    x = x * layer["pre_attention_norm"]["scale"]
    query, key = (
        np.einsum("td,dnh->tnh", x, layer["attention"][name]["kernel"]) for name in ("query", "key")
    )
    length, half = len(tokens), query.shape[-1] // 2
    angles = np.arange(length)[:, None] * 10_000.0 ** (-np.arange(half) / half)
    turn = np.exp(1j * angles)[:, None]
    query, key = ((y[..., :half] + 1j * y[..., half:]) * turn for y in (query, key))
    key = np.repeat(key, query.shape[1] // key.shape[1], axis=1)
    scores = np.einsum("tnc,snc->nts", query, key.conj()).real / np.sqrt(2 * half)
    distance = np.arange(length)[:, None] - np.arange(length)
    scores[:, (distance < 0) | (distance >= window)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.slow
def test_maps_of_long_texts_are_exact_though_training_never_has_them(build):
    config, params, tokens, _ = build(length=257, attention={"windows": (40,)})
    assert prefer_blockwise(257, 257)  # so the model attends block by block
    actual = inspect.attention_maps(config, params, tokens, layers=(0,)).decoder
    expected = numpy_maps(params, tokens[1], config, window=40)
    np.testing.assert_allclose(actual[0, 1], expected, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_chosen_layers_heads_and_queries_are_cut_from_the_whole(kind, build):
    config, params, tokens, _ = build(attention=KINDS[kind])
    whole = inspect.attention_maps(config, params, tokens).decoder
    part = inspect.attention_maps(
        config, params, tokens, layers=(2, 0), heads=(3, 1), window=(2, 6)
    ).decoder
    assert part.shape == (2, 2, 2, 4, 7)
    expected = np.asarray(whole)[[2, 0]][:, :, [3, 1], 2:6]
    np.testing.assert_allclose(part, expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["alibi", "t5", "window"])
@pytest.mark.slow
def test_rules_of_long_texts_are_cut_likewise(kind, build):
    config, params, tokens, _ = build(length=256, attention=KINDS[kind])
    segments = jnp.broadcast_to((jnp.arange(256) > 99).astype(jnp.int32) + 1, tokens.shape)
    whole = inspect.attention_maps(config, params, tokens, layers=(1,), segments=segments)
    part = inspect.attention_maps(
        config, params, tokens, layers=(1,), heads=(2,), window=(90, 120), segments=segments
    )
    np.testing.assert_allclose(part.decoder, whole.decoder[:, :, 2:3, 90:120], atol=1e-6)
    assert float(np.abs(part.decoder[..., 15:, :100]).max()) == 0  # another document


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"relu", "decay", "hybrid", "sinks"}))
@pytest.mark.slow(but=["grouped", "t5"])
def test_rows_are_shares_and_nothing_ahead_is_seen(kind, build):
    config, params, tokens, _ = build(attention=KINDS[kind])
    maps = inspect.attention_maps(config, params, tokens).decoder
    np.testing.assert_allclose(np.sum(maps, axis=-1), 1.0, atol=1e-6)
    assert float(np.abs(jnp.triu(maps, 1)).max()) == 0


@pytest.mark.slow
def test_sinks_take_a_share_and_scale_the_rest(build):
    config, params, tokens, _ = build(num_layers=1, attention=KINDS["sinks"])
    maps = np.asarray(inspect.attention_maps(config, params, tokens).decoder)
    del params["decoder"]["layers"]["layer_0"]["attention"]["sinks"]
    config = replace(config, attention=replace(config.attention, sinks=False))
    without = inspect.attention_maps(config, params, tokens).decoder
    shares = maps.sum(axis=-1, keepdims=True)
    assert (shares < 1).all()
    np.testing.assert_allclose(maps / shares, without, atol=1e-6)


@pytest.mark.slow
def test_layers_after_the_last_whole_pattern_come_last(build):
    """And of two repetitions of a pattern of two, each has its place."""
    config, params, tokens, _ = build(num_layers=5, attention={"windows": (1, None)})
    maps = inspect.attention_maps(config, params, tokens).decoder
    far = jnp.abs(maps - jnp.broadcast_to(jnp.eye(7), maps.shape)).max(axis=(1, 2, 3, 4))
    assert [bool(x > 0.1) for x in far] == [False, True, False, True, False]


@pytest.mark.slow
def test_decay_weighs_by_powers(build):
    config, params, tokens, _ = build(attention=KINDS["decay"])
    segments = jnp.array([[1, 1, 1, 1, 2, 2, 2]] * 2)
    maps = inspect.attention_maps(config, params, tokens, segments=segments).decoder
    logits = np.asarray(params["decoder"]["layers"]["layer_0"]["attention"]["memory"]["bias"])
    gamma = 1 / (1 + np.exp(-logits.astype(np.float64)))
    distance = np.arange(7)[:, None] - np.arange(7)
    power = np.where(distance >= 0, gamma[..., None, None] ** np.maximum(distance, 0), 0)
    expected = np.sqrt(1 - gamma**2)[..., None, None] * power
    expected[..., 4:, :4] = 0
    np.testing.assert_allclose(maps, np.stack([expected] * 2, 1), atol=2e-6)
    some = inspect.attention_maps(config, params, tokens, heads=2, window=(3, 6), segments=segments)
    np.testing.assert_array_equal(some.decoder, maps[:, :, 2:3, 3:6])


@pytest.mark.slow
def test_a_few_rows_of_decay_take_little_memory():
    """No T x T numbers, though the text is long: 67 MB for one head of one layer."""
    config = zoo.get("llama-2-7b").tiny()
    config = replace(config, attention=KINDS["decay"])
    tokens = jnp.zeros((1, 4096), int)
    params = jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens)["params"]
    choice = attention.MapSelection(None, None, (0, 4))
    run = attention._compute_maps.lower(
        Transformer(config), choice, ("decoder",), params, {"tokens": tokens}
    )
    assert run.compile().memory_analysis().temp_size_in_bytes < 4 * 4096**2


@pytest.mark.slow
def test_an_encoder_looks_both_ways(build):
    config, params, tokens, _ = build(topology=Encoder())
    maps = inspect.attention_maps(config, params, tokens)
    assert maps.decoder is None and maps.cross is None
    assert float(jnp.triu(maps.encoder, 1).max()) > 0.05


@pytest.mark.slow
def test_padding_of_a_source_is_not_looked_at(build):
    config, params, tokens, inputs = build(topology=EncoderDecoder(num_encoder_layers=2))
    padding = jnp.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    maps = inspect.attention_maps(config, params, tokens, source_segments=padding, **inputs)
    assert maps.encoder.shape == (2, 2, 4, 5, 5) and maps.cross.shape == (3, 2, 4, 7, 5)
    assert float(maps.cross[:, 0, ..., 3:].max()) == 0 < float(maps.cross[:, 1, ..., 3:].min())


@pytest.mark.slow
def test_only_the_parts_that_are_asked_for(build):
    config, params, tokens, inputs = build(topology=EncoderDecoder(num_encoder_layers=2))
    maps = inspect.attention_maps(config, params, tokens, parts=("cross",), layers=(2,), **inputs)
    assert maps.decoder is None and maps.encoder is None and maps.cross.shape[0] == 1


def test_parts_that_a_model_lacks_are_refused(build):
    config, params, tokens, _ = build()
    for parts in (("encoder",), ("dec",), "decoder", ()):
        with pytest.raises(ValueError, match=r"parts must be among \('decoder',\) for this model"):
            inspect.attention_maps(config, params, tokens, parts=parts)
    topology = EncoderDecoder(num_encoder_layers=1)
    config, params, tokens, _ = build(topology=topology)
    with pytest.raises(ValueError, match="pass source=token_ids"):
        inspect.attention_maps(config, params, tokens)


def test_choices_are_taken_as_they_come(build):
    config, params, tokens, _ = build()
    plain = inspect.attention_maps(config, params, tokens, layers=(1,), heads=(0, 2), window=(2, 5))
    other_maps = inspect.attention_maps(
        config, params, np.asarray(tokens), layers=1, heads=np.array([0, 2]), window=[2, 5]
    )
    np.testing.assert_array_equal(plain.decoder, other_maps.decoder)


def test_maps_that_are_too_large_are_refused_with_ways_out(build):
    config, params, tokens, _ = build()
    needed = 3 * 2 * 4 * 7 * 7 * 4
    with pytest.raises(
        ValueError, match=r"need 4\.70 kB.*layers=\(0,\), heads=\(0, 1\), window=\("
    ):
        inspect.attention_maps(config, params, tokens, max_bytes=needed - 1)
    with pytest.raises(
        ValueError, match=r"for example by window=\(0, 128\), or raise max_bytes to 392"
    ):
        inspect.attention_maps(config, params, tokens, max_bytes=1, layers=(0,), heads=(0,))
    fits = inspect.attention_maps(config, params, tokens, max_bytes=needed)
    assert fits.decoder.nbytes == needed


def test_a_large_model_is_refused_before_anything_is_computed():
    config = zoo.get("llama-2-70b")
    tokens = jnp.zeros((1, 4096), jnp.int32)
    with pytest.raises(ValueError, match=r"need 344 GB, but max_bytes is 1\.07 GB"):
        inspect.attention_maps(config, {}, tokens)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"layers": (0, 3)}, r"layers of the decoder must be in \[0, 2\]; got \(0, 3\)"),
        ({"heads": (-1,)}, r"heads of the decoder must be in \[0, 3\]; got \(-1,\)"),
        ({"layers": ()}, r"layers of the decoder must be in \[0, 2\]; got \(\)"),
        ({"window": (3, 9)}, r"within the 7 queries .*; got \(3, 9\)"),
        ({"window": (3, 3)}, r"within the 7 queries .*; got \(3, 3\)"),
        ({"window": (3,)}, r"within the 7 queries .*; got \(3,\)"),
    ],
)
def test_what_does_not_exist_is_refused(chosen, message, build):
    config, params, tokens, _ = build()
    with pytest.raises(ValueError, match=message):
        inspect.attention_maps(config, params, tokens, **chosen)


def test_a_token_outside_the_vocabulary_is_refused(build):
    config, params, tokens, _ = build()
    with pytest.raises(ValueError, match=r"31"):
        inspect.attention_maps(config, params, tokens.at[0, 0].set(31))


@pytest.mark.slow
def test_entropy_counts_the_tokens_that_are_seen():
    maps = jnp.array([[[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25, 0.25, 0.25, 0.25]]])
    actual = inspect.attention_entropy(maps[None, None])
    np.testing.assert_allclose(actual[0, 0, 0], np.log([1, 2, 4]), atol=1e-6)


def layers_with_weights(config):
    layers = (config.layers[i].attention for i in range(config.num_layers))
    return tuple(i for i, attention in enumerate(layers) if attention.has_weights)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [x for x in zoo.names() if layers_with_weights(zoo.get(x))])
def test_every_preset_can_be_looked_at(name):
    config = zoo.get(name).tiny()
    tokens = jax.random.randint(jax.random.key(0), (1, 9), 0, config.vocab_size)
    reads = isinstance(config.topology, EncoderDecoder)
    inputs = {"source": tokens[:, :5]} if reads else {}
    model = Transformer(config)
    params = jax.jit(lambda: model.init(jax.random.key(1), tokens, **inputs))()["params"]
    chosen = layers_with_weights(config)
    layers = None if len(chosen) == config.num_layers else chosen
    maps = inspect.attention_maps(config, params, tokens, layers=layers, **inputs)
    assert (maps.cross is not None) == reads
    for part in maps:
        if part is not None:
            sums = np.sum(part, axis=-1)
            if getattr(config.attention, "sinks", False):  # which take the rest
                assert np.all((sums > 0) & (sums < 1))
            else:
                np.testing.assert_allclose(sums, 1.0, atol=1e-5)
