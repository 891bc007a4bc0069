"""Who chose what: every axis has every model once, by what its configuration is."""

import sys
from dataclasses import replace

import pytest

from jaxformer import config as c
from jaxformer import zoo
from jaxformer.zoo import __main__ as command
from jaxformer.zoo import printing
from jaxformer.zoo.axes import YEARS
from tests.small_models import LLAMA_VARIANTS

LISTED = ["    2017  Original transformer", "    2018  GPT", "    2022  opt-350m"]
EVERY_MODEL = {row.preset: row for row in (*zoo.survey(), *zoo.mixtures()) if row.preset}


def names_of(axis):
    """Names of the models by choice."""
    return {
        choice: [model.name for model in models] for choice, models in zoo.choices(axis).items()
    }


def numbers(choices):
    return {choice: len(names) for choice, names in choices.items()}


@pytest.mark.parametrize("axis", zoo.AXES)
def test_every_model_makes_one_choice(axis):
    listed = [model for models in zoo.choices(axis).values() for model in models]
    names = [model.name for model in listed]
    assert len(set(names)) == len(names)
    for choice, models in zoo.choices(axis).items():
        assert choice and [model.year for model in models] == sorted(x.year for x in models)
        assert all(zoo.AXES[axis](model.config) == choice for model in models)
    if axis not in ("router", "experts"):
        assert {row.name for row in EVERY_MODEL.values()} <= set(names)


def test_positions():
    """In order of the first model; presets of a row that choose otherwise stand beside it."""
    routers = names_of("position")
    kinds = ["sinusoids", "learned", "T5 bias", "RoPE", "Transformer-XL", "ALiBi"]
    assert list(routers) == [*kinds, "none", "RoPE and none"]
    assert routers["ALiBi"] == ["BLOOM (175B)", "baichuan-2-13b", "mpt-7b", "mpt-30b"]
    assert routers["learned"] == [
        *("GPT", "GPT2", "GPT3 (175B)", "OPT (175B)", "santacoder", "starcoder")
    ]
    assert routers["T5 bias"] == [
        *("T5 (11B)", "T5 (XXL 11B) v1.1", "mT5", "LaMDA", "Switch Transformer")
    ]
    assert routers["none"] == [
        *("mamba-130m", "mamba-2.8b", "rwkv-4-169m", "falcon-mamba-7b", "jamba-v0.1"),
        *("mamba-2-2.7b", "nemotron-3-nano", "granite-4.0-h-small"),
    ]
    assert routers["RoPE and none"] == [
        *("Command A", "Llama 4 (maverick)", "smollm3-3b", "exaone-4-32b", "trinity-mini")
    ]
    assert "Baichuan 2" in routers["RoPE"] and "baichuan-2-7b" not in routers["RoPE"]


def test_what_few_chose():
    assert names_of("norm-placement")["post-norm"] == ["Original transformer", "GPT", "opt-350m"]
    assert names_of("norm")["LayerNorm, no parameters"] == ["OLMo"]
    assert names_of("norm")["RMSNorm, no parameters"] == ["nanochat-d32"]
    assert "DBRX" in names_of("norm")["LayerNorm, no bias"]
    assert names_of("block")["parallel"] == ["GPT-NeoX", "falcon-40b"]
    assert names_of("attention")["latent"] == ["DeepSeek v3", "glm-4.7-flash"]
    assert names_of("attention")["multi-query"] == [
        *("PaLM (540B)", "falcon-7b", "santacoder", "starcoder"),
        *("gemma-2b", "gemma-3-1b", "gemma-4-e2b"),
    ]
    assert names_of("window")["in 5 of 6 layers"] == [
        *("Gemma 3", "Gemma 4 E4B (8B)", "gemma-4-31b", "gemma-4-26b-a4b")
    ]
    assert names_of("window")["in every layer"] == [
        *("Mistral (7B)", "phi-3-mini", "phi-3-medium"),
        *("recurrentgemma-2b", "recurrentgemma-9b"),
        *("starcoder2-3b", "starcoder2-7b", "starcoder2-15b"),
    ]
    softcaps = names_of("softcap")
    assert softcaps.pop("none") and softcaps == {
        "scores and logits": ["Gemma 2 (27B)"],
        "scores": ["Grok"],
        "logits": [
            *("recurrentgemma-2b", "recurrentgemma-9b"),
            *("gemma-3n-e2b", "gemma-3n-e4b"),
            *("nanochat-d32", "Gemma 4 E4B (8B)", "gemma-4-31b", "gemma-4-26b-a4b"),
        ],
    }
    qk_norms = names_of("qk-norm")
    assert qk_norms["all heads together"] == ["Olmo 2", "OlMoE", "OLMo 3 (7B)", "minimax-m2"]
    assert "command-r" in qk_norms["none"] and "Command R+" not in qk_norms["none"]
    assert names_of("output-gate")["each feature"] == [
        *("qwen-3-next-80b-a3b", "trinity-mini", "qwen-3.5-9b", "qwen-3.5-27b", "qwen-3.5-35b-a3b")
    ]
    assert names_of("sinks")["each head"] == ["gpt-oss-20b", "gpt-oss-120b"]
    assert "Qwen 3 (8B)" not in names_of("attention-bias")["query, key, value"]
    assert "arcee-4.5b" in names_of("activation")["SqReLu"]
    assert "SmolLM2 (1.7B)" in names_of("head")["tied"]
    assert len(names_of("topology")["EncoderDecoder"]) == 9


