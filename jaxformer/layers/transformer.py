"""The model: embedding, stacks, head. Decoder, encoder and encoder-decoder are one module."""

import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.layers.embedding import Embedder, Head
from jaxformer.layers.guide import Guide, Places, source_mask
from jaxformer.layers.mode import Mode, Remat
from jaxformer.layers.stack import Stack


class Transformer(nn.Module):
    """Any model that a `TransformerConfig` describes.

        logits = Transformer(config).apply({"params": params}, tokens)

    Attributes:
        config: What the model is.
        dtype: Of the computation; parameters stay float32.
        remat: What the backward pass recomputes: "none", "dots" or "full" (see `Mode`).
        scan: Whether layers run as one compiled loop or unrolled; same parameters, same results.
    """

    config: c.TransformerConfig
    dtype: DTypeLike = jnp.float32
    remat: Remat = "none"
    scan: bool = True

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "*batch T"],
        *,
        source: Int[Array, "*batch S"] | None = None,
        positions: Int[Array, "*any T"] | None = None,
        segments: Int[Array, "*batch T"] | None = None,
        source_positions: Int[Array, "*any S"] | None = None,
        source_segments: Int[Array, "*batch S"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "*batch T V"]:
        """Logits of the next token (decoders) or of each token (encoders).

        Args:
            tokens: Token ids; for an encoder-decoder, the decoder's input.
            source: Token ids that an encoder-decoder reads; nothing else takes them.
            positions: Position of each token; by default 0, 1, 2, ...
            segments: Document of each token in a packed row; tokens see their own document only.
            source_positions: As `positions`, for the source.
            source_segments: As `segments`, for the source; 0 marks padding. A target token sees
                the source tokens of its own segment, or all that are not padding.
            deterministic: False switches dropout on (give rngs={"dropout": key} to apply).

        Returns:
            Logits as float32; the product that gives them has the precision of `dtype`.

        Raises:
            ValueError: A token id outside the vocabulary or a position outside a learned table
                (where values can be seen, that is outside jit), a source given or missing.
        """
        mode = Mode(dtype=self.dtype, deterministic=deterministic, remat=self.remat, scan=self.scan)
        cfg = self.config
        self.check_source(source)
        embedder = Embedder(cfg, cfg.vocab_size, mode, name="embedding")
        places = self.places(tokens, positions, segments)
        memory, memory_guide = None, Guide()
        if isinstance(cfg.topology, c.EncoderDecoder) and source is not None:
            own = cfg.topology.source_vocab_size
            reader = embedder if own is None else Embedder(cfg, own, mode, name="source_embedding")
            at = self.places(source, source_positions, source_segments)
            memory = Stack(
                cfg, cfg.topology.num_encoder_layers, causal=False, mode=mode, name="encoder"
            )(self.embed(reader, source, at), at)
            memory_guide = Guide(source_mask(places, source_segments))
        causal = not isinstance(cfg.topology, c.Encoder)
        stack = Stack(
            cfg, cfg.num_layers, causal=causal, mode=mode, name="decoder" if causal else "encoder"
        )
        x = stack(self.embed(embedder, tokens, places), places, memory, memory_guide)
        return Head(cfg, mode, name="head")(x, embedder.tokens())

    def check_source(self, source: Int[Array, "*batch S"] | None) -> None:
        """Refuse a source that no encoder reads, or its absence where one does."""
        reads = isinstance(self.config.topology, c.EncoderDecoder)
        kind = type(self.config.topology).__name__
        if reads and source is None:
            raise ValueError("An EncoderDecoder reads a source: pass source=token_ids.")
        if not reads and source is not None:
            raise ValueError(f"A model of topology {kind} has no encoder for a source.")

    def places(
        self,
        tokens: Int[Array, "*batch T"],
        positions: Int[Array, "*any T"] | None,
        segments: Int[Array, "*batch T"] | None,
    ) -> Places:
        """Where the tokens stand, by default at 0, 1, 2, ..."""
        if positions is None:
            positions = jnp.arange(tokens.shape[-1])
        if segments is not None:
            positions = jnp.broadcast_to(positions, segments.shape)
        if self.config.max_length is not None:
            F.check_positions(positions, self.config.max_length)
        return Places(positions, segments)

    def embed(
        self, embedder: Embedder, tokens: Int[Array, "*batch T"], places: Places
    ) -> Float[Array, "*batch T D"]:
        """Vectors of token ids that were checked where their values can be seen."""
        F.check_token_ids(tokens, embedder.vocab_size)
        return embedder(tokens, places.positions)
