"""Who drafts tokens for speculative decoding: a small model, or the model's own next layer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxformer import functional as F
from jaxformer.config import TransformerConfig
from jaxformer.generation.decode_loop import (
    DecodeConfig,
    DecodeState,
    mask_unused_ids,
    prefill_prompt,
)
from jaxformer.generation.prompts import Request, pad_right
from jaxformer.generation.samplers import token_probabilities
from jaxformer.generation.steps import Outputs, apply_model
from jaxformer.layers import Cache, Transformer, empty_cache
from jaxformer.layers.cache import arrange_cache
from jaxformer.layers.layouts import layout_of


class Verdict(NamedTuple):
    """What is right in a draft.

    Attributes:
        read: What the model read: the last token of the text, then the draft.
        hidden: Its last hidden vectors.
        tokens: The new tokens: of the draft, then one of the model.
        length: How many these are.
    """

    read: Int[Array, "*batch n_plus_1"]
    hidden: Float[Array, "*batch n_plus_1 D"]
    tokens: Int[Array, "*batch n_plus_1"]
    length: Int[Array, "*batch"]


class Turn(NamedTuple):
    """What a drafter reads in one turn.

    Attributes:
        decode: Options of the model.
        params: Parameters of the drafter.
        request: The request.
        state: State of the text.
        is_input: Whether the model will check the last token, and each token of the draft.
        key: Random key.
    """

    decode: DecodeConfig
    params: Any
    request: Request
    state: DecodeState
    is_input: Bool[Array, "*batch n_plus_1"]
    key: PRNGKeyArray

    def choose(
        self, logits: Float[Array, "*batch draft_V"], seen: Bool[Array, "*batch V"], place: Any
    ) -> tuple[Int[Array, "*batch"], Float[Array, "*batch V"], Bool[Array, "*batch V"]]:
        """The next token of the draft, its probabilities, and the tokens seen with it."""
        size = self.decode.config.vocab_size
        logits = fit_vocabulary(mask_unused_ids(logits, self.request.vocab_size), size)
        probabilities = token_probabilities(self.decode.sampler, logits, seen)
        key = jax.random.fold_in(self.key, place)
        token = jax.random.categorical(key, jnp.log(probabilities)).astype(jnp.int32)
        return token, probabilities, seen | jax.nn.one_hot(token, size, dtype=bool)


class ModelDrafter(NamedTuple):
    """Drafts by a small model. Its state is its cache, of all tokens but the last one."""

    options: DecodeConfig
    num_tokens: int

    def start(self, params: Any, request: Request, state: DecodeState) -> Cache:
        """Read the prompts."""
        return prefill_prompt(self.options, params, request)[1].cache

    def propose(
        self, turn: Turn, cache: Cache
    ) -> tuple[Int[Array, "*batch n"], Float[Array, "*batch n V"], Cache]:
        """Draft tokens after the last one; return their probabilities and the new cache, too."""

        def step(carry: Any, this: Any) -> Any:
            (token, seen, cache), (place, is_input) = carry, this
            segments = is_input[..., None].astype(jnp.int32)
            outputs = read_tokens(self.options, turn.params, token[..., None], cache, segments)
            token, probabilities, seen = turn.choose(outputs.logits[..., 0, :], seen, place)
            return (token, seen, outputs.cache), (token, probabilities)

        carry = turn.state.last_token, turn.state.seen_tokens, cache
        # The last step has its token read into the cache; what it drafts is not used.
        places = jnp.arange(self.num_tokens + 1), jnp.moveaxis(turn.is_input, -1, 0)
        (_, _, cache), (tokens, probabilities) = jax.lax.scan(step, carry, places)
        return jnp.moveaxis(tokens[:-1], 0, -1), jnp.moveaxis(probabilities[:-1], 0, -2), cache

    def keep(self, turn: Turn, before: Cache, after: Cache, verdict: Verdict) -> Cache:
        """The cache of the tokens that are right."""
        tokens, length = verdict.read, verdict.length
        return keep_tokens(self.options, turn.params, before, after, tokens, length)


class MultiTokenState(NamedTuple):
    """State of `MultiTokenDrafter`: its cache, and what it has not read yet.

    Attributes:
        cache: Cache of the module, of pairs of a hidden vector and the token after it.
        tokens: Tokens of the pairs to read.
        hidden: Their hidden vectors.
        length: Number of these pairs.
    """

    cache: Cache
    tokens: Int[Array, "*batch n_plus_1"]
    hidden: Float[Array, "*batch n_plus_1 D"]
    length: Int[Array, "*batch"]


class MultiTokenDrafter(NamedTuple):
    """Drafts by the model's `multi_token_prediction`, whose last layer follows on itself."""

    options: DecodeConfig
    num_tokens: int

    def start(self, params: Any, request: Request, state: DecodeState) -> MultiTokenState:
        """Read the prompts' pairs but the last, whose token was just generated."""
        config, mesh = self.options.config.multi_token_model, self.options.mesh
        *batch, width = state.tokens.shape
        cache = empty_cache(
            config,
            tuple(batch),
            min(width, config.max_length or width),
            dtype=self.options.dtype,
            tensor_parallel_size=1 if mesh is None else mesh.shape.get("tensor", 1),
        )
        cache = arrange_cache(config, cache, layout_of(params["multi_token_prediction"]))
        hidden: Any = state.context.hidden
        length = request.lengths - 1
        segments = F.length_mask(length, hidden.shape[-2]).astype(jnp.int32)
        tokens = state.tokens[..., 1 : hidden.shape[-2] + 1]
        outputs = read_tokens(
            self.options, params, tokens, cache, segments, hidden=hidden, cache_is_empty=True
        )
        last = jnp.take_along_axis(hidden, length[..., None, None], axis=-2)
        last = jnp.pad(last, [*[(0, 0)] * len(batch), (0, self.num_tokens), (0, 0)])
        tokens = pad_right(state.last_token[..., None], self.num_tokens + 1)
        return MultiTokenState(outputs.cache, tokens, last, jnp.ones_like(length))

    def propose(
        self, turn: Turn, state: MultiTokenState
    ) -> tuple[Int[Array, "*batch n"], Float[Array, "*batch n V"], Cache]:
        """Draft tokens; the cache that is returned has the pairs that were not read yet."""
        at = jnp.maximum(state.length - 1, 0)[..., None]
        segments = F.length_mask(state.length, state.tokens.shape[-1]).astype(jnp.int32)
        outputs = read_tokens(
            self.options, turn.params, state.tokens, state.cache, segments, hidden=state.hidden
        )
        logits, hidden = (
            jnp.take_along_axis(x, at[..., None], axis=-2) for x in (outputs.logits, outputs.hidden)
        )
        drafts, seen, cache = [], turn.state.seen_tokens, outputs.cache
        for place in range(self.num_tokens):
            token, probabilities, seen = turn.choose(logits[..., 0, :], seen, place)
            drafts.append((token, probabilities))
            if place + 1 < self.num_tokens:
                segments = turn.is_input[..., place + 1, None].astype(jnp.int32)
                logits, cache, hidden = read_tokens(
                    self.options, turn.params, token[..., None], cache, segments, hidden=hidden
                )
        tokens, q = zip(*drafts, strict=True)
        return jnp.stack(tokens, axis=-1), jnp.stack(q, axis=-2), outputs.cache

    def keep(
        self, turn: Turn, before: MultiTokenState, after: Cache, verdict: Verdict
    ) -> MultiTokenState:
        """The pairs that are to be read: hidden vectors of the model, and the tokens after them."""
        return MultiTokenState(after, verdict.tokens, verdict.hidden, verdict.length)


