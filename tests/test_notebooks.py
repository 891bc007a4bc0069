"""Every notebook runs from top to bottom without a network, and draws its figures."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIGURES = 3  # at least, in each
SECONDS = 120
# Imported by each kernel at its start: whoever looks for another machine hears that there is none.
OFFLINE = """
import socket

def refuse(self, address, *rest):
    where = address[0] if isinstance(address, tuple) else address
    if self.family != socket.AF_UNIX and where not in ("127.0.0.1", "::1", "localhost"):
        raise OSError(f"no network: {address}")
    return connect(self, address, *rest)

def nowhere(host, *rest, **options):
    if host not in (None, "", "127.0.0.1", "::1", "localhost"):
        raise OSError(f"no network: {host}")
    return look_up(host, *rest, **options)

connect, socket.socket.connect = socket.socket.connect, refuse
look_up, socket.getaddrinfo = socket.getaddrinfo, nowhere
"""


def cells(path, kind):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def first_cell():
    """What every notebook begins with."""
    return cells(NOTEBOOKS[0], "code")[0].source


def test_there_are_eight_or_so():
    numbers = [path.name.partition("_")[0] for path in NOTEBOOKS]
    assert numbers == [f"{i:02}" for i in range(1, len(NOTEBOOKS) + 1)]
    assert len(NOTEBOOKS) >= 8


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
class TestStored:
    def test_without_output(self, path):
        for cell in cells(path, "code"):
            assert cell.outputs == [] and cell.execution_count is None

    def test_as_the_format_asks(self, path):
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        assert notebook.metadata.kernelspec.name == "python3"

    def test_with_the_cell_that_finds_jaxformer(self, path):
        assert cells(path, "code")[0].source == first_cell()

    def test_with_its_sources(self, path):
        prose = "\n".join(cell.source for cell in cells(path, "markdown"))
        assert "arXiv" in prose


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Kernels started from here have no network, no accelerator and no display."""
    (tmp_path / "sitecustomize.py").write_text(OFFLINE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    for name in ("DISPLAY", "MPLBACKEND", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)


def execute(notebook, timeout=600):
    """The notebook with its outputs; cells that fail raise what they raised."""
    here = {"metadata": {"path": str(ROOT / "notebooks")}}
    client = NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources=here)
    return client.execute()


def test_a_kernel_of_these_tests_has_no_network(offline):
    look = """
import socket, sys
try:
    socket.create_connection(("example.org", 80), timeout=5)
except OSError as error:
    print("refused:", error)
print(sys.executable)
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(look)])
    said = execute(notebook).cells[0].outputs[0].text
    assert said.splitlines() == ["refused: no network: example.org", sys.executable]


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Run the first cell in an empty folder; what it runs besides is written down, not done."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    ran = []

    def run(*, without, source=None, fails=False):
        def find(name):
            return None if name in without else SimpleNamespace(origin="somewhere")

        def do(command):
            ran.append(command)
            return SimpleNamespace(returncode=int(fails))

        monkeypatch.setattr("importlib.util.find_spec", find)
        monkeypatch.setattr("subprocess.run", do)
        exec(compile(source or first_cell(), "first cell", "exec"), {})
        return ran

    return run


def test_where_jaxformer_is_installed_the_first_cell_does_nothing(begin):
    before = list(sys.path)
    assert begin(without=()) == [] and sys.path == before


def test_a_clone_is_used_as_it_is(begin, tmp_path, monkeypatch):
    (tmp_path / "jaxformer" / "functional").mkdir(parents=True)
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert begin(without=("jaxformer",)) == []
    assert sys.path[0] == str(tmp_path)


@pytest.mark.parametrize("without", [("jaxformer",), ()], ids=["clone", "installed"])
def test_what_is_missing_is_installed(without, begin, tmp_path):
    (tmp_path / "jaxformer" / "jaxformer" / "functional").mkdir(parents=True)
    [install] = begin(without=(*without, "treescope", "safetensors"))
    assert install[1:] == ("-m", "pip", "install", "--quiet", "safetensors", "treescope")


def test_elsewhere_the_first_cell_asks_for_an_address_and_fetches_it(begin, tmp_path):
    with pytest.raises(SystemExit, match="jaxformer is not here: set REPOSITORY above"):
        begin(without=("jaxformer",))
    told = first_cell().replace('REPOSITORY = ""', 'REPOSITORY = "an address"')
    fetch, _ = begin(without=("jaxformer", "flax"), source=told)
    assert fetch[:2] == ("git", "clone") and fetch[-2] == "an address"
    assert fetch[-1] == str(tmp_path / "jaxformer-clone") == sys.path[0]


def test_without_a_network_the_first_cell_says_so(begin, tmp_path):
    (tmp_path / "jaxformer" / "functional").mkdir(parents=True)
    with pytest.raises(SystemExit, match="This needs a network: .* -m pip install"):
        begin(without=("jaxformer", "flax"), fails=True)


@pytest.mark.notebooks
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_and_draws(path, offline, capsys):
    before, start = os.times(), time.monotonic()
    outputs = [
        output
        for cell in execute(nbformat.read(path, as_version=4)).cells
        for output in cell.get("outputs", ())
    ]
    after, wall = os.times(), time.monotonic() - start
    spent = sum(after[2:4]) - sum(before[2:4])
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    with capsys.disabled():
        print(f" {path.stem}: {wall:.0f} s, {spent:.0f} s of processors, {len(pictures)} figures")
    assert len(pictures) >= FIGURES
    assert not [o for o in outputs if o.output_type == "error"]
    assert wall < SECONDS
