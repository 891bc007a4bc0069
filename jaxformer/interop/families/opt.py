"""OPT and BioGPT: learned positions with offset 2.

The OPT of 350M is post-norm with a factorized embedding.
"""

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_fields import (
    BiasesField,
    FactorField,
    Field,
    HeadsField,
    Options,
    Unused,
    Written,
    fixed,
    root_of_width,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families.llama_like import ALL_BIASES
from jaxformer.interop.family import Family
from jaxformer.zoo.opt import OPT

STACK = "model.decoder"
LAYER = f"{STACK}.layers.{{layer}}"
BIOGPT_LAYER = "biogpt.layers.{layer}"
AFFINE = {True: "scale_bias", False: "none"}
PLACEMENTS = {True: "pre", False: "post"}


class FinalNorm:
    """The field that removes the final norm of models with a norm before each branch."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        removed = reader.boolean("_remove_final_layer_norm", False)
        return {"final_norm": options["norm_placement"] == "pre" and not removed}

    def write(self, model: c.TransformerConfig) -> Options:
        removed = model.norm_placement == "pre" and not model.final_norm
        return {"_remove_final_layer_norm": removed}


class EmbeddingDim:
    """The width of the embedding, which has a projection if the model has another."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The width if there is a projection."""
        width = reader.integer("word_embed_proj_dim", options["model_dim"])
        return {"embedding.dim": None if width == options["model_dim"] else width}

    def write(self, model: c.TransformerConfig) -> Options:
        return {"word_embed_proj_dim": model.embedding.dim or model.model_dim}


FAMILIES = (
    Family(
        "opt",
        "OPTForCausalLM",
        OPT,
        (
            Field("vocab_size", "vocab_size"),
            Field("hidden_size", "model_dim"),
            Field("num_hidden_layers", "num_layers"),
            HeadsField("num_attention_heads"),
            Field("ffn_dim", "feed_forward.hidden_dim"),
            Field("activation_function", "feed_forward.activation", "relu"),
            Field("enable_bias", "feed_forward.bias", True),
            BiasesField("enable_bias", default=True, layers=ALL_BIASES),
            Field("layer_norm_elementwise_affine", "norm.parameters", True, choices=AFFINE),
            Field("do_layer_norm_before", "norm_placement", True, choices=PLACEMENTS),
            *(FinalNorm(), EmbeddingDim()),
            Field("max_position_embeddings", "embedding.positions.max_length", 2048),
            Field("tie_word_embeddings", "head.tied", True),
            *fixed(output_projection=True),
            Written(dropout=0.0),
        ),
        m.decoder_mapping(
            *m.top_level_rules(f"{STACK}.embed_tokens", f"{STACK}.final_layer_norm"),
            m.MappingRule(f"{STACK}.embed_positions.weight", "embedding/positions/embedding"),
            *m.linear_rules(f"{STACK}.project_in", "embedding/projection"),
            *m.linear_rules(f"{STACK}.project_out", "head/projection"),
            # The norm is before its branch or after the residual sum.
            *(
                rule
                for at in ("pre", "post")
                for name, branch in (("self_attn", "attention"), ("final", "feed_forward"))
                for rule in m.norm_rules(f"{LAYER}.{name}_layer_norm", f"{at}_{branch}_norm")
            ),
            *m.attention_rules(f"{LAYER}.self_attn", out="out_proj"),
            *m.branch_rules(LAYER, "feed_forward", up="fc1", down="fc2"),
        ),
        key_renames=((r"^decoder\.", "model.decoder."),),
    ),
    # As OPT, except: GELU, a scaled embedding, always biases and pre-norm.
    Family(
        "biogpt",
        "BioGptForCausalLM",
        OPT,
        (
            Field("vocab_size", "vocab_size"),
            Field("hidden_size", "model_dim", 1024),
            Field("num_hidden_layers", "num_layers", 24),
            HeadsField("num_attention_heads", default=16),
            Field("intermediate_size", "feed_forward.hidden_dim", 4096),
            Field("hidden_act", "feed_forward.activation", "gelu"),
            Field("max_position_embeddings", "embedding.positions.max_length", 1024),
            FactorField("scale_embedding", "embedding.scale", True, factor=root_of_width),
            Field("tie_word_embeddings", "head.tied", True),
            Unused("layer_norm_eps"),  # its norms have 1e-5, whatever files say
            Written(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        ),
        m.decoder_mapping(
            *m.top_level_rules("biogpt.embed_tokens", "biogpt.layer_norm", "output_projection"),
            m.MappingRule("biogpt.embed_positions.weight", "embedding/positions/embedding"),
            *m.layer_norm_rules(
                BIOGPT_LAYER,
                pre_attention_norm="self_attn_layer_norm",
                pre_feed_forward_norm="final_layer_norm",
            ),
            *m.attention_rules(f"{BIOGPT_LAYER}.self_attn", out="out_proj"),
            *m.branch_rules(BIOGPT_LAYER, "feed_forward", up="fc1", down="fc2"),
        ),
    ),
)
