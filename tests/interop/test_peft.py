"""Adapters as PEFT's folders: written, read, and against PEFT itself (mark `parity`)."""

import ast
import importlib
import inspect
import json
import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file

from jaxformer import config as c
from jaxformer import zoo
from jaxformer.interop import (
    load_adapter,
    load_config,
    load_pretrained,
    save_adapter,
    save_pretrained,
)
from jaxformer.interop.families import FAMILIES
from jaxformer.interop.peft.modules import (
    MERGED,
    NAMES_OF_EXPERTS,
    NOT_ADAPTED,
    adaptable_modules,
    tensor_mappings,
)
from jaxformer.layers import merge_lora
from jaxformer.layers.lora import is_adapter, split_parameters
from tests.interop.golden_files import NAMES, read_golden
from tests.interop.golden_files import write_folder as write_golden_folder
from tests.interop.references_without_family import REFERENCES_WITHOUT_FAMILY
from tests.small_models import jitted_forward, random_params

LORA = c.LoRA(rank=2, alpha=3.0)
# Separate kernels; Conv1D [inputs, outputs], fused; fused by head; fused query, key and value.
MODELS = ("llama-2-7b", "gpt-2-xl", "gpt-neox-20b", "phi-3-mini")
TOKENS = np.arange(14).reshape(2, 7)
ADAPTER_FILES = ("model.safetensors", "config.json")
NOT_IN_TRANSFORMERS = {*REFERENCES_WITHOUT_FAMILY, "qwen1_14b", "ref_phi3_small"}
NOT_IN_TRANSFORMERS |= {"ref_baichuan2_7b", "ref_baichuan2_13b"}
NOT_IN_TRANSFORMERS |= {"muse_glimmer_text"}  # there only within the model that reads images
DENSE = ["mlp.gate_proj.weight", "shared_experts.up_proj.weight", "mlp.down_proj.weight"]
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def split(config, params):
    leaves = flatten_dict(params, sep="/")
    base = {path: x for path, x in leaves.items() if not is_adapter(path)}
    return replace(config, adapter=None), unflatten_dict(base, sep="/")


@pytest.fixture(
    params=[*MODELS[:3:2], *(pytest.param(x, marks=pytest.mark.slow) for x in MODELS[1::2])]
)
def adapted(request):
    config = replace(zoo.get(request.param).tiny(), adapter=LORA)
    return config, random_params(config)


@pytest.mark.slow(but=["llama-2-7b"])
def test_tensors_are_the_update_of_each_weight(adapted, tmp_path):
    config, params = adapted
    save_adapter(tmp_path / "adapter", config, params, base="base")
    save_pretrained(tmp_path / "base", *split(config, params))
    save_pretrained(tmp_path / "merged", *merge_lora(config, params))
    base, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "base"
    changed = {name for name in base if not np.array_equal(base[name], merged[name])}
    prefix, end = "base_model.model.", ".lora_A.weight"
    names = {n.removeprefix(prefix).removesuffix(end) for n in tensors if n.endswith(end)}
    assert {f"{name}.weight" for name in names} == changed
    for name in names:
        a, b = (tensors[f"{prefix}{name}.lora_{x}.weight"] for x in "AB")
        rank = settings["rank_pattern"].get(name, settings["r"])
        alpha = settings["alpha_pattern"].get(name, settings["lora_alpha"])
        assert len(a) == rank
        update = alpha / rank * b @ a
        update = update.T if settings["fan_in_fan_out"] else update
        expected = merged[f"{name}.weight"] - base[f"{name}.weight"]
        np.testing.assert_allclose(update, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{}, {"rslora": True}, {"dora": True}, {"targets": ("embedding", "head", "down")}]
)
def test_a_folder_is_read_as_it_was_written(adapted, tmp_path, fields):
    config, _ = adapted
    config = replace(config, adapter=replace(LORA, **fields))
    if config.head.tied and "head" in config.adapter.targets:
        config = replace(config, adapter=replace(LORA, targets=("down",)))
    params = random_params(config)
    save_adapter(tmp_path / "adapter", config, params)
    read_config, read = load_adapter(tmp_path / "adapter", *split(config, params))
    models = (config, params), (read_config, read)
    logits = [jitted_forward(config)(params, TOKENS) for config, params in models]
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-5)
    save_adapter(tmp_path / "again", read_config, read)
    again = load_adapter(tmp_path / "again", *split(read_config, read))
    read_again = jitted_forward(again.config)(again.params, TOKENS)
    np.testing.assert_allclose(read_again, logits[0], atol=1e-5)


