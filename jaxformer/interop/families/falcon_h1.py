"""Falcon-H1: attention and Mamba 2 side by side in every layer, and multipliers everywhere.

The multipliers of the embedding, the logits and the keys are options here. The others multiply the
inputs and outputs of linear layers, so the kernels and biases absorb them; to write them again,
pass them to `save_pretrained` as `extra`.
"""

from dataclasses import dataclass, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_like_family import LlamaLike
from jaxformer.interop.families.llama_like_options import Dense, OneRope
from jaxformer.interop.families.mamba import (
    BAMBA,
    BAMBA_CONVOLUTION,
    BAMBA_ROW,
    BAMBA_SIZES,
    read_step_limits,
    write_step_limits,
)
from jaxformer.interop.families.option_fields import BiasesField, Field
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule

FIELDS = replace(
    BAMBA,
    fields=(
        *BAMBA_SIZES,
        BiasesField("mamba_proj_bias", "biases", False, layers=("in",)),
        BAMBA_CONVOLUTION,
        BiasesField("projectors_bias", "biases", False, layers=("out",)),
    ),
    inner_width="mamba_d_ssm",
    unused=(
        *BAMBA.unused,
        "mlp_expansion_factor",
        # Initial values.
        *("time_step_rank", "time_step_min", "time_step_max", "time_step_floor"),
    ),
)
KIND_PATHS = {c.MultiHead: "attention/kind_0/", c.LinearAttention: "attention/kind_1/"}


def _side_by_side(rule: MappingRule) -> MappingRule:
    """A rule of a Bamba layer of one kind for a layer that has both."""
    if rule.kind is None:
        return rule
    paths = (path.replace("attention/", KIND_PATHS[rule.kind], 1) for path in rule.param_paths)
    return replace(rule, params=tuple(paths), kind=None)


def read_factors(reader: ConfigReader) -> dict[str, tuple[float, ...]]:
    """Multipliers that the weights of a layer absorb, by name of the tensor."""

    def number(name: str) -> float:
        return reader.number(f"{name}_multiplier", 1.0)

    def numbers(name: str, count: int) -> tuple[float, ...]:
        values = reader.sequence(f"{name}_multipliers", float) or (1.0,) * count
        if len(values) != count:
            reader.add_problem(f"{name}_multipliers", f"expected {count} numbers.")
        return values

    gate, down = numbers("mlp", 2)
    parts = numbers("ssm", 5)  # of the gate, x, B, C and dt
    factors: dict[str, tuple[float, ...]] = {
        "self_attn.o_proj": (number("attention_out"),),
        "mamba.in_proj": parts,
        "mamba.out_proj": (number("ssm_out"),),
        "feed_forward.gate_proj": (gate,),
        "feed_forward.down_proj": (down,),
    }
    both = "weight", "bias"
    with_biases = {f"{name}.{leaf}": x for name, x in factors.items() for leaf in both}
    # What multiplies the input does not reach the bias.
    inputs: dict[str, tuple[float, ...]] = {
        "mamba.in_proj.weight": tuple(number("ssm_in") * part for part in parts),
        **{f"self_attn.{name}_proj.weight": (number("attention_in"),) for name in "qkv"},
    }
    return {f"{p.LAYER_PREFIX}.{name}": x for name, x in (with_biases | inputs).items()}


@dataclass(frozen=True)
class FalconH1(LlamaLike):
    """Attention and Mamba 2 side by side, and a multiplier of the keys."""

    def family(self) -> Family:
        """The family."""
        return replace(
            super().family(), attention_types=(c.HybridHeads,), weight_factors=read_factors
        )

    def layer_rules(self) -> tuple[MappingRule, ...]:
        """Mapping rules of a layer."""
        return tuple(map(_side_by_side, BAMBA_ROW.layer_rules()))

    def read(self, reader: ConfigReader) -> c.TransformerConfig:
        """Read config.json."""
        read_factors(reader)
        config = super().read(reader)
        heads = p.heads_of(config)
        scale = heads.head_dim**-0.5 * reader.number("key_multiplier", 1.0)
        kinds = replace(heads, scale=scale), _read_mamba(reader, config.norm)
        return replace(config, attention=c.HybridHeads(kinds=kinds))

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Fields of config.json, or None for another model."""
        match config.attention:
            case c.HybridHeads(kinds=(c.MultiHead() as attention, c.LinearAttention() as mamba)):
                pass
            case _:
                return None
        fields = super().write(replace(config, attention=attention))
        scale = 1.0 if attention.scale is None else attention.scale / attention.head_dim**-0.5
        return fields and {
            **fields,
            **FIELDS.write(config, mamba),
            **write_step_limits(mamba),
            "mamba_rms_norm": mamba.output.norm is not None,
            "mamba_norm_before_gate": mamba.output.placement == "after_norm",
            "key_multiplier": scale,
        }


def _read_mamba(reader: ConfigReader, norm: c.Norm) -> c.LinearAttention:
    """Mamba 2 with a norm before or after the gate, or with none."""
    mamba = FIELDS.read(reader, norm, **read_step_limits(reader))
    has_norm = reader.boolean("mamba_rms_norm", False)
    is_early = reader.boolean("mamba_norm_before_gate", True)
    output = replace(
        mamba.output,
        norm=norm if has_norm else None,
        placement="after_norm" if has_norm and is_early else "before_norm",
    )
    return replace(mamba, output=output)


ROW = FalconH1(
    "falcon_h1",
    "FalconH1ForCausalLM",
    sizes=BAMBA_ROW.sizes,
    kv_heads=8,
    norm=BAMBA_ROW.norm,
    top_level=BAMBA_ROW.top_level,
    positions=OneRope(max_length=8192),
    branch=Dense(hidden_dim=14_336),
    biases=BAMBA_ROW.biases,
    fields=(
        Field("embedding_multiplier", "embedding.scale", 1.0),
        Field("lm_head_multiplier", "head.multiplier", 1.0),
    ),
    constants={"mamba_use_mlp": True, "attn_layer_indices": None},
)
FAMILIES = (ROW.family(),)
