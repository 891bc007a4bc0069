"""Ring attention: attention over a sequence sharded over devices (context parallelism)."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int, PRNGKeyArray

from jaxformer.functional.arguments import checked
from jaxformer.functional.attention_mask import AttentionMask, ScoreBias
from jaxformer.functional.blocks import KEY_SIDE, How, Unit, side
from jaxformer.functional.blockwise import (
    BLOCK,
    BY_BLOCKS,
    check_attention,
    each_unit,
    in_units,
    of_unit,
    out_of_units,
)
from jaxformer.functional.blockwise_gradient import gradient_of_unit, like
from jaxformer.functional.collectives import varies_over, varying
from jaxformer.functional.online_softmax import NOTHING
from jaxformer.functional.platforms import platform
from jaxformer.functional.scores import Normalizer, scaled

Partial = tuple[Float32[Array, "U G T Hv"], Float32[Array, "U G T"]]  # output and log-sum-exp


def ring_order(length: int, devices: int) -> Int[np.ndarray, " T"]:
    """Zigzag order of positions, which balances causal attention over devices.

        device i of d has parts i and 2 d - 1 - i of 2 d equal ones

    Where only earlier tokens are seen, an early part has little to attend to and a late one much;
    each device has one of either. In the given order, consecutive equal shares are those.

    Args:
        length: Tokens of the sequence.
        devices: That it is shared out among; 1 changes nothing.

    Returns:
        Positions, so that ``x[ring_order(len(x), devices)]`` is what devices share.

    Raises:
        ValueError: The length is no multiple of twice the devices.

    Example:
        >>> from jaxformer import functional as F
        >>> F.ring_order(8, 2)  # the first device has the first four
        array([0, 1, 6, 7, 2, 3, 4, 5])

    References:
        Grattafiori et al., The Llama 3 Herd of Models, 2024. arXiv:2407.21783, section 3.3.2
    """
    if devices == 1:
        return np.arange(length)
    if length % (2 * devices):
        raise ValueError(
            f"A sequence shared by {devices} devices has a multiple of {2 * devices} tokens; "
            f"got {length}."
        )
    parts = np.arange(length).reshape(2 * devices, -1)
    return np.concatenate([parts[[i, -1 - i]].ravel() for i in range(devices)])


@checked
def ring_attention(
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    value: Float[Array, "*batch S K Hv"],
    mask: AttentionMask | None = None,
    bias: ScoreBias | None = None,
    *,
    axis_name: str,
    scale: float | Float[Array, ""] | None = None,
    logit_softcap: float | None = None,
    normalizer: Normalizer = "softmax",
    dropout_rate: float = 0.0,
    dropout_key: PRNGKeyArray | None = None,
) -> Float[Array, "*batch T N Hv"]:
    """Ring attention: this device's queries attend to the keys of all devices along an axis.

        output_d, lse_d = `blockwise_attention` of query to the keys and values of device d
        output = sum over d of exp(lse_d - lse) output_d;      lse = logsumexp over d of lse_d

    Keys, values, their positions and segments go round the ring of devices, one step for each. The
    backward pass sends them round once more, with their gradients, and computes scores again, so a
    device keeps its own share and no more, and memory grows with the length of the sequence. Blocks
    in which the mask allows nothing are left out: with causal masks all devices have equal work if
    the sequence is shared out in `ring_order`. Forwards each step sends ``S * K * (H + Hv)``
    numbers per sequence to the next device, all together what an all-gather would; backwards it
    sends these and as many gradients in float32. Of one array that is key and value it sends one.

    Args:
        query: Queries of this device.
        key: Keys of this device.
        value: Values of this device.
        mask: Who may attend to whom, by positions and segments of this device's queries and keys.
        bias: Added to the scores after scale and cap; likewise.
        axis_name: Of the devices that share the sequence, inside `jax.shard_map` or `jax.pmap`.
        scale: As in `dot_product_attention`.
        logit_softcap: As in `dot_product_attention`.
        normalizer: As in `dot_product_attention`.
        dropout_rate: As in `dot_product_attention`.
        dropout_key: Randomness for dropout, the same on all devices; each draws its own from it.

    Returns:
        The mean values of each head for this device's queries, in the dtype of ``query``.

    Raises:
        ValueError: Shapes do not fit, or an option is out of its range.

    References:
        Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers for Near-Infinite
        Context, 2023. arXiv:2310.01889, section 3
    """
    check_attention(query, key, mask, bias, normalizer, logit_softcap, dropout_rate, dropout_key)
    query, scale = scaled(query, scale)
    how = How(
        scale=scale,
        logit_softcap=logit_softcap,
        normalizer=normalizer,
        dropout_rate=dropout_rate,
        block=(_block(query.shape[-3]), _block(key.shape[-3])),
        num_keys=key.shape[-3],
        wide=True,
    )
    if dropout_key is not None:
        dropout_key = jax.random.fold_in(dropout_key, jax.lax.axis_index(axis_name))
    units = in_units(how, query, key, value, mask, bias, dropout_key, axis_name)
    ring = Ring(how, axis_name, key.shape[-2], value is key)
    return out_of_units(_around(ring, units), query, key)


def _block(length: int) -> int:
    """Tile size such that, where the length allows, no tile spans both zigzag parts.

    For positions of both parts would say nothing of what lies between. A length that no such block
    divides well has blocks across.
    """
    most, part = min(BLOCK[platform()], length), length // 2 if length % 2 == 0 else length
    fitting = (n for n in range(min(most, part), most // 8, -1) if part % n == 0)
    return next(fitting, most)


class Ring(NamedTuple):
    """Static options of ring attention."""

    how: How
    axis_name: str
    num_kv_heads: int
    shared: bool  # whether keys are the values


def _travelling(ring: Ring, units: Unit) -> Any:
    """Return what the ring sends: keys, values, and one copy of the key positions."""
    places = jax.tree.map(lambda x: x[:: ring.num_kv_heads], side(units, KEY_SIDE))
    return units.key, None if ring.shared else units.value, places


def _meeting(ring: Ring, units: Unit, travelling: Any, owner: Int[Array, ""]) -> Unit:
    """Units of this device's queries and another one's keys."""
    key, value, places = travelling
    places = jax.tree.map(lambda x: jnp.repeat(x, ring.num_kv_heads, axis=0), places)
    both = {name: getattr(units, name)._replace(**at) for name, at in places.items()}
    if units.dropout_key is not None:
        both["dropout_key"] = jax.vmap(lambda k: jax.random.fold_in(k, owner))(units.dropout_key)
    return units._replace(key=key, value=key if ring.shared else value, **both)


def _next(axis_name: str, x: Any) -> Any:
    """Receive from the next device of the ring (ppermute by one)."""
    devices = jax.lax.axis_size(axis_name)
    return jax.lax.ppermute(x, axis_name, [(i, (i - 1) % devices) for i in range(devices)])


def _nothing(units: Unit) -> Partial:
    """What queries have that have met no key."""
    axes = varies_over(units.query)
    output = jnp.zeros((*units.query.shape[:-1], units.value.shape[-1]), jnp.float32)
    lse = jnp.full(units.query.shape[:-1], NOTHING, jnp.float32)
    return varying(output, *axes), varying(lse, *axes)


def _combined(a: Partial, b: Partial) -> Partial:
    """Combine outputs and log-sum-exps of two disjoint sets of keys."""
    (output, lse), (other, other_lse) = a, b
    peak = jnp.maximum(lse, other_lse)
    one, two = jnp.exp(lse - peak), jnp.exp(other_lse - peak)
    total = one + two
    mean = (one / total)[..., None] * output + (two / total)[..., None] * other
    return mean, peak + jnp.log(total)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _around(ring: Ring, units: Unit) -> Float32[Array, "U G T Hv"]:
    return _forward(ring, units)[0]


def _forward(ring: Ring, units: Unit) -> Any:
    here, devices = jax.lax.axis_index(ring.axis_name), jax.lax.axis_size(ring.axis_name)

    def meet(travelling: Any, owner: Array) -> Partial:
        return each_unit(of_unit, ring.how, _meeting(ring, units, travelling, owner))

    def step(carry: tuple[Partial, Any], number: Array) -> tuple[tuple[Partial, Any], None]:
        so_far, travelling = carry
        coming = _next(ring.axis_name, travelling)  # while this device works
        more = meet(travelling, (here + number) % devices)
        return (_combined(so_far, more), coming), None

    start = _nothing(units), _travelling(ring, units)
    (so_far, last), _ = jax.lax.scan(step, start, jnp.arange(devices - 1))
    found = _combined(so_far, meet(last, (here - 1) % devices))
    output, log_total = (checkpoint_name(x, BY_BLOCKS) for x in found)
    return output, (units, output, log_total)


def _backward(ring: Ring, kept: Any, given: Float32[Array, "U G T Hv"]) -> tuple[Unit]:
    """Backward ring: each device adds to the gradients of the keys and values that pass."""
    units, output, log_total = kept
    here, devices = jax.lax.axis_index(ring.axis_name), jax.lax.axis_size(ring.axis_name)

    def meet(travelling: Any, owner: Array) -> tuple[Any, Any]:
        """Gradients of query and bias (which stay) and of keys and values (which move on)."""
        meeting = _meeting(ring, units, travelling, owner)
        found = each_unit(gradient_of_unit, ring.how, meeting, output, log_total, given)
        both = (found.key + found.value,) if ring.shared else (found.key, found.value)
        return (found.query, found.bias), both

    def step(carry: Any, number: Array) -> tuple[Any, None]:
        own, travelling, others = carry
        coming, others = _next(ring.axis_name, (travelling, others))  # while this device works
        found = meet(travelling, (here + number) % devices)
        own, others = jax.tree.map(jnp.add, (own, others), found)
        return (own, coming, others), None

    travelling = _travelling(ring, units)
    own, others = meet(travelling, here)
    start = own, _next(ring.axis_name, travelling), others
    ((query, bias), _, others), _ = jax.lax.scan(step, start, jnp.arange(1, devices))
    key, value = (*_next(ring.axis_name, others), None)[:2]  # home
    if ring.shared:  # the keys have all of it
        value = varying(jnp.zeros_like(key), *varies_over(key))
    return (like(Unit(query, key, value, None, bias, None), units),)


_around.defvjp(_forward, _backward)
