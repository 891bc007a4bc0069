"""`TransformerConfig`: all options of a model, with checks that reject impossible combinations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jaxformer.checks import check_fields, require, require_nonempty, require_positive
from jaxformer.config.adapter import LoRA
from jaxformer.config.attention.decay import Decay
from jaxformer.config.attention.grouped_heads import GroupedHeads
from jaxformer.config.attention.hybrid import Attention, AttentionKind, Hybrid
from jaxformer.config.attention.hybrid_heads import HybridHeads
from jaxformer.config.attention.latent import Latent
from jaxformer.config.attention.multi_head import MultiHead
from jaxformer.config.embedding import Embedding, LMHead
from jaxformer.config.feed_forward import FeedForward, tiny_feed_forwards
from jaxformer.config.initialisation import Initialisation
from jaxformer.config.layer import Layer, LayerConfig, NormPlacement
from jaxformer.config.layer_embedding import LayerEmbedding
from jaxformer.config.model_checks import check_model
from jaxformer.config.norms import Norm, RMSNorm
from jaxformer.config.positions import Positions, Rope
from jaxformer.config.residual import Residual
from jaxformer.config.rope_scaling import RopeScaling
from jaxformer.config.tiny import (
    TINY_HEAD_DIM,
    TINY_VOCAB_SIZE,
    shorten_pattern,
    shorten_patterns,
    tiny_embedding,
    tiny_head,
)
from jaxformer.config.topology import Decoder, Encoder, EncoderDecoder, Topology


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """Dropout rates by place.

    Attributes:
        embedding: Rate for the input of the first layer.
        attention: Rate for attention weights.
        feed_forward: Rate for the hidden features of the feed-forward network.
        residual: Rate for the output of each branch, before a norm that follows it.
    """

    embedding: float = 0.0
    attention: float = 0.0
    feed_forward: float = 0.0
    residual: float = 0.0

    def __post_init__(self):
        check_fields(self)
        for name, rate in vars(self).items():
            require(0 <= rate < 1, f"dropout.{name} must be in [0, 1); got {rate}.")


Stack = Literal["decoder", "encoder"]


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Configuration of a whole model.

    Attributes:
        vocab_size: Number of token ids.
        model_dim: Width of the residual stream.
        num_layers: Layers of the stack, or of the decoder if there is an encoder too.
        attention: Attention kind, with heads, positions and windows.
        feed_forward: Feed-forward networks, cycled over the layers.
        first_layers: Layers before the cycles of `attention` and `feed_forward`, which begin after
            them: DeepSeek's dense layers before those with experts. `num_layers` counts them. They
            belong to the decoder, if there is one.
        topology: Decoder, encoder, or both.
        block: Whether attention and feed-forward run serially or in parallel, and in parallel
            whether they share one norm.
        norm: The kind of norm.
        norm_placement: Position of the norms: before a branch, after the residual sum, before and
            after a branch, or after a branch; a tuple is cycled over the layers.
        final_norm: Whether a norm follows the last layer of each stack.
        residual: How a branch's output joins the residual stream; None is their sum.
        residual_multiplier: Multiplies the output of each branch, after its norm: the stream
            becomes x + residual_multiplier * branch(x) (Granite).
        layer_scalar: Whether a learned scalar multiplies the stream at the end of each layer
            (Gemma 4).
        embedding: Token embedding.
        layer_embedding: Embeddings of each token for each layer; None has none.
        head: LM head.
        dropout: Dropout rates in training.
        initialisation: Initialisers of the parameters.
        adapter: Low-rank adapters of some linear maps; training then changes only these.
        model_type: Hugging Face model type to export, if several fit. Comparisons of configurations
            ignore it.
        max_position_embeddings: Context length in the config.json of a loaded model, for exports of
            this model type; RoPE itself has no limit. Comparisons ignore it.

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
    first_layers: tuple[Layer, ...] = ()
    topology: Topology = Decoder()
    block: Literal["serial", "parallel", "parallel_shared_norm"] = "serial"
    norm: Norm = RMSNorm()
    norm_placement: NormPlacement | tuple[NormPlacement, ...] = "pre"
    final_norm: bool = True
    residual: Residual | None = None
    residual_multiplier: float = 1.0
    layer_scalar: bool = False
    embedding: Embedding = Embedding()
    layer_embedding: LayerEmbedding | None = None
    head: LMHead = LMHead()
    dropout: Dropout = Dropout()
    initialisation: Initialisation = Initialisation()
    adapter: LoRA | None = None
    model_type: str | None = field(default=None, compare=False, repr=False)
    max_position_embeddings: int | None = field(default=None, compare=False, repr=False)

    def __post_init__(self):
        check_fields(self)
        require_positive(self, "vocab_size", "model_dim", "num_layers")
        require_nonempty(self, "feed_forward", "norm_placement")
        check_model(self)

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """The attention kinds, cycled over the layers."""
        return self.attention.kinds if isinstance(self.attention, Hybrid) else (self.attention,)

    @property
    def norm_placements(self) -> tuple[NormPlacement, ...]:
        """Positions of the norms, cycled over the layers."""
        placement = self.norm_placement
        return placement if isinstance(placement, tuple) else (placement,)

    @property
    def pattern_length(self) -> int:
        """Length of the layer pattern: per-layer options repeat after this many layers."""
        a = self.attention
        patterns = a.positions, a.windows, self.feed_forward, self.norm_placements
        return math.lcm(*map(len, patterns))

    def count_repeats(self, num_layers: int) -> tuple[int, int]:
        """Whole repetitions of the pattern in a stack after its first layers, and layers left."""
        return divmod(num_layers - len(self.first_layers), self.pattern_length)

    def layer(self, index: int) -> LayerConfig:
        """The options of layer `index`, counted from 0."""
        a, kinds, i = self.attention, self.attention_kinds, index - len(self.first_layers)
        placements = self.norm_placements
        if i < 0:
            return self.first_layers[index].to_config(placements[0])
        return LayerConfig(
            kinds[i % len(kinds)],
            a.positions[i % len(a.positions)],
            a.windows[i % len(a.windows)],
            self.feed_forward[i % len(self.feed_forward)],
            placements[i % len(placements)],
        )

    @property
    def distinct_layers(self) -> tuple[LayerConfig, ...]:
        """The different layers of the stack, in order of their first appearance."""
        count = min(self.num_layers, len(self.first_layers) + self.pattern_length)
        return tuple(dict.fromkeys(map(self.layer, range(count))))

    def is_kv_source(self, layer: LayerConfig) -> bool:
        """Whether layers with `cross_layer_kv` may read keys and values of this layer."""
        readers = (x.window for x in self.distinct_layers if x.attention.cross_layer_kv)
        is_source = isinstance(layer.attention, MultiHead) and not layer.attention.cross_layer_kv
        return is_source and layer.window in readers

    @property
    def encoder_config(self) -> TransformerConfig:
        """The configuration of the encoder stack."""
        match self.topology:
            case Decoder() | Encoder():
                return self
            case EncoderDecoder(attention=None, feed_forward=None) if not self.first_layers:
                return self
            case EncoderDecoder(attention=attention, feed_forward=feed_forward):
                return replace(
                    self,
                    attention=attention or self.attention,
                    feed_forward=feed_forward or self.feed_forward,
                    first_layers=(),
                    topology=Encoder(),
                )

    @property
    def stacks(self) -> dict[Stack, tuple[TransformerConfig, int]]:
        """Configuration and number of layers of each stack by name, the encoder first."""
        topology = self.topology
        if topology.is_encoder_decoder:
            return {
                "encoder": (self.encoder_config, topology.num_encoder_layers),
                "decoder": (self, self.num_layers),
            }
        return {"decoder" if topology.has_decoder else "encoder": (self, self.num_layers)}

    @property
    def multi_head(self) -> MultiHead:
        """The `MultiHead` attention option; ValueError for any other kind."""
        match self.attention:
            case MultiHead() as attention:
                return attention
        kind = type(self.attention).__name__
        raise ValueError(f"This needs MultiHead attention; the model has {kind}.")

    @property
    def residual_init_divisor(self) -> float:
        """Divisor of the initial values of projections into the residual stream."""
        scales_with_depth = self.initialisation.residual == "depth"
        return math.sqrt(2 * self.num_layers) if scales_with_depth else 1.0

    @property
    def max_length(self) -> int | None:
        """Longest sequence the learned positions allow; None if there is no limit."""
        positions = self.embedding.positions
        return None if positions is None else positions.max_length

    def with_positions(self, *positions: Positions | None) -> TransformerConfig:
        """Return a copy with other attention positions, cycled; `first_layers` keep theirs.

        Raises:
            ValueError: The attention has no position option, or does not support these.
        """
        if len(self.first_layers) == self.num_layers:
            raise ValueError(
                f"All {self.num_layers} layers are first_layers, which keep their positions; set "
                "those of each Layer."
            )
        attention = self.attention
        if isinstance(attention, GroupedHeads | Latent):
            return replace(self, attention=replace(attention, positions=positions))
        if isinstance(attention, Decay):
            raise ValueError(f"Decay has no positions, only Decay.angles; got {positions}.")
        name = type(attention).__name__
        raise ValueError(f"{name} has no positions to replace; got {positions}.")

    def unroll(self) -> TransformerConfig:
        """Return a copy whose layers are all `first_layers`, with parameters of their own.

        Returns:
            The same model; see `generation.unroll` for its parameters.

        Raises:
            ValueError: The model is an encoder.
        """
        if not self.topology.has_decoder:
            raise ValueError(f"unroll needs a Decoder or an EncoderDecoder; got {self.topology}.")
        layers = list[Layer]()
        for layer in map(self.layer, range(self.num_layers)):
            same = layer.norm_placement == self.norm_placement
            placement = None if same else layer.norm_placement
            layers.append(replace(layer.to_layer(), norm_placement=placement))
        return replace(self, first_layers=tuple(layers))

    def with_rope_scaling(self, scaling: RopeScaling | None) -> TransformerConfig:
        """Return a copy with this RoPE scaling, for contexts longer than in training.

        Args:
            scaling: The RoPE scaling; None removes it.

        Returns:
            The configuration; it has the same parameters.

        Raises:
            ValueError: No layer has RoPE.

        Example:
            >>> from jaxformer import zoo
            >>> from jaxformer.config import LinearScaling
            >>> config = zoo.get("llama-2-7b").with_rope_scaling(LinearScaling(factor=4.0))
            >>> config.attention.positions[0].scaling
            LinearScaling(factor=4.0)
        """

        def scale(attention: Any) -> Any:
            if isinstance(attention, Hybrid | HybridHeads):
                return replace(attention, kinds=tuple(map(scale, attention.kinds)))
            kinds = attention.positions
            if not any(isinstance(kind, Rope) for kind in kinds):
                return attention
            scaled = (replace(k, scaling=scaling) if isinstance(k, Rope) else k for k in kinds)
            return replace(attention, positions=tuple(scaled))

        layers = [layer for stack, _ in self.stacks.values() for layer in stack.distinct_layers]
        if all(layer.rope is None for layer in layers):
            kinds = self.attention.positions
            raise ValueError(f"with_rope_scaling needs a layer with Rope; got positions {kinds}.")
        first_layers = tuple(replace(x, attention=scale(x.attention)) for x in self.first_layers)
        topology = self.topology
        if isinstance(topology, EncoderDecoder) and topology.attention is not None:
            topology = replace(topology, attention=scale(topology.attention))
        return replace(
            self, attention=scale(self.attention), first_layers=first_layers, topology=topology
        )

    def tiny(self) -> TransformerConfig:
        """Return the configuration with small sizes and the same kind of every option.

        These properties are preserved: whether num_heads is a power of two, how heads are grouped,
        whether model_dim equals the width of all heads, one full layer pattern and whether the
        depth is a multiple of it, and scales that are a power of a width.
        """
        kinds, feed_forward, placements = shorten_patterns(
            self.attention_kinds, self.feed_forward, self.norm_placements
        )
        attention = self.attention
        if isinstance(attention, Hybrid):
            attention = replace(attention, kinds=kinds)
        attention = attention.tiny()
        first_layers = tuple(layer.tiny() for layer in shorten_pattern(self.first_layers))
        tiny_kinds = attention, *(layer.attention for layer in first_layers)
        width = max(kind.heads_width for kind in tiny_kinds) or 4 * TINY_HEAD_DIM
        heads_fill_width = self.attention.heads_width == self.model_dim
        model_dim = width if heads_fill_width else width - TINY_HEAD_DIM
        feed_forward = tiny_feed_forwards(feed_forward)
        patterns = attention.positions, attention.windows, feed_forward, placements
        period = math.lcm(*map(len, patterns))
        _, remainder = self.count_repeats(self.num_layers)
        vocab_size = min(self.vocab_size, TINY_VOCAB_SIZE)
        return replace(
            self,
            vocab_size=vocab_size,
            model_dim=model_dim,
            num_layers=len(first_layers) + max(2, period) + (1 if remainder else 0),
            attention=attention,
            feed_forward=feed_forward,
            first_layers=first_layers,
            topology=self.topology.tiny(),
            norm_placement=placements if isinstance(self.norm_placement, tuple) else placements[0],
            embedding=tiny_embedding(self.embedding, self.model_dim, model_dim),
            layer_embedding=self.layer_embedding and self.layer_embedding.tiny(),
            head=tiny_head(self.head, self.model_dim, model_dim, vocab_size),
        )
