"""T5 and mT5: encoder-decoders with one relative-position table per stack, no biases."""

import math
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families.hf_activations import HF_ACTIVATIONS, hf_activation_name
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping, linear_rules, norm_rules
from jaxformer.interop.transforms import LinearKernel

ENCODER, DECODER = "encoder.block.{layer}.layer", "decoder.block.{layer}.layer"
BIAS_TENSOR = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def attention_rules(theirs: str, ours: str) -> tuple[MappingRule, ...]:
    """Mapping rules of an attention branch."""
    return (
        *linear_rules(f"{theirs}.q", f"{ours}/query", bias=False),
        *linear_rules(f"{theirs}.k", f"{ours}/key", bias=False),
        *linear_rules(f"{theirs}.v", f"{ours}/value", bias=False),
        *linear_rules(f"{theirs}.o", f"{ours}/out", bias=False, input_axes=2),
    )


def feed_forward_rules(theirs: str) -> tuple[MappingRule, ...]:
    """Mapping rules of the feed-forward branch, gated or not."""
    return (
        *norm_rules(f"{theirs}.layer_norm", "pre_feed_forward_norm"),
        MappingRule(
            f"{theirs}.DenseReluDense.wi_0.weight", "feed_forward/gate/kernel", LinearKernel()
        ),
        MappingRule(
            f"{theirs}.DenseReluDense.wi_1.weight",
            "feed_forward/up/kernel",
            LinearKernel(),
            condition=lambda config: isinstance(config.feed_forward[0], c.GLU),
        ),
        MappingRule(
            f"{theirs}.DenseReluDense.wi.weight",
            "feed_forward/up/kernel",
            LinearKernel(),
            condition=lambda config: isinstance(config.feed_forward[0], c.MLP),
        ),
        MappingRule(
            f"{theirs}.DenseReluDense.wo.weight", "feed_forward/down/kernel", LinearKernel()
        ),
    )


