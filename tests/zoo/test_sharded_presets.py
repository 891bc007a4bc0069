"""Every architecture of the zoo, made tiny, on eight devices equals one device.

Presets that differ in numbers alone (sizes, eps, bases, scales) are one design.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import Transformer
from jaxformer.config import AltUp, EncoderDecoder, LinearAttention, MoE
from jaxformer.data import Batch, PairBatch
from jaxformer.parallel import MeshConfig, abstract_parameters, make_mesh, put_batch, shardings
from jaxformer.training.gradient import make_value_and_grad
from tests.small_models import random_params
from tests.zoo.test_tiny_presets import DESIGNS, EVERY

ROWS, LENGTH = 4, 8
pytestmark = pytest.mark.exhaustive


def gradient(config, *, moved=False, **sizes):
    """Loss and gradients of a batch on a mesh, parameters moved by half of their last place."""
    rng = np.random.default_rng(0)

    def tokens():
        return rng.integers(0, config.vocab_size - 1, (ROWS, LENGTH), np.int32)

    mesh = make_mesh(MeshConfig(**sizes), jax.devices()[: np.prod(list(sizes.values()))])
    mask = np.arange(LENGTH) < np.array([[8], [3], [6], [5]])
    if isinstance(config.topology, EncoderDecoder):
        batch = PairBatch(tokens(), np.int32(mask), tokens(), tokens(), mask[::-1])
    else:
        places = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
        batch = Batch(tokens(), tokens(), places % 5, 1 + places // 5, mask)
    program = jax.jit(make_value_and_grad(Transformer(config), mesh))
    where = shardings(abstract_parameters(config, mesh))
    params = random_params(config, 0.1)
    if moved:
        signs = np.random.default_rng(1)
        params = jax.tree.map(
            lambda p: np.float32(p * np.float64(1 + signs.choice([-6e-8, 6e-8], p.shape))), params
        )
    params = jax.device_put(params, where)
    return jax.device_get(program(params, {}, jnp.int32(0), put_batch(batch, mesh, ROWS)))


@pytest.mark.parametrize("name", [*reversed(DESIGNS.values())])
def test_every_design_spreads(name):
    config = EVERY[name]
    choices = [layer.feed_forward for layer in config.layers]
    attentions = [layer.attention for layer in config.layers]
    mixtures = [choice for choice in choices if isinstance(choice, MoE)]
    needs_rows = any(moe.router.capacity is not None for moe in mixtures)
    second, third = "data" if needs_rows else "context", "expert" if mixtures else "fsdp"
    loss, gradients = gradient(config, **{"tensor": 2, second: 2, third: 2})
    true_loss, true_gradients = gradient(config, data=1)
    np.testing.assert_allclose(loss, true_loss, rtol=1e-5)
    leaves = jax.tree.leaves(true_gradients)
    largest = max(float(np.abs(x).max()) for x in leaves)
    assert largest > 0.01
    bound = 1e-5 * largest
    has_unit_vectors = any(isinstance(kind, LinearAttention) for kind in attentions)
    if has_unit_vectors or isinstance(config.residual, AltUp):
        # Gradients of vectors of one length grow with what was short before: rounding is seen.
        _, other = gradient(config, moved=True, data=1)
        changes = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), other, true_gradients)
        bound = max(bound, 2 * max(jax.tree.leaves(changes)))
    for actual, expected in zip(jax.tree.leaves(gradients), leaves, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=bound)
