"""Sharded loss and gradient of a batch, with gradient accumulation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxformer import functional as F
from jaxformer.checks import Checked, NotNegative, Positive, Rate
from jaxformer.config import Stack, TransformerConfig
from jaxformer.data.batches import Batch
from jaxformer.data.pairs import PairBatch
from jaxformer.data.preferences import PreferenceBatch
from jaxformer.functional.attention.cudnn import switch_on_segments
from jaxformer.layers import Transformer
from jaxformer.layers.layouts import layout_of, segments_of
from jaxformer.layers.lora import join_parameters, split_parameters
from jaxformer.parallel import active_mesh_axes, batch_spec, parameter_specs, token_axes

AnyBatch = Batch | PairBatch | PreferenceBatch
# The gradient of a selection bias is this times (load of the expert / mean load - 1): so small that
# it does not count in the norm of all gradients. The optimizer uses its sign.
LOAD_GRADIENT = 1e-20


@dataclass(frozen=True, kw_only=True)
class Objective(Checked):
    """Weights of the auxiliary losses beside cross-entropy.

    Attributes:
        z_loss: Weight of the squared log of the softmax denominator.
        label_smoothing: Fraction of the target's probability that is spread over the vocabulary.
        load_balance: Weight of the load-balancing loss, a mean over the MoE layers.
        router_z_loss: The same of the routers' softmax, averaged over the MoE layers.
        multi_token: Weight of the loss of the token after the next, of a model with
            `multi_token_prediction`.
    """

    z_loss: NotNegative = 0.0
    label_smoothing: Rate = 0.0
    load_balance: NotNegative = 0.01
    router_z_loss: NotNegative = 0.001
    multi_token: NotNegative = 0.3


@dataclass(frozen=True, kw_only=True)
class DPO(Objective):
    """Direct preference optimization, `F.dpo_loss`, of a `PreferenceBatch`.

    Attributes:
        beta: Strength with which the model is held to the reference.

    References:
        Rafailov et al., Direct Preference Optimization: Your Language Model is Secretly a Reward
        Model, 2023. arXiv:2305.18290
    """

    beta: Positive = 0.1

    def __post_init__(self):
        super().__post_init__()
        for name in ("z_loss", "label_smoothing"):
            if value := getattr(self, name):
                raise ValueError(f"DPO has no {name}; got {value}.")


def apply_model(batch: Batch | PairBatch, model: Transformer, params: Any, **options: Any) -> Any:
    """Apply the model to a batch: logits, or token scores if targets are given."""
    inputs: dict[str, Any]
    if isinstance(batch, PairBatch):
        inputs = dict(source=batch.source, source_segments=batch.source_segments)
    else:
        inputs = dict(positions=batch.positions, segments=batch.segments, contiguous_positions=True)
    return model.apply({"params": params}, batch.tokens, **inputs, **options)


def all_rows(batch: AnyBatch) -> Batch | PairBatch:
    """Rows of a batch: of preferences first the chosen ones, then the rejected ones."""
    if isinstance(batch, PreferenceBatch):
        return jax.tree.map(lambda *x: jnp.concatenate(x), batch.chosen, batch.rejected)
    return batch


def summed_loss(
    model: Transformer,
    objective: Objective,
    params: Any,
    batch: AnyBatch,
    key: PRNGKeyArray,
    *,
    axis_names: tuple[str, ...],
) -> Float[Array, ""]:
    """Sum of the losses of tokens, or of pairs of answers, on this device, with dropout.

    `axis_names` are the mesh axes that shard the tokens; routers balance their load over all.
    """
    if isinstance(batch, PreferenceBatch) != isinstance(objective, DPO):
        raise ValueError(
            f"DPO and PreferenceBatch belong together; got {type(objective).__name__} and "
            f"{type(batch).__name__}."
        )
    rows = all_rows(batch)
    options = dict(deterministic=False, rngs={"dropout": key})
    losses, outputs = token_losses(model, objective, params, rows, **options)
    if isinstance(batch, PreferenceBatch) and isinstance(objective, DPO):
        reference = jnp.concatenate([batch.chosen_reference, batch.rejected_reference])
        log_ratio = jnp.sum(jnp.where(rows.loss_mask, -losses - reference, 0.0), axis=-1)
        if (context := model.mesh_axes.context) is not None:
            # Each of these devices counts the pair, here and in `loss_weight`.
            log_ratio = F.pvary(jax.lax.psum(log_ratio, context), context)
        loss_sum = jnp.sum(F.dpo_loss(*jnp.split(log_ratio, 2), beta=objective.beta))
    else:
        loss_sum = jnp.sum(jnp.where(rows.loss_mask, losses, 0.0))
    weight = loss_weight(batch).astype(jnp.float32)
    arguments = objective, rows, axis_names
    loss_sum += weight * router_losses(model.config, params, outputs, *arguments)
    predicts = model.config.multi_token_prediction and objective.multi_token > 0
    if not predicts or isinstance(objective, DPO) or isinstance(rows, PairBatch):
        return loss_sum
    rows, (hidden,) = rows_ahead(rows, model.mesh_axes.context), outputs["hidden"]["last"]
    losses, outputs = token_losses(model, objective, params, rows, hidden=hidden, **options)
    loss_sum += objective.multi_token * jnp.sum(jnp.where(rows.loss_mask, losses, 0.0))
    name, config = "multi_token_prediction", model.config.multi_token_model
    outputs = {"router": outputs.get("router", {}).get(name, {})}
    return loss_sum + weight * router_losses(config, params[name], outputs, *arguments)


def token_losses(
    model: Transformer, objective: Objective, params: Any, rows: Any, **options: Any
) -> tuple[Float[Array, "B T"], dict[str, Any]]:
    """Cross-entropy of each target, and what routers and the last layer gave."""
    targets = jnp.asarray(rows.targets)
    options["mutable"] = ["router", "hidden"]
    scores, outputs = apply_model(rows, model, params, targets=targets, **options)
    smoothing = dict(z_loss=objective.z_loss, label_smoothing=objective.label_smoothing)
    return F.cross_entropy_from_statistics(scores, **smoothing), outputs


def rows_ahead(rows: Batch, context: str | None) -> Batch:
    """The rows with each token's next one as the input, and the token after it as the target."""
    if context is not None:
        raise ValueError(
            "multi_token_prediction reads the next token of each, which may be on another device "
            "of the context axis; use a mesh with context=1, or Objective(multi_token=0)."
        )

    def next_of(x: Any) -> Any:
        return jnp.pad(x[:, 1:], ((0, 0), (0, 1)))

    same_document = next_of(rows.segments) == rows.segments
    return rows._replace(
        tokens=rows.targets,
        targets=next_of(rows.targets),
        loss_mask=next_of(rows.loss_mask) & same_document,
    )


