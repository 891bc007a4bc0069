"""Decay as the attention of a model: its layer, its state as a cache, training, refusals."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import Transformer, costs, generate, save_pretrained
from jaxformer import config as c
from jaxformer.data import Batch
from jaxformer.generation import Beam, Greedy
from jaxformer.layers import RuntimeConfig, empty_cache, take_rows
from jaxformer.layers.attention.decay import DecayAttention
from jaxformer.parallel import MeshConfig, check_divisible, make_mesh, parameter_metadata, put_batch
from jaxformer.training import train_step as step
from jaxformer.training.optimizers import OptimizerConfig, make_optimizer
from jaxformer.training.schedules import Constant
from tests.small_models import jitted_forward, random_params, random_tree

B, T, D, N, H = 2, 7, 14, 3, 4
KIND = c.Decay(num_heads=N, head_dim=H, min_memory=1.5, max_memory=40.0)
CONFIG = c.TransformerConfig(
    vocab_size=19,
    model_dim=D,
    num_layers=3,
    attention=KIND,
    feed_forward=(c.GLU(hidden_dim=11), c.MLP(hidden_dim=9)),
)
NO_INPUTS = c.MixerInputs(None, None, None)
TOKENS = jax.random.randint(jax.random.key(1), (B, T), 0, 19)


def model(config=CONFIG):
    """Random parameters, and the compiled model."""
    params = random_params(config)
    return params, partial(jitted_forward(config), params)


# The layer


def by_hand(params, x, angles):
    """The branch in complex128, from the parameters alone."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    gamma = 1 / (1 + np.exp(-p["memory"]["bias"]))[:, None]
    value = np.einsum("btd,dnh->btnh", np.asarray(x, np.float64), p["value"]["kernel"])
    value = value * np.sqrt(1 - gamma**2)
    z = value[..., : H // 2] + 1j * value[..., H // 2 :]
    h, heads = np.zeros_like(z[:, 0]), np.zeros_like(value)
    for t in range(x.shape[1]):
        h = gamma * np.exp(-1j * angles) * h + z[:, t]
        heads[:, t, :, : H // 2], heads[:, t, :, H // 2 :] = h.real, h.imag
    return np.einsum("btnh,nhd->btd", heads, p["out"]["kernel"])


CHOICES = {
    "rotary angles": c.Angles(base=50.0),
    "learned angles": c.Angles(learned=True),
    "real": None,
}


@pytest.mark.parametrize("angles", CHOICES.values(), ids=CHOICES)
@pytest.mark.slow(but=["real"])
def test_layer_by_hand(normal, angles):
    """inventory row 77: projected values, the recurrence with its gain, and the way back."""
    kind = replace(KIND, angles=angles)
    module = DecayAttention(CONFIG, kind, RuntimeConfig())
    x = normal(B, T, D)
    params = random_tree(
        jax.eval_shape(lambda: module.init(jax.random.key(0), x, NO_INPUTS))["params"]
    )
    assert ("angles" in params) == (angles is not None and angles.learned)
    turns = np.zeros((N, H // 2)) if angles is None else 50.0 ** (-np.arange(0, H, 2) / H)
    turns = np.asarray(params["angles"]["bias"]) if "angles" in params else turns
    actual, state = jax.jit(module.apply)({"params": params}, x, NO_INPUTS)
    np.testing.assert_allclose(actual, by_hand(params, x, turns), atol=1e-5)
    assert state.cache is None


def test_memories_and_angles_at_first():
    """RetNet's decays for eight heads from 32 to 4,096 tokens, and rotary angles for all."""
    kind = c.Decay(num_heads=8, head_dim=6, angles=c.Angles(base=50.0, learned=True))
    module = DecayAttention(CONFIG, kind, RuntimeConfig())
    params = jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 2, D)), NO_INPUTS)["params"]
    gamma = 1 - 2.0 ** -np.arange(5, 13)
    np.testing.assert_allclose(jax.nn.sigmoid(params["memory"]["bias"]), gamma, rtol=1e-6)
    expected = np.tile(50.0 ** (-np.arange(3) / 3), (8, 1))
    np.testing.assert_allclose(params["angles"]["bias"], expected, rtol=1e-6)


@pytest.mark.slow
def test_a_text_does_not_see_its_future_or_other_documents():
    """Packed documents give what each gives alone; a token changes nothing before it."""
    _, run = model()
    segments = jnp.asarray([[1] * 3 + [2] * 4, [0] * 3 + [5] * 4])
    packed = run(TOKENS, segments=segments)
    alone = [run(TOKENS[:, :3]), run(TOKENS[:, 3:])]
    np.testing.assert_allclose(packed, np.concatenate(alone, axis=1), atol=1e-5)
    changed = run(TOKENS.at[:, 1].add(1) % 19, segments=segments)
    np.testing.assert_array_equal(changed[:, 3:], packed[:, 3:])
    np.testing.assert_array_equal(changed[:, :1], packed[:, :1])
    assert np.abs(changed - packed)[:, 1:3].max() > 1e-2


# Its state as a cache


@pytest.mark.parametrize("chunks", [(3, 3, 1), (2, 5)], ids=str)
@pytest.mark.slow
def test_cached_is_uncached_at_every_step(chunks):
    """Three layers of a pattern of two, in a cache that has room for one token: it never fills."""
    _, run = model()
    cache, parts = empty_cache(CONFIG, (B,), 1), []
    for part in jnp.split(TOKENS, np.cumsum(chunks)[:-1], axis=1):
        logits, cache = run(part, cache=cache)
        parts.append(logits)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), run(TOKENS), atol=1e-5)
    np.testing.assert_array_equal(cache.length, [T, T])


