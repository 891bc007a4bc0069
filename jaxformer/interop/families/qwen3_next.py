"""Qwen 3 Next, Qwen 3.5 and Lara: gated DeltaNet beside attention, gated in Qwen.

Of Qwen 3.5 with images the text model is read.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_fields import (
    Field,
    Fields,
    Fixed,
    NoEntries,
    NotWritten,
    Options,
    Unused,
    fixed,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import experts as e
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.mixers import Kind, Mixer, MixerOrWindows, linear_attention, of_kind
from jaxformer.interop.families.ropes import RopeOfWindows
from jaxformer.interop.family import INV_FREQ_PATTERNS, Family
from jaxformer.interop.param_mapping import (
    EMBEDDING_PATH,
    MappingRule,
    MultiTokenNames,
    decoder_mapping,
    glu_rules,
    linear_rules,
    norm_rules,
)
from jaxformer.interop.rope_config import RopeField
from jaxformer.interop.transforms import DEPTHWISE, LINEAR, LINEAR_BY_GROUP, Rearrange, Transform
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import like

PREFIX = f"{p.LAYER_PREFIX}.linear_attn"
PARTS = ("query", "key", "value")


def kernels(*names: str) -> tuple[str, ...]:
    """Paths of these kernels of attention layers."""
    return tuple(f"attention/{name}/kernel" for name in names)


def per_key_head(config: c.TransformerConfig) -> Transform:
    """Parts one after another for each key head."""
    layers = (layer.attention for layer in config.layers)
    heads = {x.num_key_heads for x in layers if isinstance(x, c.LinearAttention)}
    return Rearrange(LINEAR_BY_GROUP, groups=max(heads, default=None))


CORE = (
    MappingRule(
        f"{PREFIX}.conv1d.weight", kernels(*(f"{name}_convolution" for name in PARTS)), DEPTHWISE
    ),
    MappingRule(f"{PREFIX}.A_log", "attention/rate/bias"),
    MappingRule(f"{PREFIX}.dt_bias", "attention/step_bias/bias"),
    *linear_rules(f"{PREFIX}.out_proj", "attention/out", input_axes=2),
)
DELTA_NET = (*CORE, *norm_rules(f"{PREFIX}.norm", "attention/norm"))
FUSED_PROJECTIONS = (
    MappingRule(f"{PREFIX}.in_proj_qkvz.weight", kernels(*PARTS, "gate"), LINEAR_BY_GROUP),
    MappingRule(f"{PREFIX}.in_proj_ba.weight", kernels("beta", "step"), per_key_head),
)
PROJECTIONS = (
    MappingRule(f"{PREFIX}.in_proj_qkv.weight", kernels(*PARTS), LINEAR),
    *linear_rules(f"{PREFIX}.in_proj_z", "attention/gate"),
    *linear_rules(f"{PREFIX}.in_proj_b", "attention/beta"),
    *linear_rules(f"{PREFIX}.in_proj_a", "attention/step"),
)
STACKED = f"{e.PREFIX}.experts.gate_up_proj", f"{e.PREFIX}.experts.down_proj"


class ImagePositions(NoEntries):
    """RoPE splits features over three positions, which are equal in text."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        section = reader.part("rope_parameters")
        for name in ("mrope_section", "mrope_interleaved"):
            section.get(name)
        return {}


def every_interval(reader: ConfigReader, num_layers: int) -> Callable[[int], bool]:
    """Attention in the last of every ``full_attention_interval`` layers."""
    interval = max(1, reader.integer("full_attention_interval", 4))
    return lambda i: (i + 1) % interval == 0


def experts(num_experts: int, top_k: int, dense_width: int = 512) -> e.Experts:
    """Renormalised experts and a shared one with a gate, all of width 512."""
    return e.qwen_experts(
        num_experts, top_k, renormalise=True, width=512, dense_width=dense_width, shared_width=512
    )


class ExpertsInAllLayers:
    """Qwen 3.5's experts, which are in every layer; files do not say in which."""

    experts = experts(256, 8)

    def read(self, reader: ConfigReader, options: Options) -> Options:
        for name, value in {"norm_topk_prob": True, "decoder_sparse_step": 1}.items():
            reader.require_value(name, value)
        reader.require_value("mlp_only_layers", [])
        return self.experts.read(reader, options)

    def write(self, model: c.TransformerConfig) -> Options | None:
        entries = self.experts.write(model)
        lacking = "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step"
        return entries and {name: x for name, x in entries.items() if name not in lacking}


def delta_net(key_heads: int = 16, heads: int = 32) -> Kind:
    """Fields of gated DeltaNet, with these defaults."""
    fields = (
        Field("linear_num_key_heads", "num_key_heads", key_heads),
        Field("linear_num_value_heads", "num_heads", heads),
        Field("linear_key_head_dim", "key_dim", 128),
        Field("linear_value_head_dim", "value_dim", 128),
        Field("linear_conv_kernel_dim", "convolution_width", 4),
        NotWritten(Field("rms_norm_eps", "output.norm.eps", 1e-6)),
    )
    return Kind(linear_attention(output=c.GatedNorm(norm=c.RMSNorm())), fields)


