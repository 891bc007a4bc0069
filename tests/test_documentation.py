"""Docstrings: examples run, public names are explained, and the reference has them all."""

import ast
import doctest
import html
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
from operator import attrgetter
from pathlib import Path

import pytest

import jaxformer

ROOT = Path(jaxformer.__file__).parents[1]
WITH_EXAMPLES = {
    "config.TransformerConfig",
    "config.TransformerConfig.with_rope_scaling",
    "costs.cache_bytes",
    "costs.parameters",
    "functional.alibi_bias",
    "functional.alibi_slopes",
    "functional.attend",
    "functional.batch_norm",
    "functional.bilinear",
    "functional.blockwise_attention",
    "functional.causal_mask",
    "functional.cross_entropy",
    "functional.decay_attention",
    "functional.dot_product_attention",
    "functional.geglu",
    "functional.gelu",
    "functional.glu",
    "functional.keep_top_p",
    "functional.layer_norm",
    "functional.linear_cross_entropy",
    "functional.linear_recurrence",
    "functional.prefix_mask",
    "functional.relative_position_buckets",
    "functional.relu_squared",
    "functional.ring_order",
    "functional.rms_norm",
    "functional.rope_frequencies",
    "functional.rope_rotations",
    "functional.rotate",
    "functional.segment_mask",
    "functional.silu",
    "functional.sinusoidal_positions",
    "functional.swiglu",
    "functional.window_mask",
    "generate",
    "load_pretrained",
    "zoo.get",
    "zoo.names",
    "zoo.survey",
}


