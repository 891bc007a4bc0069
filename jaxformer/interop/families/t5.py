"""T5 and mT5: encoder-decoders with one relative-position table per stack, no biases."""

import math
from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families.hf_activations import HF_ACTIVATIONS, hf_activation_name
from jaxformer.interop.families.option_fields import Field, FieldTable, template
from jaxformer.interop.family import Family
from jaxformer.interop.transforms import LinearKernel

ENCODER, DECODER = "encoder.block.{layer}.layer", "decoder.block.{layer}.layer"
BIAS_TENSOR = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def attention_rules(theirs: str, ours: str) -> tuple[m.MappingRule, ...]:
    """Mapping rules of an attention branch."""
    return m.branch_rules(theirs, ours, query="q", key="k", value="v", out="o")


def feed_forward_rules(theirs: str) -> tuple[m.MappingRule, ...]:
    """Mapping rules of the feed-forward branch, gated or not."""
    up = m.MappingRule(
        f"{theirs}.DenseReluDense.wi.weight", "feed_forward/up/kernel", LinearKernel()
    )
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


TABLE = FieldTable(
    template=template(
        c.MultiHead(num_heads=1, num_kv_heads=1, head_dim=1, positions=(c.T5Bias(),), scale=1.0),
        c.MLP(hidden_dim=1),
        topology=c.EncoderDecoder(num_encoder_layers=1),
    ),
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("d_model", "model_dim"),
        Field("num_layers", "topology.num_encoder_layers"),
        Field("num_decoder_layers", "num_layers", lambda x: x["topology.num_encoder_layers"]),
        Field("num_heads", "attention.num_heads"),
        Field("d_kv", "attention.head_dim"),
        Field("d_ff", "feed_forward.hidden_dim"),
        Field("relative_attention_num_buckets", "attention.positions.num_buckets", 32),
        Field("relative_attention_max_distance", "attention.positions.max_distance", 128),
        Field("layer_norm_epsilon", "norm.eps", 1e-6),
        Field("tie_word_embeddings", "head.tied", True),
    ),
    constants={"is_encoder_decoder": True},
    unused=("n_positions",),
    written={
        **{"is_encoder_decoder": True, "dropout_rate": 0.0},
        **{"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1},
    },
)
GATED = replace(TABLE, template=replace(TABLE.template, feed_forward=(c.GLU(hidden_dim=1),)))


def read_t5(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a t5 model."""
    scaled = reader.boolean("scale_decoder_outputs", reader.boolean("tie_word_embeddings", True))
    multiplier = reader.positive_integer("d_model") ** -0.5 if scaled else 1.0
    return _read(reader, "relu", multiplier)


def read_mt5(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of an mt5 model."""
    reader.get("scale_decoder_outputs")  # not used by this class
    return _read(reader, "gated-gelu")


def _read(reader: ConfigReader, projection: str, multiplier: float = 1.0) -> c.TransformerConfig:
    """Networks are as in feed_forward_proj, or the newer dense_act_fn and is_gated_act."""
    projection_name = reader.text("feed_forward_proj", projection)
    *gate, activation = projection_name.split("-")
    if gate not in ([], ["gated"]):
        reader.add_problem("feed_forward_proj", "expected an activation, or gated-activation.")
    activation = "gelu_new" if projection_name == "gated-gelu" else activation
    if "dense_act_fn" not in reader and activation not in HF_ACTIVATIONS:
        reader.add_problem("feed_forward_proj", f"expected one of {', '.join(HF_ACTIVATIONS)}.")
        activation = "relu"
    table = GATED if reader.boolean("is_gated_act", bool(gate)) else TABLE
    activation = reader.choice("dense_act_fn", activation, HF_ACTIVATIONS)
    options = {"feed_forward.activation": activation, "head.multiplier": multiplier}
    return table.read(reader, options)


def write_t5(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A t5's configuration from ours."""
    fields, scale = write_mt5(config), config.model_dim**-0.5
    scaled = math.isclose(config.head.multiplier, scale, rel_tol=1e-12)
    return fields and {**fields, "scale_decoder_outputs": scaled}


def write_mt5(config: c.TransformerConfig) -> dict[str, Any] | None:
    """An mt5's configuration from ours."""
    branch = config.feed_forward[0]
    gated = isinstance(branch, c.GLU)
    fields = (GATED if gated else TABLE).write(config)
    if fields is None or not isinstance(branch, c.MLP | c.GLU):
        return None
    name = hf_activation_name(branch.activation)
    if branch.activation == "gelu_tanh":
        name = "gelu" if gated else "gelu_new"
    return {**fields, "feed_forward_proj": f"gated-{name}" if gated else name}


FAMILIES = tuple(
    Family(
        model_type,
        architecture,
        read,
        write,
        MAPPING,
        ignored_tensors=IGNORED_TENSORS,
        lm_head_optional=True,
    )
    for model_type, architecture, read, write in (
        ("t5", "T5ForConditionalGeneration", read_t5, write_t5),
        ("mt5", "MT5ForConditionalGeneration", read_mt5, write_mt5),
    )
)
