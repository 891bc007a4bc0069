"""Command-line flags from dataclass fields (tyro).

A field that takes one of several option classes is set by a Python expression, as in
``--model.norm "LayerNorm(eps=1e-6)"``; a field with a value per layer takes several. The attention
type is set in the same way, and its fields are flags too. An existing path stands for the option
class that reads it, as in ``--corpus my.txt``.
"""

import dataclasses
import itertools
import re
import shlex
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import tyro

from jaxformer import zoo
from jaxformer.checks import field_types, require
from jaxformer.config import Attention, AttentionKind, from_python, python_source
from jaxformer.config.layer import as_cycle
from jaxformer.config.registry import Option, allowed_types
from jaxformer.config.serialization import repetitions
from jaxformer.data import is_store
from jaxformer.errors import described, did_you_mean, exit_with_error, own_command
from jaxformer.errors import readable_errors as readable_errors
from jaxformer.options import import_from_flags
from jaxformer.run import object_store as stores
from jaxformer.run.beginning import begun_default, completed
from jaxformer.run.help_pages import Flag, asked_topic, flag_name, has_flags, help_page, signature
from jaxformer.run.run_config import RunConfig

RunType = TypeVar("RunType")

LEARNING_RATE = "optimizer.schedule"  # path of the schedule, whose peak it is
RATE_FLAGS = ("--learning-rate", "--lr")
RATE_FLAG = Flag(
    "learning_rate",
    "--learning-rate FLOAT",
    float,
    0.0,
    "Peak of the learning-rate schedule; --lr is the same flag.",
    "optimizer",
)
OTHER_FLAGS = ("--help", "--import")
RESUME_FLAGS = ("--resume", "--resume-or-begin")

registry = tyro.constructors.ConstructorRegistry()


def parse_run(
    runs: Mapping[str, RunType], description: str, arguments: list[str] | None = None
) -> RunType:
    """Parse a run from the command line: ``[NAMED_RUN] [--field value ...]``.

    With --init flags apply to the named run with that model; with --resume, and without a named
    run, to the saved run, so that its flags need not be repeated.

    Args:
        runs: Named runs; the first is the default.
        description: Text printed by --help.
        arguments: Arguments to parse; None means the arguments of the process.

    Returns:
        The named run with its fields replaced. Invalid arguments end the process with a message.
    """
    arguments = import_from_flags(sys.argv[1:] if arguments is None else arguments)
    name = next(iter(runs))
    named = bool(arguments) and not arguments[0].startswith("-")
    if named:
        name, *arguments = arguments
        if name not in runs:
            hint = did_you_mean(name, runs)
            if name in zoo.names():
                hint = (
                    " It is a preset: write its weights by save_pretrained, and pass --init FOLDER."
                )
            exit_with_error(f"There is no named run {name!r}. Named runs: {', '.join(runs)}.{hint}")
    default: Any = runs[name]
    is_new, flags = False, {*_flags_in(arguments)}
    if isinstance(default, RunConfig):
        init, output = (_flag_value(flag, arguments) for flag in ("--init", "--output"))
        folder = None if output is None else Path(output)
        resumes = not named and not flags.isdisjoint(RESUME_FLAGS if output else RESUME_FLAGS[:1])
        default, is_new = begun_default(default, init, folder, resumes=resumes)
    tunes = is_new and flags.isdisjoint({*RATE_FLAGS, flag_name(LEARNING_RATE)})
    program = own_command(type(default).__name__.lower())
    if (topic := asked_topic(arguments)) is not None:
        default = default.tuned() if tunes else default
        schedule = dict(_values_by_path(default)).get(LEARNING_RATE)
        rate = [] if schedule is None else [RATE_FLAG._replace(default=schedule.peak)]
        argument = name if named else "[RUN]" if len(runs) > 1 else ""
        first = f"{program} {argument}".rstrip()
        _print_help(default, topic, rate, program=first, summary=description, runs=runs)
    default, arguments = _choose_learning_rate(default, arguments)
    default, arguments = _choose_attention_type(default, arguments)
    check_flags(default, arguments)
    with registry:
        run = tyro.cli(
            type(default),
            default=default,
            args=arguments,
            prog=f"{program} {name}",
            config=(tyro.conf.AvoidSubcommands,),  # flags for the default's type only
        )
    if not isinstance(run, RunConfig):
        return run
    return completed(run, default, tunes=tunes, keeps_vocabulary="--model.vocab-size" in flags)