@pytest.mark.slow
def test_layers_without_an_adapter_and_other_ranks_are_filled_with_zeros(tmp_path):
    config = replace(zoo.get("llama-2-7b").tiny(), adapter=LORA)
    params = random_params(config)
    save_adapter(tmp_path / "x", config, params)
    path = tmp_path / "x" / "adapter_model.safetensors"
    tensors = {name: x for name, x in load_file(path).items() if ".layers.1." not in name}
    wide = "base_model.model.model.layers.0.mlp.up_proj.lora_"
    tensors[f"{wide}A.weight"] = np.concatenate([tensors[f"{wide}A.weight"]] * 2)
    tensors[f"{wide}B.weight"] = np.concatenate([tensors[f"{wide}B.weight"]] * 2, axis=1)
    save_file(tensors, path)
    settings_path = tmp_path / "x" / "adapter_config.json"
    settings = json.loads(settings_path.read_text()) | {
        "rank_pattern": {"up_proj": 4},
        "alpha_pattern": {"up_proj": 3.0},  # twice the update at half the scale
    }
    settings_path.write_text(json.dumps(settings))
    read_config, read = load_adapter(tmp_path / "x", *split(config, params))
    assert read_config.adapter.rank == 4
    leaves = {
        path: x.at[1].set(0) if is_adapter(path) else x
        for path, x in flatten_dict(params, sep="/").items()
    }
    expected = jitted_forward(config)(unflatten_dict(leaves, sep="/"), TOKENS)
    actual = jitted_forward(read_config)(read, TOKENS)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.slow
def test_what_a_folder_of_adapters_cannot_hold(tmp_path):
    config = zoo.get("llama-2-7b").tiny()
    params = random_params(config)
    with pytest.raises(ValueError, match="needs a model with an adapter"):
        save_adapter(tmp_path / "x", config, params)
    for other, message in (
        (
            replace(config, adapter=replace(LORA, targets=("head",), trained=("head",))),
            "PEFT either adapts a module or trains it; got both for lm_head",
        ),
        (
            replace(zoo.get("gpt-oss-20b").tiny(), adapter=replace(LORA, trained=("sinks",))),
            r"got both for model\.layers\.0\.self_attn\.k_proj, model\.layers\.0\.self_attn\.o_p",
        ),
        (
            replace(
                zoo.get("mixtral-8x7b").tiny(),
                adapter=replace(LORA, targets=("query",), trained=("experts",)),
            ),
            r"has no tensor of its own of model\.layers\.0\.mlp\.experts\.0\.w1\.weight, "
            r".* \(24 in all\), which LoRA.trained names",
        ),
        (
            replace(zoo.get("mixtral-8x7b").tiny(), adapter=replace(LORA, targets=("experts",))),
            "PEFT has no form of the adapters decoder/layers/layer_0/feed_forward/experts/down",
        ),
        (
            replace(zoo.get("deepseek-v2-lite").tiny(), adapter=replace(LORA, dora=True)),
            "PEFT takes the targets gate, gate_proj, up_proj, down_proj of this model for experts, "
            r"and adapts the weights of model\.layers\.0\.mlp\.gate_proj and .* without DoRA",
        ),
        (
            replace(zoo.get("nemotron-3-nano").tiny(), adapter=replace(LORA, targets=("out",))),
            r"PEFT adapts no out_proj of nemotron_h models; got adapters of .*mixer\.out_proj",
        ),
    ):
        adapted = random_params(other)
        with pytest.raises(ValueError, match=message):
            save_adapter(tmp_path / "x", other, adapted)
        with pytest.raises(ValueError, match="save_pretrained has no tensors for adapters"):
            save_pretrained(tmp_path / "x", other, adapted)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"peft_type": "LOHA"}, "has peft_type 'LOHA'; it must be LORA"),
        ({"bias": "all"}, "bias = 'all': not supported by jaxformer; it must be 'none'"),
        (
            {"modules_to_save": ["lm_head", "layers.1"]},
            r"has no lm_head\.weight, model\.layers\.1\.input_.*, 10 of the 10 tensors of "
            r"modules_to_save, lm_head, layers\.1\.",
        ),
        ({"target_parameters": ["experts"]}, r"target_parameters = \['experts'\]: not supported"),
        ({"use_bdlora": True}, "use_bdlora = True: not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa': not supported"),
        ({"lora_alpha": "16"}, "lora_alpha = '16': expected a value of type float"),
        ({"alpha_pattern": {"q_proj": 0}}, r"alpha_pattern\.q_proj = 0: expected a number above 0"),
        (
            {"alpha_pattern": {"(q_proj": 1.0}},
            r"alpha_pattern\.\(q_proj = 1.0: the name is no regular expression",
        ),
        ({"use_rslora": "false"}, "use_rslora = 'false': expected a value of type bool"),
        ({"r": 64}, "r = 64: adapter_model.safetensors has adapters of rank 2"),
        ({"base_model_name_or_path": 5}, "base_model_name_or_path = 5: expected a value of type"),
        ({"use_dora": True}, "magnitude_vector in 0 of the 14 adapted modules; by .* 14 need one"),
    ],
)
def test_folders_of_other_kinds_are_refused(tmp_path, change, message):
    config = replace(zoo.get("llama-2-7b").tiny(), adapter=LORA)
    params = random_params(config)
    save_adapter(tmp_path / "x", config, params)
    path = tmp_path / "x" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        load_adapter(tmp_path / "x", *split(config, params))


