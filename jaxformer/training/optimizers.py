"""Optimizer configurations as frozen dataclasses, built into `optax` transformations.

    gradient -> clip by global norm -> optimizer -> + weight_decay * parameter -> * -learning_rate

Weight decay is decoupled: it never enters the optimizer's statistics. Arithmetic and state are
float32; updates come back in the dtype of the parameters.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxformer import functional as F
from jaxformer.checks import Checked, NotNegative, Positive, Rate
from jaxformer.layers.parameter_metadata import ParameterRole
from jaxformer.training.adafactor import scale_by_adafactor
from jaxformer.training.muon import scale_by_muon
from jaxformer.training.schedules import Schedule, make_schedule


@dataclass(frozen=True, kw_only=True)
class AdamW(Checked):
    """Adam with decoupled weight decay.

    Attributes:
        b1: Decay rate of the mean of gradients.
        b2: Decay rate of the mean of squared gradients.
        eps: Added to the root of the mean square.
        weight_decay: Weight decay, multiplied by the learning rate.

    References:
        Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019. arXiv:1711.05101
    """

    b1: Rate = 0.9
    b2: Rate = 0.95
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.1


@dataclass(frozen=True, kw_only=True)
class Adafactor(Checked):
    """Factored second moments; step size relative to the parameter's RMS.

    The learning rate is therefore relative: 0.01 changes a matrix by one hundredth of its root mean
    square.

    Attributes:
        decay_exponent: Exponent c of the decay rate 1 - t ** -c of the mean squares at step t.
        clip: Largest root mean square of an update, before the learning rate.
        min_scale: Lower bound of the parameter's root mean square in the step size.
        weight_decay: Weight decay, multiplied by the learning rate.

    References:
        Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018.
            arXiv:1804.04235
    """

    decay_exponent: Positive = 0.8
    clip: Positive = 1.0
    min_scale: Positive = 1e-3
    weight_decay: NotNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class Lion(Checked):
    """Sign of an interpolated momentum.

    Every element changes by the learning rate, so use a third to a tenth of AdamW's rate, and a
    weight decay that is larger by the same factor.

    Attributes:
        b1: Weight of the mean in the argument of the sign.
        b2: Decay rate of the mean of gradients.
        weight_decay: Weight decay, multiplied by the learning rate.

    References:
        Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, algorithm 2.
            arXiv:2302.06675
    """

    b1: Rate = 0.9
    b2: Rate = 0.99
    weight_decay: NotNegative = 0.5


@dataclass(frozen=True, kw_only=True)
class Muon(Checked):
    """Muon for layer kernels, AdamW for all other parameters, adapters among them.

    Attributes:
        momentum: Decay rate of the sum of gradients.
        rms: Root mean square of an update at learning rate 1; see `scale_by_muon`.
        weight_decay: Weight decay of kernels, multiplied by the learning rate.
        adamw: Optimizer of all other parameters, with their weight decay.
        adamw_rate: Learning rate of all other parameters, relative to the rate of kernels.
        roles: Roles of the parameters that Muon changes: "kernel", and "adapter" too if wanted.

    References:
        Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.
        Liu et al., Muon is Scalable for LLM Training, 2025. arXiv:2502.16982
    """

    momentum: Rate = 0.95
    rms: Positive = 0.2
    weight_decay: NotNegative = 0.1
    adamw: AdamW = AdamW()
    adamw_rate: Positive = 1.0
    roles: tuple[Literal["kernel", "adapter"], ...] = ("kernel",)


@dataclass(frozen=True, kw_only=True)
class SGD(Checked):
    """Gradient descent, with optional momentum.

    Attributes:
        momentum: Decay rate of the sum of gradients.
        nesterov: Whether to use Nesterov momentum.
        weight_decay: Weight decay, multiplied by the learning rate.

    References:
        Sutskever et al., On the importance of initialization and momentum in deep learning, 2013.
    """

    momentum: Rate = 0.9
    nesterov: bool = False
    weight_decay: NotNegative = 0.0


Optimizer = AdamW | Adafactor | Lion | Muon | SGD


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Checked):
    """Optimizer, learning-rate schedule, gradient clipping and weight-decay mask.

    Attributes:
        schedule: Learning-rate schedule.
        optimizer: Optimizer.
        clip_norm: Global norm to which gradients are clipped; None does not clip.
        decay_roles: Roles of the parameters that have weight decay.
        selection_bias_rate: Change of the bias by which a router chooses experts, at each update:
            up for experts with less than the mean load, down for experts with more.
        unit_vectors: Whether each update ends with `keep_unit_vectors` (nGPT).
    """

    schedule: Schedule
    optimizer: Optimizer = AdamW()
    clip_norm: Positive | None = 1.0
    decay_roles: tuple[ParameterRole, ...] = ("kernel", "head")
    selection_bias_rate: NotNegative = 0.001
    unit_vectors: bool = False


def make_optimizer(
    config: OptimizerConfig, total_steps: int, metadata: Any
) -> optax.GradientTransformation:
    """Build the optax transformation: clip, optimizer, weight decay, learning rate.

    Its state has the names of the stages as keys, so that a checkpoint with clipping or weight
    decay can be restored without.

    Args:
        config: Optimizer, schedule, clipping and weight decay.
        total_steps: Number of steps of the schedule.
        metadata: `parallel.parameter_metadata` of the model, or another tree of
            `parallel.ParameterMetadata` with the structure of the parameters.

    Returns:
        A transformation whose `update` needs the parameters. Leaves must be whole (global) arrays,
        as norms and matrix updates cannot be computed from one shard.

    Raises:
        ValueError: `total_steps` is too short for the schedule.
    """
    is_bias = jax.tree.map(lambda x: x.role == "selection_bias", metadata)
    rest = jax.tree.map(lambda x, bias: optax.MaskedNode() if bias else x, metadata, is_bias)
    stages = {}
    if config.clip_norm is not None:
        stages["clip"] = clip_by_global_norm(config.clip_norm)
    stages["optimizer"] = optimizer_transform(config.optimizer, config.decay_roles, rest)
    schedule = make_schedule(config.schedule, total_steps)
    stages["learning_rate"] = optax.scale_by_learning_rate(schedule)
    if config.unit_vectors:
        stages["unit_vectors"] = keep_unit_vectors(rest)
    optimizer = run_in_float32(optax.named_chain(*stages.items()))
    if not any(jax.tree.leaves(is_bias)):
        return optimizer
    balance = balance_load(config.selection_bias_rate)
    labels = jax.tree.map(lambda bias: "selection_bias" if bias else "rest", is_bias)
    return optax.partition({"rest": optimizer, "selection_bias": balance}, labels)


def balance_load(rate: float) -> optax.GradientTransformation:
    """Change a selection bias by the sign of the load, without an auxiliary loss.

        bias <- bias - rate * sign(load / mean load - 1)

    References:
        Wang et al., Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts, 2024.
        arXiv:2408.15664, algorithm 1
        DeepSeek-AI, DeepSeek-V3 Technical Report, 2024. arXiv:2412.19437, section 2.1.2
    """
    return optax.stateless(
        lambda updates, params: jax.tree.map(lambda g: -rate * jnp.sign(g), updates)
    )


def keep_unit_vectors(metadata: Any) -> optax.GradientTransformation:
    """Make all vectors of the model's width in kernels, embeddings and head of length one.

        parameter + update <- unit_vectors(parameter + update)      along the axis "model"

    References:
        Loshchilov et al., nGPT: Normalized Transformer with Representation Learning on the
        Hypersphere, 2024. arXiv:2410.01131, section 2.6
    """

    def change(update: Any, parameter: Any, its: Any) -> Any:
        if its.role in ("vector", "adapter") or its.logical_axes.count("model") != 1:
            return update
        axis = its.logical_axes.index("model")
        return F.unit_vectors(parameter + update, axis=axis) - parameter

    return optax.stateless(lambda updates, params: jax.tree.map(change, updates, params, metadata))


def clip_by_global_norm(limit: float) -> optax.GradientTransformationExtraArgs:
    """Clip gradients by their global norm.

        g <- g * min(1, limit / norm)

    `update` takes `gradient_norm` if it is already known, which saves its computation.
    """

    def update(updates, state, params=None, *, gradient_norm=None, **extra):
        norm = optax.tree.norm(updates) if gradient_norm is None else gradient_norm
        scale = jnp.where(norm > limit, limit / norm, 1.0)
        return jax.tree.map(lambda g: g * jnp.broadcast_to(scale, g.shape), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def optimizer_transform(
    optimizer: Optimizer, decay_roles: tuple[ParameterRole, ...], metadata: Any
) -> optax.GradientTransformation:
    """The optimizer's transformation, with weight decay masked to `decay_roles`."""
    mask = jax.tree.map(lambda x: x.role in decay_roles, metadata)
    decay = partial(optax.add_decayed_weights, mask=mask)
    match optimizer:
        case AdamW(b1=b1, b2=b2, eps=eps):
            inner = optax.scale_by_adam(b1, b2, eps)
        case Adafactor(decay_exponent=exponent, clip=clip, min_scale=least):
            options = dict(decay_exponent=exponent, clip=clip, min_scale=least)
            inner = scale_by_adafactor(metadata, **options)
        case Lion(b1=b1, b2=b2):
            inner = optax.scale_by_lion(b1, b2)
        case SGD(momentum=momentum, nesterov=nesterov):
            inner = optax.trace(momentum, nesterov) if momentum else optax.identity()
        case Muon(momentum=momentum, rms=rms, adamw=adamw, adamw_rate=rate, roles=roles):
            muon = scale_by_muon(metadata, momentum=momentum, rms=rms)
            kernels = optax.chain(muon, decay(optimizer.weight_decay))
            rest = optimizer_transform(adamw, decay_roles, metadata)
            labels = jax.tree.map(lambda x: "kernels" if x.role in roles else "rest", metadata)
            transforms = {"kernels": kernels, "rest": optax.chain(rest, optax.scale(rate))}
            return optax.partition(transforms, labels)
    return optax.chain(inner, decay(optimizer.weight_decay))


def run_in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Run `inner` on float32 copies; returns updates in the dtype of the parameters.

    `optax` raises floats to integer powers, which strict dtype promotion does not allow.
    """
    inner_update = optax.with_extra_args_support(inner).update
    to_float32 = partial(jax.tree.map, lambda x: x.astype(jnp.float32))

    def init(params):
        return inner.init(to_float32(params))

    def update(grads, state, params, **extra):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = inner_update(to_float32(grads), state, to_float32(params), **extra)
        return jax.tree.map(lambda u, x: u.astype(x.dtype), updates, params), state

    return optax.GradientTransformationExtraArgs(init, update)
