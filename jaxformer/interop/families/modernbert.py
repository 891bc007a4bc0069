"""ModernBERT's layers as a decoder: a first layer without a norm before attention, a deep head."""

from jaxformer import config as c
from jaxformer.interop.config_fields import Derived, Field, HeadsField, Options, Written, fixed
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.ropes import RopeByLayerType
from jaxformer.interop.families.windows import Windows, all_but_first_of
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import (
    attention_rules,
    decoder_mapping,
    fused_rules,
    layer_norm_rules,
    linear_rules,
    norm_rules,
    top_level_rules,
)
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import like

NORM = c.LayerNorm(parameters="scale")
NORMS = "norm", "embedding.norm", "head.transform.norm"


class WindowsOfBothSides(Windows):
    """``local_attention``, keys on both sides of a token in an encoder: twice the window here."""

    def read_size(self, reader: ConfigReader) -> int | None:
        """The window of the layers that have one."""
        both = reader.optional_integer("local_attention", 128)
        return reader.optional_integer("sliding_window", both and both // 2)

    def write(self, model: c.TransformerConfig) -> Options:
        """The window, its double, and the types."""
        entries = super().write(model)
        size = entries["sliding_window"]
        return {**entries, "local_attention": size and 2 * size}


FAMILIES = (
    # As Llama, except: LayerNorm, also of the embedding and in a hidden layer of the head, but not
    # before the first attention; windows by layer, and a RoPE for each kind.
    # Weller et al., Seq vs Seq: An Open Suite of Paired Encoders and Decoders, 2025.
    # arXiv:2507.11412, section 3
    Family(
        "modernbert-decoder",
        "ModernBertDecoderForCausalLM",
        like(
            LLAMA,
            norm=NORM,
            embedding=c.Embedding(norm=NORM),
            feed_forward=(c.GLU(hidden_dim=1, activation="gelu"),),
            head=c.LMHead(tied=True, transform=c.HeadTransform(norm=NORM)),
        ),
        (
            Field("vocab_size", "vocab_size"),
            Field("hidden_size", "model_dim"),
            Field("num_hidden_layers", "num_layers"),
            HeadsField("num_attention_heads"),
            *p.glu(None, "gelu", "hidden_activation"),
            *(Field("norm_eps", f"{norm}.eps", 1e-5) for norm in NORMS),
            *(
                Field(
                    *("norm_bias", f"{norm}.parameters", False),
                    choices={False: "scale", True: "scale_bias"},
                )
                for norm in NORMS
            ),
            Derived(
                "norm_placement", lambda x: ("pre_feed_forward", *["pre"] * (x["num_layers"] - 1))
            ),
            *(p.ATTENTION_BIAS, p.MLP_BIAS),
            Field("classifier_activation", "head.transform.activation", "gelu"),
            Field("classifier_bias", "head.transform.bias", False),
            Field("decoder_bias", "head.bias", True),
            Field("tie_word_embeddings", "head.tied", True),
            WindowsOfBothSides(
                64, rule=all_but_first_of(3, "global_attn_every_n_layers"), needs_size=True
            ),
            RopeByLayerType(
                base=160_000.0,
                base_name="global_rope_theta",
                local_base=10_000.0,
                local_base_name="local_rope_theta",
                max_length=8192,
                writes_scaling=False,
            ),
            *fixed(rope_scaling=None),
            Written(pad_token_id=0, bos_token_id=1),  # which may not be null
        ),
        decoder_mapping(
            *top_level_rules("model.embeddings.tok_embeddings", "model.final_norm", "decoder"),
            *norm_rules("model.embeddings.norm", "embedding/norm"),
            *linear_rules("lm_head.dense", "head/projection"),
            *norm_rules("lm_head.norm", "head/norm"),
            *layer_norm_rules(
                p.LAYER_PREFIX, pre_attention_norm="attn_norm", pre_feed_forward_norm="mlp_norm"
            ),
            *attention_rules(f"{p.LAYER_PREFIX}.attn", out="Wo"),
            *fused_rules(f"{p.LAYER_PREFIX}.mlp.Wi", "feed_forward", ("gate", "up")),
            *linear_rules(f"{p.LAYER_PREFIX}.mlp.Wo", "feed_forward/down"),
        ),
    ),
)
