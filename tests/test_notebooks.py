"""Every notebook runs without a network, and says what its stored outputs say."""

import base64
import os
import re
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from packaging.requirements import Requirement

from tests.write_notebooks import (
    NEEDED,
    NOTEBOOKS,
    ROOT,
    address,
    bare_environment,
    cells,
    clean,
    execute,
    first_cell,
    with_address,
)

FIGURES = 3  # at least, in each
SECONDS = 120  # of processors, at most
LARGEST_PICTURE = 60  # kilobytes
PACKAGE = "\n".join(path.read_text() for path in sorted((ROOT / "jaxformer").rglob("*.py")))
# A number of a fresh run is that of the stored one up to 2 %: what is trained for some hundred
# updates moves by less between processors. Numbers with an exponent, both below ROUNDING, are
# rounding, and any size of it will do; whole numbers are counts, and are the same.
TOLERANCE = 0.02
ROUNDING = 1e-4
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def names_in(text):
    """The words that are written as names of code: with underscores, or as of a class."""
    return set(re.findall(r"[A-Za-z]+(?:_[A-Za-z]+)+|\b(?:[A-Z][a-z]{2,}){2,}\b", text))


def texts_of(cell):
    """What a cell says, of a picture the words."""
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        yield output.get("text") or data.get("text/markdown") or data.get("text/plain", "")


def texts(notebook):
    return [text for cell in notebook.cells for text in texts_of(cell)]


