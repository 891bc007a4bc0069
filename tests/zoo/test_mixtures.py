"""The mixtures of experts say what the lecture's table says, and what their presets are."""

from dataclasses import replace

import pytest

from jaxformer import zoo
from jaxformer.zoo.mixtures import MixtureCells, mixture_cells

# The table as the lecture prints it: routed, active, shared, ratio.
LECTURE = """\
| GShard | 2048 | 2 | 0 |  |
| Switch Transformer | 64 | 1 | 0 |  |
| ST-MOE | 64 | 2 | 0 |  |
| Mixtral | 8 | 2 | 0 |  |
| DBRX | 16 | 4 | 0 |  |
| Grok | 8 | 2 | 0 |  |
| DeepSeek v1 | 64 | 6 | 2 | 1/4 |
| Qwen 1.5 | 60 | 4 | 4 | 1/8 |
| DeepSeek v3 | 256 | 8 | 1 | 1/14 |
| OlMoE | 64 | 8 | 0 | 1/8 |
| MiniMax | 32 | 2 | 0 | ~1/4 |
| Llama 4 (maverick) | 128 | 1 | 1 | 1/2 |
""".splitlines()


def test_cells_are_the_lectures():
    for row, line in zip(zoo.mixtures(), LECTURE, strict=True):
        x = row.listed
        shown = [row.name, x.routed, x.active, x.shared, x.ratio or ""]
        assert f"| {' | '.join(map(str, shown))} |" == line
    assert [row.number for row in zoo.mixtures()] == list(range(1, 13))


def test_a_row_has_a_preset_or_says_what_is_missing():
    for row in zoo.mixtures():
        assert (row.preset is None) == (row.released is None) == (row.missing is not None)
    names = {row.name for row in zoo.mixtures() if row.missing}
    assert names == {"GShard", "ST-MOE", "MiniMax"}


def test_where_the_table_is_wrong():
    """Numbers of experts are all right; some ratios are of another dense network."""
    wrong = {}
    for row in zoo.mixtures():
        if row.released is not None:
            listed, released = vars(row.listed), vars(row.released)
            wrong[row.name] = [n for n in listed if listed[n] not in (None, released[n])]
    wrong = {name: cells for name, cells in wrong.items() if cells}
    assert wrong == dict.fromkeys(("DeepSeek v1", "Qwen 1.5", "Llama 4 (maverick)"), ["ratio"])
    assert all(row.differences for row in zoo.mixtures() if row.name in wrong)


@pytest.mark.parametrize(
    "name, cells",
    [
        ("mixtral-8x7b", (8, 2, 0, "7/8")),
        ("qwen-1.5-moe-a2.7b", (60, 4, 4, "11/64")),
        ("deepseek-v2", (160, 6, 2, "3/40")),
        ("hunyuan-3", (192, 8, 1, "3/32")),
    ],
)
def test_cells_of_a_configuration(name, cells):
    assert mixture_cells(zoo.get(name)) == MixtureCells(
        **dict(zip(("routed", "active", "shared", "ratio"), cells, strict=True))
    )


def test_cells_of_a_model_without_experts():
    assert mixture_cells(zoo.get("llama-2-7b")) is None
    mixtral = zoo.get("mixtral-8x7b")
    dense = replace(mixtral, feed_forward=(*mixtral.feed_forward, mixtral.feed_forward[0].expert))
    assert mixture_cells(dense) is None
