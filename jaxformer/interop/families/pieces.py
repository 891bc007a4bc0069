"""Tensor names and config.json fields shared by Llama-like families."""

from collections.abc import Callable
from typing import Any

from jaxformer import config as c
from jaxformer.interop.compare import shortest_cycle
from jaxformer.interop.families.activations import ACTIVATIONS, name_of
from jaxformer.interop.rope import write_rope
from jaxformer.interop.settings import Settings
from jaxformer.interop.tables import Row, linear, norm
from jaxformer.interop.transforms import Kernel

LAYER = "model.layers.{layer}"
ATTENTION = (
    *linear(f"{LAYER}.self_attn.q_proj", "attention/query"),
    *linear(f"{LAYER}.self_attn.k_proj", "attention/key"),
    *linear(f"{LAYER}.self_attn.v_proj", "attention/value"),
    *linear(f"{LAYER}.self_attn.o_proj", "attention/out", input_axes=2),
)
QK_NORMS = (
    *norm(f"{LAYER}.self_attn.q_norm", "attention/query_norm"),
    *norm(f"{LAYER}.self_attn.k_norm", "attention/key_norm"),
)
FEED_FORWARD = (
    *linear(f"{LAYER}.mlp.gate_proj", "feed_forward/gate"),
    *linear(f"{LAYER}.mlp.up_proj", "feed_forward/up"),
    *linear(f"{LAYER}.mlp.down_proj", "feed_forward/down"),
)
PRE_NORMS = (
    *norm(f"{LAYER}.input_layernorm", "pre_attention_norm"),
    *norm(f"{LAYER}.post_attention_layernorm", "pre_feed_forward_norm"),
)
WHOLE = (
    Row("model.embed_tokens.weight", "embedding/tokens/embedding"),
    *norm("model.norm", "decoder/final_norm"),
    Row("lm_head.weight", "head/kernel", Kernel()),
)
ALL_BIASES: tuple[Any, ...] = ("query", "key", "value", "out")


def read_sizes(settings: Settings, **defaults: int) -> dict[str, Any]:
    """Vocabulary, width and depth, as arguments of `TransformerConfig`."""
    return {
        "vocab_size": settings.integer("vocab_size", defaults.get("vocab_size")),
        "model_dim": settings.integer("hidden_size", defaults.get("hidden_size")),
        "num_layers": settings.integer("num_hidden_layers", defaults.get("num_hidden_layers")),
    }


