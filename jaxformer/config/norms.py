"""Norm options: LayerNorm, RMSNorm and QK-norm."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Array, Float

from jaxformer import functional as F
from jaxformer.checks import Checked, Positive

NormParameters = Literal["none", "scale", "scale_bias"]


@dataclass(frozen=True, kw_only=True)
class LayerNorm(Checked):
    """Subtract the mean and divide by the standard deviation of each vector.

    Attributes:
        eps: Added to the variance.
        parameters: Learned parameters.
        scale_offset: Added to the stored scale; 1 for checkpoints that store scale - 1 (Nemotron).
    """

    eps: Positive = 1e-5
    parameters: NormParameters = "scale_bias"
    scale_offset: float = 0.0
    subtracts_mean = True  # of each vector

    def __call__(
        self,
        x: Float[Array, "*batch D"],
        scale: Float[Array, "..."] | None,
        bias: Float[Array, "..."] | None,
        *,
        axis_name: str | None = None,
    ) -> Float[Array, "*batch D"]:
        """`F.layer_norm`."""
        return F.layer_norm(x, scale, bias, eps=self.eps, axis_name=axis_name)


@dataclass(frozen=True, kw_only=True)
class RMSNorm(Checked):
    """Divide each vector by its root mean square.

    Attributes:
        eps: Added to the mean square, or to its root.
        eps_position: Whether eps is inside or outside the root.
        parameters: Learned parameters.
        scale_offset: Added to the stored scale; 1 for checkpoints that store scale - 1 (Gemma).
    """

    eps: Positive = 1e-6
    eps_position: Literal["inside", "outside"] = "inside"
    parameters: NormParameters = "scale"
    scale_offset: float = 0.0
    subtracts_mean = False  # of each vector

    def __call__(
        self,
        x: Float[Array, "*batch D"],
        scale: Float[Array, "..."] | None,
        bias: Float[Array, "..."] | None,
        *,
        axis_name: str | None = None,
    ) -> Float[Array, "*batch D"]:
        """`F.rms_norm`."""
        return F.rms_norm(
            x, scale, bias, eps=self.eps, eps_position=self.eps_position, axis_name=axis_name
        )


Norm = LayerNorm | RMSNorm


@dataclass(frozen=True, kw_only=True)
class QKNorm(Checked):
    """Normalise queries and keys.

    Attributes:
        norm: The kind of norm.
        over: "width" normalises all heads concatenated (OLMo 2), "head" each head with one scale
            for all heads (Gemma 3), "each_head" each head with its own scale (Command R+).
        placement: Whether the norm comes before or after RoPE (Hunyuan). The cache holds the keys
            after both.
    """

    norm: Norm = RMSNorm()
    over: Literal["width", "head", "each_head"] = "head"
    placement: Literal["before_rope", "after_rope"] = "before_rope"
