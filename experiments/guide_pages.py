"""Guides, which are Markdown files, as pages of the documentation."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from pdoc import doc
from pdoc.render_helpers import to_html

from experiments.reference_entries import with_arxiv_links

HERE = Path(__file__).parent
GUIDES = HERE / "guides"
# In the order in which they are listed.
NAMES = (
    "index", "train", "devices", "features", "models", "other_code", "inside", "studies", "speed",
    "glossary",
)  # fmt: skip
SOURCES = {
    ("index" if name == "index" else f"guides.{name}"): GUIDES / f"{name}.md" for name in NAMES
}
SOURCES |= {
    "guides.results": HERE / "README.md",
    "guides.log": HERE / "LOG.md",
    "guides.contributing": HERE.parent / "CONTRIBUTING.md",
    "guides.changelog": HERE.parent / "CHANGELOG.md",
}
TITLES = {"index": "Overview", "guides.results": "Results", "guides.log": "Lab notes"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


@dataclass(frozen=True, kw_only=True)
class Guide:
    """A Markdown file as a page.

    Attributes:
        name: Of the page, as if it were a module: dots stand for folders.
        title: Its first heading.
        text: Markdown whose links lead to other pages.
        pictures: Those that it shows, by where they go in the documentation.
    """

    name: str
    title: str
    text: str
    pictures: dict[str, Path]


def read_all() -> dict[str, Guide]:
    """Every guide by its name."""
    return {name: read(name, source) for name, source in SOURCES.items()}


def read(name: str, source: Path) -> Guide:
    """Read a guide: links to other guides become links to their pages.

    Links to other files of the repository, which the documentation does not have, become text.

    Args:
        name: Of the page.
        source: Its Markdown.

    Raises:
        ValueError: A link leads nowhere.
    """
    text, pictures = source.read_text(), {}
    pages = {path.resolve(): page for page, path in SOURCES.items()}

    def lead(link: re.Match[str]) -> str:
        mark, label, target = link.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or not path:
            return link[0]
        file = (source.parent / path).resolve()
        if not file.exists():
            raise ValueError(f"{source.name} links to {target}, which does not exist.")
        if mark:
            place = f"pictures/{file.relative_to(HERE.parent)}"
            pictures[place] = file
            return f"![{label}]({_relative(place, name)})"
        if file not in pages:
            return f"`{label}`" if "`" not in label else label
        page = f"{pages[file].replace('.', '/')}.html"
        return f"[{label}]({_relative(page, name)}{'#' + anchor if anchor else ''})"

    title = re.search(r"^# (.*)$", text, re.M)
    text = "".join(
        part if part.startswith("```") else with_arxiv_links(LINK.sub(lead, part))
        for part in re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    )
    title_text = TITLES.get(name) or (title[1] if title else name)
    return Guide(name=name, title=title_text, text=text, pictures=pictures)


def _relative(target: str, page: str) -> str:
    """The way from a page to a file."""
    return os.path.relpath(target, Path(page.replace(".", "/")).parent)


def page(guide: Guide) -> doc.Module:
    """The guide as pdoc's templates know pages."""
    module = ModuleType(guide.name, guide.text)
    vars(module).update(__all__=[], __docformat__="markdown")
    found = doc.Module(module)
    found.submodules = []
    return found


def search_entries(guide: Guide) -> Iterator[dict[str, str]]:
    """What the search knows of each section of a guide."""
    sections = re.split(r"^#{1,2} (.*)$", guide.text, flags=re.M)
    seen = set()
    for heading, text in zip(sections[1::2], sections[2::2], strict=True):
        if not text.strip() or heading in seen or guide.name == "guides.changelog":
            continue
        seen.add(heading)
        first = text.strip().split("\n\n")[0]
        yield {
            "fullname": f"Guide: {guide.title}"
            + (f" · {heading}" if heading != guide.title else ""),
            "modulename": guide.name,
            "qualname": slug(heading),
            "kind": "guide",
            "doc": "" if first.startswith(("|", "```", "!")) else to_html(first),
            "text": re.sub(r"\(https?://[^)]*\)", "", text),
            "words": "",
        }


def slug(heading: str) -> str:
    """The anchor of a heading, as pdoc's Markdown makes it."""
    return re.search(r'id="([^"]*)"', to_html(f"## {heading}"))[1]  # type: ignore[index]


def glossary() -> dict[str, str]:
    """The words of the field for each public name, from the guide that lists them."""
    words: dict[str, str] = {}
    for said, names in re.findall(
        r"^\| (.*?) \| (`.*?) \|$", (GUIDES / "glossary.md").read_text(), re.M
    ):
        for name in re.findall(r"`([\w.]+)`", names):
            full = f"jaxformer.{name}"
            words[full] = f"{words[full]}, {said}" if full in words else said
    return words
