"""Axes of the design, and which model made which choice."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from jaxformer import config as c
from jaxformer.checks import require
from jaxformer.zoo.mixtures import mixture_cells, mixtures
from jaxformer.zoo.presets import FAMILIES, get, names
from jaxformer.zoo.survey import survey
from jaxformer.zoo.survey_cells import activation_cell, attending_kinds
from jaxformer.zoo.survey_row import TableRow

POSITION_NAMES: Mapping[type, str] = {
    c.Sinusoid: "sinusoids",
    c.Learned: "learned",
    c.Rope: "RoPE",
    c.Alibi: "ALiBi",
    c.T5Bias: "T5 bias",
    c.TransformerXL: "Transformer-XL",
    c.Fire: "FIRE",
    type(None): "none",
}
PLACEMENT_NAMES = {
    "pre": "pre-norm",
    "pre_feed_forward": "pre-norm, none before attention",
    "post": "post-norm",
    "sandwich": "sandwich norm",
    "res_post": "norm of a branch's output",
}
BLOCK_NAMES = {
    "serial": "serial",
    "parallel": "parallel",
    "parallel_shared_norm": "parallel, under one norm",
}
ATTENTION_NAMES: Mapping[type, str] = {
    c.SharedKV: "shared key and value",
    c.Differential: "differential",
    c.Latent: "latent",
    c.ShortConvolution: "convolution",
    c.LinearAttention: "linear",
    c.SelectiveScan: "selective scan",
    c.RGLRU: "RG-LRU",
    c.TimeMixing: "WKV",
    c.ChannelMixing: "channel mixing",
}
QK_NORM_NAMES = {
    "width": "all heads together",
    "head": "each head",
    "each_head": "each head, its own scale",
}


YEARS = {name: year for family in FAMILIES for name, year in getattr(family, "YEARS", {}).items()}


class Model(NamedTuple):
    """A model listed by `choices`.

    Attributes:
        name: Name in the lecture's tables, or else of the preset.
        year: Year in that table, or else of the release.
        config: Configuration of the preset.
    """

    name: str
    year: int
    config: c.TransformerConfig


def choices(axis: str) -> dict[str, tuple[Model, ...]]:
    """Return which models made which choice of an axis.

    They are the rows of the lecture's tables, the other presets of a row that choose otherwise, and
    the presets in no row. Models without the axis, such as models without experts for "router", are
    left out.

    Args:
        axis: A name in `AXES`, such as "norm".

    Returns:
        The models of each choice, by year; the choices in order of their first model.

    Raises:
        ValueError: There is no such axis; the message lists them.

    Example:
        >>> from jaxformer import zoo
        >>> zoo.choices("position")["sinusoids"][0].name
        'Original transformer'
    """
    require(axis in AXES, f"There is no axis {axis!r}. Axes: {', '.join(AXES)}.")
    choose = AXES[axis]
    models_by_choice: dict[str, tuple[Model, ...]] = {}
    for model in sorted(_models(choose), key=lambda model: model.year):
        choice = choose(model.config)
        if choice is not None:
            models_by_choice[choice] = (*models_by_choice.get(choice, ()), model)
    return models_by_choice


def _models(choose: Callable[[c.TransformerConfig], str | None]) -> list[Model]:
    rows: list[TableRow] = [*survey(), *mixtures()]
    # By preset, so that a later row replaces an earlier one: row 5 of the survey is no model.
    models: dict[str, Model] = {}
    for row in rows:
        if row.preset is not None:
            config = get(row.preset)
            models[row.preset] = Model(row.name, row.year, config)
            for name in row.other_presets:
                if choose(get(name)) != choose(config):
                    models[name] = Model(name, YEARS.get(name, row.year), get(name))
    in_rows = {name for row in rows for name in row.presets}
    without_row = (Model(name, YEARS[name], get(name)) for name in names() if name not in in_rows)
    return [*models.values(), *without_row]


def _norm(config: c.TransformerConfig) -> str:
    norm, name = config.norm, type(config.norm).__name__
    if norm.parameters == "none":
        return f"{name}, no parameters"
    is_scaled_layer_norm = isinstance(norm, c.LayerNorm) and norm.parameters == "scale"
    return f"{name}, no bias" if is_scaled_layer_norm else name


def _norm_placement(config: c.TransformerConfig) -> str:
    return " and ".join(dict.fromkeys(PLACEMENT_NAMES[x.norm_placement] for x in config.layers))


def _position(config: c.TransformerConfig) -> str:
    layers = [layer for layer in config.layers if layer.attention.main.has_scores]
    kinds: list[type] = [type(layer.positions) for layer in layers] or [type(None)]
    if config.embedding.positions is not None:
        kinds = [type(config.embedding.positions), *(x for x in kinds if x is not type(None))]
    return " and ".join(dict.fromkeys(POSITION_NAMES.get(x, x.__name__) for x in kinds))


def _window(config: c.TransformerConfig) -> str:
    first, period, *_ = config.segments(next(iter(config.stacks)))
    pattern = config.layers[first : first + period]
    windows = [layer.window for layer in pattern if layer.attention.main.has_scores]
    count = sum(window is not None for window in windows)
    if windows and count == len(windows):
        return "in every layer"
    return f"in {count} of {len(windows)} layers" if count else "none"


def _attention(config: c.TransformerConfig) -> str:
    parts = (part for layer in config.layers for part in layer.attention.parts)
    return " and ".join(dict.fromkeys(map(_attention_name, parts)))


def _attention_name(attention: c.AttentionKind) -> str:
    if not isinstance(attention, c.MultiHead):
        return ATTENTION_NAMES.get(type(attention), type(attention).__name__)
    if attention.num_kv_heads == attention.num_heads:
        return "multi-head"
    return "multi-query" if attention.num_kv_heads == 1 else "grouped-query"


def _qk_norm(config: c.TransformerConfig) -> str:
    qk_norm = getattr(attending_kinds(config)[0], "qk_norm", None)
    return "none" if qk_norm is None else QK_NORM_NAMES[qk_norm.over]


def _softcap(config: c.TransformerConfig) -> str:
    caps = {
        "scores": getattr(attending_kinds(config)[0], "logit_softcap", None),
        "logits": config.head.softcap,
    }
    return " and ".join(name for name, cap in caps.items() if cap is not None) or "none"


def _attention_bias(config: c.TransformerConfig) -> str:
    return ", ".join(getattr(attending_kinds(config)[0], "biases", ())) or "none"


def _sinks(config: c.TransformerConfig) -> str:
    return "each head" if getattr(attending_kinds(config)[0], "sinks", False) else "none"


def _output_gate(config: c.TransformerConfig) -> str:
    gate = attending_kinds(config)[0].output_gate
    return "none" if gate is None else f"each {gate.over}"


def _activation(config: c.TransformerConfig) -> str | None:
    return activation_cell(config.feed_forward[-1])


def _feed_forward(config: c.TransformerConfig) -> str:
    branch = config.feed_forward[-1]
    if not isinstance(branch, c.MoE):
        return "dense" if branch.is_branch else "none"
    return "experts" if branch.shared is None else "experts, some shared"


def _router(config: c.TransformerConfig) -> str | None:
    moe = config.feed_forward[-1]
    if not isinstance(moe, c.MoE):
        return None
    router = moe.router
    parts = {
        "selection bias": router.selection_bias,
        "groups": router.groups is not None,
        "renormalised": router.renormalise,
        "scaled": router.scale != 1,
        "scaled by expert": router.expert_scale,
        "limited capacity": router.capacity is not None,
        "weighs inputs": router.weighs_inputs,
    }
    return ", ".join([router.score, *(name for name, has_it in parts.items() if has_it)])


def _experts(config: c.TransformerConfig) -> str | None:
    cells = mixture_cells(config)
    if cells is None:
        return None
    shared = f", {cells.shared} shared" if cells.shared else ""
    return f"{cells.active} of {cells.routed}{shared}"


#: What a configuration chose on each axis: None where it has no such part.
AXES: Mapping[str, Callable[[c.TransformerConfig], str | None]] = MappingProxyType(
    {
        "topology": lambda config: type(config.topology).__name__,
        "norm": _norm,
        "norm-placement": _norm_placement,
        "block": lambda config: BLOCK_NAMES[config.block],
        "position": _position,
        "window": _window,
        "attention": _attention,
        "qk-norm": _qk_norm,
        "softcap": _softcap,
        "attention-bias": _attention_bias,
        "sinks": _sinks,
        "output-gate": _output_gate,
        "activation": _activation,
        "feed-forward": _feed_forward,
        "router": _router,
        "experts": _experts,
        "head": lambda config: "tied" if config.head.tied else "not tied",
    }
)
