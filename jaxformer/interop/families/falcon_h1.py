"""Falcon-H1: attention and Mamba 2 side by side in every layer, and multipliers everywhere.

The multipliers of the embedding, the logits and the keys are options here. The others multiply the
inputs and outputs of linear layers, so the kernels and biases absorb them; to write them again,
pass them to `save_pretrained` as `extra`.
"""

from dataclasses import dataclass, replace

from jaxformer import config as c
from jaxformer.interop.config_fields import (
    BiasesField,
    Change,
    Field,
    NoEntries,
    NotWritten,
    Options,
    Unused,
    fixed,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.mamba import (
    BAMBA_LAYER,
    BAMBA_SIZES,
    BAMBA_TOP_LEVEL,
    BAMBA_UNUSED,
    Mamba2Fields,
    StepLimits,
)
from jaxformer.interop.families.mixers import KindFields
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, decoder_mapping
from jaxformer.interop.rope_config import RopeField
from jaxformer.zoo.llama import LLAMA

KIND_PATHS = {c.MultiHead: "attention/kind_0/", c.LinearAttention: "attention/kind_1/"}


class MambaNorm:
    """A norm before or after the gate of Mamba 2, or none."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        has_norm = reader.boolean("mamba_rms_norm", False)
        is_early = reader.boolean("mamba_norm_before_gate", True)
        return {
            "output.norm": c.RMSNorm() if has_norm else None,
            "output.placement": "after_norm" if has_norm and is_early else "before_norm",
        }

    def write(self, model: c.LinearAttention) -> Options | None:
        if not isinstance(model.output, c.GatedNorm):
            return None
        return {
            "mamba_rms_norm": model.output.norm is not None,
            "mamba_norm_before_gate": model.output.placement == "after_norm",
        }


@dataclass(frozen=True)
class BesideAttention:
    """A mixer beside the attention of every layer.

    Attributes:
        kind: Its fields.
    """

    kind: KindFields

    def read(self, reader: ConfigReader, options: Options) -> Options:
        mixer = self.kind.read(reader, options)
        return {"attention": Change(lambda attention: c.HybridHeads(kinds=(attention, mixer)))}

    def write(self, model: c.TransformerConfig) -> Options | None:
        match model.attention:
            case c.HybridHeads(kinds=(c.MultiHead(), c.LinearAttention() as mixer)):
                return self.kind.write(model, mixer)
        return None


class KeyMultiplier:
    """A multiplier of the keys, which is one of the scores."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        factor = reader.number("key_multiplier", 1.0)
        return {"attention.scale": options["attention.head_dim"] ** -0.5 * factor}

    def write(self, model: c.TransformerConfig) -> Options:
        attention = p.heads_of(model)
        scale = attention.scale
        return {"key_multiplier": 1.0 if scale is None else scale / attention.head_dim**-0.5}


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


class Factors(NoEntries):
    """The multipliers that the weights absorb."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        read_factors(reader)
        return {}


def _side_by_side(rule: MappingRule) -> MappingRule:
    """A rule of a Bamba layer of one kind for a layer that has both."""
    if rule.kind is None:
        return rule
    paths = (path.replace("attention/", KIND_PATHS[rule.kind], 1) for path in rule.param_paths)
    return replace(rule, params=tuple(paths), kind=None)


FAMILIES = (
    Family(
        "falcon_h1",
        "FalconH1ForCausalLM",
        LLAMA,
        (
            *(*p.decoder(heads=32, kv_heads=8, eps=1e-5), *p.glu(14_336)),
            *(p.ATTENTION_BIAS, p.MLP_BIAS, RopeField(max_length=8192)),
            Field("embedding_multiplier", "embedding.scale", 1.0),
            Field("lm_head_multiplier", "head.multiplier", 1.0),
            *(Factors(), KeyMultiplier()),
            *fixed(mamba_use_mlp=True, attn_layer_indices=None),
            BesideAttention(
                Mamba2Fields(
                    fields=(
                        BiasesField("mamba_proj_bias", "biases", layers=("in",)),
                        *BAMBA_SIZES,
                        BiasesField("projectors_bias", "biases", layers=("out",)),
                        *(
                            StepLimits(),
                            MambaNorm(),
                            NotWritten(Field("rms_norm_eps", "output.norm.eps", 1e-5)),
                        ),
                    ),
                    head_dim="mamba_d_head",
                    expand="mamba_expand",
                    inner_width="mamba_d_ssm",
                )
            ),
            *(BAMBA_UNUSED, Unused("mlp_expansion_factor")),
            # Initial values.
            Unused("time_step_rank", "time_step_min", "time_step_max", "time_step_floor"),
        ),
        decoder_mapping(*BAMBA_TOP_LEVEL, *map(_side_by_side, BAMBA_LAYER)),
        attention_types=(c.HybridHeads,),
        weight_factors=read_factors,
    ),
)
