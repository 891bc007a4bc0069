"""MiniMax Text-01 and M1: lightning attention beside softmax attention, and experts.

Its residual is taken after the norm, which is a norm after each sum: the norm before a layer is the
last one of the layer before it, and the norm before the first layer belongs to the embedding. Its
code and its files turn `rotary_dim` features of a head; transformers ignores this field, and turns
all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_fields import Change, Derived, Options, Unused, Written, fixed
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import experts as e
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.mixers import Kind, Mixer, linear_attention, of_kind
from jaxformer.interop.family import INV_FREQ_PATTERNS, Family
from jaxformer.interop.rope_config import RopeField, first_rope
from jaxformer.interop.transforms import LINEAR_BY_GROUP
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import like

BRANCHES = {"attention": "full_attn", "recurrent": "linear_attn", "feed_forward": "mlp"}
BLOCK_SIZE = 256  # tokens of a block, without effect on the results
LIGHTNING = linear_attention(
    delta_rule=False,
    beta="one",
    unit_vectors=False,
    scale=1.0,
    convolution_width=None,
    # The eps of the norm of what is read is independent of rms_norm_eps.
    output=c.GatedNorm(norm=c.RMSNorm(eps=1e-6), over="all", activation="sigmoid"),
)


@dataclass(frozen=True, kw_only=True)
class PartialRope(RopeField):
    """RoPE of ``rotary_dim`` features of a head, by default of all."""

    def write(self, model: c.TransformerConfig) -> dict[str, Any] | None:
        rope = first_rope(model)
        if rope is None:
            return None
        rotated = rope.rotary_dim(p.heads_of(model).head_dim)
        fields = self.write_rope(replace(rope, fraction=1.0))
        return fields if rope.fraction == 1 else {**fields, "rotary_dim": rotated}

    def read(self, reader: ConfigReader, options: Options) -> Options:
        head_dim = options["attention.head_dim"]
        fraction = reader.integer("rotary_dim", head_dim) / max(1, head_dim)
        return {"attention.positions": (replace(self.read_rope(reader), fraction=fraction),)}


class ResidualFactors:
    """Weights of the two terms of each sum, by kind of branch."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        factors: dict[str, Any] = {
            ours: tuple(reader.number(f"{name}_{x}_factor", 1.0) for x in ("alpha", "beta"))
            for ours, name in BRANCHES.items()
        }
        return {"residual": c.WeightedSum(**factors)}

    def write(self, model: c.TransformerConfig) -> Options | None:
        if not isinstance(model.residual, c.WeightedSum):
            return None
        return {
            f"{name}_{letter}_factor": value
            for ours, name in BRANCHES.items()
            for letter, value in zip(("alpha", "beta"), getattr(model.residual, ours), strict=True)
        }


class LightningMixer(Mixer):
    """Lightning attention, whose slopes differ from layer to layer."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        kinds: Any = super().read(reader, options)["attention"]
        count = options["num_layers"]

        def with_slopes(attention: c.MultiHead) -> tuple[Any, ...]:
            return tuple(
                replace(kind, decay=c.SlopeDecay(scale=slope_scale(i, count)))
                if isinstance(kind, c.LinearAttention)
                else kind
                for i, kind in enumerate(kinds.function(attention))
            )

        return {"attention": Change(with_slopes)}


def every_other(reader: ConfigReader, num_layers: int) -> Callable[[int], bool]:
    """Attention in every other layer."""
    return lambda i: i % 2 == 0


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


FAMILIES = (
    Family(
        "minimax",
        "MiniMaxForCausalLM",
        like(
            LLAMA, norm_placement="post", final_norm=False, embedding=c.Embedding(norm=c.RMSNorm())
        ),
        (
            *(*p.decoder(kv_heads=8, eps=1e-5), e.mixtral_experts(), ResidualFactors()),
            PartialRope(base=1e6, max_length=131_072),
            LightningMixer(
                kind=Kind(
                    LIGHTNING,
                    (
                        Derived("num_heads", lambda x: x["attention.num_heads"]),
                        Derived("num_key_heads", lambda x: x["attention.num_heads"]),
                        Derived("key_dim", lambda x: x["attention.head_dim"]),
                        Derived("value_dim", lambda x: x["attention.head_dim"]),
                    ),
                ),
                default=every_other,
            ),
            *fixed(hidden_act="silu", sliding_window=None, postnorm=True),
            *fixed(shared_intermediate_size=0),
            Unused("block_size", "shared_moe_mode"),
            Written(block_size=BLOCK_SIZE, postnorm=True),
        ),
        m.decoder_mapping(
            *m.top_level_rules("model.embed_tokens"),
            m.MappingRule("model.layers.0.input_layernorm.weight", "embedding/norm/scale"),
            *m.norm_rules(f"{p.LAYER_PREFIX}.post_attention_layernorm", "post_attention_norm"),
            m.MappingRule(
                "model.layers.{next_layer}.input_layernorm.weight",
                "post_feed_forward_norm/scale",
                last_hf_name="model.norm.weight",
            ),
            *of_kind(
                c.LinearAttention,
                m.MappingRule(
                    f"{p.SELF_ATTENTION}.qkv_proj.weight",
                    tuple(f"attention/{name}/kernel" for name in p.QKV),
                    LINEAR_BY_GROUP,
                ),
                *m.linear_rules(f"{p.SELF_ATTENTION}.output_gate", "attention/gate"),
                *m.norm_rules(f"{p.SELF_ATTENTION}.norm", "attention/norm"),
                *m.linear_rules(f"{p.SELF_ATTENTION}.out_proj", "attention/out", input_axes=2),
            ),
            *of_kind(c.MultiHead, *p.ATTENTION),
            *e.MIXTRAL_RULES,
        ),
        ignored_tensors=(
            *INV_FREQ_PATTERNS,
            r".*\.self_attn\.(slope_rate|(query|key|diagonal)_decay)",
        ),
        attention_types=(c.LinearAttention, c.MultiHead),
        constant_tensors=decay_tables,
    ),
)
