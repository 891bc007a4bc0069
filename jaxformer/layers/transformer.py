"""`Transformer`: embedding, encoder and/or decoder stack, and LM head."""

from dataclasses import replace
from functools import cache as memoize
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.functional.argument_checks import typechecked
from jaxformer.layers.attention.inputs import (
    AttentionInputs,
    TokenPositions,
    cross_attention_inputs,
)
from jaxformer.layers.cache import Cache, check_capacity, check_empty, token_capacity
from jaxformer.layers.embedding import Embedder, LMHead
from jaxformer.layers.layer_embedding import LayerEmbedder
from jaxformer.layers.layouts import Layout, layout_of, split_layers
from jaxformer.layers.multi_token import MultiTokenPredictor
from jaxformer.layers.parameters import (
    FLOAT32,
    AnnotatedParameter,
    axis_size,
    local_shard,
    raise_misfits,
)
from jaxformer.layers.runtime import MeshAxes, Remat, RuntimeConfig, target_name
from jaxformer.layers.stack import Stack


class Transformer(nn.Module):
    """The model of a `TransformerConfig`.

        logits = Transformer(config).apply({"params": params}, tokens)

    Attributes:
        config: Configuration of the model.
        dtype: Dtype of the computation; parameters stay float32.
        remat: What the backward pass recomputes: "none", "dots" or "full" (see `RuntimeConfig`).
        scan: Whether layers run as one compiled loop or unrolled; same parameters, same results.
        mesh_axes: Mesh axes over which the model is sharded, inside `jax.shard_map`.
        annotate_axes: Whether `init` boxes parameters with the names of their axes.
        expert_capacity_factor: Capacity for tokens sent to experts on other devices; see
            `F.mixture_of_experts`.
        attention_implementation: Attention implementation; see `F.dot_product_attention`.
        max_segments: No row of packed documents has more; see `F.MaskRule`.
    """

    config: c.TransformerConfig
    dtype: DTypeLike = jnp.float32
    remat: Remat = "none"
    scan: bool = True
    mesh_axes: MeshAxes = MeshAxes()
    annotate_axes: bool = False
    expert_capacity_factor: float | None = None
    attention_implementation: F.Implementation = "auto"
    max_segments: int | None = None

    @nn.compact
    @typechecked
    def __call__(
        self,
        tokens: Integer[Array, "*batch T"],
        *,
        source: Integer[Array, "*batch S"] | None = None,
        positions: Integer[Array, "*any T"] | None = None,
        segments: Integer[Array, "*batch T"] | None = None,
        source_positions: Integer[Array, "*any S"] | None = None,
        source_segments: Integer[Array, "*batch S"] | None = None,
        cache: Cache | None = None,
        logits_at: Integer[Array, "*batch Q"] | None = None,
        targets: Integer[Array, "*batch Q"] | None = None,
        hidden: Float[Array, "*batch T D"] | None = None,
        contiguous_positions: bool | None = None,
        cache_is_empty: bool = False,
        deterministic: bool = True,
    ) -> Float[Array, "*batch Q V"] | tuple[Float[Array, "*batch Q V"], Cache] | F.LogitStatistics:
        """Logits of the next token (decoders) or of each token (encoders).

        Args:
            tokens: Token ids; for an encoder-decoder, the decoder's input.
            source: Source token ids of an encoder-decoder. With a cache, only the first call needs
                them.
            positions: Position of each token. By default they are 0, 1, 2, ..., with a cache the
                positions after the cached tokens, and under context parallelism `F.zigzag_order`.
            segments: Document number of each token in a packed row; tokens attend within their
                document. With a cache there is one document, and 0 marks padding, which is not
                cached.
            source_positions: As `positions`, for the source.
            source_segments: As `segments`, for the source; 0 marks padding. A target token attends
                to the source tokens of its segment, or to all that are not padding.
            cache: From `empty_cache` or an earlier call; any number of new tokens may be passed.
            logits_at: Indices of the Q tokens of each row whose logits are returned; None is all.
            targets: Target token ids. With them the result is `F.LogitStatistics`, from which
                losses follow without all logits in memory (see `F.linear_logit_statistics`). Not
                with a cache.
            hidden: Last hidden vectors of the model at the tokens before these. Then the logits are
                of its `multi_token_prediction`, and a cache is that of `config.multi_token_model`.
            contiguous_positions: Whether positions increase by one within each segment, which fused
                attention kernels need; by default, whether `positions` is None.
            cache_is_empty: Whether the cache is empty and padding follows the tokens of each row.
                Then the tokens attend only to each other, by a fused kernel if there is one.
            deterministic: False turns dropout on (pass rngs={"dropout": key} to apply).

        Returns:
            Logits in float32, from a matrix product in `dtype`; with a cache, (logits, new cache);
            with targets, `F.LogitStatistics`. Inside jit, logits are NaN in rows that exceed the
            cache's capacity.

        Raises:
            ValueError: The parameters do not match the model; a source is missing or not expected;
                positions or targets are passed with a cache; `hidden` to a model without
                `multi_token_prediction`; more tokens than the cache has slots,
                not counting padding. Outside jit also: a token id outside the vocabulary, a
                position outside a learned table, a full cache, or a nonempty cache with
                `cache_is_empty`.
        """
        runtime = self.make_runtime(deterministic=deterministic, cache_is_empty=cache_is_empty)
        cfg, is_ahead = self.config, hidden is not None
        check_targets(cfg)
        self.check_inputs(source, cache, targets, is_ahead)
        cfg = cfg.multi_token_model if is_ahead else cfg
        embedder = Embedder(cfg, cfg.vocab_size, runtime, name="embedding")
        token_table = embedder.tokens()
        if cache is None:
            token_positions = self.token_positions(tokens, positions, segments)
        else:
            token_positions = next_token_positions(cfg, positions, tokens, segments, cache, runtime)
        encoder_output, cross_inputs = None, AttentionInputs()
        if cfg.topology.is_encoder_decoder:
            if source is not None:
                encoder_output = self.encode(
                    (embedder, token_table), source, source_positions, source_segments, runtime
                )
                cache = cache and cache._replace(source_segments=source_segments)
            cross_inputs = cross_attention_inputs(
                token_positions, source_segments, cache, runtime, num_axes=tokens.ndim + 2
            )
        x = embedded = self.embed(embedder, token_table, tokens, token_positions)
        if contiguous_positions is None:
            contiguous_positions = positions is None
        recent, last = self.recent_tokens(cfg, tokens, token_positions.segments, cache)
        if hidden is None:
            causal = cfg.topology.has_decoder
            name: c.Stack = "decoder" if causal else "encoder"
            stack = Stack(cfg, name, causal=causal, runtime=runtime, name=name)
            embeddings = self.embed_layers(x, tokens, runtime), recent
            inputs = x, token_positions, encoder_output, cross_inputs, cache, *embeddings
            x, new_cache = stack(*inputs, contiguous_positions=contiguous_positions)
        if is_ahead or (cfg.multi_token_prediction and self.is_initializing()):
            predict = MultiTokenPredictor(
                self.config.multi_token_model, runtime, name="multi_token_prediction"
            )
            before = x if hidden is None else hidden
            ahead = predict(
                embedded, before, token_positions, cache, contiguous_positions=contiguous_positions
            )
            x, new_cache = ahead if is_ahead else (x, new_cache)
        if not self.is_initializing():
            self.sow("hidden", "last", x)
        if logits_at is not None:
            x = jnp.take_along_axis(x, logits_at[..., None], axis=-2)
        logits = LMHead(cfg, runtime, name="head")(x, token_table, targets)
        if not self.is_initializing():
            self.check_names()
        if isinstance(logits, F.LogitStatistics) or new_cache is None:
            return logits
        new_cache = new_cache.lengthen(token_positions.segments)._replace(recent_tokens=last)
        if token_capacity(cfg, new_cache) is not None:
            over_capacity = (new_cache.length > new_cache.capacity)[..., None, None]
            logits = jnp.where(jnp.broadcast_to(over_capacity, logits.shape), jnp.nan, logits)
        return logits, new_cache

    @nn.nowrap
    def make_runtime(self, *, deterministic: bool, cache_is_empty: bool) -> RuntimeConfig:
        """Return the run-time options of one call."""
        return RuntimeConfig(
            dtype=self.dtype,
            deterministic=deterministic,
            remat=self.remat,
            scan=self.scan,
            mesh_axes=self.mesh_axes,
            annotate_axes=self.annotate_axes,
            expert_capacity_factor=self.expert_capacity_factor,
            attention_implementation=self.attention_implementation,
            max_segments=self.max_segments,
            cache_is_empty=cache_is_empty,
            adapter=self.config.adapter,
        )

    def encode(
        self,
        target_embedding: tuple[Embedder, Float[Array, "V E"]],
        source: Integer[Array, "*batch S"],
        positions: Integer[Array, "*any S"] | None,
        segments: Integer[Array, "*batch S"] | None,
        runtime: RuntimeConfig,
    ) -> Float[Array, "*batch S D"]:
        """Return the encoder's output; its embedding is the target's unless it has its own."""
        cfg = self.config
        topology = cfg.topology
        embedder, table = target_embedding
        if topology.source_vocab_size is not None:
            embedder = Embedder(cfg, topology.source_vocab_size, runtime, name="source_embedding")
            table = embedder.tokens()
        tokens = self.token_positions(source, positions, segments)
        if segments is not None:  # length-dependent RoPE scaling ignores padding
            tokens = tokens._replace(positions=jnp.where(segments != 0, tokens.positions, 0))
        encoder = Stack(cfg, "encoder", causal=False, runtime=runtime, name="encoder")
        x = self.embed(embedder, table, source, tokens)
        output, _ = encoder(x, tokens, contiguous_positions=positions is None)
        # Once here instead of in the key projection of each layer.
        return F.copy_to_tensor_parallel(output, self.mesh_axes.tensor)

    def embed_layers(
        self, x: Float[Array, "*batch T D"], tokens: Int[Array, "*batch T"], runtime: RuntimeConfig
    ) -> Float[Array, "layers *batch T E"] | None:
        """Return the embedding of each token for each layer; None without `LayerEmbedding`."""
        option = self.config.layer_embedding
        if option is None:
            return None
        return LayerEmbedder(self.config, option, runtime, name="layer_embedding")(x, tokens)

    @nn.nowrap
    def recent_tokens(
        self,
        config: c.TransformerConfig,
        tokens: Int[Array, "*batch T"],
        segments: Int[Array, "*batch T"] | None,
        cache: Cache | None,
    ) -> tuple[Int[Array, "*batch T n"] | None, Int[Array, "*batch before"] | None]:
        """What `F.recent_tokens` returns for the longest hashed n-gram; None without any."""
        size = config.ngram_size
        if not size:
            return None, None
        if cache is None:
            context = self.mesh_axes.context
            return F.recent_tokens(tokens, size, segments=segments, axis_name=context)
        valid = jnp.asarray(segments) != 0
        return F.recent_tokens(tokens, size, previous=cache.recent_tokens, valid=valid)

    def check_inputs(
        self, source: Any, cache: Cache | None, targets: Any, is_ahead: bool = False
    ) -> None:
        """Require a source for an EncoderDecoder alone, and refuse targets with a cache."""
        if is_ahead and not self.config.multi_token_prediction:
            raise ValueError("hidden needs a model with multi_token_prediction=True.")
        if cache is not None and targets is not None:
            raise ValueError("Targets need the whole sequence; pass either targets or a cache.")
        has_encoder = self.config.topology.is_encoder_decoder
        kind = type(self.config.topology).__name__
        layers = () if cache is None else (*cache.first_layers, *cache.layers, *cache.tail)
        if has_encoder and source is None and not any(layer.cross_attention for layer in layers):
            raise ValueError("An EncoderDecoder needs a source: pass source=token_ids.")
        if not has_encoder and source is not None:
            raise ValueError(f"A model of topology {kind} has no encoder, so it takes no source.")

    def check_names(self) -> None:
        """Check that every parameter is one of the model's."""
        params = self.variables.get("params", {})
        known = annotated_parameters(self.config, layout=layout_of(params))
        unknown = sorted(flatten_dict(params, sep="/").keys() - known.keys())
        raise_misfits([f"{path} is not a parameter of the model" for path in unknown])

    def token_positions(
        self,
        tokens: Int[Array, "*batch T"],
        positions: Int[Array, "*any T"] | None,
        segments: Int[Array, "*batch T"] | None,
    ) -> TokenPositions:
        """Return positions (by default 0, 1, 2, ...) and segments of the tokens."""
        if positions is None:
            length, devices = tokens.shape[-1], axis_size(self.mesh_axes.context)
            order = jnp.asarray(F.zigzag_order(devices * length, devices))
            positions = local_shard(order, self.mesh_axes.context, axis=0)
        if segments is not None:
            positions = jnp.broadcast_to(positions, segments.shape)
        if self.config.max_length is not None:
            F.check_positions(positions, self.config.max_length)
        return TokenPositions(positions, segments)

    def embed(
        self,
        embedder: Embedder,
        table: Float[Array, "V E"],
        tokens: Int[Array, "*batch T"],
        token_positions: TokenPositions,
    ) -> Float[Array, "*batch T D"]:
        """Check token ids (outside jit) and embed them."""
        F.check_token_ids(tokens, embedder.vocab_size)
        return embedder(table, tokens, token_positions.positions)


