"""Parameter table, and KV-cache bytes by length."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxformer import config as c
from jaxformer import costs
from jaxformer.checks import require_count
from jaxformer.parallel.plan_report import format_bytes
from jaxformer.parallel.sharding import flatten_to_paths


class ParameterRow(NamedTuple):
    """One array of a model's parameters.

    Attributes:
        path: Path in the parameter tree.
        shape: Shape of the array; scanned layers are stacked along the first axis.
        size: Number of parameters.
        fraction: Fraction of all parameters of the model.
    """

    path: str
    shape: tuple[int, ...]
    size: int
    fraction: float


def parameter_table(params: Any) -> tuple[ParameterRow, ...]:
    """One row per parameter array: path, shape, size, fraction.

    Args:
        params: Arrays, or shapes from `jax.eval_shape`, in a tree.

    Returns:
        One row per array, in the order of the tree.
    """
    leaves = flatten_to_paths(params)
    total = sum(x.size for x in leaves.values())
    rows = (
        ParameterRow(path, tuple(x.shape), x.size, x.size / total) for path, x in leaves.items()
    )
    return tuple(rows)


def format_parameters(params: Any) -> str:
    """`parameter_table` as text, with the total.

    Args:
        params: Arrays, or shapes from `jax.eval_shape`, in a tree.

    Returns:
        One line per array, and the total.
    """
    rows = parameter_table(params)
    rows += (ParameterRow("all", (), sum(row.size for row in rows), 1.0),)
    cells = [
        (row.path, " x ".join(map(str, row.shape)), f"{row.size:,}", f"{row.fraction:.1%}")
        for row in rows
    ]
    path, shape, count, share = (max(map(len, column)) for column in zip(*cells, strict=True))
    lines = [f"{a:<{path}}  {b:>{shape}}  {n:>{count}}  {s:>{share}}" for a, b, n, s in cells]
    return "\n".join(lines)


def check_bytes(what: str, needed: int, max_bytes: int, advice: str) -> None:
    """Raise if an array is too large; `advice` says how it gets smaller."""
    if needed > max_bytes:
        raise ValueError(
            f"{what} {format_bytes(needed)}, but max_bytes is {format_bytes(max_bytes)}. {advice}, "
            f"or raise max_bytes to {needed}."
        )


def cache_sizes(
    config: c.TransformerConfig,
    lengths: Sequence[int],
    *,
    batch: int = 1,
    source_length: int = 0,
    bytes_per_number: int = 2,
) -> Int[np.ndarray, " L"]:
    """Bytes of the KV cache by sequence length; see `costs.cache_bytes`.

    Args:
        config: The model.
        lengths: Sequence lengths in tokens, including the prompt.
        batch: Number of sequences.
        source_length: Tokens of an encoder-decoder's source, whose keys and values are cached.
        bytes_per_number: As in `costs.cache_bytes`.

    Returns:
        Bytes for each length.

    Raises:
        ValueError: The model is an encoder, a length or another number is no integer or too small,
            or a model without an encoder has a source.
    """
    if not config.topology.has_decoder:
        raise ValueError("An Encoder has no KV cache.")
    if source_length and not config.topology.is_encoder_decoder:
        raise ValueError(f"A Decoder has no source; got source_length={source_length}.")
    if np.ndim(lengths) != 1:
        raise ValueError(f"lengths must be a sequence, such as [1, 2048]; got {lengths!r}.")
    for length in (*lengths, source_length):
        require_count("A length", length, least=0)
    require_count("batch", batch)
    options = dict(batch=batch, source_length=source_length, bytes_per_number=bytes_per_number)
    sizes = [costs.cache_bytes(config, int(n), **options) for n in lengths]
    return np.asarray(sizes, np.int64)
