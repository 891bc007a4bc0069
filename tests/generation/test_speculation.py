"""Text that a draft model helped to write is the model's own."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer
from jaxformer import zoo
from jaxformer.config import DynamicNTK, NgramEmbedding, Rope
from jaxformer.generation import Beam, DraftModel, Sample, drafts, speculate, stream
from jaxformer.generation.samplers import token_probabilities
from jaxformer.parallel import MeshConfig, make_mesh
from tests.small_models import BASE, jitted_forward, random_params

PROMPTS = [[5, 1, 9, 3, 4, 2], [7], [2, 8, 6]]
WINDOWED = replace(BASE, num_layers=2, attention=replace(BASE.attention, windows=(5, None)))
HASHED = NgramEmbedding.draw(1, vocab_size=31, dim=12, rows=20, heads=3, width=3, start_token=3)
NGRAMS = replace(BASE, ngram_embedding=HASHED)
FAMILIES = ("llama-2-7b", "mistral-7b", "deepseek-v2-lite", "mamba-130m", "t5-small")


@functools.cache
def pair(name, num_tokens=3, noise=0.1):
    """A model, and a draft model that often agrees: its parameters with noise."""
    config = zoo.get(name).tiny() if isinstance(name, str) else name
    params, rng = random_params(config, 0.5), np.random.default_rng(1)
    near = jax.tree.map(lambda x: x + noise * x.std() * rng.normal(size=x.shape), params)
    near = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), near)
    return config, params, DraftModel(config=config, params=near, num_tokens=num_tokens)


def rows(config):
    source = [[3, 9, 4], [1, 2, 3, 4, 5, 6], [8]]
    return {"source": source} if config.topology.is_encoder_decoder else {}


def compare(name, new=14, **options):
    """What both ways write; the draft model must be right and wrong at times."""
    config, params, draft = pair(name)
    options = {"max_new_tokens": new, **rows(config), **options}
    text = jaxformer.generate(config, params, PROMPTS, **options)
    result = speculate(config, params, PROMPTS, drafts=draft, **options)
    np.testing.assert_array_equal(result.tokens, text)
    assert 0 < result.num_accepted < result.num_drafted
    return np.asarray(text), result


@pytest.mark.parametrize(
    "name", [WINDOWED, *(pytest.param(x, marks=pytest.mark.slow) for x in (*FAMILIES, NGRAMS))]
)
def test_the_tokens_are_those_without_a_draft(name):
    compare(name)


def test_ring_buffers_keep_what_a_wrong_draft_would_overwrite():
    text, result = compare(WINDOWED, new=30)
    assert len(np.unique(text[0])) > 8
    make = functools.partial(jaxformer.layers.empty_cache, WINDOWED, (1,), 64, lookahead=3)
    assert [x.shape[-1] for x in jax.eval_shape(make).positions] == [5 + 3, 64]


SEEN = sorted(zoo.names())[::4]
RARE = pytest.mark.exhaustive


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=RARE if i % 5 else ()) for i, x in enumerate(SEEN)]
)
def test_every_family_writes_the_same(name):
    config = zoo.get(name).tiny()
    if not config.topology.has_decoder:
        pytest.skip("an encoder writes no text")
    if any(x.rope is not None and x.rope.depends_on_length for x in config.layers):
        pytest.skip("its RoPE depends on the length, which is refused")
    config, params, draft = pair(name)
    options = {"max_new_tokens": 12, **rows(config)}
    text = jaxformer.generate(config, params, PROMPTS, **options)
    result = speculate(config, params, PROMPTS, drafts=draft, **options)
    np.testing.assert_array_equal(result.tokens, text)


def test_a_row_ends_at_its_stop_token_and_at_the_number_of_new_tokens():
    text, _ = compare(WINDOWED)
    stop = [int(text[0, 6 + 4]), int(text[1, 6 + 2])]
    ended, _ = compare(WINDOWED, stop_tokens=stop)
    assert len(set(ended[0, 6 + 4 :])) == 1
    config, params, draft = pair(WINDOWED)
    result = speculate(config, params, PROMPTS, drafts=draft, max_new_tokens=1)
    assert result[1:] == (0, 0, 0)
    for row, expected, prompt in zip(result.tokens, text, PROMPTS, strict=True):
        assert row[len(prompt)] == expected[len(prompt)]


def test_a_model_that_drafts_for_itself_is_always_right():
    config, params, _ = pair(WINDOWED)
    draft = DraftModel(config=config, params=params, num_tokens=3)
    result = speculate(config, params, [PROMPTS[0]], drafts=draft, max_new_tokens=14)
    assert result.num_accepted == result.num_drafted == 9
    assert result.num_passes == 4  # a token by the prompt, 3 times 4, and 1 without a draft


def test_learned_positions_are_never_exceeded(learned, learned_params, prompts):
    draft = DraftModel(config=learned, params=learned_params, num_tokens=4)
    result = speculate(learned, learned_params, prompts, drafts=draft, max_new_tokens=7)
    text = jaxformer.generate(learned, learned_params, prompts, max_new_tokens=7)
    np.testing.assert_array_equal(result.tokens, text)


def test_streamed_tokens_are_those_of_generate():
    config, params, draft = pair(WINDOWED)
    stop = int(compare(WINDOWED)[0][1, 6 + 2])
    options = {"max_new_tokens": 9, "stop_tokens": stop}
    steps = [*stream(config, params, PROMPTS, drafts=draft, **options)]
    expected = [*stream(config, params, PROMPTS, **options)]
    np.testing.assert_array_equal(steps, expected)
    flat = [*stream(config, params, PROMPTS[0], drafts=draft, **options)]
    np.testing.assert_array_equal(flat, [*stream(config, params, PROMPTS[0], **options)])
    assert np.shape(flat) == (9,)


def test_checked_drafts_have_the_models_distribution():
    """The first token, of 200,000 drafts: within five standard deviations of its probability."""
    rng = np.random.default_rng(0)
    q, p = rng.dirichlet(np.ones(5), size=2), rng.dirichlet(np.ones(5), size=3)
    count = 200_000
    draft = np.stack([rng.choice(5, size=count, p=row) for row in q], axis=-1)
    both = (np.broadcast_to(x, (count, *x.shape)).astype(np.float32) for x in (q, p))
    checked = drafts.check_draft(
        *both, jnp.asarray(draft, jnp.int32), jnp.full(count, 2), jax.random.key(0)
    )
    length = np.asarray(checked.length)
    for place in range(3):
        tokens = np.asarray(checked.tokens)[length > place, place]
        spread = np.sqrt(p[place] * (1 - p[place]) / len(tokens))
        frequency = np.bincount(tokens, minlength=5) / len(tokens)
        assert (abs(frequency - p[place]) < 5 * spread).all()
    accepted = np.minimum(p[0], q[0]).sum()  # the probability that a token is accepted
    assert abs((length > 1).mean() - accepted) < 5 * np.sqrt(accepted * (1 - accepted) / count)


def test_a_draft_that_is_not_finite_is_never_right():
    """Else the next token would be drawn from NaN."""
    p = np.full((50, 3, 4), 0.25, np.float32)
    q = np.full((50, 2, 4), np.nan, np.float32)
    tokens, counts = jnp.zeros((50, 2), jnp.int32), jnp.full(50, 2)
    checked = drafts.check_draft(q, p, tokens, counts, jax.random.key(0))
    assert set(np.asarray(checked.length)) == {1}
    assert set(np.asarray(checked.tokens)[:, 0]) == {0, 1, 2, 3}


def test_sampled_texts_are_as_frequent_as_the_model_says():
    """Of 20,000 texts of four tokens, with all filters and a draft model of other weights."""
    config = replace(BASE, vocab_size=4, num_layers=1)
    params, other = random_params(config, 0.8), pair(config, noise=1.0)[2].params
    sampler = Sample(temperature=0.8, top_k=3, repetition_penalty=3.0)
    count, new = 20_000, 4
    options = {"max_new_tokens": new, "sampler": sampler}
    result = speculate(
        config,
        params,
        np.full((count, 1), 2),
        drafts=DraftModel(config=config, params=other, num_tokens=2),
        key=jax.random.key(1),
        **options,
    )
    assert 0.1 < result.num_accepted / result.num_drafted < 0.95
    actual = np.ravel_multi_index(np.asarray(result.tokens)[:, 1:].T, (4,) * new)
    texts = np.array([[2, *text] for text in itertools.product(range(4), repeat=new)])
    logits = jitted_forward(config)(params, texts[:, :-1])
    seen = np.cumsum(np.eye(4)[texts[:, :-1]], axis=1) > 0
    probabilities = token_probabilities(sampler, logits, jnp.asarray(seen))
    expected = np.take_along_axis(probabilities, texts[:, 1:, None], axis=-1).prod(axis=(1, 2))
    frequency = np.bincount(actual, minlength=4**new) / count
    assert expected.sum() == pytest.approx(1, abs=1e-5)
    assert (abs(frequency - expected) <= 5 * np.sqrt(expected * (1 - expected) / count)).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral-7b", "mamba-130m"])
@pytest.mark.parametrize("sampler", [jaxformer.generation.Greedy(), Sample(temperature=1.5)])
def test_many_devices_write_what_one_writes(name, sampler):
    config, params, draft = pair(name)
    options = {"drafts": draft, "max_new_tokens": 9, "sampler": sampler, "key": jax.random.key(3)}
    one = speculate(config, params, PROMPTS, **options)
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2, data=2), jax.devices()[:8])
    many = speculate(config, params, PROMPTS, mesh=mesh, **options)
    np.testing.assert_array_equal(many.tokens, one.tokens)


def test_what_cannot_be_drafted_is_refused():
    config, params, draft = pair(WINDOWED)
    with pytest.raises(ValueError, match="Beam search takes no drafts"):
        jaxformer.generate(
            config, params, PROMPTS, drafts=draft, max_new_tokens=2, sampler=Beam(num_beams=2)
        )
    small = replace(config, vocab_size=20)
    few = DraftModel(config=small, params=random_params(small))
    with pytest.raises(ValueError, match=f"has 20 token ids, but {config.vocab_size} may be"):
        speculate(config, params, PROMPTS, drafts=few, max_new_tokens=2)
    np.testing.assert_array_equal(
        speculate(config, params, PROMPTS, drafts=few, max_new_tokens=9, vocab_size=20).tokens,
        jaxformer.generate(config, params, PROMPTS, max_new_tokens=9, vocab_size=20),
    )
    scaled = BASE.with_rope_scaling(DynamicNTK(original_max_length=8, factor=2.0))
    rope = next(layer.rope for layer in scaled.layers)
    assert isinstance(rope, Rope)
    with pytest.raises(ValueError, match="does not depend on the length"):
        speculate(
            scaled,
            random_params(scaled),
            PROMPTS,
            drafts=DraftModel(config=scaled, params=random_params(scaled)),
            max_new_tokens=2,
        )
    with pytest.raises(ValueError, match=r"must be DraftModel\(...\) or MTP\(...\); got 'mtp'"):
        speculate(config, params, PROMPTS, drafts="mtp", max_new_tokens=2)
    with pytest.raises(ValueError, match="num_tokens"):
        DraftModel(config=config, params=params, num_tokens=0)
