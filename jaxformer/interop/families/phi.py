"""Phi-3 (Llama with fused projections) and Phi-3-small (muP scaling, block-sparse attention).

Phi-3-small scales as muP does (embedding, scores and logits), clamps its gated feed-forward, and
attends by blocks in all but some layers.
"""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_comparison import shortest_cycle
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping, linear_rules, norm_rules
from jaxformer.interop.rope_config import read_rope, write_rope
from jaxformer.interop.transforms import Flatten, Fused, FusedQKVPerGroup, Interleaved

QKV = ("attention/query", "attention/key", "attention/value")
GATE_UP = ("feed_forward/gate", "feed_forward/up")


def _with_leaf(paths: tuple[str, ...], leaf: str) -> tuple[str, ...]:
    return tuple(f"{path}/{leaf}" for path in paths)


PHI3 = ParamMapping(
    top_level=p.TOP_LEVEL,
    stacks={
        "decoder": (
            *p.PRE_NORMS,
            MappingRule(
                f"{p.LAYER_PREFIX}.self_attn.qkv_proj.weight", _with_leaf(QKV, "kernel"), Fused()
            ),
            *linear_rules(f"{p.LAYER_PREFIX}.self_attn.o_proj", "attention/out", input_axes=2),
            MappingRule(
                f"{p.LAYER_PREFIX}.mlp.gate_up_proj.weight", _with_leaf(GATE_UP, "kernel"), Fused()
            ),
            *linear_rules(f"{p.LAYER_PREFIX}.mlp.down_proj", "feed_forward/down"),
        )
    },
)
SMALL_QKV = f"{p.LAYER_PREFIX}.self_attn.query_key_value"
SMALL_UP = f"{p.LAYER_PREFIX}.mlp.up_proj"
PHI3SMALL = ParamMapping(
    top_level=(
        p.TOP_LEVEL[0],
        *norm_rules("model.final_layernorm", "decoder/final_norm"),
        p.TOP_LEVEL[-1],
    ),
    stacks={
        "decoder": (
            *p.PRE_NORMS,
            MappingRule(f"{SMALL_QKV}.weight", _with_leaf(QKV, "kernel"), FusedQKVPerGroup()),
            MappingRule(f"{SMALL_QKV}.bias", _with_leaf(QKV, "bias"), FusedQKVPerGroup()),
            *linear_rules(f"{p.LAYER_PREFIX}.self_attn.dense", "attention/out", input_axes=2),
            MappingRule(f"{SMALL_UP}.weight", _with_leaf(GATE_UP, "kernel"), Interleaved()),
            MappingRule(
                f"{SMALL_UP}.bias", _with_leaf(GATE_UP, "bias"), Interleaved(part=Flatten())
            ),
            *linear_rules(f"{p.LAYER_PREFIX}.mlp.down_proj", "feed_forward/down"),
        )
    },
)