def parse_args(
    kind: type[RunType], description: str, arguments: list[str] | None = None
) -> RunType:
    """Parse a dataclass without named runs from the command line; see `parse_run`."""
    arguments = import_from_flags(sys.argv[1:] if arguments is None else arguments)
    names: Any = kind
    program = own_command(kind.__name__.lower())
    if (topic := asked_topic(arguments)) is not None:
        _print_help(kind, topic, program=program, summary=description)
    check_top_flags(map(flag_name, field_types(names)), arguments)
    with registry:
        return tyro.cli(kind, args=arguments, prog=program)


def _print_help(run: Any, *page: Any, summary: str, **text: Any) -> NoReturn:
    """Print a page of the help and end the process."""
    kind = run if isinstance(run, type) else type(run)
    try:
        print(help_page(run, *page, summary=described(summary, kind.__name__.lower()), **text))
    except ValueError as error:
        exit_with_error(str(error))
    sys.exit(0)


def run_program(
    main: Callable[[Any], Any],
    runs: Mapping[str, Any] | type,
    description: str | None,
    arguments: list[str] | None = None,
) -> None:
    """Parse a named run or a dataclass and call `main`; errors of the user print one sentence."""
    with readable_errors():
        parse: Any = parse_args if isinstance(runs, type) else parse_run
        main(parse(runs, description, arguments))


def check_flags(run: Any, arguments: Iterable[str]) -> None:
    """End the process at a flag of a field that does not exist, and list the fields that do."""
    known = {flag_name(path): value for path, value, _ in fields_by_path(run)}
    rates = RATE_FLAGS if flag_name(LEARNING_RATE) in known else ()
    check_top_flags([*known, *rates], arguments)
    for flag in _flags_in(arguments):
        above, _, name = flag.rpartition(".")
        if not above or {flag, f"{above}.{name.removeprefix('no-')}"} & known.keys():
            continue
        if above not in known:
            hint = did_you_mean(flag, known)
            exit_with_error(f"There is no flag {flag}.{hint} --help all lists all flags.")
        if below := [other for other in known if other.rpartition(".")[0] == above]:
            hint = did_you_mean(name, [other.rpartition(".")[2] for other in below])
            if f"--{name}" in rates or (not hint and did_you_mean(f"--{name}", rates)):
                hint = " Pass --learning-rate."
            exit_with_error(f"There is no flag {flag}.{hint} Flags of {above}: {', '.join(below)}.")
        whole = shlex.join(_flag_tokens(above[2:], known[above]))
        exit_with_error(f"There is no flag {flag}. Pass {above} as one value, as in {whole}")


def check_top_flags(known: Iterable[str], arguments: Iterable[str]) -> None:
    """End the process at a flag without a dot that does not exist, and name similar ones."""
    names = {*known, *OTHER_FLAGS}
    for flag in _flags_in(arguments):
        if "." in flag or {flag, f"--{flag.removeprefix('--no-')}"} & names:
            continue
        below = [other for other in names if other.endswith(f".{flag[2:]}")]
        hint = (
            f" Did you mean {' or '.join(sorted(below))}?" if below else did_you_mean(flag, names)
        )
        exit_with_error(f"There is no flag {flag}.{hint} --help all lists all flags.")


def _flags_in(arguments: Iterable[str]) -> Iterator[str]:
    """The names of the flags among arguments."""
    for argument in arguments:
        name = argument.partition("=")[0]
        if re.fullmatch(r"--[a-zA-Z][\w.-]*", name):  # else it is a value such as "-- a"
            yield name.replace("_", "-")