def fit_vocabulary(logits: Float[Array, "*batch V"], size: int) -> Float[Array, "*batch size"]:
    """Logits of `size` ids: some are dropped, or those that are missing are -inf."""
    missing = max(0, size - logits.shape[-1])
    widths = [(0, 0)] * (logits.ndim - 1) + [(0, missing)]
    return jnp.pad(logits[..., :size], widths, constant_values=-jnp.inf)


def read_tokens(
    options: DecodeConfig,
    params: Any,
    tokens: Int[Array, "*batch T"],
    cache: Cache,
    segments: Int[Array, "*batch T"],
    **inputs: Any,
) -> Outputs:
    """Apply the model to the next tokens."""
    model = Transformer(options.config, dtype=options.dtype)
    inputs |= dict(cache=cache, segments=segments)
    return apply_model(model, options.mesh, params, tokens, **inputs)


def keep_tokens(
    options: DecodeConfig,
    params: Any,
    before: Cache,
    after: Cache,
    tokens: Int[Array, "*batch T"],
    count: Int[Array, "*batch"],
) -> Cache:
    """The cache of the first `count` tokens of each row; states read them a second time."""
    if keeps_positions(options.config):
        return after.shorten(before.length + count)
    segments = F.length_mask(count, tokens.shape[-1]).astype(jnp.int32)
    return read_tokens(options, params, tokens, before, segments).cache


def keeps_positions(config: TransformerConfig) -> bool:
    """Whether all caches hold a slot for each token, so that the last tokens can be taken back."""
    parts = (part for layer in config.layers for part in layer.attention.parts)
    return not config.ngram_size and all(part.has_scores for part in parts)
