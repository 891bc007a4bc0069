"""Shared-KV attention against DeepSeek V4's, of a layer with a window alone.

Not compared is what jaxformer does not have: compressed and chosen keys, sinks (here without
weight), and projections in several steps, which are multiplied out: nothing stands between the
factors of the output, and between those of the query a norm whose scale the query's own cancels.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import functional as F
from jaxformer.config import GLU, QKNorm, RMSNorm, Rope, TransformerConfig
from jaxformer.config import SharedKV as Choice
from jaxformer.layers import AttentionInputs, RuntimeConfig
from jaxformer.layers.attention.shared_kv import SharedKVAttention

GOLDEN = Path(__file__).parent / "golden" / "shared_kv.npz"


def ours(theirs):
    """Our configuration and parameters of their layer; turned features stand first in ours."""
    heads, width, rotated = (int(theirs[name]) for name in ("heads", "head_dim", "rotated"))
    first = np.roll(np.arange(width), rotated)
    dim = theirs["x"].shape[-1]
    query = (theirs["q_b_proj.weight"] * theirs["q_a_norm.weight"]) @ theirs["q_a_proj.weight"]
    groups = heads * width // theirs["o_a_proj.weight"].shape[1]
    inner = theirs["o_a_proj.weight"].reshape(groups, -1, heads * width // groups)
    outer = theirs["o_b_proj.weight"].reshape(dim, groups, -1)
    out = np.einsum("dgr,gri->gid", outer, inner).reshape(heads, width, dim)
    scale = theirs["kv_norm.weight"][first]
    params = {
        "query": {"kernel": query.T.reshape(dim, heads, width)[..., first]},
        "key_value": {"kernel": theirs["kv_proj.weight"].T[:, None, first]},
        "out": {"kernel": out[:, first]},
        "query_norm": {"scale": np.ones_like(scale)},
        "key_norm": {"scale": scale},
    }
    choice = Choice(
        num_heads=heads,
        head_dim=width,
        positions=(
            Rope(fraction=rotated / width, pairing="neighbours", targets=("q", "k", "v", "o")),
        ),
        windows=(int(theirs["window"]),),
        qk_norm=QKNorm(norm=RMSNorm(eps=1e-12)),
    )
    config = TransformerConfig(
        vocab_size=2,
        model_dim=dim,
        num_layers=1,
        attention=choice,
        feed_forward=(GLU(hidden_dim=2),),
    )
    return config, jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params)


def output(theirs):
    """What our layer gives for their inputs."""
    config, params = ours(theirs)
    x, rope = jnp.asarray(theirs["x"]), config.attention.positions[0]
    at = jnp.arange(x.shape[1])
    turned = F.rope_rotations(at, F.rope_frequencies(rope.rotary_dim(config.attention.head_dim)))
    mask = F.causal_mask(at, at) & F.window_mask(at, at, config.attention.windows[0])
    module = SharedKVAttention(config, config.attention, RuntimeConfig())
    return module.apply({"params": params}, x, AttentionInputs(mask, rotations=turned))[0]


@pytest.mark.slow
def test_output_is_that_of_the_released_implementation():
    with np.load(GOLDEN) as file:
        theirs = dict(file)
    np.testing.assert_allclose(output(theirs), theirs["y"], rtol=0, atol=2e-5)