def docstrings():
    """Every docstring of the package by the name of what it explains, with its file and line."""
    for path in sorted((ROOT / "jaxformer").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        pending = [(module, ast.parse(path.read_text()))]
        while pending:
            name, node = pending.pop()
            if text := ast.get_docstring(node):
                first = node.body[0]
                yield name, text, path, first.lineno
            pending += [
                (f"{name}.{inner.name}", inner)
                for inner in node.body
                if isinstance(inner, ast.ClassDef | ast.FunctionDef)
            ]


EXAMPLES = {
    name: example
    for name, text, path, line in docstrings()
    if (example := doctest.DocTestParser().get_doctest(text, {}, name, str(path), line)).examples
}


def public_names(module):
    """The names of a package that its ``__init__`` passes on, or ``__all__``, by their objects."""
    package = importlib.import_module(module)
    names = getattr(package, "__all__", None) or [
        alias.name
        for node in ast.parse(inspect.getsource(package)).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    ]
    return {name: inspect.unwrap(getattr(package, name)) for name in names}


def packages():
    """The public packages that pass on names; the top-level one too."""
    found = [m.name for m in pkgutil.iter_modules(jaxformer.__path__, "jaxformer.") if m.ispkg]
    return [name for name in ["jaxformer", *found] if public_names(name)]


PUBLIC = {
    f"{package}.{name}": thing
    for package in packages()
    for name, thing in public_names(package).items()
    if inspect.isfunction(thing) or inspect.isclass(thing)
}


def text_of(name):
    return inspect.cleandoc(PUBLIC[name].__doc__ or "")


def section(text, heading):
    """The lines under a heading of a docstring; nothing where there is none."""
    found = re.search(rf"^{heading}:\n((?:    .*\n?|\n)*)", text, re.M)
    return found[1] if found else ""


def equations(text):
    """The indented blocks before the first heading."""
    before = re.split(r"^[A-Z][a-z]+:$", text, maxsplit=1, flags=re.M)[0]
    return [
        textwrap.dedent(block).rstrip() for block in re.findall(r"\n\n((?: {4}.*\n?)+)", before)
    ]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_give_what_they_say(name):
    told = []
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(EXAMPLES[name], out=told.append)
    assert not runner.failures, "".join(told)


def test_what_people_call_first_has_an_example():
    things = {name: inspect.unwrap(attrgetter(name)(jaxformer)) for name in WITH_EXAMPLES}
    homes = {name: f"{thing.__module__}.{thing.__qualname__}" for name, thing in things.items()}
    assert not [name for name, home in homes.items() if home not in EXAMPLES]


def test_the_packages_that_we_know_are_found():
    known = {"functional", "config", "zoo", "costs", "layers", "generation", "parallel"}
    known |= {"data", "interop", "inspect"}
    assert {"jaxformer", *(f"jaxformer.{name}" for name in known)} <= set(packages())


def test_the_first_line_of_a_public_name_is_a_sentence():
    firsts = {name: text_of(name).partition("\n") for name in PUBLIC}
    wrong = {
        name: first
        for name, (first, _, rest) in firsts.items()
        if not first.endswith(".") or len(first.split()) < 2 or rest.strip("\n") == rest != ""
    }
    assert not wrong


def test_functions_explain_each_argument_and_what_they_return():
    wrong = []
    for name, thing in PUBLIC.items():
        if inspect.isfunction(thing):
            signature, text = inspect.signature(thing), text_of(name)
            explained = re.findall(r"^ {4}\**(\w+): ", section(text, "Args"), re.M)
            returns = bool(section(text, "Returns"))
            gives = signature.return_annotation not in (None, "None")
            if explained != list(signature.parameters) or returns != gives:
                wrong.append((name, explained, returns))
    assert not wrong


def words(page):
    """What a browser shows of a page, its blanks as they are."""
    return html.unescape(re.sub(r"<[^>]*>", "", page))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The reference as its command writes it, with warnings as errors."""
    folder = tmp_path_factory.mktemp("reference")
    command = [sys.executable, "-W", "error", "-m", "experiments.reference", str(folder)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return folder


@pytest.fixture(scope="module")
def entries(reference):
    """What the reference says: of each public name, its signature and its text."""
    found = {}
    for module in packages():
        page = (reference / f"{module.replace('.', '/')}.html").read_text()
        for name, entry in re.findall(r'<section id="([^"]+)">(.*?)</section>', page, re.S):
            line = re.search(r'<div class="attr \w+">(.*?)<label', entry, re.S)
            _, _, text = entry.partition('<div class="docstring">')
            found[f"{module}.{name}"] = words(line[1]) if line else "", words(text)
    return found


def test_the_reference_has_every_public_name_with_its_text(entries):
    every = {f"{package}.{name}" for package in packages() for name in public_names(package)}
    assert every == set(entries)
    firsts = {name: text_of(name).partition("\n")[0].replace("`", "") for name in PUBLIC}
    assert not [name for name, first in firsts.items() if not entries[name][1].startswith(first)]


def test_the_reference_has_every_module_of_a_package_that_passes_on_nothing(reference):
    modules = {module.name for module in pkgutil.iter_modules(jaxformer.training.__path__)}
    assert modules == {page.stem for page in (reference / "jaxformer/training").glob("*.html")}


def test_the_reference_prints_annotations_as_they_were_written(entries):
    line, _ = entries["jaxformer.functional.rms_norm"]
    assert 'x: Float[Array, "*batch D"],' in line
    assert 'scale: Float[Array, "*heads D"] | None = None,' in line
    assert line.rstrip().endswith('-> Float[Array, "*batch D"]:')
    line, _ = entries["jaxformer.generate"]
    assert "config: TransformerConfig" in line and "dtype: DTypeLike = jax.numpy.float32" in line


def test_the_reference_keeps_equations_and_examples(entries):
    for name in PUBLIC:
        for equation in equations(text_of(name)):
            assert equation in entries[name][1], name
        if example := section(text_of(name), "Example"):
            assert textwrap.dedent(example).rstrip() in entries[name][1], name


def test_the_reference_needs_no_network(reference):
    loaded = r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="(?:https?:)?//'
    assert not [page for page in reference.rglob("*.html") if re.search(loaded, page.read_text())]
