"""Qwen 3: Llama with RMSNorm on each head's query and key, and an explicit head_dim."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.families import pieces as p
from jaxformer.interop.family import Family
from jaxformer.interop.rope import read_rope
from jaxformer.interop.settings import Settings
from jaxformer.interop.tables import Table

TABLE = Table(
    whole=p.WHOLE, stacks={"decoder": (*p.PRE_NORMS, *p.ATTENTION, *p.QK_NORMS, *p.FEED_FORWARD)}
)


def read(settings: Settings) -> c.TransformerConfig:
    """Our configuration from a qwen3's; the width of a head does not follow the model's."""
    norm = c.RMSNorm(eps=settings.number("rms_norm_eps", 1e-6))
    heads = dict(
        **p.read_heads(settings, kv_heads=32, head_dim=128),
        positions=(read_rope(settings, max_length=32768),),
        windows=p.read_late_windows(settings),
        qk_norm=c.QKNorm(norm=norm, over="head"),
        biases=p.read_biases(settings),
    )
    return p.read_decoder(settings, heads, norm=norm)


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A qwen3's configuration from ours."""
    biases = "out" in config.multi_head.biases
    return p.write_decoder(config, attention_bias=biases, **p.write_late_windows(config))


FAMILIES = (Family("qwen3", "Qwen3ForCausalLM", read, write, TABLE),)
