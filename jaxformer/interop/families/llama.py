"""Llama and the families that differ from it in a few fields: each is a row of `FAMILIES`.

Pre-norm decoders with RMSNorm, SwiGLU, rotary positions and grouped queries.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_fields import (
    OPTIONAL_NUMBER,
    BiasesField,
    ConfigField,
    Field,
    HeadsField,
    OldName,
    Options,
    PresenceField,
    Repeated,
    Unused,
    Written,
    fixed,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import experts as e
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.gpt_neox import block_rules
from jaxformer.interop.families.ropes import (
    RopeAndQueryScaling,
    RopeByLayerType,
    RopeByNumber,
    RopeByTheta,
    RopeOfWindows,
    RopeWithAlpha,
)
from jaxformer.interop.families.windows import (
    LastLayerWindows,
    Windows,
    all_but_every,
    by_pattern,
    from_layer,
)
from jaxformer.interop.family import INV_FREQ_PATTERNS, Family
from jaxformer.interop.param_mapping import (
    MappingRule,
    MultiTokenNames,
    attention_rules,
    branch_rules,
    decoder_mapping,
    fused_rules,
    layer_norm_rules,
    norm_rules,
    qk_norm_rules,
    top_level_rules,
)
from jaxformer.interop.rope_config import RopeField
from jaxformer.interop.transforms import LINEAR, Rearrange, SwapHeadHalves
from jaxformer.zoo import (
    arcee,
    exaone,
    glm,
    gpt_oss,
    hunyuan,
    minimax,
    nanochat,
    nemotron,
    olmo,
    qwen,
    stablelm,
    starcoder,
)
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import GLU, like

PARALLEL_BLOCK = {False: "serial", True: "parallel_shared_norm"}
NO_CHOICE = "this family has no such choice"
EXPERT_NAMES = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
BRANCHES = "attention", "feed_forward"
LAYER = (*p.TOP_LEVEL, *p.PRE_NORMS, *p.ATTENTION)
GPT_LAYER = "transformer.h.{layer}"
BAILING = f"{p.LAYER_PREFIX}.attention"
MOE_LAYER = (*LAYER, *p.QK_NORMS)
GLM_NORMS = layer_norm_rules(
    p.LAYER_PREFIX,
    pre_attention_norm="input_layernorm",
    post_attention_norm="post_self_attn_layernorm",
    pre_feed_forward_norm="post_attention_layernorm",
    post_feed_forward_norm="post_mlp_layernorm",
)
HUNYUAN_RULES = (*LAYER, *qk_norm_rules(p.SELF_ATTENTION, "query_layernorm", "key_layernorm"))
GPT_OSS_EXPERTS = e.Experts(
    moe=c.MoE(
        expert=c.ClampedGEGLU(hidden_dim=1), num_experts=4, top_k=4, router=c.Router(bias=True)
    ),
    fields=(
        Field("intermediate_size", "expert.hidden_dim", 2880),
        Field("swiglu_limit", "expert.limit", 7.0),
        Field("swiglu_alpha", "expert.alpha", 1.702),
        Field("num_local_experts", "num_experts", 128),
        Field("num_experts_per_tok", "top_k", 4),
        *fixed(hidden_act="silu"),
        Unused("experts_per_token", "initial_context_length"),
    ),
)
# The norms of queries and keys of StableLM have a tensor for each head.
STABLELM_NORMS = tuple(
    MappingRule(
        f"{p.SELF_ATTENTION}.{name[0]}_layernorm.norms.{{expert}}.weight",
        f"attention/{name}_norm/scale",
    )
    for name in ("query", "key")
)


def same_number(reader: ConfigReader, name: str, default: int) -> int:
    """Read a number, or a list with the same number for each layer."""
    if not isinstance(reader.get(name), list):
        return reader.integer(name, default)
    numbers = set(reader.sequence(name, int) or ())
    if len(numbers) != 1:
        reader.add_problem(name, "expected one number, the same in all layers.")
    return next(iter(numbers), default)


def swap_head_halves(rule: MappingRule) -> MappingRule:
    """Return the rule with the halves of each head swapped."""
    part = Rearrange(str(rule.transform))
    return replace(rule, transform=SwapHeadHalves(part=part))


def three_of_four(reader: ConfigReader, window: int | None) -> Callable[[int], bool]:
    """One layer that sees everything, then three with a window."""
    return lambda i: i % 4 != 0


def flint_windows(reader: ConfigReader, window: int | None) -> Callable[[int], bool]:
    """All layers but the first two, every fourth from the second on, and the last."""
    last = reader.integer("num_hidden_layers") - 1
    return lambda i: i % 4 != 1 and i not in (0, last)


class RopeObject:
    """A file without the scaling of RoPE is refused: it does not say which transformers uses."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        if "rope_parameters" not in reader and "rope_scaling" not in reader:
            reader.add_problem("rope_parameters", "the scaling of RoPE must be in the file.")
        return {}

    def write(self, model: c.TransformerConfig) -> Options:
        return {}


