"""OPT: learned positions with offset 2; the 350M model is post-norm with a factorized embedding."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families.llama_like import ALL_BIASES
from jaxformer.interop.families.option_fields import (
    POSITIVE_INTEGER,
    BiasesField,
    Field,
    FieldTable,
    template,
    with_options,
)
from jaxformer.interop.family import Family

STACK = "model.decoder"
LAYER = f"{STACK}.layers.{{layer}}"
MAPPING = m.decoder_mapping(
    (
        *m.top_level_rules(f"{STACK}.embed_tokens", f"{STACK}.final_layer_norm"),
        m.MappingRule(f"{STACK}.embed_positions.weight", "embedding/positions/embedding"),
        *m.linear_rules(f"{STACK}.project_in", "embedding/projection"),
        *m.linear_rules(f"{STACK}.project_out", "head/projection"),
    ),
    # The norm is before its branch or after the residual sum.
    *(
        rule
        for at in ("pre", "post")
        for name, branch in (("self_attn", "attention"), ("final", "feed_forward"))
        for rule in m.norm_rules(f"{LAYER}.{name}_layer_norm", f"{at}_{branch}_norm")
    ),
    *m.attention_rules(f"{LAYER}.self_attn", out="out_proj"),
    *m.branch_rules(LAYER, "feed_forward", up="fc1", down="fc2"),
)
TABLE = FieldTable(
    template=template(
        c.MultiHead(num_heads=1, num_kv_heads=1, head_dim=1, positions=(None,)),
        c.MLP(hidden_dim=1),
        norm=c.LayerNorm(eps=1e-5),
        embedding=c.Embedding(positions=c.Learned(max_length=1, offset=2)),
    ),
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("hidden_size", "model_dim"),
        Field("num_hidden_layers", "num_layers"),
        Field("num_attention_heads", "attention.num_heads", None, POSITIVE_INTEGER),
        Field("ffn_dim", "feed_forward.hidden_dim"),
        Field("activation_function", "feed_forward.activation", "relu"),
        Field("enable_bias", "feed_forward.bias", True),
        BiasesField("enable_bias", "attention.biases", True, layers=ALL_BIASES),
        Field(
            "layer_norm_elementwise_affine",
            "norm.parameters",
            True,
            choices={True: "scale_bias", False: "none"},
        ),
        Field("do_layer_norm_before", "norm_placement", True, choices={True: "pre", False: "post"}),
        Field("max_position_embeddings", "embedding.positions.max_length", 2048),
        Field("tie_word_embeddings", "head.tied", True),
    ),
    constants={"output_projection": True},
    written={"dropout": 0.0},
)


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of an opt model."""
    config = TABLE.read(reader)
    dropped = reader.boolean("_remove_final_layer_norm", False)
    width = reader.integer("word_embed_proj_dim", config.model_dim)
    options = {
        "final_norm": config.norm_placement == "pre" and not dropped,
        "embedding.dim": None if width == config.model_dim else width,
    }
    return with_options(config, options)


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """An opt's configuration from ours."""
    fields = TABLE.write(config)
    return fields and {
        **fields,
        "word_embed_proj_dim": config.embedding.dim or config.model_dim,
        "_remove_final_layer_norm": config.norm_placement == "pre" and not config.final_norm,
    }


FAMILIES = (
    Family(
        "opt",
        "OPTForCausalLM",
        read,
        write,
        MAPPING,
        key_renames=((r"^decoder\.", "model.decoder."),),
    ),
)
