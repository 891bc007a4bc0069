"""`TransformerConfig`: all options of a model, with checks that reject impossible combinations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from jaxformer.checks import check_fields, require, require_pattern, require_positive
from jaxformer.config.attention import RECURRENT, Attention, Hybrid, Kind, MultiHead
from jaxformer.config.decay import Decay
from jaxformer.config.feed_forward import WITH_HIDDEN, FeedForward
from jaxformer.config.initialisation import Initialisation
from jaxformer.config.mixer import Mixer
from jaxformer.config.norms import Norm, RMSNorm
from jaxformer.config.positions import (
    BlockSparse,
    Learned,
    Positions,
    Rope,
    Sinusoid,
    TransformerXL,
    Window,
)
from jaxformer.config.rope_scaling import RopeScaling


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
            require_pattern(self, "feed_forward")


Topology = Decoder | Encoder | EncoderDecoder


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """Token embedding: scale, positions, norm, and an optional low-rank width.

    Attributes:
        scale: Multiplies the rows of the table; sqrt(model_dim) in the first transformer.
        positions: What is added for the position.
        norm: Norm of the sum.
        dim: Width of the table's rows where a projection brings them to model_dim.
    """

    scale: float = 1.0
    positions: Learned | Sinusoid | None = None
    norm: Norm | None = None
    dim: int | None = None

    def __post_init__(self):
        check_fields(self)
        require_positive(self, "dim")


@dataclass(frozen=True, kw_only=True)
class Head:
    """LM head: logits from the final hidden vectors.

        logits = softcap(multiplier * (x @ kernel + bias))

    Attributes:
        tied: Whether the kernel is the token table.
        bias: Whether a bias is added.
        multiplier: Multiplies the logits.
        softcap: Logits y become c * tanh(y / c).
        masked_ids: Token ids that never receive probability.
    """

    tied: bool = False
    bias: bool = False
    multiplier: float = 1.0
    softcap: float | None = None
    masked_ids: tuple[int, ...] = ()

    def __post_init__(self):
        check_fields(self)
        require_positive(self, "softcap")


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """Dropout rates by place.

    Attributes:
        embedding: Of the first layer's input.
        attention: Of the attention weights.
        feed_forward: Of the feed-forward's hidden values.
        residual: Of what each branch gives, before a norm after it.
    """

    embedding: float = 0.0
    attention: float = 0.0
    feed_forward: float = 0.0
    residual: float = 0.0

    def __post_init__(self):
        check_fields(self)
        for name, rate in vars(self).items():
            require(0 <= rate < 1, f"dropout.{name} must be in [0, 1); got {rate}.")


class LayerChoice(NamedTuple):
    """Options of one layer: positions, window and feed-forward."""

    positions: Positions | None
    window: Window
    feed_forward: FeedForward


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Configuration of a whole model.

    Attributes:
        vocab_size: Number of token ids.
        model_dim: Width of the residual stream.
        num_layers: Layers of the stack (of the decoder, where there is also an encoder).
        attention: Heads, positions and windows.
        feed_forward: The feed-forward branch, cycled over the layers.
        topology: Decoder, encoder, or both.
        block: Whether branches run one after the other or side by side, and then under a norm each
            or a shared one.
        norm: The kind of norm.
        placement: Where norms stand: before a branch, after the sum, around a branch, or after a
            branch.
        final_norm: Whether a norm follows the last layer of each stack.
        embedding: From token ids to vectors.
        head: From vectors to logits.
        dropout: Rates in training.
        initialisation: Where parameters start.
        model_type: What Hugging Face calls it, where an export could take several names. It is no
            part of the model: configurations that differ in it alone are equal.

    Example:
        >>> from jaxformer.config import GLU, MultiHead, TransformerConfig
        >>> config = TransformerConfig(
        ...     vocab_size=256,
        ...     model_dim=64,
        ...     num_layers=4,
        ...     attention=MultiHead(num_heads=4, num_kv_heads=2, head_dim=16, windows=(128, None)),
        ...     feed_forward=(GLU(hidden_dim=176, activation="silu"),),
        ... )
        >>> [config.layer(i).window for i in range(config.num_layers)]
        [128, None, 128, None]
        >>> config.norm
        RMSNorm(eps=1e-06, eps_position='inside', parameters='scale', scale_offset=0.0)
    """

    vocab_size: int
    model_dim: int
    num_layers: int
    attention: Attention
    feed_forward: tuple[FeedForward, ...]
    topology: Topology = Decoder()
    block: Literal["serial", "parallel", "parallel_shared_norm"] = "serial"
    norm: Norm = RMSNorm()
    placement: Literal["pre", "post", "sandwich", "branch_out"] = "pre"
    final_norm: bool = True
    embedding: Embedding = Embedding()
    head: Head = Head()
    dropout: Dropout = Dropout()
    initialisation: Initialisation = Initialisation()
    model_type: str | None = field(default=None, compare=False, repr=False)

    def __post_init__(self):
        check_fields(self)
        require_positive(self, "vocab_size", "model_dim", "num_layers")
        require_pattern(self, "feed_forward")
        attentions = [*self.kinds, *self.encoder.kinds]
        has_block_sparse = any(
            isinstance(window, BlockSparse) for a in attentions for window in a.windows
        )
        require(
            not has_block_sparse or isinstance(self.topology, Decoder),
            f"BlockSparse is a pattern of the past, for a Decoder; got {self.topology}.",
        )
        position_options = [self.embedding.positions, *(p for a in attentions for p in a.positions)]
        for kind in position_options:
            require(
                not isinstance(kind, Sinusoid | TransformerXL) or self.model_dim % 2 == 0,
                f"{type(kind).__name__} pairs sines with cosines, so model_dim must be even; "
                f"got {self.model_dim}.",
            )
        is_tensor2tensor = (
            isinstance(position_options[0], Sinusoid)
            and position_options[0].layout == "tensor2tensor"
        )
        require(
            not is_tensor2tensor or self.model_dim >= 4,
            "Sinusoid's tensor2tensor layout spreads wavelengths over at least 2 pairs, so "
            f"model_dim must be at least 4; got {self.model_dim}.",
        )
        recurrent_kind = next(
            (type(a).__name__ for a in attentions if isinstance(a, RECURRENT)), None
        )
        require(
            recurrent_kind is None or isinstance(self.topology, Decoder),
            f"{recurrent_kind} reads from left to right, so it is for a Decoder; got "
            f"{self.topology}.",
        )
        require(
            recurrent_kind is None or self.dropout.attention == 0,
            f"{recurrent_kind} has no attention weights to drop, so dropout.attention must be 0; "
            "got "
            f"{self.dropout.attention}.",
        )
        for branch in (*self.feed_forward, *self.encoder.feed_forward):
            require(
                isinstance(branch, WITH_HIDDEN) or self.dropout.feed_forward == 0,
                f"{type(branch).__name__} has no hidden values to drop, so dropout.feed_forward "
                f"must be 0; got {self.dropout.feed_forward}.",
            )
        has_encoder = isinstance(self.topology, EncoderDecoder)
        require(
            not has_encoder or isinstance(self.attention, MultiHead),
            "The decoder of an EncoderDecoder attends to a source, which MultiHead alone can; got "
            f"{type(self.attention).__name__}. (The encoder's attention may be another.)",
        )
        out_of_range = [i for i in self.head.masked_ids if not 0 <= i < self.vocab_size]
        require(
            not out_of_range,
            f"head.masked_ids must be from 0 to {self.vocab_size - 1}, since vocab_size is "
            f"{self.vocab_size}; got {out_of_range}.",
        )
        require(
            len(set(self.head.masked_ids)) < self.vocab_size,
            f"head.masked_ids leaves no token to choose: it names all {self.vocab_size} ids.",
        )

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The attention kinds, cycled over the layers."""
        return self.attention.kinds if isinstance(self.attention, Hybrid) else (self.attention,)

    @property
    def kind(self) -> Kind:
        """The attention kind of all layers; ValueError for a `Hybrid`."""
        if isinstance(self.attention, Hybrid):
            names = ", ".join(dict.fromkeys(type(kind).__name__ for kind in self.kinds))
            raise ValueError(f"This needs layers of one kind; those of the model are {names}.")
        return self.attention

    def at(self, index: int) -> TransformerConfig:
        """The configuration of layer `index`: a `Hybrid` becomes that layer's attention kind."""
        if not isinstance(self.attention, Hybrid):
            return self
        return replace(self, attention=self.kinds[index % len(self.kinds)])

    @property
    def period(self) -> int:
        """Length of the layer pattern: after so many layers all per-layer options repeat."""
        a = self.attention
        return math.lcm(len(a.positions), len(a.windows), len(self.feed_forward))

    def layer(self, index: int) -> LayerChoice:
        """The options of layer `index`, counted from 0."""
        a = self.attention
        return LayerChoice(
            a.positions[index % len(a.positions)],
            a.windows[index % len(a.windows)],
            self.feed_forward[index % len(self.feed_forward)],
        )

    @property
    def encoder(self) -> TransformerConfig:
        """The configuration of the encoder stack."""
        match self.topology:
            case EncoderDecoder(attention=None, feed_forward=None) | Decoder() | Encoder():
                return self
            case EncoderDecoder(attention=attention, feed_forward=feed_forward):
                return replace(
                    self,
                    attention=attention or self.attention,
                    feed_forward=feed_forward or self.feed_forward,
                    topology=Encoder(),
                )

    @property
    def multi_head(self) -> MultiHead:
        """The `MultiHead` attention option; ValueError for any other kind."""
        match self.attention:
            case MultiHead() as attention:
                return attention
        kind = type(self.attention).__name__
        raise ValueError(f"This needs MultiHead attention; the model has {kind}.")

    @property
    def residual_divisor(self) -> float:
        """Divisor of the initial values of projections into the residual stream."""
        scales_with_depth = self.initialisation.residual == "depth"
        return math.sqrt(2 * self.num_layers) if scales_with_depth else 1.0

    @property
    def max_length(self) -> int | None:
        """Longest sequence the learned positions allow; None if there is no limit."""
        positions = self.embedding.positions
        return positions.max_length if isinstance(positions, Learned) else None

    def with_positions(self, *positions: Positions | None) -> TransformerConfig:
        """Return a copy with other attention positions, cycled over the layers.

        Raises:
            ValueError: The attention takes none, or not these.
        """
        match self.attention:
            case Decay():
                raise ValueError(f"Decay turns by its own angles; it takes no {positions}.")
            case Mixer() | Hybrid():
                raise ValueError(f"{type(self.attention).__name__} takes no {positions}.")
            case attention:
                return replace(self, attention=replace(attention, positions=positions))

    def with_rope_scaling(self, scaling: RopeScaling | None) -> TransformerConfig:
        """Return a copy with this RoPE scaling, for contexts longer than in training.

        Args:
            scaling: How; None takes the scaling away.

        Returns:
            The configuration; its parameters are those of the model as it was.

        Raises:
            ValueError: No layer has rotary positions.

        Example:
            >>> from jaxformer import zoo
            >>> from jaxformer.config import LinearScaling
            >>> config = zoo.get("llama-2-7b").with_rope_scaling(LinearScaling(factor=4.0))
            >>> config.attention.positions[0].scaling
            LinearScaling(factor=4.0)
        """
        kinds = self.attention.positions
        if not any(isinstance(kind, Rope) for kind in kinds):
            raise ValueError(f"No layer has rotary positions to stretch; they have {kinds}.")
        return self.with_positions(
            *(replace(k, scaling=scaling) if isinstance(k, Rope) else k for k in kinds)
        )

    def tiny(self) -> TransformerConfig:
        """Return the same design at test size: fewer layers and smaller widths."""
        from jaxformer.config.tiny import tiny

        return tiny(self)