@pytest.mark.slow
def test_padding_is_not_remembered():
    """Rows of two and four tokens in one call, then three more each, against each row alone."""
    _, run = model()
    segments = jnp.asarray([[1, 0, 1, 0], [1, 1, 1, 1]])
    first, cache = run(TOKENS[:, :4], segments=segments, cache=empty_cache(CONFIG, (B,), T))
    second, cache = run(TOKENS[:, 4:], cache=cache)
    np.testing.assert_array_equal(cache.length, [5, 7])
    for row, real in enumerate(([0, 2], [0, 1, 2, 3])):
        alone = jnp.concatenate([TOKENS[row, jnp.asarray(real)], TOKENS[row, 4:]])
        expected = run(alone[None])[0]
        actual = jnp.concatenate([first[row, jnp.asarray(real)], second[row]])
        np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.slow
def test_rows_can_be_taken_in_any_order():
    _, run = model()
    _, cache = run(TOKENS[:, :4], cache=empty_cache(CONFIG, (B,), T))
    after, _ = run(TOKENS[:, 4:], cache=cache)
    rows = jnp.asarray([1, 1, 0])
    swapped, _ = run(TOKENS[rows, 4:], cache=take_rows(cache, rows))
    np.testing.assert_allclose(swapped, after[rows], atol=1e-6)


def test_the_state_has_the_size_of_a_token():
    """For one token and for a million, on paper and in arrays; in float32 whatever the dtype."""
    for dtype in (jnp.float32, jnp.bfloat16):
        cache = empty_cache(CONFIG, (B,), 10**6, dtype=dtype)
        states = jax.tree.leaves((cache.layers, cache.tail))
        assert {x.dtype for x in states} == {jnp.dtype("float32")}
        total = sum(x.size * x.dtype.itemsize for x in states)
        assert total == 3 * B * N * H * 4
        assert total == costs.cache_bytes(CONFIG, 1, batch=B)
        assert total == costs.cache_bytes(CONFIG, 10**6, batch=B, bytes_per_number=4)
    assert all(x.size == B for x in cache.positions)


@pytest.mark.slow
def test_bfloat16_decodes_with_a_state_in_float32():
    params, run = model()
    narrow = jitted_forward(CONFIG, dtype=jnp.bfloat16)
    cache, parts = empty_cache(CONFIG, (B,), T, dtype=jnp.bfloat16), []
    for part in jnp.split(TOKENS, [3, 6], axis=1):
        logits, cache = narrow(params, part, cache=cache)
        parts.append(logits)
    assert cache.layers[0].self_attention.state.dtype == jnp.float32
    whole = narrow(params, TOKENS)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=0.05)
    np.testing.assert_allclose(whole, run(TOKENS), atol=0.3)


# Generating


@pytest.mark.slow
def test_greedy_text_is_that_of_the_model_without_a_cache():
    """Prompts of different lengths, read two tokens at a time."""
    params, run = model()
    lengths, new = (3, 5), 4
    text = generate(
        CONFIG,
        params,
        TOKENS[:, :5],
        lengths=jnp.asarray(lengths),
        max_new_tokens=new,
        sampler=Greedy(),
        prefill_chunk=2,
    )
    for row, length in enumerate(lengths):
        for place in range(length, length + new):
            padded = jnp.zeros((1, T + 2), int).at[0, :place].set(text[row, :place])
            assert int(run(padded)[0, place - 1].argmax()) == int(text[row, place])


