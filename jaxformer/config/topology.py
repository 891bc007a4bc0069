"""Topologies: a decoder, an encoder, or an encoder and a decoder with cross-attention."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxformer.checks import check_fields, require_nonempty, require_positive
from jaxformer.config.feed_forward import FeedForward
from jaxformer.config.layer import Attention


class SingleStack:
    """Base of the topologies with one stack, whose layers `TransformerConfig.num_layers` counts."""

    is_encoder_decoder = False
    num_encoder_layers = 0
    source_vocab_size = None


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
        num_encoder_layers: Layers of the encoder; `TransformerConfig.num_layers` counts the
            decoder's layers.
        source_vocab_size: Size of a separate source embedding; None shares the target's embedding.
        attention: Attention of the encoder, or kinds cycled over its layers; None uses the
            decoder's.
        feed_forward: Feed-forward networks of the encoder, cycled over its layers; None uses the
            decoder's.
    """

    num_encoder_layers: int = field(compare=False)
    source_vocab_size: int | None = None
    attention: Attention | None = field(default=None, compare=False)
    feed_forward: tuple[FeedForward, ...] | None = field(default=None, compare=False)

    def __post_init__(self):
        check_fields(self)
        require_positive(self, "num_encoder_layers", "source_vocab_size")
        for name in ("attention", "feed_forward"):
            if isinstance(getattr(self, name), tuple):
                require_nonempty(self, name)

    has_decoder = True
    is_encoder_decoder = True


Topology = Decoder | Encoder | EncoderDecoder
