"""Tensor names and config.json fields shared by Llama-like families."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_fields import BiasesField, Field, Fields, Options
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.transforms import LINEAR_BY_GROUP

LAYER_PREFIX = "model.layers.{layer}"
SELF_ATTENTION = f"{LAYER_PREFIX}.self_attn"
SINKS = m.MappingRule(f"{SELF_ATTENTION}.sinks", "attention/sinks")
ATTENTION = (
    *m.attention_rules(SELF_ATTENTION),
    SINKS,
    *m.linear_rules(f"{SELF_ATTENTION}.gate_proj", "attention/output_gate"),
)
# For each head the rows of the query, then the rows of its output's gate (Qwen 3 Next).
QUERY_AND_GATE = m.MappingRule(
    f"{SELF_ATTENTION}.q_proj.weight",
    ("attention/query/kernel", "attention/output_gate/kernel"),
    LINEAR_BY_GROUP,
)
GATED_ATTENTION = (
    QUERY_AND_GATE,
    *m.branch_rules(SELF_ATTENTION, "attention", key="k_proj", value="v_proj", out="o_proj"),
)
QKV: tuple[Any, ...] = ("query", "key", "value")
QK_NORMS = m.qk_norm_rules(SELF_ATTENTION)
FEED_FORWARD = m.glu_rules(f"{LAYER_PREFIX}.mlp")
PRE_NORMS = m.layer_norm_rules(
    LAYER_PREFIX,
    pre_attention_norm="input_layernorm",
    pre_feed_forward_norm="post_attention_layernorm",
)
TOP_LEVEL = m.top_level_rules("model.embed_tokens", "model.norm")
ALL_BIASES: tuple[Any, ...] = (*QKV, "out")
POST_NORMS = m.layer_norm_rules(
    LAYER_PREFIX,
    post_attention_norm="post_attention_layernorm",
    post_feed_forward_norm="post_feedforward_layernorm",
)
FUSED_GLU = (
    *m.fused_rules(f"{LAYER_PREFIX}.mlp.gate_up_proj", "feed_forward", ("gate", "up")),
    *m.linear_rules(f"{LAYER_PREFIX}.mlp.down_proj", "feed_forward/down"),
)
# Norms are before the branches or after them; the name of one norm depends on that.
LLAMA = (*TOP_LEVEL, *PRE_NORMS, *POST_NORMS, *ATTENTION, *QK_NORMS, *FEED_FORWARD)


def sizes(
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    vocab_size: int | None = None,
    model_dim: int | None = None,
    num_layers: int | None = None,
) -> Fields:
    """Fields of sizes and heads, with these defaults; None must be in the file.

    Args:
        heads: Default of the number of heads.
        kv_heads: Default of the number of KV heads; None, and null in the file, mean all heads.
        head_dim: Default of the width of a head; None is model_dim / num_heads.
        vocab_size: Default of the vocabulary.
        model_dim: Default of the width.
        num_layers: Default of the depth.
    """

    def read_kv_heads(reader: ConfigReader, name: str, default: Any) -> int:
        is_null = name in reader.values or kv_heads is None
        return reader.integer(
            name, reader.integer("num_attention_heads", heads) if is_null else kv_heads
        )

    return (
        Field("vocab_size", "vocab_size", vocab_size),
        Field("hidden_size", "model_dim", model_dim),
        Field("num_hidden_layers", "num_layers", num_layers),
        Field("num_attention_heads", "attention.num_heads", heads),
        Field("num_key_value_heads", "attention.num_kv_heads", parse=read_kv_heads),
        Field("head_dim", "attention.head_dim", head_dim or head_width),
    )


def head_width(options: Options) -> int:
    """The width of a head where heads together are as wide as the model."""
    return int(max(1, options["model_dim"] // max(1, options["attention.num_heads"])))


def decoder(
    *,
    eps: float | None = 1e-6,
    eps_name: str = "rms_norm_eps",
    tied: bool = False,
    **size_defaults: Any,
) -> Fields:
    """Fields of sizes, norms and the head, with these defaults.

    Args:
        eps: Default of the eps of all norms; None has no such field.
        eps_name: The field of the eps.
        tied: Whether the head is tied.
        **size_defaults: As in `sizes`.
    """
    norms = () if eps is None else norm_eps(eps, eps_name)
    return (*sizes(**size_defaults), *norms, Field("tie_word_embeddings", "head.tied", tied))


def norm_eps(default: float = 1e-6, name: str = "rms_norm_eps") -> Fields:
    """The field of the eps of all norms."""
    paths = ("norm.eps", "attention.qk_norm.norm.eps", "embedding.norm.eps")
    return tuple(Field(name, path, default) for path in paths)


def glu(width: int | None = None, activation: str = "silu", name: str = "hidden_act") -> Fields:
    """Fields of the feed-forward network, with these defaults; `name` names the activation."""
    return (
        Field("intermediate_size", "feed_forward.hidden_dim", width),
        Field(name, "feed_forward.activation", activation),
    )


GLU = glu()
UNTIED = Field("tie_word_embeddings", "head.tied", False)
ATTENTION_BIAS = BiasesField("attention_bias", layers=ALL_BIASES)
MLP_BIAS = Field("mlp_bias", "feed_forward.bias", False)


class DivisorField(Field):
    """A field whose inverse is the option."""

    def read_value(self, reader: ConfigReader, options: Options) -> float:
        divisor = super().read_value(reader, options)
        if divisor == 0:
            reader.add_problem(self.name, "the logits are divided by it.")
        return 1 / (divisor or 1.0)

    def write_value(self, value: float) -> float:
        return 1 / value if value else 0.0


GRANITE_MULTIPLIERS: Fields = (
    Field("embedding_multiplier", "embedding.scale", 1.0),
    Field("attention_multiplier", "attention.scale", 1.0),
    Field("residual_multiplier", "residual_multiplier", 1.0),
    DivisorField("logits_scaling", "head.multiplier", 1.0),
)


class HeadsDivideWidth:
    """Transformers requires that the number of heads divides the width of the model."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        return {}

    def write(self, model: c.TransformerConfig) -> Options | None:
        """No entries, or None for a model with another number of heads."""
        return None if model.model_dim % model.layers[0].attention.num_heads else {}


def heads_of(config: c.TransformerConfig) -> c.MultiHead:
    """The attention of the layers, or of the first that has `MultiHead`, alone or beside others.

    Raises:
        ValueError: The layers have other attention.
    """
    if isinstance(config.attention, c.MultiHead):
        return config.attention
    parts = (part for layer in config.layers for part in layer.attention.parts)
    attention = next((part for part in parts if isinstance(part, c.MultiHead)), None)
    if attention is None:
        names = sorted({type(layer.attention).__name__ for layer in config.layers})
        raise ValueError(f"This needs MultiHead; the model has {', '.join(names)}.")
    return attention


HEADS_DIVIDE_WIDTH = HeadsDivideWidth()
