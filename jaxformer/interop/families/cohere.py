"""Command R and Command A: parallel blocks with one shared norm, scaled logits.

Command A (cohere2) rotates only in its layers with a window; the others see everything and no
positions.
"""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.compare import shortest_cycle
from jaxformer.interop.families import pieces as p
from jaxformer.interop.family import Family
from jaxformer.interop.rope import read_rope, write_rope
from jaxformer.interop.settings import Settings
from jaxformer.interop.tables import Table, norm

TABLE = Table(
    whole=p.WHOLE,
    stacks={
        "decoder": (
            *norm(f"{p.LAYER}.input_layernorm", "pre_norm"),
            *p.ATTENTION,
            *p.QK_NORMS,
            *p.FEED_FORWARD,
        )
    },
)


def read_cohere(settings: Settings) -> c.TransformerConfig:
    """Our configuration from a cohere's."""
    rope = read_rope(settings, pairing="neighbours", base=5e5, max_length=8192)
    norm = _norm(settings)
    return _read(
        settings,
        positions=(rope,),
        qk_norm=c.QKNorm(norm=norm, over="each_head")
        if settings.flag("use_qk_norm", False)
        else None,
    )


def write_cohere(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A cohere's configuration from ours."""
    fields = _write(config) if p.plain_decoder(config) else None
    return fields and {
        **fields,
        "use_qk_norm": config.multi_head.qk_norm is not None,
        **write_rope(p.rope_of(config)),
    }


def read_cohere2(settings: Settings) -> c.TransformerConfig:
    """Our configuration from a cohere2's."""
    # What the first files say of themselves, and what no file says otherwise.
    settings.only("order_of_interleaved_layers", "local_attn_first")
    settings.only("position_embedding_type", "rope_gptj")
    settings.only("rotary_pct", 1)
    settings.only("use_gated_activation", True)
    settings.only("use_parallel_block", True)
    settings.only("use_qk_norm", False)
    settings.only("use_embedding_sharing", settings.flag("tie_word_embeddings", True))
    every = settings.integer("sliding_window_pattern", settings.integer("layer_switch", 4))
    settings.value("_sliding_window_pattern")
    count = settings.integer("num_hidden_layers")
    sliding = p.read_layer_types(settings, count, lambda i: (i + 1) % every != 0)
    window = settings.optional_integer("sliding_window", 4096)
    rope = read_rope(settings, pairing="neighbours", max_length=8192)
    return _read(
        settings,
        positions=shortest_cycle(tuple(rope if here else None for here in sliding)),
        windows=p.windows(settings, sliding, window),
    )


def write_cohere2(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A cohere2's configuration from ours."""
    fields = _write(config)
    return fields and {
        **fields,
        **p.write_layer_types(config),
        **(write_rope(p.rope_of(config)) if _rotates(config) else {}),
    }


def _rotates(config: c.TransformerConfig) -> bool:
    return any(isinstance(kind, c.Rope) for kind in config.multi_head.positions)


def _read(settings: Settings, **attention: Any) -> c.TransformerConfig:
    return c.TransformerConfig(
        **p.read_sizes(settings),
        attention=c.MultiHead(
            **p.read_heads(settings), biases=p.read_biases(settings), **attention
        ),
        feed_forward=(p.read_glu(settings),),
        norm=_norm(settings),
        block="parallel_shared_norm",
        head=c.Head(
            tied=settings.flag("tie_word_embeddings", True),
            multiplier=settings.number("logit_scale", 0.0625),
        ),
    )


def _norm(settings: Settings) -> c.LayerNorm:
    return c.LayerNorm(eps=settings.number("layer_norm_eps", 1e-5), parameters="scale")


def _write(config: c.TransformerConfig) -> dict[str, Any] | None:
    if not isinstance(config.topology, c.Decoder):
        return None
    if not isinstance(config.feed_forward[0], c.GLU):
        return None
    return {
        **p.write_sizes(config),
        "attention_bias": "out" in config.multi_head.biases,
        "layer_norm_eps": config.norm.eps,
        "logit_scale": config.head.multiplier,
    }


FAMILIES = (
    Family("cohere", "CohereForCausalLM", read_cohere, write_cohere, TABLE),
    Family("cohere2", "Cohere2ForCausalLM", read_cohere2, write_cohere2, TABLE),
)
