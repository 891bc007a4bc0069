"""Feed-forward module: MLP, GLU, mixture of experts, or a custom option."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.functional.activations import ACTIVATIONS
from jaxformer.layers.initializers import initializer
from jaxformer.layers.linear import Linear
from jaxformer.layers.mode import Mode, dropout
from jaxformer.layers.own_option import apply_option
from jaxformer.layers.parameters import parameter


class FeedForward(nn.Module):
    """Feed-forward network: MLP, GLU, mixture of experts, or a custom option.

    Or what an option of a person's own file makes of x.
    """

    config: c.TransformerConfig
    choice: c.FeedForward
    mode: Mode
    parts: bool = False  # as in Linear

    @nn.compact
    def __call__(self, x: Float[Array, "*batch T D"]) -> Float[Array, "*batch T D"]:
        match self.choice:
            case c.Experts() as choice:
                return self.mixture(x, choice)
            case c.MLP() | c.GLU() | c.ClampedGEGLU() as choice:
                return self.by_hidden(x, choice)
        own: Any = self.choice

        def function(*inputs: Any) -> tuple[Array, None]:
            return own(*inputs), None

        return apply_option(self, own, function, x, self.mode, parts=self.parts)[0]

    def by_hidden(
        self, x: Float[Array, "*batch T D"], choice: c.MLP | c.GLU | c.ClampedGEGLU
    ) -> Float[Array, "*batch T D"]:
        """MLP or GLU: project to the hidden width, activate, project back."""
        init = self.config.initialisation
        x = F.to_parts(x, self.mode.axes.tensor)
        start = init.feed_forward_in or init.projection
        into = {
            name: Linear(
                (choice.hidden_dim,),
                start,
                self.mode,
                "model -> hidden",
                bias=choice.bias,
                name=name,
            )(x)
            for name in inputs(choice)
        }
        rate, tensor = self.config.dropout.feed_forward, self.mode.axes.tensor
        hidden = dropout(self, activate(choice, into), rate, self.mode, part_of=tensor)
        down = Linear(
            (self.config.model_dim,),
            init.feed_forward_out or init.projection,
            self.mode,
            "hidden -> model",
            inputs=(choice.hidden_dim,),
            bias=choice.bias,
            divisor=self.config.residual_divisor,
            parts=self.parts,
            name="down",
        )
        return down(hidden)

    def mixture(self, x: Float[Array, "*batch T D"], choice: c.Experts) -> Float[Array, "..."]:
        """Mixture of experts with a float32 router."""
        wide, start = replace(self.mode, dtype=jnp.float32), self.config.initialisation.projection
        logits = Linear((choice.num_experts,), start, wide, "model -> features", name="router")(x)
        if not self.is_initializing():  # there are parameters alone then
            self.sow("router", "logits", logits)
        tensor = self.mode.axes.tensor
        mixed = F.mix_experts(
            F.to_parts(x.astype(self.mode.dtype), tensor),
            F.route(logits, top_k=choice.top_k, renormalise=choice.renormalise),
            ExpertKernels(self.config, choice, self.mode, name="experts"),
            num_experts=choice.num_experts,
            axis_name=self.mode.axes.expert,
            room=self.mode.expert_room,
        )
        return mixed if self.parts else F.sum_parts(mixed, tensor)


class ExpertKernels(nn.Module):
    """All experts of a layer, as grouped matmuls over rows sorted by expert."""

    config: c.TransformerConfig
    choice: c.Experts
    mode: Mode

    @nn.compact
    def __call__(self, rows: Float[Array, "R D"], sizes: Int[Array, " E"]) -> Float[Array, "R D"]:
        expert, init = self.choice.expert, self.config.initialisation
        width, count = self.config.model_dim, self.choice.num_experts

        def grouped(name: str, x: Array, shape: tuple[int, int], axes: str, **start: Any):
            kernel = GroupedKernel(
                (count, *shape), f"experts {axes}", self.mode, **start, name=name
            )
            return F.grouped_linear(x, kernel(), sizes)

        start = init.feed_forward_in or init.projection
        shape = width, expert.hidden_dim
        into = {
            name: grouped(name, rows, shape, "model -> hidden", initial=start)
            for name in inputs(expert)
        }
        rate, tensor = self.config.dropout.feed_forward, self.mode.axes.tensor
        hidden = dropout(self, activate(expert, into), rate, self.mode, part_of=tensor)
        start = init.feed_forward_out or init.projection
        divisor = self.config.residual_divisor
        axes = "hidden -> model"
        return grouped("down", hidden, shape[::-1], axes, initial=start, divisor=divisor)


class GroupedKernel(nn.Module):
    """A kernel for each expert, [E, D, F]."""

    shape: tuple[int, int, int]
    axes: str
    mode: Mode
    initial: c.Initialiser
    divisor: float = 1.0

    @nn.compact
    def __call__(self) -> Float[Array, "E D F"]:
        one = initializer(self.initial, divisor=self.divisor)

        def draw(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
            return jax.vmap(lambda key: one(key, shape[1:], dtype))(jax.random.split(key, shape[0]))

        dtype = self.mode.dtype
        return parameter(self, "kernel", draw, self.shape, self.axes, self.mode, dtype=dtype)


def inputs(choice: c.MLP | c.GLU | c.ClampedGEGLU) -> tuple[str, ...]:
    """Names of the input projections: ("up",) for an MLP, ("gate", "up") otherwise."""
    return ("up",) if isinstance(choice, c.MLP) else ("gate", "up")


def activate(choice: c.MLP | c.GLU | c.ClampedGEGLU, into: dict[str, Array]) -> Array:
    """Apply the activation, and the gate if there is one, to the input projections."""
    match choice:
        case c.MLP(activation=activation):
            return ACTIVATIONS[activation](into["up"])
        case c.GLU(activation=activation):
            return ACTIVATIONS[activation](into["gate"]) * into["up"]
        case c.ClampedGEGLU(limit=limit):
            return F.clamped_geglu(into["gate"], into["up"], limit=limit)
