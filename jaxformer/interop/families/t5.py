"""T5 and mT5: encoder-decoders with one relative-position table per stack, no biases."""

import math
from typing import Any

from jaxformer import config as c
from jaxformer.interop.families.activations import ACTIVATIONS, name_of
from jaxformer.interop.family import Family
from jaxformer.interop.settings import Settings
from jaxformer.interop.tables import Row, Table, linear, norm
from jaxformer.interop.transforms import Kernel

ENCODER, DECODER = "encoder.block.{layer}.layer", "decoder.block.{layer}.layer"
BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def attention(theirs: str, ours: str) -> tuple[Row, ...]:
    """Mapping rules of an attention branch."""
    return (
        *linear(f"{theirs}.q", f"{ours}/query", bias=False),
        *linear(f"{theirs}.k", f"{ours}/key", bias=False),
        *linear(f"{theirs}.v", f"{ours}/value", bias=False),
        *linear(f"{theirs}.o", f"{ours}/out", bias=False, input_axes=2),
    )


def feed_forward(theirs: str) -> tuple[Row, ...]:
    """Mapping rules of the feed-forward branch, gated or not."""
    return (
        *norm(f"{theirs}.layer_norm", "pre_feed_forward_norm"),
        Row(f"{theirs}.DenseReluDense.wi_0.weight", "feed_forward/gate/kernel", Kernel()),
        Row(
            f"{theirs}.DenseReluDense.wi_1.weight",
            "feed_forward/up/kernel",
            Kernel(),
            only=lambda config: isinstance(config.feed_forward[0], c.GLU),
        ),
        Row(
            f"{theirs}.DenseReluDense.wi.weight",
            "feed_forward/up/kernel",
            Kernel(),
            only=lambda config: isinstance(config.feed_forward[0], c.MLP),
        ),
        Row(f"{theirs}.DenseReluDense.wo.weight", "feed_forward/down/kernel", Kernel()),
    )


TABLE = Table(
    whole=(
        Row("shared.weight", "embedding/tokens/embedding"),
        Row(f"encoder.{BIAS}", "encoder/relative_bias/embedding"),
        Row(f"decoder.{BIAS}", "decoder/relative_bias/embedding"),
        *norm("encoder.final_layer_norm", "encoder/final_norm"),
        *norm("decoder.final_layer_norm", "decoder/final_norm"),
        Row("lm_head.weight", "head/kernel", Kernel()),
    ),
    stacks={
        "encoder": (
            *norm(f"{ENCODER}.0.layer_norm", "pre_attention_norm"),
            *attention(f"{ENCODER}.0.SelfAttention", "attention"),
            *feed_forward(f"{ENCODER}.1"),
        ),
        "decoder": (
            *norm(f"{DECODER}.0.layer_norm", "pre_attention_norm"),
            *attention(f"{DECODER}.0.SelfAttention", "attention"),
            *norm(f"{DECODER}.1.layer_norm", "pre_cross_attention_norm"),
            *attention(f"{DECODER}.1.EncDecAttention", "cross_attention"),
            *feed_forward(f"{DECODER}.2"),
        ),
    },
)
IGNORED = (
    r"(encoder|decoder)\.embed_tokens\.weight",  # copies of shared.weight
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",  # not used
)


def read_t5(settings: Settings) -> c.TransformerConfig:
    """Our configuration from a t5's."""
    tied = settings.flag("tie_word_embeddings", True)
    scaled = settings.flag("scale_decoder_outputs", tied)
    multiplier = settings.integer("d_model") ** -0.5 if scaled else 1.0
    return _read(settings, c.Head(tied=tied, multiplier=multiplier), "relu")


def read_mt5(settings: Settings) -> c.TransformerConfig:
    """Our configuration from an mt5's."""
    settings.value("scale_decoder_outputs")  # this class never does
    return _read(settings, c.Head(tied=settings.flag("tie_word_embeddings", True)), "gated-gelu")


def _read(settings: Settings, head: c.Head, projection: str) -> c.TransformerConfig:
    settings.only("is_encoder_decoder", True)
    settings.value("n_positions")
    num_heads, layers = settings.integer("num_heads"), settings.integer("num_layers")
    bias = c.T5Bias(
        num_buckets=settings.integer("relative_attention_num_buckets", 32),
        max_distance=settings.integer("relative_attention_max_distance", 128),
    )
    return c.TransformerConfig(
        vocab_size=settings.integer("vocab_size"),
        model_dim=settings.integer("d_model"),
        num_layers=settings.integer("num_decoder_layers", layers),
        attention=c.MultiHead(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=settings.integer("d_kv"),
            positions=(bias,),
            scale=1.0,
        ),
        feed_forward=(_read_feed_forward(settings, projection),),
        topology=c.EncoderDecoder(num_encoder_layers=layers),
        norm=c.RMSNorm(eps=settings.number("layer_norm_epsilon", 1e-6)),
        head=head,
    )


def _read_feed_forward(settings: Settings, projection: str) -> c.MLP | c.GLU:
    """Feed-forward from feed_forward_proj, or the newer dense_act_fn and is_gated_act."""
    projection_text = settings.value("feed_forward_proj") or projection
    projection_name = projection_text if isinstance(projection_text, str) else ""
    *gate, activation = projection_name.split("-")
    if gate not in ([], ["gated"]):
        settings.refuse("feed_forward_proj", "expected an activation, or gated-activation.")
    activation = "gelu_new" if projection_name == "gated-gelu" else activation
    if "dense_act_fn" not in settings and activation not in ACTIVATIONS:
        settings.refuse("feed_forward_proj", f"expected one of {', '.join(ACTIVATIONS)}.")
        activation = "relu"
    kind = c.GLU if settings.flag("is_gated_act", bool(gate)) else c.MLP
    return kind(
        hidden_dim=settings.integer("d_ff"),
        activation=settings.choice("dense_act_fn", activation, ACTIVATIONS),
    )


def write_t5(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A t5's configuration from ours."""
    fields = _write(config)
    if fields is None:
        return None
    scale = config.model_dim**-0.5
    scaled = math.isclose(config.head.multiplier, scale, rel_tol=1e-12)
    return {**fields, "scale_decoder_outputs": scaled}


def write_mt5(config: c.TransformerConfig) -> dict[str, Any] | None:
    """An mt5's configuration from ours."""
    return _write(config)


def _write(config: c.TransformerConfig) -> dict[str, Any] | None:
    topology, branch = config.topology, config.feed_forward[0]
    bias = config.multi_head.positions[0]
    if not isinstance(topology, c.EncoderDecoder) or not isinstance(bias, c.T5Bias):
        return None
    if not isinstance(branch, c.MLP | c.GLU):
        return None
    gated, name = isinstance(branch, c.GLU), name_of(branch.activation)
    if branch.activation == "gelu_tanh":
        name = "gelu" if gated else "gelu_new"
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
        "feed_forward_proj": f"gated-{name}" if gated else name,
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
        ignored=IGNORED,
        head_may_be_absent=True,
    ),
    Family(
        "mt5",
        "MT5ForConditionalGeneration",
        read_mt5,
        write_mt5,
        TABLE,
        ignored=IGNORED,
        head_may_be_absent=True,
    ),
)
