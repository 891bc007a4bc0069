"""Write the documentation as web pages: guides, and the reference of all public names.

    python -m experiments.reference [FOLDER]      # pip install -e '.[docs]'; build/documentation

Open index.html of the folder; nothing in it needs a network.
"""

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pdoc.render
import pdoc.search
from pdoc import doc

from experiments import guide_pages, reference_entries

FOLDER = Path("build") / "documentation"
TEMPLATES = Path(__file__).parent / "templates"
# Fields of the search index with their weights; the words are those of the glossary.
BOOSTS = {"words": 8, "qualname": 4, "fullname": 2, "signature": 1, "doc": 2, "text": 1}


def main() -> None:
    """Read the command line and write the pages."""
    parser = argparse.ArgumentParser(prog="python -m experiments.reference", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help=f"default: {FOLDER}")
    folder = parser.parse_args().folder
    guides, reference = guide_pages.read_all(), reference_entries.pages()
    write(guides, reference, folder)
    names = sum(len(page.members) for page in reference.values())
    print(
        f"{folder / 'index.html'}: {len(guides)} guides, and {names} names on {len(reference)} "
        "pages of reference."
    )


def write(
    guides: Mapping[str, guide_pages.Guide], reference: Mapping[str, doc.Module], folder: Path
) -> None:
    """Write a file for each page, the pictures, and what searches them."""
    pdoc.render.configure(docformat="google", template_directory=TEMPLATES)
    titles = {name: guide.title for name, guide in guides.items()}
    pdoc.render.env.globals |= {
        "guides": titles,
        "titles": titles | {name: name for name in reference},
        "groups": reference_entries.groups,
        "boosts": json.dumps(BOOSTS),
    }
    pages = {name: guide_pages.page(guide) for name, guide in guides.items()} | {**reference}
    texts = {
        f"{name.replace('.', '/')}.html": pdoc.render.html_module(page, pages)
        for name, page in pages.items()
    }
    documents = [
        *search_entries(reference, guide_pages.glossary()),
        *(entry for guide in guides.values() for entry in guide_pages.search_entries(guide)),
    ]
    template = pdoc.render.env.get_template("search.js.jinja2")
    texts["search.js"] = template.render(search_index=json.dumps(documents))
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for guide in guides.values():
        for name, picture in guide.pictures.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture.read_bytes())


def search_entries(
    reference: Mapping[str, doc.Module], glossary: Mapping[str, str]
) -> list[dict[str, Any]]:
    """What the search knows of each public name: its words, its first paragraph, its text."""
    entries = pdoc.search.make_index(reference, _is_public, "google")
    for entry in entries:
        text = entry.get("doc", "")
        entry["text"], entry["doc"] = re.sub(r"<[^>]*>", " ", text), text.split("</p>")[0]
        entry["words"] = glossary.get(entry["fullname"], "")
    return entries


def _is_public(entry: doc.Doc) -> bool:
    hidden = entry.name.startswith("_") and "@public" not in entry.docstring
    return not hidden and "@private" not in entry.docstring


if __name__ == "__main__":
    main()
