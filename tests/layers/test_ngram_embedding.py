"""What holds of hashed n-grams in every model: a row of `CONFIGS` for each kind of layers."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import Transformer, costs, generate, inspect
from jaxformer import config as c
from jaxformer.config import NgramEmbedding, TransformerConfig, from_json, to_json
from jaxformer.generation import unroll
from jaxformer.layers import empty_cache
from jaxformer.layers.runtime import target_name
from jaxformer.parallel import (
    MeshConfig,
    abstract_parameters,
    check_divisible,
    make_mesh,
    put_batch,
    shardings,
)
from jaxformer.parallel.memory import estimate_memory
from jaxformer.training.gradient import make_value_and_grad
from tests.functional.test_ngrams import ids_by_hand
from tests.small_models import jitted_forward, random_params, rounding_error
from tests.test_custom_options import after_a_step, texts
from tests.test_custom_residual import LLAMA

DRAWN = dict(vocab_size=128, dim=24, rows=20, heads=3, row_multiple=8, width=3, start_token=3)
FIRST, SECOND = NgramEmbedding.draw(2, **DRAWN)
LONG = NgramEmbedding.draw(1, **{**DRAWN, "size": 4, "heads": 1, "width": 2})[0]


def of(ngrams, **fields):
    return replace(LLAMA, **{"ngram_embedding": ngrams, "num_layers": 3, **fields})


DELTA = c.LinearAttention(num_heads=4, num_key_heads=4, key_dim=3, value_dim=5)
CONFIGS = {
    "all layers": of(FIRST),
    "some layers": of((None, FIRST, None, SECOND, LONG), num_layers=5),
    "a pattern": of((None, FIRST), num_layers=4),
    "gated streams": of(
        (SECOND, None), residual=c.GatedStreams(num_streams=3, rank=5), final_norm=False
    ),
    "manifold": of((None, LONG, None), residual=c.ManifoldHyperConnections(num_streams=2)),
    "around layers": of(FIRST, residual=c.AltUp(num_streams=3)),
    "with the embedding": of((None, SECOND, None), residual=c.EmbeddingSkip()),
    "parallel": of(FIRST, block="parallel_shared_norm", norm=c.LayerNorm()),
    "after the sum": of(FIRST, norm_placement="post", norm=c.RMSNorm(scale_offset=1.0)),
    "recurrent": of((FIRST, None), attention=DELTA),
    "window": of(FIRST, attention=replace(LLAMA.attention, windows=(4,))),
    "one branch": of(FIRST, attention=(c.NoAttention(), LLAMA.attention)),
    "in a loop": of((None, FIRST, None), loop=c.Loop(passes=2, start=1)),
    "experts": of(
        (None, FIRST, None),
        feed_forward=(c.MoE(expert=c.GLU(hidden_dim=8), num_experts=4, top_k=2),),
    ),
    "with tokens": of((FIRST, None, None), layer_embedding=c.LayerEmbedding(dim=8)),
}
OFTEN = "some layers", "gated streams", "experts"  # the others compile for minutes: exhaustive
by_config = pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=name, marks=() if name in OFTEN else pytest.mark.exhaustive)
        for name, config in CONFIGS.items()
    ],
)


def close(config, params, run, tokens):
    bound = 3 * rounding_error(run, params, tokens)
    return lambda x, y, note="": np.testing.assert_allclose(x, y, rtol=0, atol=bound, err_msg=note)


@by_config
@pytest.mark.slow
def test_in_a_loop_unrolled_recomputed_and_packed(config):
    batch, params, run = texts(), random_params(config), jitted_forward(config)
    tokens, segments, positions = (x[:2] for x in (batch.tokens, batch.segments, batch.positions))
    alike, whole = close(config, params, run, tokens), run(params, tokens)
    alike(jitted_forward(config, scan=False, remat="full")(params, tokens), whole)
    alike(run(unroll(config, params), tokens), whole)
    packed = np.asarray(run(params, tokens, positions=positions, segments=segments))
    for row in range(2):
        start = int((segments[row] == 1).sum())
        alone = np.asarray(run(params, np.roll(tokens[row : row + 1], -start, axis=1)))
        alike(packed[row, start:], alone[0, : tokens.shape[1] - start])
        alike(packed[row, :start], whole[row, :start])


@by_config
@pytest.mark.slow
def test_a_text_in_two_calls_and_token_by_token_is_the_whole(config):
    """At every split, so that n-grams and taps of either call reach into the other."""
    tokens, params, run = texts().tokens[:2, :9], random_params(config), jitted_forward(config)
    alike, whole, length = close(config, params, run, tokens), run(params, tokens), 9
    for split in range(1, length):
        cache = empty_cache(config, (2,), length)
        for part in (slice(0, split), slice(split, length)):
            logits, cache = run(params, tokens[:, part], cache=cache)
            alike(logits, whole[:, part], f"split {split}")
    cache = empty_cache(config, (2,), length)
    for t in range(length):
        logits, cache = run(params, tokens[:, t : t + 1], cache=cache)
        alike(logits[:, 0], whole[:, t], f"token {t}")


@by_config
@pytest.mark.slow
def test_padding_on_either_side_is_left_out(config):
    """Without a cache before the text; with one before, within and behind, and then more."""
    tokens, params, run = texts().tokens[:2, :9], random_params(config), jitted_forward(config)
    alike, whole = close(config, params, run, tokens), np.asarray(run(params, tokens))
    before = np.array([[0, 0, 1, 1, 1, 1, 1, 1, 1]] * 2, np.int32)
    shifted = np.roll(tokens, 2, axis=1)
    positions = np.maximum(np.arange(9, dtype=np.int32) - 2, 0)[None].repeat(2, 0)
    padded = run(params, shifted, segments=before, positions=positions)
    alike(padded[:, 2:], whole[:, :7])
    valid = np.array([[0, 1, 1, 0, 1, 0, 0], [1, 0, 0, 1, 1, 1, 0]], bool)
    spread = np.full((2, 7), 5, np.int32)
    for row in range(2):
        spread[row, valid[row]] = tokens[row, : valid[row].sum()]
    cache = empty_cache(config, (2,), 9)
    logits, cache = run(params, spread, segments=np.int32(valid), cache=cache)
    rest = np.stack([tokens[row, valid[row].sum() :][:5] for row in range(2)])
    more, _ = run(params, rest, cache=cache)
    for row in range(2):
        count = int(valid[row].sum())
        alike(np.asarray(logits)[row, valid[row]], whole[row, :count])
        alike(np.asarray(more)[row], whole[row, count : count + 5])


@by_config
@pytest.mark.slow
def test_logits_depend_on_no_later_token(config):
    tokens, params, run = texts().tokens[:2, :9], random_params(config), jitted_forward(config)
    later = tokens.copy()
    later[:, 5:] = (later[:, 5:] + 1) % config.vocab_size
    logits, changed = (np.asarray(run(params, x)) for x in (tokens, later))
    np.testing.assert_array_equal(changed[:, :5], logits[:, :5])


MESHES = {
    "fsdp, tensor, context": dict(fsdp=2, tensor=2, context=2),
    "fsdp": dict(fsdp=8),
    "data, context": dict(data=2, context=4),
    "tensor, fsdp": dict(tensor=4, fsdp=2),
    "expert, fsdp, tensor": dict(expert=2, fsdp=2, tensor=2),
}
ON_MESHES = [
    pytest.param(config, sizes, id=f"{name}; {mesh}", marks=pytest.mark.exhaustive if rare else ())
    for name, config in CONFIGS.items()
    for mesh, sizes in MESHES.items()
    if name == "experts" or "expert" not in sizes
    for rare in [name not in OFTEN or len(sizes) < 3 or ("expert" in sizes) != (name == "experts")]
]


def rounding_of_a_step(config, expected, draws=4):
    """How far the parameters after a step go if all before go half of their last place.

    The gate's root is steep near zero, so that it is from 1e-6 to 4e-3, by model.
    """
    rng, worst = np.random.default_rng(0), 0.0
    noise = lambda p: np.float32(np.float64(p) * (1 + rng.choice([-6e-8, 6e-8], p.shape)))  # noqa: E731
    for _ in range(draws):
        _, moved = after_a_step(config, (("data", 1),), jax.tree.map(noise, random_params(config)))
        distances = jax.tree.map(lambda x, y: float(np.abs(x - y).max()), moved, expected)
        worst = max(worst, *jax.tree.leaves(distances))
    return worst


@pytest.mark.parametrize("config, sizes", ON_MESHES)
@pytest.mark.slow
def test_it_trains_on_eight_devices_as_on_one(config, sizes):
    actual = after_a_step(config, tuple(sizes.items()))
    expected = after_a_step(config, (("data", 1),))
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    bound = 2e-5 + 2 * rounding_of_a_step(config, expected[1])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=bound), actual[1], expected[1])


def rms(x, scale):
    return scale * x / np.sqrt((x**2).mean(-1, keepdims=True) + LLAMA.norm.eps)


def branch_by_hand(option, params, streams, tokens):
    """In float64, token by token: what is added to the streams of one text, [T, streams, D]."""
    p = jax.tree.map(np.float64, params)
    added, normed = np.zeros(streams.shape), []
    for t, x in enumerate(np.float64(streams)):
        before = [int(tokens[t - k]) if t >= k else -1 for k in range(option.size)]
        ids = ids_by_hand(before, option.multipliers, option.vocab_sizes, option.start_token)
        rows = p["table"][ids]
        key = np.einsum("kh,hknd->nd", rows, p["key"]["kernel"].reshape(*rows.T.shape, *x.shape))
        value = np.einsum("kh,hkd->d", rows, p["value"]["kernel"])
        query = rms(x, p["query_norm"]["scale"])
        score = (rms(key, p["key_norm"]["scale"]) * query).sum(-1) / x.shape[-1] ** 0.5
        root = np.sign(score) * np.sqrt(np.maximum(np.abs(score), 1e-6))
        added[t] = value / (1 + np.exp(-root))[:, None]
        normed.append(rms(added[t], p["convolution_norm"]["scale"]).ravel())
        taps = p["convolution"]["kernel"][:, 0]
        places = ((j, t - (option.width - 1 - j) * option.size) for j in range(option.width))
        mixed = sum(taps[j] * normed[place] for j, place in places if place >= 0)
        added[t] += (mixed / (1 + np.exp(-mixed))).reshape(x.shape)
    return added


@pytest.mark.parametrize("name", ["all layers", "gated streams"])
@pytest.mark.slow(but=["all layers"])
def test_the_branch_is_its_equation(name):
    """From the streams before the first layer, of a text with the token that ends one in it."""
    config, tokens = CONFIGS[name], texts().tokens[:1, :9].copy()
    tokens[0, 4] = DRAWN["start_token"]
    params = random_params(config)
    run = inspect.run(config, params, tokens)
    option, n = config.layers[0].ngram_embedding, config.stream_width // config.model_dim
    layers = params["decoder"].get("layers") or params["decoder"]["first_layers"]
    first = jax.tree.map(lambda x: x[0], layers["layer_0"]["ngram_embedding"])
    streams = np.repeat(run.values["embeddings"][None][0][:, None], n, axis=1)
    actual = run.values["ngram_embedding"][0][0]
    expected = branch_by_hand(option, first, streams, tokens[0])
    np.testing.assert_allclose(actual, expected.reshape(actual.shape), atol=1e-5)


def test_the_stream_is_the_sum_of_all_branches():
    config = CONFIGS["all layers"]
    trace = inspect.trace(config, random_params(config), texts().tokens[:2, :9]).decoder
    total = trace.embeddings + sum(x.sum(0) for x in trace.branches.values())
    np.testing.assert_allclose(trace.stream[-1], total, atol=1e-4)


@pytest.mark.slow
def test_it_begins_without_the_convolution():
    config = CONFIGS["some layers"]
    params = jax.jit(Transformer(config).init)(jax.random.key(0), np.zeros((1, 2), np.int32))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    starts = [x for path, x in leaves if path[-2].key == "convolution"]
    assert len(starts) == 3 and not any(np.any(x) for x in starts)


GENERATED = {
    "some layers": CONFIGS["some layers"],
    "read anew": CONFIGS["all layers"].with_rope_scaling(
        c.DynamicNTK(factor=4.0, original_max_length=8)
    ),
}


@pytest.mark.parametrize("config", GENERATED.values(), ids=GENERATED)
@pytest.mark.slow
def test_rows_of_any_length_generate_what_the_whole_text_says(config):
    """Also where the length changes RoPE, so that the cache is emptied and read again."""
    rows, params = [[5, 1], [9, 2, 6, 5, 30, 3, 7]], random_params(config)
    together, run = generate(config, params, rows, max_new_tokens=5), jitted_forward(config)
    for row, text in zip(rows, np.asarray(together), strict=True):
        for length in range(len(row), len(row) + 5):
            logits = run(params, text[None, :length])[0, -1]
            assert text[length] == np.argmax(logits), length


@pytest.mark.parametrize("name", ["some layers", "gated streams"])
@pytest.mark.slow
def test_eight_devices_generate_what_one_does(name):
    config, rows = CONFIGS[name], [[5, 1], [9, 2, 6, 5, 30, 3, 7]]
    params, mesh = random_params(config), make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    alone = generate(config, params, rows, max_new_tokens=5)
    placed = jax.device_put(params, shardings(abstract_parameters(config, mesh)))
    np.testing.assert_array_equal(
        generate(config, placed, rows, max_new_tokens=5, mesh=mesh), alone
    )


@pytest.mark.parametrize("sizes", [dict(fsdp=8), dict(fsdp=4, tensor=2)], ids=["fsdp", "both"])
@pytest.mark.slow
def test_no_device_ever_has_the_table(sizes):
    """In the program of loss and gradient, nothing is larger than a device's part of it."""
    option = replace(FIRST, vocab_sizes=(4099, 4111, 4127, 4129, 4133, 4139))
    config = of((None, option, None))
    mesh = make_mesh(MeshConfig(**sizes), jax.devices())
    batch = jax.eval_shape(lambda: put_batch(texts(), mesh, 8))
    program = jax.jit(make_value_and_grad(Transformer(config), mesh))
    params = abstract_parameters(config, mesh)
    text = program.lower(params, {}, jnp.int32(0), batch).compile().as_text()
    size = option.num_rows * option.head_dim

    def numbers(lines):
        shapes = re.findall(r"[a-z]\d+\[([\d,]+)\]", "\n".join(lines))
        return [int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes]

    gathers = [x for x in text.splitlines() if re.search(r" (all-gather|all-to-all)\(", x)]
    assert gathers and max(numbers(gathers)) < size / 8
    assert max(numbers(text.splitlines())) == size / 8


