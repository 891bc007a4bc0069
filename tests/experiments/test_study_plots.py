"""Pictures of studies: what is drawn, what is named, and where the names stand."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments import report
from experiments.studies.plots import (
    MAX_NAMED_CURVES,
    NAME_HEIGHT,
    label_line_ends,
    moving_average,
    plot_extra_metrics,
    plot_losses,
)
from experiments.studies.results import read_json


@pytest.fixture
def drawn(monkeypatch):
    """Figures, instead of files."""
    figures = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda self, *_, **__: figures.append(self)
    )
    return figures


def variants_of(study):
    """The variants of a study that is kept, the baseline first."""
    folder = report.RESULTS / study
    numbers = [read_json(path, "variant") for path in sorted((folder / "variants").glob("*.json"))]
    names = read_json(folder / "study.json")["variants"]
    return sorted(numbers, key=lambda n: names.index(n["variant"]["name"]))


def names_beside(axes):
    """Texts right of a panel, their heights as shares of it."""
    return {text.get_text(): text.xyann for text in axes.texts}


@pytest.mark.parametrize("study", ["ablate_position-cpu", "rope_placement-cpu", "ablate_block-cpu"])
def test_few_curves_have_names_and_those_stand_beside_them(study, drawn, tmp_path):
    """The baseline, the best two and the worst; others are gray. No legend covers a curve."""
    variants = variants_of(study)
    plot_losses(tmp_path / "plot.png", variants, title="a study")
    (figure,) = drawn
    dots, curves = figure.axes
    beside = names_beside(curves)
    assert len(curves.lines) == len(variants) and len(beside) == min(
        MAX_NAMED_CURVES, len(variants)
    )
    assert all(x > 1 for x, _ in beside.values())
    heights = sorted(y for _, y in beside.values())
    assert np.all(np.diff(heights) > 0.06)
    order = [label.get_text() for label in dots.get_yticklabels()]
    base = variants[0]["variant"]["name"]
    best = [name for name in order if name != base]
    assert set(beside) == {base, *best[:2], best[-1]}
    gray = [line for line in curves.lines if line.get_color() == "0.65"]
    assert len(gray) == len(variants) - len(beside)
    assert dots.get_legend() is None and curves.get_legend() is None
    np.testing.assert_array_equal(curves.lines[0].get_ydata(), 0)  # the baseline minus itself


def test_lengths_are_drawn_in_panels_of_few_lines(drawn, tmp_path):
    variants = variants_of("ablate_position-cpu")
    plot_extra_metrics(tmp_path / "more.png", variants, length=128)
    (figure,) = drawn
    assert [axes.get_title() for axes in figure.axes] == [
        "RoPE, scaled after training",
        "RoPE and its variants",
        "RoPE and other positions",
    ]
    for axes in figure.axes:
        assert 1 < len(axes.lines) == len(names_beside(axes)) < 8
        assert axes.get_legend() is None
    everywhere = {name for axes in figure.axes for name in names_beside(axes)}
    assert {variant["variant"]["name"] for variant in variants} <= everywhere
    assert {"as trained", "NTK", "YaRN", "linear"} <= everywhere


def test_depths_are_drawn_with_names_beside_them(drawn, tmp_path):
    plot_extra_metrics(tmp_path / "more.png", variants_of("ablate_placement-cpu"), length=128)
    (axes,) = drawn[0].axes
    assert set(names_beside(axes)) == {"pre", "post", "sandwich", "res_post"}
    assert axes.get_yscale() == "log" and axes.get_legend() is None


def test_recall_is_drawn_by_task_with_the_end_of_training(drawn, tmp_path):
    variants = variants_of("ablate_mixer-cpu")
    plot_extra_metrics(tmp_path / "more.png", variants, length=64)
    (figure,) = drawn
    assert [axes.get_title() for axes in figure.axes] == ["associative recall", "copying"]
    for axes in figure.axes:
        assert set(names_beside(axes)) == {n["variant"]["name"] for n in variants}
        *lines, trained = axes.lines
        assert all(list(line.get_xdata()) == [16, 32, 64, 128] for line in lines)
        assert set(trained.get_xdata()) == {32}
        assert list(lines[0].get_ydata()) == [
            np.mean(x) for x in variants[0]["recall"][axes.get_title()].values()
        ]


@pytest.mark.parametrize(
    "ends, heights",
    [
        (
            [0.2, 0.2, 0.2],
            [0.2, 0.2 + NAME_HEIGHT, 0.2 + 2 * NAME_HEIGHT],
        ),  # up, where there is room
        ([1.0, 1.0, 1.0], [1 - 2 * NAME_HEIGHT, 1 - NAME_HEIGHT, 1.0]),
        ([0.9, 0.1, np.nan], [0.1, 0.9]),  # as high as the lines
    ],
)
def test_names_do_not_cover_each_other(ends, heights):
    axes = Figure().subplots()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    label_line_ends(axes, [(f"line {i}", 1.0, y, "k") for i, y in enumerate(ends)])
    np.testing.assert_allclose(sorted(y for _, y in names_beside(axes).values()), heights)


def test_moving_averages_by_hand():
    assert moving_average([1, 2, 6, 4], window=3).tolist() == [1.5, 3.0, 4.0, 5.0]
    assert moving_average([1, 5], window=1).tolist() == [1, 5]
    assert moving_average([], window=3).tolist() == []
