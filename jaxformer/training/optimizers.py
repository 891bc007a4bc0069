"""Optimizer configurations as frozen dataclasses, built into `optax` transformations.

    gradient -> clip by global norm -> optimizer -> + weight_decay * parameter -> * -learning_rate

Weight decay is decoupled: it never enters the optimizer's statistics. Arithmetic and state are
float32; updates come back in the dtype of the parameters.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxformer.checks import check_fields
from jaxformer.layers.parameter_metadata import ParameterRole
from jaxformer.training.muon import scale_by_adafactor, scale_by_muon
from jaxformer.training.schedules import Schedule, make_schedule


def check_hyperparameters(
    optimizer: Any, *, rates: tuple[str, ...] = (), positive: tuple[str, ...] = ()
) -> None:
    """Raise for decay rates outside [0, 1), and for numbers that must be positive."""
    kind = type(optimizer).__name__
    for name in rates:
        if not 0 <= (value := getattr(optimizer, name)) < 1:
            raise ValueError(f"{kind}.{name} must be at least 0 and below 1; got {value}.")
    for name in positive:
        if not (value := getattr(optimizer, name)) > 0:
            raise ValueError(f"{kind}.{name} must be positive; got {value}.")
    if optimizer.weight_decay < 0:
        raise ValueError(f"{kind}.weight_decay must not be negative; got {optimizer.weight_decay}.")


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay.

    Attributes:
        b1: Share of the mean that an update keeps.
        b2: Share of the mean square that an update keeps.
        eps: Added to the root of the mean square.
        weight_decay: Share of a parameter that an update at rate 1 takes away.

    References:
        Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019. arXiv:1711.05101
    """

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self):
        check_fields(self)
        check_hyperparameters(self, rates=("b1", "b2"), positive=("eps",))


@dataclass(frozen=True, kw_only=True)
class Adafactor:
    """Factored second moments; step size relative to the parameter's RMS.

    The learning rate is therefore relative: 0.01 moves a matrix by one hundredth of its root mean
    square. Parameters smaller than `min_scale` move as if they were that large.

    Attributes:
        decay_exponent: Mean squares forget as the update's number to the minus this.
        clip: Largest root mean square of an update before the rate.
        min_scale: Smallest size that a parameter is taken to have.
        weight_decay: Share of a parameter that an update at rate 1 takes away.

    References:
        Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018.
            arXiv:1804.04235
    """

    decay_exponent: float = 0.8
    clip: float = 1.0
    min_scale: float = 1e-3
    weight_decay: float = 0.0

    def __post_init__(self):
        check_fields(self)
        check_hyperparameters(self, positive=("decay_exponent", "clip", "min_scale"))


@dataclass(frozen=True, kw_only=True)
class Lion:
    """Sign of an interpolated momentum.

    Every element moves by the whole learning rate, so that is a third to a tenth of AdamW's, and
    the weight decay as many times larger.

    Attributes:
        b1: Share of the mean in the sign's argument.
        b2: Share of the mean that an update keeps.
        weight_decay: Share of a parameter that an update at rate 1 takes away.

    References:
        Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, algorithm 2.
            arXiv:2302.06675
    """

    b1: float = 0.9
    b2: float = 0.99
    weight_decay: float = 0.5

    def __post_init__(self):
        check_fields(self)
        check_hyperparameters(self, rates=("b1", "b2"))


