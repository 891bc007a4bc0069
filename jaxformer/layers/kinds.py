"""Build the attention module of each attention kind."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer.layers.attention import Attention
from jaxformer.layers.decay import Decay
from jaxformer.layers.latent import Latent
from jaxformer.layers.mixer import Mixer
from jaxformer.layers.mode import Mode
from jaxformer.layers.shared_kv import SharedKV

Attend = Callable[..., tuple[Float[Array, "*batch T D"], Any]]


def own_attention(
    config: c.TransformerConfig,
    positions: c.Positions | None,
    mode: Mode,
    causal: bool,
    *,
    parts: bool,
) -> Attend:
    """Build the self-attention module of a layer, as submodule "attention" of the caller.

    It is part of the module that calls this, under the name "attention".
    """
    match config.kind:
        case c.MultiHead():
            return Attention(config, positions, mode, causal, parts=parts, name="attention")
        case c.SharedKV():
            return SharedKV(config, positions, mode, parts=parts, name="attention")
        case c.Latent():
            return Latent(config, positions, mode, parts=parts, name="attention")
        case c.Decay():
            return Decay(config, mode, parts=parts, name="attention")
        case c.Mixer():
            return Mixer(config, mode, parts=parts, name="attention")
