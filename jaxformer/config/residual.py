"""`Residual`: the protocol of custom residual connections; `DeepNorm`."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array

from jaxformer.checks import check_fields, require_positive
from jaxformer.config.parameter import Parameter
from jaxformer.config.registry import Option, unimplemented_method


class Residual(Option, protocol=True):
    """A residual (skip) connection, such as LayerScale; without one, the sum x + y.

    An option implements these methods; `parameters` is optional:

        parameters(self, model_dim)      dict from names to `Parameter`, for each branch of a layer
        __call__(self, params, x, y)     the stream [*batch, T, D] after the branch

    `x` is the stream before the branch and `y` the branch's output, after its dropout, norm
    and `residual_multiplier`.
    It must treat each token separately: caches and context parallelism pass only some tokens. Every
    device has all features of both, so the axes of parameters are "model" and "features". FLOPs and
    activation bytes in `costs` do not include a residual's work.
    Parallel branches whose outputs are summed first join the stream once.
    """

    __call__ = unimplemented_method("__call__", "the model")

    def parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """Return no parameters."""
        return {}


@dataclass(frozen=True, kw_only=True)
class DeepNorm(Residual):
    """The stream multiplied by a constant: alpha * x + y, under norms after the sum ("post").

    Attributes:
        alpha: The constant, (2 * num_layers) ** 0.25 for a decoder.

    References:
        Wang et al., DeepNet: Scaling Transformers to 1,000 Layers, 2022. arXiv:2203.00555
    """

    alpha: float

    def __post_init__(self):
        check_fields(self)
        require_positive(self, "alpha")

    def __call__(self, params: Mapping[str, Array], x: Array, y: Array) -> Array:
        """The sum."""
        return jnp.asarray(self.alpha, x.dtype) * x + y
