import jax.numpy as jnp
import numpy as np
import pytest

from tests.functional.jitted_functions import F

B, T, N, D = 2, 3, 3, 5


def made(dynamic):
    rng = np.random.default_rng(1)
    shapes = {"read": (N,), "mix": (N, N), "write": (N,)}
    if dynamic:
        shapes |= {"norm": (D,), "weights": (D, N + 2), "input_scale": (1,), "output_scale": (1,)}
    return rng.normal(size=(B, T, N, D)), {k: rng.normal(size=s) for k, s in shapes.items()}


def by_hand(h, w, first):
    """One token after another, one sum after another, by the paper's equations."""
    x, mixed, out = np.zeros((B, T, D)), np.zeros((B, T, N, D)), np.zeros((B, T, N))
    for b, t in np.ndindex(B, T):
        for i in range(N):
            read = w["read"][i] + (i == first)
            mix = w["mix"][i] + np.eye(N)[i]
            write = w["write"][i]
            if "weights" in w:
                centred = h[b, t, i] - h[b, t, i].mean()
                unit = centred / np.sqrt((centred**2).mean() + 1e-5) * w["norm"]
                turned = np.tanh(unit @ w["weights"])
                read = read + w["input_scale"][0] * turned[0]
                mix = mix + w["input_scale"][0] * turned[1 : N + 1]
                write = write + w["output_scale"][0] * turned[N + 1]
            x[b, t] += read * h[b, t, i]
            mixed[b, t] += mix[:, None] * h[b, t, i]
            out[b, t, i] = write
    return x, mixed, out


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("dynamic", [False, True])
def test_weighted_sums_of_streams(dynamic, first):
    streams, weights = made(dynamic)
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in weights.items()}
    x, (mixed, out) = F.hyper_connections(np.float32(streams), arrays, first=first)
    for actual, expected in zip((x, mixed, out), by_hand(streams, weights, first), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)
