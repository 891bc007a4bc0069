"""Train state, train step and eval step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxformer import functional as F
from jaxformer.data import Batch, PairBatch
from jaxformer.layers import Transformer
from jaxformer.layers.layouts import arrange_layers, layout_of
from jaxformer.layers.lora import cast_frozen, is_adapter, join_parameters, split_parameters
from jaxformer.layers.parameter_metadata import check_parameters, parameter_metadata
from jaxformer.parallel import (
    active_mesh_axes,
    batch_spec,
    check_divisible,
    overlap_compiler_options,
    parameter_shardings,
    parameter_specs,
    replicated,
    shardings,
    state_specs,
    token_axes,
)
from jaxformer.training.gradient import (
    LOAD_GRADIENT,
    AnyBatch,
    Objective,
    apply_model,
    make_global_norm,
    make_value_and_grad,
)
from jaxformer.training.skip_step import (
    SkipState,
    SkipStepConfig,
    init_skip_state,
    should_apply_update,
)


class TrainState(NamedTuple):
    """State of training.

    Attributes:
        step: Number of batches used.
        frozen: Parameters that do not change; {} without an adapter.
        trained: Parameters that the optimizer changes, in float32.
        opt_state: State of the optimizer, of the trained parameters.
        skip_state: State of the rule that skips updates.
    """

    step: Int[Array, ""]
    frozen: Any
    trained: Any
    opt_state: optax.OptState
    skip_state: SkipState

    @property
    def params(self) -> Any:
        """All parameters of the model, in one tree."""
        return join_parameters(self.frozen, self.trained)


class StepMetrics(NamedTuple):
    """Metrics of one train step.

    Attributes:
        loss: Mean loss over the tokens of the loss mask, or over the pairs of answers.
        gradient_norm: Global gradient norm before clipping.
        num_skipped: Number of updates skipped so far.
        num_consecutive_skips: Number of updates skipped since the last applied one.
        max_expert_load: Largest load of an expert in any layer, relative to the mean of the layer;
            None without selection biases.
    """

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    num_skipped: Int[Array, ""]
    num_consecutive_skips: Int[Array, ""]
    max_expert_load: Float[Array, ""] | None = None


class EvalSums(NamedTuple):
    """Summed negative log-likelihood (nats) and token count."""

    nll_sum: Float[Array, ""]
    num_tokens: Int[Array, ""]


def init_train_state(
    model: Transformer,
    optimizer: optax.GradientTransformation,
    key: PRNGKeyArray,
    mesh: Mesh,
    *,
    params: Any = None,
) -> TrainState:
    """Initialize parameters and optimizer state, sharded, in one jitted program.

    The values do not depend on the mesh; each device generates only its shards.

    Args:
        model: The model.
        optimizer: From `make_optimizer`.
        key: Random key of the parameters.
        mesh: Device mesh.
        params: Parameters to use instead of random ones, with any sharding and either layout of
            layers, which are stacked one array at a time; donated. Adapters may be missing.

    Raises:
        ValueError: The parameters do not match the model, or it does not divide over the mesh.
    """
    check_divisible(model.config, mesh.shape)
    state_shardings = shardings(abstract_train_state(model, optimizer, mesh))
    init = jax.jit(
        _init_state, static_argnums=(0, 1), out_shardings=state_shardings, donate_argnames="params"
    )
    if params is None:
        return init(model, optimizer, key)
    config = model.config
    if not any(map(is_adapter, flatten_dict(params, sep="/"))):
        config = replace(config, adapter=None)
    check_parameters(config, params)
    params = arrange_layers(config, params, "stacked", donate=True)
    param_shardings = parameter_shardings(config, mesh)
    return init(model, optimizer, key, params=jax.device_put(params, param_shardings, donate=True))


def abstract_train_state(
    model: Transformer, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """ShapeDtypeStructs with shardings of the train state, to restore into."""
    # Unlike `jax.eval_shape`, this traces once per model and optimizer.
    traced = jax.jit(_init_state, static_argnums=(0, 1))
    shapes = traced.eval_shape(model, optimizer, jax.random.key(0))
    specs = state_specs(shapes, shapes.params, parameter_specs(model.config, mesh.shape))
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        shapes,
        specs,
    )


def _init_state(
    model: Transformer,
    optimizer: optax.GradientTransformation,
    key: PRNGKeyArray,
    *,
    params: Any = None,
) -> TrainState:
    dummy_tokens = jnp.zeros((1, 2), jnp.int32)
    has_source = model.config.topology.is_encoder_decoder
    source = dummy_tokens if has_source else None
    if params is None:
        params = model.init(key, dummy_tokens, source=source)["params"]
    elif model.config.adapter is not None:  # adapters that the parameters lack
        _, variables = model.apply(
            {"params": params}, dummy_tokens, source=source, mutable="params", rngs={"params": key}
        )
        params = variables["params"]
    adapter = model.config.adapter
    frozen, trained = split_parameters(adapter, cast_frozen(adapter, params))
    step, opt_state = jnp.zeros((), jnp.int32), optimizer.init(trained)
    return TrainState(step, frozen, trained, opt_state, init_skip_state())


def make_train_step(
    model: Transformer,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    objective: Objective = Objective(),
    skip_step: SkipStepConfig = SkipStepConfig(),
    gradient_accumulation_steps: int = 1,
    seed: int = 0,
    overlap_collectives: bool = True,
) -> Any:
    """Build the jitted train step.

    The optimizer works on global, sharded arrays, so on every mesh norms and matrix updates use
    whole gradients, and elementwise rules need no communication.

    Args:
        model: Applied with dropout; its mesh axes are set here.
        optimizer: Any optax transformation.
        mesh: From `parallel.make_mesh`.
        objective: As for `make_value_and_grad`.
        skip_step: Which updates are skipped.
        gradient_accumulation_steps: As for `make_value_and_grad`.
        seed: As for `make_value_and_grad`.
        overlap_collectives: Whether collectives overlap with compute, by
            `parallel.overlap_compiler_options`.

    Returns:
        (state, batch) -> (state, metrics). The state is donated.
    """
    value_and_grad = make_value_and_grad(
        model,
        mesh,
        objective=objective,
        gradient_accumulation_steps=gradient_accumulation_steps,
        seed=seed,
    )
    global_norm = make_global_norm(model, mesh)

    def train_step(state: TrainState, batch: AnyBatch):
        loss, gradients = value_and_grad(state.trained, state.frozen, state.step, batch)
        with jax.named_scope("gradient_norm"):
            norm = global_norm(gradients)
        with jax.named_scope("optimizer"):
            state, metrics = apply_gradients(
                optimizer, skip_step, state, loss, gradients, norm, mesh
            )
        return state, metrics._replace(max_expert_load=max_expert_load(model, gradients))

    state_shardings = shardings(abstract_train_state(model, optimizer, mesh))
    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(state_shardings, replicated(mesh)),
        compiler_options=overlap_compiler_options(mesh) if overlap_collectives else {},
    )


def max_expert_load(model: Transformer, gradients: Any) -> Float[Array, ""] | None:
    """`StepMetrics.max_expert_load`, from the gradients of selection biases."""
    metadata = split_parameters(model.config.adapter, parameter_metadata(model.config))
    leaves = zip(jax.tree.leaves(gradients), jax.tree.leaves(metadata.trained), strict=True)
    loads = [jnp.max(g) for g, x in leaves if x.role == "selection_bias"]
    return 1 + jnp.max(jnp.stack(loads)) / LOAD_GRADIENT if loads else None


def apply_gradients(
    optimizer: optax.GradientTransformation,
    skip_step: SkipStepConfig,
    state: TrainState,
    loss: Float[Array, ""],
    gradients: Any,
    norm: Float[Array, ""],
    mesh: Mesh | None = None,
) -> tuple[TrainState, StepMetrics]:
    """Apply the optimizer, or skip the update and advance only the counters."""
    apply_update, skip_state = should_apply_update(skip_step, state.skip_state, loss, norm)
    updates, opt_state = optax.with_extra_args_support(optimizer).update(
        gradients, state.opt_state, state.trained, gradient_norm=norm, mesh=mesh
    )
    new_values = optax.apply_updates(state.trained, updates), opt_state
    old_values = state.trained, state.opt_state
    choose = partial(jnp.where, apply_update)  # the new values, or the old ones
    trained, opt_state = jax.tree.map(choose, new_values, old_values)
    metrics = StepMetrics(loss, norm, skip_state.num_skipped, skip_state.num_consecutive_skips)
    return TrainState(state.step + 1, state.frozen, trained, opt_state, skip_state), metrics


def make_log_likelihood_step(
    model: Transformer, mesh: Mesh
) -> Callable[[Any, Batch], Float[Array, "B T"]]:
    """Build the jitted (params, batch) -> log-likelihood of each target, 0 without loss.

    The result is in the order of the rows' tokens, and replicated.
    """
    model, spec = model.clone(mesh_axes=active_mesh_axes(mesh.shape)), batch_spec(mesh.shape)

    def per_device(params: Any, batch: Batch) -> Float[Array, "B T"]:
        scores = apply_model(batch, model, params, targets=jnp.asarray(batch.targets))
        return jnp.where(batch.loss_mask, -F.cross_entropy_from_statistics(scores), 0.0)

    def log_likelihoods(params: Any, batch: Batch) -> Float[Array, "B T"]:
        specs = parameter_specs(model.config, mesh.shape, layout_of(params)), spec
        permuted = jax.shard_map(per_device, mesh=mesh, in_specs=specs, out_specs=spec)
        order = F.zigzag_order(batch.tokens.shape[1], mesh.shape.get("context", 1))
        return permuted(params, batch)[:, np.argsort(order)]

    return jax.jit(log_likelihoods, out_shardings=replicated(mesh))


def make_eval_step(model: Transformer, mesh: Mesh) -> Callable[[Any, Batch | PairBatch], EvalSums]:
    """Build the jitted eval step: (params, batch) -> summed loss and token count."""
    model, axis_names = model.clone(mesh_axes=active_mesh_axes(mesh.shape)), token_axes(mesh.shape)

    def per_device(params: Any, batch: Batch | PairBatch) -> EvalSums:
        scores = apply_model(batch, model, params, targets=jnp.asarray(batch.targets))
        losses = F.cross_entropy_from_statistics(scores)
        sums = EvalSums(jnp.sum(jnp.where(batch.loss_mask, losses, 0.0)), jnp.sum(batch.loss_mask))
        return jax.lax.psum(sums, axis_names)

    @jax.jit
    def summed_losses(params: Any, batch: Batch | PairBatch) -> EvalSums:
        param_specs = parameter_specs(model.config, mesh.shape, layout_of(params))
        specs = param_specs, batch_spec(mesh.shape)
        return jax.shard_map(per_device, mesh=mesh, in_specs=specs, out_specs=P())(params, batch)

    return summed_losses
