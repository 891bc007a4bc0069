"""Docstrings: examples run, public names are explained, and the reference has them all."""

import ast
import doctest
import html
import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
from operator import attrgetter
from pathlib import Path
from xml.etree import ElementTree

import pytest

import jaxformer
from experiments import guide_pages
from experiments.mathematics import to_mathml

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
@pytest.mark.slow(but=["jaxformer.functional.norms.rms_norm", "jaxformer.functional.rope.rotate"])
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


@pytest.mark.slow
def test_the_reference_has_every_public_name_with_its_text(entries):
    every = {f"{package}.{name}" for package in packages() for name in public_names(package)}
    assert every == set(entries)
    firsts = {name: text_of(name).partition("\n")[0].replace("`", "") for name in PUBLIC}
    assert not [name for name, first in firsts.items() if not entries[name][1].startswith(first)]


@pytest.mark.slow
def test_the_reference_has_every_module_of_a_package_that_passes_on_nothing(reference):
    modules = {module.name for module in pkgutil.iter_modules(jaxformer.training.__path__)}
    assert modules == {page.stem for page in (reference / "jaxformer/training").glob("*.html")}


@pytest.mark.slow
def test_the_reference_prints_annotations_as_they_were_written(entries):
    line, _ = entries["jaxformer.functional.rms_norm"]
    assert 'x: Float[Array, "*batch D"],' in line
    assert 'scale: Float[Array, "*heads D"] | None = None,' in line
    assert line.rstrip().endswith('-> Float[Array, "*batch D"]:')
    line, _ = entries["jaxformer.generate"]
    assert "config: TransformerConfig" in line and "dtype: DTypeLike = jax.numpy.float32" in line


@pytest.mark.slow
def test_the_reference_keeps_equations_and_examples(entries):
    for name in PUBLIC:
        for equation in equations(text_of(name)):
            assert equation in entries[name][1], name
        if example := section(text_of(name), "Example"):
            assert textwrap.dedent(example).rstrip() in entries[name][1], name


@pytest.mark.slow
def test_the_documentation_needs_no_network(pages):
    loaded = r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="(?:https?:)?//|url\((?:https?:)?//'
    assert not [page for page, text in pages.items() if re.search(loaded, text)]


@pytest.fixture(scope="module")
def pages(reference):
    return {path.resolve(): path.read_text() for path in reference.rglob("*.html")}


@pytest.mark.slow
def test_links_inside_the_documentation_lead_somewhere(pages):
    ids = {page: set(re.findall(r'\bid="([^"]*)"', text)) for page, text in pages.items()}
    broken = []
    for page, text in pages.items():
        body = re.sub(r"<script>.*?</script>", "", text, flags=re.S)
        for link in re.findall(r'<(?:a|img)\b[^>]*?(?:href|src)="([^"]*)"', body):
            path, _, anchor = html.unescape(link).partition("#")
            if path.startswith(("https://", "data:")):
                continue
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in ids.get(target, {anchor})):
                broken.append((page.name, link))
    assert sum(text.count("<a ") for text in pages.values()) > 1000 and not broken


@pytest.mark.slow
def test_the_documentation_has_every_guide_and_they_are_listed_on_each_page(reference, pages):
    guides = {path.stem for path in (ROOT / "experiments" / "guides").glob("*.md")}
    assert guides >= {"index", "train", "devices", "features", "models", "inside", "studies"}
    assert guides == set(guide_pages.NAMES)
    for page, text in pages.items():
        to_root = "../" * (len(page.relative_to(reference.resolve()).parts) - 1)
        for name in guides - {"index"}:
            assert f'href="{to_root}guides/{name}.html"' in text, (page.name, name)


@pytest.mark.slow
def test_equations_are_typeset(pages, reference):
    page = pages[(reference / "jaxformer" / "functional.html").resolve()]
    norm = page.partition('<section id="layer_norm">')[2].partition("</section>")[0]
    assert "<mfrac>" in norm and "<msqrt>" in norm and "<pre><code>    y =" not in norm
    assert page.count('<math display="block">') >= 45


