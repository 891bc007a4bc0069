"""Plots of the arrays from this package; they need the extra `plots`.

``plot_...`` functions return a matplotlib Figure, ``show_...`` functions an HTML page; a notebook
displays either as the result of a cell.
"""

import html
import importlib
import io
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Array

from jaxformer.inspect.attention_weights import AttentionMaps

MAX_TICK_LABELS = 40
MAX_NUMBERS = 100  # cells of a heatmap with their numbers
MAX_WIDTH = 11.0  # inches, of all columns with their numbers
NUMBER_SIZE = 7
LETTER = 0.0095  # inches, of a letter of size 1
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
        maps: Attention weights, [T, S] or [N, T, S].
        tokens: Text of each query, shown for at most 40.
        keys: Text of each key; None is `tokens` if their numbers are equal.
        heads: Number of each head, for a selection of heads.
        title: Title of the figure.
        columns: Panels per row.

    Returns:
        The figure.

    Raises:
        ValueError: The maps have more axes, the numbers of texts or heads do not match them, or
            `columns` is below 1.
        ModuleNotFoundError: matplotlib is not installed.
    """
    if isinstance(maps, AttentionMaps):
        raise ValueError(
            "Choose one part, layer and row of the maps first, for example maps.decoder[0, 0]."
        )
    panels = np.asarray(maps, np.float32)
    if panels.ndim not in (2, 3) or panels.size == 0:
        raise ValueError(
            f"maps must be [T, S] or [N, T, S]; got shape {panels.shape}. Choose one layer and "
            "row, for example maps.decoder[0, 0]."
        )
    if columns < 1:
        raise ValueError(f"columns must be at least 1; got {columns}.")
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
        axes.locator_params(integer=True)
        axes.set_title(f"head {names[i]}" if show_names else "", fontsize=9)
        _set_tick_labels(axes, rows=tokens, columns=keys, width=2.4)
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    figure.suptitle(title)
    return figure


def plot_heatmap(
    values: Numbers,
    *,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    centered: bool = False,
) -> Any:
    """Plot a matrix as a heatmap; a matrix of at most 100 cells has its numbers in them.

    Args:
        values: [rows, columns]; cells of NaN are empty.
        rows: Text of each row, shown for at most 40.
        columns: Text of each column, likewise.
        xlabel: Label of the columns.
        ylabel: Label of the rows.
        title: Title of the figure.
        centered: Whether 0 is white, for values of both signs.

    Returns:
        The figure.

    Raises:
        ValueError: `values` is not a matrix, or the numbers of texts do not match it.
    """
    values = np.asarray(values, np.float32)
    if values.ndim != 2:
        raise ValueError(f"values must be [rows, columns]; got shape {values.shape}.")
    _check_count("rows", rows, values.shape[0])
    _check_count("columns", columns, values.shape[1])
    numbers = [f"{value:z.2f}" for value in values.flat] if values.size <= MAX_NUMBERS else []
    width = LETTER * NUMBER_SIZE * (2 + max(map(len, numbers), default=0)) * values.shape[1]
    show_numbers = bool(numbers) and width <= MAX_WIDTH
    width = max(5.5, width) if show_numbers else 5.5
    height = 0.16 * values.shape[0] + 1.0 if show_numbers else 0.0
    figure = _new_figure(width + 1.5, max(4.0, height))
    axes = figure.add_subplot()
    options: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}
    if centered:
        limit = float(np.nanmax(np.abs(values))) or 1.0
        options |= {"cmap": "RdBu", "vmin": -limit, "vmax": limit}
    image = axes.imshow(values, **options)
    axes.locator_params(integer=True)
    figure.colorbar(image, ax=axes)
    if show_numbers:
        axes.set(yticks=range(values.shape[0]), xticks=range(values.shape[1]))
        for (row, column), number in zip(np.ndindex(values.shape), numbers, strict=True):
            if np.isfinite(values[row, column]):
                _write(axes, row, column, number, on=image, size=NUMBER_SIZE)
    _set_tick_labels(axes, rows=rows, columns=columns, width=width)
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
        lines: Values of each line by name.
        x: Positions on the x axis; None is 0, 1, ...
        xlabel: Label of the x axis.
        ylabel: Label of the y axis.
        title: Title of the figure.
        logy: Whether the y axis is logarithmic.

    Returns:
        The figure.
    """
    figure = _new_figure(8.0, 4.0)
    axes = figure.add_subplot()
    for name, line in lines.items():
        y = np.asarray(line)
        axes.plot(np.arange(len(y)) if x is None else np.asarray(x), y, label=name, marker=".")
        if not np.any(np.mod(axes.lines[-1].get_xdata(), 1)):
            axes.locator_params("x", integer=True)
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
        tokens: Text of each token.
        names: Text of each token id.

    Returns:
        The figure.

    Raises:
        ValueError: `lens` has more axes, or the numbers of tokens or names do not match it.
    """
    logits = np.asarray(lens, np.float64)
    if logits.ndim != 3:
        raise ValueError(
            f"lens must be [depths, T, V]; got shape {logits.shape}. Choose one row, for example "
            "lens[:, 0]."
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
    axes.locator_params(integer=True)
    for (depth, position), token in np.ndenumerate(top_token):
        token_text = str(token) if names is None else repr(names[token])[1:-1]
        _write(axes, depth, position, token_text, on=image, size=8)
    figure.colorbar(image, ax=axes, label="probability")
    _set_tick_labels(axes, rows=None, columns=tokens, width=0.7 * length)
    axes.set_yticks(range(depths))
    axes.set(xlabel="token", ylabel="layers", title="Most likely next token after each layer")
    return figure


class HtmlPage:
    """HTML that a notebook displays.

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
        texts: Text of each token with a loss: from the second token on for `token_losses` without
            targets.
        losses: Loss of each token in nats; tokens with NaN or infinity are black.

    Returns:
        An HTML page, with the loss of a token as its tooltip.

    Raises:
        ValueError: The numbers of texts and losses differ.
    """
    numbers = np.asarray(losses, np.float32)
    if numbers.shape != (len(texts),):
        raise ValueError(
            f"losses must have one number per text; got {len(texts)} texts and shape "
            f"{numbers.shape}."
        )
    finite = np.isfinite(numbers)
    top = max(float(numbers.max(initial=0.0, where=finite)), 1e-6)
    spans = []
    for text, loss, known in zip(texts, numbers, finite, strict=True):
        red = f"background: rgba(220, 60, 40, {loss / top:.2f})"
        colour = red if known else "background: black; color: white"
        spans.append(f'<span title="{loss:.2f} nats" style="{colour}">{html.escape(text)}</span>')
    style = "white-space: pre-wrap; font-family: monospace; color: black; background: white"
    return HtmlPage(f'<div style="{style}">{"".join(spans)}</div>')


def show_tree(tree: Any) -> HtmlPage:
    """Show a parameter tree in a notebook, with a plot of each array (treescope).

    Args:
        tree: Any tree of arrays, a configuration, or both.

    Returns:
        An HTML page.

    Raises:
        ModuleNotFoundError: treescope is not installed.
    """
    treescope = _import_plotting("treescope")
    pictures = treescope.ArrayAutovisualizer()
    with treescope.active_autovisualizer.set_scoped(pictures):
        return HtmlPage(treescope.render_to_html(tree))


def _new_figure(width: float, height: float) -> Any:
    """Return a new figure, which a notebook displays with any matplotlib backend."""
    new = _import_plotting("matplotlib.figure").Figure
    figure = new(figsize=(width, height), layout="constrained")
    figure._repr_png_ = partial(_png, figure)
    return figure


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _import_plotting(module: str) -> Any:
    """Import a module of the extra `plots`, or raise ImportError with the install command."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        name = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != name:
            raise
        raise ModuleNotFoundError(
            f"Plots need {name}: pip install 'jaxformer[plots]'. Functions that return "
            "arrays work without it.",
            name=name,
        ) from error


