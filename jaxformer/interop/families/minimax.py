"""MiniMax Text-01 and M1: lightning attention beside softmax attention, and experts.

Its residual is taken after the norm, which is a norm after each sum: the norm before a layer is the
last one of the layer before it, and that of the first layer belongs to the embedding. Its code
and its files turn `rotary_dim` features of a head; transformers ignores this field, and turns all.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_like_experts import MixtralMoE
from jaxformer.interop.family import INV_FREQ_PATTERNS, Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping, linear_rules, norm_rules
from jaxformer.interop.rope_config import read_rope, write_rope
from jaxformer.interop.transforms import FusedPerGroup, LinearKernel

SELF_ATTENTION = f"{p.LAYER_PREFIX}.self_attn"
LIGHTNING = (
    MappingRule(
        f"{SELF_ATTENTION}.qkv_proj.weight",
        tuple(f"attention/{name}/kernel" for name in ("query", "key", "value")),
        FusedPerGroup(),
    ),
    *linear_rules(f"{SELF_ATTENTION}.output_gate", "attention/gate"),
    *norm_rules(f"{SELF_ATTENTION}.norm", "attention/norm"),
    *linear_rules(f"{SELF_ATTENTION}.out_proj", "attention/out", input_axes=2),
)
EXPERTS = MixtralMoE()
TABLE = ParamMapping(
    top_level=(
        MappingRule("model.embed_tokens.weight", "embedding/tokens/embedding"),
        MappingRule("model.layers.0.input_layernorm.weight", "embedding/norm/scale"),
        MappingRule("lm_head.weight", "head/kernel", LinearKernel()),
    ),
    stacks={
        "decoder": (
            *norm_rules(f"{p.LAYER_PREFIX}.post_attention_layernorm", "post_attention_norm"),
            MappingRule(
                "model.layers.{next_layer}.input_layernorm.weight",
                "post_feed_forward_norm/scale",
                last_hf_name="model.norm.weight",
            ),
            *(replace(rule, kind=c.LinearAttention) for rule in LIGHTNING),
            *(replace(rule, kind=c.MultiHead) for rule in p.ATTENTION),
            *EXPERTS.rules,
        )
    },
)
BRANCHES = "full_attn", "linear_attn", "mlp"
KINDS = {"linear_attention": c.LinearAttention, "full_attention": c.MultiHead}
LIGHTNING_EPS = 1e-6  # of the norm of what is read, independent of rms_norm_eps
BLOCK_SIZE = 256  # tokens of a block, without effect on the results


def slope_scale(layer: int, num_layers: int) -> float:
    """Factor of the slopes of a layer."""
    return 1 - layer / (num_layers - 1 + 1e-5) + 1e-5


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a minimax model."""
    for name in ("block_size", "shared_moe_mode"):
        reader.get(name)
    reader.require_value("hidden_act", "silu")
    reader.require_value("sliding_window", None)
    reader.require_value("postnorm", True)
    reader.require_value("shared_intermediate_size", 0)
    sizes, norm = p.read_sizes(reader), c.RMSNorm(eps=reader.number("rms_norm_eps", 1e-5))
    heads = p.read_heads(reader, kv_heads=8)
    rope = read_rope(reader, base=1e6, max_length=131_072)
    rotated = reader.integer("rotary_dim", heads["head_dim"])
    rope = replace(rope, fraction=rotated / max(1, heads["head_dim"]))
    return c.TransformerConfig(
        **sizes,
        embedding=c.Embedding(norm=norm),
        attention=_read_kinds(reader, c.MultiHead(**heads, positions=(rope,))),
        feed_forward=EXPERTS.read(reader, bias=False),
        norm=norm,
        norm_placement="post",
        final_norm=False,
        residual=c.DeepNorm(alpha=_read_factor(reader, "alpha")),
        residual_multiplier=_read_factor(reader, "beta"),
        head=c.LMHead(tied=reader.boolean("tie_word_embeddings", False)),
    )


