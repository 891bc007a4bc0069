"""Which of the forms of attention computes what is asked for."""

from typing import Literal

from jaxformer.functional.by_position import is_rule
from jaxformer.functional.kernels import AnyArray, Asked, cudnn_cannot, splash_cannot

Implementation = Literal["auto", "xla", "blockwise", "cudnn", "splash"]


def chosen_implementation(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    implementation: Implementation,
    asked: Asked,
) -> Implementation:
    """What "auto" comes to; refuses what an implementation cannot do.

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
    kernels: tuple[Implementation, ...] = ("cudnn", "splash")
    for kernel in kernels:
        if cannot(kernel) is None:
            return kernel
    many = many_scores(query.shape[-3], value.shape[-3])
    return "blockwise" if many and cannot("blockwise") is None else "xla"


def _needs_arrays(asked: Asked) -> str | None:
    """Why attention by blocks cannot do this; None if it can."""
    given = {"mask": asked.mask, "bias": asked.bias}
    arrays = [name for name, x in given.items() if x is not None and not is_rule(x)]
    found = " and ".join(arrays)
    return f"it takes rules of positions; got an array as {found}" if found else None


def many_scores(queries: int, keys: int) -> bool:
    """Whether attention between so many is better done block by block, as "auto" does it.

    Args:
        queries: How many.
        keys: How many.

    Returns:
        True from 64 queries and 65,536 scores of a head on.
    """
    return queries >= 64 and queries * keys >= 256 * 256
