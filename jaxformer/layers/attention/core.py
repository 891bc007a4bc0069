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
from jaxformer.config.positions import position_terms
from jaxformer.layers.attention.inputs import AttentionInputs
from jaxformer.layers.linear import Linear
from jaxformer.layers.norms import Norm
from jaxformer.layers.parameters import axis_size, logical_to_mesh_axis, sharded_parameter
from jaxformer.layers.runtime import RuntimeConfig, dropout_key, sow_and_perturb


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """Score options: scale, soft cap and normalizer."""

    scale: float | None = None
    logit_softcap: float | None = None
    normalizer: F.Normalizer = "softmax"


class AttentionTrace(NamedTuple):
    """Query, key, value, mask, bias and sinks of an attention call, sown for `inspect`."""

    query: Float[Array, "*batch T N H"]
    key: Float[Array, "*batch S K H"]
    value: Float[Array, "*batch S K Hv"]
    mask: Bool[Array, "..."] | F.AttentionMask | None
    bias: Float[Array, "..."] | F.AttentionBias | None
    sinks: Float[Array, " N"] | None
    score_options: ScoreOptions


class HeadParameter(nn.Module):
    """A parameter with a heads axis."""

    shape: tuple[int, ...]
    init_fn: Callable[..., Array]
    runtime: RuntimeConfig

    @nn.compact
    def __call__(self) -> Float[Array, "N ..."]:
        axes = " ".join(["heads", *["features"] * (len(self.shape) - 1)])
        return sharded_parameter(self, "bias", self.init_fn, self.shape, axes, self.runtime)


def make_qk_norm(
    qk_norm: c.QKNorm, logical_axis: str, num_heads: int, head_dim: int, runtime: RuntimeConfig
) -> Norm:
    """Make the norm of queries or keys, for `apply_qk_norm`."""
    match qk_norm.over:
        case "each_head":
            return Norm(
                qk_norm.norm, runtime, num_heads=num_heads, logical_axes=f"{logical_axis} features"
            )
        case "width":
            return Norm(
                qk_norm.norm, runtime, logical_axes=logical_axis, num_features=num_heads * head_dim
            )
        case "head":
            return Norm(qk_norm.norm, runtime)


def make_output_projection(
    config: c.TransformerConfig,
    biases: tuple[str, ...],
    input_shape: tuple[int, int],
    runtime: RuntimeConfig,
    keep_partial_sums: bool,
    *,
    name: str | None = None,
) -> Linear:
    """Make the output projection, from heads to the model width."""
    init = config.initialisation
    return Linear(
        (config.model_dim,),
        init.out or init.projection,
        runtime,
        "heads features -> model",
        input_shape=input_shape,
        bias="out" in biases,
        init_divisor=config.residual_init_divisor,
        keep_partial_sums=keep_partial_sums,
        name=name,
    )


def make_output_gate(
    config: c.TransformerConfig,
    gate: c.OutputGate | None,
    heads: tuple[int, int],
    runtime: RuntimeConfig,
) -> Linear | None:
    """Make the projection to the logits of the output gate, for `gate_heads`; None without one."""
    if gate is None:
        return None
    num_heads, width = heads
    return Linear(
        (num_heads, gate.gates_per_head(width)),
        config.initialisation.projection,
        runtime,
        "model -> heads features",
    )


def gate_heads(
    output_gate: Linear | None, x: Float[Array, "*batch T D"], heads: Float[Array, "*batch T N H"]
) -> Float[Array, "*batch T N H"]:
    """Multiply the heads by sigmoid(output_gate(x)); unchanged without a gate."""
    if output_gate is None:
        return heads
    return F.glu(jnp.broadcast_to(output_gate(x), heads.shape), heads)


def apply_qk_norm(
    qk_norm: c.QKNorm, norm: Norm, x: Float[Array, "*batch T N H"]
) -> Float[Array, "*batch T N H"]:
    """Apply QK-norm over the full width, or per head."""
    if qk_norm.over == "width":
        return norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)
    return norm(x)


def apply_rope(
    positions: c.Positions | None,
    target: c.positions.RopeTarget,
    x: Float[Array, "*batch T N H"],
    inputs: AttentionInputs,
) -> Float[Array, "*batch T N H"]:
    """Apply RoPE to x if `target` is among the rotated ones; outputs are rotated by the conjugate.

    With values and outputs rotated, the output depends on distances only.
    """
    rope, rotations = position_terms(positions).rope, inputs.rotations
    if rope is None or rotations is None or target not in rope.targets:
        return x
    if target in "qk":
        rotations = rotations * rope.attention_scaling
    rotation = jnp.conj(rotations) if target == "o" else rotations
    return F.rotate(x, rotation, pairing=rope.pairing)


def local_kv_heads(
    x: Float[Array, "*axes K H"], num_kv_heads: int, runtime: RuntimeConfig
) -> Float[Array, "*axes K H"]:
    """Slice the KV head that this device's queries read, if KV heads are replicated."""
    tensor = runtime.mesh_axes.tensor
    if (
        tensor is None
        or logical_to_mesh_axis("kv_heads", num_kv_heads, runtime.mesh_axes) is not None
    ):
        return x
    devices_per_head = axis_size(tensor) // num_kv_heads
    head = jax.lax.axis_index(tensor) // devices_per_head
    return jax.lax.dynamic_slice_in_dim(x, head, 1, axis=-2)


def attend(
    module: nn.Module,
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    value: Float[Array, "*batch S K Hv"],
    inputs: AttentionInputs,
    *,
    runtime: RuntimeConfig,
    dropout_rate: float,
    score_options: ScoreOptions,
    sinks: Float[Array, " N"] | None = None,
    gather_keys: bool = False,
) -> Float[Array, "*batch T N Hv"]:
    """Attend, with dropout, and with ring attention over the context axis.

    Args:
        module: The module that sows the trace and has the "dropout" stream.
        query: Queries.
        key: Keys.
        value: Values.
        inputs: Mask and bias.
        runtime: Run-time options.
        dropout_rate: Dropout rate of the attention weights.
        score_options: Scale, soft cap and normalizer.
        sinks: As in `F.dot_product_attention`.
        gather_keys: All-gather keys instead of ring attention, for a bias that is an array.
    """
    key_is_value, key = value is key, key.astype(query.dtype)
    value = key if key_is_value else value.astype(query.dtype)
    query, key, value, *_ = sow_and_perturb(
        module,
        "attention_trace",
        AttentionTrace(query, key, value, inputs.mask, inputs.bias, sinks, score_options),
    )
    applies_dropout = not runtime.deterministic and dropout_rate > 0
    attend: Callable[..., Array] = partial(
        F.dot_product_attention, implementation=runtime.attention_implementation
    )
    if (axis_name := runtime.mesh_axes.context) is not None:
        if gather_keys:
            key, value = (
                jax.lax.all_gather(x, axis_name, axis=x.ndim - 3, tiled=True) for x in (key, value)
            )
        else:
            attend = partial(F.ring_attention, axis_name=axis_name)
    return attend(
        query,
        key,
        value,
        inputs.mask,
        inputs.bias,
        dropout_rate=dropout_rate if applies_dropout else 0.0,
        dropout_key=dropout_key(module, runtime.mesh_axes.tensor) if applies_dropout else None,
        sinks=sinks,
        **vars(score_options),
    )
