"""Sphinx configuration: sphinx-build -c experiments/guides . build/documentation."""

import re

import jaxformer

project, release = "jaxformer", jaxformer.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "experiments/guides/index"
include_patterns = ["experiments/*.md", "experiments/guides/**.md", "notebooks/*.ipynb", "*.md"]
exclude_patterns = ["README.md", ".*", "build", "runs"]
html_theme, html_title, html_show_copyright = "furo", "jaxformer", False
html_static_path = html_css_files = ["site.css"]
myst_enable_extensions = ["dollarmath"]  # typeset by MathJax, which browsers fetch
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks have their outputs, which tests compare
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
default_role = "py:obj"
highlight_language = "none"  # equations; Python and shell blocks name their language
maximum_signature_line_length = 88
napoleon_attr_annotations = False
napoleon_use_ivar = True
napoleon_use_rtype = False


def prepare_docstring(app, what, name, thing, options, lines):
    """Convert a docstring to reStructuredText; indented text before the sections becomes code."""
    text = "\n".join(lines)
    heading = re.search(r"^[A-Z][a-z]+:$", text, re.M)
    end = heading.start() if heading else len(text)
    before = re.sub(r"(?<=\n\n)((?: {4}.*(?:\n|$)|\n(?= {4}))+)", r"::\n\n\1\n", text[:end])
    linked = re.sub(r"\barXiv:(\d{4}\.\d{4,5})", link("`{0} <{1}>`__"), before + text[end:])
    lines[:] = linked.split("\n")


def link(form):
    """Replace an arXiv number by a link."""
    return lambda match: form.format(match[0], f"https://arxiv.org/abs/{match[1]}")


def link_guide(app, name, content):
    """Replace arXiv numbers in the text of guides that are not links yet; code stays as it is."""
    to_link, number = link("[{0}]({1})"), r"(?<!\[)\barXiv:(\d{4}\.\d{4,5})"
    if not name.startswith("notebooks"):
        pattern = rf"^```.*?^```|{number}"
        content[0] = re.sub(
            pattern, lambda x: to_link(x) if x[1] else x[0], content[0], flags=re.M | re.S
        )


def shorten(app, what, name, thing, options, signature, returned):
    """Write array types by their public names, and annotated types without their ranges."""
    return tuple(
        text and without_ranges(text).replace("jaxlib._jax.Array", "Array")
        for text in (signature, returned)
    )


def without_ranges(text):
    """Replace each Annotated[TYPE, ...] by TYPE."""
    before, opening, rest = text.partition("Annotated[")
    if not opening:
        return text
    depth, commas = 0, []
    for end, letter in enumerate(rest):
        depth += (letter in "[(") - (letter in ")]")
        if depth < 0:
            break
        if letter == "," and not depth:
            commas.append(end)
    kind = rest[: commas[0]]
    return re.sub(r"~?(typing|pathlib)\.$", "", before) + without_ranges(kind + rest[end + 1 :])


def skip(app, what, name, thing, skipped, options):
    """Skip the fields of named tuples: the class docstring describes them."""
    return skipped or (thing.__doc__ or "").startswith("Alias for field number")


def write_index(app, failed):
    """Write the root page of the documentation."""
    begin = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">'
    (app.outdir / "index.html").write_text(begin)


def setup(app):
    """Connect the hooks of this file to Sphinx."""
    app.connect("build-finished", write_index)
    app.connect("autodoc-process-docstring", prepare_docstring, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", shorten)
    app.connect("autodoc-skip-member", skip)
    app.connect("source-read", link_guide)
