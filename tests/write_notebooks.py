"""Execute the notebooks and save their outputs: `python -m tests.write_notebooks [NAME ...]`.

The same versions give the same files: nothing of a run is kept that another run would not repeat.
"""

import base64
import io
import os
import re
import sys
import tomllib
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
COLOURS = 128  # of a picture: few enough for small files, and more than a colour bar shows
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
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ["JAX_PLATFORMS"] = "cpu"
    for path in NOTEBOOKS:
        if names and path.stem not in names:
            continue
        print(path.stem, flush=True)
        notebook = nbformat.read(path, as_version=4)
        first = next(cell for cell in notebook.cells if cell.cell_type == "code")
        first.source = with_address(first.source, url)
        nbformat.write(clean(execute(notebook)), path)


if __name__ == "__main__":
    main(sys.argv[1:])
