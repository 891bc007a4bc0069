"""Streams, contributions, lens, losses, gradients: against transformers and by definition."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import Transformer, inspect
from jaxformer.config import (
    GLU,
    MLP,
    Decay,
    Embedding,
    Encoder,
    EncoderDecoder,
    Fire,
    LayerNorm,
    Learned,
    MoE,
)
from tests.inspect.test_attention_weights import NAMES

PLACEMENTS = ("pre", "sandwich", "res_post")
BLOCKS = ("serial", "parallel", "parallel_shared_norm")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow(but=["llama"])
def test_the_stream_is_the_hidden_states_of_transformers(name, reference):
    outputs, config, params, tokens, inputs = reference(name)
    seen = inspect.trace(config, params, tokens, **inputs)
    stack = seen.decoder
    actual = jnp.concatenate([stack.embeddings[None], stack.stream[:-1], stack.final_normed[None]])
    np.testing.assert_allclose(actual, outputs["stream"], atol=2e-5, rtol=1e-5)
    np.testing.assert_allclose(seen.logits, outputs["logits"], atol=2e-5)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.slow(but=["res_post-parallel_shared_norm"])
def test_the_stream_is_the_sum_of_what_branches_add(placement, block, build):
    config, params, tokens, _ = build(
        norm_placement=placement, block=block, residual_multiplier=0.6
    )
    stack = inspect.trace(config, params, tokens).decoder
    joined = block == "parallel_shared_norm" and placement != "pre"
    names = {"parallel_branches"} if joined else {"attention", "feed_forward"}
    assert set(stack.branches) == names
    before = jnp.concatenate([stack.embeddings[None], stack.stream[:-1]])
    np.testing.assert_allclose(before + sum(stack.branches.values()), stack.stream, atol=1e-5)


def test_a_norm_follows_each_sum_where_placement_is_post(build):
    config, params, tokens, _ = build(norm_placement="post", norm=LayerNorm(parameters="none"))
    stack = inspect.trace(config, params, tokens).decoder
    np.testing.assert_allclose(np.mean(stack.stream, axis=-1), 0, atol=1e-5)
    assert float(np.abs(np.std(stack.stream, axis=-1) - 1).max()) < 1e-2


def test_an_encoder_decoder_shows_both_stacks(build):
    config, params, tokens, inputs = build(topology=EncoderDecoder(num_encoder_layers=2))
    seen = inspect.trace(config, params, tokens, **inputs)
    assert seen.encoder.stream.shape == (2, 2, 5, 14)
    assert set(seen.encoder.branches) == {"attention", "feed_forward"}
    assert seen.decoder.stream.shape == (3, 2, 7, 14)
    assert set(seen.decoder.branches) == {"attention", "cross_attention", "feed_forward"}


def test_nothing_is_sown_unless_asked(build):
    config, params, tokens, _ = build()
    model = Transformer(config)
    assert set(jax.eval_shape(model.init, jax.random.key(0), tokens)) == {"params"}
    plain = jax.make_jaxpr(model.apply)({"params": params}, tokens)
    assert len(plain.jaxpr.outvars) == 1
    body = next(e for e in plain.jaxpr.eqns if e.primitive.name == "scan")
    assert len(body.outvars) == 1  # the stream alone goes from layer to layer, nothing is kept


@pytest.mark.parametrize("name", ["llama", "t5", "bloom", "gemma2", "gpt2", "cohere"])
@pytest.mark.slow
def test_the_lens_ends_at_the_logits_of_transformers(name, reference):
    outputs, config, params, tokens, inputs = reference(name)
    lens = inspect.logit_lens(config, params, tokens, **inputs)
    assert len(lens) == config.num_layers + 1
    np.testing.assert_allclose(lens[-1], outputs["logits"], atol=2e-5)
    some = inspect.logit_lens(config, params, tokens, layers=(2, 0), **inputs)
    np.testing.assert_allclose(some, lens[np.array([2, 0])], atol=1e-6)


@pytest.mark.slow
def test_the_lens_of_a_layer_is_a_model_without_the_others(build):
    config, params, tokens, _ = build(last_norm=LayerNorm())
    lens = inspect.logit_lens(config, params, tokens)
    first = jax.tree.map(lambda x: x[:2], params["decoder"]["layers"])
    short = params | {"decoder": params["decoder"] | {"layers": first}}
    model = Transformer(replace(config, num_layers=2))
    np.testing.assert_allclose(lens[2], model.apply({"params": short}, tokens), atol=1e-5)


def test_a_lens_that_is_too_large_or_too_deep_is_refused(build):
    config, params, tokens, _ = build()
    with pytest.raises(ValueError, match=r"14 tokens over 31 ids at 4 depths.*layers=\(3,\).*6944"):
        inspect.logit_lens(config, params, tokens, max_bytes=6943)
    with pytest.raises(ValueError, match=r"layers must be in \[0, 3\]; got \(4,\)"):
        inspect.logit_lens(config, params, tokens, layers=(4,))
    assert inspect.logit_lens(config, params, tokens, max_bytes=6944).nbytes == 6944


@pytest.mark.slow
def test_losses_are_minus_the_logarithm_of_the_chance(reference):
    outputs, config, params, tokens, _ = reference("llama")
    logits = outputs["logits"].astype(np.float64)
    chances = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    following = np.take_along_axis(chances[:, :-1], np.asarray(tokens)[:, 1:, None], axis=-1)
    losses = inspect.token_losses(config, params, tokens)
    np.testing.assert_allclose(losses, -np.log(following[..., 0]), atol=2e-5)
    targets = jnp.zeros_like(tokens)
    losses = inspect.token_losses(config, params, tokens, targets=targets)
    np.testing.assert_allclose(losses, -np.log(chances[..., 0]), atol=2e-5)


@pytest.mark.slow
def test_nothing_follows_the_end_of_a_document(build):
    config, params, tokens, _ = build()
    segments = jnp.array([[1, 1, 1, 2, 2, 0, 0]] * 2)
    losses = inspect.token_losses(config, params, tokens, segments=segments)
    np.testing.assert_array_equal(losses[0] > 0, [True, True, False, True, False, False])


@pytest.mark.slow
def test_targets_in_padding_are_no_loss(build):
    config, params, tokens, _ = build()
    segments = jnp.array([[1, 1, 1, 2, 2, 0, 0]] * 2)
    choices = {"targets": jnp.roll(tokens, -1, axis=-1), "segments": segments}
    losses = inspect.token_losses(config, params, tokens, **choices)
    np.testing.assert_array_equal(losses[0] > 0, [True, True, True, True, True, False, False])
    norms = inspect.gradient_statistics(config, params, tokens, **choices)["decoder"][
        "residual_stream"
    ]
    other = choices | {"targets": choices["targets"].at[:, 5:].set(0)}
    same = inspect.gradient_statistics(config, params, tokens, **other)["decoder"][
        "residual_stream"
    ]
    np.testing.assert_array_equal(norms, same)


def test_an_encoder_needs_targets(build):
    config, params, tokens, _ = build(topology=Encoder())
    with pytest.raises(ValueError, match="pass targets="):
        inspect.token_losses(config, params, tokens)
    assert inspect.token_losses(config, params, tokens, targets=tokens).shape == (2, 7)


@pytest.mark.slow
def test_what_cannot_be_run_is_refused_in_words(build):
    config, params, tokens, _ = build()
    wrong = [
        (
            {"tokens": tokens.astype(jnp.float32)},
            r"tokens must be a non-empty integer.*\(2, 7\), float32",
        ),
        ({"tokens": 3}, r"tokens must be a non-empty integer.*shape \(\), int"),
        ({"tokens": jnp.zeros((2, 0), int)}, r"tokens must be a non-empty.*\(2, 0\)"),
        ({"deterministic": False}, r"inputs must be among source, .*; got deterministic"),
        ({"source": tokens}, "topology Decoder has no encoder, so it takes no source"),
        ({"source_segments": tokens}, "no encoder, so it takes no source_segments"),
        ({"segments": tokens[:, 1:]}, r"segments must have .*, \(2, 7\); got \(2, 6\)"),
        ({"positions": tokens[:, None]}, r"positions must have .*, \(2, 7\); got \(2, 1, 7\)"),
        ({"targets": tokens[:, 1:]}, r"shape of tokens, \(2, 7\); got \(2, 6\)"),
        ({"targets": tokens + 31}, "31"),
    ]
    for changed, message in wrong:
        with pytest.raises(ValueError, match=message):
            inspect.token_losses(config, params, **({"tokens": tokens} | changed))
    for number in (1.7, "1", True, (0, None), [[0]]):
        with pytest.raises(ValueError, match="layers must be an integer or .*; got"):
            inspect.logit_lens(config, params, tokens, layers=number)
    lens = inspect.logit_lens(config, params, tokens, layers=2)
    np.testing.assert_array_equal(lens, inspect.logit_lens(config, params, tokens, layers=(2,)))
    listed = inspect.token_losses(config, params, tokens.tolist())
    np.testing.assert_array_equal(listed, inspect.token_losses(config, params, tokens))


@pytest.mark.slow
def test_rows_that_agree_may_be_given_once(build):
    config, params, tokens, inputs = build(topology=EncoderDecoder(num_encoder_layers=1))
    once = {"segments": jnp.array([1, 1, 1, 2, 2, 2, 2]), "source_segments": jnp.arange(5) % 2 + 1}
    repeated = {name: jnp.stack([x, x]) for name, x in once.items()}
    logits = (inspect.trace(config, params, tokens, **inputs, **x).logits for x in (once, repeated))
    np.testing.assert_array_equal(*logits)
    with pytest.raises(ValueError, match=r"the same batch axes; got shapes \(2, 7\) and \(1, 5\)"):
        inspect.trace(config, params, tokens, source=inputs["source"][:1])


@pytest.mark.parametrize("name", ["tokens", "source", "positions"])
def test_texts_beyond_a_learned_table_are_refused(name, build):
    learned = Embedding(positions=Learned(max_length=8))
    topology = {"topology": EncoderDecoder(num_encoder_layers=1)} if name == "source" else {}
    config, params, tokens, inputs = build(embedding=learned, **topology)
    match name:
        case "tokens":
            tokens = jnp.tile(tokens, 2)
        case "source":
            inputs = {"source": jnp.tile(inputs["source"], 2)}
        case "positions":
            inputs = {"positions": jnp.arange(2, 9)}
    with pytest.raises(ValueError, match="Position .* from 0 to 7"):
        inspect.trace(config, params, tokens, **inputs)


@pytest.mark.parametrize("source", [False, True])
@pytest.mark.slow
def test_gradients_are_those_of_a_small_step(source, build):
    topology = {"topology": EncoderDecoder(num_encoder_layers=2)} if source else {}
    config, params, tokens, inputs = build(**topology)
    statistics = inspect.gradient_statistics(config, params, tokens, **inputs)
    assert list(statistics) == (["encoder", "decoder"] if source else ["decoder"])
    model, stack = Transformer(config), next(iter(statistics))
    layers = params[stack]["layers"]["layer_0"]

    def loss(attention):
        changed = params[stack]["layers"] | {"layer_0": layers | {"attention": attention}}
        changed_params = params | {stack: params[stack] | {"layers": changed}}
        logits = model.apply({"params": changed_params}, tokens, **inputs)[:, :-1]
        log_chances = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(log_chances, tokens[:, 1:, None], axis=-1))

    gradient = jax.jit(jax.grad(loss))(layers["attention"])
    squares = sum(
        np.sum(np.asarray(x, np.float64) ** 2, axis=tuple(range(1, x.ndim)))
        for x in jax.tree.leaves(gradient)
    )
    np.testing.assert_allclose(statistics[stack]["attention"], np.sqrt(squares), rtol=1e-4)


@pytest.mark.slow
def test_the_gradient_in_the_stream_is_that_of_the_rest_of_the_model(build):
    config, params, tokens, _ = build(final_norm=False)
    norms = inspect.gradient_statistics(config, params, tokens)["decoder"]["residual_stream"]
    last = inspect.trace(config, params, tokens).decoder.stream[-1]
    kernel = params["head"]["kernel"]

    def loss(x):
        log_chances = jax.nn.log_softmax(x[:, :-1] @ kernel)
        return -jnp.mean(jnp.take_along_axis(log_chances, tokens[:, 1:, None], axis=-1))

    expected = jnp.linalg.norm(jax.grad(loss)(last))
    np.testing.assert_allclose(norms[-1], expected, rtol=1e-4)
    assert norms.shape == (3,) and float(norms.min()) > 0


@pytest.mark.slow
def test_activations_are_those_of_the_trace(build):
    config, params, tokens, _ = build(feed_forward=(GLU(hidden_dim=11), MLP(hidden_dim=5)))
    statistics = inspect.activation_statistics(config, params, tokens)["decoder"]
    stack = inspect.trace(config, params, tokens).decoder
    assert set(statistics) == {"residual_stream", "attention", "feed_forward"}
    for name, x in {"residual_stream": stack.stream, **stack.branches}.items():
        flat = np.asarray(x, np.float64).reshape(3, -1)
        expected = flat.mean(1), flat.std(1), np.sqrt((flat**2).mean(1)), np.abs(flat).max(1)
        for statistic, numbers in zip(statistics[name], expected, strict=True):
            np.testing.assert_allclose(statistic, numbers, atol=1e-5)


def test_contributions_are_shares_of_what_a_layer_reads(build):
    config, params, tokens, _ = build()
    shares = inspect.residual_contributions(config, params, tokens)["decoder"]
    stack = inspect.trace(config, params, tokens).decoder
    before = np.linalg.norm(np.stack([stack.embeddings, *stack.stream[:-1]]), axis=-1)
    expected = np.linalg.norm(stack.branches["attention"], axis=-1) / before
    np.testing.assert_allclose(shares["attention"], expected, rtol=1e-5)


@pytest.mark.parametrize(
    "choice",
    [
        {"feed_forward": (MoE(expert=GLU(hidden_dim=5), num_experts=3),)},
        {"attention": Decay(num_heads=4, head_dim=6)},
    ],
    ids=["experts", "decay"],
)
@pytest.mark.slow
def test_other_layers_say_the_same_things(choice, build):
    config, params, tokens, _ = build(**choice)
    statistics = inspect.gradient_statistics(config, params, tokens)["decoder"]
    assert {"attention", "feed_forward", "residual_stream"} < set(statistics)
    for norms in statistics.values():
        assert norms.shape == (3,) and np.isfinite(norms).all()


@pytest.mark.slow
def test_layers_without_a_part_have_no_gradient_there(build):
    bias = Fire(hidden_dim=3, length=3.0)
    config, params, tokens, _ = build(attention={"positions": (None, bias)})
    norms = inspect.gradient_statistics(config, params, tokens)["decoder"]["relative_bias"]
    np.testing.assert_array_equal(norms > 0, [False, True, False])
