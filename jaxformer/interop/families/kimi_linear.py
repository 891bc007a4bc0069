"""Kimi Linear: Kimi's delta attention beside latent attention without positions, and experts."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_fields import Fixed, Options, Unused, Written, fixed
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import experts as e
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.deepseek import LATENT_RULES, latent_fields
from jaxformer.interop.families.mixers import LINEAR_OR_FULL, Mixer, linear_attention, of_kind
from jaxformer.interop.family import Family
from jaxformer.interop.transforms import DEPTHWISE, FLAT
from jaxformer.zoo.deepseek import DEEPSEEK_V2_LITE
from jaxformer.zoo.sizes import like

SECTION = "linear_attn_config"
# Fields of DeepSeek's experts, and their names in this family.
NAMES = {
    "num_experts_per_tok": "num_experts_per_token",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "n_shared_experts": "num_shared_experts",
    "n_routed_experts": "num_experts",
    "num_local_experts": "num_experts",
    "scoring_func": "moe_router_activation_func",
}


class DeltaAttention:
    """Kimi's delta attention; `linear_attn_config` takes precedence over the fields outside it."""

    kind = linear_attention(decay=c.StepDecay(over="feature", rank=1))

    def read(self, reader: ConfigReader, options: Options) -> c.LinearAttention:
        heads = reader.integer("linear_num_heads", 32)
        width = reader.integer("linear_head_dim", 128)
        taps = reader.integer("linear_conv_kernel_dim", 4)
        section = reader.section(SECTION)
        if section is not None:
            heads = section.integer("num_heads", heads)
            width = section.integer("head_dim", width)
            taps = section.integer("short_conv_kernel_size", taps)
        return c.LinearAttention(
            num_heads=heads,
            num_key_heads=heads,
            key_dim=width,
            value_dim=width,
            decay=c.StepDecay(over="feature", rank=width),
            convolution_width=taps,
            output=c.GatedNorm(
                norm=c.RMSNorm(eps=options["norm.eps"]), activation="sigmoid", rank=width
            ),
        )

    def write(self, model: c.TransformerConfig, kind: Any) -> Options:
        return {
            f"{SECTION}.num_heads": kind.num_heads,
            f"{SECTION}.head_dim": kind.key_dim,
            f"{SECTION}.short_conv_kernel_size": kind.convolution_width,
        }


class TypesOrNumbers:
    """The layers with latent attention, by ``layer_types``, or by lists that count from 1."""

    def read(self, reader: ConfigReader, num_layers: int, default: Any) -> Any:
        section = reader.part(SECTION)
        lists = {
            "full_attention": section.sequence("full_attn_layers", int),
            "linear_attention": section.sequence("kda_layers", int),
        }
        if reader.get("layer_types") is not None or None in lists.values():
            return LINEAR_OR_FULL.read(reader, num_layers, default)
        named = [
            [x for x, numbers in lists.items() if i + 1 in (numbers or ())]
            for i in range(num_layers)
        ]
        if {tuple(names) for names in named} != {("full_attention",), ("linear_attention",)}:
            expected = "expected linear_attention and full_attention, one of them for each of"
            reader.add_problem(SECTION, f"{expected} {num_layers} layers.")
        return [names == ["full_attention"] for names in named]

    def write(self, layers: Any) -> Options:
        return {
            f"{SECTION}.{name}": [i + 1 for i, full in enumerate(layers) if full is is_full]
            for name, is_full in (("kda_layers", False), ("full_attn_layers", True))
        }


def all_but_first_of_four(reader: ConfigReader, num_layers: int) -> Any:
    """Latent attention in every fourth layer from the fifth on."""
    return lambda i: bool(i) and i % 4 == 0


FAMILIES = (
    Family(
        "kimi_linear",
        "KimiLinearForCausalLM",
        like(DEEPSEEK_V2_LITE, positions=(None,), scale=None),
        (
            *latent_fields(query=None, eps=1e-5),
            Mixer(kind=DeltaAttention(), types=TypesOrNumbers(), default=all_but_first_of_four),
            e.deepseek_experts(
                256,
                8,
                width=1024,
                router=c.Router(score="sigmoid", selection_bias=True, scale=2.446),
                names=NAMES,
                layers=e.DenseFirst(1, has_types=True),
                more=(
                    *(
                        Fixed(theirs, (None,), f"this family calls it {name}")
                        for theirs, name in NAMES.items()
                    ),
                    *(*fixed(use_grouped_topk=True), Unused(*NAMES.values(), "use_grouped_topk")),
                ),
            ),
            *fixed(mla_use_nope=True, hidden_act="silu"),
            Written(mla_use_nope=True),
            # Fields of positions, which no layer has; `head_dim` is none of the widths.
            Unused("rope_theta", "rope_scaling", "head_dim"),
        ),
        m.decoder_mapping(
            *(*p.TOP_LEVEL, *p.PRE_NORMS),
            *of_kind(
                c.LinearAttention,
                *(
                    rule
                    for name in ("query", "key", "value")
                    for rule in (
                        *m.linear_rules(f"{p.SELF_ATTENTION}.{name[0]}_proj", f"attention/{name}"),
                        m.MappingRule(
                            f"{p.SELF_ATTENTION}.{name[0]}_conv1d.weight",
                            f"attention/{name}_convolution/kernel",
                            DEPTHWISE,
                        ),
                    )
                ),
                *m.linear_rules(f"{p.SELF_ATTENTION}.f_a_proj", "attention/step_down"),
                *m.linear_rules(f"{p.SELF_ATTENTION}.f_b_proj", "attention/step"),
                m.MappingRule(f"{p.SELF_ATTENTION}.dt_bias", "attention/step_bias/bias", FLAT),
                m.MappingRule(f"{p.SELF_ATTENTION}.A_log", "attention/rate/bias", "x -> 1 1 x 1"),
                *m.linear_rules(f"{p.SELF_ATTENTION}.b_proj", "attention/beta"),
                *m.linear_rules(f"{p.SELF_ATTENTION}.g_a_proj", "attention/gate_down"),
                *m.linear_rules(f"{p.SELF_ATTENTION}.g_b_proj", "attention/gate"),
                *m.norm_rules(f"{p.SELF_ATTENTION}.o_norm", "attention/norm"),
                *m.linear_rules(f"{p.SELF_ATTENTION}.o_proj", "attention/out", input_axes=2),
            ),
            *of_kind(c.Latent, *LATENT_RULES),
            *p.FEED_FORWARD,
            *e.expert_rules(e.MIXTRAL_PREFIX, gate="w1", up="w3", down="w2"),
            *m.glu_rules(f"{e.MIXTRAL_PREFIX}.shared_experts", e.SHARED),
            m.MappingRule(f"{e.MIXTRAL_PREFIX}.gate.e_score_correction_bias", e.SELECTION_BIAS),
        ),
        attention_types=(c.LinearAttention, c.Latent),
        # transformers writes the dense layers under the name of the experts.
        key_renames=((r"\.block_sparse_moe\.((gate|up|down)_proj)\.", r".mlp.\1."),),
    ),
)