def _read_factor(reader: ConfigReader, letter: str) -> float:
    """Factor of the stream or of the branches, which is the same for all."""
    factors = {f"{x}_{letter}_factor": 1.0 for x in BRANCHES}
    factors = {name: reader.number(name, value) for name, value in factors.items()}
    name, first = next(iter(factors.items()))
    for other, value in factors.items():
        if value != first:
            reader.add_problem(other, f"it must be equal to {name}, {first}.")
    return first


def _read_kinds(reader: ConfigReader, attention: c.MultiHead) -> c.Attention:
    """The kind of each layer; slopes differ from layer to layer."""
    count, kinds = reader.integer("num_hidden_layers"), list[Any]()
    types = reader.sequence("layer_types", str)
    if types is None:
        types = tuple("linear_attention" if i % 2 else "full_attention" for i in range(count))
    if len(types) != count or set(types) != set(KINDS):
        expected = f"expected linear_attention and full_attention for {count} layers."
        reader.add_problem("layer_types", expected)
        return attention
    lightning = c.LinearAttention(
        num_heads=attention.num_heads,
        num_key_heads=attention.num_heads,
        key_dim=attention.head_dim,
        value_dim=attention.head_dim,
        delta_rule=False,
        beta="one",
        unit_vectors=False,
        scale=1.0,
        convolution_width=None,
        output=c.GatedNorm(norm=c.RMSNorm(eps=LIGHTNING_EPS), over="all", activation="sigmoid"),
    )
    for i, name in enumerate(types):
        decay = c.SlopeDecay(scale=slope_scale(i, count))
        kinds += [attention if name == "full_attention" else replace(lightning, decay=decay)]
    return c.Hybrid(kinds=tuple(kinds))


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """Fields of config.json, or None for another model."""
    layers = [config.layer(i).attention for i in range(config.num_layers)]
    heads = [x for x in layers if isinstance(x, c.MultiHead)]
    types = [name for x in layers for name, kind in KINDS.items() if isinstance(x, kind)]
    experts = EXPERTS.write(config)
    rope = heads[0].positions[0] if heads else None
    if experts is None or len(types) != len(layers) or not isinstance(rope, c.Rope):
        return None
    if not isinstance(config.residual, c.DeepNorm):
        return None
    factors = {"alpha": config.residual.alpha, "beta": config.residual_multiplier}
    rotated = rope.rotary_dim(heads[0].head_dim)
    return {
        **p.write_sizes(replace(config, attention=heads[0])),
        **experts,
        **write_rope(replace(rope, fraction=1.0)),
        **({} if rope.fraction == 1 else {"rotary_dim": rotated}),
        **{f"{x}_{letter}_factor": y for letter, y in factors.items() for x in BRANCHES},
        "rms_norm_eps": config.norm.eps,
        "layer_types": types,
        "block_size": BLOCK_SIZE,
        "postnorm": True,
    }


def decay_tables(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Tables of the decays that transformers stores in the file."""
    tables: dict[str, np.ndarray] = {}
    count, heads, size = (
        values[name] for name in ("num_hidden_layers", "num_attention_heads", "block_size")
    )
    at = np.arange(1, size + 1, dtype=np.float32)[:, None]
    distance = at - at.T
    for i, name in enumerate(values["layer_types"]):
        if name != "linear_attention":
            continue
        exponents = -8 * np.arange(1, heads + 1)[:, None, None] / heads
        slopes = (slope_scale(i, count) * 2.0**exponents).astype(np.float32)
        diagonal = np.where(distance >= 0, np.exp(-slopes * np.maximum(distance, 0)), 0)
        arrays = {
            "slope_rate": slopes,
            "query_decay": np.exp(-slopes * at),
            "key_decay": np.exp(-slopes * (size - at)),
            "diagonal_decay": diagonal[None].astype(np.float32),
        }
        prefix = SELF_ATTENTION.replace("{layer}", str(i))
        tables |= {f"{prefix}.{table}": array for table, array in arrays.items()}
    return tables


FAMILIES = (
    Family(
        "minimax",
        "MiniMaxForCausalLM",
        read,
        write,
        TABLE,
        attention_type=c.Hybrid,
        ignored_tensors=(
            *INV_FREQ_PATTERNS,
            r".*\.self_attn\.(slope_rate|(query|key|diagonal)_decay)",
        ),
        constant_tensors=decay_tables,
    ),
)
