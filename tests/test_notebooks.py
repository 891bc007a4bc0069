"""Every notebook runs from top to bottom without a network, and draws its figures."""

import os
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIGURES = 3  # at least, in each
PROCESSOR_SECONDS = 240  # two minutes of two cores
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


@pytest.mark.parametrize("missing", ["jaxformer"])
def test_outside_a_clone_the_first_cell_asks_for_an_address(missing, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=f"{missing} is not installed: set REPOSITORY"):
        exec(compile(first_cell(), "first cell", "exec"), {})


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
    assert spent < PROCESSOR_SECONDS
