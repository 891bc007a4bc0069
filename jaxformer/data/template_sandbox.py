"""The Jinja that chat templates are written in, as transformers has it, in a sandbox that ends.

It is imported where ``jinja2`` is known to be installed.
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

MAX_SECONDS = 10.0  # of a processor, for one rendering
MAX_ITEMS = 10**7  # characters written; of a text or list that * makes; bits that ** makes
DEADLINE, BRACKETS = "the deadline", "the brackets"  # no names that a template can spell


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
    """What a template may name, and for how long it may run."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        """Define what transformers defines."""
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.filters["tojson"] = _to_json
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def compile_bounded(self, source: str) -> Template:
        """Compile a template each of whose loops looks at the clock.

        Raises:
            Exception: Of any type; it is no template.
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
        """The text that a template writes, in the parts it is written in.

        Args:
            template: What `compile_bounded` gave.
            brackets: What stands around all that the template marks as the assistant's.
            **names: What the template may name.

        Raises:
            Exception: Of any type; the template fails.
        """
        end = time.thread_time() + MAX_SECONDS
        chunks, size = list[str](), 0
        for chunk in template.generate(**names, **{DEADLINE: end, BRACKETS: brackets}):
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_ITEMS:
                raise TemplateRuntimeError(f"it writes more than {MAX_ITEMS} characters")
        return chunks

    def step(self) -> bool:
        """What every turn of a loop calls; `call` looks at the clock."""
        return True

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call something for a template."""
        if time.thread_time() > context.parent[DEADLINE]:
            raise TemplateRuntimeError(f"it has run for {MAX_SECONDS:g} seconds without an end")
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Multiply or raise for a template, unless that could take all memory or time."""
        for number, other in ((left, right), (right, left)):
            if not isinstance(number, int):
                continue
            if isinstance(other, (str, list, tuple)) and number * len(other) > MAX_ITEMS:
                raise TemplateRuntimeError(f"it repeats {len(other)} items {number} times")
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > MAX_ITEMS:
                raise TemplateRuntimeError("it raises a number to too high a power")
        return super().call_binop(context, operator, left, right)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, where Jinja's own filter escapes it for HTML and sorts its keys."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRuntimeError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
