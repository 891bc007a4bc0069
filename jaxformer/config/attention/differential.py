"""`Differential`: attention that subtracts one softmax from another."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from jaxformer.checks import Cycle, Distinct, Must, Size
from jaxformer.config.attention.checks import check_heads, check_ropes
from jaxformer.config.attention.grouped_heads import GroupedHeads
from jaxformer.config.attention.layer_sizes import ActivationWidths
from jaxformer.config.norms import Norm, RMSNorm
from jaxformer.config.positions import QKRope, Rope, ScoreBias, Window


@dataclass(frozen=True, kw_only=True)
class Differential(GroupedHeads):
    """Differential attention: of each pair of heads, one minus a learned multiple of the other.

        o = (1 - initial) norm((softmax(q_1 k_1) - factor softmax(q_2 k_2)) [v_1, v_2])
        factor = exp(a_1 b_1) - exp(a_2 b_2) + initial,  initial = 0.8 - 0.6 exp(-0.3 layer)

    with learned vectors a and b, the same for all heads of a layer.

    Attributes:
        num_heads: Query heads; half as many pairs.
        num_kv_heads: Key and value heads, of which two neighbours are a pair; each serves
            num_heads / num_kv_heads query heads.
        head_dim: Width of a head. A pair gives twice as many features.
        positions: Position options, cycled over the layers.
        windows: As in `MultiHead`.
        scale: Multiplies the scores; None is head_dim ** -0.5.
        norm: Norm of each pair's difference.
        biases: Projections with a bias.

    References:
        Ye et al., Differential Transformer, 2024. arXiv:2410.05258, section 2.1
    """

    num_heads: Size
    num_kv_heads: Annotated[Size, Must("be even, for pairs", lambda heads: heads % 2 == 0)]
    head_dim: Size
    positions: Cycle[QKRope | ScoreBias | None] = (Rope(),)
    windows: Cycle[Window] = (None,)
    scale: float | None = None
    norm: Norm = RMSNorm(eps=1e-5, parameters="none")
    biases: Distinct[Literal["query", "key", "value", "out"]] = ()

    def __post_init__(self):
        super().__post_init__()
        check_heads(self)
        check_ropes(self)

    depends_on_depth = True
    linear_projections = None  # type: ignore[assignment]  # the values of a pair are joined
    logit_softcap = None
    qk_norm = None
    value_norm = None

    def indivisible_heads(self, tensor: int) -> str | None:
        """Why the pairs cannot be sharded over `tensor`, if they cannot."""
        pairs = self.num_kv_heads // 2
        return (
            None
            if pairs % tensor == 0
            else f"num_kv_heads {self.num_kv_heads} are {pairs} pairs, no multiple of tensor "
            f"{tensor}"
        )

    def attention_flops(
        self, model_dim: int, query_length: int, key_length: int, num_visible_keys: int
    ) -> int:
        """FLOPs of one layer, including its projections; values are twice as wide as keys."""
        lengths = query_length, key_length, num_visible_keys
        wider_values = 2 * query_length * num_visible_keys * self.heads_width
        return super().attention_flops(model_dim, *lengths) + wider_values

    def activation_widths(self, model_dim: int, tensor: int) -> ActivationWidths:
        """Numbers per token that a layer computes, heads sharded over `tensor`."""
        heads, kv = self.heads_width / tensor, self.num_kv_heads * self.head_dim / tensor
        widths = super().activation_widths(model_dim, tensor)
        return widths._replace(
            intermediates=widths.intermediates + heads + 2 * kv,
            head_outputs=2 * heads,
            ring_payload=3 * kv,
        )

    def tiny(self) -> "Differential":
        """Return the option at test size, with as many groups of heads."""
        # Two pairs of key heads can be sharded over two devices.
        tiny = super().tiny()
        return replace(tiny, num_heads=8, num_kv_heads=4 if tiny.num_kv_heads == 2 else 8)