@pytest.mark.parametrize(
    ("equation", "pieces"),
    [
        ("a / b", ["<mfrac><mrow><mi>a</mi></mrow><mrow><mi>b</mi></mrow></mfrac>"]),
        ("x[i]", ["<msub><mrow><mi>x</mi></mrow><mrow><mi>i</mi></mrow></msub>"]),
        ("sum over j <= i of gamma ** j", ["<munder><mo>∑</mo>", "<mo>≤</mo>", "<mi>γ</mi>"]),
        ("y = sqrt(x),    x > 0", ["<msqrt><mi>x</mi></msqrt>", "<mo>&gt;</mo>"]),
        ("y = x        (where seen)", ["<mtext>(where seen)</mtext>"]),
        ("b ** (-j / n)", ["<mo>−</mo><mi>j</mi><mo>/</mo><mi>n</mi></mrow></msup>"]),
        ("loss = z_loss * log_z", ["<mi>z_loss</mi>", "<msub><mi>log</mi><mi>z</mi></msub>"]),
    ],
)
def test_typeset_equations_by_hand(equation, pieces):
    typeset = to_mathml(equation)
    ElementTree.fromstring(typeset.replace("&#160;", " "))  # it is well formed
    for piece in pieces:
        assert piece in typeset
    assert f'<annotation encoding="text/plain">{html.escape(equation, quote=False)}<' in typeset


def test_what_is_no_equation_is_left_as_it_is():
    for text in ('f("x")', "device i of d has parts i", "apply({1: 2}, x)", "a +", "(a"):
        assert to_mathml(text) is None


@pytest.mark.slow
def test_numbers_of_arxiv_are_links(pages):
    linked = r'<a href="https://arxiv.org/abs/(\d{4}\.\d{5})">arXiv:\1</a>'
    without = {}
    for page, text in pages.items():
        source = r'<div class="pdoc-code .*?</pre></div>'
        plain = re.sub(linked, "", re.sub(source, "", text, flags=re.S))
        without[page.name] = re.findall(r"arXiv:\d{4}\.\d{5}", plain)
    assert sum(len(re.findall(linked, text)) for text in pages.values()) > 100
    assert not {name: numbers for name, numbers in without.items() if numbers}


@pytest.mark.slow
def test_functions_stand_in_groups_of_the_field(pages, reference):
    page = pages[(reference / "jaxformer" / "functional.html").resolve()]
    titles = re.findall(r'<h2 class="group"[^>]*>(.*?)</h2>', page)
    wanted = {"Norms", "Activations and gates", "Positions", "Attention", "Losses", "KV cache"}
    assert wanted | {"Rotary positions (RoPE)", "Masks and biases", "Sampling"} <= set(titles)
    parts = re.split(r'<h2 class="group"[^>]*>(.*?)</h2>', page)
    groups = {
        title: re.findall(r'<section id="(\w+)"', x)
        for title, x in zip(titles, parts[2::2], strict=True)
    }
    assert {"layer_norm", "rms_norm", "batch_norm"} <= set(groups["Norms"])
    assert {"cross_entropy", "linear_cross_entropy"} <= set(groups["Losses"])
    assert "cross_entropy" not in groups["Norms"]


def search_index(reference):
    text = (reference / "search.js").read_text()
    start = text.index("const docs = ") + len("const docs = ")
    return json.JSONDecoder().raw_decode(text, start)[0]


@pytest.mark.slow
def test_the_search_knows_the_words_of_the_field(reference):
    index = {entry["fullname"]: entry for entry in search_index(reference)}
    words = guide_pages.glossary()
    assert len(words) >= 60 and set(words) <= set(index)  # every name of the glossary exists
    for word, name in (
        ("rotary", "rotate"),
        ("flash attention", "blockwise_attention"),
        ("SDPA", "dot_product_attention"),
        ("nucleus", "keep_top_p"),
    ):
        known = re.findall(r"\w+", index[f"jaxformer.functional.{name}"]["words"])
        assert set(word.split()) <= set(known), word
    assert '"words": 8' in (reference / "search.js").read_text()  # and looks at them first


@pytest.mark.slow
def test_the_documentation_has_no_names_of_flax(reference, pages):
    own = {"clone", "init_with_output", "lazy_init", "tabulate", "perturb", "sow", "scope"}
    entries = {entry["fullname"].rpartition(".")[2] for entry in search_index(reference)}
    assert "Transformer" in entries and not own & entries
    anchors = {
        identifier.rpartition(".")[2]
        for text in pages.values()
        for identifier in re.findall(r'\bid="([^"]*)"', text)
        if "." in identifier
    }
    assert "Transformer.__call__".rpartition(".")[2] in anchors
    assert not own & anchors and not [t for t in pages.values() if "Inherited Members" in t]
