"""Data-parallel train step under `jax.pmap`."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxformer.layers import Transformer
from jaxformer.training.gradient import AnyBatch, Objective, summed_loss
from jaxformer.training.skip_step import SkipStepConfig
from jaxformer.training.train_step import TrainState, apply_gradients

AXIS = "data"


def make_pmap_train_step(
    model: Transformer,
    optimizer: optax.GradientTransformation,
    *,
    objective: Objective = Objective(),
    skip_step: SkipStepConfig = SkipStepConfig(),
    seed: int = 0,
) -> Any:
    """Build a pmapped train step; the state is replicated.

    Under `pmap` each device differentiates its own share of the mean loss, devices times its sum
    over the tokens of all; the mean over devices comes after the gradient. Inside the loss, where
    `make_value_and_grad` takes it, it would make the gradient too large by the number of devices.

    Args:
        model: Applied with dropout on.
        optimizer: Any optax transformation.
        objective: As for `make_value_and_grad`.
        skip_step: As for `make_train_step`.
        seed: Of dropout; the key also depends on the step and the device.

    Returns:
        (state, batch) -> (state, metrics), where the arrays of the batch are [devices, rows, time].
        The state passed in is consumed. One that lies on every device before the first update,
        `jax.device_put(state, NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec()))`,
        is compiled for once; any other twice, since it comes back on every device.
    """

    def per_device(state: TrainState, batch: AnyBatch):
        num_tokens = jax.lax.psum(jnp.sum(batch.loss_mask), AXIS).astype(jnp.float32)
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        key = jax.random.fold_in(key, jax.lax.axis_index(AXIS))

        def loss_share(params: Any):
            local_sum = summed_loss(model, objective, params, batch, key, axis_names=(AXIS,))
            return local_sum * jax.lax.axis_size(AXIS) / jnp.maximum(num_tokens, 1)

        loss, gradients = jax.lax.pmean(jax.value_and_grad(loss_share)(state.params), AXIS)
        norm = optax.tree.norm(gradients)
        return apply_gradients(optimizer, skip_step, state, loss, gradients, norm)

    return jax.pmap(per_device, axis_name=AXIS, in_axes=(None, 0), out_axes=None, donate_argnums=0)