@pytest.mark.slow
def test_beams_carry_their_states():
    """As many beams as there are pairs of tokens find the most likely pair."""
    small = replace(CONFIG, vocab_size=5)
    params, run = model(small)
    prompt = TOKENS[:, :4] % 5
    text = generate(small, params, prompt, max_new_tokens=2, sampler=Beam(num_beams=5))
    for row in range(B):
        pairs = jnp.stack([x.ravel() for x in jnp.mgrid[:5, :5]], axis=1)
        texts = jnp.concatenate([jnp.tile(prompt[row], (25, 1)), pairs], axis=1)
        logs = jax.nn.log_softmax(run(texts))
        score = sum(logs[jnp.arange(25), 3 + i, pairs[:, i]] for i in range(2))
        np.testing.assert_array_equal(text[row, 4:], pairs[score.argmax()])


# Training


@pytest.mark.slow
def test_training_lowers_the_loss():
    """The train step on two devices: a text that says again what it said three tokens ago."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:2])
    config = replace(CONFIG, attention=replace(KIND, angles=c.Angles(learned=True)))
    model_ = Transformer(config, remat="full")
    optimizer = make_optimizer(
        OptimizerConfig(schedule=Constant(peak=1e-2)), 60, parameter_metadata(config)
    )
    state = step.init_train_state(model_, optimizer, jax.random.key(0), mesh)
    update = step.make_train_step(model_, optimizer, mesh)
    text = np.tile(np.random.default_rng(0).integers(0, 19, (8, 3)), 6)
    ones = np.ones((8, 17), np.int32)
    batch = Batch(
        tokens=text[:, :-1].astype(np.int32),
        targets=text[:, 1:].astype(np.int32),
        loss_mask=ones > 0,
        segments=ones,
        positions=np.tile(np.arange(17, dtype=np.int32), (8, 1)),
    )
    batch = put_batch(batch, mesh, 8)
    before = jax.device_get(state.params["decoder"]["layers"]["layer_0"]["attention"])
    losses = []
    for _ in range(60):
        state, metrics = update(state, batch)
        losses.append(float(metrics.loss))
    after = state.params["decoder"]["layers"]["layer_0"]["attention"]
    assert losses[0] > 2.5 and losses[-1] < 0.6
    for name in ("memory", "angles"):
        assert np.abs(after[name]["bias"] - before[name]["bias"]).max() > 1e-2


# Refusals


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: replace(KIND, num_heads=0), "Decay.num_heads must be positive; got 0"),
        (lambda: replace(KIND, head_dim=5), "head_dim must be even; got 5"),
        (
            lambda: replace(KIND, min_memory=1.0),
            "1 < min_memory <= max_memory; got min_memory=1.0, max_memory=40.0",
        ),
        (lambda: replace(KIND, max_memory=1.2), "1 < min_memory .*=1.5, max_memory=1.2"),
        (lambda: c.Angles(base=0.5), "Angles.base must be above 1; got 0.5"),
        (
            lambda: replace(CONFIG, topology=c.Encoder()),
            r"is causal, so it needs a Decoder; got Encoder",
        ),
        (
            lambda: replace(CONFIG, topology=c.EncoderDecoder(num_encoder_layers=2)),
            "needs a Decoder; got EncoderDecoder",
        ),
        (
            lambda: replace(
                CONFIG,
                attention=c.MultiHead(num_heads=2, num_kv_heads=2, head_dim=4),
                topology=c.EncoderDecoder(num_encoder_layers=2, attention=KIND),
            ),
            r"needs a Decoder; got Encoder",
        ),
        (
            lambda: replace(CONFIG, dropout=c.Dropout(attention=0.1)),
            "no attention weights, so dropout.attention must be 0; got 0.1",
        ),
    ],
)
def test_choices_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_odd_head_may_decay_without_turning():
    assert replace(KIND, head_dim=5, angles=None).head_dim == 5


def test_heads_that_do_not_divide():
    config = replace(CONFIG, model_dim=16, attention=replace(KIND, num_heads=4))
    check_divisible(config, dict(data=2, fsdp=2), batch_size=4, lengths=[16])
    with pytest.raises(ValueError, match="num_heads 4 is not divisible by tensor 8"):
        check_divisible(config, dict(tensor=8))


@pytest.mark.slow
def test_no_hugging_face_folder_has_it(tmp_path):
    params, _ = model()
    with pytest.raises(ValueError, match="its attention is Decay, and none has"):
        save_pretrained(tmp_path, CONFIG, params)
    with pytest.raises(
        ValueError,
        match="llama cannot represent .*: its attention is Decay, and llama has MultiHead",
    ):
        save_pretrained(tmp_path, CONFIG, params, family="llama")


def test_tiny_keeps_its_choices():
    kind = c.Decay(num_heads=24, head_dim=128, min_memory=7.0, angles=c.Angles(learned=True))
    tiny = replace(CONFIG, attention=kind, model_dim=24 * 128).tiny()
    assert tiny.attention == replace(kind, num_heads=6, head_dim=16)
    assert tiny.model_dim == 6 * 16
