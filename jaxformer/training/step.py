"""One update of the parameters, as a program for every device of a mesh."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxformer import functional as F
from jaxformer.config import EncoderDecoder, Experts, TransformerConfig
from jaxformer.data.batches import Batch
from jaxformer.data.pairs import PairBatch
from jaxformer.layers import Transformer

AXIS = "data"
AnyBatch = Batch | PairBatch
Rows = TypeVar("Rows", bound=AnyBatch)


class TrainState(NamedTuple):
    """Everything an update reads and writes. `step` counts the updates made."""

    step: Int[Array, ""]
    params: Any
    opt_state: optax.OptState


class StepMetrics(NamedTuple):
    """What one update reports: mean loss over the tokens that count, and the gradient's norm."""

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]


class Tally(NamedTuple):
    """Sum of the negative log-likelihoods in nats, and over how many tokens."""

    nats: Float[Array, ""]
    tokens: Int[Array, ""]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What training minimises beside the cross-entropy.

    Attributes:
        z_loss: Weight of the squared log of the softmax's denominator.
        label_smoothing: Share of the target's probability that is spread over the vocabulary.
        load_balance: Weight of how unevenly experts are chosen, the mean over their layers.
        router_z_loss: Weight of the squared log of the routers' denominator, likewise.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    load_balance: float = 0.01
    router_z_loss: float = 0.001

    def __post_init__(self):
        for name in ("z_loss", "load_balance", "router_z_loss"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative; got {getattr(self, name)}.")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1); got {self.label_smoothing}.")


def data_mesh(num_devices: int | None = None) -> Mesh:
    """A mesh of one axis, "data", over the first `num_devices` devices (None: all)."""
    devices = jax.devices()
    count = len(devices) if num_devices is None else num_devices
    if not 1 <= count <= len(devices):
        raise ValueError(f"Asked for {count} devices; this machine has {len(devices)}.")
    return Mesh(np.asarray(devices[:count]), (AXIS,), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device."""
    return NamedSharding(mesh, P())


def put_batch(batch: Rows, mesh: Mesh) -> Rows:
    """Each device its share of the rows."""
    return jax.device_put(batch, NamedSharding(mesh, P(AXIS)))


def check_batch_size(batch_size: int, mesh: Mesh, accumulation: int = 1) -> None:
    """Refuse a batch that does not split evenly over devices and accumulated parts."""
    parts = mesh.size * accumulation
    if batch_size % parts:
        raise ValueError(
            f"batch_size {batch_size} must be a multiple of devices x accumulation = "
            f"{mesh.size} x {accumulation} = {parts}."
        )


def init_state(
    model: Transformer, optimizer: optax.GradientTransformation, key: PRNGKeyArray, mesh: Mesh
) -> TrainState:
    """Fresh parameters and optimizer state, drawn in one compiled program."""
    start = partial(_start, model, optimizer)
    return jax.jit(start, out_shardings=replicated(mesh))(key)


def abstract_state(
    model: Transformer, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Shapes, dtypes and places of the state, without its numbers: what to restore into."""
    shapes = jax.eval_shape(partial(_start, model, optimizer), jax.random.key(0))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)), shapes
    )


def _start(
    model: Transformer, optimizer: optax.GradientTransformation, key: PRNGKeyArray
) -> TrainState:
    blank = jnp.zeros((1, 2), jnp.int32)
    reads = isinstance(model.config.topology, EncoderDecoder)
    params = model.init(key, blank, source=blank if reads else None)["params"]
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def apply_to(batch: AnyBatch, model: Transformer, params: Any, **options: Any) -> Any:
    """Logits of a batch."""
    inputs: dict[str, Any]
    match batch:
        case PairBatch():
            inputs = {"source": batch.source, "source_segments": batch.source_segments}
        case Batch():
            inputs = {"positions": batch.positions, "segments": batch.segments}
    return model.apply({"params": params}, batch.tokens, **inputs, **options)


