"""The survey says what the lecture's table says, and what its presets are."""

from dataclasses import replace

import pytest

from jaxformer import config as c
from jaxformer import zoo
from jaxformer.zoo.survey_cells import (
    BLANK_DEFAULTS,
    cells_from_config,
    config_from_cells,
    fill_blank_cells,
)

# The table as the lecture prints it.
LECTURE = """\
| Original transformer | 2017 | LayerNorm | Serial | ❌ | Sine | ReLU |  |
| GPT | 2018 | LayerNorm | Serial | ❌ | Absolute | GeLU |  |
| T5 (11B) | 2019 | RMSNorm | Serial | ✅ | Relative | ReLU |  |
| GPT2 | 2019 | LayerNorm | Serial | ❌ | Absolute | GeLU |  |
| GPT2 | 2020 | RMSNorm | Serial | ✅ | Relative | GeGLU |  |
| T5 (XXL 11B) v1.1 | 2020 | RMSNorm | Serial | ✅ | Relative | GeGLU |  |
| mT5 | 2020 | RMSNorm | Serial | ✅ | Relative | GeGLU |  |
| GPT3 (175B) | 2020 | LayerNorm | Serial | ✅ | Absolute | GeLU |  |
| GPTJ | 2021 | LayerNorm | Parallel | ✅ | RoPE | GeLU |  |
| LaMDA | 2021 |  |  |  | Relative | GeGLU |  |
| Anthropic LM (not claude) | 2021 |  |  |  |  |  |  |
| Gopher (280B) | 2021 | RMSNorm | Serial | ✅ | Relative | ReLU |  |
| GPT-NeoX | 2022 | LayerNorm | Parallel | ✅ | RoPE | GeLU |  |
| BLOOM (175B) | 2022 | LayerNorm | Parallel | ✅ | Alibi | GeLU |  |
| OPT (175B) | 2022 | LayerNorm | Serial | ❌ | Absolute | ReLU |  |
| PaLM (540B) | 2022 | RMSNorm | Parallel | ✅ | RoPE | SwiGLU | Z-loss |
| Chinchilla | 2022 | RMSNorm | Serial | ✅ | Relative | ReLU |  |
| Mistral (7B) | 2023 | RMSNorm | Serial | ✅ | RoPE | SwiGLU |  |
| LLaMA2 (70B) | 2023 | RMSNorm | Serial | ✅ | RoPE | SwiGLU |  |
| LLaMA (65B) | 2023 | RMSNorm | Serial | ✅ | RoPE | SwiGLU |  |
| GPT4 | 2023 |  |  | ❌ |  |  |  |
| Olmo 2 | 2024 | RMSNorm | Serial | ❌ | RoPE | SwiGLU | Z-loss, QK-norm |
| Gemma 2 (27B) | 2024 | RMSNorm | Serial | ✅ | RoPE | GeGLU | Logit soft capping, Pre+post norm |
| Nemotron-4 (340B) | 2024 | LayerNorm | Serial | ✅ | RoPE | SqReLu |  |
| Qwen 2 (72B) - same for 2.5 | 2024 | RMSNorm | Serial | ✅ | RoPE | SwiGLU |  |
| Falcon 2 11B | 2024 | LayerNorm | Parallel | ✅ | RoPE | GeLU | Z-loss |
| Ph3 (small) - same for ph4 | 2024 | RMSNorm | Serial | ✅ | RoPE | SwiGLU |  |
| Llama 3 (70B) | 2024 | RMSNorm | Serial | ✅ | RoPE | SwiGLU |  |
| Reka Flash | 2024 | RMSNorm | Serial | ✅ | RoPE | SwiGLU |  |
| Command R+ | 2024 | LayerNorm | Parallel | ✅ | RoPE | SwiGLU |  |
| OLMo | 2024 | RMSNorm | Serial | ✅ | RoPE | SwiGLU |  |
| Qwen (14B) | 2024 | RMSNorm | Serial | ✅ | RoPE | SwiGLU |  |
| DeepSeek (67B) | 2024 | RMSNorm | Serial | ✅ | RoPE | SwiGLU |  |
| Yi (34B) | 2024 | RMSNorm | Serial | ✅ | RoPE | SwiGLU |  |
| Mixtral of Experts | 2024 |  |  | ❌ |  |  |  |
| Command A | 2025 | LayerNorm | Parallel | ✅ | Hybrid (RoPE+NoPE) | SwiGLU |  |
| Gemma 3 | 2025 | RMSNorm | Serial | ✅ | RoPE | GeGLU | Pre+post norm, QK-norm |
| SmolLM2 (1.7B) | 2025 | RMSNorm | Serial | ✅ | RoPE | SwiGLU |  |
| Baichuan 2 | 2023 | RMSNorm | Serial | ✅ | Alibi | SwiGLU | Z-loss |
| Marin 8B | 2025 | RMSNorm | Serial | ✅ | RoPE | SwiGLU |  |
| OLMo 3 (7B) | 2025 | RMSNorm | Serial | ❌ | Hybrid (SWA+Full) | SwiGLU | QK-norm, Z-loss |
| Qwen 3 (8B) | 2025 | RMSNorm | Serial | ✅ | RoPE | SwiGLU | QK-norm |
| LFM 2.5 (1.2B) | 2026 | RMSNorm | Serial | ✅ | Hybrid (Conv+Full) | SwiGLU | QK-norm |
| Gemma 4 E4B (8B) | 2026 | RMSNorm | Serial | ❌ | Hybrid (SWA+Full) | GeGLU | \
Logit soft capping, p-Rope, QK-norm |
| Ministral 3 (8B) | 2026 | RMSNorm | Serial | ✅ | Hybrid (SWA+Full) | SwiGLU |  |
""".splitlines()
ROWS = zoo.survey()
WITHOUT_A_ROW = """
stablelm-2-1.6b stablelm-2-12b glm-4-9b glm-4.5-air glm-4.5 ernie-4.5-0.3b smollm3-3b exaone-4-32b
arcee-4.5b trinity-mini seed-oss-36b minimax-m2 nanochat-d32 hunyuan-3 gpt-oss-20b gpt-oss-120b
ernie-4.5-21b-a3b glm-4.7-flash granite-3.3-2b granite-3.3-8b hunyuan-a13b
mamba-2-2.7b bamba-9b granite-4.0-h-small nemotron-3-nano
mamba-130m mamba-2.8b falcon-mamba-7b jamba-v0.1 recurrentgemma-2b recurrentgemma-9b
rwkv-4-169m
m2m-100-418m nllb-200-600m nllb-200-3.3b xglm-564m xglm-7.5b pegasus-large
codegen-350m codegen-2b codegen-6b codegen-16b santacoder starcoder mpt-7b mpt-30b
gemma-2b gemma-7b phi-1 phi-1.5 phi-2 starcoder2-3b starcoder2-7b starcoder2-15b exaone-3.0-7.8b
apertus-8b apertus-70b
gemma-3n-e2b gemma-3n-e4b gemma-4-31b gemma-4-26b-a4b
qwen-3-next-80b-a3b qwen-3.5-9b qwen-3.5-27b qwen-3.5-35b-a3b
""".split()
NUMBERS = pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.number))


