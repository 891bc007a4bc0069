"""OPT: learned positions with offset 2; the 350M model is post-norm with a factorized embedding."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families.hf_activations import HF_ACTIVATIONS, hf_activation_name
from jaxformer.interop.families.llama_like import ALL_BIASES, read_sizes
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping, linear_rules, norm_rules
from jaxformer.interop.transforms import LinearKernel

LAYER = "model.decoder.layers.{layer}"
TABLE = ParamMapping(
    top_level=(
        MappingRule("model.decoder.embed_tokens.weight", "embedding/tokens/embedding"),
        MappingRule("model.decoder.embed_positions.weight", "embedding/positions/embedding"),
        MappingRule(
            "model.decoder.project_in.weight", "embedding/projection/kernel", LinearKernel()
        ),
        MappingRule("model.decoder.project_out.weight", "head/projection/kernel", LinearKernel()),
        *norm_rules("model.decoder.final_layer_norm", "decoder/final_norm"),
        MappingRule("lm_head.weight", "head/kernel", LinearKernel()),
    ),
    stacks={
        "decoder": (
            # The norm is before its branch or after the residual sum.
            *norm_rules(f"{LAYER}.self_attn_layer_norm", "pre_attention_norm"),
            *norm_rules(f"{LAYER}.self_attn_layer_norm", "post_attention_norm"),
            *norm_rules(f"{LAYER}.final_layer_norm", "pre_feed_forward_norm"),
            *norm_rules(f"{LAYER}.final_layer_norm", "post_feed_forward_norm"),
            *linear_rules(f"{LAYER}.self_attn.q_proj", "attention/query"),
            *linear_rules(f"{LAYER}.self_attn.k_proj", "attention/key"),
            *linear_rules(f"{LAYER}.self_attn.v_proj", "attention/value"),
            *linear_rules(f"{LAYER}.self_attn.out_proj", "attention/out", input_axes=2),
            *linear_rules(f"{LAYER}.fc1", "feed_forward/up"),
            *linear_rules(f"{LAYER}.fc2", "feed_forward/down"),
        )
    },
)
POSITION_OFFSET = 2


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of an opt model."""
    sizes = read_sizes(reader)
    model_dim, heads = sizes["model_dim"], reader.positive_integer("num_attention_heads")
    reader.require_value("output_projection", True)
    bias = reader.boolean("enable_bias", True)
    before = reader.boolean("do_layer_norm_before", True)
    learned = reader.boolean("layer_norm_elementwise_affine", True)
    dropped = reader.boolean("_remove_final_layer_norm", False)
    width = reader.integer("word_embed_proj_dim", model_dim)
    return c.TransformerConfig(
        **sizes,
        attention=c.MultiHead(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=max(1, model_dim // heads),
            positions=(None,),
            biases=ALL_BIASES if bias else (),
        ),
        feed_forward=(
            c.MLP(
                hidden_dim=reader.integer("ffn_dim"),
                activation=reader.choice("activation_function", "relu", HF_ACTIVATIONS),
                bias=bias,
            ),
        ),
        norm=c.LayerNorm(eps=1e-5, parameters="scale_bias" if learned else "none"),
        norm_placement="pre" if before else "post",
        final_norm=before and not dropped,
        embedding=c.Embedding(
            positions=c.Learned(
                max_length=reader.integer("max_position_embeddings", 2048), offset=POSITION_OFFSET
            ),
            dim=None if width == model_dim else width,
        ),
        head=c.LMHead(tied=reader.boolean("tie_word_embeddings", True)),
    )


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """An opt's configuration from ours."""
    positions, branch = config.embedding.positions, config.feed_forward[0]
    if not isinstance(config.topology, c.Decoder) or not isinstance(positions, c.Learned):
        return None
    if not isinstance(branch, c.MLP):
        return None
    before = config.norm_placement == "pre"
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "word_embed_proj_dim": config.embedding.dim or config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.multi_head.num_heads,
        "enable_bias": branch.bias,
        "ffn_dim": branch.hidden_dim,
        "activation_function": hf_activation_name(branch.activation),
        "layer_norm_elementwise_affine": config.norm.parameters != "none",
        "do_layer_norm_before": before,
        "_remove_final_layer_norm": before and not config.final_norm,
        "max_position_embeddings": positions.max_length,
        "tie_word_embeddings": config.head.tied,
        "dropout": 0.0,
    }


FAMILIES = (
    Family(
        "opt",
        "OPTForCausalLM",
        read,
        write,
        TABLE,
        key_renames=((r"^decoder\.", "model.decoder."),),
    ),
)