def row(
    model_type: str,
    architecture: str,
    *fields: ConfigField,
    template: c.TransformerConfig = LLAMA,
    tensors: tuple[MappingRule, ...] = p.LLAMA,
    multi_token: MultiTokenNames | None = None,
    **more: Any,
) -> Family:
    """A family, by default with Llama's template and the usual names of tensors."""
    mapping = decoder_mapping(*tensors, multi_token=multi_token)
    return Family(model_type, architecture, template, fields, mapping, **more)


FAMILIES = (
    row(
        "llama",
        "LlamaForCausalLM",
        *(*p.decoder(), *p.GLU, RopeField(), p.ATTENTION_BIAS, p.MLP_BIAS, p.HEADS_DIVIDE_WIDTH),
    ),
    # As Llama, except: one window for all layers.
    row(
        "mistral",
        "MistralForCausalLM",
        *(*p.decoder(kv_heads=8), *p.GLU, Windows(4096), RopeField(max_length=131_072)),
    ),
    # As Llama, except: biases of queries, keys and values; the last layers may have a window.
    row(
        "qwen2",
        "Qwen2ForCausalLM",
        *(*p.decoder(kv_heads=32), *p.GLU, LastLayerWindows(), RopeField(max_length=32_768)),
        template=qwen.QWEN,
    ),
    # As Mistral, except: experts.
    row(
        "mixtral",
        "MixtralForCausalLM",
        *(*p.decoder(kv_heads=8, eps=1e-5), e.mixtral_experts(), Windows(None)),
        RopeField(base=1e6, max_length=131_072),
        tensors=(*MOE_LAYER, *e.MIXTRAL_RULES),
    ),
    # As Qwen 2, except: norms of queries and keys, no biases.
    row(
        "qwen3",
        "Qwen3ForCausalLM",
        *(*p.decoder(kv_heads=32, head_dim=128), *p.GLU, p.ATTENTION_BIAS, LastLayerWindows()),
        RopeField(max_length=32_768),
        template=qwen.QWEN_3,
    ),
    # As Llama, except: norms before the last projection of each branch, gates of squared ReLU.
    row(
        "bitnet",
        "BitNetForCausalLM",
        *(*p.decoder(kv_heads=5, eps=1e-5), *p.glu(activation="relu2"), p.ATTENTION_BIAS),
        *(Field("rms_norm_eps", f"{part}.sub_norm.eps", 1e-5) for part in BRANCHES),
        RopeField(base=5e5),
        template=like(
            LLAMA, sub_norm=c.RMSNorm(), feed_forward=(c.GLU(hidden_dim=1, sub_norm=c.RMSNorm()),)
        ),
        tensors=(
            *p.LLAMA,
            *norm_rules(f"{p.SELF_ATTENTION}.attn_sub_norm", "attention/sub_norm"),
            *norm_rules(f"{p.LAYER_PREFIX}.mlp.ffn_sub_norm", "feed_forward/sub_norm"),
        ),
    ),
    # As Llama, except: norms after the branches, and of all queries and all keys together.
    row(
        "olmo2",
        "Olmo2ForCausalLM",
        *(*p.decoder(eps=1e-5), *p.GLU, p.ATTENTION_BIAS, RopeField()),
        template=olmo.OLMO_2,
    ),
    # As Llama, except: LayerNorm without parameters, clipped queries, keys and values.
    row(
        "olmo",
        "OlmoForCausalLM",
        *(*p.decoder(eps=None), *p.GLU, p.ATTENTION_BIAS, RopeField()),
        Field("clip_qkv", "attention.clip_qkv", parse=OPTIONAL_NUMBER),
        template=olmo.OLMO,
    ),
    # As Llama, except: LayerNorm whose scale is 1 + weight, squared ReLU without a gate.
    row(
        "nemotron",
        "NemotronForCausalLM",
        *(*p.decoder(eps=1e-5, eps_name="norm_eps"), *p.glu(activation="relu2")),
        *(RopeField(max_length=4096, fraction=0.5), p.ATTENTION_BIAS, p.MLP_BIAS),
        template=nemotron.NEMOTRON_4,
    ),
    # As Qwen 3, except: experts; one window for all layers.
    row(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        *(*p.decoder(kv_heads=4), e.qwen_experts(128, 8), p.ATTENTION_BIAS),
        *(Windows(4096, "use_sliding_window"), RopeField(max_length=32_768)),
        template=qwen.QWEN_3_MOE,
        tensors=(*MOE_LAYER, *e.STACKED_EXPERTS, *e.QWEN_RULES),
    ),
    # As Llama, except: squared ReLU without a gate.
    row(
        "arcee",
        "ArceeForCausalLM",
        *(*p.decoder(eps=1e-5), *p.glu(activation="relu2"), RopeField(), p.ATTENTION_BIAS),
        *(p.MLP_BIAS, p.HEADS_DIVIDE_WIDTH),
        template=arcee.ARCEE,
    ),
    # As Llama, except: a field of its own for the bias of the output.
    row(
        "seed_oss",
        "SeedOssForCausalLM",
        *(*p.decoder(kv_heads=8, head_dim=128), *p.GLU, p.MLP_BIAS),
        BiasesField("attention_bias", default=True, layers=p.QKV),
        *(BiasesField("attention_out_bias", layers=("out",)), RopeField(max_length=524_288)),
    ),
    # As Mistral, except: windows by layer.
    row(
        "ministral",
        "MinistralForCausalLM",
        *(*p.decoder(kv_heads=8), *p.GLU, Windows(4096, rule=by_pattern(), may_lack_size=True)),
        RopeField(max_length=131_072),
    ),
    # As Llama, except: RoPE turns neighbours; one field for all biases.
    row(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        *(*p.decoder(kv_heads=2, head_dim=128, eps=1e-5, tied=True), *p.GLU),
        BiasesField("use_bias", layers=p.ALL_BIASES),
        Field("use_bias", "feed_forward.bias", False),
        RopeField(base=5e5, max_length=131_072, pairing="neighbours"),
    ),
    # As Llama, except: norms before and after the branches, half of a head turned.
    row(
        "glm4",
        "Glm4ForCausalLM",
        *(*p.decoder(kv_heads=2, head_dim=128, eps=1.5625e-7), *p.GLU),
        BiasesField("attention_bias", default=True, layers=p.QKV),
        RopeField(max_length=131_072, pairing="neighbours", fraction=0.5),
        template=glm.GLM_4,
        tensors=(*p.TOP_LEVEL, *GLM_NORMS, *p.ATTENTION, *p.QK_NORMS, *p.FUSED_GLU),
    ),
    # As Llama, except: every fourth layer has no positions; windows by layer.
    row(
        "smollm3",
        "SmolLM3ForCausalLM",
        *(*p.decoder(kv_heads=4, tied=True), *p.GLU, p.ATTENTION_BIAS, p.MLP_BIAS),
        Windows(None, "use_sliding_window", by_pattern(), may_lack_size=True),
        RopeByNumber(base=2e6, max_length=32_768),
    ),
    # As OLMo 2, except: norms of each head; windows by layer, and no positions without one.
    row(
        "exaone4",
        "Exaone4ForCausalLM",
        *(*p.decoder(kv_heads=32, eps=1e-5), *p.GLU),
        *(Windows(4096, rule=by_pattern(4), may_lack_size=True), RopeOfWindows()),
        template=exaone.EXAONE_4,
    ),
    # As OLMo 2, except: windows by layer, and a RoPE for each kind of layer.
    row(
        "olmo3",
        "Olmo3ForCausalLM",
        *(*p.decoder(eps=1e-5), *p.GLU, p.ATTENTION_BIAS),
        *(Windows(4096, rule=by_pattern(4), may_lack_size=True), RopeByLayerType(base=5e5)),
        template=olmo.OLMO_3,
    ),
    # As Llama, except: experts; norms of all queries and all keys together, after which it clips.
    row(
        "olmoe",
        "OlmoeForCausalLM",
        *(*p.decoder(eps=1e-5), p.ATTENTION_BIAS, RopeField(max_length=4096)),
        *(e.Experts(fields=e.olmo_fields(64, 8)), *fixed(clip_qkv=None)),
        template=olmo.OLMOE,
        tensors=(*p.LLAMA, *e.EXPERT_RULES),
    ),
    # As OLMo 2, except: experts.
    row(
        "flex_olmo",
        "FlexOlmoForCausalLM",
        *(*p.decoder(), p.ATTENTION_BIAS, e.Experts(fields=e.olmo_fields(7, 5))),
        RopeField(base=5e5, max_length=4096),
        template=olmo.OLMO_2,
        tensors=(*p.LLAMA, *e.EXPERT_RULES),
    ),
    # As Qwen 2, except: experts, one of them shared with a gate.
    row(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        *(*p.decoder(kv_heads=16), BiasesField("qkv_bias", default=True, layers=p.QKV)),
        e.qwen_experts(60, 4, width=1408, dense_width=5632, shared_width=5632),
        *(LastLayerWindows(), RopeField(max_length=32_768)),
        tensors=(*MOE_LAYER, *e.QWEN_RULES),
    ),
    # DeepSeek V3's experts with grouped queries, half of a head turned.
    row(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        PresenceField("use_qk_norm", "attention.qk_norm", part=c.QKNorm()),
        *p.decoder(kv_heads=8, eps=1e-5),
        e.deepseek_experts(128, 8, width=1408, layers=e.DenseFirst(1)),
        BiasesField("attention_bias", layers=p.QKV),
        RopeField(max_length=131_072, fraction=0.5),
        tensors=(*MOE_LAYER, *e.deepseek_rules()),
        multi_token=e.DEEPSEEK_MULTI_TOKEN,
        predicts_further_tokens=True,
    ),
    # As GLM 4.5, except: norms of queries and keys, windows by layer.
    row(
        "dots1",
        "Dots1ForCausalLM",
        *(*p.decoder(), p.ATTENTION_BIAS, LastLayerWindows(switch=None, rule=from_layer(62))),
        e.deepseek_experts(width=1408, router=replace(e.SIGMOID, renormalise=False)),
        RopeField(),
        template=qwen.QWEN_3_MOE,
        tensors=(*MOE_LAYER, *e.deepseek_rules()),
        predicts_further_tokens=True,
    ),
    # As EXAONE 4, except: DeepSeek's experts, norms before the branches.
    row(
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        *p.decoder(kv_heads=32, eps=1e-5),
        *(Windows(4096, rule=by_pattern(4), may_lack_size=True), RopeOfWindows()),
        e.deepseek_experts(
            *(64, 8),
            width=1024,
            router=replace(e.SIGMOID, scale=2.5),
            names=EXPERT_NAMES,
            layers=e.DenseFirst(1, has_types=True),
        ),
        template=qwen.QWEN_3_MOE,
        tensors=(*MOE_LAYER, *e.deepseek_rules(bias="e_score_correction_bias")),
        predicts_further_tokens=True,
    ),
    # As GLM 4.5, except: whole heads turned, all experts may be chosen, always renormalised.
    row(
        "hy_v3",
        "HYV3ForCausalLM",
        *(*p.decoder(kv_heads=8, head_dim=128, eps=1e-5), p.ATTENTION_BIAS),
        e.deepseek_experts(
            *(192, 8),
            width=1536,
            router=replace(e.SIGMOID, scale=2.826),
            names=EXPERT_NAMES | {"routed_scaling_factor": "router_scaling_factor"},
            layers=e.DenseFirst(1, has_types=True),
            more=fixed(NO_CHOICE, n_group=1, topk_group=1, norm_topk_prob=True),
            dense=e.dense_fields(bias="mlp_bias"),
        ),
        RopeField(base=11_158_840.0, max_length=131_072),
        template=hunyuan.HUNYUAN_3,
        tensors=(*MOE_LAYER, *e.deepseek_rules("router.gate", "expert_bias", "shared_mlp")),
        predicts_further_tokens=True,
    ),
    # Experts with clamped gates, sinks, every other layer with a window.
    row(
        "gpt_oss",
        "GptOssForCausalLM",
        *(*p.decoder(kv_heads=8, head_dim=64, eps=1e-5), GPT_OSS_EXPERTS),
        BiasesField("attention_bias", default=True, layers=p.ALL_BIASES),
        *(Windows(128, rule=by_pattern(2), may_lack_size=True), RopeObject()),
        RopeField(base=1.5e5, max_length=131_072),
        template=gpt_oss.GPT_OSS,
        tensors=(*MOE_LAYER, *e.GPT_OSS_RULES),
    ),
    # As Mixtral, except: chosen by sigmoid and a bias, norms of all queries and keys together.
    row(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        *p.decoder(kv_heads=8, head_dim=128),
        e.mixtral_experts(256, 8, moe=replace(e.MOE, router=e.SIGMOID)),
        RopeField(base=5e6, max_length=196_608, fraction=1.0),
        template=minimax.MINIMAX_M2,
        tensors=(*MOE_LAYER, *e.MIXTRAL_RULES),
    ),
    # As Llama, except: multipliers of the embedding, the scores, the branches and the logits.
    row(
        "granite",
        "GraniteForCausalLM",
        *(*p.decoder(), *p.GLU, p.ATTENTION_BIAS, p.MLP_BIAS, *p.GRANITE_MULTIPLIERS),
        RopeField(),
    ),
    # As Granite, except: experts, all in two tensors.
    row(
        "granitemoe",
        "GraniteMoeForCausalLM",
        *(*p.decoder(), p.ATTENTION_BIAS, e.mixtral_experts(), *p.GRANITE_MULTIPLIERS),
        RopeField(),
        tensors=(*MOE_LAYER, *e.GRANITE_RULES),
    ),
    # As Granite with experts, except: one more is shared.
    row(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        *(*p.decoder(), p.ATTENTION_BIAS, e.GRANITE_SHARED_EXPERTS, *p.GRANITE_MULTIPLIERS),
        RopeField(),
        tensors=(*MOE_LAYER, *e.GRANITE_RULES),
    ),
    # As Llama, except: RoPE turns neighbours.
    row(
        "helium",
        "HeliumForCausalLM",
        *(*p.decoder(kv_heads=20, head_dim=128, eps=1e-8), *p.GLU, p.MLP_BIAS),
        BiasesField("attention_bias", layers=p.QKV),
        RopeField(base=1e5, max_length=4096, pairing="neighbours"),
    ),
    # As Llama, except: norms of queries and keys after RoPE.
    row(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        *(*p.decoder(eps=1e-5), *p.GLU, p.ATTENTION_BIAS, RopeWithAlpha()),
        template=like(hunyuan.HUNYUAN_A13B, feed_forward=(GLU,)),
        tensors=(*HUNYUAN_RULES, *p.FEED_FORWARD),
    ),
    # As HunYuan dense, except: experts and a shared one, all of one width.
    row(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        *(*p.decoder(eps=1e-5), p.ATTENTION_BIAS, RopeWithAlpha()),
        e.Experts(
            moe=replace(e.MOE, shared=c.SharedExpert(expert=e.MOE.expert)),
            fields=(
                *(e.WIDTH, e.ACTIVATION, *e.shared_fields("intermediate_size")),
                Field("num_experts", "num_experts", 1, same_number),
                Field("moe_topk", "top_k", 1, same_number),
            ),
        ),
        template=hunyuan.HUNYUAN_A13B,
        tensors=(
            *(*HUNYUAN_RULES, *e.expert_rules(e.PREFIX, router="gate.wg")),
            *e.glu_rules(f"{e.PREFIX}.shared_mlp", e.SHARED),
        ),
    ),
    # As Mistral, except: queries grow with the position.
    row(
        "ministral3",
        "Ministral3ForCausalLM",
        *(*p.decoder(kv_heads=8, head_dim=128, eps=1e-5), *p.GLU, Windows(None)),
        RopeAndQueryScaling(rope=RopeField(max_length=262_144)),
    ),
    # As Llama, except: LayerNorm, a quarter of a head turned, perhaps a parallel block.
    row(
        "stablelm",
        "StableLmForCausalLM",
        PresenceField("qk_layernorm", "attention.qk_norm", part=stablelm.QK_NORM),
        *p.decoder(kv_heads=32, eps=1e-5, eps_name="layer_norm_eps"),
        Field("use_parallel_residual", "block", False, choices=PARALLEL_BLOCK),
        *(*p.GLU, BiasesField("use_qkv_bias", layers=p.QKV)),
        *(RopeField(max_length=4096, fraction=0.25), p.HEADS_DIVIDE_WIDTH),
        template=stablelm.STABLELM_2,
        tensors=(
            *(
                *LAYER,
                *norm_rules(f"{p.LAYER_PREFIX}.input_layernorm", "pre_norm"),
                *p.FEED_FORWARD,
            ),
            *STABLELM_NORMS,
        ),
    ),
    # As Llama, except: squared ReLU without a gate, a cap of the logits, norms without parameters,
    # also of the embedding, queries and keys. RoPE turns backwards, which is turning with the
    # halves of each head swapped, so they are swapped in the kernels. Queries and keys are normed
    # after RoPE, which is the same without parameters.
    row(
        "nanochat",
        "NanoChatForCausalLM",
        *(*p.decoder(), *p.glu(activation="relu2"), p.ATTENTION_BIAS),
        Field("final_logit_softcapping", "head.softcap", 15.0, OPTIONAL_NUMBER),
        RopeField(),
        template=nanochat.NANOCHAT,
        tensors=(
            *(*p.TOP_LEVEL, *p.PRE_NORMS),
            *map(
                swap_head_halves,
                branch_rules(p.SELF_ATTENTION, "attention", query="q_proj", key="k_proj"),
            ),
            *branch_rules(p.SELF_ATTENTION, "attention", value="v_proj", out="o_proj"),
            *branch_rules(f"{p.LAYER_PREFIX}.mlp", "feed_forward", up="fc1", down="fc2"),
        ),
    ),
    # As Llama, except: LayerNorm, no gate, one field for all biases, one window for all layers.
    row(
        "starcoder2",
        "Starcoder2ForCausalLM",
        *p.decoder(kv_heads=2, eps=1e-5, eps_name="norm_epsilon", tied=True),
        *p.glu(activation="gelu_pytorch_tanh"),
        BiasesField("use_bias", default=True, layers=p.ALL_BIASES),
        Field("use_bias", "feed_forward.bias", True),
        *(Windows(None), RopeField(max_length=4096)),
        *fixed(mlp_type="default", norm_type="layer_norm"),
        template=starcoder.STARCODER_2,
        tensors=(
            *LAYER,
            *branch_rules(f"{p.LAYER_PREFIX}.mlp", "feed_forward", up="c_fc", down="c_proj"),
        ),
    ),
    # As GLM 4 (2025), except: no norms after the branches.
    row(
        "glm",
        "GlmForCausalLM",
        *(*p.decoder(kv_heads=2, head_dim=128, eps=1.5625e-7), *p.GLU),
        BiasesField("attention_bias", default=True, layers=p.QKV),
        RopeField(max_length=131_072, pairing="neighbours", fraction=0.5),
        tensors=(*LAYER, *p.FUSED_GLU),
    ),
    # As Llama, except: GPT-2's names of tensors, and in old files of fields (EXAONE 3).
    row(
        "exaone",
        "LlamaForCausalLM",
        *p.decoder(kv_heads=8, num_layers=32, eps=1e-5),
        *(*p.GLU, p.ATTENTION_BIAS, p.MLP_BIAS, p.HEADS_DIVIDE_WIDTH),
        OldName(Field("num_layers", "num_layers")),
        OldName(Field("layer_norm_epsilon", "norm.eps", 1e-5)),
        OldName(Field("activation_function", "feed_forward.activation", "silu")),
        RopeField(base=5e5, max_length=4096),
        tensors=(
            *top_level_rules("transformer.wte", "transformer.ln_f"),
            *layer_norm_rules(GPT_LAYER, pre_attention_norm="ln_1", pre_feed_forward_norm="ln_2"),
            *attention_rules(f"{GPT_LAYER}.attn.attention", out="out_proj"),
            *branch_rules(
                *(f"{GPT_LAYER}.mlp", "feed_forward"), gate="c_fc_0", up="c_fc_1", down="c_proj"
            ),
        ),
    ),
    # As Llama, except: LayerNorm, also of queries and keys, squared ReLU without a gate, biases,
    # half of a head turned, queries, keys and values of each head in one tensor.
    row(
        "persimmon",
        "PersimmonForCausalLM",
        PresenceField(
            *("qk_layernorm", "attention.qk_norm"), default=True, part=c.QKNorm(norm=c.LayerNorm())
        ),
        *(Field("vocab_size", "vocab_size"), Field("hidden_size", "model_dim")),
        *(Field("num_hidden_layers", "num_layers"), HeadsField("num_attention_heads")),
        *(*p.norm_eps(1e-5, "layer_norm_eps"), p.UNTIED, *p.glu(activation="relu2")),
        RopeField(max_length=16_384, fraction=0.5),
        template=like(
            LLAMA,
            norm=c.LayerNorm(),
            biases=p.ALL_BIASES,
            feed_forward=(c.MLP(hidden_dim=1, bias=True),),
        ),
        tensors=(
            *top_level_rules("model.embed_tokens", "model.final_layernorm"),
            *(*p.PRE_NORMS, *block_rules(p.LAYER_PREFIX, "self_attn")),
            *qk_norm_rules(p.SELF_ATTENTION, "q_layernorm", "k_layernorm"),
        ),
    ),
    # As Llama, except: wider heads; one field for all biases in old files.
    row(
        "internlm3",
        "LlamaForCausalLM",
        *(*p.decoder(kv_heads=2, head_dim=128, eps=1e-5), *p.GLU, p.HEADS_DIVIDE_WIDTH),
        BiasesField("attention_bias", layers=p.ALL_BIASES, alias="qkv_bias"),
        Field("attention_bias", "feed_forward.bias", False, alias="qkv_bias"),
        *(
            Repeated(name, lambda x: x["feed_forward.bias"], "all layers have biases, or none")
            for name in ("mlp_bias", "bias")
        ),
        Written(mlp_bias=lambda model: bool(p.heads_of(model).biases)),
        RopeField(max_length=32_768),
    ),
    # As Llama, except: wider heads.
    row(
        "iquestcoder",
        "LlamaForCausalLM",
        *(*p.decoder(kv_heads=8, head_dim=128, eps=1e-5), *p.GLU, p.HEADS_DIVIDE_WIDTH),
        *(p.ATTENTION_BIAS, p.MLP_BIAS, RopeField(max_length=131_072)),
        *fixed(clip_qkv=None, use_sliding_window=False),
    ),
    # As Llama 3, except: windows by layer.
    row(
        "cwm",
        "CwmForCausalLM",
        *(*p.decoder(kv_heads=8, head_dim=128, eps=1e-5), *p.GLU, p.HEADS_DIVIDE_WIDTH),
        *(Windows(8192, rule=three_of_four, needs_size=True), RopeObject()),
        *(RopeField(base=1e6, max_length=131_072), *fixed(mlp_bias=False)),
        Written(bos_token_id=128_000),  # which may not be null
    ),
    # As Granite, except: norms after the branches, unless a field says none; a factor of logits.
    row(
        "hyperclovax",
        "HyperCLOVAXForCausalLM",
        *(*p.decoder(), *p.GLU, p.ATTENTION_BIAS, p.MLP_BIAS, p.HEADS_DIVIDE_WIDTH),
        Field("embedding_multiplier", "embedding.scale", 1.0),
        Field("attention_multiplier", "attention.scale", parse=OPTIONAL_NUMBER),
        Field("residual_multiplier", "residual_multiplier", 1.0),
        Field("logits_scaling", "head.multiplier", 1.0),
        Field("use_post_norm", "norm_placement", True, choices={True: "sandwich", False: "pre"}),
        RopeField(),
        tensors=(
            *(*LAYER, *p.FEED_FORWARD),
            *layer_norm_rules(
                p.LAYER_PREFIX,
                post_attention_norm="post_norm1",
                post_feed_forward_norm="post_norm2",
            ),
        ),
    ),
    # As Llama, except: LayerNorm, squared ReLU without a gate, biases.
    row(
        "jais2",
        "Jais2ForCausalLM",
        *p.decoder(eps=1e-5, eps_name="layer_norm_eps"),
        *(*p.glu(activation="relu2"), RopeField(max_length=8192), p.HEADS_DIVIDE_WIDTH),
        BiasesField("attention_bias", default=True, layers=p.ALL_BIASES),
        Field("mlp_bias", "feed_forward.bias", True),
        template=like(LLAMA, norm=c.LayerNorm(), feed_forward=(c.MLP(hidden_dim=1),)),
    ),
    # As Granite, except: sinks, windows by layer, a base of RoPE for each layer.
    row(
        "granite_swa",
        "GraniteSWAForCausalLM",
        *(*p.decoder(kv_heads=4, eps=1e-5, tied=True), *p.GLU, p.ATTENTION_BIAS, p.MLP_BIAS),
        *(*p.GRANITE_MULTIPLIERS, Windows(128, rule=three_of_four, needs_size=True)),
        RopeByTheta(max_length=8192),
        template=like(LLAMA, sinks=True),
    ),
    # As Granite SWA, except: experts and a shared one.
    row(
        "granitemoe_swa",
        "GraniteMoeSWAForCausalLM",
        *(*p.decoder(), p.ATTENTION_BIAS, e.GRANITE_SHARED_EXPERTS, *p.GRANITE_MULTIPLIERS),
        *(Windows(128, rule=three_of_four, needs_size=True), RopeByTheta()),
        template=like(LLAMA, sinks=True),
        tensors=(
            MappingRule(f"{e.MIXTRAL_PREFIX}.router.weight", "feed_forward/router/kernel", LINEAR),
            *e.stacked_rules(
                f"{e.MIXTRAL_PREFIX}.experts.gate_up_proj", f"{e.MIXTRAL_PREFIX}.experts.down_proj"
            ),
            *(*MOE_LAYER, *e.GRANITE_SHARED_RULES),
        ),
    ),
    # As GLM 4.5, except: no dense layers, whole heads turned.
    row(
        "solar_open",
        "SolarOpenForCausalLM",
        *p.decoder(kv_heads=8, head_dim=128, eps=1e-5),
        replace(e.deepseek_experts(128, 8, width=1280), layers=None),
        BiasesField("attention_bias", layers=p.QKV),
        RopeField(base=1e6, max_length=131_072, fraction=1.0),
        *fixed(use_qk_norm=False, first_k_dense_replace=0),
        Unused("intermediate_size"),  # of dense layers
        tensors=(*LAYER, *e.deepseek_rules()),
    ),
    # As GLM 4.5, except: whole heads turned; other names of tensors, and in old files of fields.
    row(
        "sarvam_moe",
        "Glm4MoeForCausalLM",
        PresenceField("use_qk_norm", "attention.qk_norm", default=True, part=c.QKNorm()),
        *p.decoder(kv_heads=4, head_dim=64),
        e.with_old_names(
            e.deepseek_experts(
                *(128, 6), width=1024, router=replace(e.SIGMOID, scale=2.5), layers=e.DenseFirst(1)
            )
        ),
        BiasesField("attention_bias", layers=p.QKV, alias="use_qkv_bias"),
        RopeField(base=8e6, max_length=131_072, fraction=1.0),
        tensors=(
            *(*top_level_rules("model.word_embeddings", "model.norm"), *p.PRE_NORMS),
            *fused_rules(f"{BAILING}.query_key_value", "attention", p.QKV),
            *branch_rules(BAILING, "attention", out="dense"),
            *qk_norm_rules(BAILING, "query_layernorm", "key_layernorm"),
            *e.deepseek_rules(bias="gate.expert_bias"),
        ),
        predicts_further_tokens=True,
    ),
    # As Qwen 3 with experts, except: a shared one without a gate, chosen by logits and a bias,
    # scored by sigmoid, norms after the branches, no positions without a window.
    row(
        "kolibri1",
        "Kolibri1ForCausalLM",
        *p.decoder(kv_heads=4, head_dim=128),
        e.Experts(
            moe=replace(
                e.MOE,
                router=replace(e.SIGMOID, selection="logits"),
                shared=c.SharedExpert(expert=e.MOE.expert),
            ),
            fields=(
                *e.olmo_fields(
                    *(384, 6), width=Field("moe_intermediate_size", "expert.hidden_dim", 512)
                ),
                *e.shared_fields("shared_expert_intermediate_size", 512),
            ),
        ),
        Windows(513, rule=all_but_every(5), needs_size=True),
        RopeOfWindows(max_length=262_144, without_windows=False),
        template=like(qwen.QWEN_3, norm_placement="sandwich"),
        tensors=(
            *(*MOE_LAYER, *e.EXPERT_RULES),
            *e.glu_rules(f"{e.PREFIX}.shared_experts", e.SHARED),
            MappingRule(f"{p.LAYER_PREFIX}.moe.router.expert_bias", e.SELECTION_BIAS),
            *layer_norm_rules(
                p.LAYER_PREFIX,
                post_attention_norm="post_attn_norm",
                post_feed_forward_norm="post_ffn_norm",
            ),
        ),
    ),
    # As Qwen 3 with experts, except: layers by words, windows by layer, and a RoPE for each kind.
    row(
        "mellum",
        "MellumForCausalLM",
        *(*p.decoder(kv_heads=4, head_dim=128), p.ATTENTION_BIAS),
        replace(
            e.qwen_experts(64, 8, renormalise=True, width=896, dense_width=7168),
            layers=e.LayersByType(),
        ),
        Windows(1024, rule=by_pattern(1)),
        RopeByLayerType(base=5e5, local_base=1e4, max_length=131_072, writes_scaling=False),
        Unused("num_mtp_layers", "num_nextn_predict_layers"),
        Unused("mtp_layer_types", "mtp_mlp_layer_types"),
        template=qwen.QWEN_3_MOE,
        tensors=(*MOE_LAYER, *e.QWEN_RULES),
        ignored_tensors=(*INV_FREQ_PATTERNS, r"mtp\..*"),
    ),
    # As Qwen 3 with experts, except: chosen by sigmoid, a shared one without a gate, sinks, windows
    # by layer, and no positions without one.
    row(
        "flint",
        "FlintForCausalLM",
        *(*p.decoder(kv_heads=4, head_dim=128), p.ATTENTION_BIAS),
        replace(
            e.qwen_experts(256, 6, renormalise=True, width=512, shared_width=1024),
            moe=replace(
                e.MOE, router=c.Router(score="sigmoid"), shared=c.SharedExpert(expert=e.MOE.expert)
            ),
            layers=e.QwenLayers((0, 1)),
        ),
        Windows(513, rule=flint_windows, needs_size=True),
        RopeOfWindows(max_length=262_144, without_windows=False),
        template=like(qwen.QWEN_3, sinks=True),
        tensors=(
            MappingRule(f"{p.SELF_ATTENTION}.softmax_offset", "attention/sinks"),
            *(*p.TOP_LEVEL, *p.PRE_NORMS, *attention_rules(p.SELF_ATTENTION), *p.QK_NORMS),
            *e.QWEN_RULES,
        ),
    ),
)
