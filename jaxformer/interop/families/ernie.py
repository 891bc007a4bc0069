"""ERNIE 4.5 with experts: a Llama whose layers with experts are numbered from first to last.

Modules that predict further tokens are left out.
"""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.interop.config_fields import BiasesField, Field, Options, Unused, fixed
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import experts as e
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.family import INV_FREQ_PATTERNS, Family
from jaxformer.interop.param_mapping import MappingRule, decoder_mapping, glu_rules
from jaxformer.interop.rope_config import RopeField
from jaxformer.zoo.ernie import ERNIE_4_5


class NumberedLayers:
    """Experts in every ``moe_layer_interval``-th layer from a first to a last one."""

    def read(self, reader: ConfigReader, num_layers: int) -> list[bool]:
        first = reader.integer("moe_layer_start_index", 1)
        last = reader.integer("moe_layer_end_index", -1)
        interval = reader.positive_integer("moe_layer_interval", 1)
        numbers = range(first, num_layers if last == -1 else last + 1)
        return [i in numbers and (i + 1) % interval == 0 for i in range(num_layers)]

    def write(self, is_sparse: list[bool]) -> Options | None:
        """The first and the last layer with experts, and the interval."""
        sparse = [i for i, has_experts in enumerate(is_sparse) if has_experts]
        if not sparse:
            return None
        return {
            "moe_layer_start_index": sparse[0],
            "moe_layer_end_index": sparse[-1],
            "moe_layer_interval": sparse[1] - sparse[0] if len(sparse) > 1 else 1,
        }


EXPERTS = e.Experts(
    moe=replace(e.MOE, router=c.Router(selection_bias=True)),
    fields=(
        Field("moe_intermediate_size", "expert.hidden_dim", 1536),
        e.ACTIVATION,
        Field("moe_num_experts", "num_experts", 64),
        Field("moe_k", "top_k", 6),
        e.SharedExperts("moe_num_shared_experts", 2),
    ),
    layers=NumberedLayers(),
    dense=e.dense_fields(bias="use_bias"),
)
FAMILIES = (
    Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        ERNIE_4_5,
        (
            *(*p.decoder(kv_heads=4, eps=1e-5, tied=True), EXPERTS),
            BiasesField("use_bias", layers=p.ALL_BIASES),
            Field("use_bias", "head.bias", False),
            RopeField(base=5e5, max_length=131_072, pairing="neighbours"),
            *fixed(moe_gate_act="softmax", moe_norm_min=1e-12),
            # Settings of training, of kernels and of modules left out.
            Unused("moe_capacity", "moe_use_aux_free", "num_nextn_predict_layers"),
        ),
        decoder_mapping(
            *(*p.LLAMA, *e.EXPERT_RULES, *glu_rules(f"{e.PREFIX}.shared_experts", e.SHARED)),
            MappingRule(
                f"{e.PREFIX}.moe_statics.e_score_correction_bias", *(e.SELECTION_BIAS, "x -> 1 x")
            ),
        ),
        ignored_tensors=(*INV_FREQ_PATTERNS, r"model\.mtp_.*"),
    ),
)
