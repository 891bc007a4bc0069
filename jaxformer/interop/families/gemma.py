"""Gemma 2 and 3: pre- and post-norms, scales stored as scale - 1, windows by layer.

VaultGemma is Gemma 2 without post-norms.

`gemma3` is the text part of a model that also reads images; it can be read, and is written as
`gemma3_text`.
"""

import math
from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_comparison import shortest_cycle
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.hf_activations import HF_ACTIVATIONS, hf_activation_name
from jaxformer.interop.family import INV_FREQ_PATTERNS, Family
from jaxformer.interop.param_mapping import ParamMapping, norm_rules
from jaxformer.interop.rope_config import (
    read_rope,
    read_rope_section,
    write_rope,
    write_rope_section,
)

TABLE = ParamMapping(
    top_level=p.TOP_LEVEL,
    stacks={
        "decoder": (
            *p.ATTENTION,
            *p.QK_NORMS,
            *p.FEED_FORWARD,
            *norm_rules(f"{p.LAYER_PREFIX}.input_layernorm", "pre_attention_norm"),
            *norm_rules(f"{p.LAYER_PREFIX}.post_attention_layernorm", "post_attention_norm"),
            *norm_rules(f"{p.LAYER_PREFIX}.pre_feedforward_layernorm", "pre_feed_forward_norm"),
            *norm_rules(f"{p.LAYER_PREFIX}.post_feedforward_layernorm", "post_feed_forward_norm"),
        )
    },
)
DEFAULT_SIZES = {"vocab_size": 262_208, "hidden_size": 2304, "num_hidden_layers": 26}
DEFAULT_HIDDEN_DIM = 9216
GLOBAL_BASE, LOCAL_BASE = 1e6, 1e4
MAX_LENGTH = 131_072


