"""Qwen 3: Llama with a norm of each head's queries and keys, and heads of any width."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.families import pieces as p
from jaxformer.interop.family import Family
from jaxformer.interop.rope import read_rope, write_rope
from jaxformer.interop.settings import Settings
from jaxformer.interop.tables import Table

TABLE = Table(
    whole=p.WHOLE,
    stacks={"decoder": (*p.PRE_NORMS, *p.ATTENTION, *p.QK_NORMS, *p.FEED_FORWARD)},
)


def read(settings: Settings) -> c.TransformerConfig:
    """Our configuration from a qwen3's; the width of a head does not follow the model's."""
    sizes = p.read_sizes(settings)
    norm = c.RMSNorm(eps=settings.number("rms_norm_eps", 1e-6))
    return c.TransformerConfig(
        **sizes,
        attention=c.MultiHead(
            **p.read_heads(settings, kv_heads=32, head_dim=128),
            positions=(read_rope(settings, max_length=32768),),
            windows=p.read_late_windows(settings, sizes["num_layers"]),
            qk_norm=c.QKNorm(norm=norm, over="head"),
            biases=p.read_biases(settings),
        ),
        feed_forward=(p.read_glu(settings),),
        norm=norm,
        head=c.Head(tied=settings.flag("tie_word_embeddings", False)),
    )


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A qwen3's configuration from ours."""
    if not (p.plain_decoder(config) and isinstance(config.feed_forward[0], c.GLU)):
        return None
    return {
        **p.write_sizes(config),
        **p.write_late_windows(config),
        "attention_bias": "out" in config.multi_head.biases,
        "rms_norm_eps": config.norm.eps,
        **write_rope(p.rope_of(config)),
    }


FAMILIES = (
    Family(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        read=read,
        write=write,
        table=TABLE,
        ignored=p.IGNORED,
    ),
)
