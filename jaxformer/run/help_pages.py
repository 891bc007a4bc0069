"""Help of a program: a page of common flags, and a page for each topic."""

import dataclasses
import inspect
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tyro

from jaxformer.checks import field_types, restrictions
from jaxformer.config import Attention, AttentionKind, python_source
from jaxformer.config.registry import allowed_types
from jaxformer.errors import did_you_mean
from jaxformer.options import IMPORT_FLAG_HELP

COLUMN = 30  # where texts start
MAX_WIDTH = 100
WORDS = {bool: "", int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


class Flag(NamedTuple):
    """A flag in the help.

    Attributes:
        path: Dotted path of its field.
        head: The flag and a word for its value.
        hint: Type of the field.
        default: Value without the flag, or `dataclasses.MISSING`.
        text: What the docstring says of it, and its range.
        topic: The topic whose page has it; "" for `--help all` only.
    """

    path: str
    head: str
    hint: Any
    default: Any
    text: str
    topic: str


def asked_topic(arguments: Iterable[str]) -> str | None:
    """The topic of --help or -h; "" for the first page, None where neither flag is there."""
    words = list(arguments)
    for word, following in zip_longest(words, words[1:], fillvalue="-"):
        flag, is_one, topic = word.partition("=")
        if flag in ("--help", "-h"):
            return topic if is_one else "" if following.startswith("-") else following
    return None


def help_page(
    run: Any,
    topic: str,
    more_flags: Iterable[Flag] = (),
    *,
    program: str,
    summary: str,
    runs: Collection[str] = (),
) -> str:
    """The first page of a program's help, or the page of a topic.

    Args:
        run: Dataclass of the flags, or an instance, whose values are the defaults.
        topic: "" for the first page, "all", a topic that the first page names, or a flag, such as
            "model.attention".
        more_flags: Flags without a field.
        program: Command, with the named run if there is one.
        summary: What the program does, on the first page.
        runs: Names of runs, which may be the first argument.

    Raises:
        ValueError: There is no such topic.
    """
    flags = [*_flags(run), *more_flags]
    topics = sorted({flag.topic for flag in flags if flag.topic})
    positional = [flag.head for flag in flags if not flag.head.startswith("-")]
    usage = " ".join(["usage:", program, *positional, "[--flag VALUE ...]"])
    if topic:
        path = topic.replace("-", "_")
        described = [
            x
            for x in flags
            if topic in ("all", x.topic) or x.path == path or x.path.startswith(f"{path}.")
        ]
        if not described:
            hint = did_you_mean(topic, [*topics, *(flag.path for flag in flags)])
            raise ValueError(
                f"There is no topic {topic!r}.{hint} Pass --help all, or --help with a flag or one "
                f"of {', '.join(topics)}."
            )
        about = descriptions(run if isinstance(run, type) else type(run))
        lines = [
            usage,
            "",
            about.get(topic.replace("-", "_"), ""),
            "",
            *map(_whole_entry, described),
        ]
        return "\n".join(lines).replace("\n\n\n", "\n")
    by_path = {flag.path: flag for flag in flags}
    common = getattr(run, "FIRST_PAGE", [path for path in by_path if "." not in path])
    more = f"--help all describes all {len(flags)} flags, their ranges and choices"
    if topics:
        more += f"; --help TOPIC those of one topic: {', '.join(topics)}"
    notes = [f"{more}.", IMPORT_FLAG_HELP]
    if len(runs) > 1:
        notes.insert(
            0, f"Runs: {', '.join(runs)}. The first argument picks one; its defaults are shown."
        )
    entries = "\n".join(_short_entry(by_path[path]) for path in common)
    return "\n\n".join([usage, inspect.cleandoc(summary), entries, _wrapped(" ".join(notes), 0)])


def descriptions(kind: type) -> Mapping[str, str]:
    """What the docstrings of a dataclass and its bases say of each field."""
    texts = dict[str, str]()
    for base in reversed(kind.__mro__):
        _, _, attributes = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
        for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", attributes, re.M):
            texts[name] = " ".join(text.split())
    return texts


def has_flags(value: Any, hint: Any) -> bool:
    """Whether a value's fields are flags: not in unions, except `Attention`."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return dataclasses.is_dataclass(value) and (hint == Attention or not is_union)


def flag_name(path: str, value: Any = None) -> str:
    """The flag of the field at a dotted path: --a.no-b where the field is true."""
    above, dot, name = path.rpartition(".")
    return "--" + f"{above}{dot}{'no-' if value is True else ''}{name}".replace("_", "-")


def signature(kind: Any) -> str:
    """An option with the names of its fields, such as "MLP(hidden_dim, activation, bias)"."""
    name: str = "None" if kind is type(None) else kind.__name__
    if not dataclasses.is_dataclass(kind):
        return name
    return f"{name}({', '.join(f.name for f in dataclasses.fields(kind))})"


def _flags(run: Any, above: str = "", topic: str = "") -> Iterator[Flag]:
    """The flags of a dataclass, or of an instance, and of the options inside it."""
    kind = run if isinstance(run, type) else type(run)
    texts, annotations = descriptions(kind), typing.get_type_hints(kind, include_extras=True)
    for name, hint in field_types(kind).items():
        path, value = f"{above}{name}", getattr(run, name, dataclasses.MISSING)
        text, here = texts.get(name, ""), topic or _topic(kind, name)
        if ranges := restrictions(annotations[name]):
            text = f"{text} Must {ranges[0].words}."
        head = f"{flag_name(path, value)} {_word(hint)}".rstrip()
        if tyro.conf.Positional in getattr(annotations[name], "__metadata__", ()):
            head = name.upper()
        if not has_flags(value, hint) or hint == Attention:
            yield Flag(path, head, hint, value, text, here)
        if has_flags(value, hint):
            yield from _flags(value, f"{above}{name}.", topic or name.replace("_", "-"))


def _topic(kind: type, name: str) -> str:
    """`TOPIC` of the base class that declares a field."""
    bases = (x for x in reversed(kind.__mro__) if name in vars(x).get("__annotations__", ()))
    return getattr(next(bases), "TOPIC", "")


def _short_entry(flag: Flag) -> str:
    first = re.split(r"(?<=[.;]) ", flag.text)[0].rstrip("; ,.")
    default = "" if flag.default in (None, "", False, (), dataclasses.MISSING) else _default(flag)
    return _entry(flag, f"{first}{f' ({default})' if default else ''}.")


def _whole_entry(flag: Flag) -> str:
    default = "required" if flag.default is dataclasses.MISSING else f"default: {_default(flag)}"
    note = "" if flag.default == () else f" ({default})"
    return _entry(flag, f"{flag.text}{_takes(flag.hint)}{note}")


def _entry(flag: Flag, text: str) -> str:
    head, body = f"  {flag.head}", _wrapped(text, COLUMN)
    return f"{head}\n{body}" if len(head) + 2 > COLUMN else head + body[len(head) :]


def _default(flag: Flag) -> str:
    words = flag.default if isinstance(flag.default, tuple) else (flag.default,)
    if all(isinstance(word, str | Path | int) and word != "" for word in words):
        return " ".join(map(str, words))
    return python_source(flag.default, defaults=False)


def _word(hint: Any) -> str:
    """A word for the value of a flag."""
    members = [x for x in typing.get_args(hint) if x not in (type(None), ...)] or [hint]
    if typing.get_origin(hint) is tuple:
        return f"{_word(members[0])} ..."
    if typing.get_origin(hint) is Literal:
        words = "|".join(map(str, members))
        return words if len(words) < COLUMN else "NAME"
    return WORDS.get(members[0], "OPTION")


def _takes(hint: Any) -> str:
    """A sentence with the values of a flag, if they are a choice."""
    if typing.get_origin(hint) is tuple:
        return _takes(typing.get_args(hint)[0])
    if typing.get_origin(hint) is Literal:
        return f" One of {', '.join(map(str, typing.get_args(hint)))}."
    kinds = allowed_types(AttentionKind if hint == Attention else hint)
    choices = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
    return f" One of {', '.join(map(signature, choices))}." if choices else ""


def _wrapped(text: str, indent: int) -> str:
    margin, columns = " " * indent, min(MAX_WIDTH, shutil.get_terminal_size().columns)
    width = max(columns, indent + COLUMN)
    return textwrap.fill(text, width, initial_indent=margin, subsequent_indent=margin)
