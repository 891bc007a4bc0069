"""LFM 2 and 2.5: gated short convolutions in place of most attention; dense, or with experts."""

from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_comparison import shortest_cycle
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_like_experts import expert_rules
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping, linear_rules, norm_rules
from jaxformer.interop.rope_config import read_rope, write_rope
from jaxformer.interop.transforms import ConvolutionKernel, Flatten, Fused, LinearKernel

# In released files, and without effect.
UNUSED = (
    "block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_xavier_init "
    "conv_dim conv_dim_out conv_use_xavier_init num_heads"
).split()
LAYER = "model.layers.{layer}"
CONVOLUTION_BIASES: tuple[Any, ...] = ("in", "convolution", "out")
GATES = tuple(f"attention/{name}" for name in ("input_gate", "output_gate", "value"))
CONVOLUTION = (
    MappingRule(f"{LAYER}.conv.in_proj.weight", tuple(f"{x}/kernel" for x in GATES), Fused()),
    MappingRule(
        f"{LAYER}.conv.in_proj.bias", tuple(f"{x}/bias" for x in GATES), Fused(part=Flatten())
    ),
    MappingRule(f"{LAYER}.conv.conv.weight", "attention/convolution/kernel", ConvolutionKernel()),
    MappingRule(f"{LAYER}.conv.conv.bias", "attention/convolution/bias", Flatten()),
    *linear_rules(f"{LAYER}.conv.out_proj", "attention/out", input_axes=2),
)
ATTENTION = (
    *linear_rules(f"{LAYER}.self_attn.q_proj", "attention/query"),
    *linear_rules(f"{LAYER}.self_attn.k_proj", "attention/key"),
    *linear_rules(f"{LAYER}.self_attn.v_proj", "attention/value"),
    *linear_rules(f"{LAYER}.self_attn.out_proj", "attention/out", input_axes=2),
    *norm_rules(f"{LAYER}.self_attn.q_layernorm", "attention/query_norm"),
    *norm_rules(f"{LAYER}.self_attn.k_layernorm", "attention/key_norm"),
)
FEED_FORWARD = (
    *linear_rules(f"{LAYER}.feed_forward.w1", "feed_forward/gate"),
    *linear_rules(f"{LAYER}.feed_forward.w3", "feed_forward/up"),
    *linear_rules(f"{LAYER}.feed_forward.w2", "feed_forward/down"),
    *expert_rules(f"{LAYER}.feed_forward", gate="w1", up="w3", down="w2"),
    MappingRule(f"{LAYER}.feed_forward.expert_bias", "feed_forward/selection_bias"),
)
TABLE = ParamMapping(
    top_level=(
        MappingRule("model.embed_tokens.weight", "embedding/tokens/embedding"),
        *norm_rules("model.embedding_norm", "decoder/final_norm"),
        MappingRule("lm_head.weight", "head/kernel", LinearKernel()),
    ),
    stacks={
        "decoder": (
            *norm_rules(f"{LAYER}.operator_norm", "pre_attention_norm"),
            *norm_rules(f"{LAYER}.ffn_norm", "pre_feed_forward_norm"),
            *(replace(rule, kind=c.ShortConvolution) for rule in CONVOLUTION),
            *(replace(rule, kind=c.MultiHead) for rule in ATTENTION),
            *FEED_FORWARD,
        )
    },
)


