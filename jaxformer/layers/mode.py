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
class Axes:
    """Mesh axis names for each kind of sharding inside `jax.shard_map`.

    The rows of a batch may be shared out over `fsdp`, `expert` and any other axis.

    Attributes:
        fsdp: Each device keeps a part of every kernel's model width; kernels are gathered at use.
        tensor: Heads, hidden width and vocabulary; partial sums are added up over it.
        context: Time, in the order of `F.ring_order`; attention goes round it as a ring.
        expert: Experts; tokens are sent to those that they chose.
    """

    fsdp: str | None = None
    tensor: str | None = None
    context: str | None = None
    expert: str | None = None


def axes_of(sizes: Mapping[str, int]) -> Axes:
    """The names by which a model knows the axes of a mesh (`mesh.shape`) with several devices.

    Args:
        sizes: Devices along each axis.

    Returns:
        For `Mode.axes`: each axis by its own name, None where there is one device.
    """
    names = {name: name for name in ("fsdp", "tensor", "context", "expert")}
    return Axes(**{name: name for name in names if sizes.get(name, 1) > 1})


@dataclass(frozen=True, kw_only=True)
class Mode:
    """Run-time options that every module gets; none of them changes a parameter.

    `dtype` is that of the computation (parameters stay float32 and are cast at use).
    `deterministic` switches dropout off. `remat` names what the backward pass recomputes: nothing
    ("none"), all but the results of matrix products ("dots"), or everything inside a block but
    what a kernel's attention gave ("full"). `scan` runs the layers as one compiled loop; without it
    they are unrolled. On a CPU, XLA merges what unrolled layers recompute with what they computed,
    so there remat saves memory only with `scan`. `axes` says how the model is spread over devices.
    `annotate` makes `init` note beside each parameter what its axes count, for those who share them
    out. `expert_room` is the `room` of `F.mix_experts`. `attention_implementation` is that of
    `F.dot_product_attention`. `fresh` says that a cache has nothing in it yet. `read` collects the
    paths of the parameters that modules read in this call.
    """

    dtype: DTypeLike = jnp.float32
    deterministic: bool = True
    remat: Remat = "none"
    scan: bool = True
    axes: Axes = Axes()
    annotate: bool = False
    expert_room: float | None = None
    attention_implementation: F.Implementation = "auto"
    fresh: bool = False
    read: set[tuple[str, ...]] = field(default_factory=set, compare=False, repr=False)

    def by_rule(self, queries: int, keys: int) -> bool:
        """Whether attention of this size takes lazy masks and biases instead of arrays."""
        if self.axes.context is not None:
            return True
        if self.attention_implementation == "xla":
            return False
        return self.attention_implementation != "auto" or F.many_scores(queries, keys)


def dropout(
    module: nn.Module,
    x: Float[Array, "*shape"],
    rate: float,
    mode: Mode,
    *,
    part_of: str | None = None,
) -> Float[Array, "*shape"]:
    """Apply dropout in training, with another mask on each device along `axis_name`."""
    if mode.deterministic or rate == 0:
        return x
    return F.dropout(x, rate, dropout_key(module, part_of))


def dropout_key(module: nn.Module, part_of: str | None = None) -> PRNGKeyArray:
    """Return a key of the "dropout" stream, another one on each device along `axis_name`."""
    key = module.make_rng("dropout")
    return key if part_of is None else jax.random.fold_in(key, jax.lax.axis_index(part_of))