def test_cells_are_the_lectures():
    marks = {True: "✅", False: "❌", None: ""}
    for row, line in zip(ROWS, LECTURE, strict=True):
        x = row.listed
        shown = [row.name, row.year, x.norm or "", x.block or "", marks[x.pre_norm]]
        shown += [x.position or "", x.activation or "", ", ".join(x.tricks)]
        assert f"| {' | '.join(map(str, shown))} |" == line
    assert [row.number for row in ROWS] == list(range(1, 46))


def test_editions():
    """The rows of 2026 are behind those of 2025."""
    assert zoo.survey(edition=2025) == ROWS[:38] and zoo.survey(edition=2026) == ROWS
    assert [row.edition for row in ROWS] == [2025] * 38 + [2026] * 7
    assert all("edition of 2026" in " ".join(ROWS[i - 1].differences) for i in (4, 5, 14, 15))


@NUMBERS
def test_as_listed_has_the_listed_cells(row):
    """What is built, read back; blank cells are the neutral ones, Z-loss belongs to training."""
    config = row.as_listed()
    tricks = set(row.listed.tricks) - {"Z-loss"}
    actual = cells_from_config(config, edition=row.edition)
    assert replace(actual, tricks=()) == replace(fill_blank_cells(row.listed), tricks=())
    assert set(actual.tricks) == tricks
    assert (config.norm_placement == "post") == (row.listed.pre_norm is False)
    assert config.final_norm == (config.norm_placement != "post")
    caps = (50.0, 30.0) if "Logit soft capping" in tricks else (None, None)
    assert (config.layers[-1].attention.logit_softcap, config.head.softcap) == caps


def test_windows_are_a_position_of_2026_only():
    """OLMo 3 has RoPE in layers with and without a window, and so has Gemma 2."""
    for name in ("olmo-3-7b", "gemma-2-27b"):
        assert cells_from_config(zoo.get(name)).position == "RoPE"
        assert cells_from_config(zoo.get(name), edition=2026).position == "Hybrid (SWA+Full)"
    listed = ROWS[44].as_listed()
    assert [listed.layers[i].window for i in range(4)] == [16, 16, 16, None]


def test_a_hybrid_with_short_convolutions():
    """What is said of its attention is said of the layers that have some."""
    listed = ROWS[42].as_listed()
    kinds = [type(listed.layers[i].attention) for i in range(listed.num_layers)]
    assert kinds == [c.ShortConvolution, c.MultiHead]
    released = ROWS[42].released
    assert (released.position, released.tricks) == ("Hybrid (Conv+Full)", ("QK-norm",))
    capped = replace(listed.attention[1], qk_norm=None, logit_softcap=30.0)
    capped = replace(listed, attention=(listed.attention[0], capped))
    assert cells_from_config(capped).tricks == ("Logit soft capping",)


