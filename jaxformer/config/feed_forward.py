"""Feed-forward options: MLP, GLU, clamped GEGLU, MoE, and the `FeedForward` protocol."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from jaxtyping import Array

from jaxformer import functional as F
from jaxformer.checks import require, require_positive
from jaxformer.config.parameter import Parameter, projected_width
from jaxformer.config.registry import Option, unimplemented_method
from jaxformer.config.tiny import TINY_HIDDEN_DIM, TINY_NUM_EXPERTS, shorten_pattern
from jaxformer.functional.activations import ACTIVATIONS

Dense = TypeVar("Dense", bound="DenseFeedForward")


class FeedForward(Option, protocol=True):
    """A feed-forward network applied to each token separately.

    A custom option implements these methods; `flops` is optional:

        parameters(self, model_dim)      dict from names to `Parameter`
        __call__(self, params, x)        from [*batch, T, D] to [*batch, T, D]
        flops(self, model_dim, length)   FLOPs of the matrix products for `length` tokens

    `params` are the arrays by name, in the dtype of the computation. Under tensor parallelism each
    device gets its shard of the axes "hidden" and "heads", and the outputs of the devices are
    summed: so the last matrix product must contract the sharded axis, with no bias after it.
    """

    is_branch = True  # whether the layer has this branch at all
    is_moe = False
    input_projections: tuple[str, ...] = ()  # names of the linear layers of `DenseFeedForward`
    parameters = unimplemented_method("parameters", "the model")
    __call__ = unimplemented_method("__call__", "the model")
    flops = unimplemented_method("flops", "costs")

    @property
    def has_hidden_dropout(self) -> bool:
        """Whether it supports `Dropout.feed_forward`."""
        return self.is_moe or bool(self.input_projections)

    def hidden_width(self, model_dim: int) -> int:
        """Outputs per token of the projections from the model width."""
        return projected_width(self.parameters(model_dim))


def check_activation(config: "MLP | GLU") -> None:
    """Check that the activation's name is registered."""
    require(
        config.activation in ACTIVATIONS,
        f"{type(config).__name__}.activation must be one of {', '.join(map(repr, ACTIVATIONS))}; "
        f"got {config.activation!r}. Register your own with @options.activation in a module that "
        "is imported first (--import MODULE).",
    )


class DenseFeedForward(FeedForward, protocol=True):
    """Linear layers to `hidden_dim` features, an activation, and a linear layer back."""

    hidden_dim: int
    bias: bool
    input_projections: tuple[str, ...] = ("gate", "up")

    def activate(self, projections: Mapping[str, Array]) -> Array:
        """Apply the activation, and the gate if there is one, to the input projections."""
        raise NotImplementedError

    def flops(self, model_dim: int, length: int) -> int:
        """FLOPs of the matrix products for `length` tokens."""
        products = len(self.input_projections) + 1
        return products * 2 * length * model_dim * self.hidden_dim

    def hidden_width(self, model_dim: int) -> int:
        """Outputs per token of the projections from the model width."""
        return len(self.input_projections) * self.hidden_dim

    def tiny(self: Dense) -> Dense:
        """Return the option at test size."""
        return replace(self, hidden_dim=TINY_HIDDEN_DIM)


@dataclass(frozen=True, kw_only=True)
class MLP(DenseFeedForward):
    """Two linear layers with an activation between them.

    Attributes:
        hidden_dim: Number of hidden features.
        activation: A name in `functional.activations.ACTIVATIONS`; `options.activation` adds
            others.
        bias: Whether the linear layers have biases.
    """

    hidden_dim: int
    activation: str = "gelu_tanh"
    bias: bool = False

    def __post_init__(self):
        super().__post_init__()
        require_positive(self, "hidden_dim")
        check_activation(self)

    input_projections = ("up",)

    def activate(self, projections: Mapping[str, Array]) -> Array:
        """activation(up)."""
        return ACTIVATIONS[self.activation](projections["up"])


