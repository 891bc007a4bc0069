"""Log-likelihoods of given continuations, batched and sorted by length."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxformer import functional as F
from jaxformer.checks import require_count
from jaxformer.config import TransformerConfig
from jaxformer.generation.prompts import bucket_length
from jaxformer.layers import Transformer
from jaxformer.layers.layouts import layout_of
from jaxformer.layers.parameter_metadata import check_parameters
from jaxformer.parallel import (
    MeshConfig,
    active_mesh_axes,
    batch_spec,
    check_divisible,
    make_mesh,
    parameter_shardings,
    parameter_specs,
    put_batch,
)

SORT_BUFFER_BATCHES = 64  # batches whose rows are sorted by length


class LogLikelihood(NamedTuple):
    """Log-probability of a continuation, and whether greedy decoding would produce it.

    Attributes:
        log_probability: Log-probability of the whole continuation, in nats.
        is_greedy: Whether each token is the most likely one.
    """

    log_probability: float
    is_greedy: bool


def log_likelihoods(
    config: TransformerConfig,
    params: Any,
    requests: Iterable[tuple[Sequence[int], Sequence[int]]],
    *,
    max_length: int,
    batch_size: int = 8,
    dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
) -> Iterator[LogLikelihood]:
    """Yield the log-likelihood of each continuation given its context.

        log p(continuation | context) = sum over t of log p(x_t | the `max_length` tokens before it)

    Args:
        config: A decoder.
        params: The parameters, ``variables["params"]``.
        requests: Pairs (context, continuation) of token ids, with a context of at least one; a lazy
            iterable is consumed by some batches at a time.
        max_length: Context length; longer contexts are truncated on the left.
        batch_size: Continuations per batch.
        dtype: Dtype of the computation.
        mesh: Device mesh; None is one device.

    Returns:
        An iterator in the order of the requests.

    Raises:
        ValueError: The model is no decoder, the parameters do not match it, a context is empty, or
            a continuation is longer than `max_length`.

    References:
        Brown et al., Language Models are Few-Shot Learners, 2020. arXiv:2005.14165, section 2.4
    """
    if list(config.stacks) != ["decoder"]:
        raise ValueError(f"Log-likelihoods need a Decoder; got {config.topology}.")
    require_count("max_length", max_length)
    require_count("batch_size", batch_size)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1]) if mesh is None else mesh
    check_divisible(config, mesh.shape, batch_size=batch_size)
    check_parameters(config, params)
    params = jax.device_put(params, parameter_shardings(config, mesh, layout_of(params)))
    score = partial(_score, config=config, dtype=jnp.dtype(dtype), mesh=mesh)
    pending_rows = (_make_row(*request, max_length) for request in requests)
    while buffer := list(islice(pending_rows, SORT_BUFFER_BATCHES * batch_size)):
        results = dict[int, LogLikelihood]()
        order = sorted(range(len(buffer)), key=lambda i: len(buffer[i].tokens))
        for first in range(0, len(order), batch_size):
            indices = order[first : first + batch_size]
            batch = _pad_rows([buffer[i] for i in indices], batch_size, mesh, config.max_length)
            log_p, misses = jax.device_get(score(params, put_batch(batch, mesh, batch_size)))
            for i, value, missed in zip(indices, log_p, misses, strict=False):
                results[i] = LogLikelihood(float(value), not missed)
        yield from (results[i] for i in range(len(buffer)))


def rolling_windows(
    tokens: Sequence[int], *, max_length: int, stride: int, start: int = 1
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Split a text into (context, continuation) windows that score each token once.

    The first continuation has up to `max_length` tokens, the others have `stride` (the last may
    have fewer), each with the longest context that fits.

    Args:
        tokens: Token ids of a text, with the bos token first.
        max_length: Context length of the model.
        stride: Tokens per continuation; a smaller stride is slower and gives longer contexts.
        start: Index of the first token to score, at least 1.

    Returns:
        Requests for `log_likelihoods`.

    Raises:
        ValueError: The stride is not in [1, max_length].

    References:
        Baevski and Auli, Adaptive Input Representations for Neural Language Modeling, 2019.
        arXiv:1809.10853, section 4.3
    """
    require_count("stride", stride, most=max_length)
    end = min(len(tokens), max(max_length + 1, start + stride))
    while start < end:
        yield tokens[max(0, end - max_length - 1) : start], tokens[start:end]
        start, end = end, min(len(tokens), end + stride)


class _ScoringRow(NamedTuple):
    tokens: Int[np.ndarray, " T"]
    targets: Int[np.ndarray, " T"]
    mask: Bool[np.ndarray, " T"]


def _make_row(context: Sequence[int], continuation: Sequence[int], max_length: int) -> _ScoringRow:
    if not len(context):
        raise ValueError("A context must have at least one token, such as the bos token.")
    if len(continuation) > max_length:
        raise ValueError(
            f"A continuation has {len(continuation)} tokens, more than max_length={max_length}."
        )
    tokens = np.asarray([*context, *continuation], np.int32)[-max_length - 1 :]
    count = len(tokens) - 1
    return _ScoringRow(tokens[:-1], tokens[1:], np.arange(count) >= count - len(continuation))


def _pad_rows(
    rows: list[_ScoringRow], batch_size: int, mesh: Mesh, max_width: int | None
) -> dict[str, np.ndarray]:
    """Return a batch of the rows, padded to a bucketed width."""
    parts = 2 * mesh.shape.get("context", 1)
    width = max(1, *(len(row.tokens) for row in rows))
    width = min(bucket_length(width), max_width or bucket_length(width))
    shape = batch_size, -(-width // parts) * parts
    batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "segments")}
    batch["mask"] = np.zeros(shape, bool)
    for i, row in enumerate(rows):
        for name, values in row._asdict().items():
            batch[name][i, : len(values)] = values
        batch["segments"][i, : len(row.tokens)] = 1
    return batch


@partial(jax.jit, static_argnames=("config", "dtype", "mesh"))
def _score(
    params: Any, batch: dict[str, Array], *, config: TransformerConfig, dtype: np.dtype, mesh: Mesh
) -> tuple[Float[Array, " B"], Int[Array, " B"]]:
    """Return log-probability and number of tokens that are not the argmax, for each row."""
    axes = active_mesh_axes(mesh.shape)
    model = Transformer(config, dtype=dtype, mesh_axes=axes)

    def per_device(params: Any, batch: dict[str, Array]) -> tuple[Array, Array]:
        logits: Any = model.apply({"params": params}, batch["tokens"], segments=batch["segments"])
        max_logits = jnp.max(logits, axis=-1)
        if axes.tensor is not None:
            max_logits = jax.lax.pmax(max_logits, axes.tensor)
        scores = F.logit_statistics(logits, batch["targets"], axis_name=axes.tensor)
        log_p = jnp.sum(-F.cross_entropy_from_statistics(scores), axis=-1, where=batch["mask"])
        num_not_greedy = jnp.sum(batch["mask"] & (scores.target_logit < max_logits), axis=-1)
        if axes.context is not None:
            return jax.lax.psum((log_p, num_not_greedy), axes.context)
        return log_p, num_not_greedy

    spec = batch_spec(mesh.shape)
    return jax.shard_map(
        per_device,
        mesh=mesh,
        in_specs=(parameter_specs(config, mesh.shape, layout_of(params)), spec),
        out_specs=P(spec[0]),
    )(params, batch)
