"""Both ends of a model: the token embedding and the LM head."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxformer.checks import Checked, Positive, Size
from jaxformer.config.feed_forward import Activation
from jaxformer.config.norms import LayerNorm, Norm
from jaxformer.config.positions import Learned, Sinusoid
from jaxformer.config.tiny import rescale_with_width, shrink


@dataclass(frozen=True, kw_only=True)
class Embedding(Checked):
    """Token embedding: scale, positions, norm, and an optional low-rank width.

    Attributes:
        scale: Multiplies the token vectors; sqrt(model_dim) in the original transformer.
        positions: Positions added to the token vectors.
        norm: Norm of the sum.
        dim: Width of the token vectors before a projection to model_dim; None has no projection.
    """

    scale: float = 1.0
    positions: Learned | Sinusoid | None = None
    norm: Norm | None = None
    dim: Size | None = None

    def resized(self, old_width: int, new_width: int) -> Embedding:
        """Return the embedding at test size, for another model width."""
        scale = rescale_with_width(self.scale, old_width, new_width)
        return shrink(self, scale=scale, dim=self.dim and new_width // 2)


@dataclass(frozen=True, kw_only=True)
class HeadTransform(Checked):
    """A hidden layer of the LM head: norm(activation(x @ kernel + bias)).

    Attributes:
        activation: Activation, a name as in `MLP`.
        bias: Whether a bias is added.
        norm: Norm of the activations.

    References:
        Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers for Language
        Understanding, 2018. arXiv:1810.04805 (its released code)
        Warner et al., Smarter, Better, Faster, Longer: A Modern Bidirectional Encoder, 2024.
        arXiv:2412.13663
    """

    activation: Activation = "gelu"
    bias: bool = False
    norm: Norm = LayerNorm()


@dataclass(frozen=True, kw_only=True)
class LMHead(Checked):
    """LM head: logits from the final hidden vectors.

        logits = softcap(multiplier * (transform(x) @ kernel + bias))

    Attributes:
        transform: Hidden layer, as wide as what the kernel reads; None has none.
        tied: Whether the kernel is the token embedding.
        bias: Whether a bias is added.
        multiplier: Multiplies the logits.
        softcap: Cap c of the logits: y becomes c * tanh(y / c).
        masked_ids: Token ids with probability 0.
        unit_rows: Whether the kernel's vector of each token is divided by its length (Baichuan 2).
    """

    transform: HeadTransform | None = None
    tied: bool = False
    bias: bool = False
    multiplier: float = 1.0
    softcap: Positive | None = None
    masked_ids: tuple[int, ...] = ()
    unit_rows: bool = False

    def resized(self, old_width: int, new_width: int, vocab_size: int) -> LMHead:
        """Return the head at test size, for another model width and vocabulary."""
        return replace(
            self,
            multiplier=rescale_with_width(self.multiplier, old_width, new_width),
            masked_ids=(vocab_size - 1,) if self.masked_ids else (),
        )
