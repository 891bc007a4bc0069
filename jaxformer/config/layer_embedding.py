"""`LayerEmbedding`: an embedding of the token for each layer."""

from __future__ import annotations

from dataclasses import dataclass

from jaxformer.checks import Checked, Size
from jaxformer.config.feed_forward import Activation


@dataclass(frozen=True, kw_only=True)
class LayerEmbedding(Checked):
    """Per-layer embeddings (PLE): a branch at the end of each layer reads its own embedding.

        e = (norm(x_0 @ P / sqrt(model_dim)) + sqrt(dim) * table[token]) / sqrt(2)
        x = x + norm(down(activation(gate(x)) * e))

    Each layer has its P, table, gate and down; x_0 is the input of the first layer. The norms have
    the model's type. Of several streams, `Residual.of_branch("layer_embedding")` says which the
    branch reads and joins.

    Attributes:
        dim: Features of an embedding.
        activation: Activation of the gate, a name as in `MLP`.
        vocab_size: Rows of the table, where later tokens read the first row (Gemma 3n); None is
            the vocabulary of the model.

    References:
        Gemma team, Gemma 3n, 2025. https://ai.google.dev/gemma/docs/gemma-3n
    """

    dim: Size
    activation: Activation = "gelu_tanh"
    vocab_size: Size | None = None

    def flops(self, model_dim: int, length: int) -> int:
        """FLOPs of one layer over a sequence, with P."""
        return 2 * 3 * length * model_dim * self.dim

    def activation_width(self, model_dim: int, remat: str) -> int:
        """Numbers per token that one layer saves for the backward pass."""
        match remat:
            case "full":
                return self.dim
            case "dots":
                return 2 * self.dim + model_dim
        return 4 * self.dim + 3 * model_dim
