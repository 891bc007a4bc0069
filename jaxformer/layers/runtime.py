"""Run-time options of a model, which change no parameter; dropout, and intermediate values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer import functional as F
from jaxformer.config import LoRA

Remat = Literal["none", "dots", "full"]
INTERMEDIATES = "intermediates"
PERTURBATIONS = "perturbations"
NOT_IN_ALL_LINEAR = {
    *("embedding", "layer_table", "positions", "head", "experts", "router", "shared_gate")
}


@dataclass(frozen=True, kw_only=True)
class MeshAxes:
    """Mesh axis names for each kind of sharding inside `jax.shard_map`.

    The rows of a batch may be sharded over `fsdp`, `expert` and any other axis.

    Attributes:
        fsdp: Shards the model axis of every kernel; kernels are all-gathered before use.
        tensor: Shards heads, hidden features and the vocabulary; partial sums are reduced over it.
        context: Shards the sequence in the order of `F.zigzag_order`; attention is a ring over it.
        expert: Shards experts; tokens are exchanged by all-to-all.
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
        For `RuntimeConfig.mesh_axes`: the name of each axis, None if it has one device.
    """
    names = {name: name for name in ("fsdp", "tensor", "context", "expert")}
    return MeshAxes(**{name: name for name in names if mesh_shape.get(name, 1) > 1})


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Run-time options of all modules; none but `adapter` adds a parameter.

    Attributes:
        dtype: Dtype of the computation; parameters stay float32 and are cast when used.
        deterministic: Whether dropout is off.
        remat: What the backward pass recomputes: nothing ("none"), all but the results of matrix
            products ("dots"), or everything in a block but the output of fused attention ("full").
            On a CPU it saves memory only with `scan`, since XLA merges the recomputation of
            unrolled layers with the forward pass.
        scan: Whether layers run in one compiled loop, or unrolled.
        mesh_axes: Mesh axes over which the model is sharded.
        annotate_axes: Whether `init` boxes parameters with the names of their axes.
        expert_capacity_factor: The `capacity_factor` of `F.mixture_of_experts`.
        attention_implementation: The `implementation` of `F.dot_product_attention`.
        max_segments: The `max_segments` of `F.MaskRule`.
        cache_is_empty: Whether the cache holds no tokens yet.
        adapter: Low-rank adapters of the linear maps.
    """

    dtype: DTypeLike = jnp.float32
    deterministic: bool = True
    remat: Remat = "none"
    scan: bool = True
    mesh_axes: MeshAxes = MeshAxes()
    annotate_axes: bool = False
    expert_capacity_factor: float | None = None
    attention_implementation: F.Implementation = "auto"
    max_segments: int | None = None
    cache_is_empty: bool = False
    adapter: LoRA | None = None

    def lora_of(self, path: tuple[str, ...]) -> LoRA | None:
        """Return the adapter of the linear map of the module at this path, if it is a target."""
        if self.adapter is None:
            return None
        name = target_name(path)
        if self.adapter.targets == "all-linear":
            return None if name in NOT_IN_ALL_LINEAR else self.adapter
        return self.adapter if name in self.adapter.targets else None


def target_name(path: tuple[str, ...]) -> str:
    """Return the name by which `LoRA.targets` lists the linear map of a module."""
    if "experts" in path:
        return "experts"
    name = path[-1] if path else ""  # a module outside a model has no path
    if "layer_embedding" in path:
        return "layer_table" if name == "tokens" else "layer_embedding"
    if "ngram_embedding" in path:
        return "ngram_embedding"
    return "embedding" if name == "tokens" else name


def apply_dropout(
    module: nn.Module, x: Float[Array, "*shape"], rate: float, *, axis_name: str | None = None
) -> Float[Array, "*shape"]:
    """Apply dropout in training, with different masks on the devices along `axis_name`."""
    if module.runtime.deterministic or rate == 0:
        return x
    return F.dropout(x, rate, dropout_key(module, axis_name))


def dropout_key(module: nn.Module, axis_name: str | None = None) -> PRNGKeyArray:
    """Return a key of the "dropout" stream, different on each device along `axis_name`."""
    key = module.make_rng("dropout")
    return key if axis_name is None else jax.random.fold_in(key, jax.lax.axis_index(axis_name))


def sow_and_perturb(module: nn.Module, name: str, value: Any) -> Any:
    """Sow a value as an intermediate, after applying its perturbations if any were passed in.

    `apply(..., mutable=["intermediates"])` returns the value under the module's path. The
    collection "perturbations" has, under the same path, a tuple of functions of the value that are
    pytrees (`jax.tree_util.Partial`, `inspect.patches`); the module goes on with their result.
    Without these collections there is no cost.

    Args:
        module: The module that computes the value.
        name: Name of the value.
        value: An array or a tree of arrays.

    Returns:
        The value, perturbed.
    """
    perturbations: tuple[Callable[[Any], Any], ...] = module.get_variable(PERTURBATIONS, name, ())
    for perturb in perturbations:
        value = perturb(value)
    if not module.is_initializing():
        module.sow(INTERMEDIATES, name, value, init_fn=lambda: None, reduce_fn=lambda _, last: last)
    return value
