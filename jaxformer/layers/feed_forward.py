"""Feed-forward module: MLP, GLU, mixture of experts, or a custom option."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.initializers import ones, zeros
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.feed_forward import DenseFeedForward
from jaxformer.config.parameter import parse_logical_axes
from jaxformer.layers.custom_option import apply_option
from jaxformer.layers.linear import Linear
from jaxformer.layers.lora import low_rank_parameters
from jaxformer.layers.norms import Norm
from jaxformer.layers.parameters import initializer, sharded_parameter
from jaxformer.layers.runtime import RuntimeConfig, apply_dropout


class FeedForward(nn.Module):
    """Feed-forward network: MLP, GLU, mixture of experts, or a custom option."""

    config: c.TransformerConfig
    option: c.FeedForward
    runtime: RuntimeConfig
    keep_partial_sums: bool = False  # as in Linear

    @nn.compact
    def __call__(self, x: Float[Array, "*batch T D"]) -> Float[Array, "*batch T D"]:
        option: Any = self.option
        if option.is_moe:
            return self.moe(x, option)
        if option.input_projections:
            return self.dense_feed_forward(x, option)

        def function(*inputs: Any) -> tuple[Array, None]:
            return option(*inputs), None

        return apply_option(self, option, function, x, keep_partial_sums=self.keep_partial_sums)[0]

    def dense_feed_forward(
        self, x: Float[Array, "*batch T D"], option: DenseFeedForward
    ) -> Float[Array, "*batch T D"]:
        """MLP or GLU: project to the hidden width, activate, project back."""
        rate, tensor = self.config.dropout.feed_forward, self.runtime.mesh_axes.tensor
        x = F.copy_to_tensor_parallel(x, tensor)
        projections = {
            name: self._into_hidden(name, option.hidden_dim, option.bias)(x)
            for name in option.input_projections
        }
        numbers = {
            name: self._learned_number(name, start)
            for name, start in option.learned_numbers.items()
        }
        hidden = option.hidden({**projections, **numbers}, axis_name=tensor)
        if option.sub_norm is not None:
            options: Any = dict(logical_axes="hidden", num_features=option.hidden_dim)
            hidden = Norm(option.sub_norm, self.runtime, **options, name="sub_norm")(hidden)
        hidden = apply_dropout(self, hidden, rate, axis_name=tensor)
        return self._out_of_hidden(
            "down", option.hidden_dim, option.bias, keep_partial_sums=self.keep_partial_sums
        )(hidden)

    @nn.nowrap
    def _learned_number(self, name: str, start: float) -> Float[Array, " 1"]:
        """Declare a number of the activation, in float32."""
        init = nn.initializers.constant(start)
        return sharded_parameter(self, name, init, (1,), "features")

    @nn.nowrap
    def _into_hidden(self, name: str, width: int, bias: bool) -> Linear:
        """Make a projection from the model width to hidden features."""
        init = self.config.initialisation.projection
        return Linear((width,), init, self.runtime, "model -> hidden", bias=bias, name=name)

    @nn.nowrap
    def _out_of_hidden(
        self, name: str, width: int, bias: bool, *, keep_partial_sums: bool
    ) -> Linear:
        """Make a projection from hidden features to the model width."""
        return Linear(
            (self.config.model_dim,),
            self.config.initialisation.projection,
            self.runtime,
            "hidden -> model",
            input_shape=(width,),
            bias=bias,
            init_divisor=self.config.residual_init_divisor,
            keep_partial_sums=keep_partial_sums,
            name=name,
        )

    def moe(self, x: Float[Array, "*batch T D"], option: c.MoE) -> Float[Array, "..."]:
        """Mixture of experts with a float32 router, and a shared expert if there is one."""
        tensor = self.runtime.mesh_axes.tensor
        expert_x = self.apply_norm("pre_experts_norm", option.norm, x)
        expert_x = F.copy_to_tensor_parallel(expert_x.astype(self.runtime.dtype), tensor)
        output = F.mixture_of_experts(
            expert_x if option.latent is None else self.to_latent(expert_x, option.latent),
            self.route(x, option),
            GroupedExperts(self.config, option, self.runtime, name="experts"),
            num_experts=option.num_experts,
            axis_name=self.runtime.mesh_axes.expert,
            capacity_factor=self.runtime.expert_capacity_factor,
            weighs_inputs=option.router.weighs_inputs,
        )
        if option.latent is not None:
            output = self.from_latent(output, option.latent)
        output = self.normalise_sum("post_experts_norm", option.norm, output)
        if option.shared is not None:
            shared_x = self.apply_norm("pre_shared_norm", option.norm, x)
            shared = self.shared_expert(shared_x, option.shared)
            output = output + self.normalise_sum("post_shared_norm", option.norm, shared)
            output = output / 2 if option.shared.combination == "average" else output
        if option.output_norm is not None and option.norm is None:
            output = F.reduce_from_tensor_parallel(output, tensor)
        output = self.apply_norm("output_norm", option.output_norm, output)
        if self.keep_partial_sums or option.norm or option.output_norm:
            return output
        return F.reduce_from_tensor_parallel(output, tensor)

    def apply_norm(self, name: str, norm: c.Norm | None, x: Float[Array, "*batch T D"]) -> Array:
        """Apply a norm of this name; unchanged if it is None."""
        return x if norm is None else Norm(norm, self.runtime, name=name)(x)

    def normalise_sum(self, name: str, norm: c.Norm | None, x: Float[Array, "*batch T D"]) -> Array:
        """Add partial sums up and apply a norm of this name; unchanged if it is None."""
        if norm is None:
            return x
        x = F.reduce_from_tensor_parallel(x, self.runtime.mesh_axes.tensor)
        return self.apply_norm(name, norm, x)

    def to_latent(
        self, x: Float[Array, "*batch T D"], latent: c.ExpertLatent
    ) -> Float[Array, "*batch T C"]:
        """Project to the latent; each device computes a part, and all are gathered."""
        tensor = self.runtime.mesh_axes.tensor
        y = self._into_hidden("latent_down", latent.latent_dim, latent.bias)(x)
        return y if tensor is None else F.fsdp_all_gather(y, tensor, y.ndim - 1, y.dtype)

    def from_latent(
        self, x: Float[Array, "*batch T C"], latent: c.ExpertLatent
    ) -> Float[Array, "*batch T D"]:
        """Project partial sums from the latent to partial sums, a part of it on each device."""
        if (tensor := self.runtime.mesh_axes.tensor) is not None:
            x = jax.lax.psum_scatter(
                x.astype(jnp.float32), tensor, scatter_dimension=x.ndim - 1, tiled=True
            )
        return self._out_of_hidden(
            "latent_up", latent.latent_dim, latent.bias, keep_partial_sums=True
        )(x)

    def route(self, x: Float[Array, "*batch T D"], option: c.MoE) -> F.Routing:
        """Choose and weigh the experts of each token, in float32."""
        router, runtime = option.router, replace(self.runtime, dtype=jnp.float32)
        if router.capacity is not None and runtime.mesh_axes.context is not None:
            raise ValueError(
                f"Router.capacity={router.capacity} counts the tokens of whole rows, which cannot "
                f"be sharded; got the context axis {runtime.mesh_axes.context!r}."
            )
        if router.norm is not None:
            x = self.apply_norm("router_norm", router.norm, x.astype(jnp.float32))
            x *= self.config.model_dim**-0.5
        shape, init = (option.num_experts,), self.config.initialisation.projection
        axes = "model -> features"
        logits = Linear(shape, init, runtime, axes, bias=router.bias, name="router")(x)
        if router.logit_softcap is not None:
            logits = F.soft_cap(logits, router.logit_softcap)
        selection_bias = None
        if router.selection_bias:
            selection_bias = sharded_parameter(self, "selection_bias", zeros, shape, "choices")
        routing = router.route(logits, top_k=option.top_k, selection_bias=selection_bias)
        if router.expert_scale:
            scale = sharded_parameter(self, "expert_scale", ones, shape, "features")
            routing = routing._replace(weights=routing.weights * scale[routing.expert_ids])
        if not self.is_initializing():  # `init` returns only parameters
            self.sow("router", "logits", logits)
            self.sow("router", "expert_ids", routing.expert_ids)
        return routing

    def shared_expert(
        self, x: Float[Array, "*batch T D"], option: c.SharedExpert
    ) -> Float[Array, "*batch T D"]:
        """The expert that every token meets; partial sums over tensor-parallel devices."""
        expert = FeedForward(
            self.config, option.expert, self.runtime, keep_partial_sums=True, name="shared"
        )
        output = expert(x)
        if not option.gated:
            return output
        init = self.config.initialisation.projection
        gate = Linear((1,), init, self.runtime, "model -> features", name="shared_gate")
        return output * jax.nn.sigmoid(gate(x))


class GroupedExperts(nn.Module):
    """All experts of a layer, as grouped matmuls over rows sorted by expert."""

    config: c.TransformerConfig
    option: c.MoE
    runtime: RuntimeConfig

    @nn.compact
    def __call__(
        self, rows: Float[Array, "R D"], group_sizes: Int[Array, " E"]
    ) -> Float[Array, "R D"]:
        expert, init = self.option.expert, self.config.initialisation.projection
        width, count = rows.shape[-1], self.option.num_experts
        rate, tensor = self.config.dropout.feed_forward, self.runtime.mesh_axes.tensor
        projections = {
            name: ExpertLinear(
                (count, width, expert.hidden_dim),
                "model -> hidden",
                self.runtime,
                init,
                bias=expert.bias,
                name=name,
            )(rows, group_sizes)
            for name in expert.input_projections
        }
        hidden = expert.hidden(projections, axis_name=tensor)
        hidden = apply_dropout(self, hidden, rate, axis_name=tensor)
        down = ExpertLinear(
            (count, expert.hidden_dim, width),
            "hidden -> model",
            self.runtime,
            init,
            bias=expert.bias,
            init_divisor=1.0 if self.option.latent else self.config.residual_init_divisor,
            name="down",
        )
        return down(hidden, group_sizes)


class ExpertLinear(nn.Module):
    """A linear layer for each expert: kernels [E, D, F] and biases [E, F].

    The outputs of sharded inputs are partial sums over devices; one device adds the bias.
    """

    shape: tuple[int, int, int]
    logical_axes: str
    runtime: RuntimeConfig
    kernel_init: c.Initialiser
    bias: bool = False
    init_divisor: float = 1.0

    @nn.compact
    def __call__(
        self, rows: Float[Array, "R D"], group_sizes: Int[Array, " E"]
    ) -> Float[Array, "R F"]:
        init_one = initializer(self.kernel_init, divisor=self.init_divisor)

        def init_fn(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
            keys = jax.random.split(key, shape[0])
            return jax.vmap(lambda key: init_one(key, shape[1:], dtype))(keys)

        axes = f"experts {self.logical_axes}"
        runtime, dtype, biases = self.runtime, self.runtime.dtype, None
        tensor = runtime.mesh_axes.tensor if self.logical_axes.startswith("hidden") else None
        options: Any = dict(dtype=dtype, adaptable=True)
        kernels = sharded_parameter(self, "kernel", init_fn, self.shape, axes, **options)
        if self.bias:
            bias_axes = f"experts {parse_logical_axes(self.logical_axes).bias_axes}"
            shape = self.shape[0], self.shape[2]
            biases = sharded_parameter(self, "bias", zeros, shape, bias_axes, dtype=dtype)
            if tensor is not None:
                biases = jnp.where(jax.lax.axis_index(tensor) == 0, biases, 0)
        y = F.grouped_matmul(rows, kernels, group_sizes, biases)
        if (lora := runtime.lora_of(self.path)) is None:
            return y
        a, b = low_rank_parameters(self, lora, self.shape, axes)
        narrow_inputs = apply_dropout(self, rows, lora.dropout, axis_name=tensor)
        narrow = F.grouped_matmul(narrow_inputs, a, group_sizes)
        update = F.grouped_matmul(narrow, b, group_sizes)
        return y + update * jnp.asarray(lora.scale, y.dtype)
