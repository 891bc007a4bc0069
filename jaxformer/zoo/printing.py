"""Render the survey and presets as text (120 columns) and as Markdown."""

import itertools
import textwrap
from typing import Any

from jaxformer.zoo.axes import choices
from jaxformer.zoo.mixtures import MixtureRow, mixtures
from jaxformer.zoo.presets import names
from jaxformer.zoo.survey import survey
from jaxformer.zoo.survey_cells import SurveyCells
from jaxformer.zoo.survey_row import SurveyRow

WIDTH = 118
COLUMNS = (
    *(("#", 3), ("model", 27), ("year", 6), ("norm", 11), ("block", 10), ("pre-norm", 10)),
    *(("position", 10), ("activation", 15), ("preset", 18), ("differs", 8)),
)

NO_PRESET = "not published"


def survey_table() -> str:
    """Render the survey as listed; under each row, what differs in the released model."""
    lines = [_format_columns([title for title, _ in COLUMNS]), "-" * WIDTH]
    for row in survey():
        lines += _row_lines(row)
    named = sum(row.preset is not None for row in survey())
    added = sum(row.edition == 2026 for row in survey())
    closing = (
        f"{len(survey())} rows as the lecture lists them, the last {added} since 2026, {named} "
        "with a preset. The line below a row has the cells that differ in the released or "
        "published model (+ added, - absent); after `assumed:`, cells that we assume because "
        "nothing is published. A dot is a blank cell. A yes under `differs`: the model "
        "differs, in a column or in something without one. A star: something about the model "
        "is assumed, because it is not published or not checked against released files. "
        "`jaxformer zoo NAME` lists differences and assumptions, "
        f"`--list` all {len(names())} presets."
    )
    return "\n".join([*lines, "", textwrap.fill(closing, WIDTH)])


def survey_markdown() -> str:
    """Render the survey in Markdown: released cells, with the listed ones in brackets.

    A star marks models about which something is assumed.
    """
    titles = ("#", "model", "year", "norm", "block", "pre-norm", "position", "activation")
    rows = [[*titles, "tricks", "preset"]]
    for row in survey():
        listed = _cell_texts(row.listed)
        released = listed if row.released is None else _cell_texts(row.released)
        cells = _released_with_listed(released, listed)
        tricks = ", ".join((row.released or row.listed).tricks)
        preset = f"`{row.preset}`" if row.preset else NO_PRESET
        preset += " \\*" if row.assumptions and row.preset else ""
        rows.append([str(row.number), _short_name(row.name), str(row.year), *cells, tricks, preset])
    return _markdown(rows)


def mixture_table() -> str:
    """Render the mixtures of experts, released cells with the listed ones in brackets."""
    rows = _mixture_rows()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    closing = (
        "Mixtures of experts as released, in brackets as the lecture of 2026 lists them. ratio: "
        "width of an expert over 4 * model_dim. A dot is a blank cell."
    )
    return "\n".join([*lines, "", textwrap.fill(closing, WIDTH)])


def mixture_markdown() -> str:
    """Render the mixtures of experts in Markdown."""
    titles, *rows = _mixture_rows()
    rows = [[*cells, f"`{preset}`" if preset in names() else preset] for *cells, preset in rows]
    return _markdown([titles, *rows])


def preset_listing() -> str:
    """List the names of all presets by row of the tables, then the rest."""
    rows: list[SurveyRow | MixtureRow] = [*survey(), *mixtures()]
    named = [(row.name, row.presets) for row in rows]
    listed: set[str] = set()
    lines = []
    for title, presets in [*named, ("In no table", names())]:
        new_presets = [name for name in presets if name not in listed]
        listed.update(new_presets)
        if new_presets:
            lines.append(
                textwrap.fill(
                    f"{title}: {', '.join(new_presets)}",
                    WIDTH,
                    subsequent_indent="    ",
                    break_on_hyphens=False,
                )
            )
    return "\n".join(lines)


