"""Columns of the survey table: read off a configuration, or built into one."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from jaxformer.config import (
    GLU,
    MLP,
    Alibi,
    ClampedGEGLU,
    Embedding,
    Experts,
    FeedForward,
    Head,
    LayerNorm,
    Learned,
    MultiHead,
    Positions,
    QKNorm,
    RMSNorm,
    Rope,
    Sinusoid,
    T5Bias,
    TransformerConfig,
    TransformerXL,
)
from jaxformer.config.model import Topology

Position = Literal[
    "Sine", "Absolute", "Relative", "RoPE", "Alibi", "Hybrid (RoPE+NoPE)", "none", "mixed"
]
Gate = Literal["ReLU", "GeLU", "GeGLU", "SwiGLU", "SqReLu", "Clamped GeGLU"]
Trick = Literal["Z-loss", "QK-norm", "Logit soft capping", "Pre+post norm"]

PLAIN: dict[str, Gate] = {
    "relu": "ReLU",
    "gelu": "GeLU",
    "gelu_tanh": "GeLU",
    "quick_gelu": "GeLU",
    "relu_squared": "SqReLu",
}
GATED: dict[str, Gate] = {
    "gelu": "GeGLU",
    "gelu_tanh": "GeGLU",
    "quick_gelu": "GeGLU",
    "silu": "SwiGLU",
}


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Cells of one survey row; None is a blank cell.

    Attributes:
        norm: The kind of norm.
        block: Whether attention and feed-forward run one after the other or side by side.
        pre_norm: Whether norms stand before the branches.
        position: How positions enter.
        activation: The feed-forward's activation.
        tricks: What keeps training stable.
    """

    norm: Literal["LayerNorm", "RMSNorm"] | None = None
    block: Literal["Serial", "Parallel"] | None = None
    pre_norm: bool | None = None
    position: Position | None = None
    activation: Gate | None = None
    tricks: tuple[Trick, ...] = ()


# What a blank cell becomes when a row is built as listed: GPT-3's cells, the plainest in the table.
NEUTRAL = Cells(
    norm="LayerNorm", block="Serial", pre_norm=True, position="Absolute", activation="GeLU"
)


def cells(config: TransformerConfig) -> Cells:
    """Return the cells that describe a configuration (z-loss is not part of one)."""
    tricks: list[Trick] = []
    if config.multi_head.qk_norm is not None:
        tricks.append("QK-norm")
    if config.multi_head.logit_softcap is not None or config.head.softcap is not None:
        tricks.append("Logit soft capping")
    if config.placement == "sandwich":
        tricks.append("Pre+post norm")
    return Cells(
        norm="LayerNorm" if isinstance(config.norm, LayerNorm) else "RMSNorm",
        block="Serial" if config.block == "serial" else "Parallel",
        pre_norm=config.placement in ("pre", "sandwich"),
        position=_position(config),
        activation=_activation(config.feed_forward[0]),
        tricks=tuple(tricks),
    )


def fill(listed: Cells) -> Cells:
    """The same cells, with those of `NEUTRAL` where they are blank."""
    defaults = {name: getattr(NEUTRAL, name) for name, x in vars(listed).items() if x is None}
    return replace(listed, **defaults)


def build(listed: Cells, *, relative: Positions, topology: Topology) -> TransformerConfig:
    """Build a small configuration with exactly these cells.

    Two layers, or one whole pattern; four heads of 16; no biases on products, a head of its own.
    "Parallel" has a norm for each branch, as the lecture's formula writes it. Without pre-norm the
    norm follows the sum, as in 2017, and there is none after the last layer. "Logit soft capping"
    caps scores at 50 and logits at 30, Gemma 2's numbers. A table of positions has 64.

    Args:
        listed: The cells; blank ones become those of `NEUTRAL`.
        relative: What the word "Relative" stands for.
        topology: Decoder, encoder, or both.
    """
    filled = fill(listed)
    heads, head_dim = 4, 16
    norm = LayerNorm() if filled.norm == "LayerNorm" else RMSNorm()
    has_softcap = "Logit soft capping" in filled.tricks
    placement: Literal["pre", "post", "sandwich"] = "pre" if filled.pre_norm else "post"
    positions: tuple[Positions | None, ...] = {
        "Relative": (relative,),
        "RoPE": (Rope(),),
        "Alibi": (Alibi(),),
        "Hybrid (RoPE+NoPE)": (Rope(), Rope(), Rope(), None),
    }.get(filled.position or "", (None,))
    embedding_positions: dict[str | None, Sinusoid | Learned] = {
        "Sine": Sinusoid(),
        "Absolute": Learned(max_length=64),
    }
    return TransformerConfig(
        vocab_size=128,
        model_dim=heads * head_dim,
        num_layers=max(2, len(positions)),
        attention=MultiHead(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            positions=positions,
            qk_norm=QKNorm(norm=norm) if "QK-norm" in filled.tricks else None,
            logit_softcap=50.0 if has_softcap else None,
        ),
        feed_forward=(_feed_forward(filled.activation, hidden_dim=88),),
        topology=topology,
        block="serial" if filled.block == "Serial" else "parallel",
        norm=norm,
        placement="sandwich" if "Pre+post norm" in filled.tricks else placement,
        final_norm=bool(filled.pre_norm),
        embedding=Embedding(positions=embedding_positions.get(filled.position)),
        head=Head(softcap=30.0 if has_softcap else None),
    )


def _position(config: TransformerConfig) -> Position:
    match config.embedding.positions:
        case Sinusoid():
            return "Sine"
        case Learned():
            return "Absolute"
    names: dict[frozenset[type], Position] = {
        frozenset({Rope}): "RoPE",
        frozenset({Rope, type(None)}): "Hybrid (RoPE+NoPE)",
        frozenset({Alibi}): "Alibi",
        frozenset({T5Bias}): "Relative",
        frozenset({TransformerXL}): "Relative",
        frozenset({type(None)}): "none",
    }
    return names.get(_kinds(config.multi_head.positions), "mixed")


def _kinds(choices: Iterable[object]) -> frozenset[type]:
    return frozenset(map(type, choices))


def _activation(choice: FeedForward) -> Gate | None:
    match choice:
        case Experts(expert=expert):
            return _activation(expert)
        case ClampedGEGLU():
            return "Clamped GeGLU"
        case GLU(activation=activation):
            return GATED.get(activation)
        case MLP(activation=activation):
            return PLAIN.get(activation)
    return None


def _feed_forward(name: Gate | None, *, hidden_dim: int) -> FeedForward:
    match name:
        case "GeGLU":
            return GLU(hidden_dim=hidden_dim, activation="gelu_tanh")
        case "SwiGLU":
            return GLU(hidden_dim=hidden_dim, activation="silu")
        case "ReLU":
            return MLP(hidden_dim=hidden_dim, activation="relu")
        case "SqReLu":
            return MLP(hidden_dim=hidden_dim, activation="relu_squared")
        case "GeLU":
            return MLP(hidden_dim=hidden_dim, activation="gelu_tanh")
    raise ValueError(f"The table lists no activation {name!r}.")