def read_gemma2(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a gemma2 model."""
    return _read_gemma2(reader)


def read_vaultgemma(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a vaultgemma model."""
    return replace(_read_gemma2(reader), norm_placement="pre")


def _read_gemma2(reader: ConfigReader) -> c.TransformerConfig:
    sizes = p.read_sizes(reader)
    sliding = p.read_layer_types(reader, sizes["num_layers"], lambda i: i % 2 == 0)
    window = reader.optional_integer("sliding_window", 4096)
    reader.require_value("sliding_window_size", window, reason="it differs from sliding_window")
    rope = read_rope(reader, max_length=8192)
    cap = reader.optional_number("attn_logit_softcapping", 50.0)
    return _read(
        reader,
        sizes,
        positions=(rope,),
        windows=p.window_cycle(reader, sliding, window),
        logit_softcap=cap,
        final_softcap=30.0,
    )


def read_gemma3_text(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a gemma3_text model; it may lack sizes."""
    sizes = p.read_sizes(reader, **DEFAULT_SIZES)
    every = reader.positive_integer("sliding_window_pattern", 6)
    reader.get("_sliding_window_pattern")
    sliding = p.read_layer_types(reader, sizes["num_layers"], lambda i: (i + 1) % every != 0)
    window = reader.optional_integer("sliding_window", 4096)
    reader.require_value("attn_logit_softcapping", reason="Gemma 3 does not cap its scores")
    full, local = _read_ropes(reader)
    return _read(
        reader,
        sizes,
        positions=shortest_cycle(tuple(local if here else full for here in sliding)),
        windows=p.window_cycle(reader, sliding, window),
        qk_norm=c.QKNorm(norm=_norm(reader), over="head"),
    )


def read_gemma3(reader: ConfigReader) -> c.TransformerConfig:
    """Read the text part of the config.json of a gemma3 model."""
    for name in ("vision_config", "mm_tokens_per_image", "image_token_index"):
        reader.get(name)
    for name in ("boi_token_index", "eoi_token_index"):
        reader.get(name)
    text = reader.section("text_config") or ConfigReader({})
    tied = reader.boolean("tie_word_embeddings", True)
    config = read_gemma3_text(text)
    return config if tied or not config.head.tied else _untied(config)


def write_gemma2(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A gemma2's configuration from ours."""
    fields = _write(config)
    if fields is None:
        return None
    cap = config.multi_head.logit_softcap
    return {**fields, "attn_logit_softcapping": cap, **write_rope(p.first_rope(config))}


def write_gemma3_text(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A gemma3_text's configuration from ours."""
    fields = _write(config)
    if fields is None:
        return None
    layers = [config.layer(i) for i in range(config.num_layers)]
    ropes = {
        layer.window is None: layer.positions
        for layer in reversed(layers)
        if isinstance(layer.positions, c.Rope)
    }
    full, lengths = write_rope_section(ropes.get(True, c.Rope(base=GLOBAL_BASE)))
    local, _ = write_rope_section(ropes.get(False, c.Rope(base=LOCAL_BASE)))
    scaling = {name: v for name, v in full.items() if name != "rope_theta"}
    return {
        **fields,
        **lengths,
        "rope_theta": full["rope_theta"],
        "rope_local_base_freq": local["rope_theta"],
        "rope_scaling": None if full["rope_type"] == "default" else scaling,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


def _read(
    reader: ConfigReader,
    sizes: dict[str, Any],
    *,
    final_softcap: float | None = None,
    **attention: Any,
) -> c.TransformerConfig:
    reader.get("hidden_act")  # in old files; hidden_activation takes precedence
    scalar = reader.number("query_pre_attn_scalar", 256.0)
    if scalar <= 0:
        reader.add_problem("query_pre_attn_scalar", "expected a number above 0.")
        scalar = 1.0
    return c.TransformerConfig(
        **sizes,
        attention=c.MultiHead(
            **p.read_heads(reader, heads=8, kv_heads=4, head_dim=256),
            scale=scalar**-0.5,
            biases=p.read_biases(reader),
            **attention,
        ),
        feed_forward=(
            c.GLU(
                hidden_dim=reader.integer("intermediate_size", DEFAULT_HIDDEN_DIM),
                activation=reader.choice("hidden_activation", "gelu_pytorch_tanh", HF_ACTIVATIONS),
            ),
        ),
        norm=_norm(reader),
        norm_placement="sandwich",
        embedding=c.Embedding(scale=math.sqrt(sizes["model_dim"])),
        head=c.LMHead(
            tied=reader.boolean("tie_word_embeddings", True),
            softcap=reader.optional_number("final_logit_softcapping", final_softcap),
        ),
    )


def _write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """Attributes of both; num_heads must divide model_dim (transformers)."""
    branch, attention = config.feed_forward[0], config.multi_head
    divides = config.model_dim % attention.num_heads == 0
    if not (p.is_rope_decoder(config) and isinstance(branch, c.GLU) and divides):
        return None
    scale = attention.head_dim**-0.5 if attention.scale is None else attention.scale
    scalar = scale**-2
    fields = p.write_sizes(config)
    return {
        **fields,
        **p.write_layer_types(config),
        "hidden_activation": hf_activation_name(branch.activation),
        "attention_bias": "out" in attention.biases,
        "query_pre_attn_scalar": round(scalar) if math.isclose(scalar, round(scalar)) else scalar,
        "final_logit_softcapping": config.head.softcap,
        "rms_norm_eps": config.norm.eps,
    }


def _norm(reader: ConfigReader) -> c.RMSNorm:
    return c.RMSNorm(eps=reader.number("rms_norm_eps", 1e-6), scale_offset=1.0)


def _read_ropes(reader: ConfigReader) -> tuple[c.Rope, c.Rope]:
    """RoPE of full-attention layers and of sliding-window layers."""
    new, old = reader.section("rope_parameters"), reader.section("rope_scaling")
    length = reader.integer("max_position_embeddings", MAX_LENGTH)
    bases = (
        reader.number("rope_theta", GLOBAL_BASE),
        reader.number("rope_local_base_freq", LOCAL_BASE),
    )
    sections = [new and new.section(f"{kind}_attention") for kind in ("full", "sliding")]
    base = sections[0].number("rope_theta", bases[0]) if sections[0] else bases[0]
    if old is not None and sections[0] is not None:
        for name in sections[0].values:
            sections[0].get(name)
    full, local = old or sections[0] or ConfigReader({}), sections[1] or ConfigReader({})
    return (
        read_rope_section(full, base=base, max_length=length),
        read_rope_section(local, base=bases[1], max_length=length),
    )


def _untied(config: c.TransformerConfig) -> c.TransformerConfig:
    return replace(config, head=replace(config.head, tied=False))


FAMILIES = (
    Family("gemma2", "Gemma2ForCausalLM", read_gemma2, write_gemma2, TABLE),
    Family("vaultgemma", "VaultGemmaForCausalLM", read_vaultgemma, write_gemma2, TABLE),
    Family("gemma3_text", "Gemma3ForCausalLM", read_gemma3_text, write_gemma3_text, TABLE),
    Family(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        read_gemma3,
        lambda config: None,
        TABLE,
        ignored_tensors=(*INV_FREQ_PATTERNS, r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
        key_renames=((r"^language_model\.", ""), (r"^model\.language_model\.", "model.")),
    ),
)
