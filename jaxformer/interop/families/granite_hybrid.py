"""Granite 4: Mamba 2 and attention, Granite's multipliers, and experts beside a shared network."""

from dataclasses import dataclass, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_fields import Options
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import experts as e
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.mamba import bamba_fields, mamba2_rules
from jaxformer.interop.families.mixers import Mixer, of_kind
from jaxformer.interop.families.windows import PerLayer
from jaxformer.interop.family import Family
from jaxformer.interop.hf_activations import HF_ACTIVATIONS, hf_activation_name
from jaxformer.interop.param_mapping import decoder_mapping, fused_rules, linear_rules
from jaxformer.interop.rope_config import RopeField, first_rope
from jaxformer.zoo.llama import LLAMA

SHARED = f"{p.LAYER_PREFIX}.shared_mlp"
EXPERTS = e.mixtral_experts()
# The new names and the old ones.
WORDS = {"linear_attention": False, "full_attention": True, "mamba": False, "attention": True}
ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")


class ExpertsBesideNetwork:
    """Experts beside a shared network, or the network alone if there are no experts."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        name = "shared_intermediate_size"
        shared = c.GLU(
            hidden_dim=reader.integer(name, 1024),
            activation=reader.choice("hidden_act", "silu", HF_ACTIVATIONS),
        )
        if reader.integer("num_local_experts", 8) == 0:
            for unused in ("intermediate_size", "num_experts_per_tok"):
                reader.get(unused)
            return {"feed_forward": (shared,)}
        moe = replace(EXPERTS.read_moe(reader), shared=c.SharedExpert(expert=shared))
        return {"feed_forward": (moe,)}

    def write(self, model: c.TransformerConfig) -> Options | None:
        """Fields of the experts and of the network."""
        branch: Any = model.feed_forward[0]
        experts = branch if isinstance(branch, c.MoE) else None
        network = branch if experts is None else experts.shared and experts.shared.expert
        if not isinstance(network, c.GLU):
            return None
        entries: Options | None = {
            "num_local_experts": 0,
            "intermediate_size": network.hidden_dim,
            "hidden_act": hf_activation_name(network.activation),
        }
        if experts is not None:
            entries = EXPERTS.write_moe(experts)
        return entries and {**entries, "shared_intermediate_size": network.hidden_dim}


@dataclass(frozen=True, kw_only=True)
class RopeByName(RopeField):
    """RoPE, if ``position_embedding_type`` says so."""

    def read_positions(self, reader: ConfigReader, windows: tuple[Any, ...]) -> tuple[Any, ...]:
        has_rope = {"rope": True, "nope": False, "none": False}
        if reader.choice("position_embedding_type", "none", has_rope):
            return super().read_positions(reader, windows)
        for name in ROPE_FIELDS:  # without effect
            reader.get(name)
        return (None,)

    def write(self, model: c.TransformerConfig) -> dict[str, Any]:
        name = "position_embedding_type"
        rope = first_rope(model)
        return {name: None} if rope is None else {name: "rope", **self.write_rope(rope)}


@dataclass(frozen=True)
class OldOrNewTypes(PerLayer):
    """The type of each layer, whose field has an old name and a new one."""

    def read(self, reader: ConfigReader, num_layers: int, default: Any) -> tuple[Any, ...]:
        name = "layer_types" if "layer_types" in reader else "layers_block_type"
        return PerLayer(name, self.words).read(reader, num_layers, default)


FAMILIES = (
    Family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        LLAMA,
        (
            *(*p.decoder(heads=32), p.ATTENTION_BIAS),
            *(*p.GRANITE_MULTIPLIERS, RopeByName(), ExpertsBesideNetwork()),
            Mixer(
                kind=bamba_fields(1e-6),
                types=OldOrNewTypes("layer_types", WORDS),
                default=lambda reader, num_layers: lambda i: False,
                may_lack_kinds=True,
            ),
        ),
        decoder_mapping(
            *(*p.TOP_LEVEL, *p.PRE_NORMS, *mamba2_rules(f"{p.LAYER_PREFIX}.mamba")),
            *of_kind(c.MultiHead, *p.ATTENTION, *p.QK_NORMS),
            *e.GRANITE_RULES,
            *fused_rules(f"{SHARED}.input_linear", "feed_forward", ("gate", "up")),
            *linear_rules(f"{SHARED}.output_linear", "feed_forward/down"),
        ),
        attention_types=(c.LinearAttention, c.MultiHead),
    ),
)
