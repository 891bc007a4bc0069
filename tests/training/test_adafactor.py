import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.parallel import ParameterMetadata
from jaxformer.training.adafactor import scale_by_adafactor


@pytest.mark.slow
def test_settings_of_adafactor_act_in_the_transformation():
    g, x = ({"out": {"bias": jnp.asarray(v)}} for v in ([3.0, 0.0, 0.0, 0.0], [0.0] * 4))
    metadata = {"out": {"bias": ParameterMetadata((4,), ("features",), 0)}}
    transform = scale_by_adafactor(metadata, decay_exponent=0.8, clip=0.25, min_scale=0.125)
    update, _ = transform.update(g, transform.init(x), x)
    # One element of 1 among four: root mean square 1/2, clipped to 1/4, then times 1/8.
    np.testing.assert_allclose(update["out"]["bias"], [0.0625, 0, 0, 0], rtol=1e-6, atol=1e-9)
