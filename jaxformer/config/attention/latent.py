"""`Latent`: multi-head latent attention (MLA), which caches one latent and one key per token."""

from dataclasses import dataclass
from typing import Literal

from jaxformer.checks import Cycle, Distinct, Size, require
from jaxformer.config.attention.checks import check_ropes
from jaxformer.config.attention.defaults import AttentionDefaults
from jaxformer.config.attention.layer_sizes import ActivationWidths, CacheShape, LatentCache
from jaxformer.config.attention.output_gate import OutputGate, num_gates
from jaxformer.config.attention.query_scaling import QueryPower, QueryScaling
from jaxformer.config.norms import Norm, RMSNorm
from jaxformer.config.positions import QKRope, Rope, ScoreBias, Window
from jaxformer.config.tiny import TINY_HEAD_DIM, rescale_with_width, shrink


@dataclass(frozen=True, kw_only=True)
class Latent(AttentionDefaults):
    """Multi-head latent attention (MLA): keys and values are projections of one latent per token.

        score[i, j] = scale * (plain query[i] @ W_K latent[j] + R[i] query[i] @ R[j] key[j])

    All heads share the rotated key. The cache holds only this key and the latent of each token.

    Attributes:
        num_heads: Query heads.
        latent_dim: Width of the latent that keys and values are projected from.
        query_latent_dim: Width of the latent that queries are projected from; None projects them
            from the residual stream.
        nope_dim: Width of a head's query and key without positions.
        rope_dim: Width of the shared key, and of a head's query for it.
        value_dim: Width of a head's value.
        positions: Position options, cycled over the layers. A `Rope` rotates the shared key and the
            queries for it.
        windows: As in `MultiHead` (dots3).
        scale: Multiplies the scores; None is (nope_dim + rope_dim) ** -0.5. With YaRN, DeepSeek
            multiplies this scale by the square of `yarn_attention_factor`.
        norm: Norm of the latents.
        query_scaling: Factor of whole queries by position, as in `MultiHead`.
        biases: Projections with a bias.
        output_gate: As in `MultiHead`; it reads the input of the layer, not a latent (Ling 3).

    References:
        DeepSeek-AI, DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language
        Model, 2024. arXiv:2405.04434, section 2.1
    """

    num_heads: Size
    latent_dim: Size
    query_latent_dim: Size | None = None
    nope_dim: Size
    rope_dim: Size
    value_dim: Size
    positions: Cycle[QKRope | ScoreBias | None] = (Rope(pairing="neighbours"),)
    windows: Cycle[Window] = (None,)
    scale: float | None = None
    norm: Norm = RMSNorm()
    query_scaling: QueryScaling | QueryPower | None = None
    biases: Distinct[Literal["query_latent", "latent", "rotary_key", "out"]] = ()
    output_gate: OutputGate | None = None

    def __post_init__(self):
        super().__post_init__()
        check_ropes(self)
        require(
            "query_latent" not in self.biases or self.query_latent_dim is not None,
            "A bias of the query_latent needs query_latent_dim; got None.",
        )

    @property
    def rope_head_dim(self) -> int:
        """Features per head that RoPE may rotate."""
        return self.rope_dim

    @property
    def key_dim(self) -> int:
        """Features of a key."""
        return self.nope_dim + self.rope_dim

    @property
    def heads_width(self) -> int:
        """Total width of all heads, the input of the output projection."""
        return self.num_heads * self.value_dim

    def attention_flops(
        self, model_dim: int, query_length: int, key_length: int, num_visible_keys: int
    ) -> int:
        """FLOPs of one layer, including its projections, with keys and values expanded."""
        n, d, query_latent = self.num_heads, model_dim, self.query_latent_dim
        query_width, value_width = n * self.key_dim, self.heads_width
        query_projection = (
            d * query_width if query_latent is None else (d + query_width) * query_latent
        )
        expansion = self.latent_dim * (n * self.nope_dim + value_width)
        key_value_projection = d * (self.latent_dim + self.rope_dim) + expansion
        gates = num_gates(self.output_gate, n, self.value_dim)
        products = query_length * (query_projection + (value_width + gates) * d)
        products += key_length * key_value_projection
        return 2 * (products + query_length * num_visible_keys * (query_width + value_width))

    def activation_widths(self, model_dim: int, tensor: int) -> ActivationWidths:
        """Numbers per token that a layer computes, heads sharded over `tensor`."""
        n, latents = self.num_heads / tensor, self.latent_dim + (self.query_latent_dim or 0)
        query_width, value_width = n * self.key_dim, n * self.value_dim
        key_value_width = n * self.nope_dim + value_width + latents + self.rope_dim
        gates = num_gates(self.output_gate, self.num_heads, self.value_dim) / tensor
        gated_heads = value_width if gates else 0
        return ActivationWidths(
            query_width + key_value_width + gates,
            2 * query_width + value_width + latents + gated_heads,
            value_width,
            query_width + value_width,
        )

    def empty_layer_cache(self, shape: CacheShape) -> LatentCache:
        """Return the empty cache of one layer."""
        return LatentCache(shape.zeros(1, self.latent_dim), shape.zeros(1, self.rope_dim))

    def tiny(self) -> "Latent":
        """Return the option at test size."""
        return shrink(self, scale=rescale_with_width(self.scale, self.key_dim, 2 * TINY_HEAD_DIM))
