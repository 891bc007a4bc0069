"""Render the survey and presets as text (120 columns) and as Markdown."""

import dataclasses
import textwrap
from typing import Any

from jaxformer.zoo.catalogue import names
from jaxformer.zoo.cells import Cells
from jaxformer.zoo.row import SurveyRow
from jaxformer.zoo.survey import survey

WIDTH = 118
COLUMNS = (
    *(("#", 3), ("model", 27), ("year", 6), ("norm", 11), ("block", 10), ("pre-norm", 10)),
    *(("position", 10), ("activation", 15), ("preset", 18), ("differs", 8)),
)


def table() -> str:
    """Render the survey as listed; under each row, what differs in the released model."""
    lines = [_line([title for title, _ in COLUMNS]), "-" * WIDTH]
    for row in survey():
        lines += _row(row)
    named = sum(row.preset is not None for row in survey())
    closing = (
        f"{len(survey())} rows as the lecture lists them, {named} with a preset. Under a row "
        "stands what the model has instead as released, or as published where it was not (+ "
        "beside, - without); after `assumed:`, what we assume since nothing is published. A dot "
        "is a blank cell. Rows with a yes under `differs` differ in a column, or in what has none. "
        "A star there: something about the model is assumed, because it is not published or not "
        "checked against released files. `python -m jaxformer.zoo NAME` says how and what, "
        f"`--list` names all {len(names())} presets."
    )
    return "\n".join([*lines, "", textwrap.fill(closing, WIDTH)])


def markdown() -> str:
    """Render the survey in Markdown: released cells, with the listed ones in brackets.

    A star: something about the model is assumed.
    """
    titles = ("#", "model", "year", "norm", "block", "pre-norm", "position", "activation")
    rows = [[*titles, "tricks", "preset"], ["---"] * (len(titles) + 2)]
    for row in survey():
        listed = _shown(row.listed)
        released = listed if row.released is None else _shown(row.released)
        cells = [
            new if old == new or old == "." else f"{new} ({old})"
            for old, new in zip(listed, released, strict=True)
        ]
        tricks = ", ".join((row.released or row.listed).tricks)
        preset = f"`{row.preset}`" if row.preset else "not published"
        preset += " \\*" if row.assumptions and row.preset else ""
        rows.append([str(row.number), _short(row.name), str(row.year), *cells, tricks, preset])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def listing() -> str:
    """List the names of all presets by survey row, then the rest."""
    named = [(row.name, row.presets) for row in survey()]
    listed: set[str] = set()
    lines = []
    for title, presets in [*named, ("Later than the table", names())]:
        new_presets = [name for name in presets if name not in listed]
        listed.update(new_presets)
        if new_presets:
            lines.append(
                textwrap.fill(f"{title}: {', '.join(new_presets)}", WIDTH, subsequent_indent="    ")
            )
    return "\n".join(lines)


def code(choice: Any, indent: int = 0) -> str:
    """Return Python source that builds a configuration, without fields at their default."""
    if isinstance(choice, tuple):
        return _bracket("(", [code(item, indent + 4) for item in choice], ")", indent, comma=True)
    if not dataclasses.is_dataclass(choice):
        return repr(choice)
    fields = [
        f"{field.name}={code(getattr(choice, field.name), indent + 4)}"
        for field in dataclasses.fields(choice)
        if getattr(choice, field.name) != field.default
    ]
    return _bracket(f"{type(choice).__name__}(", fields, ")", indent, comma=False)


def _bracket(start: str, items: list[str], end: str, indent: int, *, comma: bool) -> str:
    """Join items on one line if they are short, else one item per line."""
    flat = start + ", ".join(items) + ("," if comma and len(items) == 1 else "") + end
    if "\n" not in flat and len(flat) + indent <= 80:
        return flat
    pad = " " * (indent + 4)
    if all(len(item) < 10 for item in items):
        body = textwrap.fill(", ".join(items), 96, initial_indent=pad, subsequent_indent=pad)
    else:
        body = "\n".join(f"{pad}{item}," for item in items)
    return f"{start}\n{body}\n{' ' * indent}{end}"


def _line(values: list[str]) -> str:
    cut = (text.ljust(width) for text, (_, width) in zip(values, COLUMNS, strict=True))
    return "".join(cut).rstrip()


def _row(row: SurveyRow) -> list[str]:
    listed, tricks = _shown(row.listed), row.listed.tricks
    name = row.preset or "unpublished"
    differs = ("yes" if row.differences else "") + ("*" if row.assumptions else "")
    lines = [_line([str(row.number), _short(row.name), str(row.year), *listed, name, differs])]
    if tricks:
        lines.append(f"{'':9}tricks: {', '.join(tricks)}")
    if row.released is None:
        return lines
    changed = [
        "" if old == new else new for old, new in zip(listed, _shown(row.released), strict=True)
    ]
    label = "assumed:" if row.assumed else "released:"
    if any(changed):
        lines.append(_line(["", f"      {label}", "", *changed, "", ""]))
    trick_changes = [f"+ {trick}" for trick in row.released.tricks if trick not in tricks]
    trick_changes += [f"- {trick}" for trick in tricks if trick not in row.released.tricks]
    if trick_changes:
        lines.append(f"{'':9}{label} {', '.join(trick_changes)}")
    return lines


def _short(name: str) -> str:
    """A row's name within its column."""
    return name.replace(" - same for ", ", ")


def _shown(cells: Cells) -> list[str]:
    blank = "."
    pre_norm = {True: "yes", False: "no", None: blank}[cells.pre_norm]
    position = (cells.position or blank).replace("Hybrid (RoPE+NoPE)", "RoPE+NoPE")
    return [
        cells.norm or blank,
        cells.block or blank,
        pre_norm,
        position,
        cells.activation or blank,
    ]


def about(row: SurveyRow) -> str:
    """Describe a survey row: release, differences, assumptions, source."""
    lines = [f"Row {row.number} of the survey: {row.name}, {row.year}"]
    lines += _fill("released", [row.release])
    lines += _fill("differs", row.differences or ["In nothing that the table lists."])
    lines += _fill("assumed", row.assumptions)
    if row.z_loss is not None:
        lines += _fill("z-loss", [f"{row.z_loss:g}, in training only."])
    lines += _fill("source", [row.reference])
    return "\n".join(lines)


def _fill(label: str, sentences: Any) -> list[str]:
    return [
        textwrap.fill(
            sentence,
            WIDTH,
            initial_indent=f"  {label if i == 0 else '':10}",
            subsequent_indent=" " * 12,
        )
        for i, sentence in enumerate(sentences)
    ]