@dataclass(frozen=True, kw_only=True)
class Muon:
    """Muon for layer kernels, AdamW for all other parameters.

    The learning rate is that of the kernels; the rest takes `adamw_rate` times as much.
    `adamw.weight_decay` is the rest's decay. See `scale_by_muon` for `rms`.

    Attributes:
        momentum: Share of the sum of gradients that an update keeps.
        rms: Root mean square of an update at rate 1.
        weight_decay: Share of a kernel that an update at rate 1 takes away.
        adamw: How everything but kernels is updated.
        adamw_rate: Its learning rate, relative to that of the kernels.

    References:
        Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.
        Liu et al., Muon is Scalable for LLM Training, 2025. arXiv:2502.16982
    """

    momentum: float = 0.95
    rms: float = 0.2
    weight_decay: float = 0.1
    adamw: AdamW = AdamW()
    adamw_rate: float = 1.0

    def __post_init__(self):
        check_fields(self)
        check_hyperparameters(self, rates=("momentum",), positive=("rms", "adamw_rate"))


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Gradient descent, with optional momentum.

    Attributes:
        momentum: Share of the sum of gradients that an update keeps.
        nesterov: Whether to look one update ahead.
        weight_decay: Share of a parameter that an update at rate 1 takes away.

    References:
        Sutskever et al., On the importance of initialization and momentum in deep learning, 2013.
    """

    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self):
        check_fields(self)
        check_hyperparameters(self, rates=("momentum",))


Optimizer = AdamW | Adafactor | Lion | Muon | SGD


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer, learning-rate schedule, gradient clipping and weight-decay mask.

    Attributes:
        schedule: The learning rate over the run.
        optimizer: The rule of the update.
        clip_norm: Largest global norm that a gradient keeps; None does not clip.
        decay_roles: Which parameters decay.
    """

    schedule: Schedule
    optimizer: Optimizer = AdamW()
    clip_norm: float | None = 1.0
    decay_roles: tuple[ParameterRole, ...] = ("kernel", "head")

    def __post_init__(self):
        check_fields(self)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be positive, or None for off; got {self.clip_norm}.")


def learning_rate_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Learning-rate schedule of the run, a function of the step from 0."""
    return make_schedule(config.schedule, total_steps)


def make_optimizer(
    config: OptimizerConfig, total_steps: int, metadata: Any
) -> optax.GradientTransformation:
    """Build the optax transformation: clip, optimizer, weight decay, learning rate.

    Its state is a tree of arrays under the names of the stages, so that a checkpoint made with
    clipping or decay can be read without.

    Args:
        config: Which optimizer, schedule and clipping.
        total_steps: Number of updates in the run, for the schedule.
        metadata: What decays and what is a matrix: `parallel.parameter_metadata` of the model, or
            another tree of `parallel.ParameterMetadata`, like the parameters.

    Returns:
        A transformation whose `update` needs the parameters. Every leaf must be whole: norms and
        matrix updates of a shard are not those of its parameter.

    Raises:
        ValueError: The run is too short for the schedule.
    """
    stages = {}
    if config.clip_norm is not None:
        stages["clip"] = clip_by_global_norm(config.clip_norm)
    stages["optimizer"] = optimizer_transform(config.optimizer, config.decay_roles, metadata)
    stages["learning_rate"] = optax.scale_by_learning_rate(
        learning_rate_schedule(config, total_steps)
    )
    return run_in_float32(optax.named_chain(*stages.items()))


def clip_by_global_norm(limit: float) -> optax.GradientTransformationExtraArgs:
    """Clip gradients by their global norm.

        g <- g * min(1, limit / norm)

    `update` takes `gradient_norm`, where it is known already: devices then need not add it up
    again.
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
            inner = scale_by_adafactor(
                metadata, decay_exponent=exponent, clip=clip, min_scale=least
            )
        case Lion(b1=b1, b2=b2):
            inner = optax.scale_by_lion(b1, b2)
        case SGD(momentum=momentum, nesterov=nesterov):
            inner = optax.trace(momentum, nesterov) if momentum else optax.identity()
        case Muon(momentum=momentum, rms=rms, adamw=adamw, adamw_rate=rate):
            muon = scale_by_muon(metadata, momentum=momentum, rms=rms)
            other_transform = optax.chain(
                optimizer_transform(adamw, decay_roles, metadata), optax.scale(rate)
            )
            return optax.partition(
                {
                    "kernels": optax.chain(muon, decay(optimizer.weight_decay)),
                    "rest": other_transform,
                },
                jax.tree.map(lambda x: "kernels" if x.role == "kernel" else "rest", metadata),
            )
    return optax.chain(inner, decay(optimizer.weight_decay))


def run_in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Run `inner` on float32 copies; give updates in the dtype of the parameters.

    `optax` raises floats to integer powers, which callers with strict dtype promotion would not
    get past.
    """
    inner_with_extra = optax.with_extra_args_support(inner)

    def to_float32(tree):
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(params):
        return inner.init(to_float32(params))

    def update(grads, state, params, **extra):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = inner_with_extra.update(
                to_float32(grads), state, to_float32(params), **extra
            )
        return jax.tree.map(lambda u, x: u.astype(x.dtype), updates, params), state

    return optax.GradientTransformationExtraArgs(init, update)
