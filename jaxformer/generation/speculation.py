"""`speculate`: a small model drafts tokens, and the model checks several in one pass."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Int, PRNGKeyArray

from jaxformer.checks import Checked, Size, require
from jaxformer.config import TransformerConfig
from jaxformer.generation.decode_inputs import check_logits_finite, prepare_inputs, rows_of_request
from jaxformer.generation.decode_loop import DecodeConfig
from jaxformer.generation.drafters import ModelDrafter, MultiTokenDrafter, keeps_positions
from jaxformer.generation.drafts import DraftConfig, decode_with_drafts, draft_next, start_drafting
from jaxformer.generation.prompts import Request, make_request
from jaxformer.generation.samplers import Beam, Greedy, Sampler


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftModel(Checked):
    """A small model that drafts the next tokens of a large one.

    Attributes:
        config: A model of the same tokens.
        params: Its parameters, ``variables["params"]``.
        num_tokens: Tokens of a draft.
    """

    config: TransformerConfig
    params: Any
    num_tokens: Size = 4


@dataclass(frozen=True, kw_only=True)
class MTP(Checked):
    """The model's own `multi_token_prediction` drafts its next tokens.

    Attributes:
        num_tokens: Tokens of a draft; from the second on, the module reads its own last hidden
            vector in place of the model's.
    """

    num_tokens: Size = 1


Drafts = DraftModel | MTP


class Speculation(NamedTuple):
    """Tokens, and how many drafted ones were right.

    Attributes:
        tokens: As `generate` returns them.
        num_passes: Passes of the model after the prompt; without drafts, one for each new token.
        num_drafted: Drafted tokens, of all rows.
        num_accepted: Those of them that are in the text.
    """

    tokens: Int[Array, "*batch P_plus_new"]
    num_passes: int
    num_drafted: int
    num_accepted: int


def speculate(
    config: TransformerConfig,
    params: Any,
    prompt: Any,
    *,
    drafts: Drafts,
    max_new_tokens: int,
    sampler: Sampler = Greedy(),
    key: PRNGKeyArray | None = None,
    dtype: DTypeLike = jnp.float32,
    prefill_chunk: int | None = None,
    mesh: Mesh | None = None,
    **request_options: Any,
) -> Speculation:
    """Generate by speculative decoding, and count how many drafts were right.

    A draft model proposes tokens one by one, and the model checks them all in one pass. With
    `Greedy` the tokens are the tokens of `generate`, unless two logits of the model differ by no
    more than rounding; with `Sample` they have the same distribution, after all its filters.

    It is faster if a pass over several tokens takes about the time of a pass over one, as where
    reading the parameters takes the time, and if many drafts are right. Layers with a state instead
    of a cache (recurrences, convolutions) read the accepted tokens a second time.

    Args:
        config: See `generate`, also for the other arguments.
        params: The parameters.
        prompt: Token ids.
        drafts: A `DraftModel`, or `MTP(...)` of the model; how many tokens a draft has.
        max_new_tokens: Maximum number of new tokens per row.
        sampler: `Greedy()` or `Sample(...)`, of both models.
        key: Random key.
        dtype: Dtype of computation and cache, of both models.
        prefill_chunk: Tokens per prefill step; not with `MTP`, which reads whole prompts.
        mesh: Device mesh, over which both models are sharded.
        **request_options: `lengths`, `stop_tokens`, `source`, `source_segments`, `vocab_size`.

    Returns:
        The tokens, as `generate` returns them, and the counts.

    Raises:
        ValueError: As in `generate`, of either model; for `Beam(...)`; the draft model has fewer
            ids than may be generated; the model of `MTP` has no `multi_token_prediction`; or a RoPE
            scaling depends on the length.

    References:
        Leviathan, Kalman and Matias, Fast Inference from Transformers via Speculative Decoding,
        2022. arXiv:2211.17192
    """
    options = DecodeConfig(config, max_new_tokens, prefill_chunk, jnp.dtype(dtype), mesh, sampler)
    request = make_request(config, prompt, max_new_tokens=max_new_tokens, **request_options)
    return decode_speculatively(options, params, drafts, request, key)


def decode_speculatively(
    options: DecodeConfig, params: Any, drafts: Drafts, request: Request, key: PRNGKeyArray | None
) -> Speculation:
    """Check the arguments, and decode with drafts."""
    inputs = prepare_drafts(options, params, drafts, request, key)
    tokens, state = decode_with_drafts(*inputs)
    check_logits_finite(state.decode.prompt_logits_finite)
    return speculation_of(options, request, tokens, state)


def speculation_of(
    options: DecodeConfig, request: Request, tokens: Int[Array, "*rows padded"], state: Any
) -> Speculation:
    """The result of a finished state."""
    counts = state.decode.num_generated - 1, state.num_drafted, state.num_accepted
    return Speculation(rows_of_request(options, request, tokens), *map(int, counts))


def stream_speculatively(
    options: DecodeConfig, params: Any, drafts: Drafts, request: Request, key: PRNGKeyArray | None
) -> Generator[Int[np.ndarray, "*batch"], None, Speculation]:
    """Yield the next token of all rows as soon as each unfinished row has it."""
    inputs = prepare_drafts(options, params, drafts, request, key)
    shape = request.lengths.shape
    rows, first = np.arange(request.lengths.size), np.asarray(request.lengths).reshape(-1)

    def tokens() -> Generator[Int[np.ndarray, "*batch"], None, Speculation]:
        state = start_drafting(*inputs)
        check_logits_finite(state.decode.prompt_logits_finite)
        count = 0
        while True:
            decode = state.decode
            length, is_done = (np.ravel(x)[rows] for x in (decode.length, decode.is_done))
            text = np.reshape(decode.tokens, (-1, decode.tokens.shape[-1]))[rows]
            new = length - first
            for place in range(count, max(new) if all(is_done) else min(new[~is_done])):
                yield text[rows, np.minimum(first + place, length - 1)].reshape(shape)
                count += 1
            if all(is_done):
                return speculation_of(options, request, decode.tokens, state)
            state = draft_next(*inputs, state)

    return tokens()


def prepare_drafts(
    options: DecodeConfig, params: Any, drafts: Drafts, request: Request, key: PRNGKeyArray | None
) -> tuple[DraftConfig, tuple[Any, Any], Request, PRNGKeyArray]:
    """Check the arguments of both models, and return them as the compiled loop takes them."""
    if isinstance(options.sampler, Beam):
        raise ValueError(f"Beam search takes no drafts; got {options.sampler}.")
    if not isinstance(drafts, Drafts):
        raise ValueError(f"drafts must be DraftModel(...) or MTP(...); got {drafts!r}.")
    options = with_lookahead(options, options.config, drafts)
    if isinstance(drafts, MTP):
        require(
            options.config.multi_token_prediction,
            f"{drafts} needs a model with multi_token_prediction=True.",
        )
        params, request, key = prepare_inputs(options, params, request, key)
        options = options._replace(keep_hidden=True, chunk=None)
        drafter: Any = MultiTokenDrafter(options, drafts.num_tokens)
        return DraftConfig(options, drafter), (params, params), request, key
    require(
        int(request.vocab_size) <= drafts.config.vocab_size,
        f"The draft model has {drafts.config.vocab_size} token ids, but {request.vocab_size} may "
        "be generated. If both models have one tokenizer, pass its size as vocab_size.",
    )
    draft = with_lookahead(options, drafts.config, drafts)
    draft_params, *_ = prepare_inputs(draft, drafts.params, check_request(draft, request), key)
    params, request, key = prepare_inputs(options, params, request, key)
    drafter = ModelDrafter(draft, drafts.num_tokens)
    return DraftConfig(options, drafter), (params, draft_params), request, key


def with_lookahead(
    options: DecodeConfig, config: TransformerConfig, drafts: Drafts
) -> DecodeConfig:
    """The options for a model whose cache takes a draft back."""
    for rope in (layer.rope for layer in config.layers):
        require(
            rope is None or not rope.depends_on_length,
            f"Speculative decoding needs a RoPE that does not depend on the length; got {rope}.",
        )
    lookahead = drafts.num_tokens if keeps_positions(config) else 0
    return options._replace(config=config, lookahead=lookahead)


def check_request(draft: DecodeConfig, request: Request) -> Request:
    """The request as the draft model takes it."""
    try:
        return make_request(
            draft.config,
            request.prompt,
            max_new_tokens=draft.max_new_tokens,
            lengths=request.lengths,
            source=request.source,
            source_segments=request.source_segments,
        )
    except ValueError as error:
        raise ValueError(f"Of the draft model: {error}") from error
