"""Norms and feed-forward branches: what can be chosen of each."""

from dataclasses import dataclass
from typing import Literal

from jaxformer.checks import check_fields, require, require_positive
from jaxformer.functional.activations import ACTIVATIONS

NormParameters = Literal["none", "scale", "scale_bias"]


# Norms


@dataclass(frozen=True, kw_only=True)
class LayerNorm:
    """Subtract the mean and divide by the standard deviation of each vector.

    Attributes:
        eps: Added to the variance.
        parameters: What is learned.
        scale_offset: Added to the stored scale; 1 for checkpoints that store scale - 1 (Nemotron).
    """

    eps: float = 1e-5
    parameters: NormParameters = "scale_bias"
    scale_offset: float = 0.0

    def __post_init__(self):
        check_fields(self)
        require_positive(self, "eps")


@dataclass(frozen=True, kw_only=True)
class RMSNorm:
    """Divide each vector by its root mean square.

    Attributes:
        eps: Added to the mean square, or to its root.
        eps_position: Whether eps stands inside or outside the root.
        parameters: What is learned.
        scale_offset: Added to the stored scale; 1 for checkpoints that store scale - 1 (Gemma).
    """

    eps: float = 1e-6
    eps_position: Literal["inside", "outside"] = "inside"
    parameters: NormParameters = "scale"
    scale_offset: float = 0.0

    def __post_init__(self):
        check_fields(self)
        require_positive(self, "eps")


Norm = LayerNorm | RMSNorm


@dataclass(frozen=True, kw_only=True)
class QKNorm:
    """Normalise queries and keys before their positions are applied.

    Attributes:
        norm: The kind of norm.
        over: What one norm sees: "width" all heads side by side (OLMo 2), "head" each head with
            one scale shared by all heads (Gemma 3), "each_head" each head with a scale of its own
            (Command R+).
    """

    norm: Norm = RMSNorm()
    over: Literal["width", "head", "each_head"] = "head"

    def __post_init__(self):
        check_fields(self)


# Feed-forward


def require_activation(config: "MLP | GLU") -> None:
    """Refuse a name that no function has."""
    require(
        config.activation in ACTIVATIONS,
        f"{type(config).__name__}.activation must be one of {', '.join(map(repr, ACTIVATIONS))}; "
        f"got {config.activation!r}. A function of your own has a name by @options.activation, "
        "in a file that is imported first.",
    )


@dataclass(frozen=True, kw_only=True)
class MLP:
    """Two products with an activation between.

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
        check_fields(self)
        require_positive(self, "hidden_dim")
        require_activation(self)


@dataclass(frozen=True, kw_only=True)
class GLU:
    """A gated hidden layer: the activated gate times a second projection.

    Attributes:
        hidden_dim: Width between the products.
        activation: What stands between them, on the gate; as in `MLP`.
        bias: Whether the products add a bias.
    """

    hidden_dim: int
    activation: str = "silu"
    bias: bool = False

    def __post_init__(self):
        check_fields(self)
        require_positive(self, "hidden_dim")
        require_activation(self)


@dataclass(frozen=True, kw_only=True)
class ClampedGEGLU:
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
        check_fields(self)
        require_positive(self, "hidden_dim", "limit")


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A router sends each token to a few of many feed-forwards and mixes what they give.

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
        check_fields(self)
        require_positive(self, "num_experts", "top_k")
        require(
            self.top_k <= self.num_experts,
            f"Experts.top_k chooses among num_experts; got {self.top_k} of {self.num_experts}.",
        )
        require(not self.expert.bias, f"Experts have no biases; got {self.expert}.")


FeedForward = MLP | GLU | ClampedGEGLU | Experts
