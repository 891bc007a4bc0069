"""Columns of the survey table, and conversion of its cells from and to configurations."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from jaxformer import config as c
from jaxformer.config.topology import Topology

PositionCell = (
    Literal["Sine", "Absolute", "Relative", "RoPE", "Alibi", "Hybrid (RoPE+NoPE)", "none", "mixed"]
    | Literal["Hybrid (SWA+Full)", "Hybrid (Conv+Full)"]
)
ActivationCell = Literal["ReLU", "GeLU", "GeGLU", "SwiGLU", "SqReLu", "Clamped GeGLU", "xIELU"]
TrickCell = Literal["Z-loss", "QK-norm", "Logit soft capping", "Pre+post norm", "p-Rope"]

MLP_ACTIVATION_CELLS: dict[str, ActivationCell] = {
    "relu": "ReLU",
    "gelu": "GeLU",
    "gelu_tanh": "GeLU",
    "quick_gelu": "GeLU",
    "relu_squared": "SqReLu",
}
GLU_ACTIVATION_CELLS: dict[str, ActivationCell] = {
    "gelu": "GeGLU",
    "gelu_tanh": "GeGLU",
    "quick_gelu": "GeGLU",
    "silu": "SwiGLU",
}


@dataclass(frozen=True, kw_only=True)
class SurveyCells:
    """Cells of one survey row; None is a blank cell.

    Attributes:
        norm: The kind of norm.
        block: Whether attention and feed-forward run serially or in parallel.
        pre_norm: Whether norms are before the branches.
        position: Position encoding.
        activation: Activation of the feed-forward network.
        tricks: Methods for stable training.
    """

    norm: Literal["LayerNorm", "RMSNorm"] | None = None
    block: Literal["Serial", "Parallel"] | None = None
    pre_norm: bool | None = None
    position: PositionCell | None = None
    activation: ActivationCell | None = None
    tricks: tuple[TrickCell, ...] = ()


# Cells that replace blank ones in a configuration as listed: GPT-3's cells, a plain decoder.
BLANK_DEFAULTS = SurveyCells(
    norm="LayerNorm", block="Serial", pre_norm=True, position="Absolute", activation="GeLU"
)


def cells_from_config(config: c.TransformerConfig, *, edition: int = 2025) -> SurveyCells:
    """Return the cells that describe a configuration (z-loss is not part of one).

    Args:
        config: The configuration.
        edition: Edition of the lecture. The edition of 2026 calls RoPE in layers with and without a
            window "Hybrid (SWA+Full)".
    """
    tricks: list[TrickCell] = []
    attention = attending_kinds(config)[0]
    if getattr(attention, "qk_norm", None) is not None:
        tricks.append("QK-norm")
    if getattr(attention, "logit_softcap", None) is not None or config.head.softcap is not None:
        tricks.append("Logit soft capping")
    placements = {layer.norm_placement for layer in config.layers}
    if placements == {"sandwich"}:
        tricks.append("Pre+post norm")
    if any(layer.rope and isinstance(layer.rope.scaling, c.PRope) for layer in config.layers):
        tricks.append("p-Rope")
    return SurveyCells(
        norm="LayerNorm" if isinstance(config.norm, c.LayerNorm) else "RMSNorm",
        block="Serial" if config.block == "serial" else "Parallel",
        pre_norm=placements <= {"pre", "sandwich"},
        position=_position(config, names_windows=edition >= 2026),
        activation=activation_cell(config.layers[0].feed_forward),
        tricks=tuple(tricks),
    )


def attending_kinds(config: c.TransformerConfig) -> tuple[c.AttentionKind, ...]:
    """The different attention kinds of a model that have scores; NoAttention if none has."""
    parts = (part for layer in config.layers for part in layer.attention.parts)
    return tuple(dict.fromkeys(x for x in parts if x.has_scores)) or (c.NoAttention(),)


def fill_blank_cells(listed: SurveyCells) -> SurveyCells:
    """Replace blank cells by BLANK_DEFAULTS."""
    defaults = {
        name: getattr(BLANK_DEFAULTS, name) for name, x in vars(listed).items() if x is None
    }
    return replace(listed, **defaults)


POSITIONS_OF_CELLS: dict[str, tuple[c.Positions | None, ...]] = {
    "RoPE": (c.Rope(),),
    "Alibi": (c.Alibi(),),
    "Hybrid (RoPE+NoPE)": (c.Rope(), c.Rope(), c.Rope(), None),
    "Hybrid (SWA+Full)": (c.Rope(),),
    "Hybrid (Conv+Full)": (c.Rope(),),
}
EMBEDDING_POSITIONS_OF_CELLS: dict[str | None, c.Sinusoid | c.Learned] = {
    "Sine": c.Sinusoid(),
    "Absolute": c.Learned(max_length=64),
}


def config_from_cells(
    listed: SurveyCells, *, relative_positions: c.Positions, topology: Topology
) -> c.TransformerConfig:
    """Build a small configuration with exactly these cells.

    It has two layers, or one full pattern; four heads of 16 features; no biases of linear layers;
    an untied LM head. "Parallel" has a norm for each branch, as in the lecture's formula. Without
    pre-norm a norm follows each residual sum, as in 2017, and there is no final norm. "Logit soft
    capping" caps scores at 50 and logits at 30, as in Gemma 2. There are 64 learned positions.
    "Hybrid (SWA+Full)" has a window of 16 tokens in three of four layers, "Hybrid (Conv+Full)" a
    short convolution in one of two. "p-Rope" keeps a quarter of the frequencies, as in Gemma 4.

    Args:
        listed: The cells; `BLANK_DEFAULTS` replaces blank ones.
        relative_positions: Position option for "Relative".
        topology: Decoder, encoder, or both.
    """
    filled = fill_blank_cells(listed)
    heads, head_dim = 4, 16
    norm = c.LayerNorm() if filled.norm == "LayerNorm" else c.RMSNorm()
    has_softcap = "Logit soft capping" in filled.tricks
    placement: Literal["pre", "post", "sandwich"] = "pre" if filled.pre_norm else "post"
    positions = {"Relative": (relative_positions,), **POSITIONS_OF_CELLS}.get(
        filled.position or "", (None,)
    )
    if "p-Rope" in filled.tricks:
        positions = (c.Rope(scaling=c.PRope(fraction=0.25)),)
    windows = (16, 16, 16, None) if filled.position == "Hybrid (SWA+Full)" else (None,)
    attention = c.MultiHead(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        positions=positions,
        windows=windows,
        qk_norm=c.QKNorm(norm=norm) if "QK-norm" in filled.tricks else None,
        logit_softcap=50.0 if has_softcap else None,
    )
    convolution = c.ShortConvolution(num_heads=heads, head_dim=head_dim)
    is_hybrid = filled.position == "Hybrid (Conv+Full)"
    return c.TransformerConfig(
        vocab_size=128,
        model_dim=heads * head_dim,
        num_layers=max(2, len(positions), len(windows)),
        attention=(convolution, attention) if is_hybrid else attention,
        feed_forward=(_feed_forward(filled.activation, hidden_dim=88),),
        topology=topology,
        block="serial" if filled.block == "Serial" else "parallel",
        norm=norm,
        norm_placement="sandwich" if "Pre+post norm" in filled.tricks else placement,
        final_norm=bool(filled.pre_norm),
        embedding=c.Embedding(positions=EMBEDDING_POSITIONS_OF_CELLS.get(filled.position)),
        head=c.LMHead(softcap=30.0 if has_softcap else None),
    )


def _position(config: c.TransformerConfig, *, names_windows: bool) -> PositionCell:
    match config.embedding.positions:
        case c.Sinusoid():
            return "Sine"
        case c.Learned():
            return "Absolute"
    names: dict[frozenset[type], PositionCell] = {
        frozenset({c.Rope}): "RoPE",
        frozenset({c.Rope, type(None)}): "Hybrid (RoPE+NoPE)",
        frozenset({c.Alibi}): "Alibi",
        frozenset({c.T5Bias}): "Relative",
        frozenset({c.TransformerXL}): "Relative",
        frozenset({type(None)}): "none",
    }
    if any(isinstance(layer.attention, c.ShortConvolution) for layer in config.layers):
        return "Hybrid (Conv+Full)"
    cell = names.get(_types(layer.positions for layer in config.layers), "mixed")
    mixes_windows = len({layer.window is None for layer in config.layers}) > 1
    return "Hybrid (SWA+Full)" if names_windows and mixes_windows and cell == "RoPE" else cell


def _types(choices: Iterable[object]) -> frozenset[type]:
    return frozenset(map(type, choices))


def activation_cell(feed_forward: c.FeedForward) -> ActivationCell | None:
    """Return the cell of a feed-forward network, or of its experts; None if the survey has none."""
    match feed_forward:
        case c.MoE(expert=expert):
            return activation_cell(expert)
        case c.ClampedGEGLU():
            return "Clamped GeGLU"
        case c.XIELU():
            return "xIELU"
        case c.GLU(activation=activation):
            return GLU_ACTIVATION_CELLS.get(activation)
        case c.MLP(activation=activation):
            return MLP_ACTIVATION_CELLS.get(activation)
    return None


def _feed_forward(name: ActivationCell | None, *, hidden_dim: int) -> c.FeedForward:
    match name:
        case "GeGLU":
            return c.GLU(hidden_dim=hidden_dim, activation="gelu_tanh")
        case "SwiGLU":
            return c.GLU(hidden_dim=hidden_dim, activation="silu")
        case "ReLU":
            return c.MLP(hidden_dim=hidden_dim, activation="relu")
        case "SqReLu":
            return c.MLP(hidden_dim=hidden_dim, activation="relu_squared")
        case "GeLU":
            return c.MLP(hidden_dim=hidden_dim, activation="gelu_tanh")
    raise ValueError(f"The survey has no activation {name!r}.")