@pytest.mark.slow
def test_adapters_of_another_base_are_refused(tmp_path):
    config = replace(zoo.get("llama-2-7b").tiny(), adapter=LORA)
    params = random_params(config)
    save_adapter(tmp_path / "x", config, params, base="org/llama")
    with pytest.raises(ValueError, match="are of org/llama; got the model org/qwen"):
        load_adapter(tmp_path / "x", *split(config, params), base_name="org/qwen")
    load_adapter(tmp_path / "x", *split(config, params), base_name="here/llama")
    narrow = replace(config, feed_forward=(c.GLU(hidden_dim=8),), adapter=None)
    for other, message in (
        (narrow, r"adapter of model.layers.0.mlp.down_proj is .* Is it of another base model\?"),
        (zoo.get("gpt-2-xl").tiny(), r"is no adapter of this model; its modules are .*c_attn"),
    ):
        params = random_params(other)
        with pytest.raises(ValueError, match=message):
            load_adapter(tmp_path / "x", other, params)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: x | {"a.lora_A.weight": x["A"]}, "which is no adapter of this model"),
        (lambda x: x | {NAME + "A.weight": x["A"] * np.nan}, "q_proj.lora_A.weight .* not finite"),
        (lambda x: x | {NAME + "A.weight": x["A"][:0]}, "must be a matrix of one row or more"),
        (lambda x: x | {NAME + "A.weight": x["A"].astype(np.int32)}, "is I32, which is no float"),
        (lambda x: x | {NAME[17:] + "A.weight": x["A"]}, "q_proj.lora_A.weight twice"),
    ],
)
def test_damaged_tensors_are_refused(tmp_path, change, message):
    config = replace(zoo.get("llama-2-7b").tiny(), adapter=LORA)
    params = random_params(config)
    save_adapter(tmp_path / "x", config, params)
    path = tmp_path / "x" / "adapter_model.safetensors"
    tensors = load_file(path)
    changed = change(tensors | {"A": tensors[NAME + "A.weight"]})
    save_file({name: x for name, x in changed.items() if name != "A"}, path)
    with pytest.raises(ValueError, match=message):
        load_adapter(tmp_path / "x", *split(config, params))


@pytest.mark.slow
def test_patterns_are_regular_expressions_as_in_peft(tmp_path):
    config = replace(zoo.get("llama-2-7b").tiny(), adapter=LORA)
    params = random_params(config)
    save_adapter(tmp_path / "x", config, params)
    path = tmp_path / "x" / "adapter_config.json"
    settings = json.loads(path.read_text())
    scaled = []
    for key in ("model.layers.0.self_attn.q_proj", r"^model\.layers\.0\..*q_proj", r"0\..*q_proj"):
        path.write_text(json.dumps(settings | {"alpha_pattern": {key: 300.0}}))
        scaled.append(load_adapter(tmp_path / "x", *split(config, params)).params)
    plain = flatten_dict(params, sep="/")["decoder/layers/layer_0/attention/query/lora_b"]
    for tree in scaled:
        b = flatten_dict(tree, sep="/")["decoder/layers/layer_0/attention/query/lora_b"]
        np.testing.assert_allclose(b[0], plain[0] * 100, rtol=1e-5)
        np.testing.assert_allclose(b[1], plain[1], rtol=1e-5)


