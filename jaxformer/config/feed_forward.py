"""Feed-forward options: MLP, GLU, clamped GEGLU, MoE, and the `FeedForward` protocol."""

from dataclasses import dataclass

from jaxformer.checks import require, require_positive
from jaxformer.config.registry import Option, unimplemented_method
from jaxformer.functional.activations import ACTIVATIONS


class FeedForward(Option, protocol=True):
    """A feed-forward network applied to each token separately.

    An option of a person's own file has these methods; the last may be left out:

        parameters(self, model_dim)      names of what is learned, a `Parameter` each
        __call__(self, params, x)        [*batch, T, D] from [*batch, T, D]
        flops(self, model_dim, length)   of the products for so many tokens, for costs and plans

    `params` are the arrays by name, in the dtype of the computation. Where several devices share
    "hidden" or "heads", each is given its part of those, and what they give is added up: so the
    last product is one with that axis among its inputs, and nothing is added to it.
    """

    parameters = unimplemented_method("parameters", "the model")
    __call__ = unimplemented_method("__call__", "the model")
    flops = unimplemented_method("flops", "costs")


def check_activation(config: "MLP | GLU") -> None:
    """Check that the activation's name is registered."""
    require(
        config.activation in ACTIVATIONS,
        f"{type(config).__name__}.activation must be one of {', '.join(map(repr, ACTIVATIONS))}; "
        f"got {config.activation!r}. A function of your own has a name by @options.activation, "
        "in a file that is imported first.",
    )


@dataclass(frozen=True, kw_only=True)
class MLP(FeedForward):
    """Two linear layers with an activation between them.

    Attributes:
        hidden_dim: Width between the products.
        activation: What stands between them: a name in `functional.activations.ACTIVATIONS`, to
            which `options.activation` adds.
        bias: Whether the products add a bias.
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


@dataclass(frozen=True, kw_only=True)
class GLU(FeedForward):
    """Gated linear unit: down(activation(gate(x)) * up(x)).

    Attributes:
        hidden_dim: Width between the products.
        activation: What stands between them, on the gate; as in `MLP`.
        bias: Whether the products add a bias.
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


@dataclass(frozen=True, kw_only=True)
class ClampedGEGLU(FeedForward):
    """Quick-GELU gate times (value + 1), both clamped (Phi-3-small).

    Attributes:
        hidden_dim: Width between the products.
        limit: Largest gate, and largest value in size.
        bias: Whether the products add a bias.
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


@dataclass(frozen=True, kw_only=True)
class MoE(FeedForward):
    """Mixture of experts (MoE): a router sends each token to top_k experts and sums their outputs.

    Attributes:
        expert: What each expert is; without biases.
        num_experts: How many there are.
        top_k: How many a token goes to, those with the largest probability.
        renormalise: Whether the probabilities of the chosen ones are divided by their sum.
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
            f"MoE.top_k chooses among num_experts; got {self.top_k} of {self.num_experts}.",
        )
        require(not self.expert.bias, f"Experts have no biases; got {self.expert}.")

    def flops(self, model_dim: int, length: int) -> int:
        """FLOPs of the router and of the top_k experts for `length` tokens."""
        return 2 * length * model_dim * self.num_experts + self.expert_flops(model_dim, length)

    def expert_flops(self, model_dim: int, length: int) -> int:
        """FLOPs of the top_k experts for `length` tokens."""
        return self.top_k * self.expert.flops(model_dim, length)


HIDDEN_DROPOUT_TYPES = MLP, GLU, ClampedGEGLU, MoE  # kinds whose hidden values may be dropped
