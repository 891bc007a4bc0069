"""Topologies: a decoder, an encoder, or an encoder and a decoder with cross-attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from jaxformer.checks import NOT_EMPTY, Checked, Cycle, Size
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
class EncoderDecoder(Checked):
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

    num_encoder_layers: Size = field(compare=False)
    source_vocab_size: Size | None = None
    attention: Annotated[Attention | None, NOT_EMPTY] = field(default=None, compare=False)
    feed_forward: Cycle[FeedForward] | None = field(default=None, compare=False)

    has_decoder = True
    is_encoder_decoder = True


Topology = Decoder | Encoder | EncoderDecoder