def next_token_positions(
    config: c.TransformerConfig,
    positions: Int[Array, "*any T"] | None,
    tokens: Int[Array, "*batch T"],
    segments: Int[Array, "*batch T"] | None,
    cache: Cache,
    runtime: RuntimeConfig,
) -> TokenPositions:
    """Return positions of tokens that follow a cache; padding gets position 0 and segment 0."""
    if positions is not None:
        raise ValueError(
            "With a cache, positions follow from it; pass either positions or a cache."
        )
    valid = jnp.ones(tokens.shape, bool) if segments is None else segments != 0
    positions_after_cache = jnp.cumsum(valid, axis=-1) - 1 + cache.length[..., None]
    check_capacity(config, cache, valid, padded=segments is not None)
    if runtime.cache_is_empty:
        check_empty(cache)
    return TokenPositions(jnp.where(valid, positions_after_cache, 0), valid.astype(jnp.int32))


@memoize
def annotated_parameters(
    config: c.TransformerConfig, dtype: np.dtype = FLOAT32, layout: Layout = "stacked"
) -> dict[str, Any]:
    """Return the parameters of the model that computes in `dtype`, by path and without values.

    Args:
        config: The model.
        dtype: Dtype of the computation.
        layout: Layout of the layers.

    Returns:
        Their `AnnotatedParameter`s, from abstract evaluation of `init`.
    """
    has_encoder = config.topology.is_encoder_decoder

    def init() -> Any:  # what it makes is abstract, so that no device is asked for
        tokens = jnp.zeros((1, 2), jnp.int32)
        # "auto" would ask which kernels the device has.
        options: Any = dict(annotate_axes=True, attention_implementation="xla")
        source = tokens if has_encoder else None
        return Transformer(config, dtype, **options).init(jax.random.key(0), tokens, source=source)

    variables = jax.eval_shape(init)
    boxes = flatten_dict(variables["params"], sep="/")
    return boxes if layout == "stacked" else split_layers(config, boxes, _box_of_layer)


def _box_of_layer(box: AnnotatedParameter, layer: int) -> AnnotatedParameter:
    shape, dtype = box.value.shape[1:], box.value.dtype
    return box.replace(value=jax.ShapeDtypeStruct(shape, dtype), names=box.names[1:])


@memoize
def check_targets(config: c.TransformerConfig) -> None:
    """Raise if an adapter has targets that are no linear maps of the model."""
    if config.adapter is None or config.adapter.targets == "all-linear":
        return
    boxes = annotated_parameters(replace(config, adapter=None)).items()
    names = {target_name(tuple(path.split("/")[:-1])) for path, box in boxes if box.adaptable}
    if missing := sorted(set(config.adapter.targets) - names):
        raise ValueError(
            f"The model has no linear map named {', '.join(missing)} for LoRA.targets; it has "
            f"{', '.join(sorted(names))}."
        )
