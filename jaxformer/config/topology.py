"""Stacks of a model: a decoder, an encoder, or an encoder and a decoder that reads its output."""

from __future__ import annotations

from dataclasses import dataclass

from jaxformer.checks import check_fields, require_nonempty, require_positive
from jaxformer.config.attention import Attention
from jaxformer.config.feed_forward import FeedForward


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A decoder: one stack with causal attention."""


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """An encoder: one stack with bidirectional attention."""


@dataclass(frozen=True, kw_only=True)
class EncoderDecoder:
    """An encoder for the source, and a causal decoder with cross-attention to its output.

    Attributes:
        num_encoder_layers: Layers of the encoder; the model's num_layers are the decoder's.
        source_vocab_size: Size of the source's own token table; None shares the target's.
        attention: Heads, positions and windows of the encoder; None takes the decoder's.
        feed_forward: The encoder's feed-forward branch, cycled over its layers; None takes the
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


Topology = Decoder | Encoder | EncoderDecoder
