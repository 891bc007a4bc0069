"""Command R and Command A: parallel blocks with one shared norm, scaled logits.

Command A (cohere2) rotates only in its layers with a window; the others see everything and no
positions.
"""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_comparison import shortest_cycle
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import ParamMapping, norm_rules
from jaxformer.interop.rope_config import read_rope, write_rope

TABLE = ParamMapping(
    top_level=p.TOP_LEVEL,
    stacks={
        "decoder": (
            *norm_rules(f"{p.LAYER_PREFIX}.input_layernorm", "pre_norm"),
            *p.ATTENTION,
            *p.QK_NORMS,
            *p.FEED_FORWARD,
        )
    },
)


def read_cohere(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a cohere model."""
    rope = read_rope(reader, pairing="neighbours", base=5e5, max_length=8192)
    norm = _norm(reader)
    return _read(
        reader,
        positions=(rope,),
        qk_norm=c.QKNorm(norm=norm, over="each_head")
        if reader.boolean("use_qk_norm", False)
        else None,
    )


def write_cohere(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A cohere's configuration from ours."""
    fields = _write(config) if p.is_rope_decoder(config) else None
    return fields and {
        **fields,
        "use_qk_norm": config.multi_head.qk_norm is not None,
        **write_rope(p.first_rope(config)),
    }


def read_cohere2(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a cohere2 model."""
    # What the first files say of themselves, and what no file says otherwise.
    reader.require_value("order_of_interleaved_layers", "local_attn_first")
    reader.require_value("position_embedding_type", "rope_gptj")
    reader.require_value("rotary_pct", 1)
    reader.require_value("use_gated_activation", True)
    reader.require_value("use_parallel_block", True)
    reader.require_value("use_qk_norm", False)
    reader.require_value("use_embedding_sharing", reader.boolean("tie_word_embeddings", True))
    every = reader.integer("sliding_window_pattern", reader.integer("layer_switch", 4))
    reader.get("_sliding_window_pattern")
    count = reader.integer("num_hidden_layers")
    sliding = p.read_layer_types(reader, count, lambda i: (i + 1) % every != 0)
    window = reader.optional_integer("sliding_window", 4096)
    rope = read_rope(reader, pairing="neighbours", max_length=8192)
    return _read(
        reader,
        positions=shortest_cycle(tuple(rope if here else None for here in sliding)),
        windows=p.window_cycle(reader, sliding, window),
    )


def write_cohere2(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A cohere2's configuration from ours."""
    fields = _write(config)
    return fields and {
        **fields,
        **p.write_layer_types(config),
        **(write_rope(p.first_rope(config)) if _rotates(config) else {}),
    }


def _rotates(config: c.TransformerConfig) -> bool:
    return any(isinstance(kind, c.Rope) for kind in config.multi_head.positions)


def _read(reader: ConfigReader, **attention: Any) -> c.TransformerConfig:
    return c.TransformerConfig(
        **p.read_sizes(reader),
        attention=c.MultiHead(**p.read_heads(reader), biases=p.read_biases(reader), **attention),
        feed_forward=(p.read_glu(reader),),
        norm=_norm(reader),
        block="parallel_shared_norm",
        head=c.LMHead(
            tied=reader.boolean("tie_word_embeddings", True),
            multiplier=reader.number("logit_scale", 0.0625),
        ),
    )


def _norm(reader: ConfigReader) -> c.LayerNorm:
    return c.LayerNorm(eps=reader.number("layer_norm_eps", 1e-5), parameters="scale")


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
