"""Sandboxed Jinja for chat templates, compatible with transformers, with limits on time and size.

Imported only if ``jinja2`` is installed.
"""

import json
import time
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateRuntimeError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS = 10.0  # CPU time of one rendering
MAX_ITEMS = 10**7  # rendered characters; items of a result of *; bits of a result of **
DEADLINE, BRACKETS = "the deadline", "the brackets"  # not valid as names in a template


class _Generation(Extension):
    """The tag ``{% generation %}``, which ends at ``{% endgeneration %}``."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        mark = self.call_method("_mark", [nodes.ContextReference()])
        return nodes.CallBlock(mark, [], [], body).set_lineno(line)

    def _mark(self, context: Context, caller: Any) -> str:
        begin, end = context.parent[BRACKETS]
        return f"{begin}{caller()}{end}"


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja environment with the names of transformers and limits on time and size."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        """Define the extensions, filters and functions of transformers."""
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.filters["tojson"] = _to_json
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def compile_bounded(self, source: str) -> Template:
        """Compile a template whose loops check the time limit.

        Raises:
            Exception: Of any type, if the template is invalid.
        """
        tree = self.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            step = nodes.EnvironmentAttribute("step")
            call = nodes.Call(step, [], [], None, None).set_lineno(loop.lineno)
            loop.body.insert(0, nodes.ExprStmt(call).set_lineno(loop.lineno))
            if loop.test is not None:
                loop.test = nodes.And(call, loop.test).set_lineno(loop.lineno)
        tree.set_environment(self)
        return self.from_string(tree)

    def chunks(
        self, template: Template, *, brackets: tuple[str, str] = ("", ""), **names: Any
    ) -> list[str]:
        """The rendered text, in chunks.

        Args:
            template: From `compile_bounded`.
            brackets: Texts before and after what the template marks by ``{% generation %}``.
            **names: Variables of the template.

        Raises:
            Exception: Of any type, if the template fails.
        """
        end = time.thread_time() + MAX_SECONDS
        chunks, size = list[str](), 0
        for chunk in template.generate(**names, **{DEADLINE: end, BRACKETS: brackets}):
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_ITEMS:
                raise TemplateRuntimeError(f"it renders more than {MAX_ITEMS} characters")
        return chunks

    def step(self) -> bool:
        """Called by every iteration of a loop, so that `call` checks the time limit."""
        return True

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of a template, within the time limit."""
        if time.thread_time() > context.parent[DEADLINE]:
            raise TemplateRuntimeError(f"it runs for more than {MAX_SECONDS:g} seconds")
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply * or ** of a template, if the result is not too large."""
        for number, other in ((left, right), (right, left)):
            if not isinstance(number, int):
                continue
            if isinstance(other, (str, list, tuple)) and number * len(other) > MAX_ITEMS:
                raise TemplateRuntimeError(f"it repeats {len(other)} items {number} times")
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > MAX_ITEMS:
                raise TemplateRuntimeError(f"it computes a power of more than {MAX_ITEMS} bits")
        return super().call_binop(context, operator, left, right)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes it for HTML and sorts its keys."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRuntimeError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