@pytest.mark.parametrize(
    "name, here, in_files",
    [
        ("gpt-neox-20b", "lm_head", "embed_out"),
        ("nemotron-3-nano", "model.embeddings", "backbone.embeddings"),
    ],
)
@pytest.mark.slow
def test_modules_have_the_names_of_transformers_5_or_of_4(name, here, in_files, tmp_path):
    target = "head" if here == "lm_head" else "embedding"
    config = replace(zoo.get(name).tiny(), adapter=replace(LORA, targets=(target,)))
    params = random_params(config)
    save_adapter(tmp_path / "x", config, params)
    weights, settings = (tmp_path / "x" / f"adapter_{end}" for end in ADAPTER_FILES)
    tensors = load_file(weights)
    assert all(key.startswith(f"base_model.model.{here}.lora_") for key in tensors)
    assert json.loads(settings.read_text())["target_modules"] == [here.rpartition(".")[2]]
    patterns = {"rank_pattern": {in_files: 2}, "alpha_pattern": {in_files: 6.0}, "r": 7}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | patterns))
    save_file({key.replace(here, in_files): x for key, x in tensors.items()}, weights)
    read = load_adapter(tmp_path / "x", *split(config, params))
    assert read.config.adapter.alpha == 6.0
    expected = flatten_dict(params, sep="/")
    for path, x in flatten_dict(read.params, sep="/").items():
        np.testing.assert_array_equal(x, expected[path])


@pytest.mark.slow
def test_dense_modules_beside_experts_of_the_same_name_are_named_in_full(tmp_path):
    """Else PEFT would adapt the experts too."""
    adapter = replace(LORA, targets=("up", "down"))
    config = replace(zoo.get("switch-base-8").tiny(), adapter=adapter)
    save_adapter(tmp_path / "x", config, random_params(config))
    settings = json.loads((tmp_path / "x" / "adapter_config.json").read_text())
    name = r"(en|de)coder\.block\.\d+\.layer\.[12]\.mlp\.w[io]"
    assert settings["target_modules"]
    assert all(re.fullmatch(name, each) for each in settings["target_modules"])


