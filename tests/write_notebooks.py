"""Execute the notebooks and save their outputs: `python -m tests.write_notebooks [NAME ...]`.

The same versions give the same files: nothing of a run is kept that another run would not repeat,
and a kernel sees no package that the notebook does not install.
"""

import base64
import io
import os
import re
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
COLOURS = 128  # of a picture: few enough for small files, and more than a colour bar shows
NEEDED = re.compile(r"^needed = \((.*?)\)$", re.MULTILINE | re.DOTALL)
INTERACTIVE = 60_000  # characters of HTML; a larger page, as of a tree, is left to a live kernel
# Run by each kernel at its start: beside a picture stand its words, which tests compare.
WORDS = r"""
def _words(figure):
    from matplotlib.text import Text
    figure.draw_without_rendering()
    texts = dict.fromkeys(text.get_text() for text in figure.findobj(Text))
    return "\n".join(t for t in texts if any(map(str.isalpha, t)) and "mathdefault" not in t)

import matplotlib.figure
matplotlib.figure.Figure.__repr__ = _words
"""
# Imported by each kernel at its start: whoever looks for another machine, or for a module that the
# first cell does not install, finds none.
BARE = """
import socket, sys
from importlib.machinery import PathFinder

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in {absent} else super().find_spec(name, path, target)

sys.meta_path[:] = [Bare if finder is PathFinder else finder for finder in sys.meta_path]

def refuse(self, address, *rest):
    where = address[0] if isinstance(address, tuple) else address
    if self.family != socket.AF_UNIX and where not in ("127.0.0.1", "::1", "localhost"):
        raise OSError(f"no network: {{address}}")
    return connect(self, address, *rest)

def nowhere(host, *rest, **options):
    if host not in (None, "", "127.0.0.1", "::1", "localhost"):
        raise OSError(f"no network: {{host}}")
    return look_up(host, *rest, **options)

connect, socket.socket.connect = socket.socket.connect, refuse
look_up, socket.getaddrinfo = socket.getaddrinfo, nowhere
"""


def cells(path, kind):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def first_cell(path=NOTEBOOKS[0]):
    """What a notebook begins with."""
    return cells(path, "code")[0].source


def absent(path):
    """The modules here that there are not where Jupyter, JAX and what the first cell installs are.

    So are those of what these depend on.
    """
    needed = re.findall(r'"(\w+)"', NEEDED.search(first_cell(path))[1])
    waiting, present = ["jax", "ipykernel", *needed], set()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in present:
            present.add(name)
            requirements = map(Requirement, metadata.requires(name) or ())
            here = (r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""}))
            waiting += [requirement.name for requirement in here]
    modules = metadata.packages_distributions().items()
    names = {m for m, those in modules if not present & set(map(canonicalize_name, those))}
    return names - {"jaxformer"}


def bare_environment(path: Path, folder: Path) -> dict[str, str]:
    """Variables by which a notebook's kernel has a CPU, no network and no more than it needs.

    Args:
        path: The notebook.
        folder: Where the module that each kernel imports at its start is written.
    """
    (folder / "sitecustomize.py").write_text(BARE.format(absent=absent(path)))
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "JAX_PLATFORMS": "cpu"}


def address(pyproject: str) -> str:
    """Where this project can be had, or nothing."""
    urls = tomllib.loads(pyproject)["project"].get("urls", {})
    return next((url for name, url in urls.items() if name.lower() == "repository"), "")


def with_address(source: str, url: str) -> str:
    """The first cell, told where to install from."""
    return re.sub(r'^ADDRESS = "[^"]*"', lambda _: f'ADDRESS = "{url}"', source, flags=re.MULTILINE)


def execute(notebook: nbformat.NotebookNode, timeout: int = 600) -> nbformat.NotebookNode:
    """The notebook with its outputs; cells that fail raise what they raised."""
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(ROOT / "notebooks")}},
        record_timing=False,
        extra_arguments=[f"--InteractiveShellApp.exec_lines={WORDS}"],
    )
    return client.execute()


def small(picture: str) -> str:
    """A PNG in base64, with few colours and no note of what drew it."""
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    image = image.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    file = io.BytesIO()
    image.save(file, format="png", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def joined(outputs: list) -> list:
    """Outputs with what was printed in pieces, by chance of timing, in one."""
    result = []
    for output in outputs:
        name = output.get("name")
        if name and result and result[-1].get("name") == name:
            result[-1].text += output.text
        else:
            result.append(output)
    return result


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Outputs as they are stored."""
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = joined(cell.outputs)
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                data["image/png"] = small(data["image/png"])
            if len(data.get("text/html", "")) > INTERACTIVE:
                del data["text/html"]
            if "text/plain" in data:
                data["text/plain"] = re.sub(r" at 0x[0-9a-f]+", "", data["text/plain"])
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def main(names: list[str]) -> None:
    """Run those named, or all, and store them."""
    url = address((ROOT / "pyproject.toml").read_text())
    for path in NOTEBOOKS:
        if names and path.stem not in names:
            continue
        print(path.stem, flush=True)
        notebook = nbformat.read(path, as_version=4)
        first = next(cell for cell in notebook.cells if cell.cell_type == "code")
        first.source = with_address(first.source, url)
        with tempfile.TemporaryDirectory() as folder:
            os.environ.update(bare_environment(path, Path(folder)))
            nbformat.write(clean(execute(notebook)), path)


if __name__ == "__main__":
    main(sys.argv[1:])