def test_costs():
    plain, config, length = of(None), of((None, SECOND, None)), 10
    width, option = config.model_dim, SECOND
    table = option.num_rows * 4
    kernels = 24 * 2 * width + 3 * width + 3 * width  # key and value; norms; three taps
    added = lambda count, *more: count(config, *more) - count(plain, *more)  # noqa: E731
    assert added(costs.num_parameters) == table + kernels
    assert added(costs.num_active_parameters) == 24 + kernels
    assert added(costs.forward_flops, length) == 2 * length * (24 * 2 * width + 3 * width)
    assert added(costs.cache_bytes, length) == 2 * 6 * width + 4 * 2
    streams = replace(config, residual=c.ManifoldHyperConnections(num_streams=2))
    without = replace(streams, ngram_embedding=None)
    flops = [costs.forward_flops(x, length) for x in (streams, without)]
    assert int.__sub__(*flops) == 2 * length * (24 * 3 * width + 3 * 2 * width)
    kept = [
        costs.activation_bytes(config, 1, length, remat=remat, bytes_per_number=1)
        - costs.activation_bytes(plain, 1, length, remat=remat, bytes_per_number=1)
        for remat in costs.REMAT_POLICIES
    ]
    assert kept[0] > kept[1] > kept[2] > 0


def test_memory_has_a_part_of_the_table():
    """The parameter, its gradient and two moments of a device's part, and nothing gathered."""
    large = replace(FIRST, vocab_sizes=tuple(x + 2**20 for x in FIRST.vocab_sizes))
    estimates = [
        estimate_memory(of(x), dict(fsdp=4, tensor=2), batch_size=4, length=8, dtype="bfloat16")
        for x in (FIRST, large)
    ]
    more = [y - x for x, y in zip(*estimates, strict=True)]
    rows = large.num_rows - FIRST.num_rows
    assert rows == 6 * 2**20
    part = 4 * 3 * rows * 4 // 8  # bytes, three layers, four features
    assert sorted(more)[-3:] == [part, part, 2 * part] and not any(sorted(more)[:-3]), more


