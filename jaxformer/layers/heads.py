"""Steps shared by the attention modules: QK-norm, RoPE, cache, attention, output projection."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.layers.cache import Own, remember
from jaxformer.layers.guide import Guide, magnitude
from jaxformer.layers.linear import Linear
from jaxformer.layers.mode import Mode, dropout_key
from jaxformer.layers.norms import Norm
from jaxformer.layers.parameters import mesh_axis, parameter, shards
from jaxformer.layers.watch import watch


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class Weighing:
    """Score options: scale, soft cap and normalizer."""

    scale: float | None = None
    logit_softcap: float | None = None
    normalizer: F.Normalizer = "softmax"


class Attended(NamedTuple):
    """Query, key, mask and bias of an attention call, sown for `inspect`."""

    query: Float[Array, "*batch T N H"]
    key: Float[Array, "*batch S K H"]
    mask: Bool[Array, "..."] | F.AttentionMask | None
    bias: Float[Array, "..."] | F.ScoreBias | None
    weighing: Weighing


class PerHead(nn.Module):
    """A parameter with a heads axis."""

    shape: tuple[int, ...]
    start: Callable[..., Array]
    mode: Mode

    @nn.compact
    def __call__(self) -> Float[Array, "N ..."]:
        axes = " ".join(["heads", *["features"] * (len(self.shape) - 1)])
        return parameter(self, "bias", self.start, self.shape, axes, self.mode)


def head_norm(choice: c.QKNorm, logical: str, heads: int, head_dim: int, mode: Mode) -> Norm:
    """The norm of so many heads, for `normalise`."""
    match choice.over:
        case "each_head":
            return Norm(choice.norm, mode, heads=heads, axes=f"{logical} features")
        case "width":
            return Norm(choice.norm, mode, axes=logical, width=heads * head_dim)
        case "head":
            return Norm(choice.norm, mode)


def out_of_heads(
    config: c.TransformerConfig, heads: tuple[int, int], mode: Mode, parts: bool
) -> Linear:
    """Make the output projection, from heads to the model width."""
    init = config.initialisation
    return Linear(
        (config.model_dim,),
        init.out or init.projection,
        mode,
        "heads features -> model",
        inputs=heads,
        bias="out" in config.kind.biases,
        divisor=config.residual_divisor,
        parts=parts,
    )


def normalise(
    choice: c.QKNorm, norm: Norm, x: Float[Array, "*batch T N H"]
) -> Float[Array, "*batch T N H"]:
    """Apply QK-norm over the full width, or per head."""
    if choice.over == "width":
        return norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)
    return norm(x)


def turn(
    positions: c.Positions | None,
    target: c.positions.RopeTarget,
    x: Float[Array, "*batch T N H"],
    guide: Guide,
) -> Float[Array, "*batch T N H"]:
    """Apply RoPE to x if `target` is among the rotated ones; outputs are rotated by the conjugate.

    So rotated values, and with them the output, depend on distances only.
    """
    rope, rotations = positions, guide.rotations
    if not isinstance(rope, c.Rope) or rotations is None or target not in rope.targets:
        return x
    if target in "qk":
        rotations = rotations * magnitude(rope)
    rotation = jnp.conj(rotations) if target == "o" else rotations
    return F.rotate(x, rotation, pairing=rope.pairing)


def mine(
    x: Float[Array, "*batch S K H"], num_kv_heads: int, mode: Mode
) -> Float[Array, "*batch S K H"]:
    """Slice the KV head that this device's queries read, if KV heads are replicated."""
    tensor = mode.axes.tensor
    if tensor is None or mesh_axis("kv_heads", num_kv_heads, mode.axes) is not None:
        return x
    devices_per_head = shards(tensor) // num_kv_heads  # devices
    head = jax.lax.axis_index(tensor) // devices_per_head
    return jax.lax.dynamic_slice_in_dim(x, head, 1, axis=-2)


def with_earlier(new: Own, cache: Own | None, guide: Guide, mode: Mode) -> tuple[Own, Own | None]:
    """Update the cache with new keys and values; return what to attend to, and the new cache."""
    if cache is None or guide.slots is None or guide.keys is None:
        return new, cache
    append_new = guide.keys.shape[-1] > cache[0].shape[-2]
    attended, cache = remember(cache, new, guide.slots, beside=append_new, layer=guide.layer)
    return new if mode.fresh else attended, cache


def mix(
    module: nn.Module,
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    value: Float[Array, "*batch S K Hv"],
    guide: Guide,
    *,
    mode: Mode,
    dropout_rate: float,
    weighing: Weighing,
) -> Float[Array, "*batch T N Hv"]:
    """Attend, with ring attention (or all-gathered keys) over the context axis and with dropout.

    Args:
        module: Whose "dropout" stream is drawn from.
        query: What each token looks for.
        key: What each token offers.
        value: What each token says.
        guide: Mask and bias.
        mode: How the model runs.
        dropout_rate: Of the weights.
        weighing: Scale, soft cap and normalizer.
    """
    key_is_value, key = value is key, key.astype(query.dtype)
    value = key if key_is_value else value.astype(query.dtype)
    watch(module, "attended", Attended(query, key, guide.mask, guide.bias, weighing))
    applies_dropout = not mode.deterministic and dropout_rate > 0
    attend: Callable[..., Array] = partial(
        F.dot_product_attention, implementation=mode.attention_implementation
    )
    if (ring := mode.axes.context) is not None:
        if any(isinstance(x, jax.Array) for x in (guide.mask, guide.bias)):  # of all pairs
            key, value = (
                jax.lax.all_gather(x, ring, axis=x.ndim - 3, tiled=True) for x in (key, value)
            )
        else:
            attend = partial(F.ring_attention, axis_name=ring)
    return attend(
        query,
        key,
        value,
        guide.mask,
        guide.bias,
        dropout_rate=dropout_rate if applies_dropout else 0.0,
        dropout_key=dropout_key(module, mode.axes.tensor) if applies_dropout else None,
        **vars(weighing),
    )
