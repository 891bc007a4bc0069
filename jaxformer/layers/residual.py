"""Module of a residual option: its parameters, and the stream after a branch."""

from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer.checks import OptionError, require_like
from jaxformer.config.parameter import parse_logical_axes
from jaxformer.layers.custom_option import option_parameters
from jaxformer.layers.runtime import RuntimeConfig


class ResidualConnection(nn.Module):
    """Parameters of a `config.Residual`; call it with the stream and a branch's output."""

    option: c.Residual
    runtime: RuntimeConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch T D"], y: Float[Array, "*batch T D"]
    ) -> Float[Array, "*batch T D"]:
        """Return the stream after the branch."""
        declared, name = self.option.parameters(x.shape[-1]), type(self.option).__name__
        for parameter_name, parameter in declared.items():
            if set(parse_logical_axes(parameter.axes).names) - {"model", "features"}:
                raise OptionError(
                    f"{name}.parameters: every device has all of the stream, so axes must be "
                    f"model or features; got {parameter.axes!r} of {parameter_name!r}."
                )
        params = option_parameters(self, self.option, declared, self.runtime.dtype)
        stream = self.option(params, x, y)
        require_like(name, "[rows, tokens, width]", stream, x.shape, x.dtype)
        return stream
