from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer
from jaxformer import Transformer, generate
from jaxformer.config import DynamicNTK, Encoder, EncoderDecoder, LongRope, Rope
from jaxformer.generation import Greedy, Sample
from jaxformer.generation.decode import _generate


@pytest.fixture(scope="module")
def stepwise(config, params):
    """Greedy decoding by hand: the model over the text so far, one token longer each time."""
    apply = jax.jit(Transformer(config).apply)

    def decode(prompt, steps):
        text = np.asarray(prompt)
        for _ in range(steps):
            logits = apply({"params": params}, jnp.asarray(text))[..., -1, :]
            text = np.concatenate([text, np.argmax(logits, axis=-1)[..., None]], axis=-1)
        return text

    return decode


def test_greedy_is_the_argmax_of_the_model_step_by_step(config, params, prompts, stepwise):
    expected = stepwise(prompts, 6)
    tokens = generate(config, params, prompts, max_new_tokens=6)
    np.testing.assert_array_equal(tokens, expected)
    assert len(np.unique(expected[:, 5:])) > 3  # the text matters; it is no constant answer


def test_the_prompt_is_kept(config, params, prompts):
    sampler = Sample(repetition_penalty=5.0)
    tokens = generate(
        config, params, prompts, max_new_tokens=6, sampler=sampler, key=jax.random.key(3)
    )
    np.testing.assert_array_equal(tokens[:, :5], prompts)
    assert tokens.shape == (2, 11) and tokens.dtype == prompts.dtype


def test_a_prompt_alone_a_batch_and_numpy_give_the_same(config, params, prompts):
    together = generate(config, params, prompts, max_new_tokens=6)
    for row in range(2):
        alone = generate(config, params, prompts[row], max_new_tokens=6)
        np.testing.assert_array_equal(alone, together[row])
    tokens = generate(config, params, np.asarray(prompts), max_new_tokens=6)
    np.testing.assert_array_equal(tokens, together)


def test_samplers_that_leave_one_candidate_are_greedy(config, params, prompts):
    greedy = generate(config, params, prompts, max_new_tokens=6, sampler=Greedy())
    for sampler in (Sample(top_k=1), Sample(temperature=1e-4)):
        tokens = generate(
            config, params, prompts, max_new_tokens=6, sampler=sampler, key=jax.random.key(0)
        )
        np.testing.assert_array_equal(tokens, greedy)


def test_the_key_decides(config, params, prompts):
    def tokens(seed):
        return generate(
            config,
            params,
            prompts,
            max_new_tokens=6,
            sampler=Sample(temperature=2.0),
            key=jax.random.key(seed),
        )

    np.testing.assert_array_equal(tokens(0), tokens(0))
    assert jnp.any(tokens(0) != tokens(1))


def test_a_large_penalty_forbids_repetition(config, params, prompts):
    """Of the prompt and of what was added: eleven different tokens where greedy repeats some."""
    prompt = jnp.asarray([3, 1, 4, 30, 5], jnp.int32)
    tokens = generate(
        config,
        params,
        prompt,
        max_new_tokens=6,
        sampler=Sample(temperature=1e-3, repetition_penalty=1e6),
        key=jax.random.key(0),
    )
    # A penalised logit is all but zero or far below; the highest of the others is above both.
    assert len(np.unique(tokens)) == 11


def test_to_the_end_of_a_learned_table_and_not_beyond(learned, learned_params, prompts):
    tokens = generate(learned, learned_params, prompts, max_new_tokens=6)
    assert tokens.shape == (2, learned.max_length) and jnp.all((tokens >= 0) & (tokens < 31))
    apply = jax.jit(Transformer(learned).apply)
    last = jnp.argmax(apply({"params": learned_params}, tokens[:, :-1])[:, -1], axis=-1)
    np.testing.assert_array_equal(tokens[:, -1], last)
    with pytest.raises(
        ValueError, match="11 learned positions; a prompt of 5 tokens and 7 new ones need 12"
    ):
        generate(learned, learned_params, prompts, max_new_tokens=7)


def test_compiles_once_for_prompts_of_one_shape(config, params, prompts):
    generate(config, params, prompts, max_new_tokens=6)
    compiled = _generate._cache_size()
    generate(replace(config), params, prompts[::-1], max_new_tokens=6, sampler=Greedy())
    assert _generate._cache_size() == compiled


def test_bfloat16_computes(config, params, prompts):
    tokens = generate(config, params, prompts, max_new_tokens=2, dtype=jnp.bfloat16)
    assert tokens.shape == (2, 7) and jnp.all((tokens >= 0) & (tokens < 31))


@pytest.mark.parametrize(
    "changes, arguments, message",
    [
        ({}, dict(prompt=jnp.zeros((2, 0), jnp.int32)), "prompt is empty; give at least one"),
        ({}, dict(max_new_tokens=0), "max_new_tokens must be at least 1; got 0"),
        ({}, dict(sampler=Sample(top_k=3)), r"Sample\(.*top_k=3.* draws at random: pass key="),
        ({}, dict(prompt=jnp.asarray([[3, 31]])), r"Token id 31 at position \(0, 1\).* of 31"),
        ({}, dict(prompt=jnp.asarray([-1, 3])), r"Token id -1 at position \(0,\)"),
        (dict(topology=Encoder()), {}, r"Decoder or an EncoderDecoder; got Encoder\(\)"),
        (
            dict(topology=EncoderDecoder(num_encoder_layers=2)),
            {},
            "An EncoderDecoder reads a source: pass source=token_ids",
        ),
    ],
)
def test_what_cannot_be_generated_is_refused(config, params, prompts, changes, arguments, message):
    arguments = {"prompt": prompts, "max_new_tokens": 2, **arguments}
    with pytest.raises(ValueError, match=message):
        generate(replace(config, **changes), params, arguments.pop("prompt"), **arguments)


def test_generate_is_public():
    assert jaxformer.generate is generate


@pytest.mark.parametrize(
    "scaling",
    [
        DynamicNTK(factor=8.0, original_max_length=3),
        LongRope(short=(1.0, 1.0, 1.0), long=(1.0, 3.0, 9.0), original_max_length=7, max_length=16),
    ],
    ids=lambda scaling: type(scaling).__name__,
)
def test_a_length_that_is_still_to_come_changes_nothing(config, params, prompts, scaling):
    """Scalings that look at the length see the text so far, not the room for what will be added."""
    attention = replace(config.attention, positions=(Rope(scaling=scaling),))
    cfg = replace(config, attention=attention)
    apply = jax.jit(Transformer(cfg).apply)
    text = np.asarray(prompts)
    for _ in range(5):
        logits = apply({"params": params}, jnp.asarray(text))[..., -1, :]
        text = np.concatenate([text, np.argmax(logits, axis=-1)[..., None]], axis=-1)
    np.testing.assert_array_equal(generate(cfg, params, prompts, max_new_tokens=5), text)


def test_ids_beyond_the_vocabulary_of_the_tokenizer_are_never_chosen(config, params, prompts):
    sampler = Sample(temperature=50.0)

    def largest(vocab_size):
        tokens = generate(
            config,
            params,
            prompts,
            max_new_tokens=12,
            sampler=sampler,
            key=jax.random.key(0),
            vocab_size=vocab_size,
        )
        return tokens[:, 5:].max()

    assert largest(None) > 7 > largest(7)
