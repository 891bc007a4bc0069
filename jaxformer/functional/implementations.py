"""Choose the attention implementation: xla, blockwise, cudnn or splash."""

import logging
from typing import Literal

from jaxformer.functional.attention_mask import AttentionMask, ScoreBias
from jaxformer.functional.kernels import AnyArray, Asked, cudnn_cannot, splash_cannot
from jaxformer.functional.platforms import target

LOG = logging.getLogger("jaxformer")
Implementation = Literal["auto", "xla", "blockwise", "cudnn", "splash"]


def chosen_implementation(
    query: AnyArray, key: AnyArray, value: AnyArray, implementation: Implementation, asked: Asked
) -> Implementation:
    """Resolve "auto" and log why; refuse an implementation that lacks what is requested.

    Args:
        query: Queries, of which shape and dtype count.
        key: Keys, likewise.
        value: Values, likewise.
        implementation: As in `dot_product_attention`.
        asked: What that is asked for.

    Returns:
        Any implementation but "auto".

    Raises:
        ValueError: The implementation named cannot do what is asked; says why.
    """

    def cannot(implementation: Implementation) -> str | None:
        match implementation:
            case "blockwise":
                return _needs_arrays(asked)
            case "cudnn":
                return cudnn_cannot(query, key, value, asked)
            case "splash":
                return splash_cannot(query, key, value, asked)
        return None

    if implementation != "auto":
        if (reason := cannot(implementation)) is not None:
            raise ValueError(
                f'implementation="{implementation}" cannot be used: {reason}. Use "auto".'
            )
        return implementation
    T, S = query.shape[-3], value.shape[-3]
    kernels: dict[str, Implementation] = {"gpu": "cudnn", "tpu": "splash"}
    choice = kernels.get(platform := target().platform)
    fallback_reason = f"there is no kernel for a {platform}" if choice is None else cannot(choice)
    if choice is None or fallback_reason is not None:
        choice = "blockwise" if many_scores(T, S) and cannot("blockwise") is None else "xla"
    explanation = "" if fallback_reason is None else f", since {fallback_reason}"
    LOG.info("Attention of %d queries to %d keys: %s%s", T, S, choice, explanation)
    return choice


def _needs_arrays(asked: Asked) -> str | None:
    """Why blockwise attention does not support the request; None if it does."""
    mask_and_bias, lazy_types = (
        {"mask": asked.mask, "bias": asked.bias},
        AttentionMask | ScoreBias | None,
    )
    array_names = [name for name, x in mask_and_bias.items() if not isinstance(x, lazy_types)]
    names = " and ".join(array_names)
    return f"it takes an AttentionMask and a score_bias; got an array as {names}" if names else None


def many_scores(queries: int, keys: int) -> bool:
    """Whether "auto" prefers blockwise attention: from 64 queries and 65,536 scores per head on.

    Args:
        queries: How many.
        keys: How many.

    Returns:
        True from 64 queries and 65,536 scores of a head on.
    """
    return queries >= 64 and queries * keys >= 256 * 256
