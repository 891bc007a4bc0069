"""LFM 2 and 2.5: gated short convolutions in place of most attention; dense, or with experts."""

from dataclasses import dataclass, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_hybrid import LlamaHybrid
from jaxformer.interop.families.llama_like_experts import (
    MOE,
    SELECTION_BIAS,
    ExpertsInSomeLayers,
    expert_rules,
)
from jaxformer.interop.families.llama_like_options import Dense, OneRope
from jaxformer.interop.families.option_fields import BiasesField, Field
from jaxformer.interop.transforms import ConvolutionKernel, Flatten

# In released files, and without effect.
UNUSED = (
    "block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_xavier_init "
    "conv_dim conv_dim_out conv_use_xavier_init num_heads"
)
BRANCH = f"{p.LAYER_PREFIX}.feed_forward"
CONVOLUTION = f"{p.LAYER_PREFIX}.conv"
CONVOLUTION_RULES = (
    *m.fused_rules(f"{CONVOLUTION}.in_proj", "attention", ("input_gate", "output_gate", "value")),
    m.MappingRule(
        f"{CONVOLUTION}.conv.weight", "attention/convolution/kernel", ConvolutionKernel()
    ),
    m.MappingRule(f"{CONVOLUTION}.conv.bias", "attention/convolution/bias", Flatten()),
    *m.linear_rules(f"{CONVOLUTION}.out_proj", "attention/out", input_axes=2),
)
RULES = (
    *m.branch_rules(BRANCH, "feed_forward", gate="w1", up="w3", down="w2"),
    *expert_rules(BRANCH, gate="w1", up="w3", down="w2"),
    m.MappingRule(f"{BRANCH}.expert_bias", SELECTION_BIAS),
)


@dataclass(frozen=True)
class Lfm2GLU(Dense):
    """The same network in every layer; files say twice its width, or a multiple of that."""

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """The network."""
        name = "block_ff_dim" if "block_ff_dim" in reader else "intermediate_size"
        width = reader.integer(name)
        reader.get("intermediate_size")
        multiplier = reader.optional_number("block_ffn_dim_multiplier", 1.0)
        multiple = max(1, reader.integer("block_multiple_of", 256))
        if reader.boolean("block_auto_adjust_ff_dim", True):
            width = int(2 * width / 3)
            if multiplier is not None:
                width = -(-int(multiplier * width) // multiple) * multiple
        return (c.GLU(hidden_dim=max(1, width)),)

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """The width as it is."""
        branch: Any = config.feed_forward[0]
        if len(config.feed_forward) > 1 or not isinstance(branch, c.GLU):
            return None
        return {"intermediate_size": branch.hidden_dim, "block_auto_adjust_ff_dim": False}


@dataclass(frozen=True, kw_only=True)
class Lfm2MoE(ExpertsInSomeLayers):
    """Dense layers first, then experts."""

    moe: c.MoE = replace(MOE, router=c.Router(score="sigmoid"))
    fields: tuple[Field, ...] = (
        Field("moe_intermediate_size", "expert.hidden_dim"),
        Field("num_experts", "num_experts", 32),
        Field("num_experts_per_tok", "top_k", 4),
        Field("use_expert_bias", "router.selection_bias", True),
        Field("norm_topk_prob", "router.renormalise", True),
        Field("routed_scaling_factor", "router.scale", 1.0),
    )
    rules: tuple[m.MappingRule, ...] = RULES

    def read_layers(self, reader: ConfigReader, num_layers: int) -> list[bool]:
        """Whether each layer has experts."""
        first = reader.integer("num_dense_layers", 2)
        return [i >= first for i in range(num_layers)]

    def write_layers(self, is_sparse: list[bool]) -> dict[str, Any] | None:
        """The number of dense layers."""
        dense = is_sparse.count(False)
        return {"num_dense_layers": dense} if is_sparse == sorted(is_sparse) else None


@dataclass(frozen=True)
class Lfm2(LlamaHybrid):
    """Short convolutions and attention."""

    def read_mixer(self, reader: ConfigReader, config: c.TransformerConfig) -> c.ShortConvolution:
        """Short convolutions."""
        mixer, heads = super().read_mixer(reader, config), p.heads_of(config).num_heads
        return replace(mixer, num_heads=heads, head_dim=max(1, config.model_dim // heads))

    def read_layer_types(self, reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
        """Which layers have attention, by ``layer_types`` or ``full_attn_idxs``."""
        indices = reader.sequence("full_attn_idxs", int)
        known = {"full_attention": True, "conv": False}
        return p.read_layer_types(
            reader, num_layers, lambda i: indices is None or i in indices, known
        )


def _read_tied(reader: ConfigReader, name: str, default: bool) -> bool:
    return reader.boolean("tie_embedding", reader.boolean(name, default))


LFM2: dict[str, Any] = dict(
    kv_heads=8,
    norm=c.RMSNorm(eps=1e-5),
    norm_field="norm_eps",
    norm_rules=m.layer_norm_rules(
        p.LAYER_PREFIX, pre_attention_norm="operator_norm", pre_feed_forward_norm="ffn_norm"
    ),
    tied=True,
    fields=(Field("tie_word_embeddings", "head.tied", True, read=_read_tied),),
    qk_norm=c.QKNorm(),
    qk_norm_rules=m.qk_norm_rules(p.SELF_ATTENTION, "q_layernorm", "k_layernorm"),
    attention_rules=m.attention_rules(p.SELF_ATTENTION, out="out_proj"),
    top_level=m.top_level_rules("model.embed_tokens", "model.embedding_norm"),
    positions=OneRope(base=1e6, max_length=128_000),
    mixer=c.ShortConvolution(num_heads=1, head_dim=1),
    mixer_name="conv",
    mixer_fields=(
        Field("conv_L_cache", "width", 3),
        BiasesField("conv_bias", "biases", False, layers=("in", "convolution", "out")),
    ),
    mixer_rules=CONVOLUTION_RULES,
    constants={"block_use_swiglu": True, "use_pos_enc": True, "hidden_act": "silu"},
    not_written=("hidden_act", "head_dim"),
    unused=tuple(UNUSED.split()),
)
FAMILIES = (
    Lfm2("lfm2", "Lfm2ForCausalLM", branch=Lfm2GLU(rules=RULES), **LFM2).family(),
    Lfm2("lfm2_moe", "Lfm2MoeForCausalLM", branch=Lfm2MoE(), **LFM2).family(),
)