def loss_weight(batch: AnyBatch) -> Int[Array, ""]:
    """Number of losses on this device: tokens of the loss mask, or pairs of answers."""
    if isinstance(batch, PreferenceBatch):
        return jnp.int32(len(batch.chosen.tokens))
    return jnp.sum(batch.loss_mask)


def router_losses(
    config: TransformerConfig,
    params: Any,
    outputs: dict[str, Any],
    objective: Objective,
    batch: Batch | PairBatch,
    axis_names: tuple[str, ...],
) -> Float[Array, ""]:
    """Mean over MoE layers of the weighted load-balancing and z losses.

    A selection bias gets the relative load of each expert as its gradient; see `LOAD_GRADIENT`.
    """
    losses, load = [], jnp.zeros(())
    parameters = flatten_dict(params, sep="/")
    outputs = flatten_dict(outputs.get("router", {}), sep="/")
    invocations = [
        (path, *values)
        for path in outputs
        if path.endswith("/logits")
        for values in zip(outputs[path], outputs[path[:-6] + "expert_ids"], strict=True)
    ]
    for path, logits, expert_ids in invocations:
        names = path.split("/")
        layer = next(name for name in names if name.startswith("layer_"))
        stack: Stack = "encoder" if "encoder" in names else "decoder"
        segments = segments_of(config, stack, layout_of(params))
        group = segments.groups()[names[names.index(layer) - 1]]
        index = group[int(layer.removeprefix("layer_"))]
        feed_forward: Any = config.stacks[stack][index].feed_forward
        mask = batch.loss_mask
        if isinstance(batch, PairBatch) and "encoder" in names:
            mask = batch.source_segments > 0
        local_totals = F.router_totals(
            logits, expert_ids, score=feed_forward.router.score, mask=jnp.asarray(mask)
        )
        # One by one: up to JAX 0.7, a sum of several has no transpose if some have no gradient.
        totals = jax.tree.map(lambda x: jax.lax.psum(x, axis_names), local_totals)
        balance, square = F.load_balance_loss(totals), F.router_z_loss(totals)
        losses.append(objective.load_balance * balance + objective.router_z_loss * square)
        if feed_forward.router.selection_bias:
            path = path.removesuffix("logits")
            load += _load_as_gradient(parameters[f"{path}selection_bias"], totals.expert_counts)
    if not losses:
        return load
    return load + jnp.mean(jnp.concatenate([jnp.ravel(x) for x in losses]))


def _load_as_gradient(
    bias: Float[Array, "*layers E"], expert_counts: Float[Array, "*layers E"]
) -> Float[Array, ""]:
    """0, with the relative load of each expert, less 1, times `LOAD_GRADIENT` as the gradient."""
    mean = jnp.maximum(jnp.mean(expert_counts, axis=-1, keepdims=True), 1)
    excess = jax.lax.stop_gradient(expert_counts / mean - 1) * LOAD_GRADIENT
    return jnp.sum(excess * (bias - jax.lax.stop_gradient(bias)))


