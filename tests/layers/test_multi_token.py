"""Multi-token prediction: what the module computes, its loss, and the tokens that it drafts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer
from jaxformer import Transformer, costs, zoo
from jaxformer.config import GLU, EncoderDecoder, MoE, Router, TransformerConfig
from jaxformer.config.serialization import from_json, to_json
from jaxformer.data import Batch
from jaxformer.generation import MTP, speculate, stream
from jaxformer.layers import empty_cache
from jaxformer.parallel import MeshConfig, make_mesh, put_batch
from jaxformer.training.gradient import Objective, make_value_and_grad
from tests.small_models import BASE, random_params

EXPERTS = MoE(expert=GLU(hidden_dim=6), num_experts=4, top_k=2, router=Router(selection_bias=True))
MODEL = replace(BASE, num_layers=2, multi_token_prediction=True)
SPARSE = replace(MODEL, feed_forward=(EXPERTS,))
B, T = 2, 16
RNG = np.random.default_rng(5)
TOKENS = RNG.integers(0, MODEL.vocab_size, (B, T), np.int32)


def run(config, params, tokens, **options):
    """Logits and last hidden vectors."""
    model = Transformer(config)
    logits, sown = model.apply({"params": params}, tokens, mutable=["hidden"], **options)
    return logits, sown["hidden"]["last"][0]


def ahead(config, params, tokens, next_tokens):
    """Logits of the tokens after the next, from whole rows."""
    _, hidden = run(config, params, tokens)
    return run(config, params, next_tokens, hidden=hidden)[0]


def rms(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + MODEL.norm.eps) * np.float64(scale)


def test_it_is_a_model_of_one_layer_whose_embeddings_are_of_token_and_hidden_vector():
    params = random_params(MODEL)
    _, hidden = run(MODEL, params, TOKENS)
    following = np.roll(TOKENS, -1, axis=-1)
    module = params["multi_token_prediction"]
    embedded = np.float64(params["embedding"]["tokens"]["embedding"])[following]
    parts = (
        rms(embedded, module["embedding_norm"]["scale"]),
        rms(np.float64(hidden), module["hidden_norm"]["scale"]),
    )
    z = np.concatenate(parts, axis=-1) @ np.float64(module["projection"]["kernel"])
    alone = replace(MODEL.multi_token_model, vocab_size=B * T)
    kernel = np.pad(params["head"]["kernel"], [(0, 0), (0, B * T - MODEL.vocab_size)])
    table = np.float32(z.reshape(B * T, -1))
    its = {"embedding": {"tokens": {"embedding": table}}, "decoder": module["decoder"]}
    expected, _ = run(alone, its | {"head": {"kernel": kernel}}, np.arange(B * T).reshape(B, T))
    actual = ahead(MODEL, params, TOKENS, following)
    np.testing.assert_allclose(actual, expected[..., : MODEL.vocab_size], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek-v3", "qwen-3-next-80b-a3b"])
def test_with_a_cache_it_is_the_whole_text_at_once(name):
    config = replace(zoo.get(name).tiny(), multi_token_prediction=True)
    params, tokens = random_params(config, 0.3), TOKENS % 100
    following = np.roll(tokens, -1, axis=-1)
    _, hidden = run(config, params, tokens)
    whole, _ = run(config, params, following, hidden=hidden)
    cache = empty_cache(config.multi_token_model, (B,), T)
    parts = []
    for place in (slice(0, 5), slice(5, 6), slice(6, T)):
        options = dict(hidden=hidden[:, place], cache=cache, mutable=["hidden"])
        (logits, cache), _ = Transformer(config).apply(
            {"params": params}, following[:, place], **options
        )
        parts.append(logits)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=2e-5)


def packed_batch():
    """Rows of two documents, of which some tokens have no loss."""
    ends, places = np.array([[6], [11]]), np.arange(T)
    positions = np.where(places < ends, places, places - ends).astype(np.int32)
    targets = np.roll(TOKENS, -1, axis=-1)
    mask = (places != ends - 1) & (places < T - 1) & (places % 5 != 2)
    return Batch(TOKENS, targets, positions, 1 + np.int32(places >= ends), mask)


def value_and_grad(config, params, batch, objective, **sizes):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = make_mesh(MeshConfig(**sizes), devices)
    program = jax.jit(make_value_and_grad(Transformer(config), mesh, objective=objective))
    return jax.device_get(program(params, {}, jnp.int32(0), put_batch(batch, mesh, len(batch[0]))))


@pytest.mark.parametrize("config", [MODEL, SPARSE], ids=["dense", "experts"])
@pytest.mark.slow(but=["dense"])
def test_its_loss_is_of_tokens_after_the_next_in_the_same_document(config):
    params, batch, weight = random_params(config), packed_batch(), 0.7
    objective = Objective(multi_token=weight, load_balance=0.0, router_z_loss=0.0)
    loss, gradients = value_and_grad(config, params, batch, objective, data=1)
    options = dict(positions=batch.positions, segments=batch.segments)
    logits, hidden = run(config, params, TOKENS, **options)
    further, _ = run(config, params, batch.targets, hidden=hidden, **options)
    total = 0.0
    for b, t in np.ndindex(B, T):
        likely = [np.float64(jax.nn.log_softmax(x[b, t])) for x in (logits, further)]
        total -= likely[0][batch.targets[b, t]] * batch.loss_mask[b, t]
        if t + 1 < T and batch.segments[b, t + 1] == batch.segments[b, t]:
            total -= weight * likely[1][batch.targets[b, t + 1]] * batch.loss_mask[b, t + 1]
    assert loss == pytest.approx(total / batch.loss_mask.sum(), rel=1e-5)
    for path, x in jax.tree_util.tree_leaves_with_path(gradients["multi_token_prediction"]):
        assert np.abs(x).max() > 0, path
    without, _ = value_and_grad(config, params, batch, Objective(multi_token=0), data=1)
    assert without < loss


@pytest.mark.slow
def test_eight_devices_train_what_one_trains():
    config = replace(SPARSE, attention=replace(BASE.attention, num_heads=4, num_kv_heads=2))
    config = replace(config, model_dim=16, vocab_size=32)
    params, batch = random_params(config), packed_batch()
    batch = Batch(*(np.concatenate([x] * 4) for x in batch))
    one = value_and_grad(config, params, batch, Objective(), data=1)
    many = value_and_grad(config, params, batch, Objective(), data=2, fsdp=2, tensor=2)
    np.testing.assert_allclose(many[0], one[0], rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), many[1], one[1])


def expected_speculation(config, params, prompt, new, num_drafts):
    """Greedy text, and counts of drafts, by the whole model over and over."""
    text, drafted, accepted, passes = [*prompt], 0, 0, 0
    width = len(prompt) + new + num_drafts
    whole = jax.jit(lambda tokens: run(config, params, tokens))
    module = jax.jit(lambda tokens, hidden: run(config, params, tokens, hidden=hidden))

    def padded(tokens):
        return np.array([[*tokens, *[0] * (width - len(tokens))]])

    text.append(int(whole(padded(text))[0][0, len(text) - 1].argmax()))
    while len(text) < len(prompt) + new:
        hidden = np.array(whole(padded(text))[1])
        draft = []
        for _ in range(min(num_drafts, len(prompt) + new - len(text) - 1)):
            at = len(text) + len(draft) - 2
            logits, own = module(padded([*text, *draft][1:]), hidden)
            hidden[0, at + 1] = own[0, at]
            draft.append(int(logits[0, at].argmax()))
        right = whole(padded([*text, *draft]))[0][0].argmax(axis=-1)
        drafted, passes = drafted + len(draft), passes + 1
        for token in draft:
            if token != int(right[len(text) - 1]):
                break
            text.append(token)
            accepted += 1
        text.append(int(right[len(text) - 1]))
    return text, (passes, drafted, accepted)


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.slow(but=["1"])
def test_its_drafts_are_those_of_the_whole_text_and_change_no_token(num_tokens):
    config = replace(MODEL, vocab_size=5)  # so that chance is often right
    params, prompts, new = random_params(config), [[3, 1, 4, 1], [2], [0, 2]], 14
    drafts = MTP(num_tokens=num_tokens)
    text = jaxformer.generate(config, params, prompts, max_new_tokens=new)
    result = speculate(config, params, prompts, drafts=drafts, max_new_tokens=new)
    np.testing.assert_array_equal(result.tokens, text)
    counts = []
    for row, prompt in zip(np.asarray(text), prompts, strict=True):
        expected, count = expected_speculation(config, params, prompt, new, num_tokens)
        assert row[: len(prompt) + new].tolist() == expected
        counts.append(count)
    assert 0 < result.num_accepted < result.num_drafted
    passes, drafted, accepted = zip(*counts, strict=True)
    assert result[1:] == (max(passes), sum(drafted), sum(accepted))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-2-7b", "deepseek-v3", "qwen-3-next-80b-a3b", "mistral-7b"])
def test_families_write_the_same_with_it_also_on_many_devices(name):
    config = replace(zoo.get(name).tiny(), multi_token_prediction=True)
    params, prompts = random_params(config, 0.4), [[5, 1, 9, 3, 4], [7], [2, 8]]
    options = {"max_new_tokens": 12, "drafts": MTP(num_tokens=2)}
    text = jaxformer.generate(config, params, prompts, max_new_tokens=12)
    result = speculate(config, params, prompts, **options)
    np.testing.assert_array_equal(result.tokens, text)
    np.testing.assert_array_equal(
        [*stream(config, params, prompts, **options)],
        [*stream(config, params, prompts, max_new_tokens=12)],
    )
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4])
    many = speculate(config, params, prompts, mesh=mesh, **options)
    np.testing.assert_array_equal(many.tokens, text)


def test_the_module_is_counted_written_and_read():
    d = MODEL.model_dim
    layer = costs.num_parameters(MODEL.multi_token_model) - 2 * d * MODEL.vocab_size
    without = costs.num_parameters(replace(MODEL, multi_token_prediction=False))
    assert costs.num_parameters(MODEL) == without + layer + 2 * d + 2 * d * d
    assert from_json(TransformerConfig, to_json(MODEL)) == MODEL
    assert MODEL != replace(MODEL, multi_token_prediction=False)


def test_what_it_cannot_be_is_refused():
    with pytest.raises(ValueError, match="needs a Decoder; got EncoderDecoder"):
        replace(MODEL, topology=EncoderDecoder(num_encoder_layers=2))
    plain = replace(MODEL, multi_token_prediction=False)
    params = random_params(plain)
    with pytest.raises(ValueError, match="hidden needs a model with multi_token_prediction"):
        run(plain, params, TOKENS, hidden=jnp.zeros((B, T, MODEL.model_dim)))
    with pytest.raises(ValueError, match="needs a model with multi_token_prediction=True"):
        speculate(plain, params, [[1]], drafts=MTP(), max_new_tokens=2)
    with pytest.raises(ValueError, match="context=1, or Objective"):
        value_and_grad(MODEL, random_params(MODEL), packed_batch(), Objective(), context=2)
