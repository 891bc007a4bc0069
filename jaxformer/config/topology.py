"""Topologies: a decoder, an encoder, or an encoder and a decoder with cross-attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from jaxformer.checks import check_fields, require_nonempty, require_positive
from jaxformer.config.attention.hybrid import Attention
from jaxformer.config.feed_forward import FeedForward, tiny_feed_forwards
from jaxformer.config.tiny import TINY_VOCAB_SIZE

Single = TypeVar("Single", bound="SingleStack")


class SingleStack:
    """Base of the topologies with one stack, whose layers `TransformerConfig.num_layers` counts."""

    is_encoder_decoder = False
    num_encoder_layers = 0
    source_vocab_size = None

    def tiny(self: Single) -> Single:
        """Return the topology at test size: the same."""
        return self


@dataclass(frozen=True, kw_only=True)
class Decoder(SingleStack):
    """A decoder: one stack with causal attention."""

    has_decoder = True


@dataclass(frozen=True, kw_only=True)
class Encoder(SingleStack):
    """An encoder: one stack with bidirectional attention."""

    has_decoder = False


@dataclass(frozen=True, kw_only=True)
class EncoderDecoder:
    """An encoder for the source, and a causal decoder with cross-attention to its output.

    Attributes:
        num_encoder_layers: Layers of the encoder; `TransformerConfig.num_layers` counts those of
            the decoder.
        source_vocab_size: Size of a separate source embedding; None shares the target's embedding.
        attention: Attention of the encoder; None uses the decoder's.
        feed_forward: Feed-forward networks of the encoder, cycled over its layers; None uses the
            decoder's.
    """

    num_encoder_layers: int
    source_vocab_size: int | None = None
    attention: Attention | None = None
    feed_forward: tuple[FeedForward, ...] | None = None

    def __post_init__(self):
        check_fields(self)
        require_positive(self, "num_encoder_layers", "source_vocab_size")
        if self.feed_forward is not None:
            require_nonempty(self, "feed_forward")

    has_decoder = True
    is_encoder_decoder = True

    def tiny(self) -> EncoderDecoder:
        """Return the topology at test size, with two encoder layers."""
        return replace(
            self,
            num_encoder_layers=2,
            source_vocab_size=self.source_vocab_size and TINY_VOCAB_SIZE + 3,
            attention=self.attention and self.attention.tiny(),
            feed_forward=self.feed_forward and tiny_feed_forwards(self.feed_forward),
        )


Topology = Decoder | Encoder | EncoderDecoder