def read_dense(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of an lfm2 model."""
    name = "block_ff_dim" if "block_ff_dim" in reader else "intermediate_size"
    width = reader.integer(name)
    reader.get("intermediate_size")
    multiplier = reader.optional_number("block_ffn_dim_multiplier", 1.0)
    multiple = max(1, reader.integer("block_multiple_of", 256))
    if reader.boolean("block_auto_adjust_ff_dim", True):
        width = int(2 * width / 3)
        if multiplier is not None:
            width = -(-int(multiplier * width) // multiple) * multiple
    return _read(reader, (c.GLU(hidden_dim=max(1, width)),))


def read_moe(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of an lfm2_moe model."""
    layers = reader.integer("num_hidden_layers")
    num_dense = min(layers, reader.integer("num_dense_layers", 2))
    dense = c.GLU(hidden_dim=reader.integer("intermediate_size"))
    router = c.Router(
        score="sigmoid",
        selection_bias=reader.boolean("use_expert_bias", True),
        renormalise=reader.boolean("norm_topk_prob", True),
        scale=reader.number("routed_scaling_factor", 1.0),
    )
    moe = c.MoE(
        expert=c.GLU(hidden_dim=reader.integer("moe_intermediate_size")),
        num_experts=reader.integer("num_experts", 32),
        top_k=reader.integer("num_experts_per_tok", 4),
        router=router,
    )
    return _read(reader, (dense,) * num_dense + (moe,) * (layers - num_dense))


def _read(reader: ConfigReader, branches: tuple[c.FeedForward, ...]) -> c.TransformerConfig:
    for name in UNUSED:
        reader.get(name)
    reader.require_value("block_use_swiglu", True)
    reader.require_value("use_pos_enc", True)
    sizes = p.read_sizes(reader)
    heads = p.read_heads(reader, kv_heads=8)
    norm = c.RMSNorm(eps=reader.number("norm_eps", 1e-5))
    attention = c.MultiHead(
        **heads,
        positions=(read_rope(reader, base=1e6, max_length=128_000),),
        qk_norm=c.QKNorm(norm=norm),
    )
    convolution = c.ShortConvolution(
        num_heads=heads["num_heads"],
        head_dim=max(1, sizes["model_dim"] // max(1, heads["num_heads"])),
        width=reader.integer("conv_L_cache", 3),
        biases=CONVOLUTION_BIASES if reader.boolean("conv_bias", False) else (),
    )
    tied = reader.boolean("tie_embedding", reader.boolean("tie_word_embeddings", True))
    return c.TransformerConfig(
        **sizes,
        attention=_read_kinds(reader, sizes["num_layers"], attention, convolution),
        feed_forward=shortest_cycle(branches),
        norm=norm,
        head=c.LMHead(tied=tied),
    )


def _read_kinds(
    reader: ConfigReader, count: int, attention: c.MultiHead, convolution: c.ShortConvolution
) -> c.Attention:
    """The kind of each layer, by ``layer_types`` or ``full_attn_idxs``."""
    types = reader.sequence("layer_types", str)
    indices = reader.sequence("full_attn_idxs", int)
    if types is None:
        full = range(count) if indices is None else indices
        types = tuple("full_attention" if i in full else "conv" for i in range(count))
    if len(types) != count or set(types) - {"full_attention", "conv"}:
        reader.add_problem("layer_types", f"expected full_attention or conv for {count} layers.")
        return attention
    kinds = tuple(attention if x == "full_attention" else convolution for x in types)
    return attention if set(types) == {"full_attention"} else c.Hybrid(kinds=shortest_cycle(kinds))


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """Fields of config.json, or None for another model."""
    kinds = [config.layer(i).attention for i in range(config.num_layers)]
    convolutions = {x for x in kinds if isinstance(x, c.ShortConvolution)}
    heads = [x for x in kinds if isinstance(x, c.MultiHead)]
    if not heads or len(convolutions) != 1 or len(heads) + len(convolutions) > len(kinds) + 1:
        return None
    convolution, attention = next(iter(convolutions)), heads[0]
    rope = attention.positions[0]
    if not isinstance(rope, c.Rope):
        return None
    types = ["full_attention" if isinstance(x, c.MultiHead) else "conv" for x in kinds]
    fields = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "norm_eps": config.norm.eps,
        "conv_L_cache": convolution.width,
        "conv_bias": bool(convolution.biases),
        "layer_types": types,
        "tie_word_embeddings": config.head.tied,
        **write_rope(rope),
    }
    branches = [config.layer(i).feed_forward for i in range(config.num_layers)]
    if len(set(branches)) == 1 and isinstance(branches[0], c.GLU):
        width = branches[0].hidden_dim
        return fields | {"intermediate_size": width, "block_auto_adjust_ff_dim": False}
    return _write_moe(fields, branches)


def _write_moe(fields: dict[str, Any], branches: list[c.FeedForward]) -> dict[str, Any] | None:
    """Fields of the experts and of the dense layers before them."""
    moes = [x for x in branches if isinstance(x, c.MoE)]
    dense = [x for x in branches if isinstance(x, c.GLU)]
    if not moes or branches != dense + moes:
        return None
    moe = moes[0]
    return fields | {
        "intermediate_size": dense[0].hidden_dim if dense else moe.expert.hidden_dim,
        "num_dense_layers": len(dense),
        "moe_intermediate_size": moe.expert.hidden_dim,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "use_expert_bias": moe.router.selection_bias,
        "norm_topk_prob": moe.router.renormalise,
        "routed_scaling_factor": moe.router.scale,
    }


FAMILIES = (
    Family("lfm2", "Lfm2ForCausalLM", read_dense, write, TABLE, attention_type=c.Hybrid),
    Family("lfm2_moe", "Lfm2MoeForCausalLM", read_moe, write, TABLE, attention_type=c.Hybrid),
)
