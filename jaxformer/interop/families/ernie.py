"""ERNIE 4.5 with experts: a Llama whose layers with experts are numbered from first to last.

Modules that predict further tokens are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_like_experts import (
    ACTIVATION,
    EXPERT_RULES,
    MOE,
    PREFIX,
    SELECTION_BIAS,
    SHARED,
    ExpertsInSomeLayers,
)
from jaxformer.interop.families.llama_like_family import (
    FEED_FORWARD_BIAS,
    HEAD_BIAS,
    BiasField,
    LlamaLike,
)
from jaxformer.interop.families.llama_like_options import OneRope
from jaxformer.interop.families.option_fields import Field
from jaxformer.interop.param_mapping import MappingRule, glu_rules
from jaxformer.interop.transforms import Flatten


@dataclass(frozen=True, kw_only=True)
class ErnieMoE(ExpertsInSomeLayers):
    """Experts in every ``moe_layer_interval``-th layer from a first to a last one."""

    moe: c.MoE = replace(MOE, router=c.Router(selection_bias=True))
    fields: tuple[Field, ...] = (
        Field("moe_intermediate_size", "expert.hidden_dim", 1536),
        ACTIVATION,
        Field("moe_num_experts", "num_experts", 64),
        Field("moe_k", "top_k", 6),
    )
    rules: tuple[MappingRule, ...] = (
        *p.FEED_FORWARD,
        *EXPERT_RULES,
        *glu_rules(f"{PREFIX}.shared_experts", SHARED),
        MappingRule(
            f"{PREFIX}.moe_statics.e_score_correction_bias", SELECTION_BIAS, Flatten(leading=1)
        ),
    )
    shared_field: str | None = "moe_num_shared_experts"
    num_shared: int = 2
    constants: Mapping[str, Any] = field(
        default_factory=lambda: {"moe_gate_act": "softmax", "moe_norm_min": 1e-12}
    )
    # Settings of training, of kernels and of modules left out.
    unused: tuple[str, ...] = ("moe_capacity", "moe_use_aux_free", "num_nextn_predict_layers")

    def read_layers(self, reader: ConfigReader, num_layers: int) -> list[bool]:
        """Whether each layer has experts."""
        first = reader.integer("moe_layer_start_index", 1)
        last = reader.integer("moe_layer_end_index", -1)
        interval = reader.positive_integer("moe_layer_interval", 1)
        numbers = range(first, num_layers if last == -1 else last + 1)
        return [i in numbers and (i + 1) % interval == 0 for i in range(num_layers)]

    def write_layers(self, is_sparse: list[bool]) -> dict[str, Any]:
        """The first and the last layer with experts, and the interval."""
        sparse = [i for i, has_experts in enumerate(is_sparse) if has_experts]
        return {
            "moe_layer_start_index": sparse[0],
            "moe_layer_end_index": sparse[-1],
            "moe_layer_interval": sparse[1] - sparse[0] if len(sparse) > 1 else 1,
        }


ROW = LlamaLike(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    kv_heads=4,
    norm=c.RMSNorm(eps=1e-5),
    tied=True,
    positions=OneRope(base=5e5, max_length=131_072, pairing="neighbours"),
    biases=(BiasField("use_bias", (*p.ALL_BIASES, *FEED_FORWARD_BIAS, *HEAD_BIAS)),),
    branch=ErnieMoE(),
    ignored_tensors=(r"model\.mtp_.*",),
)
FAMILIES = (ROW.family(),)