def read_heads(
    settings: Settings,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
) -> dict[str, Any]:
    """Numbers of heads and their width, as arguments of `MultiHead`.

    Args:
        settings: The whole config.json.
        heads: Where the file gives none.
        kv_heads: Where the file gives none; null there, or None here, means as many as heads.
        head_dim: Where the file gives none; None shares the width among the heads.
    """
    heads = settings.integer("num_attention_heads", heads)
    if "num_key_value_heads" in settings.values or kv_heads is None:
        kv_heads = heads
    width = settings.integer("hidden_size", 0) or 1
    return {
        "num_heads": heads,
        "num_kv_heads": settings.integer("num_key_value_heads", kv_heads),
        "head_dim": settings.integer("head_dim", head_dim or max(1, width // max(1, heads))),
    }


def read_glu(
    settings: Settings,
    *,
    name: str = "hidden_act",
    activation: str = "silu",
    hidden_dim: int | None = None,
    bias: bool = False,
) -> c.GLU:
    """A gated feed-forward."""
    return c.GLU(
        hidden_dim=settings.integer("intermediate_size", hidden_dim),
        activation=settings.choice(name, activation, ACTIVATIONS),
        bias=bias,
    )


def read_decoder(
    settings: Settings,
    heads: dict[str, Any],
    *,
    feed_forward: c.FeedForward | None = None,
    norm: c.Norm | None = None,
    eps: float = 1e-6,
    **fields: Any,
) -> c.TransformerConfig:
    """A Llama-like decoder; arguments replace its attention, feed-forward or norm.

    Args:
        settings: The whole config.json.
        heads: Fields of `MultiHead`.
        feed_forward: Instead of a gated one.
        norm: Instead of an RMSNorm.
        eps: Of the RMSNorm, where the file gives none.
        **fields: Other fields of `TransformerConfig`.
    """
    return c.TransformerConfig(
        **read_sizes(settings),
        attention=c.MultiHead(**heads),
        feed_forward=(feed_forward or read_glu(settings),),
        norm=norm or c.RMSNorm(eps=settings.number("rms_norm_eps", eps)),
        head=c.Head(tied=settings.flag("tie_word_embeddings", False)),
        **fields,
    )


def read_biases(settings: Settings) -> tuple[Any, ...]:
    """Biases of all four projections or of none."""
    return ALL_BIASES if settings.flag("attention_bias", False) else ()


def read_layer_types(
    settings: Settings, count: int, sliding: Callable[[int], bool]
) -> tuple[bool, ...]:
    """Which layers have a window.

    Args:
        settings: The whole config.json.
        count: Number of layers.
        sliding: Which do where the file does not say.

    Returns:
        One entry per layer.
    """
    words = settings.sequence("layer_types", str)
    if words is None:
        return tuple(sliding(i) for i in range(count))
    known = {"sliding_attention": True, "full_attention": False}
    if len(words) != count or not set(words) <= set(known):
        settings.refuse("layer_types", f"expected {' or '.join(known)} for each of {count} layers.")
        return (False,) * count
    return tuple(known[word] for word in words)


def windows(settings: Settings, sliding: tuple[bool, ...], window: int | None) -> tuple[Any, ...]:
    """Windows of the layers, as a cycle."""
    if window is None and any(sliding):
        settings.refuse("sliding_window", "layers with a window need its size.")
    return shortest_cycle(tuple(window if here else None for here in sliding))


def read_late_windows(settings: Settings) -> tuple[Any, ...]:
    """Sliding windows of the last layers (Qwen's use_sliding_window), as a cycle."""
    count = settings.integer("num_hidden_layers")
    window = settings.optional_integer("sliding_window", 4096)
    first = settings.integer("max_window_layers", 28)
    if not settings.flag("use_sliding_window", False):
        window = None
    sliding = read_layer_types(settings, count, lambda i: window is not None and i >= first)
    return windows(settings, sliding, window)


def write_late_windows(config: c.TransformerConfig) -> dict[str, Any]:
    """The sliding-window fields of Qwen's config.json."""
    kinds = write_layer_types(config)
    sliding = [kind == "sliding_attention" for kind in kinds["layer_types"]]
    return {
        **kinds,
        "use_sliding_window": any(sliding),
        "max_window_layers": [*sliding, True].index(True),
    }


def write_sizes(config: c.TransformerConfig) -> dict[str, Any]:
    """Sizes, heads and the feed-forward, under the names that most families use."""
    attention = config.multi_head
    branch: Any = config.feed_forward[0]
    if isinstance(branch, c.Experts):
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
        fields["hidden_act"] = name_of(branch.activation)
    return fields


def write_decoder(
    config: c.TransformerConfig, *, branch: type = c.GLU, **more: Any
) -> dict[str, Any] | None:
    """config.json fields of a Llama-like decoder, or None for other models."""
    if not (plain_decoder(config) and isinstance(config.feed_forward[0], branch)):
        return None
    return {
        **write_sizes(config),
        "rms_norm_eps": config.norm.eps,
        **write_rope(rope_of(config)),
        **more,
    }


def write_layer_types(config: c.TransformerConfig) -> dict[str, Any]:
    """The window, and which layers have it."""
    layers = [config.layer(i).window for i in range(config.num_layers)]
    kinds = ["full_attention" if window is None else "sliding_attention" for window in layers]
    return {"sliding_window": window_of(config), "layer_types": kinds}


def window_of(config: c.TransformerConfig) -> int | None:
    """The first window of any layer."""
    return next((window for window in config.attention.windows if isinstance(window, int)), None)


def plain_decoder(config: c.TransformerConfig) -> bool:
    """Whether the model is a decoder with RoPE in its first layer."""
    return isinstance(config.topology, c.Decoder) and isinstance(
        config.attention.positions[0], c.Rope
    )


def rope_of(config: c.TransformerConfig) -> c.Rope:
    """The rotary positions of the first layer that has any."""
    return next(p for p in config.attention.positions if isinstance(p, c.Rope))