def make_value_and_grad(
    model: Transformer,
    mesh: Mesh,
    *,
    objective: Objective = Objective(),
    gradient_accumulation_steps: int = 1,
    seed: int = 0,
) -> Callable[[Any, Any, Int[Array, ""], AnyBatch], tuple[Float[Array, ""], Any]]:
    """Build a sharded (trained, frozen, step, batch) -> (mean loss, gradients of `trained`).

    The mean is over the tokens of the loss mask, or the pairs of answers, in the whole batch, over
    all devices and microbatches, so without dropout neither changes the result beyond rounding. It
    is taken inside the loss, before the gradient. There are two exceptions: the load of experts is
    balanced within each microbatch, and with `expert_capacity_factor` the mesh determines which
    tokens are dropped.

    Args:
        model: Applied with dropout; its mesh axes are set here.
        mesh: From `parallel.make_mesh`.
        objective: Auxiliary losses, or `DPO`.
        gradient_accumulation_steps: Number of microbatches of a device's rows, to save memory.
        seed: Seed of dropout; the key also depends on the step, the device and the microbatch.

    Returns:
        The function, of the trees of `split_parameters`. Gradients are float32 and sharded as the
        parameters are; gradients of replicated parameters are summed over the devices once, after
        the last microbatch.
    """
    model, axis_names = model.clone(mesh_axes=active_mesh_axes(mesh.shape)), token_axes(mesh.shape)

    def per_device(specs: Any, trained: Any, frozen: Any, step: Int[Array, ""], batch: AnyBatch):
        num_losses = jax.lax.psum(loss_weight(batch), axis_names).astype(jnp.float32)
        key = jax.random.fold_in(jax.random.key(seed), step)
        key = jax.random.fold_in(key, jax.lax.axis_index(axis_names))
        trained, frozen = jax.tree.map(lambda x: F.pvary(x, *axis_names), (trained, frozen))

        def microbatch_step(carry, indexed):
            index, rows = indexed

            def loss(trained, max_segments: int | None):
                params = join_parameters(frozen, trained)
                options: Any = dict(key=jax.random.fold_in(key, index), axis_names=axis_names)
                bounded_model = model.clone(max_segments=max_segments or model.max_segments)
                local_sum = summed_loss(bounded_model, objective, params, rows, **options)
                return jax.lax.psum(local_sum, axis_names) / jnp.maximum(num_losses, 1)

            loss_and_gradients = partial(jax.value_and_grad(loss), trained)

            segments = None if model.max_segments else getattr(all_rows(rows), "segments", None)
            causal = model.config.topology.has_decoder
            sums = switch_on_segments(loss_and_gradients, segments, axis_names, causal=causal)
            return jax.tree.map(jnp.add, carry, sums), None

        zeros = jax.tree.map(lambda x: F.pvary_like(jnp.zeros_like(x), x), trained)
        zero_carry = (jnp.zeros(()), zeros)
        if gradient_accumulation_steps == 1:
            (loss, gradients), _ = microbatch_step(zero_carry, (0, batch))
        else:
            split = partial(_split_rows, gradient_accumulation_steps)
            indexed = jnp.arange(gradient_accumulation_steps), jax.tree.map(split, batch)
            (loss, gradients), _ = jax.lax.scan(microbatch_step, zero_carry, indexed)
        sum_over_replicas = partial(_sum_over_replicas, axis_names)
        return loss, jax.tree.map(sum_over_replicas, gradients, specs)

    def value_and_grad(trained: Any, frozen: Any, step: Int[Array, ""], batch: AnyBatch):
        layout = layout_of(join_parameters(frozen, trained))
        specs = parameter_specs(model.config, mesh.shape, layout)
        frozen_specs, trained_specs = split_parameters(model.config.adapter, specs)
        return jax.shard_map(
            lambda *inputs: per_device(trained_specs, *inputs),
            mesh=mesh,
            in_specs=(trained_specs, frozen_specs, P(), batch_spec(mesh.shape)),
            out_specs=(P(), trained_specs),
        )(trained, frozen, step, batch)

    return value_and_grad


def _split_rows(count: int, rows: Array) -> Array:
    """Split rows into `count` microbatches; each has every `count`-th row."""
    return jnp.moveaxis(rows.reshape(-1, count, *rows.shape[1:]), 1, 0)


def _sum_over_replicas(axis_names: tuple[str, ...], gradient: Array, spec: P) -> Array:
    """Sum a gradient over the mesh axes that do not shard it."""
    replica_axes = tuple(axis for axis in axis_names if axis not in spec)
    return jax.lax.psum(gradient, replica_axes) if replica_axes else gradient


def make_global_norm(model: Transformer, mesh: Mesh) -> Callable[[Any], Float[Array, ""]]:
    """Build the global gradient norm of sharded gradients."""
    specs = split_parameters(model.config.adapter, parameter_specs(model.config, mesh.shape))

    def per_device(gradients: Any) -> Float[Array, ""]:
        squares: dict[tuple[str, ...], Array] = {}
        for g, spec in zip(jax.tree.leaves(gradients), jax.tree.leaves(specs.trained), strict=True):
            axes = tuple(sorted(axis for axis in spec if axis is not None))
            squares[axes] = squares.get(axes, jnp.zeros(())) + jnp.sum(jnp.square(g))
        sums = (jax.lax.psum(x, axes) if axes else x for axes, x in squares.items())
        return jnp.sqrt(sum(sums, start=jnp.zeros(())))

    return jax.shard_map(per_device, mesh=mesh, in_specs=(specs.trained,), out_specs=P())
