"""GPT-NeoX and Pythia: parallel or serial blocks with two norms, fused QKV by head."""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_fields import BiasesField, Change, Field, HeadsField, Options
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families.llama_like import ALL_BIASES, QKV
from jaxformer.interop.family import Family
from jaxformer.interop.rope_config import RopeField
from jaxformer.interop.transforms import BY_GROUP
from jaxformer.zoo.eleuther import GPT_NEOX
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import like

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


class LastLayerBias:
    """The output of attention has a bias in the last layer."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The attention of the layers."""
        num_unbiased = options["num_layers"] - 1

        def by_layer(kind: c.MultiHead) -> tuple[c.MultiHead, ...]:
            return (*(kind,) * num_unbiased, replace(kind, biases=("out",)))

        return {"attention": Change(by_layer)}

    def write(self, model: c.TransformerConfig) -> Options:
        """No entries."""
        return {}


class WidthInWidths:
    """The width of the network, in widths of the model."""

    name = "intermediate_multiple_size"

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The width."""
        count = reader.positive_integer(self.name, 4)
        return {"feed_forward.hidden_dim": count * options["model_dim"]}

    def write(self, model: c.TransformerConfig) -> Options | None:
        """How often the model's width is in it."""
        network = model.feed_forward[0]
        if not isinstance(network, c.MLP) or network.hidden_dim % model.model_dim:
            return None
        return {self.name: network.hidden_dim // model.model_dim}


JAPANESE_LAYER = "gpt_neox_japanese.layers.{layer}"
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
    # As it, except: serial, tied, no biases but that of the last layer's attention.
    Family(
        "gpt_neox_japanese",
        "GPTNeoXJapaneseForCausalLM",
        like(LLAMA, norm=c.LayerNorm(), feed_forward=(c.MLP(hidden_dim=1),)),
        (
            Field("vocab_size", "vocab_size"),
            Field("hidden_size", "model_dim"),
            Field("num_hidden_layers", "num_layers"),
            *(HeadsField("num_attention_heads"), WidthInWidths()),
            RopeField(base_name="rotary_emb_base", fraction_name="rotary_pct", fraction=1.0),
            Field("hidden_act", "feed_forward.activation", "gelu"),
            Field("layer_norm_eps", "norm.eps", 1e-5),
            Field("tie_word_embeddings", "head.tied", True),
            LastLayerBias(),
        ),
        m.decoder_mapping(
            *m.top_level_rules(
                "gpt_neox_japanese.embed_in", "gpt_neox_japanese.final_layer_norm", "embed_out"
            ),
            *two_norms(JAPANESE_LAYER),
            *(
                replace(rule, hf_name=rule.hf_name.replace("dense.bias", "dense_bias"))
                for rule in block_rules(JAPANESE_LAYER, "attention")
            ),
        ),
        ignored_tensors=(r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
        attention_types=(c.MultiHead, c.MultiHead),
    ),
)
