"""Kimi Linear: Kimi's delta attention beside latent attention without positions, and experts."""

from dataclasses import dataclass, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.deepseek import (
    LATENT_RULES,
    latent_fields,
    read_latent,
    write_latent_decoder,
)
from jaxformer.interop.families.llama_like_experts import (
    MIXTRAL_PREFIX,
    SELECTION_BIAS,
    SHARED,
    DeepSeekMoE,
    deepseek_experts,
    expert_rules,
)
from jaxformer.interop.family import Family
from jaxformer.interop.transforms import ConvolutionKernel, Flatten

PARTS = {"q": "query", "k": "key", "v": "value"}
DELTA_ATTENTION = (
    *(
        rule
        for short, name in PARTS.items()
        for rule in (
            *m.linear_rules(f"{p.SELF_ATTENTION}.{short}_proj", f"attention/{name}"),
            m.MappingRule(
                f"{p.SELF_ATTENTION}.{short}_conv1d.weight",
                f"attention/{name}_convolution/kernel",
                ConvolutionKernel(),
            ),
        )
    ),
    *m.linear_rules(f"{p.SELF_ATTENTION}.f_a_proj", "attention/step_down"),
    *m.linear_rules(f"{p.SELF_ATTENTION}.f_b_proj", "attention/step"),
    m.MappingRule(f"{p.SELF_ATTENTION}.dt_bias", "attention/step_bias/bias", Flatten()),
    m.MappingRule(
        f"{p.SELF_ATTENTION}.A_log", "attention/rate/bias", Flatten(leading=2, trailing=1)
    ),
    *m.linear_rules(f"{p.SELF_ATTENTION}.b_proj", "attention/beta"),
    *m.linear_rules(f"{p.SELF_ATTENTION}.g_a_proj", "attention/gate_down"),
    *m.linear_rules(f"{p.SELF_ATTENTION}.g_b_proj", "attention/gate"),
    *m.norm_rules(f"{p.SELF_ATTENTION}.o_norm", "attention/norm"),
    *m.linear_rules(f"{p.SELF_ATTENTION}.o_proj", "attention/out", input_axes=2),
)
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
UNUSED_OF_EXPERTS = (*NAMES.values(), "use_grouped_topk")
# Fields of positions, which no layer has; `head_dim` is none of the widths.
UNUSED = "rope_theta", "rope_scaling", "head_dim"


@dataclass(frozen=True, kw_only=True)
class KimiMoE(DeepSeekMoE):
    """DeepSeek V3's experts under other names."""

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """The networks of the layers, as a cycle."""
        for theirs, name in NAMES.items():
            reader.require_value(theirs, None, reason=f"this family calls it {name}")
        for name in UNUSED_OF_EXPERTS:  # without effect if all layers are dense
            reader.get(name)
        return super().read(reader, bias=bias)

    def read_moe(self, reader: ConfigReader, *, bias: bool) -> c.MoE:
        """The experts."""
        reader.require_value("use_grouped_topk", True)
        return super().read_moe(reader, bias=bias)


EXPERTS = KimiMoE(
    first_dense=1,
    has_layer_types=True,
    rules=(
        *p.FEED_FORWARD,
        *expert_rules(MIXTRAL_PREFIX, gate="w1", up="w3", down="w2"),
        *m.glu_rules(f"{MIXTRAL_PREFIX}.shared_experts", SHARED),
        m.MappingRule(f"{MIXTRAL_PREFIX}.gate.e_score_correction_bias", SELECTION_BIAS),
    ),
    **deepseek_experts(
        256,
        8,
        width=1024,
        router=c.Router(score="sigmoid", selection_bias=True, scale=2.446),
        names=NAMES,
    ),
)
TABLE = m.decoder_mapping(
    p.TOP_LEVEL,
    *p.PRE_NORMS,
    *(replace(rule, kind=c.LinearAttention) for rule in DELTA_ATTENTION),
    *(replace(rule, kind=c.Latent) for rule in LATENT_RULES),
    *EXPERTS.rules,
)


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a kimi_linear model."""
    for name in UNUSED:
        reader.get(name)
    reader.require_value("mla_use_nope", True)
    reader.require_value("hidden_act", "silu")
    norm = c.RMSNorm(eps=reader.number("rms_norm_eps", 1e-5))
    latent = read_latent(reader, latent_fields(query=None))
    return c.TransformerConfig(
        **p.read_sizes(reader),
        attention=_read_kinds(reader, _read_delta_attention(reader, norm), latent),
        feed_forward=EXPERTS.read(reader, bias=False),
        norm=norm,
        head=c.LMHead(tied=reader.boolean("tie_word_embeddings", False)),
    )


def _read_delta_attention(reader: ConfigReader, norm: c.Norm) -> c.LinearAttention:
    """Kimi's delta attention; `linear_attn_config` goes before the fields of its own."""
    heads = reader.integer("linear_num_heads", 32)
    width = reader.integer("linear_head_dim", 128)
    taps = reader.integer("linear_conv_kernel_dim", 4)
    section = reader.section("linear_attn_config")
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
        output=c.GatedNorm(norm=norm, activation="sigmoid", rank=width),
    )


def _read_kinds(
    reader: ConfigReader, delta_attention: c.LinearAttention, latent: c.Latent
) -> tuple[c.AttentionKind, ...]:
    """The kind of each layer, by ``layer_types``, or by lists that count layers from 1."""
    layers = range(reader.integer("num_hidden_layers"))
    types, section = reader.sequence("layer_types", str), reader.section("linear_attn_config")
    where = "layer_types"
    if section is not None:
        full = section.sequence("full_attn_layers", int)
        linear = section.sequence("kda_layers", int)
        if types is None and full is not None and linear is not None:
            where = "linear_attn_config"
            lists = {"full_attention": full, "linear_attention": linear}
            named = [[x for x, numbers in lists.items() if i + 1 in numbers] for i in layers]
            types = tuple("/".join(names) for names in named)
    if types is None:
        types = tuple("linear_attention" if i % 4 or not i else "full_attention" for i in layers)
    kinds: dict[str, Any] = {"linear_attention": delta_attention, "full_attention": latent}
    if len(types) != len(layers) or set(types) != set(kinds):
        expected = "expected linear_attention and full_attention, one of them for each of"
        reader.add_problem(where, f"{expected} {len(layers)} layers.")
        return (delta_attention,)
    return tuple(kinds[name] for name in types)


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """Fields of config.json, or None for another model."""
    kinds = [layer.attention for layer in config.layers]
    delta = [x for x in kinds if isinstance(x, c.LinearAttention)]
    latents = [x for x in kinds if isinstance(x, c.Latent)]
    experts = EXPERTS.write(config)
    if experts is None or not (delta and latents):
        return None
    numbers = {
        name: [i + 1 for i, x in enumerate(kinds) if isinstance(x, kind)]
        for name, kind in (("kda_layers", c.LinearAttention), ("full_attn_layers", c.Latent))
    }
    return {
        "mla_use_nope": True,
        "linear_attn_config": {
            "num_heads": delta[0].num_heads,
            "head_dim": delta[0].key_dim,
            "short_conv_kernel_size": delta[0].convolution_width,
            **numbers,
        },
        **write_latent_decoder(config, latents[0]),
        **experts,
    }


FAMILIES = (
    Family(
        "kimi_linear",
        "KimiLinearForCausalLM",
        read,
        write,
        TABLE,
        attention_types=(c.LinearAttention, c.Latent),
        # transformers writes the dense layers under the name of the experts.
        key_renames=((r"\.block_sparse_moe\.((gate|up|down)_proj)\.", r".mlp.\1."),),
    ),
)
