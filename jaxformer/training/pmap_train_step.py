"""Data-parallel train step under `jax.pmap`."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxformer.layers import Transformer
from jaxformer.layers.lora import join_parameters
from jaxformer.training.gradient import AnyBatch, Objective, loss_weight, summed_loss
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

    Each device differentiates its summed loss times the number of devices, divided by the number of
    tokens of all devices; the mean over devices is taken after the gradient. Inside the loss, as in
    `make_value_and_grad`, `pmap` would make the gradient too large by the number of devices.

    Args:
        model: Applied with dropout.
        optimizer: Any optax transformation.
        objective: As for `make_value_and_grad`.
        skip_step: As for `make_train_step`.
        seed: Seed of dropout; the key also depends on the step and the device.

    Returns:
        (state, batch) -> (state, metrics), where the arrays of the batch are [devices, rows, time].
        The state is donated. To compile once instead of twice, replicate it before the first step:
        `jax.device_put(state, NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec()))`.
    """

    def per_device(state: TrainState, batch: AnyBatch):
        num_losses = jax.lax.psum(loss_weight(batch), AXIS).astype(jnp.float32)
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        key = jax.random.fold_in(key, jax.lax.axis_index(AXIS))

        def loss_share(trained: Any):
            params = join_parameters(state.frozen, trained)
            local_sum = summed_loss(model, objective, params, batch, key, axis_names=(AXIS,))
            return local_sum * jax.lax.axis_size(AXIS) / jnp.maximum(num_losses, 1)

        loss, gradients = jax.lax.pmean(jax.value_and_grad(loss_share)(state.trained), AXIS)
        norm = optax.tree.norm(gradients)
        return apply_gradients(optimizer, skip_step, state, loss, gradients, norm)

    return jax.pmap(per_device, axis_name=AXIS, in_axes=(None, 0), out_axes=None, donate_argnums=0)
