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
import tokenize
import zlib
from operator import attrgetter
from pathlib import Path

import pytest

import jaxformer

ROOT = Path(jaxformer.__file__).parents[1]
WITH_EXAMPLES = {
    "config.TransformerConfig",
    "config.TransformerConfig.with_rope_scaling",
    "costs.cache_bytes",
    "costs.num_parameters",
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
    "functional.zigzag_order",
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
    "zoo.choices",
    "zoo.get",
    "zoo.mixtures",
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
    names = [m.name for m in pkgutil.iter_modules(jaxformer.__path__, "jaxformer.") if m.ispkg]
    return [name for name in ["jaxformer", *names] if public_names(name)]


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
    match = re.search(rf"^{heading}:\n((?:    .*\n?|\n)*)", text, re.M)
    return match[1] if match else ""


def equations(text):
    """The indented blocks before the first heading."""
    before = re.split(r"^[A-Z][a-z]+:$", text, maxsplit=1, flags=re.M)[0]
    return [
        textwrap.dedent(block).rstrip() for block in re.findall(r"\n\n((?: {4}.*\n?)+)", before)
    ]


def prose():
    """Every page and every file of code that people read."""
    for name in ("README.md", "CONTRIBUTING.md", "experiments/README.md"):
        yield ROOT / name
    yield from (ROOT / "experiments/guides").rglob("*.md")
    for folder in ("jaxformer", "experiments"):
        yield from (ROOT / folder).rglob("*.py")


def count_words(path):
    """Words of a page, or of the docstrings, messages and comments of a file of code."""
    if path.suffix == ".md":
        return len(path.read_text().split())
    kinds = {"STRING", "FSTRING_MIDDLE", "COMMENT"}
    with tokenize.open(path) as file:
        tokens = [*tokenize.generate_tokens(file.readline)]
    texts = [token.string for token in tokens if tokenize.tok_name[token.type] in kinds]
    return sum(len(text.split()) for text in texts if " " in text)


# A comment or a message may go on in the next line.
PRONOUNS = re.compile(
    "|".join(
        rf'\b{first}[\s#"]+(?:f")?{second}\b'
        for first, second in (("(that|those)", "of"), ("of", "which"), ("the", "(former|latter)"))
    ),
    re.I,
)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.slow(but=["jaxformer.functional.norms.rms_norm", "jaxformer.functional.rope.rotate"])
def test_examples_give_what_they_say(name):
    output = []
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(EXAMPLES[name], out=output.append)
    assert not runner.failures, "".join(output)


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


def test_sentences_repeat_the_noun():
    """At most 6 of 10,000 words stand for a noun that the reader has to look for."""
    words, places = sum(map(count_words, prose())), []
    for path in prose():
        text = path.read_text()
        for match in PRONOUNS.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            places.append(f"{path.relative_to(ROOT)}:{line} {match[0]}")
    assert 10_000 * len(places) <= 6 * words, "\n".join(places)


def test_the_page_of_functions_lists_each_function_once():
    page = (ROOT / "experiments/guides/reference/functional.md").read_text()
    listed = re.findall(r"^\.\. auto\w+:: jaxformer\.functional\.(\w+)$", page, re.M)
    assert sorted(listed) == sorted(public_names("jaxformer.functional"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The documentation as its command writes it, with warnings as errors."""
    folder = tmp_path_factory.mktemp("documentation")
    command = ["-q", "-W", "-c", "experiments/guides", ".", str(folder)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run(
        [sys.executable, "-m", "sphinx", *command], cwd=ROOT, env=environment, check=True
    )
    return folder


@pytest.fixture(scope="module")
def names(site):
    """Everything that the reference has an entry of."""
    lines = zlib.decompress((site / "objects.inv").read_bytes().split(b"zlib.\n", 1)[1]).decode()
    return {line.split()[0] for line in lines.splitlines() if line.split()[1].startswith("py:")}


@pytest.mark.slow
def test_the_reference_has_every_public_name_and_none_of_flax(names):
    every = {f"{package}.{name}" for package in packages() for name in public_names(package)}
    elsewhere = {"RotaryEmbedding", "Transformer", "TransformerConfig"}  # which the page says
    assert not every - {f"jaxformer.{name}" for name in elsewhere} - names
    modules = {module.name for module in pkgutil.iter_modules(jaxformer.training.__path__)}
    assert {f"jaxformer.training.{name}" for name in modules} <= names
    flax_names = {"clone", "init_with_output", "lazy_init", "tabulate", "perturb", "sow", "scope"}
    assert not flax_names & {name.rpartition(".")[2] for name in names}
    assert "jaxformer.layers.Transformer.__call__" in names


@pytest.mark.slow
def test_the_words_of_the_field_lead_to_names_that_there_are(names):
    glossary = (ROOT / "experiments/guides/glossary.md").read_text()
    led = {f"jaxformer.{name}" for name in re.findall(r"`(\w+\.?\w+)`", glossary.split("|---|")[1])}
    assert len(led) >= 60 and not led - names


@pytest.mark.slow
def test_the_reference_keeps_equations_and_examples(site):
    pages = {}
    for path in (site / "experiments/guides/reference").glob("*.html"):
        pages[path.stem] = html.unescape(re.sub(r"<[^>]*>", "", path.read_text()))
    count = 0
    for name in PUBLIC:
        page = pages[name.split(".")[1] if name.count(".") > 1 else "jaxformer"]
        if name in ("jaxformer.Transformer", "jaxformer.TransformerConfig"):
            continue
        texts = [*equations(text_of(name)), textwrap.dedent(section(text_of(name), "Example"))]
        for text in filter(None, texts):
            count += 1
            assert text.rstrip() in page, name
    assert count > 100


@pytest.mark.slow
def test_guides_and_notebooks_are_pages(site):
    for path in (ROOT / "experiments/guides").glob("*.md"):
        assert (site / "experiments/guides" / f"{path.stem}.html").exists()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert "cell_output" in (site / "notebooks" / f"{path.stem}.html").read_text()
        page = (site / "notebooks" / f"{path.stem}.html").read_text()
        assert "Finds jaxformer, or installs it" not in page
    positions = (site / "notebooks" / "01_positions.html").read_text()
    assert r"\theta_i = 10000^{-2i/d}" in positions and "$$PE" not in positions
    assert "experiments/guides/index.html" in (site / "index.html").read_text()


def test_the_first_page_says_how_to_begin():
    """With the commands of README."""
    index = (ROOT / "experiments/guides/index.md").read_text()
    [install, generate] = re.findall(r"^```bash\n(.*?)^```$", index, re.M | re.S)
    begin = (ROOT / "README.md").read_text().partition("## Train")[2].partition("\n## ")[0]
    assert install in begin and "pip install" in install and "experiments.pretrain" in install
    assert generate in begin


@pytest.mark.slow
def test_long_commands_are_not_cut_off(site):
    page = (site / "experiments/guides/finetune.html").read_text()
    [style] = re.findall(r'href="([^"]*/site\.css)[^"]*"', page)
    text = (site / "experiments/guides" / style).read_text()
    assert re.search(r"^pre \{[^}]*white-space: pre-wrap;", text, re.M)