def fields_by_path(config: Any, above: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted path, value and type of the fields of a dataclass, and of fields inside its fields."""
    for name, hint in field_types(config.__class__).items():
        value = getattr(config, name)
        yield f"{above}{name}", value, hint
        if has_flags(value, hint):
            yield from fields_by_path(value, f"{above}{name}.")


def with_field(config: Any, path: str, value: Any) -> Any:
    """A dataclass with another value of the field at a dotted path."""
    name, _, rest = path.partition(".")
    changed = with_field(getattr(config, name), rest, value) if rest else value
    return dataclasses.replace(config, **{name: changed})


def changed_flags(value: Any, baseline: Any, path: str = "") -> dict[str, list[str]]:
    """The flags that turn `baseline` into `value`, keyed by field path."""
    changed = dict[str, list[str]]()
    for name, hint in field_types(value.__class__).items():
        new, old, field_path = getattr(value, name), getattr(baseline, name), f"{path}{name}"
        if has_flags(new, hint) and type(new) is type(old):
            changed |= changed_flags(new, old, f"{field_path}.")
        elif new != old:
            changed[field_path] = _flag_tokens(field_path, new)
    return changed


def _flag_tokens(path: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        above, dot, name = path.rpartition(".")
        return [flag_name(path if value else f"{above}{dot}no-{name}")]
    values = value if isinstance(value, tuple) else (value,)
    source = python_source(values, defaults=False)
    if any(count > 1 for _, count in repetitions(values)):
        return [flag_name(path), _quoted(source)]
    texts = (
        str(x) if isinstance(x, str | Path) else _quoted(python_source(x, defaults=False))
        for x in values
    )
    return [flag_name(path), *texts]


def _flag_value(flag: str, arguments: list[str]) -> str | None:
    """The value of a flag, or None where the flag is absent or its value is None."""
    for argument, following in itertools.zip_longest(arguments, arguments[1:]):
        name, is_one, value = argument.partition("=")
        if name == flag:
            value = value if is_one else following
            return None if value == "None" else value
    return None


def _choose_learning_rate(run: RunType, arguments: list[str]) -> tuple[RunType, list[str]]:
    """Apply --learning-rate or --lr, the peak of the schedule; also return the other arguments."""
    values, other_arguments, remaining = dict(_values_by_path(run)), list[str](), iter(arguments)
    if LEARNING_RATE not in values:
        return run, arguments
    for argument in remaining:
        flag, _, text = argument.partition("=")
        if flag.replace("_", "-") not in RATE_FLAGS:
            other_arguments.append(argument)
            continue
        if flag_name(LEARNING_RATE) in _flags_in(arguments):
            exit_with_error(
                f"{flag} and {flag_name(LEARNING_RATE)} both set the learning rate; pass one."
            )
        text = text or next(remaining, "nothing")
        try:
            rate = float(text)
        except ValueError:
            exit_with_error(f"{flag} must be a number, such as 1e-4; got {text!r}.")
        schedule = dataclasses.replace(values[LEARNING_RATE], peak=rate)
        run = with_field(run, LEARNING_RATE, schedule)
    return run, other_arguments


def _values_by_path(config: Any) -> Iterator[tuple[str, Any]]:
    return ((path, value) for path, value, _ in fields_by_path(config))


def _choose_attention_type(run: RunType, arguments: list[str]) -> tuple[RunType, list[str]]:
    """Apply the attention type that a flag names; also return the other arguments."""
    path = next((path for path, _, hint in fields_by_path(run) if hint == Attention), None)
    if path is None:
        return run, arguments
    flag, other_arguments, remaining = flag_name(path), list[str](), list(arguments)
    while remaining:
        name, _, text = remaining[0].partition("=")
        if name != flag:
            other_arguments.append(remaining.pop(0))
            continue
        count = next((i for i, x in enumerate(remaining) if i and x.startswith("--")), None)
        texts = [text, *remaining[1:count]] if text else remaining[1:count] or ["nothing"]
        remaining = [] if count is None else remaining[count:]
        kinds = _parse_choices(texts, allowed_types(AttentionKind))
        run = with_field(run, path, kinds if len(kinds) > 1 else kinds[0])
    return run, other_arguments


@registry.primitive_rule
def choice_rule(info: tyro.constructors.PrimitiveTypeInfo):
    """Tyro rule that reads a union of option classes, or a tuple of them, from their repr."""
    several = typing.get_origin(info.type) is tuple
    hint = typing.get_args(info.type)[0] if several else info.type
    kinds = allowed_types(hint)
    members = typing.get_args(hint) or (hint,)
    # A protocol without an imported option is no dataclass, but a choice.
    protocols = [m for m in members if isinstance(m, type) and issubclass(m, Option)]
    is_one_class = kinds == (hint,) and not several  # its fields are flags
    is_choice = protocols or any(map(dataclasses.is_dataclass, kinds))
    if hint == Attention or is_one_class or not is_choice:
        return None

    def read(texts: list[str]) -> Any:
        return _parse_choices(texts, kinds) if several else _parse_choice(texts[0], kinds)

    def fits(value: Any) -> bool:
        if several:
            return isinstance(value, tuple) and all(isinstance(item, kinds) for item in value)
        return isinstance(value, kinds)

    empty_protocols = [p for p in protocols if not any(issubclass(k, p) for k in kinds)]
    names = "|".join(map(signature, (*empty_protocols, *kinds)))
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*" if several else 1,
        metavar=f"{names} ..." if several else names,
        instance_from_str=read,
        is_instance=fits,
        str_from_instance=lambda value: [_quoted(repr(v)) for v in (value if several else [value])],
    )


@registry.primitive_rule
def path(info: tyro.constructors.PrimitiveTypeInfo):
    """Tyro rule that reads a local path or the address of an object store."""
    optional = info.type == Path | None
    if not optional and info.type is not Path:
        return None

    def read(texts: list[str]) -> Path | None:
        if optional and texts == ["None"]:
            return None
        if texts == [""]:
            raise ValueError("a path must not be empty; got ''.")
        stores.storage_path(Path(texts[0]))
        return Path(texts[0])

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="{None}|PATH" if optional else "PATH",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, Path) or (optional and value is None),
        str_from_instance=lambda value: [str(value)],
    )


def _parse_choice(text: str, kinds: tuple[type, ...]) -> Any:
    path_types = [k for k in kinds if "path" in getattr(k, "__dataclass_fields__", ())]
    named = dataclasses_by_name(kinds)
    if path_types and text not in named:
        if is_store(text) or Path(text).expanduser().exists():
            return path_types[0](path=text)
        require("(" in text, f"There is no file or folder {text!r}.")
    return _check_choice(from_python(text, named), text, kinds)


def _parse_choices(texts: Iterable[str], kinds: tuple[type, ...]) -> tuple[Any, ...]:
    """Parse options, and tuples of options such as "(MLP(hidden_dim=64),) * 3"."""
    named, values = dataclasses_by_name(kinds), list[Any]()
    for text in texts:
        is_tuple = text.startswith("(")
        items = from_python(text, named) if is_tuple else (_parse_choice(text, kinds),)
        values += (_check_choice(x, text, kinds) for x in as_cycle(items))
    return tuple(values)


def _check_choice(value: Any, text: str, kinds: tuple[type, ...]) -> Any:
    names = ", ".join(map(signature, kinds))
    require(isinstance(value, kinds), f"{text!r} is not one of {names}.")
    return value


def _quoted(text: str) -> str:
    """Python text in double quotes, which a shell keeps within single ones."""
    return text if '"' in text else text.replace("'", '"')


def dataclasses_by_name(hints: Iterable[Any]) -> dict[str, type]:
    """All dataclasses among these types and their fields' types, keyed by name."""
    by_name: dict[str, type] = {}
    pending = list(hints)
    while pending:
        hint = pending.pop()
        is_class = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        if is_class and hint not in by_name.values():
            by_name[hint.__name__] = hint
            pending += field_types(hint).values()
        pending += [arg for arg in typing.get_args(hint) if not isinstance(arg, str)]
        pending += [kind for kind in allowed_types(hint) if kind is not hint]
    return by_name