def lara_word(layer: int) -> str:
    """The kind of a layer of Lara."""
    words = {1: "sliding_attention", 3: "full_attention", 4: "sliding_attention"}
    return words.get(layer % 5, "linear_attention")


NORM = c.RMSNorm(scale_offset=1.0)
MODEL = like(LLAMA, norm=NORM, qk_norm=c.QKNorm(norm=NORM), output_gate=c.OutputGate())
FIELDS: Fields = (
    RopeField(max_length=32_768, fraction=0.25),
    *fixed(attn_output_gate=True, attention_bias=False),
    Fixed("output_gate_type", ("swish", "silu")),
    # States are float32; the tensors say whether there is multi-token prediction.
    Unused("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    Mixer(kind=delta_net(), default=every_interval),
)
TENSORS = (
    *(*p.TOP_LEVEL, *p.PRE_NORMS, *of_kind(c.LinearAttention, *DELTA_NET)),
    *of_kind(c.MultiHead, *p.GATED_ATTENTION, *p.QK_NORMS),
)
MULTI_TOKEN = MultiTokenNames(
    prefix="mtp.",
    layer="mtp.layers.0",
    parts={
        "embedding_norm": "mtp.pre_fc_norm_embedding",
        "hidden_norm": "mtp.pre_fc_norm_hidden",
        "projection": "mtp.fc",
        "decoder/final_norm": "mtp.norm",
    },
    copies={"mtp.embed_tokens.weight": EMBEDDING_PATH},
    count="mtp_num_hidden_layers",
)
SHARED: dict[str, Any] = {
    "attention_types": (c.LinearAttention, c.MultiHead),
    "ignored_tensors": (*INV_FREQ_PATTERNS, r"mtp\..*"),
}
QWEN_3_5 = (
    Family(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        MODEL,
        (*p.decoder(kv_heads=4, head_dim=256), *p.GLU, ImagePositions(), *FIELDS),
        decoder_mapping(
            *(*TENSORS, *of_kind(c.LinearAttention, *PROJECTIONS), *p.FEED_FORWARD),
            multi_token=MULTI_TOKEN,
        ),
        **SHARED,
    ),
    Family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        MODEL,
        (
            *(*p.decoder(kv_heads=2, head_dim=256), ExpertsInAllLayers()),
            *(ImagePositions(), *FIELDS),
        ),
        decoder_mapping(
            *(*TENSORS, *of_kind(c.LinearAttention, *PROJECTIONS)),
            *(*e.STACKED_EXPERTS, *e.QWEN_RULES),
            multi_token=MULTI_TOKEN,
        ),
        **SHARED,
    ),
)
LARA_EXPERTS = e.Experts(
    moe=replace(e.MOE, shared=c.SharedExpert(expert=e.MOE.expert)),
    fields=(
        *e.olmo_fields(
            *(128, 4),
            renormalise=True,
            width=Field("moe_intermediate_size", "expert.hidden_dim", 512),
        ),
        *e.shared_fields("shared_expert_intermediate_size", 512),
    ),
)
FAMILIES = (
    Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        MODEL,
        (*p.decoder(kv_heads=2, head_dim=256), experts(512, 10, 5632), *FIELDS),
        decoder_mapping(
            *(*TENSORS, *of_kind(c.LinearAttention, *FUSED_PROJECTIONS), *e.QWEN_RULES),
            multi_token=MULTI_TOKEN,
        ),
        **SHARED,
    ),
    *QWEN_3_5,
    # As Qwen 3.5, except: no gate of attention, windows, positions only with one, a shared expert
    # without a gate, norms whose scale is the weight.
    Family(
        "lara_mini",
        "LaraMiniForCausalLM",
        like(LLAMA, qk_norm=c.QKNorm()),
        (
            *(*p.decoder(heads=16, kv_heads=4, head_dim=128, tied=True), p.ATTENTION_BIAS),
            LARA_EXPERTS,
            MixerOrWindows(
                kind=delta_net(8, 16), word="linear_attention", default=lara_word, window=512
            ),
            RopeOfWindows(max_length=131_072, without_windows=False),
        ),
        decoder_mapping(
            *(*p.TOP_LEVEL, *p.PRE_NORMS),
            *of_kind(
                c.LinearAttention,
                MappingRule(
                    f"{PREFIX}.in_proj.weight", kernels(*PARTS, "gate", "beta", "step"), LINEAR
                ),
                *(*CORE, *norm_rules(f"{PREFIX}.out_norm", "attention/norm")),
            ),
            *of_kind(c.MultiHead, *p.ATTENTION, *p.QK_NORMS),
            *linear_rules(f"{e.PREFIX}.gate", "feed_forward/router"),
            *glu_rules(f"{e.PREFIX}.shared_expert", e.SHARED),
            *e.stacked_rules(*STACKED),
        ),
        attention_types=(c.LinearAttention, c.MultiHead),
    ),
)
