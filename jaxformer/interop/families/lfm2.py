"""LFM 2, 2.5 and 3: gated short convolutions in place of most attention; dense, or with experts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_fields import (
    BiasesField,
    Derived,
    Field,
    NotWritten,
    Options,
    PresenceField,
    Unused,
    fixed,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import experts as e
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.gemma4 import ROPES, Gemma4Ropes
from jaxformer.interop.families.mixers import Kind, Mixer, MixerOrWindows, of_kind
from jaxformer.interop.families.windows import PerLayer
from jaxformer.interop.family import Family
from jaxformer.interop.rope_config import RopeField
from jaxformer.interop.transforms import DEPTHWISE, FLAT
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import like

BRANCH = f"{p.LAYER_PREFIX}.feed_forward"
CONVOLUTION = f"{p.LAYER_PREFIX}.conv"


class Lfm2Width:
    """The width of the network; files say twice its width, or a multiple of that."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        name = "block_ff_dim" if "block_ff_dim" in reader else "intermediate_size"
        width = reader.integer(name)
        reader.get("intermediate_size")
        multiplier = reader.optional_number("block_ffn_dim_multiplier", 1.0)
        multiple = max(1, reader.integer("block_multiple_of", 256))
        if reader.boolean("block_auto_adjust_ff_dim", True):
            width = int(2 * width / 3)
            if multiplier is not None:
                width = -(-int(multiplier * width) // multiple) * multiple
        return {"feed_forward.hidden_dim": max(1, width)}

    def write(self, model: c.TransformerConfig) -> Options | None:
        branch: Any = model.feed_forward[0]
        if len(model.feed_forward) > 1 or not isinstance(branch, c.GLU):
            return None
        return {"intermediate_size": branch.hidden_dim, "block_auto_adjust_ff_dim": False}


def by_indices(reader: ConfigReader, num_layers: int) -> Callable[[int], bool]:
    """Attention in the layers of ``full_attn_idxs``, or in all."""
    indices = reader.sequence("full_attn_idxs", int)
    return lambda i: indices is None or i in indices


def read_tied(reader: ConfigReader, name: str, default: bool) -> bool:
    """Whether the head is tied, which released files say under another name."""
    return reader.boolean("tie_embedding", reader.boolean(name, default))


EXPERTS = e.Experts(
    moe=replace(e.MOE, router=c.Router(score="sigmoid")),
    fields=(
        Field("moe_intermediate_size", "expert.hidden_dim"),
        Field("num_experts", "num_experts", 32),
        Field("num_experts_per_tok", "top_k", 4),
        Field("use_expert_bias", "router.selection_bias", True),
        Field("norm_topk_prob", "router.renormalise", True),
        Field("routed_scaling_factor", "router.scale", 1.0),
    ),
    layers=e.DenseFirst(2, "num_dense_layers"),
    dense=(Field("intermediate_size", "hidden_dim"),),
)


def convolution(taps: int) -> Kind:
    """Fields of a short convolution, with this default of its taps."""
    fields = (
        Field("conv_L_cache", "width", taps),
        BiasesField("conv_bias", "biases", layers=("in", "convolution", "out")),
        Derived("num_heads", lambda x: x["attention.num_heads"]),
        Derived("head_dim", p.head_width),
    )
    return Kind(c.ShortConvolution(num_heads=1, head_dim=1), fields)


def lfm3_word(layer: int) -> str:
    """The kind of a layer of LFM 3."""
    if layer % 4 == 2:
        return "full_attention"
    return "sliding_attention" if layer and layer % 4 == 0 else "conv"


MODEL = like(LLAMA, qk_norm=c.QKNorm())
*SIZES, HEAD_DIM = p.sizes(kv_heads=8)
FIELDS = (
    *SIZES,
    NotWritten(HEAD_DIM),
    *p.norm_eps(1e-5, "norm_eps"),
    Field("tie_word_embeddings", "head.tied", True, read_tied),
    *fixed(block_use_swiglu=True, use_pos_enc=True, hidden_act="silu"),
    # In released files, and without effect.
    Unused("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale"),
    Unused("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init"),
    Unused("num_heads"),
    RopeField(base=1e6, max_length=128_000),
    Mixer(
        kind=convolution(taps=3),
        types=PerLayer("layer_types", {"full_attention": True, "conv": False}),
        default=by_indices,
    ),
)
RULES = (
    *m.top_level_rules("model.embed_tokens", "model.embedding_norm"),
    *m.layer_norm_rules(
        p.LAYER_PREFIX, pre_attention_norm="operator_norm", pre_feed_forward_norm="ffn_norm"
    ),
    *of_kind(
        c.ShortConvolution,
        *m.fused_rules(
            f"{CONVOLUTION}.in_proj", "attention", ("input_gate", "output_gate", "value")
        ),
        m.MappingRule(f"{CONVOLUTION}.conv.weight", "attention/convolution/kernel", DEPTHWISE),
        m.MappingRule(f"{CONVOLUTION}.conv.bias", "attention/convolution/bias", FLAT),
        *m.linear_rules(f"{CONVOLUTION}.out_proj", "attention/out", input_axes=2),
    ),
    *m.branch_rules(BRANCH, "feed_forward", gate="w1", up="w3", down="w2"),
)
MAPPING = m.decoder_mapping(
    *RULES,
    *of_kind(
        c.MultiHead,
        *m.attention_rules(p.SELF_ATTENTION, out="out_proj"),
        *m.qk_norm_rules(p.SELF_ATTENTION, "q_layernorm", "k_layernorm"),
    ),
    *e.expert_rules(BRANCH, gate="w1", up="w3", down="w2"),
    m.MappingRule(f"{BRANCH}.expert_bias", e.SELECTION_BIAS),
)
KINDS = (c.ShortConvolution, c.MultiHead)
LFM3_PLACEMENTS = {True: "sandwich", False: "pre"}
LFM3_GATE = c.OutputGate(over="head")
LFM3_ROPES = ROPES | {"full_attention": ROPES["full_attention"] | {"partial_rotary_factor": 0.5}}
FAMILIES = (
    Family(
        "lfm2", "Lfm2ForCausalLM", MODEL, (*FIELDS, Lfm2Width()), MAPPING, attention_types=KINDS
    ),
    Family(
        "lfm2_moe", "Lfm2MoeForCausalLM", MODEL, (*FIELDS, EXPERTS), MAPPING, attention_types=KINDS
    ),
    # As LFM 2, except: windows, p-RoPE without one, gates of heads, norms after the branches.
    Family(
        "lfm3",
        "Lfm3ForCausalLM",
        MODEL,
        (
            *p.decoder(
                heads=16, kv_heads=4, head_dim=128, eps=1e-5, eps_name="norm_eps", tied=True
            ),
            Field("intermediate_size", "feed_forward.hidden_dim", 7680),
            Field("use_sandwich_norm", "norm_placement", True, choices=LFM3_PLACEMENTS),
            PresenceField("use_attention_gate", "attention.output_gate", True, part=LFM3_GATE),
            p.ATTENTION_BIAS,
            MixerOrWindows(kind=convolution(taps=7), word="conv", default=lfm3_word, window=256),
            Gemma4Ropes(LFM3_ROPES, max_length=128_000),
        ),
        m.decoder_mapping(
            *RULES,
            *m.layer_norm_rules(
                p.LAYER_PREFIX,
                post_attention_norm="post_operator_norm",
                post_feed_forward_norm="post_ffn_norm",
            ),
            *of_kind(c.MultiHead, *p.ATTENTION, *p.QK_NORMS),
        ),
        attention_types=KINDS,
    ),
)
