"""`OutputGate`: a gate on the heads before the output projection."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer import functional as F
from jaxformer.checks import Checked


@dataclass(frozen=True, kw_only=True)
class OutputGate(Checked):
    """Multiply the outputs o of the heads by a gate that reads the layer's input x.

        out = W_out (activation(W_gate x + bias) * o)

    x is also what queries are projected from. QK-norm and RoPE do not touch the gate.

    Attributes:
        over: What has a gate of its own: "feature" is each feature of each head, "head" each head.
        bias: Whether each head has a bias, which all its gates add (Beam).
        activation: "sigmoid", or "softplus", which may also make outputs larger (Laguna).

    References:
        Qiu et al., Gated Attention for Large Language Models: Non-linearity, Sparsity, and
        Attention-Sink-Free, 2025. arXiv:2505.06708, section 2.2
    """

    over: Literal["feature", "head"] = "feature"
    bias: bool = False
    activation: Literal["sigmoid", "softplus"] = "sigmoid"

    def __call__(
        self, logits: Float[Array, "*batch N G"], heads: Float[Array, "*batch N H"]
    ) -> Float[Array, "*batch N H"]:
        """The gated heads."""
        function = F.softplus if self.activation == "softplus" else F.sigmoid
        return function(jnp.broadcast_to(logits, heads.shape)) * heads

    def gates_per_head(self, head_dim: int) -> int:
        """Gates of a head whose output has `head_dim` features."""
        return head_dim if self.over == "feature" else 1


def num_gates(gate: OutputGate | None, num_heads: int, head_dim: int) -> int:
    """Gates of a token, 0 without an option."""
    return 0 if gate is None else num_heads * gate.gates_per_head(head_dim)
