"""Granite 4: Mamba 2 and attention, Granite's multipliers, and experts beside a shared network."""

from dataclasses import dataclass, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_like_experts import GRANITE_EXPERTS, GraniteSharedExperts
from jaxformer.interop.families.llama_like_family import BiasField
from jaxformer.interop.families.llama_like_options import GRANITE_MULTIPLIERS, OneRope
from jaxformer.interop.families.mamba import BambaLike, mamba2_rules
from jaxformer.interop.param_mapping import MappingRule, fused_rules, linear_rules

SHARED = f"{p.LAYER_PREFIX}.shared_mlp"
LAYER_TYPES = {  # the old names and the new ones
    "mamba": False,
    "linear_attention": False,
    "attention": True,
    "full_attention": True,
}
ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")


@dataclass(frozen=True, kw_only=True)
class GraniteHybridExperts(GraniteSharedExperts):
    """Experts beside a shared network, or the latter alone if there are no experts."""

    rules: tuple[MappingRule, ...] = (
        *GRANITE_EXPERTS.rules,
        *fused_rules(f"{SHARED}.input_linear", "feed_forward", ("gate", "up")),
        *linear_rules(f"{SHARED}.output_linear", "feed_forward/down"),
    )

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """The experts or the network."""
        name = "shared_intermediate_size"
        shared = p.read_glu(reader, width_name=name, hidden_dim=1024)
        if reader.integer("num_local_experts", 8) == 0:
            for unused in ("intermediate_size", "num_experts_per_tok"):
                reader.get(unused)
            return (shared,)
        moe = GRANITE_EXPERTS.read_moe(reader, bias=False)
        return (replace(moe, shared=c.SharedExpert(expert=shared)),)

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Fields of the experts and of the network."""
        branch = config.feed_forward[0]
        if isinstance(branch, c.GLU):
            return {"num_local_experts": 0, "shared_intermediate_size": branch.hidden_dim}
        has_shared = isinstance(branch, c.MoE) and branch.shared is not None
        return super().write(config) if has_shared else None


@dataclass(frozen=True, kw_only=True)
class RopeByName(OneRope):
    """RoPE, if ``position_embedding_type`` says so."""

    def read(self, reader: ConfigReader, windows: tuple[Any, ...]) -> tuple[Any, ...]:
        """RoPE or nothing."""
        has_rope = {"rope": True, "nope": False, "none": False}
        if reader.choice("position_embedding_type", "none", has_rope):
            return super().read(reader, windows)
        for name in ROPE_FIELDS:  # without effect
            reader.get(name)
        return (None,)

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """The fields of config.json."""
        fields = super().write(config)
        return {"position_embedding_type": None if fields is None else "rope", **(fields or {})}


@dataclass(frozen=True)
class GraniteHybrid(BambaLike):
    """Layers by types that have old names and new ones."""

    def read_layer_types(self, reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
        """Which layers have attention."""
        name = "layer_types" if "layer_types" in reader else "layers_block_type"
        return p.read_layer_types(reader, num_layers, lambda i: False, LAYER_TYPES, name=name)


FAMILIES = (
    GraniteHybrid(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        sizes={"num_attention_heads": 32},
        positions=RopeByName(),
        biases=(BiasField("attention_bias", p.ALL_BIASES),),
        branch=GraniteHybridExperts(fields=GRANITE_EXPERTS.fields),
        fields=GRANITE_MULTIPLIERS,
        mixer_rules=mamba2_rules(f"{p.LAYER_PREFIX}.mamba"),
        may_lack_kinds=True,
    ).family(),
)