@pytest.mark.slow
def test_keys_and_values_of_latents_are_one_tensor(tmp_path):
    """Dense layers and shared experts are targets by weight: PEFT takes their names for experts."""
    config = replace(zoo.get("deepseek-v2-lite").tiny(), adapter=replace(LORA, dropout=0.1))
    params = random_params(config)
    save_adapter(tmp_path / "x", config, params)
    tensors = load_file(tmp_path / "x" / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "x" / "adapter_config.json").read_text())
    name = "model.layers.0.self_attn.kv_b_proj"
    a, b = (tensors[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    update = settings["alpha_pattern"][name] / settings["rank_pattern"][name] * b @ a
    leaves = flatten_dict(params, sep="/")
    first = "decoder/first_layers/layer_0/attention"
    by_head = [
        np.einsum("cr,rnh->cnh", *(leaves[f"{first}/{kind}/lora_{x}"] for x in "ab"))
        for kind in ("key", "value")
    ]
    expected = 3 / 2 * np.concatenate(by_head, axis=-1)
    np.testing.assert_allclose(update, expected.reshape(len(expected), -1).T, atol=1e-5)
    dense = {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}
    assert {each.rpartition("mlp.")[2] for each in settings["target_parameters"]} == {
        *dense,
        *(f"shared_experts.{each}" for each in dense),
    }
    assert {"kv_b_proj", "o_proj"} < set(settings["target_modules"])
    assert not {f"{each}.weight" for each in settings["target_modules"]} & dense
    assert settings["lora_dropout"] == 0.0
    read = load_adapter(tmp_path / "x", *split(config, params))
    for path, x in flatten_dict(read.params, sep="/").items():
        np.testing.assert_allclose(x, leaves[path], atol=1e-6, err_msg=path)


@pytest.mark.slow
def test_a_table_of_encoder_and_decoder_is_two_modules(tmp_path):
    """T5's `shared` itself is read by nothing, so an adapter of it would change no logits."""
    config = zoo.get("t5-small").tiny()
    adapter = replace(LORA, targets=("embedding",))
    config = replace(config, head=replace(config.head, tied=False, multiplier=1.0), adapter=adapter)
    params = random_params(config)
    save_adapter(tmp_path / "x", config, params)
    path = tmp_path / "x" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.{}coder.embed_tokens.lora_embedding_{}"
    assert set(tensors) == {name.format(x, y) for x in ("en", "de") for y in "AB"}
    for part in "AB":
        np.testing.assert_array_equal(*(tensors[name.format(x, part)] for x in ("en", "de")))
    read = load_adapter(tmp_path / "x", *split(config, params))
    expected = flatten_dict(params, sep="/")
    for key, x in flatten_dict(read.params, sep="/").items():
        np.testing.assert_array_equal(x, expected[key])
    message = "changes encoder.embed_tokens and decoder.embed_tokens differently"
    for changed in (
        {key: x * (1 + ("encoder" in key)) for key, x in tensors.items()},
        {key: x for key, x in tensors.items() if "encoder" in key},
    ):
        save_file(changed, path)
        with pytest.raises(ValueError, match=message):
            load_adapter(tmp_path / "x", *split(config, params))


@pytest.mark.slow
def test_ranks_of_fused_kernels_do_not_grow(tmp_path):
    config = replace(zoo.get("phi-3-mini").tiny(), adapter=LORA)
    params = random_params(config)
    save_adapter(tmp_path / "x", config, params)
    assert load_adapter(tmp_path / "x", *split(config, params)).config.adapter.rank == LORA.rank


@pytest.mark.slow
def test_some_parts_of_a_fused_tensor_have_adapters(tmp_path):
    """LoRA's paper adapts query and value, which GPT-2 keeps in one tensor with the key."""
    for targets in (("query", "value"), ("value",)):
        adapter = replace(LORA, targets=targets)
        config = replace(zoo.get("gpt-2-xl").tiny(), adapter=adapter)
        params, folder = random_params(config), tmp_path / "-".join(targets)
        save_adapter(folder, config, params)
        tensors = load_file(folder / "adapter_model.safetensors")
        b = tensors["base_model.model.transformer.h.0.attn.c_attn.lora_B.weight"]
        parts = np.split(b, 3)  # rows of query, key and value
        assert [x.any() for x in parts] == ["query" in targets, False, True]
        read = load_adapter(folder, *split(config, params))
        assert read.config.adapter == adapter
        expected = flatten_dict(params, sep="/")
        for path, x in flatten_dict(read.params, sep="/").items():
            np.testing.assert_allclose(x, expected[path], atol=1e-6)


@pytest.mark.slow
def test_layers_without_dora_stay_as_they_are(tmp_path):
    config = replace(zoo.get("llama-2-7b").tiny(), adapter=replace(LORA, dora=True))
    params = random_params(config)
    save_adapter(tmp_path / "x", config, params)
    path = tmp_path / "x" / "adapter_model.safetensors"
    tensors = {name: x for name, x in load_file(path).items() if ".layers.1." not in name}
    save_file(tensors, path)
    read = load_adapter(tmp_path / "x", *split(config, params))
    merged = [flatten_dict(merge_lora(*x)[1], sep="/") for x in ((config, params), read)]
    base = flatten_dict(params, sep="/")
    for name in (x for x in base if "layer_0" in x and x.endswith("kernel")):
        np.testing.assert_allclose(merged[1][name][0], merged[0][name][0], atol=1e-6)
        np.testing.assert_allclose(merged[1][name][1], base[name][1], atol=1e-6)


@pytest.mark.slow
def test_trained_modules_are_saved_whole(tmp_path):
    """For a head that is tied to the table PEFT has a copy, as of the table."""
    for name, trained, modules in (
        ("llama-2-7b", ("head", "final_norm"), ["lm_head", "model.norm"]),
        ("gemma-2-2b", ("embedding",), ["lm_head", "model.embed_tokens"]),
    ):
        config = replace(zoo.get(name).tiny(), adapter=replace(LORA, trained=trained))
        params = random_params(config)
        save_adapter(tmp_path / name, config, params)
        settings = json.loads((tmp_path / name / "adapter_config.json").read_text())
        assert settings["modules_to_save"] == modules
        assert settings["task_type"] == "CAUSAL_LM"
        stored = load_file(tmp_path / name / "adapter_model.safetensors")
        table = np.asarray(params["embedding"]["tokens"]["embedding"])
        head = table if config.head.tied else np.asarray(params["head"]["kernel"]).T
        np.testing.assert_array_equal(stored["base_model.model.lm_head.weight"], head)
        copies = ("lm_head.original_module.weight", "lm_head.modules_to_save.weight")
        stored |= {f"base_model.model.{copy}": np.zeros_like(head) for copy in copies}
        save_file(stored, tmp_path / name / "adapter_model.safetensors")
        base, base_params = split(config, jax.tree.map(np.zeros_like, params))
        read = load_adapter(tmp_path / name, base, base_params)
        if not config.head.tied:
            assert read.config.adapter.trained == ("decoder/final_norm", "head")
        np.testing.assert_array_equal(read.params["head"]["kernel"], head.T)


@pytest.mark.slow
def test_modules_above_the_kernels_are_saved_whole(tmp_path):
    """PEFT wraps each module whose name ends so, and saves all that is below it."""
    lora = replace(LORA, targets=("head",), trained=("sinks", "experts"))
    config = replace(zoo.get("gpt-oss-20b").tiny(), adapter=lora)
    params = random_params(config)
    save_adapter(tmp_path / "x", config, params)
    path = tmp_path / "x" / "adapter_config.json"
    settings = json.loads(path.read_text())
    names = [f"model.layers.{n}.{part}" for n in (0, 1) for part in ("mlp.experts", "self_attn")]
    assert settings["modules_to_save"] == names
    stored = load_file(tmp_path / "x" / "adapter_model.safetensors")
    whole = {name.split(".layers.0.")[1] for name in stored if ".layers.0." in name}
    attention = {f"{x}_proj.{end}" for x in "qkvo" for end in ("weight", "bias")} | {"sinks"}
    experts = {f"{x}_proj{end}" for x in ("gate_up", "down") for end in ("", "_bias")}
    assert whole == {f"self_attn.{x}" for x in attention} | {f"mlp.experts.{x}" for x in experts}
    path.write_text(json.dumps(settings | {"modules_to_save": ["experts", "attn"]}))
    zeros = jax.tree.map(np.zeros_like, params)
    read = load_adapter(tmp_path / "x", *split(config, zeros))
    for leaf, x in flatten_dict(read.params, sep="/").items():
        if leaf.startswith("decoder/") and ("attention/" in leaf or "/experts/" in leaf):
            np.testing.assert_array_equal(x, flatten_dict(params, sep="/")[leaf])


@pytest.mark.slow
def test_a_trained_router_is_read_without_the_experts(tmp_path):
    """Its selection bias lies beside them, and is in the folder."""
    lora = replace(LORA, targets=("query",), trained=("router", "selection_bias"))
    config = replace(zoo.get("deepseek-v3").tiny(), adapter=lora)
    params = random_params(config)
    for name in ("x", "y"):
        save_adapter(tmp_path / name, config, params)
        config, params = load_adapter(tmp_path / name, *split(config, params))
        assert config.adapter is not None and config.adapter.trained
        trained = flatten_dict(split_parameters(config.adapter, params).trained, sep="/")
        ends = {path.rpartition("/feed_forward/")[2] for path in trained if not is_adapter(path)}
        assert ends == {"router/kernel", "selection_bias"}


def test_whole_tensors_that_files_hold_otherwise_are_refused(tmp_path):
    config = replace(zoo.get("llama-2-7b").tiny(), adapter=replace(LORA, trained=("final_norm",)))
    params = random_params(config)
    save_adapter(tmp_path / "x", config, params)
    path = tmp_path / "x" / "adapter_model.safetensors"
    experts = {"base_model.model.model.layers.0.mlp.experts.down_proj": np.zeros((2, 3))}
    save_file(load_file(path) | experts, path)
    with pytest.raises(ValueError, match=r"experts\.down_proj, which the files of this model hold"):
        load_adapter(tmp_path / "x", *split(config, params))


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("fields", [{}, {"use_dora": True}, {"use_rslora": True}])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "phi3", "gemma4_text"])
def test_logits_are_those_of_peft_both_ways(name, fields, tmp_path):
    reason = "compares with PEFT: pip install 'jaxformer[parity]'"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    peft = pytest.importorskip("peft", reason=reason)
    sizes = {"vocab_size": 53, "hidden_size": 48, "intermediate_size": 29, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 6, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 52}
    if name == "gpt2":
        sizes = {"vocab_size": 53, "n_positions": 24, "n_embd": 36, "n_layer": 3, "n_head": 6}
    if name == "gemma4_text":
        sizes |= {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        }
        sizes |= {"num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16}
        sizes |= {"hidden_size_per_layer_input": 11, "vocab_size_per_layer_input": 53}
        sizes |= {"num_kv_shared_layers": 2}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(name, **sizes)
    ).eval()
    model.save_pretrained(tmp_path / "base")
    options = peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", **fields)
    model = peft.get_peft_model(model, options).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "magnitude" in parameter_name:
                parameter.mul_(1 + 0.1 * torch.rand_like(parameter))
            elif "lora_" in parameter_name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
        expected = model(torch.tensor(TOKENS)).logits.numpy()
    model.save_pretrained(tmp_path / "theirs")
    config, params = load_adapter(tmp_path / "theirs", *load_pretrained(tmp_path / "base"))
    logits = np.asarray(jitted_forward(config)(params, TOKENS))
    largest = np.abs(expected).max()
    np.testing.assert_allclose(logits, expected, atol=1e-5 * largest)
    save_adapter(tmp_path / "ours", config, params, base=str(tmp_path / "base"))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    with torch.no_grad():
        back = model(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(back, expected, atol=1e-5 * largest)


TIED = {"tie_word_embeddings": True}
ROWS = {"layers_to_transform": [1]}


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "base_fields, fields",
    [
        ({}, {"target_modules": ["q_proj", "lm_head"]}),
        ({}, {"target_modules": ["q_proj", "embed_tokens"]}),
        (TIED, {"target_modules": ["q_proj", "embed_tokens"]}),
        (TIED, {"target_modules": ["q_proj", "lm_head"]}),
        (TIED, {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}),
        ({}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
        (TIED, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
        (TIED, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        ({}, {"target_modules": ["q_proj", "down_proj"], "use_dora": True, **ROWS}),
        ({}, {"target_modules": "all-linear", "exclude_modules": ["k_proj"]}),
        ({"attention_bias": True}, {"target_modules": ["v_proj"], "modules_to_save": ["q_proj"]}),
        ({}, {"target_modules": "all-linear", "modules_to_save": ["mlp"]}),
        ({}, {"target_modules": ["lm_head"], "modules_to_save": ["layers.1", "absent"]}),
    ],
)
def test_every_folder_of_peft_has_its_logits_both_ways(base_fields, fields, tmp_path):
    reason = "compares with PEFT: pip install 'jaxformer[parity]'"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    pytest.importorskip("peft", reason=reason)
    torch.manual_seed(0)
    sizes = {"vocab_size": 53, "hidden_size": 48, "intermediate_size": 29, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 6, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    base_config = transformers.LlamaConfig(**sizes, initializer_range=0.2, **base_fields)
    model = transformers.LlamaForCausalLM(base_config)
    model.save_pretrained(tmp_path / "base")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    compare_with_peft(model, fields, tmp_path)


def compare_with_peft(model, fields, tmp_path):
    """Logits of an adapted model whose base is in a folder, as read here, and written back."""
    import peft
    import torch

    model = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5, **fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
        expected = model(torch.tensor(TOKENS)).logits.numpy()
    model.save_pretrained(tmp_path / "theirs")
    config, params = load_adapter(tmp_path / "theirs", *load_pretrained(tmp_path / "base"))
    logits = np.asarray(jitted_forward(config)(params, TOKENS))
    largest = np.abs(expected).max()
    np.testing.assert_allclose(logits, expected, atol=1e-5 * largest)
    save_adapter(tmp_path / "ours", config, params, base=str(tmp_path / "base"))
    options = {"experts_implementation": "eager"}
    model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "ours", **options).eval()
    with torch.no_grad():
        back = model(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(back, expected, atol=1e-5 * largest)


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "name, fields",
    [
        ("gpt_neox", {"target_modules": ["dense", "lm_head", "embed_in"]}),
        ("gpt_neox", {"target_modules": ["dense"], "modules_to_save": ["lm_head"]}),
        ("nemotron_h", {"target_modules": ["q_proj", "up_proj", "embeddings", "lm_head"]}),
        ("nemotron_h", {"target_modules": ["q_proj"], "modules_to_save": ["norm_f"]}),
        ("hy_v3", {"target_modules": r".*shared_experts\.up_proj"}),
        ("kimi_linear", {"target_modules": ["f_a_proj", "f_b_proj"]}),
        ("olmo_hybrid", {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"]}),
        ("opt_350m", {"target_modules": "all-linear"}),
        ("deepseek_v2", {"target_modules": ["kv_b_proj", "kv_a_proj_with_mqa", "o_proj"]}),
        ("glm4_moe_lite", {"target_modules": ["kv_b_proj", "q_b_proj"], "use_rslora": True}),
        ("kimi_linear", {"target_modules": ["kv_b_proj", "q_proj"], "use_dora": True}),
        ("deepseek_v3_moe", {"target_modules": ["kv_b_proj"], "target_parameters": DENSE}),
        ("qwen2_moe", {"target_modules": ["shared_expert_gate", "v_proj"]}),
        ("lfm3", {"target_modules": ["g_proj", "o_proj", "w1"]}),
        ("lara_mini", {"target_modules": ["in_proj_qkv", "in_proj_z", "in_proj_b"]}),
        ("codegen", {"target_modules": ["qkv_proj", "out_proj"], "use_dora": True}),
        ("gpt_bigcode_mha", {"target_modules": ["c_attn", "c_proj"]}),
        ("mpt", {"target_modules": ["Wqkv", "up_proj"]}),
        ("opt_350m", {"target_modules": ["fc1"], "modules_to_save": ["project_in", "project_out"]}),
        ("gpt_oss", {"target_modules": ["lm_head"], "modules_to_save": ["self_attn"]}),
        ("exaone", {"target_modules": ["o_proj"], "modules_to_save": ["ln_f", "norm", "mlp"]}),
        ("sarvam_moe", {"target_modules": ["down_proj"], "modules_to_save": ["self_attn"]}),
        ("minimax", {"target_modules": ["lm_head"], "modules_to_save": ["self_attn"]}),
    ],
)
def test_modules_with_other_names_in_files_have_their_logits_both_ways(name, fields, tmp_path):
    reason = "compares with PEFT: pip install 'jaxformer[parity]'"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    pytest.importorskip("peft", reason=reason)
    write_golden_folder(read_golden(name), tmp_path / "base")
    torch.manual_seed(0)
    options = {"dtype": torch.float32, "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", **options)
    compare_with_peft(model, fields, tmp_path)


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["t5", "t5_v1_1"])
@pytest.mark.parametrize(
    "fields", [{"target_modules": ["q", "embed_tokens"]}, {"modules_to_save": ["embed_tokens"]}]
)
def test_the_table_of_encoder_and_decoder_has_its_logits_both_ways(name, fields, tmp_path):
    reason = "compares with PEFT: pip install 'jaxformer[parity]'"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    peft = pytest.importorskip("peft", reason=reason)
    write_golden_folder(read_golden(name), tmp_path / "base")
    kind, tokens = transformers.AutoModelForSeq2SeqLM, torch.tensor(TOKENS)
    options = {"target_modules": ["q"], "task_type": "SEQ_2_SEQ_LM"} | fields
    base = kind.from_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=5, **options)).eval()
    drawn = {}  # the same for the tables of encoder and decoder
    with torch.no_grad():
        unadapted = model.base_model(input_ids=tokens, decoder_input_ids=tokens).logits.numpy()
        for each, parameter in model.named_parameters():
            if parameter.requires_grad:
                key = each.partition("embed_tokens")[2] or each
                parameter.copy_(drawn.setdefault(key, 0.2 * torch.randn_like(parameter)))
        expected = model(input_ids=tokens, decoder_input_ids=tokens).logits.numpy()
    largest = np.abs(expected).max()
    assert np.abs(expected - unadapted).max() > 0.1 * largest
    model.save_pretrained(tmp_path / "theirs")
    config, params = load_adapter(tmp_path / "theirs", *load_pretrained(tmp_path / "base"))
    logits = jitted_forward(config)(params, TOKENS, source=TOKENS)
    np.testing.assert_allclose(logits, expected, atol=1e-5 * largest)
    save_adapter(tmp_path / "ours", config, params)
    base = kind.from_pretrained(tmp_path / "base")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    with torch.no_grad():
        back = model(input_ids=tokens, decoder_input_ids=tokens).logits.numpy()
    np.testing.assert_allclose(back, expected, atol=1e-5 * largest)


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_names_that_peft_takes_for_experts_or_refuses_are_its_own():
    reason = "compares with PEFT: pip install 'jaxformer[parity]'"
    conversion = pytest.importorskip("peft.utils.transformers_weight_conversion", reason=reason)
    patterns, names = conversion._MODEL_TO_CONVERSION_PATTERN, conversion._MOE_TARGET_MODULE_MAPPING
    kinds = {kind: patterns[kind] for kind in FAMILIES if patterns.get(kind) in names}
    ours = {kind: set(listed) for kind, listed in NAMES_OF_EXPERTS.items()}
    assert {kind: set(names[like]) for kind, like in kinds.items()} == ours
    source = inspect.getsource(importlib.import_module("peft.tuners.tuners_utils"))
    types = ast.literal_eval(re.search(r"mamba_model_types = (\{.*\})", source)[1])
    assert types & FAMILIES.keys() == NOT_ADAPTED.keys()


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", sorted(set(NAMES) - NOT_IN_TRANSFORMERS))
def test_modules_are_named_as_in_transformers(name, tmp_path):
    reason = "compares with transformers: pip install 'jaxformer[parity]'"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    golden = read_golden(name)
    (tmp_path / "config.json").write_text(json.dumps(golden.config))
    kind = getattr(transformers, golden.config["architectures"][0])
    with torch.device("meta"):
        model = kind(transformers.AutoConfig.from_pretrained(tmp_path))
    config = load_config(tmp_path)
    mappings = tensor_mappings(config)
    modules = {m.name for m in adaptable_modules(config, mappings, "stacked")}
    assert modules and modules <= {module for module, _ in model.named_modules()}
    named_otherwise = {x.hf_name for x in mappings} - model.state_dict().keys()
    assert named_otherwise == {x.hf_name for x in mappings if re.search(MERGED, x.hf_name)}
