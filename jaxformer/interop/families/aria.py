"""The text model of Aria: Llama with experts; some experts are shared."""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.interop.config_fields import Field
from jaxformer.interop.families import experts as e
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, decoder_mapping, glu_rules, linear_rules
from jaxformer.interop.rope_config import RopeField
from jaxformer.zoo.llama import LLAMA

FAMILIES = (
    # As Mixtral, except: shared experts; the routed ones have SiLU whatever the file says.
    Family(
        "aria_text",
        "AriaTextForCausalLM",
        LLAMA,
        (
            *(*p.decoder(), p.ATTENTION_BIAS, RopeField(), p.HEADS_DIVIDE_WIDTH),
            e.Experts(
                moe=replace(e.MOE, shared=c.SharedExpert(expert=e.MOE.expert)),
                fields=(
                    Field("intermediate_size", "expert.hidden_dim", 4096),
                    Field("moe_num_experts", "num_experts", 8),
                    Field("moe_topk", "top_k", 2),
                    e.SharedExperts("moe_num_shared_experts", 2, required=True),
                    Field("hidden_act", "shared.expert.activation", "silu"),
                    Field("mlp_bias", "shared.expert.bias", False),
                ),
            ),
        ),
        decoder_mapping(
            *(*p.TOP_LEVEL, *p.PRE_NORMS, *p.ATTENTION),
            *linear_rules(f"{e.PREFIX}.router", "feed_forward/router"),
            MappingRule(
                f"{e.PREFIX}.experts.fc1.weight",
                (f"{e.EXPERTS}/gate/kernel", f"{e.EXPERTS}/up/kernel"),
                "e i o -> e i +o",
            ),
            MappingRule(f"{e.PREFIX}.experts.fc2.weight", f"{e.EXPERTS}/down/kernel"),
            *glu_rules(f"{e.PREFIX}.shared_experts", e.SHARED),
        ),
    ),
)
