"""Model types of Hugging Face that are read, and what others need."""

import functools
import tomllib
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxformer.interop.families import FAMILIES
from jaxformer.interop.text_parts import ALIASES, described_parts

COMMAND = "jaxformer zoo --coverage transformers"


class Coverage(NamedTuple):
    """Whether a model type is read.

    Attributes:
        model_type: As in config.json.
        is_read: Whether the model, or its text part, is read.
        text_type: Type of the text part of a model that also reads images; None for other models.
        lacks: What jaxformer lacks, if it is not read.
    """

    model_type: str
    is_read: bool
    text_type: str | None = None
    lacks: str | None = None


@functools.cache
def lacking_options() -> Mapping[str, str]:
    """What each unread type that continues text needs."""
    return MappingProxyType(
        {kind: lacks for lacks, kinds in _table()["causal"].items() for kind in kinds}
    )


def decoders() -> list[Coverage]:
    """All model types that continue a text; those that are read come first.

    Returns:
        A row for each type.
    """
    other, folders = _table()["other"], {row.model_type: row for row in with_images()}
    read = {
        kind: Coverage(kind, True)
        for kind, family in FAMILIES.items()
        if family.in_transformers and kind not in other
    }
    parts = {kind: folders[kind] for kind in _table()["folders"] if kind in folders}
    parts = {kind: row for kind, row in parts.items() if row.is_read}
    lacking = {
        kind: Coverage(kind, False, None, lacks) for kind, lacks in lacking_options().items()
    }
    rows = {**lacking, **parts, **read}
    return [rows[kind] for kind in sorted(rows, key=lambda kind: (not rows[kind].is_read, kind))]


def with_images() -> list[Coverage]:
    """All model types that read images and text, with the type of their text part.

    Returns:
        A row for each type.
    """
    rows = [
        Coverage(kind, ALIASES.get(text, text) in FAMILIES or kind in FAMILIES, text or None)
        for text, kinds in _table()["image_text"].items()
        for kind in kinds
    ]
    return [row if row.is_read else row._replace(lacks=_why(row.text_type)) for row in rows]


def text_type(kind: Any) -> str | None:
    """Usual type of the text part of a model that also reads images; None if unknown."""
    return next((row.text_type for row in with_images() if row.model_type == kind), None)


def explain(values: Mapping[str, Any]) -> str:
    """Why a config.json is not read, and what its model needs, if known."""
    kind, lacking = values.get("model_type"), lacking_options()
    text_types = (values[name].get("model_type") for name in described_parts(values))
    lacks = next((lacking[x] for x in (kind, *text_types) if x in lacking), None)
    if not described_parts(values) and text_type(kind) is not None:
        lacks = lacks or "text_config, the object that describes its text model"
    needs = "" if lacks is None else f": it needs {lacks}"
    return f"model_type {kind!r} is not supported{needs}; `{COMMAND}` lists all types."


def _why(text_type: str | None) -> str:
    if text_type is None:
        return "a text part"
    return lacking_options().get(text_type, f"the family {text_type}")


@functools.cache
def _table() -> Mapping[str, Any]:
    text = resources.files("jaxformer.interop").joinpath("coverage.toml").read_text("utf-8")
    return MappingProxyType(tomllib.loads(text))


def describe() -> str:
    """All types as text, with the number of types that are read.

    Returns:
        Two tables.
    """
    return "\n\n".join(
        _describe(title, rows)
        for title, rows in (
            ("continue a text", decoders()),
            ("read images and text", with_images()),
        )
    )


def markdown() -> str:
    """Markdown tables of model types, by what they need.

    Returns:
        Two tables.
    """
    tables = []
    for title, rows in (("continue a text", decoders()), ("read images and text", with_images())):
        types = dict[str, list[str]]()
        for row in sorted(rows, key=lambda row: (not row.is_read, row.model_type)):
            part = "the model" if row.text_type is None else "the text part"
            state = f"{part} is read and written" if row.is_read else f"needs {row.lacks}"
            types.setdefault(state, []).append(f"`{row.model_type}`")
        lines = (f"| {state} | {', '.join(kinds)} |" for state, kinds in types.items())
        tables.append("\n".join([f"| | model types that {title} |", "|---|---|", *lines]))
    return "\n\n".join(tables)


def _describe(title: str, rows: list[Coverage]) -> str:
    count = sum(row.is_read for row in rows)
    lines = [f"{count} of {len(rows)} model types of transformers that {title} are read"]
    for row in rows:
        state = "read" if row.text_type is None else f"its text part, {row.text_type}, is read"
        lines.append(f"  {row.model_type:28} {state if row.is_read else f'needs {row.lacks}'}")
    return "\n".join(lines)