def test_readings_of_one_word():
    """Relative attention is Transformer-XL's in Gopher and Chinchilla, T5's elsewhere."""
    kinds = {
        row.number: type(row.as_listed().attention.positions[0])
        for row in ROWS
        if row.listed.position == "Relative"
    }
    assert {n for n, kind in kinds.items() if kind is c.TransformerXL} == {12, 17}
    assert {n for n, kind in kinds.items() if kind is c.T5Bias} == {3, 5, 6, 7, 10}
    for row in ROWS:
        if row.preset and row.number in kinds:
            assert type(zoo.get(row.preset).attention.positions[0]) is kinds[row.number]


def test_rows_without_a_preset():
    """Nothing was published."""
    without = {row.name: row for row in ROWS if row.preset is None}
    assert set(without) == {"GPT4", "Anthropic LM (not claude)"}
    for row in without.values():
        assert row.released is None and "no preset" in row.differences[0]
    anthropic, gpt_4 = ROWS[10].as_listed(), ROWS[20].as_listed()
    assert cells_from_config(anthropic) == BLANK_DEFAULTS
    assert cells_from_config(gpt_4) == replace(BLANK_DEFAULTS, pre_norm=False)


@NUMBERS
def test_a_row_that_differs_says_how(row):
    """A cell that the preset contradicts needs a sentence; a filled blank may be assumed."""
    if row.released is None:
        return
    listed, released = vars(row.listed), vars(row.released)
    wrong = [
        name for name in listed if name != "tricks" and listed[name] not in (None, released[name])
    ]
    wrong += ["tricks"] if set(listed["tricks"]) != set(released["tricks"]) else []
    blank = [name for name in listed if listed[name] is None]
    assert row.differences or not wrong
    assert row.differences or row.assumptions or not blank


def test_where_the_table_is_wrong():
    """The columns in which a released model has something else than its row lists."""
    wrong = {}
    for row in ROWS:
        if row.released is not None:
            listed, released = vars(row.listed), vars(row.released)
            names = [n for n in listed if listed[n] is not None and n != "tricks"]
            names = [n for n in names if listed[n] != released[n]]
            names += ["tricks"] if set(listed["tricks"]) != set(released["tricks"]) else []
            wrong |= {row.name: names} if names else {}
    assert wrong == {
        "GPT2": ["pre_norm"],
        "BLOOM (175B)": ["block"],
        "OPT (175B)": ["pre_norm"],
        "PaLM (540B)": ["norm"],
        "Ph3 (small) - same for ph4": ["norm", "activation"],
        "Command R+": ["tricks"],
        "OLMo": ["norm"],
        "Mixtral of Experts": ["pre_norm"],
        "Baichuan 2": ["position", "tricks"],
        "Gemma 4 E4B (8B)": ["pre_norm", "tricks"],
        "Ministral 3 (8B)": ["position"],
    }


def test_every_preset_belongs_to_a_row():
    """But for those of families that the lecture's tables do not have."""
    known = {name for row in (*ROWS, *zoo.mixtures()) for name in row.presets}
    assert known | set(WITHOUT_A_ROW) == set(zoo.names())
    assert not known & set(WITHOUT_A_ROW)


def test_unpublished_details_are_assumptions():
    """LaMDA, Gopher, PaLM, Chinchilla, and GPT-3's band."""
    rows = {row.name: " ".join(row.assumptions) for row in ROWS}
    for name in ("LaMDA", "Gopher (280B)", "PaLM (540B)", "Chinchilla", "GPT3 (175B)"):
        assert "No weights were released" in rows[name] and "not published" in rows[name]


def test_z_loss_has_its_published_weight():
    assert {row.name: row.z_loss for row in ROWS if row.z_loss} == {
        "PaLM (540B)": 1e-4,
        "Olmo 2": 1e-5,
        "Falcon 2 11B": 1e-4,
        "OLMo 3 (7B)": 1e-5,
    }
    listed = {row.name for row in ROWS if "Z-loss" in row.listed.tricks}
    assert listed - {row.name for row in ROWS if row.z_loss} == {"Baichuan 2"}  # max-z


def test_cells_of_models_that_no_row_has():
    llama = ROWS[18].as_listed()
    gated = replace(llama, feed_forward=(c.MLP(hidden_dim=8, activation="sigmoid"),))
    assert cells_from_config(gated).activation is None
    nothing = replace(llama, attention=replace(llama.attention, positions=(None,)))
    assert cells_from_config(nothing).position == "none"
    both = replace(llama, attention=replace(llama.attention, positions=(c.Rope(), c.Alibi())))
    assert cells_from_config(both).position == "mixed"


def test_no_row_lists_a_clamped_gate():
    listed = replace(ROWS[0].listed, activation="Clamped GeGLU")
    with pytest.raises(ValueError, match="has no activation 'Clamped GeGLU'"):
        config_from_cells(listed, relative_positions=c.T5Bias(), topology=c.Decoder())
