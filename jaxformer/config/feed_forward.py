"""Feed-forward options: MLP, GLU, clamped GEGLU, MoE, and the `FeedForward` protocol."""

from dataclasses import dataclass, replace

from jaxformer.checks import require, require_positive
from jaxformer.config.parameter import projected_width
from jaxformer.config.registry import Option, unimplemented_method
from jaxformer.config.tiny import TINY_HIDDEN_DIM, TINY_NUM_EXPERTS, shorten_pattern
from jaxformer.functional.activations import ACTIVATIONS


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

    parameters = unimplemented_method("parameters", "the model")
    __call__ = unimplemented_method("__call__", "the model")
    flops = unimplemented_method("flops", "costs")

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


@dataclass(frozen=True, kw_only=True)
class MLP(FeedForward):
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

    def flops(self, model_dim: int, length: int) -> int:
        """FLOPs of both matrix products for `length` tokens."""
        return 2 * 2 * length * model_dim * self.hidden_dim

    def hidden_width(self, model_dim: int) -> int:
        """Outputs per token of the projections from the model width."""
        return self.hidden_dim

    def tiny(self) -> "MLP":
        """Return the option at test size."""
        return replace(self, hidden_dim=TINY_HIDDEN_DIM)


@dataclass(frozen=True, kw_only=True)
class GLU(FeedForward):
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

    def flops(self, model_dim: int, length: int) -> int:
        """FLOPs of the three matrix products for `length` tokens."""
        return 3 * 2 * length * model_dim * self.hidden_dim

    def hidden_width(self, model_dim: int) -> int:
        """Outputs per token of the projections from the model width."""
        return 2 * self.hidden_dim

    def tiny(self) -> "GLU":
        """Return the option at test size."""
        return replace(self, hidden_dim=TINY_HIDDEN_DIM)


@dataclass(frozen=True, kw_only=True)
class ClampedGEGLU(FeedForward):
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

    def flops(self, model_dim: int, length: int) -> int:
        """FLOPs of the three matrix products for `length` tokens."""
        return 3 * 2 * length * model_dim * self.hidden_dim

    def hidden_width(self, model_dim: int) -> int:
        """Outputs per token of the projections from the model width."""
        return 2 * self.hidden_dim

    def tiny(self) -> "ClampedGEGLU":
        """Return the option at test size."""
        return replace(self, hidden_dim=TINY_HIDDEN_DIM)


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


def tiny_feed_forwards(pattern: tuple[FeedForward, ...]) -> tuple[FeedForward, ...]:
    """Return a pattern of feed-forward networks at test size."""
    return tuple(feed_forward.tiny() for feed_forward in shorten_pattern(pattern))


HIDDEN_DROPOUT_TYPES = MLP, GLU, ClampedGEGLU, MoE  # kinds that support Dropout.feed_forward
