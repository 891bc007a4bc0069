"""Attention kernels of NVIDIA GPUs and TPUs, for what they can do."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.functional.arguments import checked
from jaxformer.functional.by_position import PositionMask, Sight
from jaxformer.functional.collectives import varies_over, varying
from jaxformer.functional.masks import segment_mask
from jaxformer.functional.platforms import platform
from jaxformer.functional.scores import scaled

AnyArray = Array | jax.ShapeDtypeStruct  # shape and dtype are asked for
LANES = 128  # numbers that a TPU's vector unit holds side by side
WIDEST = 128  # head of cuDNN's kernel
Segments = tuple[Int[Array, "B T"], Int[Array, "B S"]] | None


@checked
def cudnn_attention(
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    value: Float[Array, "*batch S K H"],
    mask: PositionMask | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
) -> Float[Array, "*batch T N H"]:
    """`dot_product_attention` by cuDNN's fused kernel, for what `cudnn_cannot` does not name.

    Memory is linear in length, but for segments: they are told to cuDNN as an array of T times S
    numbers for each sequence, once for all heads. The backward pass runs the kernel forwards once
    more, since only its inputs are kept.

    Args:
        query: Queries of N heads, in bfloat16 or float16.
        key: Keys of K heads.
        value: Values of K heads.
        mask: A rule for tokens in order, or None.
        scale: Multiplies the dot products.

    Returns:
        The mean values of each head, in the dtype of ``query``.

    References:
        Dao et al., FlashAttention, 2022. arXiv:2205.14135
    """
    sight = Sight() if mask is None else mask.sight
    # A window that ends with the query's own token is causal.
    causal = sight.causal or (sight.window is not None and sight.lookahead == 0)
    query, scale = scaled(query, scale)
    kernel = CuDNN(scale, causal, sight.window)
    rows = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    return anywhere(kernel, *rows, segments_of(mask, query.shape[:-3])).reshape(query.shape)


class CuDNN(NamedTuple):
    """The kernel with what it is told beside arrays."""

    scale: float
    causal: bool
    window: int | None

    def __call__(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K H"],
        segments: Segments,
    ) -> Float[Array, "B T N H"]:
        """Attend."""
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=None if segments is None else segment_mask(*segments)[:, None],
            scale=self.scale,
            is_causal=self.causal,
            local_window_size=None if self.window is None else (self.window - 1, 0),
            implementation="cudnn",
        )


Kernel = Callable[[Array, Array, Array, Segments], Array]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def anywhere(
    kernel: Kernel,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    segments: Segments,
) -> Float[Array, "B T N H"]:
    """A kernel that knows neither `jax.vmap` nor `jax.shard_map`, inside them.

    The first only makes more rows. Of the second it need not know, since rows have nothing to do
    with each other; only the types of its results must say that devices have their own.

    Args:
        kernel: Attention of rows, of a type that compares by value.
        query: Of N heads.
        key: Of K heads.
        value: Of K heads.
        segments: Of queries and keys.
    """
    return _as_rows(kernel, query, key, value, segments)


def _forward(kernel: Kernel, *given: Any):
    return anywhere(kernel, *given), given


def _backward(kernel: Kernel, given: Any, slopes: Array) -> Any:
    def pull(query: Array, key: Array, value: Array, segments: Segments, slopes: Array) -> Any:
        def attend(query: Array, key: Array, value: Array) -> Array:
            return kernel(query, key, value, segments)

        return jax.vjp(attend, query, key, value)[1](slopes)

    return *_as_rows(pull, *given, slopes), None


anywhere.defvjp(_forward, _backward)


def _as_rows(function: Callable[..., Any], *given: Any) -> Any:
    """Call a function of rows: axes of `jax.vmap` are more of them, and devices have their own."""

    @jax.custom_batching.custom_vmap
    def run(*given: Any) -> Any:
        return function(*given)

    @run.def_vmap
    def more_rows(size: int, batched: Any, *given: Any) -> Any:
        def fold(x: Array, has: bool) -> Array:
            x = x if has else jnp.broadcast_to(x[None], (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        found = run(*jax.tree.map(fold, given, tuple(batched)))
        unfolded = jax.tree.map(lambda y: y.reshape(size, -1, *y.shape[1:]), found)
        return unfolded, jax.tree.map(lambda _: True, found)

    axes = frozenset[str]().union(*(varies_over(x) for x in jax.tree.leaves(given)))
    found = run(*jax.tree.map(lambda x: varying(x, *axes), given))
    return jax.tree.map(lambda y: varying(y, *axes), found)


def segments_of(mask: PositionMask | None, batch: tuple[int, ...]) -> Segments:
    """The segments of all rows of a batch; None if they are one document each."""
    if mask is None or mask.query_segments is None or mask.key_segments is None:
        return None
    own, others = (
        jnp.broadcast_to(x, (*batch, x.shape[-1])).reshape(-1, x.shape[-1])
        for x in (mask.query_segments, mask.key_segments)
    )
    return own, others


@checked
def splash_attention(
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    value: Float[Array, "*batch S K H"],
    mask: PositionMask | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    logit_softcap: float | None = None,
    interpret: bool = False,
) -> Float[Array, "*batch T N H"]:
    """`dot_product_attention` by JAX's splash kernel, for what `splash_cannot` does not name.

    Blocks in which nothing is seen are left out.

    Args:
        query: Queries of N heads.
        key: Keys of K heads.
        value: Values of K heads.
        mask: A rule for tokens in order, or None.
        scale: Multiplies the dot products.
        logit_softcap: Bound on the absolute score.
        interpret: Run the kernel's steps on any platform, slowly: for tests.

    Returns:
        The mean values of each head, in the dtype of ``query``.

    References:
        Dao et al., FlashAttention, 2022. arXiv:2205.14135
        Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers for Near-Infinite
        Context, 2023. arXiv:2310.01889
    """
    # Here, since few programs need it and it takes long to import.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    *batch, T, N, _ = query.shape
    S, count = key.shape[-3], math.prod(batch)
    sight = Sight() if mask is None else mask.sight
    ahead = 0 if sight.causal else sight.lookahead
    seen: Any = splash.CausalMask((T, S)) if sight.causal else splash.FullMask((T, S))
    if sight.window is not None:
        seen = splash.LocalMask((T, S), window_size=(sight.window - 1, ahead), offset=0)
    block_q, block_kv = (math.gcd(512, n) for n in (T, S))
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([seen] * N),
        block_sizes=splash.BlockSizes(
            block_q=block_q,
            block_kv=block_kv,
            block_kv_compute=block_kv,
            block_q_dkv=block_q,
            block_kv_dkv=block_kv,
            block_kv_dkv_compute=block_kv,
            block_q_dq=block_q,
            block_kv_dq=block_kv,
        ),
        attn_logits_soft_cap=logit_softcap,
        interpret=interpret,
    )
    query, scale = scaled(query, scale)
    query = query * scale
    by_head = (jnp.moveaxis(x.reshape(count, *x.shape[-3:]), 1, 2) for x in (query, key, value))
    segments = segments_of(mask, tuple(batch))
    ids = None if segments is None else splash.SegmentIds(*segments)
    output = jax.vmap(kernel)(*by_head, ids)
    return jnp.moveaxis(output, 1, 2).reshape(*batch, T, N, value.shape[-1])


class Asked(NamedTuple):
    """What `dot_product_attention` is asked for.

    Attributes:
        mask: An array, a rule, or None.
        bias: Likewise.
        logit_softcap: Bound on the scores.
        normalizer: How scores become weights.
        dropout_rate: Of the weights.
        axes: Over which devices inside `jax.shard_map` differ.
    """

    mask: Any = None
    bias: Any = None
    logit_softcap: float | None = None
    normalizer: str = "softmax"
    dropout_rate: float = 0.0
    axes: frozenset[str] = frozenset()


def cudnn_cannot(query: AnyArray, key: AnyArray, value: AnyArray, asked: Asked) -> str | None:
    """Why cuDNN's kernel cannot do this; None if it can."""
    if platform() != "gpu":
        return f"it runs on NVIDIA GPUs, and this is a {platform()}"
    if (generation := nvidia_generation()) < (8, 0):
        told = ".".join(map(str, generation)) if generation else "a GPU of another maker"
        return f"it needs an NVIDIA GPU of compute capability 8.0 or more; got {told}"
    if (names := dtypes_of(query, key, value)) not in ("bfloat16", "float16"):
        return f"it computes in bfloat16 or float16; got {names}"
    if query.shape[-1] % 8 or query.shape[-1] > WIDEST:
        return f"heads have a multiple of 8 and at most {WIDEST} features; got {query.shape[-1]}"
    if asked.logit_softcap is not None:
        return f"it has no soft cap; got logit_softcap {asked.logit_softcap}"
    if (reason := _kernels_cannot(query, value, asked)) is not None or asked.mask is None:
        return reason
    lengths, sight = (query.shape[-3], value.shape[-3]), asked.mask.sight
    if asked.mask.query_segments is not None and any(length % 2 for length in lengths):
        return f"with segments its lengths are even; got {lengths[0]} and {lengths[1]}"
    if sight.window is not None and sight.lookahead > 0 and not sight.causal:
        return f"its windows end with the query's token; got a lookahead of {sight.lookahead}"
    return None


