"""GPT-NeoX and Pythia: parallel or serial blocks with two norms, fused QKV by head."""

from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_fields import BiasesField, Field, HeadsField
from jaxformer.interop.families.llama_like import ALL_BIASES, QKV
from jaxformer.interop.family import Family
from jaxformer.interop.rope_config import RopeField
from jaxformer.interop.transforms import BY_GROUP
from jaxformer.zoo.eleuther import GPT_NEOX

LAYER = "gpt_neox.layers.{layer}"
BLOCKS = {True: "parallel", False: "serial"}


def block_rules(prefix: str, attention: str) -> tuple[m.MappingRule, ...]:
    """Mapping rules of the linear layers of a block, with queries, keys and values of each head."""
    return (
        *m.fused_rules(f"{prefix}.{attention}.query_key_value", "attention", QKV, *BY_GROUP),
        *m.branch_rules(f"{prefix}.{attention}", "attention", out="dense"),
        *m.branch_rules(f"{prefix}.mlp", "feed_forward", up="dense_h_to_4h", down="dense_4h_to_h"),
    )


def two_norms(prefix: str) -> tuple[m.MappingRule, ...]:
    """Mapping rules of a norm for each branch."""
    return m.layer_norm_rules(
        prefix,
        pre_attention_norm="input_layernorm",
        pre_feed_forward_norm="post_attention_layernorm",
    )


FAMILIES = (
    Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        GPT_NEOX,
        (
            Field("vocab_size", "vocab_size"),
            Field("hidden_size", "model_dim"),
            Field("num_hidden_layers", "num_layers"),
            HeadsField("num_attention_heads"),
            BiasesField("attention_bias", default=True, layers=ALL_BIASES),
            RopeField(base_name="rotary_emb_base", fraction_name="rotary_pct", fraction=0.25),
            Field("intermediate_size", "feed_forward.hidden_dim"),
            Field("hidden_act", "feed_forward.activation", "gelu"),
            Field("layer_norm_eps", "norm.eps", 1e-5),
            Field("use_parallel_residual", "block", True, choices=BLOCKS),
            Field("tie_word_embeddings", "head.tied", False),
        ),
        m.decoder_mapping(
            *m.top_level_rules("gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"),
            *two_norms(LAYER),
            *block_rules(LAYER, "attention"),
        ),
        ignored_tensors=(
            r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
        ),
    ),
)
