"""`like`: the template of a family, from another one; `sized`: a model, from a template and sizes.

A template is a configuration with the options that all models of a family share, and small sizes.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypedDict, Unpack

from jaxformer import config as c
from jaxformer.config.attention.multi_head import Projection
from jaxformer.config.tiny import rescale_with_width

WIDTH, DEPTH = 24, 12  # of templates; most patterns of layers divide the depth
HEADS = c.MultiHead(num_heads=1, num_kv_heads=1, head_dim=8)
GLU = c.GLU(hidden_dim=1)
# Projections with biases
QKV: tuple[Projection, ...] = ("query", "key", "value")
QKVO: tuple[Projection, ...] = (*QKV, "out")


def like(parent: c.TransformerConfig, **options: Any) -> c.TransformerConfig:
    """Return a configuration with other options, of its attention or of the rest.

    Args:
        parent: The configuration that has all other options.
        **options: Options of `TransformerConfig`, and options of its attention.

    Returns:
        The configuration.
    """
    own = {f.name for f in fields(parent)}
    inner = {name: options.pop(name) for name in [*options] if name not in own}
    model: Any = replace(parent, **options)
    return replace(model, attention=replace(model.attention, **inner)) if inner else model


class Sizes(TypedDict, total=False):
    """Sizes besides width and depth, as `sized` says."""

    vocab: int
    heads: int
    kv: int
    global_kv: int
    value_heads: int
    head_dim: int
    base: float
    scale: float
    hidden: int
    dense: int
    experts: int
    top_k: int
    expert_dim: int
    eps: float
    tied: bool
    multiplier: float


HEAD_OPTIONS = {"num_heads": "heads", "head_dim": "head_dim"}
# The options of each part of a configuration that are sizes, and the names of these
OPTIONS: Mapping[type, Mapping[str, str]] = {
    c.TransformerConfig: {"vocab_size": "vocab", "model_dim": "width", "num_layers": "depth"},
    c.EncoderDecoder: {"num_encoder_layers": "depth"},
    c.Embedding: {"scale": "embedding_scale"},
    c.MultiHead: {**HEAD_OPTIONS, "num_kv_heads": "kv", "scale": "scale"},
    c.SharedKV: {"num_heads": "heads", "num_kv_heads": "global_kv"},
    c.Latent: {"num_heads": "heads"},
    c.ShortConvolution: HEAD_OPTIONS,
    c.LinearAttention: {"num_heads": "value_heads"},
    c.SelectiveScan: {"width": "twice_width", "step_rank": "step_rank"},
    c.RGLRU: HEAD_OPTIONS,
    c.TimeMixing: {"width": "width"},
    c.ChannelMixing: {"hidden_dim": "hidden"},
    c.Rope: {"base": "base"},
    c.RMSNorm: {"eps": "eps"},
    c.MoE: {"num_experts": "experts", "top_k": "top_k"},
    c.LMHead: {"tied": "tied", "multiplier": "multiplier"},
}


def with_sizes(part: Any, sizes: Mapping[str, Any], used: set[str]) -> Any:
    """Return a part of a configuration with the sizes that it has; add their names to `used`."""
    if isinstance(part, tuple):
        return tuple(with_sizes(x, sizes, used) for x in part)
    if not is_dataclass(part):
        return part
    if isinstance(part, c.MLP | c.GLU | c.ClampedGEGLU | c.XIELU):
        used.add("hidden")
        return replace(part, hidden_dim=part.hidden_dim * sizes["hidden"])
    inner = dict(sizes)
    if isinstance(part, c.MoE):
        inner["hidden"] = sizes.get("expert_dim", sizes["hidden"])
        used.add("expert_dim")
    changes = {f.name: with_sizes(getattr(part, f.name), inner, used) for f in fields(part)}
    options = OPTIONS.get(type(part), {})
    used.update(options.values())
    changes |= {option: sizes[name] for option, name in options.items() if name in sizes}
    return replace(part, **changes)  # type: ignore[type-var]


def sized(
    template: c.TransformerConfig, model_dim: int, num_layers: int, **sizes: Unpack[Sizes]
) -> c.TransformerConfig:
    """Return the model of a family that has these sizes.

    A size sets all options of its meaning that the template has; options without a size stay. The
    hidden widths of a template are multiples: 2 is a network twice as wide as `hidden`, or as
    `expert_dim` in a mixture of experts. Where the template scales its embedding or logits by a
    power of its width, the model scales them by that power of `model_dim`.

    Args:
        template: The options that all models of the family share.
        model_dim: Width of the residual stream.
        num_layers: Layers of each stack.
        **sizes: `vocab` ids; `heads`; `kv` heads of keys and values, by default as many, and
            `global_kv` where keys are values too; `value_heads` of linear attention; `head_dim`
            features, by default model_dim / heads; `base` of RoPE; `scale` of the scores; `hidden`
            features, by default 4 * model_dim; `dense` layers before the layers with `experts`;
            each token meets `top_k` experts with `expert_dim` features, by default `hidden`; `eps`
            of RMSNorm; whether the head is `tied`, and the `multiplier` of its logits.

    Returns:
        The model.

    Raises:
        ValueError: The template has no option of a size.
    """
    widths = template.model_dim, model_dim
    values: dict[str, Any] = {
        "width": model_dim,
        "depth": num_layers,
        "twice_width": 2 * model_dim,
        "step_rank": model_dim // 16,
        "hidden": 4 * model_dim,
        "embedding_scale": rescale_with_width(template.embedding.scale, *widths),
        "multiplier": rescale_with_width(template.head.multiplier, *widths),
    }
    if "heads" in sizes:
        values |= {"kv": sizes["heads"], "head_dim": model_dim // sizes["heads"]}
    used = {"dense"} if len(template.feed_forward) == 2 else set[str]()
    model: c.TransformerConfig = with_sizes(template, {**values, **sizes}, used)
    if lacking := sorted(set(sizes) - used):
        raise ValueError(f"The template has no option of the sizes {', '.join(lacking)}.")
    if "dense" in sizes:
        (dense, moe), count = model.feed_forward, sizes["dense"]
        model = replace(model, feed_forward=(dense,) * count + (moe,) * (num_layers - count))
    return model
