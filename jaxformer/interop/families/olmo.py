"""OLMo (layer norms that learn nothing), OLMo 2 (norms of what branches give, of q and of k)."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.families import pieces as p
from jaxformer.interop.family import Family
from jaxformer.interop.rope import read_rope, write_rope
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
    return c.TransformerConfig(
        **p.read_sizes(settings),
        attention=c.MultiHead(
            **p.read_heads(settings),
            positions=(read_rope(settings),),
            clip_qkv=settings.optional_number("clip_qkv"),
            biases=p.read_biases(settings),
        ),
        feed_forward=(p.read_glu(settings),),
        norm=c.LayerNorm(eps=EPS, parameters="none"),
        head=c.Head(tied=settings.flag("tie_word_embeddings", False)),
    )


def write_olmo(config: c.TransformerConfig) -> dict[str, Any] | None:
    """An olmo's configuration from ours."""
    if not (p.plain_decoder(config) and isinstance(config.feed_forward[0], c.GLU)):
        return None
    return {
        **p.write_sizes(config),
        "attention_bias": "out" in config.multi_head.biases,
        "clip_qkv": config.multi_head.clip_qkv,
        **write_rope(p.rope_of(config)),
    }


def read_olmo2(settings: Settings) -> c.TransformerConfig:
    """Our configuration from an olmo2's."""
    norm = c.RMSNorm(eps=settings.number("rms_norm_eps", 1e-5))
    return c.TransformerConfig(
        **p.read_sizes(settings),
        attention=c.MultiHead(
            **p.read_heads(settings),
            positions=(read_rope(settings),),
            qk_norm=c.QKNorm(norm=norm, over="width"),
            biases=p.read_biases(settings),
        ),
        feed_forward=(p.read_glu(settings),),
        norm=norm,
        placement="branch_out",
        head=c.Head(tied=settings.flag("tie_word_embeddings", False)),
    )


def write_olmo2(config: c.TransformerConfig) -> dict[str, Any] | None:
    """An olmo2's configuration from ours."""
    if not (p.plain_decoder(config) and isinstance(config.feed_forward[0], c.GLU)):
        return None
    return {
        **p.write_sizes(config),
        "attention_bias": "out" in config.multi_head.biases,
        "rms_norm_eps": config.norm.eps,
        **write_rope(p.rope_of(config)),
    }


FAMILIES = (
    Family(
        model_type="olmo",
        architecture="OlmoForCausalLM",
        read=read_olmo,
        write=write_olmo,
        table=OLMO,
        ignored=p.IGNORED,
    ),
    Family(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        read=read_olmo2,
        write=write_olmo2,
        table=OLMO2,
        ignored=p.IGNORED,
    ),
)