def dtypes_of(*arrays: AnyArray) -> str:
    """The dtypes of arrays, each once."""
    return ", ".join(sorted({str(x.dtype) for x in arrays}))


def nvidia_generation() -> tuple[int, ...]:
    """Compute capability of the first GPU; nothing where it is none of NVIDIA's."""
    device = jax.local_devices(backend="gpu")[0]
    if "cuda" not in device.client.platform_version.lower():
        return ()
    return tuple(int(part) for part in device.compute_capability.split("."))


def splash_cannot(query: AnyArray, key: AnyArray, value: AnyArray, asked: Asked) -> str | None:
    """Why the splash kernel cannot do this; None if it can."""
    if platform() != "tpu":
        return f"it runs on TPUs, and this is a {platform()}"
    if asked.axes:
        return (
            f"it does not say that devices along {', '.join(sorted(asked.axes))} have their own, "
            "as jax.shard_map asks of it"
        )
    if (names := dtypes_of(query, key, value)) not in ("bfloat16", "float32"):
        return f"it computes in bfloat16 or float32; got {names}"
    if query.shape[-3] % LANES or value.shape[-3] % LANES:
        return (
            f"lengths are multiples of {LANES}; got {query.shape[-3]} queries and "
            f"{value.shape[-3]} keys"
        )
    if query.shape[-1] % (LANES // 2):
        return f"heads have a multiple of {LANES // 2} features; got {query.shape[-1]}"
    return _kernels_cannot(query, value, asked)


def _kernels_cannot(query: AnyArray, value: AnyArray, asked: Asked) -> str | None:
    """What neither kernel can do."""
    if value.shape[-1] != query.shape[-1]:
        return f"values are as wide as keys; got {value.shape[-1]} and {query.shape[-1]}"
    mask = asked.mask
    if mask is not None and not (isinstance(mask, PositionMask) and mask.sight.in_order):
        given = type(mask).__name__ if not isinstance(mask, PositionMask) else str(mask.sight)
        return (
            "it counts tokens itself; the mask must be a PositionMask whose sight is in_order; "
            f"got {given}"
        )
    if mask is not None and query.shape[-3] != value.shape[-3]:
        return (
            "queries in order are the keys' tokens; got "
            f"{query.shape[-3]} queries and {value.shape[-3]} keys"
        )
    if asked.bias is not None:
        return "it adds nothing to the scores; got a bias"
    if asked.normalizer != "softmax":
        return f"its weights are a softmax; got normalizer {asked.normalizer!r}"
    if asked.dropout_rate != 0.0:
        return f"it drops no weights; got dropout_rate {asked.dropout_rate}"
    return None
