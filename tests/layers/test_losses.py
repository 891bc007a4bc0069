"""A model that is given targets says what losses ask of its logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import Transformer
from jaxformer import functional as F
from jaxformer.config import Embedding, EncoderDecoder, HeadTransform, LMHead
from jaxformer.layers import empty_cache

HEADS = {
    "plain": {},
    "capped": dict(head=LMHead(softcap=3.0, multiplier=0.5, bias=True)),
    "tied": dict(head=LMHead(tied=True, masked_ids=(3, 30), bias=True)),
    "hidden layer": dict(head=LMHead(transform=HeadTransform(bias=True))),
    "factorised": dict(head=LMHead(tied=True, softcap=3.0), embedding=Embedding(dim=5)),
    "encoder-decoder": dict(topology=EncoderDecoder(num_encoder_layers=1), num_layers=1),
}
SELDOM = {"plain", "capped"}  # others have as much and more


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive if name in SELDOM else ()) for name in HEADS],
)
@pytest.mark.slow
def test_losses_are_those_of_the_logits(name, config, tokens, randomise, monkeypatch):
    """Loss and every gradient, six of 31 ids at a time."""
    for constant, number in dict(
        MAX_UNCHUNKED_LOGITS=0, LOGITS_PER_CHUNK=dict(cpu=1), MIN_CHUNK_SIZE=6
    ).items():
        monkeypatch.setattr(F.linear_losses, constant, number)
    model = Transformer(config(**HEADS[name]))
    more = {"source": tokens[:, ::-1]} if name == "encoder-decoder" else {}
    params = randomise(model, tokens, **more)
    targets = (tokens + 4) % 29
    targets = jnp.where(targets == 3, 0, targets)
    objective = dict(z_loss=0.1, label_smoothing=0.0 if name == "tied" else 0.1)

    def by_scores(params):
        scores = model.apply({"params": params}, tokens, targets=targets, **more)
        assert scores.log_z.shape == targets.shape
        return jnp.mean(F.cross_entropy_from_statistics(scores, **objective))

    def by_logits(params):
        logits = model.apply({"params": params}, tokens, **more)
        return jnp.mean(F.token_cross_entropy(logits, targets, **objective))

    actual, expected = (jax.jit(jax.value_and_grad(f))(params) for f in (by_scores, by_logits))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), actual, expected)


@pytest.mark.slow
def test_some_targets(config, tokens, build):
    """As many as there are places in `logits_at`."""
    _, run = build(config())
    at, targets = jnp.array([[6, 2, 2], [0, 5, 3]]), jnp.array([[1, 30, 4], [7, 0, 31]])
    scores = run(tokens, logits_at=at, targets=targets)
    logits = jax.nn.log_softmax(np.take_along_axis(run(tokens), at[..., None], axis=1))
    expected = np.take_along_axis(logits, np.minimum(targets, 30)[..., None], axis=-1)[..., 0]
    expected = jnp.where(targets == 31, jnp.nan, expected)
    np.testing.assert_allclose(scores.target_logit - scores.log_z, expected, atol=1e-5)


def test_targets_with_a_cache_are_refused(config, tokens, build):
    params, _ = build(config())
    cache = empty_cache(config(), (2,), capacity=9)
    with pytest.raises(ValueError, match="pass either targets or a cache"):
        Transformer(config()).apply({"params": params}, tokens, targets=tokens, cache=cache)
