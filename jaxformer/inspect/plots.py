"""Plots of the arrays from this package; they need the extra `plots`.

What is called plot gives a matplotlib Figure, what is called show a page of HTML; a notebook shows
either where it is the last line of a cell.
"""

import html
import importlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Array

from jaxformer.inspect.attention_weights import AttentionMaps

MAX_TICK_LABELS = 40
Numbers = Array | np.ndarray | Sequence[Any]


def plot_attention(
    maps: Numbers,
    *,
    tokens: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    heads: Numbers | None = None,
    title: str = "",
    columns: int = 4,
) -> Any:
    """Draw attention maps, a panel for each head: rows are queries, columns are keys.

    Args:
        maps: Weights, [T, S] or [N, T, S].
        tokens: The text of each query; written where there are at most 40.
        keys: The text of each key; by default that of the queries, where there are as many.
        heads: What the heads are called, where only some were asked for.
        title: Over all panels.
        columns: Panels side by side.

    Returns:
        The figure.

    Raises:
        ValueError: Maps of more than one row or layer, other numbers of texts or heads, or no
            columns.
        ModuleNotFoundError: matplotlib is not installed.
    """
    if isinstance(maps, AttentionMaps):
        raise ValueError("Pick a part, a layer and a row of these maps, as by maps.decoder[0, 0].")
    panels = np.asarray(maps, np.float32)
    if panels.ndim not in (2, 3) or panels.size == 0:
        raise ValueError(
            f"Maps are [T, S] or [N, T, S]; got shape {panels.shape}. Pick a layer and a row, as "
            "by maps.decoder[0, 0]."
        )
    if columns < 1:
        raise ValueError(f"At least one panel stands side by side; got columns={columns}.")
    panels = panels[None] if panels.ndim == 2 else panels
    _, queries, count = panels.shape
    _check_count("heads", heads, len(panels))
    _check_count("tokens", tokens, queries)
    _check_count("keys", keys, count)
    keys = tokens if keys is None and queries == count else keys
    names = range(len(panels)) if heads is None else heads
    show_names = heads is not None or len(panels) > 1
    across = min(columns, len(panels))
    down = math.ceil(len(panels) / across)
    figure = _new_figure(3.0 * across, 3.0 * down + 0.4)
    top = float(panels.max())
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(down, across, i + 1)
        axes.imshow(panel, cmap="viridis", vmin=0, vmax=top, interpolation="nearest")
        axes.set_title(f"head {names[i]}" if show_names else "", fontsize=9)
        if queries <= MAX_TICK_LABELS:
            _set_tick_labels(axes.set_yticks, tokens)
        if count <= MAX_TICK_LABELS:
            _set_tick_labels(axes.set_xticks, keys, rotation=90)
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    figure.suptitle(title)
    return figure


def plot_heatmap(
    values: Numbers, *, xlabel: str = "", ylabel: str = "", title: str = "", centered: bool = False
) -> Any:
    """Plot a matrix as a heatmap.

    Args:
        values: [rows, columns].
        xlabel: What columns are.
        ylabel: What rows are.
        title: Over the picture.
        centered: Whether white is 0, for numbers of both signs.

    Returns:
        The figure.

    Raises:
        ValueError: Values that are no table.
    """
    values = np.asarray(values, np.float32)
    if values.ndim != 2:
        raise ValueError(f"A table is [rows, columns]; got shape {values.shape}.")
    figure = _new_figure(7.0, 4.0)
    axes = figure.add_subplot()
    options: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}
    if centered:
        limit = float(np.abs(values).max()) or 1.0
        options |= {"cmap": "RdBu", "vmin": -limit, "vmax": limit}
    figure.colorbar(axes.imshow(values, **options), ax=axes)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    return figure


