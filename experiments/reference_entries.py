"""What the reference says: pages of public names, with annotations, equations and examples.

A package that passes on names is one page of them; one that does not, a page for each module.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Literal, get_origin

from pdoc import doc

import jaxformer
from experiments.mathematics import to_mathml

# Headings of groups, by the module that defines a name; others are called after their module.
GROUPS = {
    "linear": "Linear maps", "embeddings": "Embeddings", "norms": "Norms",
    "activations": "Activations and gates", "attention": "Attention", "blockwise": "Attention",
    "implementations": "Attention", "kernels": "Attention", "scores": "Attention",
    "online_softmax": "Attention",
    "ring": "Attention", "latent": "Latent attention (MLA)", "decay": "Decaying attention",
    "recurrence": "Decaying attention", "masks": "Masks and biases",
    "by_position": "Masks and biases", "positions": "Positions", "position": "Positions",
    "rope": "Rotary positions (RoPE)", "rope_scaling": "Rotary positions (RoPE)",
    "experts": "Mixture of experts", "losses": "Losses", "linear_losses": "Losses",
    "sampling": "Sampling", "slots": "KV cache", "cache": "KV cache",
    "collectives": "Collectives",
}  # fmt: skip
FEW = 12  # names of a page, up to which it has no groups


class Written(str):
    """Source text; its repr is itself, as `inspect.Signature` prints annotations."""

    __repr__ = str.__str__


def pages() -> dict[str, doc.Module]:
    """A page for each public module by its name, with annotations and examples ready to print."""
    top = _page(jaxformer)
    found = {top.modulename: top}
    for module in _inside(jaxformer):
        page = _page(module)
        top.submodules.append(page)
        found[page.modulename] = page
        if not page.members:
            page.submodules = [_page(inner) for inner in _inside(module)]
            found |= {inner.modulename: inner for inner in page.submodules}
    homes = {
        id(value): f"{module}.{name}"
        for module, page in found.items()
        for name in page.members
        if not isinstance(value := getattr(page.obj, name), int | float | str | tuple)
    }
    with warnings.catch_warnings():  # of what pdoc makes of annotations, which is not printed
        warnings.filterwarnings("ignore", "Error parsing type annotation")
        for page in found.values():
            for member in page.members.values():
                _prepare(member, homes)
    return found


def _inside(package: ModuleType) -> Iterator[ModuleType]:
    """The modules of a package, but for its commands."""
    for found in pkgutil.iter_modules(getattr(package, "__path__", ())):
        if not found.name.startswith("_"):
            yield importlib.import_module(f"{package.__name__}.{found.name}")


def _page(module: ModuleType) -> doc.Module:
    """A module as its users see it: what it passes on is its own, and how it does so is hidden."""
    view = ModuleType(module.__name__, module.__doc__)
    names = getattr(module, "__all__", None) or list(_public_names(module))
    vars(view).update({name: _bare(getattr(module, name)) for name in names}, __all__=names)
    page = doc.Module(view)
    page.submodules = []
    return page


def _bare(thing: Any) -> Any:
    """The function inside one that JAX has wrapped."""
    return thing if inspect.isclass(thing) else inspect.unwrap(thing)


def _public_names(module: ModuleType) -> Iterator[str]:
    """What a module defines, or passes on by ``from x import name as name``."""
    names: list[str | None]
    for node in ast.parse(inspect.getsource(module)).body:
        match node:
            case ast.ImportFrom(names=aliases):
                names = [alias.name for alias in aliases if alias.asname == alias.name]
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names = [name]
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names = [name]
            case _:
                continue
        yield from (name for name in names if name and not name.startswith("_"))


def _prepare(member: doc.Doc, homes: Mapping[int, str]) -> None:
    """Give an entry the annotations that its source has, and its examples colours."""
    if isinstance(member, doc.Function):
        member.signature = _signature(member, _annotations_of_function(member.obj, homes))
    elif isinstance(member, doc.Class):
        fields = _annotations_of_class(member.obj, homes)
        methods = {x.name for x in _body(member.obj) if isinstance(x, ast.FunctionDef)}
        names = {*fields, *methods, "__init__"}  # what Flax or a decorator adds is not ours to tell
        own = [inner for inner in member.own_members if inner.name in names]
        vars(member).update(members={x.name: x for x in own}, own_members=own, inherited_members={})
        for inner in own:
            if inner.name in fields:
                inner.docstring = "@private"  # the class tells of them
            elif inner.name in methods:
                _prepare(inner, homes)
                inner.docstring += "\n\n@public" if inner.name == "__call__" else ""
            elif isinstance(inner, doc.Function):
                inner.signature = _signature(inner, fields, only=True)
                inner.docstring = ""
    member.docstring = with_equations(member.docstring)
    member.docstring = with_arxiv_links(member.docstring)
    member.docstring = re.sub(
        r"^Example:\n((?:    .*\n|\n)*    .*)$", _coloured, member.docstring, flags=re.M
    )


def with_equations(text: str) -> str:
    """Typeset the indented blocks before the first heading of a docstring that are equations."""
    heading = re.search(r"^[A-Z][a-z]+:$", text, re.M)
    end = heading.start() if heading else len(text)
    return re.sub(r"(?<=\n\n)((?: {4}.*(?:\n|$))+)", _typeset, text[:end]) + text[end:]


def _typeset(block: re.Match[str]) -> str:
    typeset = to_mathml(textwrap.dedent(block[1]).rstrip())
    return block[1] if typeset is None else f'<div class="equation">{typeset}</div>\n'


def with_arxiv_links(text: str) -> str:
    """Make links of arXiv's numbers in Markdown, where they are not in links already."""
    number = r"(?<!\[)\barXiv:(\d{4}\.\d{4,5})"
    return re.sub(number, r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def groups(page: doc.Module) -> list[tuple[str, list[doc.Doc]]]:
    """The names of a page with a heading for each group; without, where they are few."""
    members = list(page.flattened_own_members)
    if len(members) <= FEW:
        return [("", members)] if members else []
    found: dict[str, list[doc.Doc]] = {}
    homes = _defined_in(page.modulename)
    for member in members:
        home = homes.get(member.name, page.modulename).rpartition(".")[2]
        title = GROUPS.get(home, home.replace("_", " ").capitalize())
        found.setdefault(title, []).append(member)
    order = [*dict.fromkeys(GROUPS.values()), *found]
    return sorted(found.items(), key=lambda group: order.index(group[0]))


def _defined_in(module: str) -> dict[str, str]:
    """The module that each name of a package comes from."""
    return {
        alias.asname or alias.name: node.module
        for node in ast.parse(inspect.getsource(sys.modules[module])).body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def _coloured(example: re.Match[str]) -> str:
    lines = textwrap.dedent(example[1])
    return f"###### Example:\n\n```pycon\n{lines}\n```\n"


def _signature(
    function: doc.Function, annotations: Mapping[str, Written], *, only: bool = False
) -> inspect.Signature:
    """The signature with these annotations, and `only` the parameters that have one or are self."""
    signature = inspect.signature(function.obj)
    parameters = [
        parameter.replace(
            annotation=annotations.get(name, inspect.Parameter.empty),
            default=_default(parameter.default),
        )
        for i, (name, parameter) in enumerate(signature.parameters.items())
        if not only or i == 0 or name in annotations
    ]
    returned = annotations.get("return", inspect.Parameter.empty)
    return signature.replace(parameters=parameters, return_annotation=returned)


def _default(value: Any) -> Any:
    """A class by its name."""
    if inspect.isclass(value) and value is not inspect.Parameter.empty:
        return Written(f"{value.__module__}.{value.__qualname__}")
    return value


def _annotations_of_function(function: Any, homes: Mapping[int, str]) -> dict[str, Written]:
    node: Any = _source(function)
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [a for a in (arguments.vararg, arguments.kwarg) if a]
    found = {a.arg: a.annotation for a in every} | {"return": node.returns}
    return {name: _text(x, function.__module__, homes) for name, x in found.items() if x}


def _annotations_of_class(cls: type, homes: Mapping[int, str]) -> dict[str, Written]:
    """Those of the fields, also of the classes above it that are ours."""
    return {
        node.target.id: _text(node.annotation, each.__module__, homes)
        for each in reversed(cls.__mro__)
        if each.__module__.startswith(f"{jaxformer.__name__}.")
        for node in _body(each)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _body(cls: type) -> list[ast.stmt]:
    return _source(cls).body


def _source(thing: Any) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(thing)))).body[0]


def _text(annotation: ast.expr, module: str, homes: Mapping[int, str]) -> Written:
    """An annotation as it was written, with public names in full, so that they become links."""
    scope = vars(sys.modules[module])

    class InFull(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:  # noqa: N802
            value = scope.get(node.id)
            if id(value) in homes:
                return ast.Name(homes[id(value)])
            # A set of words that has no entry of its own.
            return ast.Name(f"{value}".split(".", 1)[1]) if get_origin(value) is Literal else node

        def visit_Attribute(self, node: ast.Attribute) -> ast.expr:  # noqa: N802
            match node.value:
                case ast.Name(id=name) if isinstance(scope.get(name), ModuleType):
                    home = homes.get(id(getattr(scope[name], node.attr, None)))
                    return ast.Name(home) if home else node
            return node

    return Written(ast.unparse(InFull().visit(annotation)).replace("'", '"'))
