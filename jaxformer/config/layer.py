"""`Layer`: options of a layer before the pattern; `LayerConfig`: options of any layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from jaxformer.checks import check_fields, require
from jaxformer.config.attention.hybrid import AttentionKind
from jaxformer.config.feed_forward import FeedForward
from jaxformer.config.positions import (
    Positions,
    Rope,
    ScoreBias,
    TransformerXL,
    Window,
    as_rope,
    as_transformer_xl,
)

NormPlacement = Literal["pre", "post", "sandwich", "res_post"]


class LayerConfig(NamedTuple):
    """Options of one layer: attention kind, positions, window, feed-forward, place of the norms."""

    attention: AttentionKind
    positions: Positions | None
    window: Window
    feed_forward: FeedForward
    norm_placement: NormPlacement

    @property
    def rope(self) -> Rope | None:
        """The positions, if they are RoPE."""
        return as_rope(self.positions)

    @property
    def score_bias(self) -> ScoreBias | None:
        """The positions, if they are a score bias."""
        return self.positions if isinstance(self.positions, ScoreBias) else None

    @property
    def per_layer_score_bias(self) -> ScoreBias | None:
        """The score bias, if it has parameters and each layer its own."""
        option = self.score_bias
        if option is None or option.shared_across_layers:
            return None
        return option if option.parameters(self.attention.num_heads) else None

    @property
    def transformer_xl(self) -> TransformerXL | None:
        """The positions, if they are those of Transformer-XL."""
        return as_transformer_xl(self.positions)

    def to_layer(self) -> Layer:
        """Return the option for `TransformerConfig.first_layers`."""
        attention = self.attention.at_layer(self.positions, self.window)
        return Layer(attention=attention, feed_forward=self.feed_forward)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Options of one layer before the pattern, for `TransformerConfig.first_layers`.

    Attributes:
        attention: Attention kind, with one position option and one window.
        feed_forward: Feed-forward network.
        norm_placement: As in `TransformerConfig`; None is that of the model.
    """

    attention: AttentionKind
    feed_forward: FeedForward
    norm_placement: NormPlacement | None = None

    def __post_init__(self):
        check_fields(self)
        positions, windows = self.attention.positions, self.attention.windows
        require(
            len(positions) == len(windows) == 1,
            "The attention of a Layer needs one position option and one window; got "
            f"{len(positions)} and {len(windows)}.",
        )

    def to_config(self, norm_placement: NormPlacement) -> LayerConfig:
        """Return the options one by one, in a model with this placement of the norms."""
        attention, placement = self.attention, self.norm_placement or norm_placement
        positions, window = attention.positions[0], attention.windows[0]
        return LayerConfig(attention, positions, window, self.feed_forward, placement)

    def tiny(self) -> Layer:
        """Return the layer at test size."""
        attention, feed_forward = self.attention.tiny(), self.feed_forward.tiny()
        return replace(self, attention=attention, feed_forward=feed_forward)