def pictures(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [o.data["image/png"] for o in outputs if "image/png" in o.get("data", {})]


def differ(stored, fresh):
    """Whether two texts have other words, or numbers further apart than stated above."""
    if NUMBER.sub("#", stored).split() != NUMBER.sub("#", fresh).split():
        return True
    for one, other in zip(NUMBER.findall(stored), NUMBER.findall(fresh), strict=True):
        a, b = (float(text.replace(",", "")) for text in (one, other))
        counts = re.fullmatch(r"[-+]?[\d,]+", one) and re.fullmatch(r"[-+]?[\d,]+", other)
        digits = len(one.partition(".")[2]) if "e" not in one else 0
        allowed = TOLERANCE * max(abs(a), abs(b)) + 10.0**-digits if digits else 0.0
        if "e" in one or "e" in other:
            allowed = max(TOLERANCE * max(abs(a), abs(b)), ROUNDING)
        if abs(a - b) > (0 if counts else allowed) * (1 + 1e-9):
            return True
    return False


def test_there_are_eight_or_so():
    numbers = [path.name.partition("_")[0] for path in NOTEBOOKS]
    assert numbers == [f"{i:02}" for i in range(1, len(NOTEBOOKS) + 1)]
    assert len(NOTEBOOKS) >= 8


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
class TestStored:
    def test_with_its_outputs_in_order(self, path):
        code = cells(path, "code")
        assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
        outputs = [output for cell in code for output in cell.outputs]
        assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
        assert all(cell.metadata.keys() <= {"tags", "jupyter"} for cell in code)

    def test_with_small_pictures(self, path):
        sizes = [len(base64.b64decode(p)) for p in pictures(nbformat.read(path, as_version=4))]
        assert len(sizes) >= FIGURES and max(sizes) < 1000 * LARGEST_PICTURE, sizes

    def test_with_the_names_that_the_source_has(self, path):
        """An output from before a name was changed, or one that was edited, has others."""
        notebook = nbformat.read(path, as_version=4)
        drawn = [o.data for c in notebook.cells for o in c.get("outputs", ()) if "data" in o]
        assert all(data.get("text/plain") for data in drawn if "image/png" in data)
        source = PACKAGE + "\n".join(cell.source for cell in notebook.cells)
        assert names_in("\n".join(texts(notebook))) <= names_in(source)

    def test_with_its_number(self, path):
        number, title = int(path.name.partition("_")[0]), cells(path, "markdown")[0].source
        assert title.startswith(f"# {number}. ")

    def test_without_traces_of_a_machine(self, path):
        text = "\n".join(texts(nbformat.read(path, as_version=4)))
        traces = re.findall(
            r"/(?:work|root|home|tmp|Users|var)/\S*|0x[0-9a-f]{6,}|\w*Warning", text
        )
        assert traces == []

    def test_with_a_verdict_that_has_a_number(self, path):
        notebook = nbformat.read(path, as_version=4)
        verdicts = [c for c in notebook.cells if "verdict" in c.metadata.get("tags", ())]
        assert verdicts and "judge(" not in "\n".join(c.source for c in notebook.cells)
        for cell in verdicts:
            for sentence in "".join(texts_of(cell)).strip().split("\n\n"):
                bold, _, rest = " ".join(sentence.split()).partition("”* (")
                assert re.match(r"\*\*(Holds|Holds loosely|Fails|Not decided)\.\*\* \*“", bold)
                assert re.search(r"\d|bitwise: True", rest), sentence

    def test_with_a_table_that_agrees_with_its_verdicts(self, path):
        text = (
            "\n".join(texts(nbformat.read(path, as_version=4))).replace("|", "/").replace("\n", " ")
        )
        prose = "\n".join(cell.source for cell in cells(path, "markdown"))
        rows = re.findall(
            r"^\| (“.*”) \| (.*) \| (holds|holds loosely|fails|not decided) \|$", prose, re.M
        )
        assert len(rows) == text.count("”* (")
        for claim, source, verdict in rows:
            assert f"**{verdict.capitalize()}.** *{claim}* ({source})" in text

    def test_without_letters_for_its_sources(self, path):
        prose = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
        letters = re.findall(r"\[[A-E](?:, [A-E])*\]|\([A-E]\)|(?:source|document) [A-E]\b", prose)
        assert letters == []

    def test_as_the_format_asks(self, path):
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        assert notebook.metadata.kernelspec.name == "python3"

    def test_with_the_cell_that_finds_jaxformer(self, path):
        assert NEEDED.sub("", first_cell(path)) == NEEDED.sub("", first_cell())
        assert "remove-cell" in cells(path, "code")[0].metadata.tags  # from the site

    def test_with_its_sources(self, path):
        prose = "\n".join(cell.source for cell in cells(path, "markdown"))
        assert "https://arxiv.org/abs/" in prose
        assert not re.search(r"(?<!\[)\barXiv:\d", prose), "every paper is a link"


@pytest.fixture
def bare(request, tmp_path, monkeypatch):
    """The notebook, whose kernel gets the environment of `bare_environment`."""
    path = request.param
    for name, value in bare_environment(path, tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")  # a sixth less time
    for name in ("DISPLAY", "MPLBACKEND", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("bare", [NOTEBOOKS[0]], indirect=True, ids=lambda p: p.stem)
def test_a_kernel_of_these_tests_has_no_network_and_little_else(bare):
    look = """
import socket, sys
try:
    import tokenizers
except ModuleNotFoundError as error:
    print(error)
try:
    socket.create_connection(("example.org", 80), timeout=5)
except OSError as error:
    print("refused:", error)
print(sys.executable)
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(look)])
    output = execute(notebook).cells[0].outputs[0].text
    refusals = ["No module named 'tokenizers'", "refused: no network: example.org"]
    assert output.splitlines() == [*refusals, sys.executable]


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Run the first cell in an empty folder; what it asks of pip is written down, not done."""
    monkeypatch.chdir(tmp_path)
    is_dir = Path.is_dir  # the tests' own folder may itself lie in a clone, which is not seen
    seen = lambda path: path.is_relative_to(tmp_path) and is_dir(path)  # noqa: E731
    monkeypatch.setattr(Path, "is_dir", seen)
    monkeypatch.setattr(sys, "path", list(sys.path))
    ran = []

    def run(*, without=(), versions=None, gpu=False, url="", fails=False):
        versions = {"jax": "0.7.2", "jaxlib": "0.7.2", "numpy": "2.0.2"} | (versions or {})

        def find(name):
            return None if name in without else SimpleNamespace(origin="somewhere")

        def do(command):
            assert command[:6] == [sys.executable, "-m", "pip", "install", "--quiet", "-c"]
            ran.append((command[7:], Path(command[6]).read_text().split()))
            return SimpleNamespace(returncode=int(fails))

        here = [SimpleNamespace(name=n, version=v) for n, v in versions.items() if v]
        monkeypatch.setattr("importlib.util.find_spec", find)
        monkeypatch.setattr("importlib.metadata.distributions", lambda: here)
        monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/nvidia-smi" if gpu else None)
        monkeypatch.setattr("subprocess.run", do)
        exec(compile(with_address(first_cell(), url), "first cell", "exec"), {})
        return ran

    return run


def clone_in(folder):
    (folder / "jaxformer" / "functional").mkdir(parents=True)


def test_where_jaxformer_is_installed_the_first_cell_does_nothing(begin):
    before = list(sys.path)
    assert begin() == [] and sys.path == before


@pytest.mark.parametrize("inside", [".", "notebooks", "notebooks/mine"])
def test_a_clone_is_used_as_it_is(inside, begin, tmp_path, monkeypatch):
    clone_in(tmp_path)
    (tmp_path / inside).mkdir(exist_ok=True, parents=True)
    monkeypatch.chdir(tmp_path / inside)
    assert begin(without=("jaxformer",)) == []
    assert sys.path[0] == str(tmp_path)


@pytest.mark.parametrize("at", ["jaxformer", "drive/MyDrive/jaxformer"])
def test_a_clone_beside_or_in_a_mounted_drive_is_found(at, begin, tmp_path):
    clone_in(tmp_path / at)
    assert begin(without=("jaxformer",)) == []
    assert sys.path[0] == str(tmp_path / at)


@pytest.mark.parametrize("without", [("jaxformer",), ()], ids=["clone", "installed"])
def test_what_is_missing_is_installed_beside_the_jax_that_is_here(without, begin, tmp_path):
    clone_in(tmp_path / "jaxformer")
    plugins = {"jax-cuda12-plugin": "0.7.2", "flax": "0.11.2", "rich": "14"}
    [(wanted, constraints)] = begin(without=(*without, "treescope", "chex"), versions=plugins)
    assert wanted == ["chex", "treescope"]
    assert constraints == [
        "jax==0.7.2", "jaxlib==0.7.2", "numpy==2.0.2", "jax-cuda12-plugin==0.7.2", "flax==0.11.2"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("versions", "gpu", "wanted"),
    [
        ({"jax": "0.7.1"}, False, "jax>=0.7.2"),
        ({"jax": None}, False, "jax>=0.7.2"),
        ({"jax": "0.6.2"}, True, "jax[cuda12]>=0.7.2"),
        ({"jax": "0.7.0", "jax-cuda13-plugin": "0.7.0"}, True, "jax[cuda13]>=0.7.2"),
        ({"jax": "0.5.3", "libtpu": "0.0.11"}, False, "jax[tpu]>=0.7.2"),
    ],
)
def test_a_jax_that_is_too_old_is_replaced_with_its_plugin(versions, gpu, wanted, begin):
    assert begin(versions=versions, gpu=gpu) == [([wanted], [])]


@pytest.mark.parametrize("version", ["0.7.2", "0.8.0rc1", "0.10.2", "0.12.0.1", "1.0"])
def test_a_jax_that_is_new_enough_stays(version, begin):
    assert begin(versions={"jax": version}, gpu=True) == []


def test_outside_a_clone_and_without_an_address_it_says_so(begin):
    with pytest.raises(SystemExit, match="outside a clone of jaxformer, and the project has no"):
        begin(without=("jaxformer",))


def test_outside_a_clone_it_installs_from_the_address(begin):
    [(wanted, constraints)] = begin(
        without=("jaxformer",), url="https://example.org/some/where.git"
    )
    [requirement] = map(Requirement, wanted)
    assert (requirement.name, requirement.extras) == ("jaxformer", {"plots", "hub"})
    assert requirement.url == "git+https://example.org/some/where.git"
    assert "jax==0.7.2" in constraints


def test_the_address_is_that_of_the_project():
    text = (ROOT / "pyproject.toml").read_text()
    url = tomllib.loads(text)["project"].get("urls", {}).get("Repository", "")
    assert address(text) == url and with_address(first_cell(), url) == first_cell()
    assert (
        address('[project.urls]\nRepository = "https://example.org/x"') == "https://example.org/x"
    )
    assert 'ADDRESS = "https://a.b/c"' in with_address(first_cell(), "https://a.b/c")


def test_without_a_network_the_first_cell_says_so(begin, tmp_path):
    clone_in(tmp_path)
    with pytest.raises(SystemExit, match="pip could not install flax; what it said stands above"):
        begin(without=("jaxformer", "flax"), fails=True)


def test_what_is_printed_in_pieces_is_stored_in_one():
    cell = nbformat.v4.new_code_cell("print(1); print(2)")
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=t) for t in ("1\n", "2\n")]
    stored = clean(nbformat.v4.new_notebook(cells=[cell]))
    assert texts(stored) == ["1\n2\n"]


@pytest.mark.slow
def test_a_picture_is_stored_with_its_words():
    draw = """
import matplotlib.pyplot as plt
figure, axes = plt.subplots()
axes.bar(["a_name", "another"], [1, 2])
axes.set(title="a title", ylabel="", yscale="log")
plt.show()
"""
    [cell] = clean(execute(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(draw)]))).cells
    assert cell.execution_count == 1 and cell.outputs[0].data["image/png"]
    assert list(texts_of(cell)) == ["a_name\nanother\na title"]


