"""Patching, ablation and attribution: against runs patched by hand and against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer import Transformer, inspect
from jaxformer import functional as F
from jaxformer.config import (
    Decay,
    DeepNorm,
    Embedding,
    Encoder,
    EncoderDecoder,
    HeadTransform,
    Initialisation,
    Latent,
    LayerEmbedding,
    LayerNorm,
    LMHead,
    MultiHead,
    NoFeedForward,
    Normal,
    RMSNorm,
    Rope,
    SharedKV,
    TransformerConfig,
)
from jaxformer.inspect import At, Mean, Replace, Zero
from jaxformer.inspect.lens import apply_head
from jaxformer.layers import RuntimeConfig
from tests.inspect.test_patches import without_rows
from tests.small_models import random_params
from tests.test_custom_mixer import GatedMemory
from tests.test_layer_patterns import MIXED, ONE_BRANCH

METRIC = inspect.logit_difference(3, np.array([4, 5]))


def score(logits):
    return float(np.mean(logits[:, -1, 3] - logits[[0, 1], -1, [4, 5]]))


@pytest.fixture
def two_texts(build):
    config, params, tokens, _ = build()
    return config, params, tokens, tokens.at[:, 2].set((tokens[:, 2] + 9) % 31)


def test_a_difference_of_logits_is_read_at_its_position():
    logits = np.random.default_rng(0).normal(size=(2, 7, 31)).astype(np.float32)
    assert np.isclose(METRIC(logits), score(logits))
    expected = np.mean(logits[[0, 1], 4, [8, 9]])
    assert np.isclose(inspect.logit_difference(np.array([8, 9]), position=4)(logits), expected)


def test_effects_are_those_of_single_patches(two_texts):
    config, params, clean, corrupted = two_texts
    run = inspect.run(config, params, clean)
    low = score(inspect.trace(config, params, corrupted).logits)
    scale = score(run.logits) - low

    def effect(at):
        patched = inspect.run(config, params, corrupted, patches={at: Replace(run)}, record=())
        return (score(patched.logits) - low) / scale

    patching = (config, params, clean, corrupted, METRIC)
    by_position = inspect.activation_patching(*patching)
    assert by_position.shape == (3, 7)
    np.testing.assert_allclose(by_position[:, :2], 0, atol=1e-5)  # they stand before the change
    np.testing.assert_allclose(by_position[2], [0] * 6 + [1], atol=1e-5)
    for layer, position in ((0, 2), (1, 6)):
        expected = effect(At("stream", layer=layer, position=position))
        np.testing.assert_allclose(by_position[layer, position], expected, atol=1e-4)
    by_head = inspect.activation_patching(*patching, name="key", by="head")
    assert by_head.shape == (3, 2)
    np.testing.assert_allclose(by_head[1, 1], effect(At("key", layer=1, head=1)), atol=1e-4)


@pytest.mark.slow
def test_the_direct_path_of_a_head_ends_in_the_last_stream(two_texts):
    config, params, clean, corrupted = two_texts
    runs = [inspect.run(config, params, x) for x in (clean, corrupted)]
    kernels = params["decoder"]["layers"]["layer_0"]["attention"]["out"]["kernel"]
    runtime, low = RuntimeConfig(), score(runs[1].logits)
    expected = np.zeros((3, 4))
    for layer in range(3):
        change = runs[0].values["heads"][layer] - runs[1].values["heads"][layer]
        for head in range(4):
            stream = runs[1].values["stream"][2] + change[:, :, head] @ kernels[layer, head]
            logits = apply_head(config, runtime, "decoder", params, stream)
            expected[layer, head] = (score(logits) - low) / (score(runs[0].logits) - low)
    actual = inspect.path_patching(config, params, clean, corrupted, METRIC)
    np.testing.assert_allclose(actual, expected, atol=1e-4)


@pytest.mark.slow
def test_ablation_is_the_loss_without_rows_of_the_output_projection(build):
    config, params, tokens, _ = build()
    effects = inspect.ablate_heads(config, params, tokens)
    loss = np.mean(inspect.token_losses(config, params, tokens))
    silent = without_rows(config, params, 1, head=1)
    expected = np.mean(inspect.token_losses(config, silent, tokens)) - loss
    np.testing.assert_allclose(effects[1, 1], expected, atol=1e-5)
    mean = inspect.ablate_heads(config, params, tokens, lambda x: jnp.sum(x[0, 3]), by="mean")
    patched = inspect.run(config, params, tokens, patches={At("heads", layer=2, head=0): Mean()})
    plain = inspect.trace(config, params, tokens).logits
    expected = np.sum(patched.logits[0, 3]) - np.sum(plain[0, 3])
    np.testing.assert_allclose(mean[2, 0], expected, rtol=1e-3)


@pytest.mark.slow
def test_layers_without_heads_have_no_effect_of_heads():
    tokens = jnp.arange(14).reshape(2, 7)
    effects = inspect.ablate_heads(ONE_BRANCH, random_params(ONE_BRANCH), tokens)
    paths = inspect.path_patching(MIXED, random_params(MIXED), tokens, tokens + 1, METRIC)
    assert np.isfinite(effects).sum(axis=1).tolist() == [4, 0, 4, 4, 0, 4, 4]
    assert np.isfinite(paths).sum(axis=1).tolist() == [2, 4, 4, 4, 4, 4]


@pytest.mark.slow
def test_a_custom_mixer_has_the_effects_of_its_branch(build):
    config, params, tokens, _ = build(attention=GatedMemory())
    names = [row.name for row in inspect.names(config)]
    assert names == ["embeddings", "stream", "attention", "feed_forward", "hidden", "final_normed"]
    corrupted = tokens.at[:, 2].set((tokens[:, 2] + 9) % 31)
    patching = (config, params, tokens, corrupted, METRIC)
    by_branch = inspect.activation_patching(*patching, name="attention")
    assert by_branch.shape == (3, 7) and np.abs(by_branch).max() > 0.01
    with pytest.raises(ValueError, match="no value 'heads'; it has embeddings, .*attention"):
        inspect.path_patching(*patching)
    with pytest.raises(ValueError, match="no value 'heads'; it has embeddings, .*attention"):
        inspect.ablate_heads(*patching[:3])
    with pytest.raises(ValueError, match="the model has GatedMemory"):
        inspect.composition_scores(config, params)
    parts = inspect.logit_attribution(config, params, tokens, 3)
    total = parts.embeddings + sum(x.sum(0) for x in parts.branches.values()) + parts.bias
    np.testing.assert_allclose(total, parts.logit, atol=1e-4)


def test_effects_that_do_not_exist_are_refused(two_texts, build):
    config, params, clean, corrupted = two_texts

    def patching(clean=clean, metric=METRIC, **options):
        return inspect.activation_patching(config, params, clean, corrupted, metric, **options)

    wrong = [
        ({"clean": clean[:, 1:]}, r"one shape; got \(2, 6\) and \(2, 7\)"),
        ({"clean": corrupted}, r"tell clean and corrupted apart; it is (\S+) and \1\."),
        ({"metric": lambda x: x[..., 0]}, r"one number; got shape \(2, 7\)"),
        ({"name": "thoughts"}, "no value 'thoughts'; it has embeddings"),
        ({"name": "embeddings"}, "'embeddings' has no layers; heads have query"),
        ({"by": "head"}, "'stream' has no heads; heads have query, key, value, heads"),
        ({"by": "token"}, "by must be 'position' or 'head'; got 'token'"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            patching(**options)
    with pytest.raises(ValueError, match="by must be 'zero' or 'mean'; got 'noise'"):
        inspect.ablate_heads(config, params, clean, by="noise")
    with pytest.raises(ValueError, match="pass targets="):
        inspect.ablate_heads(*build(topology=Encoder())[:3])


WORDS, PERIOD, LENGTH = 32, 12, 24


def repeated_rows(key, count, shortest=6):
    """Rows of random tokens that repeat after 6 to 12 tokens."""
    for_words, for_period = jax.random.split(key)
    words = jax.random.randint(for_words, (count, PERIOD), 0, WORDS)
    period = jax.random.randint(for_period, (count, 1), shortest, PERIOD + 1)
    return jnp.take_along_axis(words, jnp.arange(LENGTH)[None] % period, axis=1)


def train_induction():
    """An attention-only model of two layers that copies: induction heads in layer 1."""
    config = TransformerConfig(
        vocab_size=WORDS,
        model_dim=32,
        num_layers=2,
        attention=MultiHead(num_heads=4, num_kv_heads=4, head_dim=8, positions=(Rope(),)),
        feed_forward=(NoFeedForward(),),
        initialisation=Initialisation(embedding=Normal(std=0.5)),
    )
    model = Transformer(config)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 20, 400, 1e-3)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.98))

    def loss(params, rows):
        return F.cross_entropy(model.apply({"params": params}, rows)[:, :-1], rows[:, 1:])

    def update(state, key):
        params, moments = state
        change, moments = optimizer.update(
            jax.grad(loss)(params, repeated_rows(key, 64)), moments, params
        )
        return (optax.apply_updates(params, change), moments), None

    @jax.jit
    def train(key):
        params = model.init(key, jnp.zeros((1, LENGTH), int))["params"]
        state = params, optimizer.init(params)
        return jax.lax.scan(update, state, jax.random.split(key, 400))[0][0]

    with jax.numpy_dtype_promotion("standard"):
        return config, train(jax.random.key(1))


@pytest.mark.slow
def test_heads_that_patching_names_are_those_that_ablation_breaks():
    config, params = train_induction()
    rows = repeated_rows(jax.random.key(2), 64, shortest=PERIOD)
    maps = inspect.attention_maps(config, params, rows).decoder
    second = np.arange(PERIOD, LENGTH - 1)
    looks_back = np.mean(maps[..., np.arange(1, LENGTH), np.arange(LENGTH - 1)], axis=(1, 3))
    induces = np.mean(maps[..., second, second - PERIOD + 1], axis=(1, 3))
    # The answer after 16 tokens is token 4; without token 3 before it, nothing leads to it.
    clean = rows[:, : PERIOD + 4]
    corrupted = clean.at[:, 3].set((clean[:, 3] + 7) % WORDS)
    metric = inspect.logit_difference(clean[:, 4])
    named = inspect.activation_patching(
        config, params, clean, corrupted, metric, name="heads", by="head"
    )
    loss = lambda logits: F.cross_entropy(logits[:, PERIOD:-1], rows[:, PERIOD + 1 :])  # noqa: E731
    broken = inspect.ablate_heads(config, params, rows, loss)
    before = int(np.argmax(named[0]))
    assert before == np.argmax(broken[0]) == np.argmax(looks_back[0]) and named[0, before] > 0.5
    assert np.corrcoef(named.ravel(), broken.ravel())[0, 1] > 0.8
    assert np.corrcoef(named[1], induces[1])[0, 1] > 0.8 and induces[0].max() < 0.1
    inducing = named[1] > named[1].mean()
    composed = np.asarray(inspect.composition_scores(config, params).key)[:4, 4:]
    assert (composed[:, inducing].argmax(axis=0) == before).all()

    def cost(heads):
        at = At("heads", layer=1, head=tuple(np.flatnonzero(heads).tolist()))
        silent = inspect.run(config, params, rows, patches={at: Zero()}, record=())
        return float(loss(silent.logits) - loss(inspect.trace(config, params, rows).logits))

    assert cost(inducing) > 1.5 > 2 * cost(~inducing)


LATENT = Latent(num_heads=4, latent_dim=9, nope_dim=6, rope_dim=4, value_dim=5)
SUMS = {
    "pre": {},
    "sandwich": {"norm_placement": "sandwich", "norm": LayerNorm(), "residual_multiplier": 0.6},
    "kinds of norms": {
        "norm_placement": "sandwich",
        "post_norm": RMSNorm(eps=0.1, scale_offset=1.0),
        "last_norm": LayerNorm(),
    },
    "res_post": {"norm_placement": "res_post", "block": "parallel", "final_norm": False},
    "joined": {"norm_placement": "sandwich", "block": "parallel_shared_norm"},
    "outside": {"norm": RMSNorm(eps=0.1, eps_position="outside", parameters="scale_bias")},
    "capped": {"head": LMHead(tied=True, bias=True, multiplier=0.7, softcap=3.0)},
    "narrow": {"embedding": Embedding(dim=8), "attention": {"biases": ("value", "out")}},
    "decay": {"attention": Decay(num_heads=4, head_dim=6)},
    "latent": {"attention": LATENT, "norm": LayerNorm(scale_offset=1.0)},
    "scalars": {
        "layer_scalar": True,
        "norm_placement": "sandwich",
        "layer_embedding": LayerEmbedding(dim=5),
    },
    "encoder_decoder": {"topology": EncoderDecoder(num_encoder_layers=1)},
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.slow
def test_attributions_add_up_to_the_logit(name, build):
    config, params, tokens, inputs = build(**SUMS[name])
    wrong = jnp.arange(7) + 5
    parts = inspect.logit_attribution(config, params, tokens, 3, wrong, **inputs)
    branches = sum(x.sum(0) for x in parts.branches.values())
    total = parts.embeddings + parts.heads.sum((0, -1)) + branches + parts.bias
    np.testing.assert_allclose(total, parts.logit, atol=1e-4)
    logits = np.asarray(inspect.trace(config, params, tokens, **inputs).logits)
    if name == "capped":
        logits = 3.0 * np.arctanh(logits / 3.0)
    expected = logits[:, :, 3] - logits[:, np.arange(7), wrong]
    np.testing.assert_allclose(parts.logit, expected, atol=2e-4)
    assert float(jnp.abs(parts.heads).max(initial=0.0)) > 0.01 or name == "joined"


NORMS = "pre", "sandwich", "res_post", ("pre", "sandwich"), ("res_post", "pre", "sandwich")
BLOCKS = "serial", "parallel", "parallel_shared_norm"
TOPOLOGIES = {"decoder": None, "pair": EncoderDecoder(num_encoder_layers=1)}


@pytest.mark.parametrize(
    "topology", ["decoder", pytest.param("pair", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("norms", NORMS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.slow
def test_every_block_is_the_sum_of_its_parts_and_is_patched_whole(block, norms, topology, build):
    """With all branches of another run the run is the other one; a layer's parts are its own."""
    fields = {} if TOPOLOGIES[topology] is None else {"topology": TOPOLOGIES[topology]}
    norms = norms if isinstance(norms, str) else tuple(norms[i % len(norms)] for i in range(3))
    config, params, tokens, inputs = build(
        block=block,
        norm_placement=norms,
        norm=LayerNorm(parameters="scale"),
        residual_multiplier=0.6,
        **fields,
    )
    parts = inspect.logit_attribution(config, params, tokens, 3, **inputs)
    values = inspect.run(config, params, tokens, **inputs).values
    branches = sum(x.sum(0) for x in parts.branches.values())
    total = parts.embeddings + parts.heads.sum((0, -1)) + branches + parts.bias
    np.testing.assert_allclose(total, parts.logit, atol=1e-4)
    for name, by_layer in parts.branches.items():
        without = [i for i in range(config.num_layers) if i not in values[name]]
        assert not by_layer[np.array(without, int)].any()
        if name == "attention":
            assert not parts.heads[np.array(without, int)].any()
    if "attention" in parts.branches:  # without biases its heads are all of it
        np.testing.assert_allclose(parts.branches["attention"], 0, atol=1e-4)
    changed = tokens.at[:, 2].set((tokens[:, 2] + 9) % 31)
    other = inspect.run(config, params, changed, **inputs)
    every = {name: Replace(other) for name in ("embeddings", *parts.branches)}
    patched = inspect.run(config, params, tokens, patches=every, record=(), **inputs)
    np.testing.assert_allclose(patched.logits, other.logits, atol=1e-4)


