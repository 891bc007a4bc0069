"""Short convolutions as a layer: what they cannot do."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer import Transformer, zoo
from jaxformer.layers.runtime import MeshAxes
from jaxformer.parallel import MeshConfig, check_divisible, make_mesh


def test_time_is_not_shared_out():
    """By the mesh before anything is compiled, and by the layer for who goes without it."""
    config = zoo.get("lfm-2.5-1.2b").tiny()
    with pytest.raises(ValueError, match="context 2, but ShortConvolution is recurrent over the"):
        check_divisible(config, dict(context=2), batch_size=4, lengths=[16])
    model = Transformer(config, mesh_axes=MeshAxes(context="context"))
    run = jax.shard_map(
        lambda tokens: model.init(jax.random.key(0), tokens),
        mesh=make_mesh(MeshConfig(context=2), jax.devices()[:2]),
        in_specs=P(None, "context"),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match="cannot be sharded; got the context axis 'context'"):
        run(jnp.zeros((1, 4), jnp.int32))