def test_numbers_are_compared():
    assert not differ("loss 2.50, off 1e-07, 12 heads", "loss 2.51, off 4e-06, 12 heads")
    assert differ("loss 2.50", "loss 2.60") and differ("off 1e-07", "off 1e-02")
    assert differ("12 heads", "13 heads") and differ("12 heads", "12 rows")
    assert not differ("1,000 tokens", "1,000 tokens") and differ("1,000 tokens", "1,001 tokens")


@pytest.mark.notebooks
@pytest.mark.parametrize("bare", NOTEBOOKS, indirect=True, ids=lambda p: p.stem)
def test_runs_and_says_what_is_stored(bare, capsys):
    path, before, start = bare, os.times(), time.monotonic()
    stored = nbformat.read(path, as_version=4)
    fresh = clean(execute(nbformat.read(path, as_version=4)))
    after, wall = os.times(), time.monotonic() - start
    spent = sum(after[2:4]) - sum(before[2:4])
    drawn = len(pictures(fresh))
    with capsys.disabled():
        print(f" {path.stem}: {wall:.0f} s, {spent:.0f} s of processors, {drawn} figures")
    assert drawn == len(pictures(stored)) >= FIGURES
    apart = [(a, b) for a, b in zip(texts(stored), texts(fresh), strict=True) if differ(a, b)]
    assert apart == []
    assert spent < SECONDS
