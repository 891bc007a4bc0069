"""Draw which choices the models of each year made, from the tables of `jaxformer.zoo`.

    python -m experiments.choices

It writes experiments/guides/choices.svg, the picture in README.md.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

from jaxformer import zoo

PICTURE = Path(__file__).parent / "guides" / "choices.svg"
# Axes of the left and of the right half, as the zoo and as the picture call them.
HALVES = (
    {
        "position": "position",
        "norm": "norm",
        "norm-placement": "norm placement",
        "qk-norm": "QK-norm",
    },
    {
        "attention": "attention",
        "window": "window",
        "block": "block",
        "activation": "activation",
        "feed-forward": "feed-forward",
    },
)
LABEL_WIDTH, CELL, ROW, GAP = 266, 26, 18, 22
COLOUR = "#1a5fa8"
STYLE = "text { font-family: Helvetica, Arial, sans-serif; font-size: 12px; fill: #222 }"


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(picture(), encoding="utf-8")


def picture() -> str:
    """An SVG: a row for each choice, a column for each year, in each cell the number of models."""
    models = [model for chosen in zoo.choices("norm").values() for model in chosen]
    years = range(min(model.year for model in models), max(model.year for model in models) + 1)
    width = LABEL_WIDTH + CELL * len(years)
    bodies, height = [], 0
    for i, axes in enumerate(HALVES):
        elements, bottom = _half(axes, years)
        bodies.append(f'<g transform="translate({i * (width + GAP)} 0)">\n' + elements + "\n</g>")
        height = max(height, bottom)
    note = "Models of the zoo with each choice, by year; darker: a larger share of that year."
    total = f"{2 * width + GAP + 10} {height + 34}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-5 0 {total}">',
            f"<title>{note}</title>",
            f"<style>{STYLE}</style>",
            '<rect x="-5" width="100%" height="100%" fill="white"/>',
            *bodies,
            f'<text x="{LABEL_WIDTH}" y="{height + 20}">{note}</text>',
            "</svg>",
            "",
        ]
    )


def _half(axes: Mapping[str, str], years: range) -> tuple[str, int]:
    """The elements of one half of the picture, and its height."""
    elements, y = [], 20
    for column, year in enumerate(years):
        x = LABEL_WIDTH + CELL * (column + 0.5)
        style = "text-anchor:middle;font-size:10px"
        elements.append(f'<text x="{x:g}" y="{y - 6}" style="{style}">{year}</text>')
    for axis, heading in axes.items():
        y += 4
        elements.append(f'<text x="0" y="{y + 13}" font-weight="bold">{escape(heading)}</text>')
        y += ROW
        choices = zoo.choices(axis)
        of_year = Counter(model.year for chosen in choices.values() for model in chosen)
        for choice, chosen in choices.items():
            elements += _row(choice, Counter(model.year for model in chosen), of_year, years, y)
            y += ROW
    return "\n".join(elements), y


def _row(
    choice: str, counts: Counter[int], of_year: Counter[int], years: range, y: int
) -> Iterator[str]:
    yield f'<text x="{LABEL_WIDTH - 6}" y="{y + 13}" text-anchor="end">{escape(choice)}</text>'
    back = f'x="{LABEL_WIDTH}" y="{y + 1}" width="{CELL * len(years)}" height="{ROW - 2}"'
    yield f'<rect {back} fill="#f3f3f3"/>'
    for column, year in enumerate(years):
        count = counts[year]
        if count:
            x, share = LABEL_WIDTH + CELL * column, count / of_year[year]
            cell = f'x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{ROW - 2}"'
            # Never so dark that the number cannot be read.
            yield f'<rect {cell} fill="{COLOUR}" fill-opacity="{0.08 + 0.47 * share:.2f}"/>'
            yield f'<text x="{x + CELL / 2:g}" y="{y + 13}" text-anchor="middle">{count}</text>'


if __name__ == "__main__":
    main()
