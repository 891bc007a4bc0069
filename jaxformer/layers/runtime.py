"""Run-time options of a model, which change no parameter; and dropout."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer import functional as F

Remat = Literal["none", "dots", "full"]


@dataclass(frozen=True, kw_only=True)
class MeshAxes:
    """Mesh axis names for each kind of sharding inside `jax.shard_map`.

    The rows of a batch may be shared out over `fsdp`, `expert` and any other axis.

    Attributes:
        fsdp: Each device keeps a part of every kernel's model width; kernels are gathered at use.
        tensor: Heads, hidden width and vocabulary; partial sums are added up over it.
        context: Time, in the order of `F.zigzag_order`; attention goes round it as a ring.
        expert: Experts; tokens are sent to those that they chose.
    """

    fsdp: str | None = None
    tensor: str | None = None
    context: str | None = None
    expert: str | None = None


def active_mesh_axes(mesh_shape: Mapping[str, int]) -> MeshAxes:
    """Return the `MeshAxes` of a mesh: None for axes of size one.

    Args:
        mesh_shape: Devices along each axis.

    Returns:
        For `RuntimeConfig.mesh_axes`: each axis by its own name, None where there is one device.
    """
    names = {name: name for name in ("fsdp", "tensor", "context", "expert")}
    return MeshAxes(**{name: name for name in names if mesh_shape.get(name, 1) > 1})


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Run-time options that every module gets; none of them changes a parameter.

    `dtype` is that of the computation (parameters stay float32 and are cast at use).
    `deterministic` switches dropout off. `remat` names what the backward pass recomputes: nothing
    ("none"), all but the results of matrix products ("dots"), or everything inside a block but
    what a kernel's attention gave ("full"). `scan` runs the layers as one compiled loop; without it
    they are unrolled. On a CPU, XLA merges what unrolled layers recompute with what they computed,
    so there remat saves memory only with `scan`. `mesh_axes` says how the model is spread over
    devices. `annotate_axes` makes `init` note beside each parameter what its axes count, for those
    who share them out. `expert_capacity_factor` is the `capacity_factor` of `F.mixture_of_experts`.
    `attention_implementation` is that of `F.dot_product_attention`. `cache_is_empty` says that a
    cache has nothing in it yet. `read` collects the paths of the parameters that modules read in
    this call.
    """

    dtype: DTypeLike = jnp.float32
    deterministic: bool = True
    remat: Remat = "none"
    scan: bool = True
    mesh_axes: MeshAxes = MeshAxes()
    annotate_axes: bool = False
    expert_capacity_factor: float | None = None
    attention_implementation: F.Implementation = "auto"
    cache_is_empty: bool = False
    read: set[tuple[str, ...]] = field(default_factory=set, compare=False, repr=False)


def apply_dropout(
    module: nn.Module,
    x: Float[Array, "*shape"],
    rate: float,
    runtime: RuntimeConfig,
    *,
    axis_name: str | None = None,
) -> Float[Array, "*shape"]:
    """Apply dropout in training, with another mask on each device along `axis_name`."""
    if runtime.deterministic or rate == 0:
        return x
    return F.dropout(x, rate, dropout_key(module, axis_name))


def dropout_key(module: nn.Module, axis_name: str | None = None) -> PRNGKeyArray:
    """Return a key of the "dropout" stream, another one on each device along `axis_name`."""
    key = module.make_rng("dropout")
    return key if axis_name is None else jax.random.fold_in(key, jax.lax.axis_index(axis_name))
