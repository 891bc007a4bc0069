"""Beam: windows with RoPE, full layers whose queries grow, gates with biases, DeepSeek's choice."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_fields import OPTIONAL_NUMBER, Change, Field, Options
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import experts as e
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.gemma import SANDWICH
from jaxformer.interop.families.heads_by_layer import DIFFERENT_HEADS, KINDS, by_layer
from jaxformer.interop.families.windows import Windows
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, decoder_mapping
from jaxformer.interop.rope_config import read_rope_section, write_rope_section
from jaxformer.zoo.qwen import QWEN_3_MOE
from jaxformer.zoo.sizes import like

DEFAULT_ROPES = {"full_attention": None, "sliding_attention": {"rope_type": "default"}}


def all_but_sixth_and_last(reader: ConfigReader, window: int | None) -> Callable[[int], bool]:
    """All layers but every sixth and the last."""
    last = reader.integer("num_hidden_layers") - 1
    return lambda i: (i + 1) % 6 != 0 and i != last


class RopeOrGrowth:
    """A RoPE for each kind of layer; where it is null queries grow with the position."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The attention of the layers."""
        length = reader.positive_integer("max_position_embeddings", 8192)
        both = reader.section("rope_parameters") or ConfigReader(DEFAULT_ROPES)
        ropes = {}
        for kind, is_full in KINDS.items():
            section = both.section(kind)
            ropes[is_full] = section and read_rope_section(section, base=1e4, max_length=length)
        positions = tuple(ropes[window is None] for window in options["attention.windows"])
        changes = [{} if rope else {"query_scaling": c.QueryPower()} for rope in positions]
        kinds = Change(partial(by_layer, lambda heads: changes))
        return {"attention.positions": positions, "attention": kinds}

    def write(self, model: c.TransformerConfig) -> Options:
        """Both."""
        ropes: dict[bool, Any] = {layer.window is None: layer.rope for layer in model.layers}
        sections, lengths = dict[str, Any](DEFAULT_ROPES), dict[str, int]()
        for kind, is_full in KINDS.items():
            if ropes.get(is_full) is not None:
                sections[kind], more = write_rope_section(ropes[is_full])
                lengths |= more
            elif is_full in ropes:
                sections[kind] = None
        return {**lengths, "rope_parameters": sections}


FAMILIES = (
    # As Qwen 3 with experts, except: chosen by sigmoid and a bias, in groups; norms after the
    # branches, gates, weights of the residual stream by depth, windows, and queries that grow in
    # the layers without one, which have no positions.
    Family(
        "beam",
        "BeamForCausalLM",
        like(
            QWEN_3_MOE,
            norm_placement="sandwich",
            residual=c.DepthScaledSum(),
            output_gate=c.OutputGate(bias=True),
        ),
        (
            *(*p.decoder(kv_heads=8, head_dim=128), p.ATTENTION_BIAS),
            e.Experts(
                moe=c.MoE(
                    expert=e.MOE.expert,
                    num_experts=2,
                    router=c.Router(score="sigmoid", selection_bias=True, scale=2.5),
                ),
                fields=(
                    *e.olmo_fields(
                        *(256, 8),
                        renormalise=True,
                        width=Field("moe_intermediate_size", "expert.hidden_dim", 2560),
                    ),
                    Field("routed_scaling_factor", "router.scale", 2.5),
                    e.Groups(default=c.ExpertGroups(num_groups=8, top_k=4)),
                ),
                layers=e.LayersByType(3),
                dense=e.dense_fields(20_480),
            ),
            Windows(512, rule=all_but_sixth_and_last),
            RopeOrGrowth(),
            Field("final_logit_softcapping", "head.softcap", 30.0, OPTIONAL_NUMBER),
        ),
        decoder_mapping(
            *(*p.TOP_LEVEL, *SANDWICH, *p.ATTENTION, *p.QK_NORMS, *e.deepseek_rules()),
            MappingRule(f"{p.SELF_ATTENTION}.gate_bias", "attention/output_gate_bias/bias"),
        ),
        attention_types=DIFFERENT_HEADS,
    ),
)