def total_loss(
    model: Transformer,
    objective: Objective,
    params: Any,
    batch: AnyBatch,
    key: PRNGKeyArray,
) -> Float[Array, ""]:
    """Sum of the losses of the tokens that count, dropout on; runs over the axis "data"."""
    logits, said = apply_to(
        batch, model, params, deterministic=False, rngs={"dropout": key}, mutable=["router"]
    )
    losses = F.token_cross_entropy(
        logits,
        jnp.asarray(batch.targets),
        z_loss=objective.z_loss,
        label_smoothing=objective.label_smoothing,
    )
    total = jnp.sum(jnp.where(batch.mask, losses, 0.0))
    tokens = jnp.sum(batch.mask).astype(jnp.float32)
    return total + tokens * router_loss(model.config, objective, said, batch)


def router_loss(
    config: TransformerConfig, objective: Objective, said: dict[str, Any], batch: AnyBatch
) -> Float[Array, ""]:
    """The weighted losses of the routers, each over the tokens of all devices, then their mean."""
    losses = []
    for path, logits in jax.tree_util.tree_leaves_with_path(said):
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        layer = next(name for name in names if name.startswith("layer_"))
        stack = config.encoder if "encoder" in names else config
        choice = stack.layer(int(layer.removeprefix("layer_"))).feed_forward
        if not isinstance(choice, Experts):
            continue
        mask = batch.mask
        if isinstance(batch, PairBatch) and "encoder" in names:
            mask = batch.source_segments > 0
        here = F.router_totals(logits, top_k=choice.top_k, mask=jnp.asarray(mask))
        totals = jax.lax.psum(here, AXIS)
        balance, square = F.load_balance_loss(totals), F.router_z_loss(totals)
        losses.append(objective.load_balance * balance + objective.router_z_loss * square)
    return jnp.mean(jnp.concatenate([jnp.ravel(x) for x in losses])) if losses else jnp.zeros(())


def make_update(
    model: Transformer,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    objective: Objective = Objective(),
    accumulation: int = 1,
    seed: int = 0,
) -> Any:
    """Build the jitted update: gradient of the mean loss over all devices, then the optimizer.

    The mean is over the tokens that count in the whole batch, whatever device or accumulated part
    they are in, so without dropout neither changes the result beyond rounding. It is taken inside
    the loss, before the gradient: parameters are the same on every device, so JAX sums their
    gradient itself. One thing depends on the accumulation: the load of experts is balanced within
    each part.

    Args:
        model: Applied with dropout on.
        optimizer: An optax transformation.
        mesh: With the axis "data", over which the rows of the batch are split.
        objective: Terms beside the cross-entropy.
        accumulation: In how many parts a device's rows are worked through, to save memory.
        seed: Of dropout; the key also depends on the step, the device and the part.

    Returns:
        (state, batch) -> (state, metrics). The state passed in is consumed.
    """

    def gradient(state: TrainState, batch: AnyBatch):
        tokens = jax.lax.psum(jnp.sum(batch.mask), AXIS).astype(jnp.float32)
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        key = jax.random.fold_in(key, jax.lax.axis_index(AXIS))

        def part(carry, indexed):
            index, rows = indexed

            def loss(params):
                part_key = jax.random.fold_in(key, index)
                total = total_loss(model, objective, params, rows, part_key)
                return jax.lax.psum(total, AXIS) / jnp.maximum(tokens, 1)

            return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss)(state.params)), None

        def split(rows):
            return rows.reshape(accumulation, -1, *rows.shape[1:])

        start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
        if accumulation == 1:
            return part(start, (0, batch))[0]
        parts = (jnp.arange(accumulation), jax.tree.map(split, batch))
        return jax.lax.scan(part, start, parts)[0]

    def per_device(state: TrainState, batch: AnyBatch):
        loss, gradients = gradient(state, batch)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = StepMetrics(loss, optax.tree.norm(gradients))
        return TrainState(state.step + 1, params, opt_state), metrics

    sharded = jax.shard_map(per_device, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P())
    return jax.jit(sharded, donate_argnums=0)


def make_tally(model: Transformer, mesh: Mesh) -> Callable[[Any, AnyBatch], Tally]:
    """Build the jitted evaluation: (params, batch) -> nats and tokens, summed over devices."""

    def per_device(params: Any, batch: AnyBatch) -> Tally:
        losses = F.token_cross_entropy(apply_to(batch, model, params), jnp.asarray(batch.targets))
        tally = Tally(jnp.sum(jnp.where(batch.mask, losses, 0.0)), jnp.sum(batch.mask))
        return jax.lax.psum(tally, AXIS)

    return jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P()))