@dataclass(frozen=True, kw_only=True)
class GLU(DenseFeedForward):
    """Gated linear unit: down(activation(gate(x)) * up(x)).

    Attributes:
        hidden_dim: Number of hidden features.
        activation: Activation of the gate, a name as in `MLP`.
        bias: Whether the linear layers have biases.
    """

    hidden_dim: int
    activation: str = "silu"
    bias: bool = False

    def __post_init__(self):
        super().__post_init__()
        require_positive(self, "hidden_dim")
        check_activation(self)

    def activate(self, projections: Mapping[str, Array]) -> Array:
        """activation(gate) * up."""
        return ACTIVATIONS[self.activation](projections["gate"]) * projections["up"]


@dataclass(frozen=True, kw_only=True)
class ClampedGEGLU(DenseFeedForward):
    """Quick-GELU gate times (value + 1), both clamped (Phi-3-small).

    Attributes:
        hidden_dim: Number of hidden features.
        limit: Upper limit of the gate, and of the value's magnitude.
        bias: Whether the linear layers have biases.
    """

    hidden_dim: int
    limit: float = 20.0
    bias: bool = True

    def __post_init__(self):
        super().__post_init__()
        require_positive(self, "hidden_dim", "limit")

    def activate(self, projections: Mapping[str, Array]) -> Array:
        """`F.clamped_geglu` of gate and up."""
        return F.clamped_geglu(projections["gate"], projections["up"], limit=self.limit)


@dataclass(frozen=True, kw_only=True)
class MoE(FeedForward):
    """Mixture of experts (MoE): a router sends each token to top_k experts and sums their outputs.

    Attributes:
        expert: The network of each expert, without biases.
        num_experts: Number of experts.
        top_k: Experts per token, those with the largest probabilities.
        renormalise: Whether the probabilities of the top_k experts are divided by their sum.
    """

    expert: MLP | GLU
    num_experts: int
    top_k: int = 2
    renormalise: bool = True

    def __post_init__(self):
        super().__post_init__()
        require_positive(self, "num_experts", "top_k")
        require(
            self.top_k <= self.num_experts,
            "MoE.top_k must be at most num_experts; "
            f"got top_k={self.top_k}, num_experts={self.num_experts}.",
        )
        require(not self.expert.bias, f"MoE experts do not support biases; got {self.expert}.")

    is_moe = True

    def flops(self, model_dim: int, length: int) -> int:
        """FLOPs of the router and of the top_k experts for `length` tokens."""
        return 2 * length * model_dim * self.num_experts + self.expert_flops(model_dim, length)

    def expert_flops(self, model_dim: int, length: int) -> int:
        """FLOPs of the top_k experts for `length` tokens."""
        return self.top_k * self.expert.flops(model_dim, length)

    def hidden_width(self, model_dim: int) -> int:
        """Outputs per token of the projections of the top_k experts from the model width."""
        return self.top_k * self.expert.hidden_width(model_dim)

    def tiny(self) -> "MoE":
        """Return the option at test size."""
        return replace(
            self,
            expert=self.expert.tiny(),
            num_experts=min(self.num_experts, TINY_NUM_EXPERTS),
            top_k=min(self.top_k, TINY_NUM_EXPERTS - 1, self.num_experts),
        )


@dataclass(frozen=True, kw_only=True)
class NoFeedForward(FeedForward):
    """A layer without a feed-forward network: x + attention(norm(x))."""

    is_branch = False
    has_hidden_dropout = True

    def parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """No parameters."""
        return {}

    def flops(self, model_dim: int, length: int) -> int:
        """0."""
        return 0


def tiny_feed_forwards(pattern: tuple[FeedForward, ...]) -> tuple[FeedForward, ...]:
    """Return a pattern of feed-forward networks at test size."""
    return tuple(feed_forward.tiny() for feed_forward in shorten_pattern(pattern))
