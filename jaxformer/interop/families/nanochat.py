"""nanochat: norms without parameters, also of the embedding, and RoPE that turns backwards.

It norms queries and keys after RoPE, which is the same without parameters. Turning by the negative
angle is turning with the two halves of each head swapped, so they are swapped in the kernels.
"""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.hf_activations import HF_ACTIVATIONS
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping, linear_rules
from jaxformer.interop.rope_config import read_rope, write_rope
from jaxformer.interop.transforms import Flatten, HalvesSwapped, LinearKernel

ATTENTION = f"{p.LAYER_PREFIX}.self_attn"
TURNED = (("q_proj", "query"), ("k_proj", "key"))
TABLE = ParamMapping(
    top_level=p.TOP_LEVEL,
    stacks={
        "decoder": (
            *(
                MappingRule(f"{ATTENTION}.{name}.{leaf}", f"attention/{ours}/{param}", transform)
                for name, ours in TURNED
                for leaf, param, transform in (
                    ("weight", "kernel", HalvesSwapped(part=LinearKernel())),
                    ("bias", "bias", HalvesSwapped(part=Flatten())),
                )
            ),
            *linear_rules(f"{ATTENTION}.v_proj", "attention/value"),
            *linear_rules(f"{ATTENTION}.o_proj", "attention/out", input_axes=2),
            *linear_rules(f"{p.LAYER_PREFIX}.mlp.fc1", "feed_forward/up"),
            *linear_rules(f"{p.LAYER_PREFIX}.mlp.fc2", "feed_forward/down"),
        )
    },
)


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a nanochat model."""
    norm = c.RMSNorm(eps=reader.number("rms_norm_eps", 1e-6), parameters="none")
    heads: dict[str, Any] = dict(
        **p.read_heads(reader),
        positions=(read_rope(reader),),
        qk_norm=c.QKNorm(norm=norm, over="head"),
        biases=p.read_biases(reader),
    )
    branch = c.MLP(
        hidden_dim=reader.integer("intermediate_size"),
        activation=reader.choice("hidden_act", "relu2", HF_ACTIVATIONS),
    )
    return c.TransformerConfig(
        **p.read_sizes(reader),
        attention=c.MultiHead(**heads),
        feed_forward=(branch,),
        norm=norm,
        embedding=c.Embedding(norm=norm),
        head=c.LMHead(
            tied=reader.boolean("tie_word_embeddings", False),
            softcap=reader.optional_number("final_logit_softcapping", 15.0),
        ),
    )


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A nanochat's configuration from ours."""
    if not (p.is_rope_decoder(config) and isinstance(config.feed_forward[0], c.MLP)):
        return None
    return {
        **p.write_sizes(config),
        "rms_norm_eps": config.norm.eps,
        "attention_bias": "out" in config.multi_head.biases,
        "final_logit_softcapping": config.head.softcap,
        **write_rope(p.first_rope(config)),
    }


FAMILIES = (Family("nanochat", "NanoChatForCausalLM", read, write, TABLE),)