def axis_listing(axis: str) -> str:
    """List the choices of an axis; under each, year by year, the models that made it."""
    lines = []
    for choice, models in choices(axis).items():
        lines.append(f"{choice}: {len(models)}")
        for year, group in itertools.groupby(models, lambda model: model.year):
            names = ", ".join(model.name.partition(" - same for ")[0] for model in group)
            line = f"    {year}  {names}"
            lines.append(
                textwrap.fill(line, WIDTH, subsequent_indent=" " * 10, break_on_hyphens=False)
            )
    return "\n".join(lines)


def _markdown(rows: list[list[str]]) -> str:
    """A Markdown table; the first row has the titles."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def _released_with_listed(released: list[str], listed: list[str]) -> list[str]:
    """Released cells, with the listed one in brackets where it is not blank and differs."""
    return [
        new if old == new or old == "." else f"{new} ({old})"
        for old, new in zip(listed, released, strict=True)
    ]


def _mixture_rows() -> list[list[str]]:
    """Titles, then the text of each row."""
    rows = [["model", "year", "routed", "active", "shared", "ratio", "preset"]]
    for row in mixtures():
        cells = [
            ["." if x is None else str(x) for x in vars(cells).values()]
            for cells in (row.released or row.listed, row.listed)
        ]
        preset = row.preset or "unsupported"
        rows.append([row.name, str(row.year), *_released_with_listed(*cells), preset])
    return rows


def _format_columns(values: list[str]) -> str:
    cut = (text.ljust(width) for text, (_, width) in zip(values, COLUMNS, strict=True))
    return "".join(cut).rstrip()


def _row_lines(row: SurveyRow) -> list[str]:
    listed, tricks = _cell_texts(row.listed), row.listed.tricks
    name = row.preset or NO_PRESET
    differs = ("yes" if row.differences else "") + ("*" if row.assumptions else "")
    lines = [
        _format_columns(
            [str(row.number), _short_name(row.name), str(row.year), *listed, name, differs]
        )
    ]
    if tricks:
        lines.append(f"{'':9}tricks: {', '.join(tricks)}")
    if row.released is None:
        return lines
    changed = [
        "" if old == new else new
        for old, new in zip(listed, _cell_texts(row.released), strict=True)
    ]
    label = "assumed:" if row.is_assumed else "released:"
    if any(changed):
        lines.append(_format_columns(["", f"      {label}", "", *changed, "", ""]))
    trick_changes = [f"+ {trick}" for trick in row.released.tricks if trick not in tricks]
    trick_changes += [f"- {trick}" for trick in tricks if trick not in row.released.tricks]
    if trick_changes:
        lines.append(f"{'':9}{label} {', '.join(trick_changes)}")
    return lines


def _short_name(name: str) -> str:
    """Return a row's name, shortened to the width of its column."""
    return name.replace(" - same for ", ", ")


def _cell_texts(cells: SurveyCells) -> list[str]:
    blank = "."
    pre_norm = {True: "yes", False: "no", None: blank}[cells.pre_norm]
    position = (cells.position or blank).removeprefix("Hybrid (").removesuffix(")")
    return [
        cells.norm or blank,
        cells.block or blank,
        pre_norm,
        position,
        cells.activation or blank,
    ]


def describe_row(row: SurveyRow | MixtureRow) -> str:
    """Describe a row of a table: release, differences, assumptions, source."""
    table = "survey" if isinstance(row, SurveyRow) else "mixtures of experts"
    lines = [f"Row {row.number} of the {table}: {row.name}, {row.year}"]
    lines += _wrap("released", [row.release_notes])
    lines += _wrap("differs", row.differences or ["The release has every option as listed."])
    if isinstance(row, SurveyRow):
        lines += _wrap("assumed", row.assumptions)
        if row.z_loss is not None:
            lines += _wrap("z-loss", [f"{row.z_loss:g}, in training only."])
    lines += _wrap("source", [row.reference])
    return "\n".join(lines)


def _wrap(label: str, sentences: Any, *, indent: int = 2) -> list[str]:
    return [
        textwrap.fill(
            sentence,
            WIDTH,
            initial_indent=f"{'':{indent}}{label if i == 0 else '':10}",
            subsequent_indent=" " * (indent + 10),
        )
        for i, sentence in enumerate(sentences)
    ]