def test_options_of_layers():
    config = CONFIGS["some layers"]
    assert [x.ngram_embedding for x in config.layers] == [None, FIRST, None, SECOND, LONG]
    assert (
        from_json(TransformerConfig, to_json(config))
        == config
        != replace(config, ngram_embedding=FIRST)
    )
    assert eval(repr(config), vars(c)) == config
    assert config.tiny().ngram_size == config.ngram_size == 4
    assert CONFIGS["a pattern"].segments("decoder").repeats == 2
    assert target_name(("decoder", "layers", "ngram_embedding", "key")) == "ngram_embedding"
    assert FIRST.vocab_sizes == (23, 29, 31, 37, 41, 43) and SECOND.vocab_sizes[0] == 47
    assert all(x % 2 and x * 128 <= 2**63 for x in FIRST.multipliers + SECOND.multipliers)
    assert max(FIRST.multipliers).bit_length() > 50


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(multipliers=(3,)), "at least 2 entries; got 1"),
        (dict(vocab_sizes=(3, 5, 7)), "each of 2 lengths of n-grams; got 3"),
        (dict(dim=25), "a multiple of the number of heads, 6; got 25"),
        (dict(vocab_sizes=(2**28 + 1, 3)), "at most 268435456"),
        (dict(multipliers=(3, 2**63)), r"from 1 to 2\*\*63 - 1"),
    ],
)
def test_impossible_options(fields, message):
    with pytest.raises(ValueError, match=message):
        replace(FIRST, **fields)


ENCODERS = c.EncoderDecoder(num_encoder_layers=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(vocab_size=3), "below vocab_size, 3; got 3"),
        (dict(vocab_size=2**20), r"with vocab_size 1048576 at most 8796093022208; got \d{15}"),
        (dict(topology=ENCODERS), "needs a Decoder; got EncoderDecoder"),
        (dict(residual=c.UNetSkips(num_layers=3)), "UNetSkips hands on something else"),
        (dict(residual=c.DepthWeightedAverage(num_layers=3)), "DepthWeightedAverage hands on"),
    ],
)
def test_impossible_models(fields, message):
    with pytest.raises(ValueError, match=message):
        of(FIRST, **fields)


def test_sizes_that_devices_do_not_share():
    with pytest.raises(ValueError, match="NgramEmbedding's features of a row 4 is not .* tensor 8"):
        check_divisible(of(FIRST), dict(tensor=8))
    with pytest.raises(ValueError, match="NgramEmbedding's rows 216 is not .* fsdp 16"):
        check_divisible(of(replace(FIRST, row_multiple=24)), dict(fsdp=16))