@pytest.mark.parametrize("name", ["sandwich", "outside"])
@pytest.mark.slow
def test_branches_of_zeros_have_parts_of_zero(name, build):
    config, params, tokens, _ = build(**SUMS[name] | {"norm_placement": "sandwich"})
    silent = without_rows(config, params, 2, head=None)
    parts = inspect.logit_attribution(config, silent, tokens, 3)
    assert not parts.heads[2].any()
    total = parts.embeddings + parts.heads.sum((0, -1)) + parts.bias
    total += sum(x.sum(0) for x in parts.branches.values())
    np.testing.assert_allclose(total, parts.logit, atol=1e-4)


@pytest.mark.slow
def test_the_direct_path_in_parallel_layers_of_a_pair_ends_in_the_last_stream(build):
    config, params, tokens, inputs = build(
        block="parallel_shared_norm",
        norm_placement="sandwich",
        topology=EncoderDecoder(num_encoder_layers=1),
    )
    changed = tokens.at[:, 2].set((tokens[:, 2] + 9) % 31)
    texts = config, params, tokens, changed, METRIC
    direct = inspect.path_patching(*texts, **inputs)
    whole = inspect.activation_patching(*texts, name="heads", by="head", **inputs)
    np.testing.assert_allclose(direct[-1], whole[-1], atol=1e-5)
    assert np.abs(direct[0] - whole[0]).max() > 1e-3


