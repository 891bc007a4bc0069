"""The feed-forward branch: plain, gated, or gated and clamped."""

from collections.abc import Callable
from functools import partial

from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.layers.linear import Linear
from jaxformer.layers.mode import Mode, dropout

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": F.relu,
    "relu_squared": F.relu_squared,
    "gelu": partial(F.gelu, approximate=False),
    "gelu_tanh": partial(F.gelu, approximate=True),
    "quick_gelu": F.quick_gelu,
    "silu": F.silu,
    "sigmoid": F.sigmoid,
    "identity": lambda x: x,
}
GATES: dict[str, Callable[[Array, Array], Array]] = {
    "relu": F.reglu,
    "relu_squared": lambda gate, value: F.relu_squared(gate) * value,
    "gelu": partial(F.geglu, approximate=False),
    "gelu_tanh": partial(F.geglu, approximate=True),
    "quick_gelu": lambda gate, value: F.quick_gelu(gate) * value,
    "silu": F.swiglu,
    "sigmoid": F.glu,
    "identity": F.bilinear,
}


class FeedForward(nn.Module):
    """down(activation(up(x))), or down(activation(gate(x)) * up(x)) where there is a gate."""

    config: c.TransformerConfig
    choice: c.FeedForward
    mode: Mode

    @nn.compact
    def __call__(self, x: Float[Array, "*batch T D"]) -> Float[Array, "*batch T D"]:
        cfg, choice = self.config, self.choice
        init = cfg.initialisation

        def project(name: str) -> Float[Array, "*batch T F"]:
            start = init.feed_forward_in or init.projection
            return Linear((choice.hidden_dim,), start, self.mode, bias=choice.bias, name=name)(x)

        match choice:
            case c.MLP(activation=activation):
                hidden = ACTIVATIONS[activation](project("up"))
            case c.GLU(activation=activation):
                hidden = GATES[activation](project("gate"), project("up"))
            case c.ClampedGEGLU(limit=limit):
                hidden = F.clamped_geglu(project("gate"), project("up"), limit=limit)
        hidden = dropout(self, hidden, cfg.dropout.feed_forward, self.mode)
        down = Linear(
            (cfg.model_dim,),
            init.feed_forward_out or init.projection,
            self.mode,
            bias=choice.bias,
            divisor=cfg.residual_divisor,
            name="down",
        )
        return down(hidden)
