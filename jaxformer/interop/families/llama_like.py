"""Tensor names and config.json fields shared by Llama-like families."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families.hf_activations import HF_ACTIVATIONS, hf_activation_name
from jaxformer.interop.transforms import FusedPerGroup

LAYER_PREFIX = "model.layers.{layer}"
SELF_ATTENTION = f"{LAYER_PREFIX}.self_attn"
SINKS = m.MappingRule(f"{SELF_ATTENTION}.sinks", "attention/sinks")
ATTENTION = (
    *m.attention_rules(SELF_ATTENTION),
    SINKS,
    *m.linear_rules(f"{SELF_ATTENTION}.gate_proj", "attention/output_gate"),
)
# Of each head the rows of the query, then those of the gate of its output (Qwen 3 Next).
QUERY_AND_GATE = m.MappingRule(
    f"{SELF_ATTENTION}.q_proj.weight",
    ("attention/query/kernel", "attention/output_gate/kernel"),
    FusedPerGroup(),
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
WINDOW_TYPES = {"sliding_attention": True, "full_attention": False}


def read_sizes(reader: ConfigReader, **defaults: int) -> dict[str, Any]:
    """Vocabulary, width and depth, as arguments of `TransformerConfig`."""
    return {
        "vocab_size": reader.integer("vocab_size", defaults.get("vocab_size")),
        "model_dim": reader.integer("hidden_size", defaults.get("hidden_size")),
        "num_layers": reader.integer("num_hidden_layers", defaults.get("num_hidden_layers")),
    }


def read_heads(
    reader: ConfigReader,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
) -> dict[str, Any]:
    """Numbers of heads and their width, as arguments of `MultiHead`.

    Args:
        reader: The whole config.json.
        heads: Default of the number of heads.
        kv_heads: Default of the number of KV heads; None, and null in the file, mean all heads.
        head_dim: Default of head_dim; None is model_dim / num_heads.
    """
    heads = reader.integer("num_attention_heads", heads)
    if "num_key_value_heads" in reader.values or kv_heads is None:
        kv_heads = heads
    width = reader.integer("hidden_size", 0) or 1
    return {
        "num_heads": heads,
        "num_kv_heads": reader.integer("num_key_value_heads", kv_heads),
        "head_dim": reader.integer("head_dim", head_dim or max(1, width // max(1, heads))),
    }


def read_glu(
    reader: ConfigReader,
    *,
    name: str = "hidden_act",
    activation: str = "silu",
    width_name: str = "intermediate_size",
    hidden_dim: int | None = None,
    bias: bool = False,
) -> c.GLU:
    """A gated feed-forward."""
    return c.GLU(
        hidden_dim=reader.integer(width_name, hidden_dim),
        activation=reader.choice(name, activation, HF_ACTIVATIONS),
        bias=bias,
    )


def read_biases(reader: ConfigReader) -> tuple[Any, ...]:
    """Biases of all four projections or of none."""
    return ALL_BIASES if reader.boolean("attention_bias", False) else ()


def read_layer_types(
    reader: ConfigReader,
    count: int,
    default: Callable[[int], bool],
    known: Mapping[str, bool] = WINDOW_TYPES,
    *,
    name: str = "layer_types",
) -> tuple[bool, ...]:
    """Which layers are of a kind: those with a window, or those of `known`.

    Args:
        reader: The whole config.json.
        count: Number of layers.
        default: Whether a layer is of the kind if the file lacks the field.
        known: What each word means.
        name: The field.

    Returns:
        One entry per layer.
    """
    words = reader.sequence(name, str)
    if words is None:
        return tuple(default(i) for i in range(count))
    if len(words) != count or not set(words) <= set(known):
        reader.add_problem(name, f"expected {' or '.join(known)} for each of {count} layers.")
        return (False,) * count
    return tuple(known[word] for word in words)


def window_cycle(
    reader: ConfigReader, sliding: tuple[bool, ...], window: int | None
) -> tuple[Any, ...]:
    """Windows of the layers, as a cycle."""
    if window is None and any(sliding):
        reader.add_problem("sliding_window", "layers with a window need this size.")
    return tuple(window if here else None for here in sliding)


def heads_of(config: c.TransformerConfig) -> c.MultiHead:
    """The attention of the layers, of which all have `MultiHead`, alike but for their cycles.

    Raises:
        ValueError: The layers have other attention.
    """
    if isinstance(config.attention, c.MultiHead):
        return config.attention
    names = sorted({type(layer.attention).__name__ for layer in config.layers})
    raise ValueError(f"This needs one MultiHead for all layers; the model has {', '.join(names)}.")


def write_sizes(config: c.TransformerConfig) -> dict[str, Any]:
    """Sizes, heads and the feed-forward, under the names that most families use."""
    attention = heads_of(config)
    branch: Any = config.feed_forward[0]
    if isinstance(branch, c.MoE):
        branch = branch.expert
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": branch.hidden_dim,
        "tie_word_embeddings": config.head.tied,
    }
    if not isinstance(branch, c.ClampedGEGLU):
        fields["hidden_act"] = hf_activation_name(branch.activation)
    return fields


def write_layer_types(config: c.TransformerConfig) -> dict[str, Any]:
    """The window, and which layers have it."""
    layers = [layer.window for layer in config.layers]
    kinds = ["full_attention" if window is None else "sliding_attention" for window in layers]
    return {"sliding_window": first_window(config), "layer_types": kinds}


def first_window(config: c.TransformerConfig) -> int | None:
    """The first window of any layer."""
    windows = (layer.window for layer in config.layers)
    return next((window for window in windows if isinstance(window, int)), None)


def has_rope(config: c.TransformerConfig) -> bool:
    """Whether any layer has RoPE."""
    return any(isinstance(layer.positions, c.Rope) for layer in config.layers)


def is_rope_decoder(config: c.TransformerConfig) -> bool:
    """Whether the model is a decoder with RoPE in its first layer."""
    return isinstance(config.topology, c.Decoder) and isinstance(config.layers[0].positions, c.Rope)


def first_rope(config: c.TransformerConfig) -> c.Rope:
    """RoPE of the first layer that has it."""
    positions = (layer.positions for layer in config.layers)
    return next(p for p in positions if isinstance(p, c.Rope))
