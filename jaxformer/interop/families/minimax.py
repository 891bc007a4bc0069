"""MiniMax Text-01 and M1: lightning attention beside softmax attention, and experts.

Its residual is taken after the norm, which is a norm after each sum: the norm before a layer is the
last one of the layer before it, and that of the first layer belongs to the embedding. Its code
and its files turn `rotary_dim` features of a head; transformers ignores this field, and turns all.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_hybrid import LlamaHybrid
from jaxformer.interop.families.llama_like_experts import mixtral_experts
from jaxformer.interop.families.llama_like_options import OneRope
from jaxformer.interop.transforms import FusedPerGroup

LIGHTNING = (
    m.MappingRule(
        f"{p.SELF_ATTENTION}.qkv_proj.weight",
        tuple(f"attention/{name}/kernel" for name in p.QKV),
        FusedPerGroup(),
    ),
    *m.linear_rules(f"{p.SELF_ATTENTION}.output_gate", "attention/gate"),
    *m.norm_rules(f"{p.SELF_ATTENTION}.norm", "attention/norm"),
    *m.linear_rules(f"{p.SELF_ATTENTION}.out_proj", "attention/out", input_axes=2),
)
BRANCHES = {"attention": "full_attn", "recurrent": "linear_attn", "feed_forward": "mlp"}
LIGHTNING_EPS = 1e-6  # of the norm of what is read, independent of rms_norm_eps
BLOCK_SIZE = 256  # tokens of a block, without effect on the results


@dataclass(frozen=True, kw_only=True)
class MiniMaxRope(OneRope):
    """RoPE of ``rotary_dim`` features of a head, by default of all."""

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """The fields of config.json."""
        if not p.has_rope(config):
            return None
        rope = p.first_rope(config)
        rotated = rope.rotary_dim(p.heads_of(config).head_dim)
        fields = self.write_rope(replace(rope, fraction=1.0))
        return fields if rope.fraction == 1 else {**fields, "rotary_dim": rotated}

    def read_rope(self, reader: ConfigReader) -> c.Rope:
        """RoPE of the whole config.json."""
        head_dim = p.read_heads(reader)["head_dim"]
        fraction = reader.integer("rotary_dim", head_dim) / max(1, head_dim)
        return replace(super().read_rope(reader), fraction=fraction)


@dataclass(frozen=True)
class MiniMax(LlamaHybrid):
    """Lightning attention, whose slopes differ from layer to layer, and sums with weights."""

    def read(self, reader: ConfigReader) -> c.TransformerConfig:
        """Read config.json."""
        factors: dict[str, Any] = {
            ours: tuple(reader.number(f"{name}_{x}_factor", 1.0) for x in ("alpha", "beta"))
            for ours, name in BRANCHES.items()
        }
        residual = c.WeightedSum(**factors)
        config = replace(super().read(reader), final_norm=False, residual=residual)
        if not isinstance(config.attention, tuple):
            return config
        count = config.num_layers
        decays = (c.SlopeDecay(scale=slope_scale(i, count)) for i in range(count))
        return replace(config, attention=_with_decays(config, decays))

    def read_mixer(self, reader: ConfigReader, config: c.TransformerConfig) -> c.LinearAttention:
        """Lightning attention, but for its slopes."""
        heads = p.heads_of(config)
        return c.LinearAttention(
            num_heads=heads.num_heads,
            num_key_heads=heads.num_heads,
            key_dim=heads.head_dim,
            value_dim=heads.head_dim,
            delta_rule=False,
            beta="one",
            unit_vectors=False,
            scale=1.0,
            convolution_width=None,
            output=c.GatedNorm(norm=c.RMSNorm(eps=LIGHTNING_EPS), over="all", activation="sigmoid"),
        )

    def default_types(self, reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
        """Attention in every other layer."""
        return tuple(i % 2 == 0 for i in range(num_layers))

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Fields of config.json, or None for another model."""
        if not isinstance(config.residual, c.WeightedSum):
            return None
        decays = itertools.repeat(c.SlopeDecay())
        fields = super().write(replace(config, attention=_with_decays(config, decays)))
        factors = {
            f"{name}_{letter}_factor": value
            for ours, name in BRANCHES.items()
            for letter, value in zip(("alpha", "beta"), getattr(config.residual, ours), strict=True)
        }
        return fields and {**fields, **factors, "block_size": BLOCK_SIZE, "postnorm": True}


def _with_decays(config: c.TransformerConfig, decays: Iterable[c.SlopeDecay]) -> tuple[Any, ...]:
    """The attention of the model with these decays of its layers."""
    layers = (layer.attention for layer in config.layers)
    return tuple(
        replace(kind, decay=decay) if isinstance(kind, c.LinearAttention) else kind
        for kind, decay in zip(layers, decays, strict=False)
    )


def slope_scale(layer: int, num_layers: int) -> float:
    """Factor of the slopes of a layer."""
    return 1 - layer / (num_layers - 1 + 1e-5) + 1e-5


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
        prefix = p.SELF_ATTENTION.replace("{layer}", str(i))
        tables |= {f"{prefix}.{table}": array for table, array in arrays.items()}
    return tables


ROW = MiniMax(
    "minimax",
    "MiniMaxForCausalLM",
    kv_heads=8,
    norm=c.RMSNorm(eps=1e-5),
    norm_placement="post",
    norm_rules=(
        *m.norm_rules(f"{p.LAYER_PREFIX}.post_attention_layernorm", "post_attention_norm"),
        m.MappingRule(
            "model.layers.{next_layer}.input_layernorm.weight",
            "post_feed_forward_norm/scale",
            last_hf_name="model.norm.weight",
        ),
    ),
    embedding_norm=True,
    qk_norm_rules=(),
    top_level=(
        *m.top_level_rules("model.embed_tokens"),
        m.MappingRule("model.layers.0.input_layernorm.weight", "embedding/norm/scale"),
    ),
    positions=MiniMaxRope(base=1e6, max_length=131_072),
    branch=mixtral_experts(),
    constants={
        **{"hidden_act": "silu", "sliding_window": None, "postnorm": True},
        "shared_intermediate_size": 0,
    },
    unused=("block_size", "shared_moe_mode"),
    mixer_rules=LIGHTNING,
    ignored_tensors=(r".*\.self_attn\.(slope_rate|(query|key|diagonal)_decay)",),
)
FAMILIES = (replace(ROW.family(), constant_tensors=decay_tables),)