ENCODER_ATTENTION = (
    *norm_rules(f"{ENCODER}.0.layer_norm", "pre_attention_norm"),
    *attention_rules(f"{ENCODER}.0.SelfAttention", "attention"),
)
DECODER_ATTENTION = (
    *norm_rules(f"{DECODER}.0.layer_norm", "pre_attention_norm"),
    *attention_rules(f"{DECODER}.0.SelfAttention", "attention"),
    *norm_rules(f"{DECODER}.1.layer_norm", "pre_cross_attention_norm"),
    *attention_rules(f"{DECODER}.1.EncDecAttention", "cross_attention"),
)
TABLE = ParamMapping(
    top_level=(
        MappingRule("shared.weight", "embedding/tokens/embedding"),
        MappingRule(f"encoder.{BIAS_TENSOR}", "encoder/relative_bias/embedding"),
        MappingRule(f"decoder.{BIAS_TENSOR}", "decoder/relative_bias/embedding"),
        *norm_rules("encoder.final_layer_norm", "encoder/final_norm"),
        *norm_rules("decoder.final_layer_norm", "decoder/final_norm"),
        MappingRule("lm_head.weight", "head/kernel", LinearKernel()),
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


def read_t5(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a t5 model."""
    tied = reader.boolean("tie_word_embeddings", True)
    scaled = reader.boolean("scale_decoder_outputs", tied)
    multiplier = reader.positive_integer("d_model") ** -0.5 if scaled else 1.0
    head = c.LMHead(tied=tied, multiplier=multiplier)
    return read_model(reader, head, _read_feed_forward(reader, "relu"))


def read_mt5(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of an mt5 model."""
    reader.get("scale_decoder_outputs")  # not used by this class
    head = c.LMHead(tied=reader.boolean("tie_word_embeddings", True))
    return read_model(reader, head, _read_feed_forward(reader, "gated-gelu"))


def read_model(
    reader: ConfigReader, head: c.LMHead, feed_forward: c.FeedForward
) -> c.TransformerConfig:
    """Read what these families share; every layer has `feed_forward`."""
    reader.require_value("is_encoder_decoder", True)
    reader.get("n_positions")
    num_heads, layers = reader.integer("num_heads"), reader.integer("num_layers")
    bias = c.T5Bias(
        num_buckets=reader.integer("relative_attention_num_buckets", 32),
        max_distance=reader.integer("relative_attention_max_distance", 128),
    )
    return c.TransformerConfig(
        vocab_size=reader.integer("vocab_size"),
        model_dim=reader.integer("d_model"),
        num_layers=reader.integer("num_decoder_layers", layers),
        attention=c.MultiHead(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=reader.integer("d_kv"),
            positions=(bias,),
            scale=1.0,
        ),
        feed_forward=(feed_forward,),
        topology=c.EncoderDecoder(num_encoder_layers=layers),
        norm=c.RMSNorm(eps=reader.number("layer_norm_epsilon", 1e-6)),
        head=head,
    )


def _read_feed_forward(reader: ConfigReader, projection: str) -> c.MLP | c.GLU:
    """Feed-forward from feed_forward_proj, or the newer dense_act_fn and is_gated_act."""
    projection_text = reader.get("feed_forward_proj") or projection
    projection_name = projection_text if isinstance(projection_text, str) else ""
    *gate, activation = projection_name.split("-")
    if gate not in ([], ["gated"]):
        reader.add_problem("feed_forward_proj", "expected an activation, or gated-activation.")
    activation = "gelu_new" if projection_name == "gated-gelu" else activation
    if "dense_act_fn" not in reader and activation not in HF_ACTIVATIONS:
        reader.add_problem("feed_forward_proj", f"expected one of {', '.join(HF_ACTIVATIONS)}.")
        activation = "relu"
    kind = c.GLU if reader.boolean("is_gated_act", bool(gate)) else c.MLP
    return kind(
        hidden_dim=reader.integer("d_ff"),
        activation=reader.choice("dense_act_fn", activation, HF_ACTIVATIONS),
    )


def write_t5(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A t5's configuration from ours."""
    fields = write_mt5(config)
    if fields is None:
        return None
    scale = config.model_dim**-0.5
    scaled = math.isclose(config.head.multiplier, scale, rel_tol=1e-12)
    return {**fields, "scale_decoder_outputs": scaled}


def write_mt5(config: c.TransformerConfig) -> dict[str, Any] | None:
    """An mt5's configuration from ours."""
    branch = config.feed_forward[0]
    if not isinstance(branch, c.MLP | c.GLU):
        return None
    gated, name = isinstance(branch, c.GLU), hf_activation_name(branch.activation)
    if branch.activation == "gelu_tanh":
        name = "gelu" if gated else "gelu_new"
    fields = write_model(config, branch)
    return fields and {**fields, "feed_forward_proj": f"gated-{name}" if gated else name}


def write_model(config: c.TransformerConfig, branch: c.MLP | c.GLU) -> dict[str, Any] | None:
    """The fields that these families share; `branch` is the network of all layers."""
    topology, bias = config.topology, config.multi_head.positions[0]
    if not isinstance(topology, c.EncoderDecoder) or not isinstance(bias, c.T5Bias):
        return None
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.model_dim,
        "d_kv": config.multi_head.head_dim,
        "d_ff": branch.hidden_dim,
        "num_layers": topology.num_encoder_layers,
        "num_decoder_layers": config.num_layers,
        "num_heads": config.multi_head.num_heads,
        "relative_attention_num_buckets": bias.num_buckets,
        "relative_attention_max_distance": bias.max_distance,
        "layer_norm_epsilon": config.norm.eps,
        "is_encoder_decoder": True,
        "tie_word_embeddings": config.head.tied,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        "eos_token_id": 1,
        "dropout_rate": 0.0,
    }


FAMILIES = (
    Family(
        "t5",
        "T5ForConditionalGeneration",
        read_t5,
        write_t5,
        TABLE,
        ignored_tensors=IGNORED_TENSORS,
        lm_head_optional=True,
    ),
    Family(
        "mt5",
        "MT5ForConditionalGeneration",
        read_mt5,
        write_mt5,
        TABLE,
        ignored_tensors=IGNORED_TENSORS,
        lm_head_optional=True,
    ),
)