def plot_lines(
    lines: Mapping[str, Numbers],
    *,
    x: Numbers | None = None,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    logy: bool = False,
) -> Any:
    """Plot one line per name.

    Args:
        lines: Numbers by name.
        x: Where they stand; by default 0, 1, ...
        xlabel: What x is.
        ylabel: What the numbers are.
        title: Over the picture.
        logy: Whether y is logarithmic.

    Returns:
        The figure.
    """
    figure = _new_figure(8.0, 4.0)
    axes = figure.add_subplot()
    for name, line in lines.items():
        y = np.asarray(line)
        axes.plot(np.arange(len(y)) if x is None else np.asarray(x), y, label=name, marker=".")
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title, yscale="log" if logy else "linear")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def plot_lens(
    lens: Numbers, *, tokens: Sequence[str] | None = None, names: Sequence[str] | None = None
) -> Any:
    """Plot the logit lens: most likely next token and its probability, per layer.

    Args:
        lens: Logits of one row, [depths, T, V], from `logit_lens`.
        tokens: The text of each token.
        names: The text of each token id.

    Returns:
        The figure.

    Raises:
        ValueError: A lens of more than one row, or other numbers of tokens or names.
    """
    logits = np.asarray(lens, np.float64)
    if logits.ndim != 3:
        raise ValueError(
            f"A lens is [depths, T, V]; got shape {logits.shape}. Pick a row, as by lens[:, 0]."
        )
    depths, length, vocab_size = logits.shape
    _check_count("tokens", tokens, length)
    _check_count("names", names, vocab_size)
    logits -= logits.max(axis=-1, keepdims=True)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    top_token, top_probability = probabilities.argmax(axis=-1), probabilities.max(axis=-1)
    figure = _new_figure(max(5.0, 0.7 * length), 0.45 * depths + 1.5)
    axes = figure.add_subplot()
    image = axes.imshow(top_probability, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for depth in range(depths):
        for position in range(length):
            token = int(top_token[depth, position])
            token_text = str(token) if names is None else repr(names[token])[1:-1]
            style = {
                "color": "white" if top_probability[depth, position] > 0.5 else "black",
                "fontsize": 8,
            }
            axes.text(
                position, depth, token_text, ha="center", va="center", parse_math=False, **style
            )
    figure.colorbar(image, ax=axes, label="probability")
    if tokens is not None:
        _set_tick_labels(axes.set_xticks, tokens, fontsize=8)
    axes.set_yticks(range(depths))
    axes.set(xlabel="read so far", ylabel="layers", title="Likeliest next token after each layer")
    return figure


class HtmlPage:
    """HTML that a notebook shows.

    Attributes:
        text: The HTML.
    """

    def __init__(self, text: str):
        self.text = text

    def _repr_html_(self) -> str:
        return self.text


def show_losses(texts: Sequence[str], losses: Numbers) -> HtmlPage:
    """Show a text in a notebook with tokens coloured by their loss.

    Args:
        texts: The text of each token that has a loss: from the second on, for `token_losses`
            without targets.
        losses: In nats, one for each; what is not finite is black.

    Returns:
        What a notebook shows; point at a token to read its loss.

    Raises:
        ValueError: Other numbers of texts and losses.
    """
    numbers = np.asarray(losses, np.float32)
    if numbers.shape != (len(texts),):
        raise ValueError(f"There is a loss for each text; got {len(texts)} and {numbers.shape}.")
    finite = np.isfinite(numbers)
    top = max(float(numbers.max(initial=0.0, where=finite)), 1e-6)
    colours = [
        f"background: rgba(220, 60, 40, {loss / top:.2f})"
        if known
        else "background: black; color: white"
        for loss, known in zip(numbers, finite, strict=True)
    ]
    spans = [
        f'<span title="{loss:.2f} nats" style="{colour}">{html.escape(text)}</span>'
        for text, loss, colour in zip(texts, numbers, colours, strict=True)
    ]
    style = "white-space: pre-wrap; font-family: monospace; color: black; background: white"
    return HtmlPage(f'<div style="{style}">{"".join(spans)}</div>')


def show_tree(tree: Any) -> HtmlPage:
    """Show a parameter tree in a notebook, with a picture of each array (treescope).

    Args:
        tree: Any tree of arrays, a configuration, or both.

    Returns:
        What a notebook shows.

    Raises:
        ModuleNotFoundError: treescope is not installed.
    """
    treescope = _import_plotting("treescope")
    pictures = treescope.ArrayAutovisualizer()
    with treescope.active_autovisualizer.set_scoped(pictures):
        return HtmlPage(treescope.render_to_html(tree))


def _new_figure(width: float, height: float) -> Any:
    """New figure without a display backend.

    A notebook shows it where it is the last line of a cell, whichever backend is in use.
    """
    figure = _import_plotting("matplotlib.figure").Figure(
        figsize=(width, height), layout="constrained"
    )
    figure._repr_png_ = partial(_png, figure)
    return figure


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _import_plotting(module: str) -> Any:
    """A module of the extra `plots`; says what brings it where it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        name = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != name:
            raise
        raise ModuleNotFoundError(
            f"Pictures need {name}: pip install -e '.[plots]' in the clone brings it. The "
            "functions that give arrays do without.",
            name=name,
        ) from error


def _check_count(name: str, values: Numbers | None, count: int) -> None:
    """Refuse names of other things than are drawn."""
    if values is not None and len(values) != count:
        raise ValueError(f"{name} has one for each of {count}; got {len(values)}.")


def _set_tick_labels(
    set_ticks: Callable[..., Any], words: Sequence[str] | None, *, fontsize: int = 6, **how: Any
) -> None:
    """Words along an axis as they are: a dollar sign begins no formula."""
    if words is not None:
        names = [repr(word)[1:-1] for word in words]
        set_ticks(range(len(names)), names, fontsize=fontsize, parse_math=False, **how)