def read_phi3(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a phi3 model."""
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        reader.require_value(name, False)
    for name in ("full_attn_mod", "interpolate_factor"):
        reader.require_value(name, 1)
    rope = read_rope(
        reader, fraction=1.0, max_length=4096, original_max_length=4096, aliases=("su", "yarn")
    )
    heads = dict(
        **p.read_heads(reader),
        positions=(rope,),
        windows=(reader.optional_integer("sliding_window"),),
    )
    return p.read_decoder(reader, heads, eps=1e-5)


def write_phi3(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A phi3's configuration from ours; its factors need head_dim = model_dim / num_heads."""
    attention = config.multi_head
    if not (p.is_rope_decoder(config) and isinstance(config.feed_forward[0], c.GLU)):
        return None
    rope = p.first_rope(config)
    fields = {
        **p.write_sizes(config),
        "sliding_window": p.first_window(config),
        "rms_norm_eps": config.norm.eps,
        **write_rope(rope, fraction_name="partial_rotary_factor"),
    }
    if isinstance(rope.scaling, c.LongRope):
        if attention.head_dim * attention.num_heads != config.model_dim:
            return None
        fields["original_max_position_embeddings"] = rope.scaling.original_max_length
        if rope.scaling.attention_factor is None:  # early Phi-3 code supports no other attribute
            old_fields = ("type", "short_factor", "long_factor")
            fields["rope_scaling"] = {name: fields["rope_scaling"][name] for name in old_fields}
    return fields


def read_phi3small(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a phi3small model."""
    reader.require_value("hidden_act", "gegelu")
    reader.require_value("blocksparse_homo_head_pattern", False)
    reader.require_value("rope_position_scale", 1)
    reader.require_value("rope_scaling", reason="RoPE scaling of Phi-3-small is not supported")
    for name in ("pad_sequence_to_multiple_of_64", "reorder_and_upcast_attn", "ff_dim_multiplier"):
        reader.get(name)  # settings of its kernels
    for name in ("blocksparse_triton_kernel_block_size", "gegelu_pad_to_256", "attention_bias"):
        reader.get(name)
    sizes = p.read_sizes(reader)
    heads = p.read_heads(reader, kv_heads=8)
    scaled = reader.boolean("mup_use_scaling", True)
    multiplier = reader.number("mup_attn_multiplier", 1.0)
    width = reader.number("mup_width_multiplier", 8.0)
    embedding = reader.number("mup_embedding_multiplier", 10.0)
    return c.TransformerConfig(
        **sizes,
        attention=c.MultiHead(
            **heads,
            positions=(c.Rope(base=reader.number("rope_embedding_base", 1e6)),),
            windows=_read_blocks(reader, sizes["num_layers"]),
            scale=multiplier / heads["head_dim"] if scaled else None,
            biases=p.ALL_BIASES,
        ),
        feed_forward=(
            c.ClampedGEGLU(
                hidden_dim=reader.integer("ff_intermediate_size"),
                limit=reader.number("gegelu_limit", 20.0),
            ),
        ),
        norm=c.LayerNorm(eps=reader.number("layer_norm_epsilon", 1e-5)),
        embedding=c.Embedding(scale=embedding if scaled else 1.0),
        head=c.LMHead(
            tied=reader.boolean("tie_word_embeddings", True),
            multiplier=1 / width if scaled else 1.0,
            masked_ids=reader.sequence("dummy_token_indices", int) or (),
        ),
    )


def write_phi3small(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A phi3small's configuration from ours."""
    attention, branch = config.multi_head, config.feed_forward[0]
    if not (p.is_rope_decoder(config) and isinstance(branch, c.ClampedGEGLU)):
        return None
    layers = [config.layer(i).window for i in range(config.num_layers)]
    blocks = next((w for w in layers if isinstance(w, c.BlockSparse)), c.BlockSparse())
    dense = [i + 1 for i, window in enumerate(layers) if window is None]
    fields = p.write_sizes(config)
    fields["ff_intermediate_size"] = fields.pop("intermediate_size")
    scale = attention.head_dim**-0.5 if attention.scale is None else attention.scale
    return {
        **fields,
        "hidden_act": "gegelu",
        "gegelu_limit": branch.limit,
        "rope_embedding_base": p.first_rope(config).base,
        "layer_norm_epsilon": config.norm.eps,
        "mup_use_scaling": True,
        "mup_attn_multiplier": scale * attention.head_dim,
        "mup_width_multiplier": 1 / config.head.multiplier,
        "mup_embedding_multiplier": config.embedding.scale,
        "blocksparse_homo_head_pattern": False,
        "blocksparse_block_size": blocks.block_size,
        "blocksparse_num_local_blocks": blocks.local_blocks,
        "blocksparse_vert_stride": blocks.stride,
        "dense_attention_every_n_layers": dense[0] if dense else None,
        **({"dummy_token_indices": list(config.head.masked_ids)} if config.head.masked_ids else {}),
    }


def _read_blocks(reader: ConfigReader, count: int) -> tuple[c.Window, ...]:
    """Block-sparse windows of all layers; every n-th layer is dense."""
    blocks = c.BlockSparse(
        block_size=reader.integer("blocksparse_block_size", 64),
        local_blocks=reader.integer("blocksparse_num_local_blocks", 16),
        stride=reader.integer("blocksparse_vert_stride", 8),
    )
    every = reader.optional_integer("dense_attention_every_n_layers", 2)
    layers = range(1, count + 1)
    return shortest_cycle(tuple(None if every and i % every == 0 else blocks for i in layers))


FAMILIES = (
    Family("phi3", "Phi3ForCausalLM", read_phi3, write_phi3, PHI3),
    Family(
        "phi3small",
        "Phi3SmallForCausalLM",
        read_phi3small,
        write_phi3small,
        PHI3SMALL,
        in_transformers=False,
    ),
)
