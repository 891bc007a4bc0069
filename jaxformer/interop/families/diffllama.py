"""DiffLlama: Llama with differential attention."""

from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_fields import Field, Unused
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, decoder_mapping
from jaxformer.interop.rope_config import RopeField
from jaxformer.interop.transforms import Rearrange
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import like


def in_pairs(rule: MappingRule) -> MappingRule:
    """Return the rule of queries, keys or values, in whose tensor second heads follow all first."""
    is_kernel = rule.hf_name.endswith(".weight")
    pattern = "d (g 2 r) h -> (2 g r h) d" if is_kernel else "(g 2 r) h -> (2 g r h)"

    def by_pair(config: c.TransformerConfig) -> Rearrange:
        attention: Any = config.layers[0].attention
        return Rearrange(pattern, groups=attention.num_kv_heads // 2)

    is_out = rule.param_paths[0].startswith("attention/out")
    return rule if is_out else replace(rule, transform=by_pair)


# As Llama, except: differential attention.
FAMILIES = (
    Family(
        "diffllama",
        "DiffLlamaForCausalLM",
        like(LLAMA, attention=c.Differential(num_heads=2, num_kv_heads=2, head_dim=8)),
        (
            *p.decoder(eps=1e-5),
            Field("rms_norm_eps", "attention.norm.eps", 1e-5),
            *(*p.GLU, p.ATTENTION_BIAS, RopeField(max_length=2048)),
            Unused("lambda_std_dev"),  # of the first values
        ),
        decoder_mapping(
            *(*p.TOP_LEVEL, *p.PRE_NORMS, *p.FEED_FORWARD),
            *map(in_pairs, p.ATTENTION),
            *(
                MappingRule(
                    f"{p.SELF_ATTENTION}.lambda_{name[0]}{i}", f"attention/factor_{name}_{i}"
                )
                for name in ("query", "key")
                for i in (1, 2)
            ),
        ),
        attention_types=(c.Differential,),
    ),
)
