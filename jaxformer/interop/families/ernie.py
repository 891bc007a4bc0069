"""ERNIE 4.5 with experts: a Llama whose layers with experts are numbered from first to last.

Modules that predict further tokens are left out.
"""

from dataclasses import dataclass, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_like_experts import (
    EXPERT_RULES,
    PREFIX,
    dense_width,
    layer_branches,
    shared_rules,
)
from jaxformer.interop.families.llama_like_family import (
    FEED_FORWARD_BIAS,
    HEAD_BIAS,
    BiasField,
    LlamaLike,
)
from jaxformer.interop.families.llama_like_options import OneRope
from jaxformer.interop.param_mapping import MappingRule
from jaxformer.interop.transforms import Flatten

# Settings of training, of kernels and of modules left out.
WITHOUT_EFFECT = ("moe_capacity", "moe_use_aux_free", "num_nextn_predict_layers")
ROUTER = c.Router(selection_bias=True)


@dataclass(frozen=True, kw_only=True)
class ErnieMoE:
    """Experts in every ``moe_layer_interval``-th layer from a first to a last one."""

    rules = (
        *p.FEED_FORWARD,
        *EXPERT_RULES,
        *shared_rules(f"{PREFIX}.shared_experts"),
        MappingRule(
            f"{PREFIX}.moe_statics.e_score_correction_bias",
            "feed_forward/selection_bias",
            Flatten(leading=1),
        ),
    )

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """The network of each layer, without a cycle."""
        count = reader.integer("num_hidden_layers")
        first = reader.integer("moe_layer_start_index", 1)
        last = reader.integer("moe_layer_end_index", -1)
        interval = reader.positive_integer("moe_layer_interval", 1)
        numbers = range(first, count if last == -1 else last + 1)
        sparse = [i for i in range(count) if i in numbers and (i + 1) % interval == 0]
        dense, moe = p.read_glu(reader, bias=bias), self._read_moe(reader, bias=bias)
        return tuple(moe if i in sparse else dense for i in range(count))

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Which layers have experts, and the numbers of experts."""
        branches = layer_branches(config)
        if branches is None:
            return None
        moe, dense_layers = branches
        sparse = [i for i in range(config.num_layers) if i not in dense_layers]
        shared = 0 if moe.shared is None else moe.shared.expert.hidden_dim
        if shared % moe.expert.hidden_dim:
            return None
        return {
            "moe_layer_start_index": sparse[0],
            "moe_layer_end_index": sparse[-1],
            "moe_layer_interval": sparse[1] - sparse[0] if len(sparse) > 1 else 1,
            "intermediate_size": dense_width(config, dense_layers, moe),
            "moe_intermediate_size": moe.expert.hidden_dim,
            "moe_num_experts": moe.num_experts,
            "moe_num_shared_experts": shared // moe.expert.hidden_dim,
            "moe_k": moe.top_k,
        }

    def _read_moe(self, reader: ConfigReader, *, bias: bool) -> c.MoE:
        for name in WITHOUT_EFFECT:
            reader.get(name)
        reader.require_value("moe_gate_act", "softmax")
        reader.require_value("moe_norm_min", 1e-12)
        expert = p.read_glu(reader, width_name="moe_intermediate_size", hidden_dim=1536)
        shared, num_shared = None, reader.integer("moe_num_shared_experts", 2)
        if num_shared:
            wide = replace(expert, hidden_dim=num_shared * expert.hidden_dim, bias=bias)
            shared = c.SharedExpert(expert=wide)
        return c.MoE(
            expert=expert,
            num_experts=reader.integer("moe_num_experts", 64),
            top_k=reader.integer("moe_k", 6),
            router=ROUTER,
            shared=shared,
        )


ROW = LlamaLike(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    kv_heads=4,
    eps=1e-5,
    tied=True,
    positions=OneRope(base=5e5, max_length=131_072, pairing="neighbours"),
    biases=(BiasField("use_bias", (*p.ALL_BIASES, *FEED_FORWARD_BIAS, *HEAD_BIAS)),),
    branch=ErnieMoE(),
    ignored_tensors=(r"model\.mtp_.*",),
)
FAMILIES = (ROW.family(),)
