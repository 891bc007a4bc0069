"""Values that are sums with those of layer 0."""

from dataclasses import replace

import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer import inspect
from jaxformer.config import EncoderDecoder, SharedKV
from tests.small_models import BASE, jitted_forward, random_params

TOKENS = np.random.default_rng(0).integers(0, 31, (2, 9))
FIRST = replace(BASE.attention, windows=(4,), num_heads=2)
MIXED = replace(BASE.attention, value_residual=True)
CONFIG = replace(BASE, num_layers=5, attention=(FIRST, *4 * (MIXED,)))


def values(own, of_first):
    """Values of each layer, with these weights."""
    params = flatten_dict(random_params(CONFIG))
    for path in params:
        if path[-1] == "value_weights":
            params[path] = np.float32(np.broadcast_to([own, of_first], (4, 2)))
    run = inspect.run(CONFIG, unflatten_dict(params), TOKENS, record=("value",))
    return run.logits, run.values["value"]


@pytest.mark.slow
def test_values_are_a_weighted_sum_of_own_and_first_ones():
    assert CONFIG.segments("decoder") == (1, 1, 4, 0)
    logits, own = values(1, 0)
    _, first = values(0, 1)
    _, mixed = values(0.3, 0.6)
    for i in range(1, 5):
        np.testing.assert_array_equal(first[i], own[0])
    np.testing.assert_allclose(mixed[1], 0.3 * own[1] + 0.6 * own[0], atol=1e-6)
    assert np.abs(mixed[2] - 0.3 * own[2] - 0.6 * own[0]).max() > 1e-3  # another input
    plain = replace(CONFIG, attention=(FIRST, *4 * (BASE.attention,)))
    params = flatten_dict(random_params(CONFIG))
    params = {path: x for path, x in params.items() if path[-1] != "value_weights"}
    expected = jitted_forward(plain)(unflatten_dict(params), TOKENS)
    np.testing.assert_allclose(logits, expected, atol=1e-5)


REFUSED = {
    "first": (lambda: replace(BASE, attention=MIXED), "got (2, 6) and MultiHead."),
    "widths": (
        lambda: replace(CONFIG, attention=(replace(FIRST, num_kv_heads=1), MIXED)),
        "got (2, 6) and (1, 6)",
    ),
    "kind": (
        lambda: replace(CONFIG, attention=(SharedKV(num_heads=2, head_dim=6), MIXED)),
        "got (2, 6) and SharedKV.",
    ),
    "encoder": (
        lambda: replace(CONFIG, topology=EncoderDecoder(num_encoder_layers=1)),
        "need a Decoder or an Encoder; got an EncoderDecoder",
    ),
}


@pytest.mark.parametrize("make, message", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value).replace("\n", " ")