def test_short_convolutions_stand_beside_attention():
    """LFM 2.5: the other axes are those of its layers with attention."""
    config = zoo.get("lfm-2.5-1.2b")
    choices = {axis: choose(config) for axis, choose in zoo.AXES.items()}
    assert choices["attention"] == "convolution and grouped-query"
    position, window, qk_norm = (choices[axis] for axis in ("position", "window", "qk-norm"))
    assert (position, window, qk_norm) == ("RoPE", "none", "each head")


def test_recurrent_layers_stand_beside_attention():
    choices = {
        name: {axis: choose(zoo.get(name)) for axis, choose in zoo.AXES.items()}
        for name in (
            "mamba-2-2.7b",
            "bamba-9b",
            "nemotron-3-nano",
            "jamba-v0.1",
            "recurrentgemma-2b",
        )
    }
    mamba, bamba, nemotron, jamba, griffin = choices.values()
    assert (mamba["attention"], mamba["window"], mamba["feed-forward"]) == (
        "linear",
        "none",
        "none",
    )
    assert mamba["attention-bias"] == "none"
    assert (bamba["attention"], bamba["position"]) == ("linear and grouped-query", "RoPE")
    assert nemotron["attention"] == "linear and grouped-query"
    assert nemotron["feed-forward"] == "experts, some shared"
    assert (jamba["attention"], jamba["position"]) == ("selective scan and grouped-query", "none")
    assert (griffin["attention"], griffin["position"]) == ("RG-LRU and multi-query", "RoPE")


def test_kinds_side_by_side_are_named_one_by_one():
    model = replace(LLAMA_VARIANTS["hybrid heads"], norm_placement=("pre", "res_post"))
    choices = {axis: choose(model) for axis, choose in zoo.AXES.items()}
    assert (choices["attention"], choices["position"]) == ("grouped-query and linear", "RoPE")
    assert (choices["window"], choices["qk-norm"]) == ("in 1 of 2 layers", "none")
    assert choices["norm-placement"] == "pre-norm and norm of a branch's output"


def test_routers_are_of_mixtures_only():
    routers = names_of("router")
    assert routers["softmax, groups, scaled"] == ["deepseek-v2"]
    assert routers["sigmoid, selection bias, groups, renormalised, scaled"] == ["DeepSeek v3"]
    assert routers["softmax, renormalised"] == [
        *("Mixtral", "DBRX", "qwen-3-30b-a3b", "qwen-3-235b-a22b", "qwen-3-next-80b-a3b"),
        *("hunyuan-a13b", "gpt-oss-20b", "gpt-oss-120b", "granite-4.0-h-small"),
        "qwen-3.5-35b-a3b",
    ]
    assert routers["softmax, limited capacity"] == ["Switch Transformer"]
    mixtures = {name for name in zoo.names() if zoo.get(name).feed_forward[-1].is_moe}
    mixtures -= {"switch-base-8", "switch-base-128", "llama-4-scout"}  # as the row's preset
    assert sum(numbers(routers).values()) == len(mixtures)
    branches = numbers(names_of("feed-forward"))
    assert (branches["experts"], branches["experts, some shared"]) == (11, 16)
    assert names_of("experts")["4 of 60, 4 shared"] == ["Qwen 1.5"]


def test_years():
    """Falcon 2 is of 2024, Falcon of 2023; a preset in no row has the year of its family."""
    years = {m.name: m.year for models in zoo.choices("attention").values() for m in models}
    assert (years["Falcon 2 11B"], years["falcon-7b"]) == (2024, 2023)
    assert (years["GPT3 (175B)"], years["hunyuan-3"]) == (2020, 2026)
    in_rows = {name for row in (*zoo.survey(), *zoo.mixtures()) for name in row.presets}
    assert set(zoo.names()) - in_rows <= set(YEARS) <= set(zoo.names())


def test_options_that_no_preset_has():
    llama = zoo.get("llama-2-7b")
    fire = replace(llama, attention=replace(llama.attention, positions=(c.Fire(),)))
    assert zoo.AXES["position"](fire) == "FIRE"
    windowed = (
        c.ShortConvolution(num_heads=32, head_dim=128),
        replace(llama.attention, windows=(8,)),
    )
    assert zoo.AXES["window"](replace(llama, attention=windowed)) == "in every layer"
    shared = c.SharedKV(num_heads=32, num_kv_heads=32, head_dim=128)
    assert zoo.AXES["attention"](replace(llama, attention=shared)) == "shared key and value"
    gated = replace(
        llama, attention=replace(llama.attention, output_gate=c.OutputGate(over="head"))
    )
    assert [zoo.AXES["output-gate"](x) for x in (llama, gated)] == ["none", "each head"]


def test_listing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zoo", "--axis", "norm-placement"])
    command.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["post-norm: 3", *LISTED]
    assert max(map(len, lines)) <= printing.WIDTH
    assert "norm of a branch's output: 3" in lines


def test_unknown_axes():
    message = "There is no axis 'colour'. Axes: topology, norm, norm-placement, block, position, "
    with pytest.raises(ValueError, match=message):
        zoo.choices("colour")
