"""Steps shared by the attention modules: QK-norm, RoPE, cache, attention, output projection."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.initializers import zeros
from jaxtyping import Array, Bool, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.positions import as_rope
from jaxformer.layers.attention.inputs import AttentionInputs
from jaxformer.layers.linear import Linear
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
        return sharded_parameter(self, "bias", self.init_fn, self.shape, axes)


class AttentionModule(nn.Module):
    """Base of the modules of attention kinds: their fields, and projections to heads and back.

    With `keep_partial_sums`, as in `Linear`, the caller sums over tensor-parallel devices.
    """

    config: c.TransformerConfig
    attention: Any
    runtime: RuntimeConfig
    causal: bool = True
    keep_partial_sums: bool = False

    @property
    def positions(self) -> c.Positions | None:
        """The position option of this layer."""
        return self.attention.positions[0]

    @nn.nowrap
    def projection(
        self,
        role: str,
        features: tuple[int, ...],
        axes: str = "model -> heads",
        *,
        bias: str | None = None,
        name: str | None = None,
    ) -> Linear:
        """Make a projection to heads; queries may have an initialiser of their own.

        It has a bias if `bias`, by default the role, is among the biases of the attention kind.
        """
        init = self.config.initialisation
        return Linear(
            features,
            (role == "query" and init.query) or init.projection,
            self.runtime,
            " ".join([axes, *["features"] * (len(features) - 1)]),
            bias=(bias or role) in self.attention.biases,
            name=name,
        )

    @nn.nowrap
    def output_projection(
        self, heads: tuple[int, int], *, keep_partial_sums: bool = False, name: str | None = None
    ) -> Linear:
        """Make the output projection, from heads to the model width."""
        return Linear(
            (self.config.model_dim,),
            self.config.initialisation.projection,
            self.runtime,
            "heads features -> model",
            input_shape=heads,
            bias="out" in self.attention.biases,
            init_divisor=self.config.residual_init_divisor,
            keep_partial_sums=self.keep_partial_sums or keep_partial_sums,
            name=name,
        )

    @nn.nowrap
    def output_gate_parts(
        self, heads: tuple[int, int]
    ) -> tuple[Linear | None, HeadParameter | None]:
        """Make the projection to the logits of the output gate, and their biases, if it has any."""
        if (gate := self.attention.output_gate) is None:
            return None, None
        num_heads, width = heads
        bias = HeadParameter((num_heads,), zeros, self.runtime) if gate.bias else None
        return self.projection("output_gate", (num_heads, gate.gates_per_head(width))), bias

    def apply_rope(
        self,
        target: c.positions.RopeTarget,
        x: Float[Array, "*batch T N H"],
        inputs: AttentionInputs,
    ) -> Float[Array, "*batch T N H"]:
        """Apply RoPE to x if `target` is a rotated one; outputs are rotated by the conjugate.

        With values and outputs rotated, the output depends on distances only.
        """
        rope, rotations = as_rope(self.positions), inputs.rotations
        if rope is None or rotations is None or target not in rope.targets:
            return x
        if target in "qk":
            rotations = rotations * rope.attention_scaling
        rotation = jnp.conj(rotations) if target == "o" else rotations
        return F.rotate(x, rotation, pairing=rope.pairing)

    def scale_query(
        self, query: Float[Array, "*batch T N H"], inputs: AttentionInputs
    ) -> Float[Array, "*batch T N H"]:
        """Multiply queries by their factors, if there are any."""
        if inputs.query_scale is None:
            return query
        scale = inputs.query_scale.astype(query.dtype)[..., None, None]
        return query * jnp.broadcast_to(scale, query.shape)

    def project_heads(
        self, x: Float[Array, "*batch T D"], heads: Float[Array, "*batch T N H"]
    ) -> Float[Array, "*batch T D"]:
        """Gate the heads by x and normalise them, if configured; project to the model width."""
        if self.output_gate is not None:
            logits = self.output_gate(x)
            if self.output_gate_bias is not None:
                bias = self.output_gate_bias().astype(logits.dtype)
                logits = logits + jnp.broadcast_to(bias[:, None], logits.shape)
            heads = self.attention.output_gate(logits, heads)
        if self.attention.sub_norm is not None:
            width = heads.reshape(*heads.shape[:-2], -1)
            heads = self.sub_norm(width).reshape(heads.shape)
        return self.out(heads)


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
    module: AttentionModule,
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    value: Float[Array, "*batch S K Hv"],
    inputs: AttentionInputs,
    *,
    score_options: ScoreOptions,
    sinks: Float[Array, " N"] | None = None,
    gather_keys: bool = False,
) -> Float[Array, "*batch T N Hv"]:
    """Attend, with dropout, and with ring attention over the context axis.

    Args:
        module: The module that sows the trace and has the "dropout" stream and its rate.
        query: Queries.
        key: Keys.
        value: Values.
        inputs: Mask and bias.
        score_options: Scale, soft cap and normalizer.
        sinks: As in `F.dot_product_attention`.
        gather_keys: All-gather keys instead of ring attention, for a bias that is an array.
    """
    runtime, dropout_rate = module.runtime, module.config.dropout.attention
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
