"""Phi-3 (Llama with fused projections) and Phi-3-small (muP scaling, block-sparse attention).

Phi-3-small scales as muP does (embedding, scores and logits), clamps its gated feed-forward, and
attends by blocks in all but some layers.
"""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.compare import shortest_cycle
from jaxformer.interop.families import pieces as p
from jaxformer.interop.family import Family
from jaxformer.interop.rope import read_rope, write_rope
from jaxformer.interop.settings import Settings
from jaxformer.interop.tables import Row, Table, linear, norm
from jaxformer.interop.transforms import Flat, Fused, GroupedHeads, Interleaved

QKV = ("attention/query", "attention/key", "attention/value")
GATE_UP = ("feed_forward/gate", "feed_forward/up")


def _each(paths: tuple[str, ...], leaf: str) -> tuple[str, ...]:
    return tuple(f"{path}/{leaf}" for path in paths)


PHI3 = Table(
    whole=p.WHOLE,
    stacks={
        "decoder": (
            *p.PRE_NORMS,
            Row(f"{p.LAYER}.self_attn.qkv_proj.weight", _each(QKV, "kernel"), Fused()),
            *linear(f"{p.LAYER}.self_attn.o_proj", "attention/out", input_axes=2),
            Row(f"{p.LAYER}.mlp.gate_up_proj.weight", _each(GATE_UP, "kernel"), Fused()),
            *linear(f"{p.LAYER}.mlp.down_proj", "feed_forward/down"),
        )
    },
)
SMALL_QKV = f"{p.LAYER}.self_attn.query_key_value"
SMALL_UP = f"{p.LAYER}.mlp.up_proj"
PHI3SMALL = Table(
    whole=(p.WHOLE[0], *norm("model.final_layernorm", "decoder/final_norm"), p.WHOLE[-1]),
    stacks={
        "decoder": (
            *p.PRE_NORMS,
            Row(f"{SMALL_QKV}.weight", _each(QKV, "kernel"), GroupedHeads()),
            Row(f"{SMALL_QKV}.bias", _each(QKV, "bias"), GroupedHeads()),
            *linear(f"{p.LAYER}.self_attn.dense", "attention/out", input_axes=2),
            Row(f"{SMALL_UP}.weight", _each(GATE_UP, "kernel"), Interleaved()),
            Row(f"{SMALL_UP}.bias", _each(GATE_UP, "bias"), Interleaved(part=Flat())),
            *linear(f"{p.LAYER}.mlp.down_proj", "feed_forward/down"),
        )
    },
)


def read_phi3(settings: Settings) -> c.TransformerConfig:
    """Our configuration from a phi3's."""
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        settings.only(name, False)
    for name in ("full_attn_mod", "interpolate_factor"):
        settings.only(name, 1)
    rope = read_rope(
        settings, fraction=1.0, max_length=4096, original_max_length=4096, aliases=("su", "yarn")
    )
    heads = dict(
        **p.read_heads(settings),
        positions=(rope,),
        windows=(settings.optional_integer("sliding_window"),),
    )
    return p.read_decoder(settings, heads, eps=1e-5)


def write_phi3(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A phi3's configuration from ours; its factors count pairs of a head of width / heads."""
    attention = config.multi_head
    if not (p.plain_decoder(config) and isinstance(config.feed_forward[0], c.GLU)):
        return None
    rope = p.rope_of(config)
    fields = {
        **p.write_sizes(config),
        "sliding_window": p.window_of(config),
        "rms_norm_eps": config.norm.eps,
        **write_rope(rope, fraction_name="partial_rotary_factor"),
    }
    if isinstance(rope.scaling, c.LongRope):
        if attention.head_dim * attention.num_heads != config.model_dim:
            return None
        fields["original_max_position_embeddings"] = rope.scaling.original_max_length
        if rope.scaling.attention_factor is None:  # the first Phi-3 code takes no more than this
            old_fields = ("type", "short_factor", "long_factor")
            fields["rope_scaling"] = {name: fields["rope_scaling"][name] for name in old_fields}
    return fields


def read_phi3small(settings: Settings) -> c.TransformerConfig:
    """Our configuration from a phi3small's."""
    settings.only("hidden_act", "gegelu")
    settings.only("blocksparse_homo_head_pattern", False)
    settings.only("rope_position_scale", 1)
    settings.only("rope_scaling", reason="Phi-3-small's factors of length are not built")
    for name in ("pad_sequence_to_multiple_of_64", "reorder_and_upcast_attn", "ff_dim_multiplier"):
        settings.value(name)  # how its kernels work
    for name in ("blocksparse_triton_kernel_block_size", "gegelu_pad_to_256", "attention_bias"):
        settings.value(name)
    sizes = p.read_sizes(settings)
    heads = p.read_heads(settings, kv_heads=8)
    scaled = settings.flag("mup_use_scaling", True)
    multiplier = settings.number("mup_attn_multiplier", 1.0)
    width = settings.number("mup_width_multiplier", 8.0)
    embedding = settings.number("mup_embedding_multiplier", 10.0)
    return c.TransformerConfig(
        **sizes,
        attention=c.MultiHead(
            **heads,
            positions=(c.Rope(base=settings.number("rope_embedding_base", 1e6)),),
            windows=_read_blocks(settings, sizes["num_layers"]),
            scale=multiplier / heads["head_dim"] if scaled else None,
            biases=p.ALL_BIASES,
        ),
        feed_forward=(
            c.ClampedGEGLU(
                hidden_dim=settings.integer("ff_intermediate_size"),
                limit=settings.number("gegelu_limit", 20.0),
            ),
        ),
        norm=c.LayerNorm(eps=settings.number("layer_norm_epsilon", 1e-5)),
        embedding=c.Embedding(scale=embedding if scaled else 1.0),
        head=c.Head(
            tied=settings.flag("tie_word_embeddings", True),
            multiplier=1 / width if scaled else 1.0,
            masked_ids=settings.sequence("dummy_token_indices", int) or (),
        ),
    )


def write_phi3small(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A phi3small's configuration from ours."""
    attention, branch = config.multi_head, config.feed_forward[0]
    if not (p.plain_decoder(config) and isinstance(branch, c.ClampedGEGLU)):
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
        "rope_embedding_base": p.rope_of(config).base,
        "layer_norm_epsilon": config.norm.eps,
        "mup_use_scaling": True,
        "mup_attn_multiplier": scale * attention.head_dim,
        "mup_width_multiplier": 1 / config.head.multiplier,
        "mup_embedding_multiplier": config.embedding.scale,
        "blocksparse_homo_head_pattern": False,
        "blocksparse_block_size": blocks.block,
        "blocksparse_num_local_blocks": blocks.local_blocks,
        "blocksparse_vert_stride": blocks.stride,
        "dense_attention_every_n_layers": dense[0] if dense else None,
        **({"dummy_token_indices": list(config.head.masked_ids)} if config.head.masked_ids else {}),
    }


def _read_blocks(settings: Settings, count: int) -> tuple[c.Window, ...]:
    """Block-sparse windows of all layers; every n-th layer is dense."""
    blocks = c.BlockSparse(
        block=settings.integer("blocksparse_block_size", 64),
        local_blocks=settings.integer("blocksparse_num_local_blocks", 16),
        stride=settings.integer("blocksparse_vert_stride", 8),
    )
    every = settings.optional_integer("dense_attention_every_n_layers", 2)
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