@pytest.mark.slow
def test_the_part_of_a_last_head_is_what_the_logit_loses_without_it(build):
    config, params, tokens, _ = build(final_norm=False, feed_forward=(NoFeedForward(),))
    parts = inspect.logit_attribution(config, params, tokens, tokens)
    silent = without_rows(config, params, 2, head=3)
    with_head, without = (inspect.trace(config, x, tokens).logits for x in (params, silent))
    lost = jnp.take_along_axis(with_head - without, tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(parts.heads[2, ..., 3], lost, atol=1e-5)
    np.testing.assert_allclose(parts.branches["attention"], 0, atol=1e-5)


def test_attributions_that_do_not_exist_are_refused(build):
    for options, message in (
        ({"norm_placement": "post"}, "a norm follows each sum .norm_placement='post'"),
        ({"residual": DeepNorm(alpha=2.0)}, "branches are joined by DeepNorm"),
    ):
        with pytest.raises(ValueError, match=f"not the sum of its parts: {message}"):
            inspect.logit_attribution(*build(**options)[:3], 3)
    with pytest.raises(ValueError, match=r"head is not linear: it has a transform, HeadTr"):
        inspect.logit_attribution(*build(head=LMHead(transform=HeadTransform()))[:3], 3)
    with pytest.raises(ValueError, match="31"):
        inspect.logit_attribution(*build()[:3], 31)


@pytest.mark.parametrize("placement", ["pre", "sandwich"])
@pytest.mark.slow
def test_composition_is_that_of_whole_matrices(placement, build):
    post_norm = RMSNorm(scale_offset=1.0) if placement == "sandwich" else None
    config, params, *_ = build(norm_placement=placement, norm=LayerNorm(), post_norm=post_norm)
    scores = inspect.composition_scores(config, params)
    assert scores.heads[:5] == ("0.0", "0.1", "0.2", "0.3", "1.0")
    layers = jax.tree.map(np.float64, params["decoder"]["layers"]["layer_0"])

    def matrices(layer, head):
        attention = jax.tree.map(lambda x: x[layer], layers["attention"])
        centre = np.eye(14) - 1 / 14
        read = centre * layers["pre_attention_norm"]["scale"][layer]
        query = read @ attention["query"]["kernel"][:, head]
        key, value = (read @ attention[x]["kernel"][:, head // 2] for x in ("key", "value"))
        out = attention["out"]["kernel"][head]
        if placement == "sandwich":
            out = out * (1 + layers["post_attention_norm"]["scale"][layer])
        return query @ key.T, value @ out

    def norm(x):
        return np.sqrt((x**2).sum())

    for (l1, h1), (l2, h2) in (((0, 1), (1, 2)), ((0, 3), (2, 0)), ((1, 0), (2, 3))):
        (_, first), (qk, ov) = matrices(l1, h1), matrices(l2, h2)
        place = 4 * l1 + h1, 4 * l2 + h2
        for name, second in (("query", qk), ("key", qk.T), ("value", ov)):
            expected = norm(first @ second) / norm(first) / norm(second)
            np.testing.assert_allclose(getattr(scores, name)[place], expected, rtol=1e-4)
    assert float(scores.key[4, 0]) == float(scores.key[4, 5]) == 0  # a head reads earlier layers


@pytest.mark.slow
def test_random_heads_compose_little(build):
    config, params, *_ = build(model_dim=64, attention={"head_dim": 32})
    scores = inspect.composition_scores(config, params)
    pairs = np.kron(np.triu(np.ones((3, 3)), 1), np.ones((4, 4))) > 0
    for x in scores[1:]:
        np.testing.assert_allclose(np.mean(np.asarray(x)[pairs]), 64**-0.5, rtol=0.1)


@pytest.mark.slow
def test_heads_that_are_not_linear_do_not_compose(build):
    config, params, *_ = build(attention=SharedKV(num_heads=4, num_kv_heads=2, head_dim=6))
    assert np.isfinite(inspect.composition_scores(config, params).query).all()
    kinds = (Decay(num_heads=4, head_dim=6), LATENT, config.attention)
    config, params, *_ = build(attention=kinds, num_layers=4)
    mixed = inspect.composition_scores(config, params)
    assert mixed.heads[::4] == ("0.0", "2.0", "3.0")  # the last is a decay again
    assert np.isfinite(mixed.query[:4, 4:8]).all() and np.isnan(mixed.query[:8, 8:]).all()
    assert np.isfinite(mixed.value).all()
    with pytest.raises(ValueError, match="exist for MultiHead, SharedKV and Decay; .* has Latent"):
        inspect.composition_scores(*build(attention=LATENT)[:2])


def batches(config, count):
    rng = np.random.default_rng(5)
    return [rng.integers(0, config.vocab_size, (8, 12)) for _ in range(count)]


@pytest.mark.slow
def test_a_tuned_lens_is_nearer_to_the_model_than_the_logit_lens(build):
    config, params, tokens, _ = build(head=LMHead(masked_ids=(30,)))
    rows = batches(config, 60)
    lens, losses = inspect.train_tuned_lens(config, params, rows, learning_rate=1e-2)
    assert losses.shape == (60, 3) and lens.kernel.shape == (3, 14, 14)

    def divergences(tokens, tuned):
        logits = np.float64(inspect.logit_lens(config, params, tokens, tuned=tuned))[..., :30]
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        model = log_probs[-1]
        return np.mean(np.sum(np.exp(model) * (model - log_probs), axis=-1), axis=(1, 2))

    np.testing.assert_allclose(losses[0], divergences(rows[0], None)[:3], rtol=1e-4)
    before, after = divergences(tokens, None), divergences(tokens, lens)
    assert (after[:3] < 0.8 * before[:3]).all() and before[3] == after[3] == 0


def test_a_tuned_lens_of_another_model_is_refused(build):
    config, params, tokens, _ = build()
    other = inspect.TunedLens(jnp.zeros((2, 14, 14)), jnp.zeros((2, 14)))
    with pytest.raises(ValueError, match=r"shapes \(\(3, 14, 14\), \(3, 14\)\).*\(2, 14, 14\)"):
        inspect.logit_lens(config, params, tokens, tuned=other)
    with pytest.raises(ValueError, match="batches is empty"):
        inspect.train_tuned_lens(config, params, [])
    config, params, *_ = build(topology=EncoderDecoder(num_encoder_layers=1))
    with pytest.raises(ValueError, match="one stack; got an EncoderDecoder"):
        inspect.train_tuned_lens(config, params, [tokens])
