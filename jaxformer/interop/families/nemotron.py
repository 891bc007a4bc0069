"""Nemotron: LayerNorm stored as scale - 1, squared ReLU, half of each head rotated."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.families import pieces as p
from jaxformer.interop.families.activations import ACTIVATIONS
from jaxformer.interop.family import Family
from jaxformer.interop.rope import read_rope, write_rope
from jaxformer.interop.settings import Settings
from jaxformer.interop.tables import Table

TABLE = Table(whole=p.WHOLE, stacks={"decoder": (*p.PRE_NORMS, *p.ATTENTION, *p.FEED_FORWARD)})


def read(settings: Settings) -> c.TransformerConfig:
    """Our configuration from a nemotron's."""
    heads = dict(
        **p.read_heads(settings),
        positions=(read_rope(settings, fraction=0.5, max_length=4096),),
        biases=p.read_biases(settings),
    )
    branch = c.MLP(
        hidden_dim=settings.integer("intermediate_size"),
        activation=settings.choice("hidden_act", "relu2", ACTIVATIONS),
        bias=settings.flag("mlp_bias", False),
    )
    norm = c.LayerNorm(eps=settings.number("norm_eps", 1e-5), scale_offset=1.0)
    return p.read_decoder(settings, heads, feed_forward=branch, norm=norm)


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A nemotron's configuration from ours."""
    branch = config.feed_forward[0]
    if not (p.plain_decoder(config) and isinstance(branch, c.MLP)):
        return None
    return {
        **p.write_sizes(config),
        "attention_bias": "out" in config.multi_head.biases,
        "mlp_bias": branch.bias,
        "norm_eps": config.norm.eps,
        **write_rope(p.rope_of(config), fraction_name="partial_rotary_factor"),
    }


FAMILIES = (Family("nemotron", "NemotronForCausalLM", read, write, TABLE),)