def _check_count(name: str, values: Numbers | None, count: int) -> None:
    """Check the number of names."""
    if values is not None and len(values) != count:
        raise ValueError(f"{name} must have {count} entries; got {len(values)}.")


def _write(axes: Any, row: int, column: int, text: str, *, on: Any, size: float) -> None:
    """Write into a cell of a heatmap: black or white, whichever has more contrast."""
    colour = np.asarray(on.cmap(on.norm(on.get_array()[row, column]))[:3])
    linear = np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)
    dark = linear @ (0.2126, 0.7152, 0.0722) < 0.179  # contrast 4.6 with both
    style = {"ha": "center", "va": "center", "fontsize": size, "parse_math": False}
    axes.text(column, row, text, color="white" if dark else "black", **style)


def _set_tick_labels(
    axes: Any, *, rows: Sequence[str] | None, columns: Sequence[str] | None, width: float
) -> None:
    """Label rows and columns as plain text, without TeX for dollar signs."""
    for words, axis in ((rows, axes.yaxis), (columns, axes.xaxis)):
        if words is not None and len(words) <= MAX_TICK_LABELS:
            names = [repr(word)[1:-1] for word in words]
            size = 8 if len(names) <= 20 else 6
            needed = LETTER * size * sum(1 + len(name) for name in names)
            turn = {"rotation": 90} if axis is axes.xaxis and needed > width else {}
            axis.set_ticks(range(len(names)), names, fontsize=size, parse_math=False, **turn)
