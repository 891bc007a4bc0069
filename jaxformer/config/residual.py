"""`Residual`: the protocol of custom residual connections."""

from collections.abc import Mapping

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
