"""`TransformerConfig`: all options of a model, with checks that reject impossible combinations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import cycle, islice
from typing import Annotated, Any, Literal

from jaxformer.checks import NOT_EMPTY, Checked, Cycle, Rate, Size
from jaxformer.config.adapter import LoRA
from jaxformer.config.attention.decay import Decay
from jaxformer.config.attention.grouped_heads import GroupedHeads
from jaxformer.config.attention.hybrid_heads import HybridHeads
from jaxformer.config.attention.latent import Latent
from jaxformer.config.embedding import Embedding, LMHead
from jaxformer.config.feed_forward import FeedForward
from jaxformer.config.initialisation import Initialisation
from jaxformer.config.layer import (
    Attention,
    Layer,
    LayerNormPlacement,
    cycle_layers,
    cycles_of,
    minimal_cycle,
)
from jaxformer.config.layer_embedding import LayerEmbedding
from jaxformer.config.loop import Loop
from jaxformer.config.model_checks import check_model
from jaxformer.config.ngram_embedding import NgramEmbedding
from jaxformer.config.norms import Norm, RMSNorm
from jaxformer.config.positions import Positions, Rope
from jaxformer.config.residual.protocol import Residual
from jaxformer.config.rope_scaling import RopeScaling
from jaxformer.config.segments import Segments, find_segments
from jaxformer.config.serialization import python_source
from jaxformer.config.tiny import TINY_HEAD_DIM, TINY_VOCAB_SIZE, shorten_pattern, shrink
from jaxformer.config.topology import Decoder, EncoderDecoder, Topology


@dataclass(frozen=True, kw_only=True)
class Dropout(Checked):
    """Dropout rates by place.

    Attributes:
        embedding: Rate for the input of the first layer.
        attention: Rate for attention weights.
        feed_forward: Rate for the hidden features of the feed-forward network.
        residual: Rate for the output of each branch, before a norm that follows it.
    """

    embedding: Rate = 0.0
    attention: Rate = 0.0
    feed_forward: Rate = 0.0
    residual: Rate = 0.0


Stack = Literal["decoder", "encoder"]


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class TransformerConfig(Checked):
    """Configuration of a whole model: its layers, and what is around them.

    `layers` has the options of every layer. `attention`, `feed_forward`, `norm_placement` and
    `ngram_embedding` are cycles over the layers, which say them; a cycle may be as long as the
    model. Configurations with the same layers are equal, however their cycles are written.

    Attributes:
        vocab_size: Number of token ids.
        model_dim: Width of the residual stream.
        num_layers: Layers of the stack, or of the decoder if there is an encoder too.
        attention: Attention kind, with heads, positions and windows; a tuple of kinds is cycled
            over the layers (Lieber et al., Jamba, 2024. arXiv:2403.19887, section 2).
        feed_forward: Feed-forward networks, cycled over the layers.
        topology: Decoder, encoder, or both.
        block: Whether attention and feed-forward run serially or in parallel, and in parallel
            whether they share one norm.
        norm: The kind of norm.
        norm_placement: Position of the norms: before a branch, before a branch other than attention
            (the first layer of ModernBERT), after the residual sum, before and after a branch, or
            after a branch; a tuple is cycled over the layers.
        post_norm: The kind of norm after a branch; None is `norm`.
        final_norm: Whether a norm follows the last layer of each stack.
        last_norm: The kind of this norm; None is `norm`.
        loop: Layers that run several times; None runs each once.
        residual: How a branch's output joins the residual stream; None is their sum.
        residual_multiplier: Multiplies the output of each branch, after its norm: the stream
            becomes x + residual_multiplier * branch(x) (Granite).
        layer_scalar: Whether a learned scalar multiplies the stream at the end of each layer
            (Gemma 4).
        embedding: Token embedding.
        layer_embedding: Embeddings of each token for each layer; None has none.
        multi_token_prediction: Whether a module with a layer as the last one predicts the token
            after the next (MTP), see `layers.MultiTokenPredictor`: a loss in training, and drafts
            (`generation.MTP`).
        ngram_embedding: Embeddings of hashed n-grams (Engram); a tuple is cycled over the layers,
            and None has none.
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
        >>> [layer.window for layer in config.layers]
        [128, None, 128, None]
        >>> config.norm
        RMSNorm(eps=1e-06, eps_position='inside', parameters='scale', scale_offset=0.0)
    """

    vocab_size: Size
    model_dim: Size
    num_layers: Size = field(compare=False)
    attention: Annotated[Attention, NOT_EMPTY] = field(compare=False)
    feed_forward: Cycle[FeedForward] = field(compare=False)
    topology: Topology = Decoder()
    block: Literal["serial", "parallel", "parallel_shared_norm"] = "serial"
    norm: Norm = RMSNorm()
    norm_placement: LayerNormPlacement | Cycle[LayerNormPlacement] = field(
        default="pre", compare=False
    )
    post_norm: Norm | None = None
    final_norm: bool = True
    last_norm: Norm | None = None
    loop: Loop | None = None
    residual: Residual | None = None
    residual_multiplier: float = 1.0
    layer_scalar: bool = False
    embedding: Embedding = Embedding()
    layer_embedding: LayerEmbedding | None = None
    multi_token_prediction: bool = False
    ngram_embedding: NgramEmbedding | None | Cycle[NgramEmbedding | None] = field(
        default=None, compare=False
    )
    head: LMHead = LMHead()
    dropout: Dropout = Dropout()
    initialisation: Initialisation = Initialisation()
    adapter: LoRA | None = None
    model_type: str | None = field(default=None, compare=False, repr=False)
    max_position_embeddings: int | None = field(default=None, compare=False, repr=False)

    def __post_init__(self):
        super().__post_init__()
        check_model(self)

    def __repr__(self) -> str:
        return python_source(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TransformerConfig):
            return NotImplemented
        return self._compared == other._compared

    def __hash__(self) -> int:
        return hash(self._compared)

    @cached_property
    def _compared(self) -> tuple[Any, ...]:
        """What equal models have in common: the layers, not how their cycles are written."""
        options = (getattr(self, f.name) for f in fields(self) if f.compare)
        return self.layers, self.encoder_layers, *options

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of the stack, or of the decoder if there is an encoder too, in order."""
        cycles = self.attention, self.feed_forward, self.norm_placement, self.ngram_embedding
        return cycle_layers(self.num_layers, *cycles)

    @cached_property
    def encoder_layers(self) -> tuple[Layer, ...]:
        """The layers of the encoder, if there is one."""
        topology = self.topology
        if not isinstance(topology, EncoderDecoder):
            return () if topology.has_decoder else self.layers
        attention = self.attention if topology.attention is None else topology.attention
        feed_forward = topology.feed_forward or self.feed_forward
        cycles = attention, feed_forward, self.norm_placement, self.ngram_embedding
        return cycle_layers(topology.num_encoder_layers, *cycles)

    @property
    def stacks(self) -> dict[Stack, tuple[Layer, ...]]:
        """The layers of each stack by name, the encoder first."""
        stacks: dict[Stack, tuple[Layer, ...]] = {"encoder": self.encoder_layers}
        if self.topology.has_decoder:
            stacks["decoder"] = self.layers
        return {name: layers for name, layers in stacks.items() if layers}

    @property
    def invocations(self) -> dict[Stack, tuple[Layer, ...]]:
        """The layers of each stack in the order in which they run; those of a loop recur."""
        loop, stacks = self.loop, self.stacks
        return stacks if loop is None else {k: loop.invocations(x) for k, x in stacks.items()}

    def segments(self, stack: Stack, *, by_invocation: bool = False) -> Segments:
        """The parts of a stack; one part repeats. A loop is this part.

        Args:
            stack: The stack.
            by_invocation: Whether the repetitions of a loop are counted in each pass, as in caches,
                or once, as in parameters.
        """
        layers = self.stacks[stack]
        if self.loop is None:
            return find_segments(layers)
        before, inside, after = self.loop.split(layers)
        period = len(minimal_cycle(inside))
        repeats, rest = divmod(len(inside), period)
        if rest:
            period, repeats = len(inside), 1
        passes = self.loop.passes if by_invocation else 1
        return Segments(len(before), period, repeats * passes, len(after))

    @property
    def multi_token_model(self) -> TransformerConfig:
        """The module of `multi_token_prediction` as a model of one layer, like the last."""
        changes: Any = cycles_of(self.layers[-1:]) | dict(residual=None, loop=None)
        changes |= dict(layer_embedding=None, ngram_embedding=None, multi_token_prediction=False)
        return replace(self, num_layers=1, **changes)

    @property
    def residual_init_divisor(self) -> float:
        """Divisor of the initial values of projections into the residual stream."""
        if self.initialisation.residual != "depth":
            return 1.0
        loop, layers = self.loop, self.layers
        return math.sqrt(2 * len(layers if loop is None else loop.invocations(layers)))

    @property
    def ngram_size(self) -> int:
        """Tokens of the longest hashed n-gram of a layer; 0 without any."""
        options = (layer.ngram_embedding for layer in self.layers)
        return max((option.size for option in options if option is not None), default=0)

    @property
    def stream_width(self) -> int:
        """Numbers of a token that the layers hand on: of all streams of the residual option."""
        width, option = self.model_dim, self.residual
        return width if option is None else option.state_width(width)

    @property
    def max_length(self) -> int | None:
        """Longest sequence the learned positions allow; None if there is no limit."""
        positions = self.embedding.positions
        return None if positions is None else positions.max_length

    def with_positions(self, *positions: Positions | None) -> TransformerConfig:
        """Return a copy with other attention positions, cycled over the layers.

        Raises:
            ValueError: The attention has no position option, or does not support these.
        """
        attention, cycle = self.attention, tuple[Any, ...](positions)
        if isinstance(attention, GroupedHeads | Latent):
            return replace(self, attention=replace(attention, positions=cycle))
        if isinstance(attention, Decay):
            raise ValueError(f"Decay has no positions, only Decay.angles; got {positions}.")
        name = "A cycle of kinds" if isinstance(attention, tuple) else type(attention).__name__
        raise ValueError(f"{name} has no positions to replace; got {positions}.")

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
            if isinstance(attention, tuple):
                return tuple(map(scale, attention))
            if isinstance(attention, HybridHeads):
                return replace(attention, kinds=scale(attention.kinds))
            kinds = attention.positions
            if not any(isinstance(kind, Rope) for kind in kinds):
                return attention
            scaled = (replace(k, scaling=scaling) if isinstance(k, Rope) else k for k in kinds)
            return replace(attention, positions=tuple(scaled))

        layers = [layer for stack in self.stacks.values() for layer in stack]
        if all(layer.rope is None for layer in layers):
            kinds = tuple(dict.fromkeys(layer.positions for layer in layers))
            raise ValueError(f"with_rope_scaling needs a layer with Rope; got positions {kinds}.")
        topology = self.topology
        if isinstance(topology, EncoderDecoder) and topology.attention is not None:
            topology = replace(topology, attention=scale(topology.attention))
        return replace(self, attention=scale(self.attention), topology=topology)

    def tiny(self) -> TransformerConfig:
        """Return the configuration with small sizes and the same kind of every option.

        These properties are preserved: whether num_heads is a power of two, how heads are grouped,
        whether model_dim equals the width of all heads, one full layer pattern and whether the
        depth is a multiple of it, and scales that are a power of a width.
        """
        loop = self.loop
        if loop is None:
            layers = self._shorten_layers()
        else:
            before, inside, after = map(shorten_pattern, loop.split(self.layers))
            layers = before + inside + after
            loop = replace(loop, start=len(before), stop=len(before + inside))
        layers = tuple(layer.tiny() for layer in layers)
        width = max(layer.attention.heads_width for layer in layers) or 4 * TINY_HEAD_DIM
        full_width = max(layer.attention.heads_width for layer in self.layers)
        model_dim = width if full_width == self.model_dim else width - TINY_HEAD_DIM
        widths = self.model_dim, model_dim
        vocab_size = min(self.vocab_size, TINY_VOCAB_SIZE)
        return replace(
            self,
            vocab_size=vocab_size,
            model_dim=model_dim,
            num_layers=len(layers),
            **cycles_of(layers),
            loop=loop,
            topology=self._tiny_topology(),
            embedding=self.embedding.resized(*widths),
            layer_embedding=self.layer_embedding and shrink(self.layer_embedding),
            residual=self.residual and self.residual.resized(len(layers)),
            head=self.head.resized(*widths, vocab_size),
        )

    def _shorten_layers(self) -> tuple[Layer, ...]:
        """The layers before the pattern, and two repetitions of it or one and a tail."""
        first, period, _, tail = find_segments(self.layers)
        if tail:
            first, period = 0, len(minimal_cycle(self.layers))
        has_tail = (self.num_layers - first) % period > 0
        pattern = minimal_cycle(shorten_pattern(self.layers[first : first + period]))
        pattern = tuple(islice(cycle(pattern), max(2, len(pattern)) + has_tail))
        return shorten_pattern(self.layers[:first]) + pattern

    def _tiny_topology(self) -> Topology:
        if not isinstance(self.topology, EncoderDecoder):
            return self.topology
        layers = tuple(layer.tiny() for layer in shorten_pattern(self.encoder_layers))
        cycles = cycles_of(layers)
        return EncoderDecoder(
            num_encoder_layers=2,
            source_vocab_size=self.topology.source_vocab_size and TINY_VOCAB_SIZE + 3,
            attention=self.topology.attention and cycles["attention"],
            feed_forward=self.topology.feed_forward and cycles["feed_forward"],
        )
