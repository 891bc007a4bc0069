"""Phi-3 (Llama with fused projections), Phi-3.5 MoE, and Phi-3-small (muP, block-sparse attention).

Phi-3.5 MoE has biases, LayerNorm, and two experts chosen by SparseMixer.

Phi-3-small scales as muP does (embedding, scores and logits), clamps its gated feed-forward, and
attends by blocks in all but some layers.
"""

from dataclasses import dataclass, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_like_experts import (
    ACTIVATION,
    MIXTRAL_RULES,
    MOE,
    WIDTH,
    Experts,
)
from jaxformer.interop.families.llama_like_family import HEAD_BIAS, BiasField, LlamaLike
from jaxformer.interop.families.llama_like_options import FUSED_GLU, Dense, OneRope, OneWindow
from jaxformer.interop.families.option_fields import Field
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import (
    decoder_mapping,
    fused_rules,
    linear_rules,
    top_level_rules,
)
from jaxformer.interop.transforms import Flatten, FusedQKVPerGroup, Interleaved

SMALL_QKV = f"{p.SELF_ATTENTION}.query_key_value"


@dataclass(frozen=True, kw_only=True)
class PhiRope(OneRope):
    """RoPE whose length in training is a field of its own."""

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """The fields; factors for long sequences need head_dim = model_dim / num_heads."""
        fields, attention = super().write(config), p.heads_of(config)
        if fields is None or not isinstance(scaling := p.first_rope(config).scaling, c.LongRope):
            return fields
        if attention.head_dim * attention.num_heads != config.model_dim:
            return None
        fields["original_max_position_embeddings"] = scaling.original_max_length
        if scaling.attention_factor is None:  # early Phi-3 code supports no other attribute
            old_fields = ("type", "short_factor", "long_factor")
            fields["rope_scaling"] = {name: fields["rope_scaling"][name] for name in old_fields}
        return fields


PHI3 = LlamaLike(
    "phi3",
    "Phi3ForCausalLM",
    norm=c.RMSNorm(eps=1e-5),
    attention_rules=(
        *fused_rules(f"{p.SELF_ATTENTION}.qkv_proj", "attention", p.QKV),
        *linear_rules(f"{p.SELF_ATTENTION}.o_proj", "attention/out", input_axes=2),
    ),
    windows=OneWindow(default=None),
    positions=PhiRope(
        fraction=1.0, max_length=4096, original_max_length=4096, aliases=("su", "yarn")
    ),
    branch=Dense(rules=FUSED_GLU),
    constants={
        **dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias"), False),
        **dict.fromkeys(("full_attn_mod", "interpolate_factor"), 1),
    },
)


def _read_two_experts(reader: ConfigReader, name: str, default: int) -> int:
    reader.require_value(name, default, reason="SparseMixer chooses two experts here")
    return default


@dataclass(frozen=True, kw_only=True)
class PhimoeRope(OneRope):
    """RoPE whose factor of attention stands under two names, for short and for long sequences.

    Transformers 5 turns by the short factors whatever the length, the released code by the long
    ones beyond the context of the training, as here.
    """

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """The fields of config.json."""
        fields = super().write(config)
        if fields is None or not isinstance(p.first_rope(config).scaling, c.LongRope):
            return fields
        for name in ("rope_scaling", "rope_parameters"):
            factor = fields[name].pop("attention_factor", None)
            fields[name] |= {"short_mscale": factor, "long_mscale": factor}
        return fields

    def read_rope(self, reader: ConfigReader) -> c.Rope:
        """RoPE of the whole config.json."""
        rope = super().read_rope(reader)
        if rope.scaling is None:
            return rope
        section = reader.section("rope_scaling") or reader.section("rope_parameters") or reader
        short, long = (section.number(f"{name}_mscale") for name in ("short", "long"))
        if not isinstance(rope.scaling, c.LongRope):
            name = "rope_type" if "rope_type" in section else "type"
            section.add_problem(name, "expected default or longrope.")
            return rope
        if short != long and not section.problems:
            section.add_problem("long_mscale", f"it must equal short_mscale, {short}.")
        return replace(rope, scaling=replace(rope.scaling, attention_factor=short))


PHIMOE = LlamaLike(
    "phimoe",
    "PhimoeForCausalLM",
    kv_heads=8,
    norm=c.LayerNorm(),
    windows=OneWindow(default=None),
    positions=PhimoeRope(base=1e6, max_length=131_072),
    biases=(BiasField("attention_bias", p.ALL_BIASES), BiasField("lm_head_bias", HEAD_BIAS)),
    branch=Experts(
        moe=replace(MOE, router=c.SparseMixer()),
        fields=(
            WIDTH,
            ACTIVATION,
            Field("num_local_experts", "num_experts", 16),
            Field("num_experts_per_tok", "top_k", 2, _read_two_experts),
            Field("router_jitter_noise", "router.jitter", 0.01),
        ),
        rules=MIXTRAL_RULES,
        unused=("input_jitter_noise",),  # of training
    ),
)
PHI3SMALL = decoder_mapping(
    top_level_rules("model.embed_tokens", "model.final_layernorm"),
    *p.PRE_NORMS,
    *fused_rules(SMALL_QKV, "attention", p.QKV, FusedQKVPerGroup(), FusedQKVPerGroup()),
    *linear_rules(f"{p.SELF_ATTENTION}.dense", "attention/out", input_axes=2),
    *fused_rules(
        f"{p.LAYER_PREFIX}.mlp.up_proj",
        "feed_forward",
        ("gate", "up"),
        Interleaved(),
        Interleaved(part=Flatten()),
    ),
    *linear_rules(f"{p.LAYER_PREFIX}.mlp.down_proj", "feed_forward/down"),
)


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
    attention, branch = p.heads_of(config), config.feed_forward[0]
    if not (p.is_rope_decoder(config) and isinstance(branch, c.ClampedGEGLU)):
        return None
    layers = [layer.window for layer in config.layers]
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
    return tuple(None if every and i % every == 0 else blocks for i in layers)


FAMILIES = (
    PHI3.family(),
    PHIMOE.family(),
    Family(
        "phi3small",
        "Phi3SmallForCausalLM",
        read_phi3small,
        write_phi3small,
        PHI3SMALL,
        in_transformers=False,
    ),
)
