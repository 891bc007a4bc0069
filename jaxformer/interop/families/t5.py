"""T5 and mT5: encoder-decoders with one relative-position table per stack, no biases."""

from dataclasses import dataclass, replace

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_fields import (
    POSITIVE_INTEGER,
    FactorField,
    Field,
    Fields,
    Options,
    Unused,
    Written,
    fixed,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.family import Family
from jaxformer.interop.hf_activations import HF_ACTIVATIONS, hf_activation_name
from jaxformer.interop.transforms import LINEAR
from jaxformer.zoo.t5 import MT5, T5

ENCODER, DECODER = "encoder.block.{layer}.layer", "decoder.block.{layer}.layer"
BIAS_TENSOR = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def attention_rules(theirs: str, ours: str) -> tuple[m.MappingRule, ...]:
    """Mapping rules of an attention branch."""
    return m.branch_rules(theirs, ours, query="q", key="k", value="v", out="o")


def feed_forward_rules(theirs: str) -> tuple[m.MappingRule, ...]:
    """Mapping rules of the feed-forward branch, gated or not."""
    up = m.MappingRule(f"{theirs}.DenseReluDense.wi.weight", "feed_forward/up/kernel", LINEAR)
    return (
        *m.norm_rules(f"{theirs}.layer_norm", "pre_feed_forward_norm"),
        *m.branch_rules(f"{theirs}.DenseReluDense", "feed_forward", gate="wi_0", down="wo"),
        replace(up, condition=lambda config: isinstance(config.feed_forward[0], c.MLP)),
        replace(
            up,
            hf_name=f"{theirs}.DenseReluDense.wi_1.weight",
            condition=lambda config: isinstance(config.feed_forward[0], c.GLU),
        ),
    )


ENCODER_ATTENTION = (
    *m.norm_rules(f"{ENCODER}.0.layer_norm", "pre_attention_norm"),
    *attention_rules(f"{ENCODER}.0.SelfAttention", "attention"),
)
DECODER_ATTENTION = (
    *m.norm_rules(f"{DECODER}.0.layer_norm", "pre_attention_norm"),
    *attention_rules(f"{DECODER}.0.SelfAttention", "attention"),
    *m.norm_rules(f"{DECODER}.1.layer_norm", "pre_cross_attention_norm"),
    *attention_rules(f"{DECODER}.1.EncDecAttention", "cross_attention"),
)
MAPPING = m.ParamMapping(
    top_level=(
        *m.top_level_rules("shared", "decoder.final_layer_norm"),
        *m.norm_rules("encoder.final_layer_norm", "encoder/final_norm"),
        m.MappingRule(f"encoder.{BIAS_TENSOR}", "encoder/relative_bias/embedding"),
        m.MappingRule(f"decoder.{BIAS_TENSOR}", "decoder/relative_bias/embedding"),
    ),
    stacks={
        "encoder": (*ENCODER_ATTENTION, *feed_forward_rules(f"{ENCODER}.1")),
        "decoder": (*DECODER_ATTENTION, *feed_forward_rules(f"{DECODER}.2")),
    },
)
IGNORED_TENSORS = (
    r"(encoder|decoder)\.embed_tokens\.weight",  # copies of shared.weight
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",  # not used
)


@dataclass(frozen=True)
class Network:
    """The network, by ``feed_forward_proj`` or by the newer ``dense_act_fn`` and ``is_gated_act``.

    Attributes:
        default: Default of ``feed_forward_proj``.
    """

    default: str

    def read(self, reader: ConfigReader, options: Options) -> Options:
        projection = reader.text("feed_forward_proj", self.default)
        *gate, activation = projection.split("-")
        if gate not in ([], ["gated"]):
            reader.add_problem("feed_forward_proj", "expected an activation, or gated-activation.")
        activation = "gelu_new" if projection == "gated-gelu" else activation
        if "dense_act_fn" not in reader and activation not in HF_ACTIVATIONS:
            reader.add_problem("feed_forward_proj", f"expected one of {', '.join(HF_ACTIVATIONS)}.")
            activation = "relu"
        kind = c.GLU if reader.boolean("is_gated_act", bool(gate)) else c.MLP
        activation = reader.choice("dense_act_fn", activation, HF_ACTIVATIONS)
        return {"feed_forward": (kind(hidden_dim=reader.integer("d_ff"), activation=activation),)}

    def write(self, model: c.TransformerConfig) -> Options | None:
        """The width and the projection; None for other networks."""
        network = model.feed_forward[0]
        if not isinstance(network, c.MLP | c.GLU):
            return None
        gated, name = isinstance(network, c.GLU), hf_activation_name(network.activation)
        if network.activation == "gelu_tanh":
            name = "gelu" if gated else "gelu_new"
        return {"d_ff": network.hidden_dim, "feed_forward_proj": f"gated-{name}" if gated else name}


def head_scale(options: Options) -> float:
    """The multiplier of the logits of a tied head."""
    return float(options["model_dim"] ** -0.5)


FIELDS: Fields = (
    Field("vocab_size", "vocab_size"),
    Field("d_model", "model_dim", None, POSITIVE_INTEGER),
    Field("num_layers", "topology.num_encoder_layers"),
    Field("num_decoder_layers", "num_layers", lambda x: x["topology.num_encoder_layers"]),
    Field("num_heads", "attention.num_heads"),
    Field("num_heads", "attention.num_kv_heads"),
    Field("d_kv", "attention.head_dim"),
    Field("relative_attention_num_buckets", "attention.positions.num_buckets", 32),
    Field("relative_attention_max_distance", "attention.positions.max_distance", 128),
    Field("layer_norm_epsilon", "norm.eps", 1e-6),
    Field("tie_word_embeddings", "head.tied", True),
    *fixed(is_encoder_decoder=True),
    Unused("n_positions"),
    Written(is_encoder_decoder=True, dropout_rate=0.0),
    Written(pad_token_id=0, decoder_start_token_id=0, eos_token_id=1),
)
SCALED_OUTPUTS = FactorField(
    "scale_decoder_outputs", "head.multiplier", lambda x: x["head.tied"], factor=head_scale
)
FAMILIES = (
    Family(
        "t5",
        "T5ForConditionalGeneration",
        T5,
        (*FIELDS, Network("relu"), SCALED_OUTPUTS),
        MAPPING,
        ignored_tensors=IGNORED_TENSORS,
        lm_head_optional=True,
    ),
    # As T5, except: gated networks by default, outputs never scaled.
    Family(
        "mt5",
        "MT5ForConditionalGeneration",
        MT5,
        (*FIELDS, Network("gated-gelu"), Unused("scale_decoder_outputs")),
        MAPPING,
        ignored_tensors=IGNORED_TENSORS,
        lm_head_optional=True,
    ),
)
