"""OLMo (non-parametric LayerNorm) and OLMo 2 (norms on branch outputs, queries and keys)."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.families import pieces as p
from jaxformer.interop.family import Family
from jaxformer.interop.rope import read_rope
from jaxformer.interop.settings import Settings
from jaxformer.interop.tables import Table, norm

OLMO = Table(whole=p.WHOLE, stacks={"decoder": (*p.ATTENTION, *p.FEED_FORWARD)})
OLMO2 = Table(
    whole=p.WHOLE,
    stacks={
        "decoder": (
            *p.ATTENTION,
            *p.QK_NORMS,
            *p.FEED_FORWARD,
            *norm(f"{p.LAYER}.post_attention_layernorm", "post_attention_norm"),
            *norm(f"{p.LAYER}.post_feedforward_layernorm", "post_feed_forward_norm"),
        )
    },
)
EPS = 1e-5  # OLMo's is in no file


def read_olmo(settings: Settings) -> c.TransformerConfig:
    """Our configuration from an olmo's."""
    heads = dict(
        **p.read_heads(settings),
        positions=(read_rope(settings),),
        clip_qkv=settings.optional_number("clip_qkv"),
        biases=p.read_biases(settings),
    )
    return p.read_decoder(settings, heads, norm=c.LayerNorm(eps=EPS, parameters="none"))


def write_olmo(config: c.TransformerConfig) -> dict[str, Any] | None:
    """An olmo's configuration from ours."""
    attention = config.multi_head
    biases, clip = "out" in attention.biases, attention.clip_qkv
    fields = p.write_decoder(config, attention_bias=biases, clip_qkv=clip)
    return fields and {name: value for name, value in fields.items() if name != "rms_norm_eps"}


def read_olmo2(settings: Settings) -> c.TransformerConfig:
    """Our configuration from an olmo2's."""
    norm = c.RMSNorm(eps=settings.number("rms_norm_eps", 1e-5))
    heads = dict(
        **p.read_heads(settings),
        positions=(read_rope(settings),),
        qk_norm=c.QKNorm(norm=norm, over="width"),
        biases=p.read_biases(settings),
    )
    return p.read_decoder(settings, heads, norm=norm, placement="branch_out")


def write_olmo2(config: c.TransformerConfig) -> dict[str, Any] | None:
    """An olmo2's configuration from ours."""
    return p.write_decoder(config, attention_bias="out" in config.multi_head.biases)


FAMILIES = (
    Family("olmo", "OlmoForCausalLM", read_olmo, write_olmo, OLMO),
    Family("olmo2", "Olmo2ForCausalLM", read_olmo2, write_olmo2, OLMO2),
)
